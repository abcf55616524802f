"""Kronecker factors of a network's Gauss-Newton matrix (Martens & Grosse, 2015).

Where inputs ``a`` are multiplied with a parameter matrix ``W``, the sample's share of ``W`` in the matrix is
``(a aᵀ) ⊗ (r rᵀ)``, with ``r`` the cotangent of the result. The mean of a product is taken for the product of
the means, ``A ⊗ S``, whose inverse is ``A⁻¹ ⊗ S⁻¹``: two small matrices instead of a large one.

The multiplications are found in autograd's graph, so it does not matter by which module or function they were
made: linear layers and convolutions, embeddings, attention, the steps of recurrent cells. Scales and shifts
of normalized inputs get a small matrix, other parameters that are not multiplied with anything a diagonal.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from blockhf.blocks import Block
from blockhf.curvature import Curvature, Noise
from blockhf.ledger import Ledger
from blockhf.linalg import BlockOperator, LinearOperator
from blockhf.objective import Evaluation
from blockhf.policy import PolicyState
from blockhf.preconditioners.base import Preconditioner
from blockhf.preconditioners.moments import Totals, damped_inverses, mean_eigenvalue, moments, times
from blockhf.preconditioners.parameter_uses import Use, find_uses
from blockhf.samples import Part, Samples
from blockhf.scalars import read

Factors = dict[str, dict[str, Tensor]]
"""Of a block: by the place of a parameter, the factors of inputs and cotangents and their inverses."""


@dataclass(frozen=True)
class Kronecker(Preconditioner):
    r"""Inverts :math:`A \otimes S + \lambda I` in factors, for every matrix of a network.

    The factors are averages over the steps, with the weight of the past growing to ``decay``. The damping is
    split as :math:`(A + \pi\sqrt\lambda I) \otimes (S + \sqrt\lambda / \pi\, I)` with
    :math:`\pi^2` the ratio of the mean eigenvalues of ``A`` and ``S``.

    Args:
        decay: The most weight that the past gets.
        every: The factors are inverted in the first ``every`` steps and then at each ``every``-th. Inverting
            costs about as much as one use of the inverse where a matrix is square, and is worth it.
        max_size: The largest factor; of a larger one only the diagonal is kept.
        seed: Of the random cotangents, which leave torch's own random numbers alone.
    """

    decay: float = 0.95
    every: int = 1
    max_size: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay is {self.decay}, but must be at least 0 and below 1.")
        if self.every < 1 or self.max_size < 1:
            raise ValueError(
                f"every and max_size are {self.every} and {self.max_size}, but must be at least 1."
            )

    def mean_diagonals(
        self, samples: Samples, curvature: Curvature, operator: BlockOperator, state: PolicyState
    ) -> Sequence[Tensor | None]:
        """From the factors' traces."""
        groups = self._measure(samples, curvature, operator, state)
        state.cache["measured"] = groups  # for ``prepare``, which is next
        return [
            _mean_diagonal(block, groups[block.name], _factors(state, block.name))
            if block.name in groups
            else None
            for block in samples.blocks
        ]

    def prepare(
        self,
        samples: Samples,
        curvature: Curvature,
        operator: BlockOperator,
        dampings: Sequence[float],
        state: PolicyState,
    ) -> Sequence[LinearOperator | None]:
        """The inverses; none for blocks whose matrix is stored, nor where the objective gives no outputs."""
        inverses: list[LinearOperator | None] = [None] * len(samples.blocks)
        groups = state.cache.pop("measured", None)
        if groups is None:
            groups = self._measure(samples, curvature, operator, state)
        chosen = [index for index, block in enumerate(samples.blocks) if block.name in groups]
        if not chosen:
            return inverses
        num_steps = state.shared["num_steps"]
        due = num_steps <= self.every or num_steps % self.every == 0
        names = {index: samples.blocks[index].name for index in chosen}
        factors = {index: _factors(state, names[index]) for index in chosen}
        late = [
            index
            for index in chosen
            if due or any(group.lacks_inverse(factors[index]) for group in groups[names[index]])
        ]
        if late:
            with samples.ledger.counting("inversion", *(names[index] for index in late)):
                for index in late:
                    _invert(groups[names[index]], factors[index], dampings[index])
        for index in chosen:
            inverses[index] = _Inverse(
                samples.blocks[index], groups[names[index]], factors[index], dampings[index], samples.ledger
            )
        return inverses

    def _measure(
        self, samples: Samples, curvature: Curvature, operator: BlockOperator, state: PolicyState
    ) -> dict[str, list[_Group]]:
        """Take the new step's factors into the averages.

        Returns:
            What belongs together, for each block whose matrix is not stored.
        """
        blocks = [
            block
            for index, block in enumerate(samples.blocks)
            if operator.dense(index) is None and operator.root(index) is None
        ]
        if not blocks:
            return {}
        totals = Totals()
        groups: dict[str, list[_Group]] = {}
        num_steps = state.shared["num_steps"] = state.shared.get("num_steps", 0) + 1
        names = tuple(block.name for block in blocks)
        with torch.enable_grad():
            for part in samples.parts:
                evaluation = samples.evaluate(part, fresh=True)
                if not evaluation.outputs:  # the loss alone, as will do for the Hessian
                    return {}
                with samples.ledger.counting("factors", part.shapes, names):
                    uses = find_uses(
                        evaluation.outputs, [param for block in blocks for param in block.params]
                    )
                    groups = _grouped(uses, blocks)
                    if not uses and samples.ledger.known("forward", part.shapes):
                        _warn_of_none(blocks, state)
                    draw = curvature.draw(evaluation, Noise(self.seed + num_steps, part.place))
                    self._backward(evaluation, part, draw, groups, uses, totals)
        totals.add_up(samples.ranks)
        weight = min(1 - 1 / num_steps, self.decay)
        for (block, place), own in _finite(totals.finish()).items():
            _average(_factors(state, block), place, own, weight)
        return groups

    def _backward(
        self,
        evaluation: Evaluation,
        part: Part,
        draw: Sequence[Tensor],
        groups: Mapping[str, Sequence[_Group]],
        uses: Mapping[Tensor, Sequence[Use]],
        totals: Totals,
    ) -> None:
        scale = part.weight**0.5
        everything = [group for own in groups.values() for group in own]
        factored = [(group, use) for group in everything if group.factored for use in uses[group.weight]]
        rest = [group for group in everything if not group.factored]
        wanted: list[Any] = [GradientEdge(use.node, 0) for _, use in factored]
        gradients = torch.autograd.grad(
            evaluation.outputs,
            wanted + [group.weight for group in rest],
            [cotangent * scale if scale else torch.zeros_like(cotangent) for cotangent in draw],
            retain_graph=True,  # the inputs are still read from it
            allow_unused=True,
        )
        with torch.no_grad():
            for (group, use), gradient in zip(factored, gradients, strict=False):
                if gradient is not None:
                    for inputs, cotangents, positions in moments(
                        use, gradient, group.bias is not None, self.max_size, group.weight.dtype
                    ):
                        if part.is_stand_in:
                            inputs, positions = torch.zeros_like(inputs), 0
                        other_side = use.flipped != group.flipped
                        totals.add(group.key, inputs, cotangents, positions, other_side=other_side)
            for group, gradient in zip(rest, gradients[len(factored) :], strict=True):
                square = torch.zeros_like(group.weight) if gradient is None else gradient.square()
                totals.add_diagonal(group.key, square.reshape(-1))


