"""Blocks on their way in small steps: where each of them is, and what they keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockhf._torch import copy_each
from blockhf.blocks import Block
from blockhf.policies import AdamWalk
from blockhf.policy import PolicyState, State
from blockhf.rotation import Rotation, Side, affordable_sides


class Walker:
    """Blocks of one device and type on their way, as one flat vector, with what they keep on it."""

    def __init__(
        self,
        blocks: Sequence[Block],
        shown: Sequence[Tensor],
        sides: Sequence[Sequence[Side]],
        states: Sequence[State],
    ) -> None:
        self.blocks, self._sizes = blocks, [block.size for block in blocks]
        self._shapes = [[list(param.shape) for param in block.params] for block in blocks]
        # Where some parameters are frozen by now, or thawed, nothing of a block is known.
        states = [
            state if state.get("shapes", own) == own else {}
            for state, own in zip(states, self._shapes, strict=True)
        ]
        names = ", ".join(block.name for block in blocks)
        self.joint = Block(names, tuple(param for block in blocks for param in block.params))
        self.is_elsewhere = any("offset" in state for state in states)
        self._shown, self._states = shown, states
        self.value = self._at("offset")
        self._mean, self._square = (self._kept(name) for name in ("mean", "square"))
        # The sum of small steps: those before are kept by how far they are from what is shown.
        self._num_kept = max(int(state.get("num_added", 0)) for state in states)
        self._total: Tensor | None = None
        self._num_added = 0
        self.sides = [
            [Side(*one) for one in state["sides"]] if "sides" in state else own
            for state, own in zip(states, sides, strict=True)
        ]
        self._rotations = list(map(Rotation, self.sides, states, shown))
        self._into = list(zip(self.joint.params, self.joint.unflatten(self.value), strict=True))

    def split(self, vector: Tensor) -> Sequence[Tensor]:
        """The parts of a vector that are those of the blocks, as views."""
        return torch.split(vector, self._sizes)

    def show(self) -> None:
        """Write where they are into the parameters."""
        with torch.no_grad():
            copy_each(self._into)

    def move(
        self,
        policy: AdamWalk,
        gradient: Tensor,
        decays: Sequence[float],
        rates: Sequence[float],
        count: int,
        *,
        adds: bool,
    ) -> None:
        """Take a small step, the ``count``-th, which uses the gradient up; ``adds`` it to the average."""
        if any(decays):
            for own, value, decay in zip(self.split(gradient), self.split(self.value), decays, strict=True):
                own.add_(value, alpha=decay)
        kept = map(self.split, (gradient, self._mean, self._square))
        for rotation, own, mean, square in zip(self._rotations, *kept, strict=True):
            rotation.learn(own, mean, square, count)
            rotation.there_(own)
        turned = policy.direction(gradient, self._mean, self._square, count)
        for rotation, own in zip(self._rotations, self.split(turned), strict=True):
            rotation.back_(own)
        if len(set(rates)) == 1:
            self.value.add_(turned, alpha=rates[0])
        else:
            for value, own, rate in zip(self.split(self.value), self.split(turned), rates, strict=True):
                value.add_(own, alpha=rate)
        if adds:
            self._total = self.value.clone() if self._total is None else self._total.add_(self.value)
            self._num_added += 1

    @property
    def start(self) -> Tensor:
        """Where the stretch has begun."""
        return self._at("start", "offset")

    def decay(self, shares: Sequence[float]) -> None:
        """Shrink each block by a share of where it started."""
        if any(shares):
            num_added = self._num_kept + self._num_added
            self._total = torch.zeros_like(self.value) if self._total is None else self._total
            for vector, number in ((self.value, 1), (self._total, num_added)):
                for own, start, share in zip(*map(self.split, (vector, self.start)), shares, strict=True):
                    own.sub_(start, alpha=share * number)

    def average(self) -> Tensor:
        """The mean over the small steps that were added."""
        if self._total is not None and not self._num_kept:
            return self._total / self._num_added
        shown = torch.cat(list(self._shown))
        return self._summed(shown).div_(self._num_kept + self._num_added).add_(shown)

    def _summed(self, shown: Tensor) -> Tensor:
        """How far the small steps that were added are from what is shown, added up."""
        total = self._kept("total")
        return total if self._total is None else total.add_(self._total).sub_(shown, alpha=self._num_added)

    def _at(self, *names: str) -> Tensor:
        """Where the first of some distances from what is shown leads that is known of a block."""
        found = []
        for state, own in zip(self._states, self._shown, strict=True):
            distance = next((state[name] for name in names if name in state), None)
            found.append(own if distance is None else own + distance.to(own))
        return torch.cat(found)

    def _kept(self, name: str) -> Tensor:
        """What was kept of the blocks under a name, or zeros, as one vector."""
        if not any(name in state for state in self._states):
            return self.value.new_zeros(len(self.value))
        pairs = zip(self._states, self._shown, strict=True)
        return torch.cat(
            [state[name].to(own) if name in state else torch.zeros_like(own) for state, own in pairs]
        )

    def kept(self, shown: Tensor, *, is_on_its_way: bool = False) -> list[State]:
        """What to keep of each block where these are the parameters, after a stretch or on its way."""
        named = {"mean": self._mean, "square": self._square}
        if shown is not self.value:
            named["offset"] = self.value - shown
        if is_on_its_way and (self._num_kept or self._num_added):
            named["total"] = self._summed(shown)
        parts = {name: self.split(vector) for name, vector in named.items()}
        return [
            {
                **{name: own[index] for name, own in parts.items()},
                **(self._on_its_way(index) if is_on_its_way else {}),
                "shapes": self._shapes[index],
                "sides": [[side.place, side.rows, side.columns, side.axis] for side in self.sides[index]],
                **self._rotations[index].state(),
            }
            for index in range(len(self.blocks))
        ]

    def _on_its_way(self, index: int) -> State:
        """What to keep of a block in the middle of a stretch alone."""
        state, own = self._states[index], self._shown[index]
        start = state["start"] if "start" in state else state.get("offset", torch.zeros_like(own))
        return {"start": start, "num_added": self._num_kept + self._num_added}


class Party:
    """All blocks on their way. Those of one device and type are walked as one vector, which is faster.

    Args:
        blocks: The blocks.
        shown: Where their parameters are.
        rotation: What the rotations of a small step may cost.
        state: What is kept of them.
    """

    def __init__(
        self, blocks: Sequence[Block], shown: Sequence[Tensor], rotation: float, state: PolicyState
    ) -> None:
        self._state = state
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, own in enumerate(shown):
            kinds.setdefault((own.device, own.dtype), []).append(index)
        self._places = list(kinds.values())
        known = blocks, shown, affordable_sides(blocks, rotation), [state.of(block.name) for block in blocks]
        self.walkers = [Walker(*own) for own in zip(*map(self.shared_out, known), strict=True)]

    @property
    def is_elsewhere(self) -> bool:
        """Whether what is shown is not where the small steps are."""
        return any(own.is_elsewhere for own in self.walkers)

    def shared_out(self, of_blocks: Sequence[Any]) -> list[list[Any]]:
        """What there is of each block, walker by walker."""
        return [[of_blocks[place] for place in places] for places in self._places]

    def joined(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """From a vector of each block those of the walkers."""
        return list(map(torch.cat, self.shared_out(vectors)))

    def of_blocks(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """From a vector of each walker those of the blocks, in their order."""
        found: dict[int, Tensor] = {}
        for walker, places, vector in zip(self.walkers, self._places, vectors, strict=True):
            found.update(zip(places, walker.split(vector), strict=True))
        return [found[place] for place in sorted(found)]

    def take_down(self, shown: Sequence[Tensor], *, is_on_its_way: bool = False) -> None:
        """Keep what is needed to go on from here, where these vectors of the walkers are the parameters."""
        for walker, own in zip(self.walkers, shown, strict=True):
            for block, kept in zip(walker.blocks, walker.kept(own, is_on_its_way=is_on_its_way), strict=True):
                self._state.blocks[block.name] = kept
