"""Partitions of a model's parameters into blocks, and the flat vector of a block.

A block is a parameter group of the optimizer. The functions below return such groups, with the names
of the parameters kept, so they can be passed on as they are or edited first:

>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
>>> [(group["name"], [name for name, _ in group["params"]]) for group in by_layer(model)]
[('0', ['0.weight', '0.bias']), ('2', ['2.weight', '2.bias'])]

Whatever the partition, every trainable parameter is in exactly one block, frozen parameters are in
none, and a parameter that is used under several names (tied weights) counts once, under the first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockhf._torch import is_distributed_tensor

Group = dict[str, Any]
Named = list[tuple[str, Tensor]]

ROOT = "(root)"
"""Name of the block of those parameters that belong to the model itself and to no submodule."""


def single(model: nn.Module) -> list[Group]:
    """All parameters in one block: ordinary Hessian-free optimization."""
    return _groups({"all": _trainable(model)})


def by_module(model: nn.Module, depth: int = 1) -> list[Group]:
    """One block per submodule at ``depth``, e.g. ``encoder`` and ``decoder`` at depth 1.

    A submodule that ends above ``depth`` is a block of its own.
    """
    if depth < 1:
        raise ValueError(f"depth is {depth}, but must be at least 1. For one block use blocks.single(model).")
    return _groups(_gather(_trainable(model), lambda owner: ".".join(owner[:depth])))


def by_layer(model: nn.Module) -> list[Group]:
    """One block per module that directly owns parameters."""
    return _groups(_gather(_trainable(model), ".".join))


def by_pattern(model: nn.Module, patterns: Mapping[str, str]) -> list[Group]:
    r"""One block per regular expression; a parameter belongs to the first that is found in its name.

    Args:
        model: The model.
        patterns: Block name to pattern, in order, e.g. ``{"encoder": r"^encoder\.", "rest": ""}``.

    Raises:
        ValueError: If a pattern matches nothing that the patterns before it left, or if a parameter
            matches none.
    """
    members: dict[str, Named] = {name: [] for name in patterns}
    rest: list[str] = []
    for name, param in _trainable(model):
        owner = next((block for block, pattern in patterns.items() if re.search(pattern, name)), None)
        if owner is None:
            rest.append(name)
        else:
            members[owner].append((name, param))
    for block, pattern in patterns.items():
        if not members[block]:
            raise ValueError(
                f"Pattern {pattern!r} of block {block!r} matches no parameter that is left for it. "
                "Mend or remove it; patterns are tried in order, and the first match counts."
            )
    if rest:
        raise ValueError(_in_no_block(rest))
    return _groups(members)


def by_size(model: nn.Module, num_blocks: int) -> list[Group]:
    """``num_blocks`` runs of consecutive parameters, the largest run as small as can be."""
    named = _trainable(model)
    if not 1 <= num_blocks <= len(named):
        raise ValueError(
            f"num_blocks is {num_blocks}, but must be between 1 and the number of trainable "
            f"parameter tensors, which is {len(named)}."
        )
    bounds = _balance([param.numel() for _, param in named], num_blocks)
    return _groups({f"block{i}": named[start:stop] for i, (start, stop) in enumerate(bounds)})


def check(model: nn.Module, groups: Sequence[Group]) -> Sequence[Group]:
    """Return ``groups`` if they partition the trainable parameters of ``model``, else raise.

    For groups written by hand: the optimizer alone cannot know which parameters were forgotten. Where a
    group gives its parameters by a generator, such as ``model.parameters()``, the result has a list.

    >>> model = nn.Linear(2, 1)
    >>> check(model, [{"params": [model.weight]}])
    Traceback (most recent call last):
    ValueError: 1 parameter is in no block: bias. Add a group for it, or freeze it with requires_grad_(False).
    """
    groups = [{**group, "params": _as_list(group["params"])} for group in groups]
    names = {param: name for name, param in model.named_parameters()}
    owner: dict[Tensor, str] = {}
    for index, group in enumerate(groups):
        block = str(group.get("name", f"block{index}"))
        params = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
        check_block(block, [(names.get(param, "a parameter of no name"), param) for param in params])
        for param in params:
            if param not in names:
                raise ValueError(f"Block {block!r} holds a tensor that is no parameter of the model.")
            if param in owner:
                raise ValueError(_in_two_blocks(names[param], owner[param], block))
            owner[param] = block
    if missing := [name for param, name in names.items() if param.requires_grad and param not in owner]:
        raise ValueError(_in_no_block(missing))
    return groups


def check_block(block: str, named: Named) -> None:
    """Raise if the parameters cannot be one flat vector of numbers to optimize."""
    if not named:
        raise ValueError(f"Block {block!r} is empty. Give it parameters or leave it out.")
    seen: dict[Tensor, str] = {}
    for name, param in named:
        if not isinstance(param, Tensor):
            raise ValueError(f"Block {block!r} holds {name}, a {type(param).__name__} and not a tensor.")
        if param in seen:
            raise ValueError(_in_two_blocks(name, block, block))
        seen[param] = name
        if is_distributed_tensor(param):
            raise ValueError(
                f"Parameter {name} of block {block!r} is a DTensor, of which this process has a piece (FSDP, "
                "tensor parallelism). Give the optimizer a model with whole parameters on each rank, and let "
                "blockhf.mesh(block=..., data=...) share out the work."
            )
        if not param.is_floating_point():
            raise ValueError(
                f"Parameter {name} of block {block!r} is of {param.dtype}; only real floating-point "
                "parameters can be optimized."
            )
        if not param.requires_grad:
            raise ValueError(
                f"Parameter {name} of block {block!r} has no gradient: it is frozen. Take it out of the "
                "group, or thaw it with requires_grad_(True)."
            )
    for what in ("device", "dtype"):
        kinds = sorted({str(getattr(param, what)) for _, param in named})
        if len(kinds) > 1:
            raise ValueError(
                f"Block {block!r} mixes parameters of {what} {' and '.join(kinds)}. "
                f"Give each {what} a block of its own."
            )


@dataclass(frozen=True, eq=False)
class Block:
    """The parameters of one block and the one flat vector that stands for them."""

    name: str
    params: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """Number of entries of the flat vector."""
        return sum(param.numel() for param in self.params)

    def flatten(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """One flat vector of tensors that are shaped like the parameters; ``None`` stands for zeros."""
        return torch.cat(
            [
                param.new_zeros(param.numel()) if tensor is None else tensor.reshape(-1)
                for param, tensor in zip(self.params, tensors, strict=True)
            ]
        )

    def unflatten(self, vector: Tensor) -> list[Tensor]:
        """Views of ``vector``, shaped like the parameters."""
        pieces = torch.split(vector, [param.numel() for param in self.params])
        return [piece.view(param.shape) for piece, param in zip(pieces, self.params, strict=True)]

    def values(self) -> Tensor:
        """A flat copy of the parameters."""
        return self.flatten([param.detach() for param in self.params])

    def assign_(self, vector: Tensor) -> None:
        """Write ``vector`` into the parameters, which stay the same tensors in the same storage."""
        with torch.no_grad():
            for param, value in zip(self.params, self.unflatten(vector), strict=True):
                param.copy_(value)

    def visit_(self, vector: Tensor) -> None:
        """Like ``assign_``, unseen by autograd: a graph made before is valid again after the return."""
        for param, value in zip(self.params, self.unflatten(vector), strict=True):
            param.data.copy_(value)


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _trainable(model: nn.Module) -> Named:
    named: Named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not named:
        raise ValueError("The model has no trainable parameter. Thaw some with requires_grad_(True).")
    return named


def _gather(named: Named, block_of: Any) -> dict[str, Named]:
    members: dict[str, Named] = {}
    for name, param in named:
        owner = name.split(".")[:-1]
        members.setdefault(block_of(owner) or ROOT, []).append((name, param))
    return members


def _groups(members: Mapping[str, Named]) -> list[Group]:
    for block, named in members.items():
        check_block(block, named)
    return [{"params": list(named), "name": block} for block, named in members.items()]


def _balance(sizes: Sequence[int], num_runs: int) -> list[tuple[int, int]]:
    """Split ``sizes`` into ``num_runs`` non-empty runs with the least largest sum."""
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if _fits(sizes, num_runs, middle):
            high = middle
        else:
            low = middle + 1

    runs: list[tuple[int, int]] = []
    start = total = 0
    for i, size in enumerate(sizes):
        # A run also ends where only just enough sizes are left to give every other run one.
        full = total + size > low or len(sizes) - i < num_runs - len(runs)
        if i > start and full:
            runs.append((start, i))
            start, total = i, 0
        total += size
    return [*runs, (start, len(sizes))]


def _fits(sizes: Sequence[int], num_runs: int, limit: int) -> bool:
    runs, total = 1, 0
    for size in sizes:
        if total + size > limit:
            runs, total = runs + 1, 0
        total += size
    return runs <= num_runs


def _in_no_block(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    one = len(names) == 1
    count, them = ("1 parameter is", "it") if one else (f"{len(names)} parameters are", "them")
    return (
        f"{count} in no block: {shown}. Add a group for {them}, or freeze {them} with requires_grad_(False)."
    )


def _in_two_blocks(name: str, first: str, second: str) -> str:
    if first == second:
        return f"Parameter {name} is twice in block {first!r}. Name it once."
    return f"Parameter {name} is in two blocks, {first!r} and {second!r}. Leave it in one of them."
