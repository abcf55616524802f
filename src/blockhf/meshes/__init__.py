"""Block-diagonal Hessian-free optimization by one process or by many: a mesh of ``block`` x ``data``."""

from blockhf.meshes.base import Local, Mesh, SolvedBlock
from blockhf.meshes.collectives import Collectives, RankError, Traffic, mesh
from blockhf.meshes.distributed import Distributed, SumOverRanks, merged
from blockhf.meshes.placement import Placement, assign, best_shape, estimated_costs

__all__ = [
    "Collectives",
    "Distributed",
    "Local",
    "Mesh",
    "Placement",
    "RankError",
    "SolvedBlock",
    "SumOverRanks",
    "Traffic",
    "assign",
    "best_shape",
    "estimated_costs",
    "merged",
    "mesh",
]
