"""Block-diagonal Hessian-free optimization for PyTorch."""

from blockhf import blocks, curvature
from blockhf.batches import gather
from blockhf.blocks import Block
from blockhf.check import CheckReport, check
from blockhf.curvature import (
    Auto,
    Curvature,
    DoubleBackward,
    EmpiricalFisher,
    Factored,
    Formed,
    GaussNewton,
    Hessian,
    MonteCarloFisher,
    Products,
    Traced,
)
from blockhf.examination import Finding
from blockhf.fitting import LeastSquaresResult, least_squares
from blockhf.linalg import (
    BlockOperator,
    Cholesky,
    ConjugateGradient,
    Dense,
    DenseBlocks,
    ForwardingOperator,
    LinearOperator,
    PendingSolution,
    Precondition,
    Solution,
    Solver,
    Status,
    System,
    conjugate_gradient,
)
from blockhf.meshes import mesh
from blockhf.objective import Closure, Evaluation
from blockhf.optimizer import BlockHF
from blockhf.point import Point
from blockhf.policies import (
    AllSamples,
    Backtracking,
    ByCoefficient,
    Choice,
    Constant,
    DampingRule,
    FixedStep,
    Geodesic,
    LevenbergMarquardt,
    NoiseScale,
    Outcome,
    Proposal,
    RelativeDamping,
    Sampling,
    Search,
    Situation,
    StepCost,
    Subspace,
)
from blockhf.policy import Policy, PolicyState, State
from blockhf.preconditioners import Diagonal, Identity, Kronecker, Preconditioner
from blockhf.report import BlockReport, StepReport
from blockhf.samples import Samples

__version__ = "0.2.0"

__all__ = [
    "AllSamples",
    "Auto",
    "Backtracking",
    "Block",
    "BlockHF",
    "BlockOperator",
    "BlockReport",
    "ByCoefficient",
    "CheckReport",
    "Choice",
    "Cholesky",
    "Closure",
    "ConjugateGradient",
    "Constant",
    "Curvature",
    "DampingRule",
    "Dense",
    "DenseBlocks",
    "Diagonal",
    "DoubleBackward",
    "EmpiricalFisher",
    "Evaluation",
    "Factored",
    "Finding",
    "FixedStep",
    "Formed",
    "ForwardingOperator",
    "GaussNewton",
    "Geodesic",
    "Hessian",
    "Identity",
    "Kronecker",
    "LeastSquaresResult",
    "LevenbergMarquardt",
    "LinearOperator",
    "MonteCarloFisher",
    "NoiseScale",
    "Outcome",
    "PendingSolution",
    "Point",
    "Policy",
    "PolicyState",
    "Precondition",
    "Preconditioner",
    "Products",
    "Proposal",
    "RelativeDamping",
    "Samples",
    "Sampling",
    "Search",
    "Situation",
    "Solution",
    "Solver",
    "State",
    "Status",
    "StepCost",
    "StepReport",
    "Subspace",
    "System",
    "Traced",
    "blocks",
    "check",
    "conjugate_gradient",
    "curvature",
    "gather",
    "least_squares",
    "mesh",
]
