"""A model's curvature at one point, as operators on blocks.

A curvature says *which* matrix: ``GaussNewton``, ``Hessian``, ``EmpiricalFisher``, ``MonteCarloFisher``.
Products say *how* to multiply with it: ``DoubleBackward`` works on everything, ``Traced`` is faster,
``Formed`` is for small blocks, and ``Auto`` chooses. ``linearize`` gives the matrix without the optimizer.
"""

from blockhf.curvature.auto import Auto
from blockhf.curvature.base import Curvature, JacobianForm, Products
from blockhf.curvature.double_backward import DoubleBackward
from blockhf.curvature.draws import Noise
from blockhf.curvature.factored import Factored
from blockhf.curvature.fisher import EmpiricalFisher, MonteCarloFisher
from blockhf.curvature.formed import Formed
from blockhf.curvature.gauss_newton import GaussNewton
from blockhf.curvature.hessian import Hessian
from blockhf.curvature.linearize import CurvatureMatrix, SymmetricMatrix, linearize
from blockhf.curvature.traced import Traced

__all__ = [
    "Auto",
    "Curvature",
    "CurvatureMatrix",
    "DoubleBackward",
    "EmpiricalFisher",
    "Factored",
    "Formed",
    "GaussNewton",
    "Hessian",
    "JacobianForm",
    "MonteCarloFisher",
    "Noise",
    "Products",
    "SymmetricMatrix",
    "Traced",
    "linearize",
]
