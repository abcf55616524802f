"""Sums over the processes that have samples between them; one process alone sums nothing."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from blockhf.linalg import BlockOperator


class Ranks(abc.ABC):
    """Processes that have the samples of one mean between them, each with its share of every sum."""

    @abc.abstractmethod
    def sum(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The sums of tensors over the processes."""

    @abc.abstractmethod
    def gather(self, tensor: Tensor) -> Tensor:
        """The rows of all processes, one after the other."""

    def agree(self, holds: bool, device: torch.device) -> bool:
        """Whether something holds in all processes."""
        (missing,) = self.sum([torch.tensor(float(not holds), device=device)])
        return not bool(missing)

    @abc.abstractmethod
    def sum_operator(self, operator: BlockOperator) -> BlockOperator:
        """The matrix whose products are the sums of the processes' products."""


class Alone(Ranks):
    """This process has all the samples."""

    def sum(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def agree(self, holds: bool, device: torch.device) -> bool:
        return holds

    def sum_operator(self, operator: BlockOperator) -> BlockOperator:
        return operator