def _warn_of_none(blocks: Sequence[Block], state: PolicyState) -> None:
    """Say once that no matrices were found in autograd's graph, where even a plain product is not found."""
    matrices = [param for block in blocks for param in block.params if param.dim() > 1]
    if matrices and not state.cache.get("warned"):
        state.cache["warned"] = True
        weight = torch.ones(1, 1, requires_grad=True, device="cpu")
        if not find_uses([torch.ones(1, 1, device="cpu") @ weight], [weight]):
            warnings.warn(
                f"No Kronecker factors were found for {len(matrices)} matrices of the model, so a diagonal "
                f"takes their place. This version of torch, {torch.__version__}, names the nodes of "
                "autograd's graph in a new way. To have it so without a warning, pass "
                "preconditioner=Diagonal().",
                stacklevel=2,
            )


def _finite(sums: dict[tuple[str, str], dict[str, Tensor]]) -> dict[tuple[str, str], dict[str, Tensor]]:
    """Those whose numbers are all finite, by one wait for the device."""
    fine = read([torch.stack([own.isfinite().all() for own in each.values()]) for each in sums.values()])
    return {key: own for (key, own), flags in zip(sums.items(), fine, strict=True) if all(flags)}


def _factors(state: PolicyState, block: str) -> Factors:
    factors: Factors = state.of(block).setdefault("factors", {})
    return factors


