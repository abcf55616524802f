"""Block-diagonal Hessian-free optimization for PyTorch."""

from blockhf import blocks
from blockhf.curvature import (
    Auto,
    DoubleBackward,
    EmpiricalFisher,
    Formed,
    GaussNewton,
    Hessian,
    MonteCarloFisher,
    Traced,
)
from blockhf.damping import Constant, LevenbergMarquardt
from blockhf.optimizer import BlockHF
from blockhf.report import BlockReport, StepReport
from blockhf.search import Backtracking, BestIterate, FixedStep
from blockhf.solvers import Cholesky, ConjugateGradient, Status, conjugate_gradient

__version__ = "0.1.0"

__all__ = [
    "Auto",
    "Backtracking",
    "BestIterate",
    "BlockHF",
    "BlockReport",
    "Cholesky",
    "ConjugateGradient",
    "Constant",
    "DoubleBackward",
    "EmpiricalFisher",
    "FixedStep",
    "Formed",
    "GaussNewton",
    "Hessian",
    "LevenbergMarquardt",
    "MonteCarloFisher",
    "Status",
    "StepReport",
    "Traced",
    "blocks",
    "conjugate_gradient",
]
