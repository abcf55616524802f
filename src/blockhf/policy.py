"""What every policy of the optimizer has in common: settings that never change, and state kept elsewhere.

A policy is one choice of the method: which curvature, how to multiply with it, how to solve, how far to go,
how much to damp, how many samples to take. It is an object of frozen settings, so that it can be shared,
printed, compared and pickled. What it learns from step to step lives in the optimizer as a ``PolicyState``,
which the optimizer saves, restores and, on a mesh, gathers block by block.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

State = dict[str, Any]
"""Numbers, strings, tensors, and lists and mappings of them: what ``torch.load`` reads safely."""


class Policy(abc.ABC):  # noqa: B024 - what is abstract differs by the kind of policy
    """A choice of the method. Subclasses are frozen dataclasses of their settings."""

    def describe(self) -> str:
        """Kind and settings, the same text in every process.

        >>> from blockhf import Backtracking
        >>> Backtracking(shrink=0.25).describe()
        'Backtracking(shrink=0.25, sufficient=0.0001, max_tries=8, goes_on=False)'
        """
        settings = ", ".join(f"{name}={_plain(value)}" for name, value in vars(self).items())
        return f"{type(self).__name__}({settings})"


@dataclass
class PolicyState:
    """What a policy has learned.

    Attributes:
        shared: What belongs to no block in particular, the same on all ranks of a mesh.
        blocks: What belongs to a block, by the block's name. On a mesh a rank has its own blocks' alone.
        cache: What can be made again, such as traces. It is never saved.
    """

    shared: State = field(default_factory=dict)
    blocks: dict[str, State] = field(default_factory=dict)
    cache: dict[Any, Any] = field(default_factory=dict)

    def of(self, block: str) -> State:
        """The state of one block, empty at first."""
        return self.blocks.setdefault(block, {})

    def outline(self) -> PolicyState:
        """A copy with the same tensors and the same cache; policies put new tensors in place of old ones."""
        return PolicyState(copied(self.shared, clone=False), copied(self.blocks, clone=False), self.cache)

    def to_dict(self) -> State:
        """A copy as plain data."""
        return {"shared": copied(self.shared), "blocks": copied(self.blocks)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> PolicyState:
        """The state that ``to_dict`` gave."""
        return cls(copied(saved["shared"]), copied(saved["blocks"]))


def copied(value: Any, *, clone: bool = True) -> Any:
    """Nested mappings and lists with copies of their tensors, or with the same tensors."""
    if isinstance(value, (int, float, str)):  # most are, and asking for a mapping takes long
        return value
    if isinstance(value, Tensor):
        return value.detach().clone() if clone else value
    if isinstance(value, (list, tuple)):
        return [copied(item, clone=clone) for item in value]
    if isinstance(value, Mapping):
        return {key: copied(item, clone=clone) for key, item in value.items()}
    return value


def _plain(value: Any) -> str:
    if isinstance(value, Policy):
        return value.describe()
    return repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