def _average(factors: Factors, place: str, own: dict[str, Tensor], weight: float) -> None:
    """Take new factors into the averages, where the past has so much weight."""
    known = factors.get(place, {})
    if any(name not in known or known[name].shape != tensor.shape for name, tensor in own.items()):
        # New, or what is known belongs to a parameter that had this place before others were frozen.
        factors[place] = dict(own)
        return
    if any(known[name].dtype != own[name].dtype or known[name].device != own[name].device for name in own):
        # Loaded for parameters of another kind; inverses are made anew.
        known = factors[place] = {name: known[name].to(tensor) for name, tensor in own.items()}
    for name, tensor in own.items():  # not in place, so that an interrupted step leaves what was known
        known[name] = (known[name] * weight).add_(tensor, alpha=1 - weight)


def _invert(groups: Sequence[_Group], factors: Factors, damping: float) -> None:
    for group in groups:
        own = factors.get(group.place, {})
        if not group.factored or "inputs" not in own:
            continue
        inverses = damped_inverses(own["inputs"], own["cotangents"], damping)
        own["inverse inputs"], own["inverse cotangents"] = inverses


@dataclass(frozen=True, eq=False)
class _Inverse:
    """The approximate inverse of one block's damped matrix."""

    block: Block
    groups: Sequence[_Group]
    factors: Factors
    damping: float
    ledger: Ledger

    def __matmul__(self, vector: Tensor) -> Tensor:
        pieces = self.block.unflatten(vector)
        results: list[Tensor | None] = [None] * len(pieces)
        with self.ledger.counting("preconditioner", self.block.name):
            for group in self.groups:
                own = self.factors.get(group.place, {})
                if group.factored and "inverse inputs" in own:
                    for index, result in group.split(self._solve(own, group.join(pieces))):
                        results[index] = result
                else:
                    diagonal = None if group.factored else own.get("diagonal")
                    for index in group.members:
                        results[index] = self._scale(diagonal, pieces[index])
        return self.block.flatten(results)

    def _solve(self, own: Mapping[str, Tensor], matrix: Tensor) -> Tensor:
        return times(own["inverse cotangents"], times(own["inverse inputs"], matrix.mT).mT)

    def _scale(self, diagonal: Tensor | None, piece: Tensor) -> Tensor:
        if diagonal is None:
            return piece / (self.damping or 1.0)
        shift = (1e-6 * diagonal.mean()).clamp_min(self.damping)
        return piece / (diagonal.view(piece.shape) + torch.where(shift > 0, shift, 1.0))


