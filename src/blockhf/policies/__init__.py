"""The optimizer's choices: how much to damp, how many samples to take, how far to go."""

from blockhf.policies.damping import (
    ByCoefficient,
    Constant,
    DampingRule,
    LevenbergMarquardt,
    Outcome,
    RelativeDamping,
)
from blockhf.policies.geodesic import Geodesic
from blockhf.policies.sampling import AllSamples, NoiseScale, Sampling, StepCost
from blockhf.policies.search import Backtracking, Choice, FixedStep, Proposal, Search, Situation, measured
from blockhf.policies.subspace import Subspace
from blockhf.policies.walk import AdamWalk, NoWalk, Stretch, Walk

__all__ = [
    "AdamWalk",
    "AllSamples",
    "Backtracking",
    "ByCoefficient",
    "Choice",
    "Constant",
    "DampingRule",
    "FixedStep",
    "Geodesic",
    "LevenbergMarquardt",
    "NoWalk",
    "NoiseScale",
    "Outcome",
    "Proposal",
    "RelativeDamping",
    "Sampling",
    "Search",
    "Situation",
    "StepCost",
    "Stretch",
    "Subspace",
    "Walk",
    "measured",
]
