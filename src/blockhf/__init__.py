"""Block-diagonal Hessian-free optimization for PyTorch."""

from blockhf import blocks
from blockhf.curvature import EmpiricalFisher, GaussNewton, Hessian, MonteCarloFisher
from blockhf.damping import Constant, LevenbergMarquardt
from blockhf.optimizer import BlockHF
from blockhf.report import BlockReport, StepReport
from blockhf.search import Backtracking, BestIterate, FixedStep
from blockhf.solvers import ConjugateGradient, Status, conjugate_gradient

__version__ = "0.1.0"

__all__ = [
    "Backtracking",
    "BestIterate",
    "BlockHF",
    "BlockReport",
    "ConjugateGradient",
    "Constant",
    "EmpiricalFisher",
    "FixedStep",
    "GaussNewton",
    "Hessian",
    "LevenbergMarquardt",
    "MonteCarloFisher",
    "Status",
    "StepReport",
    "blocks",
    "conjugate_gradient",
]
