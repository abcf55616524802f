"""Approximate inverses that make conjugate gradients need fewer iterations.

``Kronecker`` is for networks: a factor pair for each matrix that inputs are multiplied with, and a diagonal
for what is left. ``Diagonal`` is for any block.
"""

from blockhf.preconditioners.base import Identity, Preconditioner
from blockhf.preconditioners.diagonal import Diagonal
from blockhf.preconditioners.kronecker import Kronecker

__all__ = ["Diagonal", "Identity", "Kronecker", "Preconditioner"]
