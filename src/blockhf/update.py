"""One update in the making: what a step knows, from its samples to its outcome."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from blockhf.batches import Share
from blockhf.blocks import Block
from blockhf.diagnosis import bypassed, risen, wrong_with_curvature
from blockhf.linalg import BlockOperator, Solution, Status
from blockhf.linalg.operators import measure_roots
from blockhf.meshes import SolvedBlock
from blockhf.plan import FEWEST_SAMPLES, Plan
from blockhf.point import Point
from blockhf.policies import Choice, Outcome, Proposal, Search, Situation, StepCost, measured
from blockhf.policy import PolicyState, State
from blockhf.report import STILL, BlockReport, StepReport, Stopwatch
from blockhf.scalars import are_finite, read

BESIDES = 10**9
"""What a step takes beside counted operations (its hundreds of small ones, Python), in as many of these."""


def shrinkage(group: Mapping[str, Any]) -> float:
    """By what share a step shrinks a block whose weight decay is decoupled."""
    return float(group["lr"]) * float(group["weight_decay"]) * bool(group["decoupled_weight_decay"])


@dataclass
class Update:
    """An update in the making.

    Attributes:
        plan: Which samples are whose.
        point: The point on the gradient's samples.
        curvature: The point on the curvature's samples, which may be the same.
        held_out: The point on those that are held out, if there are any.
        seen: The point on some of the gradient's, where those held out are compared with them.
        groups: The parameter groups, one for each block.
        population: How many samples there are in all, where that is known.
        watch: Measures the phases.
        loss: The loss at the starting point.
        value: The same as a number.
        gradient: For each block its gradient.
        solved: What was found for each block.
        choice: What the search decided, or why there was nothing to decide.
        warnings: What looks wrong, in sentences.
        is_sound: Whether loss and gradient are finite, so that damping can be to blame for a rejection.
        num_still: How many steps in a row have changed next to nothing.
    """

    plan: Plan
    point: Point
    curvature: Point
    held_out: Point | None
    seen: Point | None
    groups: Sequence[dict[str, Any]]
    population: int | None
    watch: Stopwatch
    loss: Tensor = field(init=False)
    value: float = math.nan
    gradient: Sequence[Tensor] = ()
    solved: dict[int, SolvedBlock] = field(default_factory=dict)
    choice: Choice | None = None
    warnings: list[str] = field(default_factory=list)
    is_sound: bool = True
    num_still: int = 0

    @classmethod
    def begin(
        cls,
        plan: Plan,
        rank: int,
        batch: Any,
        curvature_batch: Any,
        make_point: Callable[[Any, Share], Point],
        **rest: Any,
    ) -> Update:
        """Set up the points of a step.

        Args:
            plan: Which samples are whose.
            rank: The number of this process.
            batch: Its samples.
            curvature_batch: Its samples of the curvature, where they are given.
            make_point: Makes the point on the gradient's samples.
            rest: Further attributes.
        """
        point = make_point(*plan.gradient.take(batch, rank))
        curvature = point
        point.keeps_graph = plan.shares_samples and len(point.samples.parts) == 1
        if not point.keeps_graph:
            taken = plan.curvature.take(curvature_batch if plan.given else batch, rank)
            curvature = point.on(*taken, like=point.samples.parts)
        held_out = point.apart(None if plan.held_out is None else plan.held_out.take(batch, rank))
        seen = point.apart(None if plan.seen is None else plan.seen.take(batch, rank))
        return cls(plan, point, curvature, held_out, seen, **rest)

    @property
    def blocks(self) -> Sequence[Block]:
        return self.point.blocks

    def dampings(
        self, operator: BlockOperator, mine: Sequence[int], diagonals: Sequence[Tensor | None] | None
    ) -> list[float]:
        """What is added to the diagonals of some blocks.

        Args:
            operator: The curvature of these blocks.
            mine: Which blocks these are.
            diagonals: Where the groups' values count in means of the diagonals, these means as far as they
                are known; ``None`` where the values count as they are.
        """
        values = [float(self.groups[index]["damping"]) for index in mine]
        if diagonals is None:
            return values
        found = {place: own for place, own in enumerate(diagonals) if own is not None}
        for place in range(len(mine)):
            stored = None if place in found or operator.root(place) is not None else operator.dense(place)
            if stored is not None:
                found[place] = stored.diagonal().mean()
        roots = (operator.root(place) for place in range(len(mine)) if place not in found)
        measure_roots([root for root in roots if root is not None])
        known = dict(zip(found, read(list(found.values())), strict=True))
        scales = [
            known[place][0] if place in known else operator.mean_diagonal(place, self.gradient[index])
            for place, index in enumerate(mine)
        ]
        decays = [self.point.decays[index] for index in mine]
        return [value * (abs(scale) + own) for value, scale, own in zip(values, scales, decays, strict=True)]

    def decayed(self, changes: Sequence[Tensor]) -> list[Tensor]:
        """An update with the shrinkage of blocks whose weight decay is decoupled."""
        found = []
        for change, value, group in zip(changes, self.point.origin, self.groups, strict=True):
            rate = shrinkage(group)
            found.append(change.sub(value, alpha=rate) if rate else change)
        return found

    @property
    def failed(self) -> bool:
        """Whether there is nothing to search for."""
        return self.choice is not None and self.choice.update is None

    def fail(self, reason: str, *, is_sound: bool = True) -> None:
        self.choice, self.is_sound = Choice(None, reason), is_sound

    def warn(self, what: str | None) -> None:
        """Take down what looks wrong, if anything does; the reader is told once by a warning too."""
        if what is not None:
            self.warnings.append(what)
            warnings.warn(f"{what[0].upper()}{what[1:]}.", stacklevel=4)

    def check_first(self, operator: BlockOperator, mine: Sequence[int], *, relative: bool) -> None:
        """At an objective's first step, look for what would go wrong in silence.

        Args:
            operator: The curvature of some blocks, without penalties.
            mine: Which blocks these are.
            relative: Whether damping is relative to the curvature, and so never too large for it.
        """
        samples = self.point.samples
        if not samples.structure.is_checked:
            penalties = [self.point.penalty_gradient(index) for index in mine]
            gradient = [
                self.gradient[index] if penalty is None else self.gradient[index] - penalty
                for index, penalty in zip(mine, penalties, strict=True)
            ]
            with samples.ledger.once():
                self.warn(samples.wrong_with_parts())
                self.warn(
                    wrong_with_curvature(
                        operator,
                        gradient,
                        0.0 if relative else min(float(group["damping"]) for group in self.groups),
                        self.value,
                    )
                )
                self.warn(bypassed(operator, gradient, [self.blocks[index].name for index in mine]))
            samples.structure.is_checked = True

    def compare_with_last(self, memory: State) -> None:
        """Look whether a step whose length nobody looked at has raised the loss."""
        self.warn(risen(memory.get("last_loss"), self.value))
        memory["last_loss"] = self.value

    def count_still(self, number: int) -> int:
        """The steps in a row after which the loss is as good as before, from those before this one."""
        choice = self.choice
        if choice is None or not self.is_sound or (choice.update is not None and choice.loss is None):
            return 0
        before = self.value if choice.before is None else choice.before
        fallen = 0.0 if choice.loss is None else before - choice.loss
        self.num_still = number + 1 if fallen <= STILL * abs(before) else 0
        return self.num_still

    def differentiate(self) -> None:
        """Loss and gradient on the gradient batch; the update fails where they are not finite."""
        with self.watch.phase("gradient"):
            self.loss, self.gradient = self.point.gradient()
            (value,), *finite = read([self.loss, *(own.isfinite().all() for own in self.gradient)])
        self.value = value
        if not math.isfinite(value):
            self.fail("the loss is not finite", is_sound=False)
        elif not all(fine for (fine,) in finite):
            self.fail("the gradient is not finite", is_sound=False)

    def take_back(self, search: Search, state: PolicyState) -> bool:
        """Undo the last step, where the loss shows that it did harm; the damping then grows."""
        back = search.take_back(self.value, self.point, state)
        if back is None or back.update is None:
            return False
        self.choice, self.is_sound = back, True
        self.point.move(back.update)
        return True

    def take(self, solved: dict[int, SolvedBlock]) -> None:
        """Take in the solutions of all blocks; the update fails where they give no direction."""
        self.solved = solved
        statuses = [solution.status for solution in self.solutions]
        if Status.NON_FINITE in statuses:
            self.fail("the curvature is not finite")
        elif Status.NONPOSITIVE_CURVATURE in statuses and not any(own.norm for own in self.proposals):
            self.fail("no block has a direction of positive curvature")

    @property
    def solutions(self) -> list[Solution]:
        return [self.solved[index].solution for index in range(len(self.solved))]

    @cached_property
    def proposals(self) -> list[Proposal]:
        return measured(
            Proposal(
                slope,
                self.solved[index].solution.x,
                self.solved[index].solution.model,
                self.solved[index].damping,
                float(group["lr"]),
            )
            for index, (slope, group) in enumerate(zip(self.gradient, self.groups, strict=True))
        )

    def situation(self) -> Situation:
        """What the search decides by."""
        return Situation(
            self.value,
            self.proposals,
            self.point,
            self.curvature,
            self.held_out,
            self.seen,
            self.plan.num_gradient / self.population if self.population else 0.0,
        )

    def choose(self, search: Search, state: PolicyState) -> None:
        """Let the search decide; an update that is not finite is rejected whatever it says."""
        self.choice = search.choose(self.situation(), state)
        update = self.choice.update
        if update is not None and not self.choice.is_finite and not are_finite(update):
            self.fail("the step is not finite")

    def ratio(self) -> float | None:
        """Actual over predicted change of the loss, where both are known."""
        choice = self.choice
        if choice is None or choice.loss is None or choice.change >= 0:
            return None
        before = self.value if choice.before is None else choice.before
        return (choice.loss - before) / choice.change

    def outcomes(self, *, accepted: bool) -> list[Outcome]:
        """What the damping of each block follows."""
        rounding = [torch.finfo(own.dtype).eps for own in self.gradient]
        if not accepted or self.choice is None:
            growth = None if self.choice is None else self.choice.growth
            return [Outcome(False, rounding=eps, growth=growth) for eps in rounding]
        ratio, length, growth = self.ratio(), self.choice.length, self.choice.growth
        if self.choice.lengths:  # a block without a direction has no part in the ratio either
            return [Outcome(True, None if own is None else ratio, own) for own in self.choice.lengths]
        return [Outcome(True, ratio, length=length, rounding=eps, growth=growth) for eps in rounding]

    def cost(self, add_up: Callable[[Sequence[float]], Sequence[float]]) -> StepCost:
        """What the step used; ``add_up`` adds up numbers over all ranks."""
        ledger = self.point.samples.ledger
        kinds = ("gradient", "checks", "inversion", "preconditioner", "formed")
        counts = [ledger.totals.get(kind, 0) for kind in kinds]
        *summed, num_samples, everything = add_up([*counts, ledger.work.gradient_samples, ledger.total])
        gradient, checks, *others = summed
        number, num_curvature = self.plan.num_gradient, self.plan.num_curvature
        weight = math.sqrt(self.point.samples.structure.num_positions)  # as in the plan
        signal = None if self.choice is None else self.choice.signal
        taken, population = round(number * weight), (self.population or math.inf) * weight
        if not gradient:  # as that of an embedding, which is taken to be half of the work
            return StepCost(taken, signal, number * weight, population)
        per_sample = gradient / max(num_samples, 1)
        fixed = sum(others)
        curvature = max((everything - checks - fixed) / per_sample - number, 0.0)
        rest = curvature + (fixed + BESIDES) / per_sample
        full = num_curvature * weight if num_curvature < number else max(FEWEST_SAMPLES, number * weight)
        growing = 0.0 if self.plan.given else curvature * weight
        return StepCost(taken, signal, rest * weight, population, growing, full)

    def report(
        self, step: int, *, accepted: bool, traffic: dict[str, int], hints: Sequence[str] = ()
    ) -> StepReport:
        choice = self.choice
        assert choice is not None
        return StepReport(
            step=step,
            accepted=accepted,
            reason=choice.reason,
            loss=self.value,
            loss_after=choice.loss,
            loss_before=choice.before,
            compared=choice.compared,
            signal=choice.signal,
            predicted=choice.change if accepted else None,
            ratio=self.ratio() if accepted else None,
            blocks=self._block_reports(choice) if self.solved else (),
            work={
                **self.point.samples.ledger.summary(),
                **traffic,
                "gradient_batch": self.plan.num_gradient,
                "curvature_batch": self.plan.num_curvature,
                "held_out_batch": self.plan.num_held_out,
            },
            phases=self.watch.phases,
            warnings=tuple(self.warnings),
            hints=tuple(hints),
            setup=dict(self.point.samples.ledger.setup),
            complete=self.plan.complete,
            num_still=self.num_still,
        )

    def _block_reports(self, choice: Choice) -> list[BlockReport]:
        shares = choice.coefficients or [0.0] * len(self.groups)
        reports = []
        for index, (block, proposal, share) in enumerate(
            zip(self.blocks, self.proposals, shares, strict=True)
        ):
            solved = self.solved[index]
            reports.append(
                BlockReport(
                    name=block.name,
                    size=block.size,
                    status=str(solved.solution.status),
                    num_steps=solved.solution.num_steps,
                    num_products=solved.num_products,
                    residual=solved.solution.residual,
                    decrease=-solved.solution.model,
                    damping=proposal.damping,
                    norm=proposal.norm,
                    coefficient=share,
                    products=solved.note,
                    kind=self.point.samples.structure.kind_of(block),
                )
            )
        return reports
