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
from blockhf.damping import ByCoefficient, Constant, LevenbergMarquardt
from blockhf.distributed import mesh
from blockhf.optimizer import BlockHF
from blockhf.preconditioners import (
    CurvatureDraws,
    Diagonal,
    Hutchinson,
    Identity,
    Kronecker,
    Nystrom,
    SignedGradients,
)
from blockhf.report import BlockReport, StepReport
from blockhf.sampling import AllSamples, NoiseScale
from blockhf.search import Backtracking, BestIterate, FixedStep, Subspace
from blockhf.solvers import (
    Cholesky,
    ConjugateGradient,
    GaussSeidel,
    Precondition,
    Status,
    conjugate_gradient,
)

__version__ = "0.1.0"

__all__ = [
    "AllSamples",
    "Auto",
    "Backtracking",
    "BestIterate",
    "BlockHF",
    "BlockReport",
    "ByCoefficient",
    "Cholesky",
    "ConjugateGradient",
    "Constant",
    "CurvatureDraws",
    "Diagonal",
    "DoubleBackward",
    "EmpiricalFisher",
    "FixedStep",
    "Formed",
    "GaussNewton",
    "GaussSeidel",
    "Hessian",
    "Hutchinson",
    "Identity",
    "Kronecker",
    "LevenbergMarquardt",
    "MonteCarloFisher",
    "NoiseScale",
    "Nystrom",
    "Precondition",
    "SignedGradients",
    "Status",
    "StepReport",
    "Subspace",
    "Traced",
    "blocks",
    "conjugate_gradient",
    "mesh",
]
