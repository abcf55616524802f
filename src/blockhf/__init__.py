"""Block-diagonal Hessian-free optimization for PyTorch."""

from blockhf import blocks, curvature
from blockhf.blocks import Block
from blockhf.curvature import (
    Auto,
    Curvature,
    DoubleBackward,
    EmpiricalFisher,
    Formed,
    GaussNewton,
    Hessian,
    MonteCarloFisher,
    Products,
    Traced,
)
from blockhf.linalg import (
    BlockOperator,
    Cholesky,
    ConjugateGradient,
    Dense,
    DenseBlocks,
    ForwardingOperator,
    LinearOperator,
    Precondition,
    Solution,
    Solver,
    Status,
    System,
    conjugate_gradient,
)
from blockhf.meshes import mesh
from blockhf.objective import Evaluation
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
    LevenbergMarquardt,
    NoiseScale,
    Outcome,
    Proposal,
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

__version__ = "0.1.0"

__all__ = [
    "AllSamples",
    "Auto",
    "Backtracking",
    "Block",
    "BlockHF",
    "BlockOperator",
    "BlockReport",
    "ByCoefficient",
    "Choice",
    "Cholesky",
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
    "FixedStep",
    "Formed",
    "ForwardingOperator",
    "GaussNewton",
    "Hessian",
    "Identity",
    "Kronecker",
    "LevenbergMarquardt",
    "LinearOperator",
    "MonteCarloFisher",
    "NoiseScale",
    "Outcome",
    "Point",
    "Policy",
    "PolicyState",
    "Precondition",
    "Preconditioner",
    "Products",
    "Proposal",
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
    "conjugate_gradient",
    "curvature",
    "mesh",
]
