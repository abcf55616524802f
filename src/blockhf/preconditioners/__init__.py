"""Approximate inverses that make conjugate gradients need fewer iterations.

``Kronecker`` is for networks: a factor pair for each matrix that inputs are multiplied with, and a diagonal
for what is left. ``Diagonal`` and ``Nystrom`` are for any block.
"""

from blockhf.preconditioners.diagonal import CurvatureDraws, Diagonal, Hutchinson, SignedGradients
from blockhf.preconditioners.kronecker import Kronecker
from blockhf.preconditioners.nystrom import Nystrom
from blockhf.preconditioners.protocol import Identity, Preconditioner

__all__ = [
    "CurvatureDraws",
    "Diagonal",
    "Hutchinson",
    "Identity",
    "Kronecker",
    "Nystrom",
    "Preconditioner",
    "SignedGradients",
]
