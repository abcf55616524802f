"""Block-diagonal Hessian-free optimization by many processes: a ``DeviceMesh`` of ``block`` x ``data``."""

from blockhf.distributed.crew import Crew, Summed, merged
from blockhf.distributed.placement import (
    Ownership,
    Placement,
    assign,
    best_shape,
    estimated_costs,
    share_out,
)
from blockhf.distributed.team import RankError, Team, Traffic, mesh

__all__ = [
    "Crew",
    "Ownership",
    "Placement",
    "RankError",
    "Summed",
    "Team",
    "Traffic",
    "assign",
    "best_shape",
    "estimated_costs",
    "merged",
    "mesh",
    "share_out",
]
