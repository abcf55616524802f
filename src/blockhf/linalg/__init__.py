"""Linear algebra on matrices known only through their products. Nothing here has heard of networks."""

from blockhf.linalg.conjugate_gradient import PendingSolution, Solution, Status, conjugate_gradient, settle
from blockhf.linalg.lanczos import lanczos
from blockhf.linalg.operators import (
    BlockOperator,
    CountedProducts,
    Damped,
    Dense,
    DenseBlocks,
    Described,
    DiagonalBlock,
    ForwardingOperator,
    LinearOperator,
    Root,
    Scaled,
    Shifted,
    factorizable,
)
from blockhf.linalg.solvers import Cholesky, ConjugateGradient, Precondition, Solver, System

__all__ = [
    "BlockOperator",
    "Cholesky",
    "ConjugateGradient",
    "CountedProducts",
    "Damped",
    "Dense",
    "DenseBlocks",
    "Described",
    "DiagonalBlock",
    "ForwardingOperator",
    "LinearOperator",
    "PendingSolution",
    "Precondition",
    "Root",
    "Scaled",
    "Shifted",
    "Solution",
    "Solver",
    "Status",
    "System",
    "conjugate_gradient",
    "factorizable",
    "lanczos",
    "settle",
]