@dataclass(frozen=True, eq=False)
class _Group:
    """A matrix with the bias that is added to its product, or a parameter by itself.

    Attributes:
        block: The block's name.
        index: Where the weight is in the block.
        weight: The parameter.
        factored: Whether it has factors, and not a diagonal.
        flipped: Whether the inputs belong to the rows and not to the columns.
        bias: Where the bias is in the block.
        num_groups: How many matrices it is, one below the other.
    """

    block: str
    index: int
    weight: Tensor
    factored: bool = False
    flipped: bool = False
    bias: int | None = None
    num_groups: int = 1

    @property
    def place(self) -> str:
        """Its name among the factors of its block."""
        return str(self.index)

    @property
    def key(self) -> tuple[str, str]:
        """Its name among the factors of all blocks."""
        return self.block, self.place

    def lacks_inverse(self, factors: Factors) -> bool:
        own = factors.get(self.place, {})
        return self.factored and "inputs" in own and "inverse inputs" not in own

    @property
    def members(self) -> list[int]:
        """Where its parameters are in the block."""
        return [self.index] if self.bias is None else [self.index, self.bias]

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """Cotangents by inputs; the bias is the last column."""
        piece = pieces[self.index]
        stack = () if self.num_groups == 1 else (self.num_groups,)
        matrix = piece.reshape(*stack, len(piece) // self.num_groups, -1)
        matrix = matrix.mT if self.flipped else matrix
        if self.bias is None:
            return matrix
        return torch.cat([matrix, pieces[self.bias].reshape(*matrix.shape[:-1], 1)], dim=-1)

    def split(self, matrix: Tensor) -> Iterator[tuple[int, Tensor]]:
        if self.bias is not None:
            yield self.bias, matrix[..., -1]
            matrix = matrix[..., :-1]
        yield self.index, matrix.mT if self.flipped else matrix


def _grouped(uses: Mapping[Tensor, Sequence[Use]], blocks: Sequence[Block]) -> dict[str, list[_Group]]:
    """Which parameters of each block belong together, and which of them have factors."""
    added: dict[Tensor, set[Tensor]] = {}  # to which matrices' products a bias is added
    for weight, own in uses.items():
        for use in own:
            if use.bias is not None:
                added.setdefault(use.bias, set()).add(weight)
    groups: dict[str, list[_Group]] = {}
    for block in blocks:
        position = {param: index for index, param in enumerate(block.params)}
        groups[block.name] = own_groups = []
        taken: set[int] = set()
        for index, param in enumerate(block.params):
            own = uses.get(param, ())
            if not _have_factors(param, own):
                continue
            # Of an embedding that is the head as well, the head's inputs are taken for the inputs.
            first = next((use for use in own if use.kind != "embedding"), own[0])
            bias = first.bias
            rows = param.shape[1] if first.flipped else param.shape[0]
            joined = (
                bias is not None
                and len({use.flipped for use in own}) == 1
                and all(use.bias is bias for use in own)
                and added[bias] == {param}
                and bias in position
                and bias.numel() == rows
            )
            place = position[bias] if joined and bias is not None else None
            own_groups.append(_Group(block.name, index, param, True, first.flipped, place, first.num_groups))
            taken.update({index} if place is None else {index, place})
        own_groups += [
            _Group(block.name, index, param) for index, param in enumerate(block.params) if index not in taken
        ]
    return groups


def _have_factors(param: Tensor, uses: Sequence[Use]) -> bool:
    """Whether all uses of a parameter have factors that can be added up."""
    scales = [use.kind in ("scale", "shift") for use in uses]
    if not uses or any(scales):
        return bool(uses) and all(scales)
    embedded = {use.flipped for use in uses if use.kind == "embedding"}
    multiplied = {use.flipped for use in uses if use.kind != "embedding"}
    num_groups = {use.num_groups for use in uses}
    fit = num_groups == {1} or len(num_groups) == len(multiplied) == 1
    return param.dim() > 1 and embedded.isdisjoint(multiplied) and fit


def parameters_with_factors(outputs: Sequence[Tensor], blocks: Sequence[Block]) -> list[int]:
    """For each block how many of its parameters have Kronecker factors; the others have a diagonal."""
    groups = _grouped(find_uses(outputs, [param for block in blocks for param in block.params]), blocks)
    return [
        sum(
            block.params[index].numel()
            for group in groups[block.name]
            if group.factored
            for index in group.members
        )
        for block in blocks
    ]


def _mean_diagonal(block: Block, groups: Sequence[_Group], factors: Factors) -> Tensor:
    """Of the block's matrix, as the factors and diagonals have it."""
    total = block.params[0].new_zeros(())
    for group in groups:
        own = factors.get(group.place, {})
        if group.factored and "inputs" in own:
            A, S = own["inputs"], own["cotangents"]
            products = mean_eigenvalue(A) * A.shape[-1] * mean_eigenvalue(S) * S.shape[-1]
            total = total + products.sum()
        elif "diagonal" in own:
            total = total + own["diagonal"].sum()
    return total / block.size
