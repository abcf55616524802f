"""One update in the making: what a step knows, from its samples to its outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from blockhf.batches import Share
from blockhf.blocks import Block
from blockhf.linalg import Solution, Status
from blockhf.meshes import SolvedBlock
from blockhf.plan import Plan
from blockhf.point import Point
from blockhf.policies import Choice, Outcome, Proposal, Situation, StepCost
from blockhf.report import BlockReport, StepReport, Stopwatch


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
        gradient: For each block its gradient.
        solved: What was found for each block.
        choice: What the search decided, or why there was nothing to decide.
        is_sound: Whether loss and gradient are finite, so that damping can be to blame for a rejection.
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
    gradient: Sequence[Tensor] = ()
    solved: dict[int, SolvedBlock] = field(default_factory=dict)
    choice: Choice | None = None
    is_sound: bool = True

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
        point = make_point(*plan.take_gradient(batch, rank))
        curvature = point
        point.keeps_graph = plan.shares_samples and len(point.samples.parts) == 1
        if not point.keeps_graph:
            taken = plan.take_curvature(curvature_batch if plan.given else batch, rank)
            curvature = point.on(*taken, like=point.samples.parts)
        held_out = point.apart(plan.take_held_out(batch, rank))
        seen = point.apart(plan.take_seen(batch, rank))
        return cls(plan, point, curvature, held_out, seen, **rest)

    @property
    def blocks(self) -> Sequence[Block]:
        return self.point.blocks

    @property
    def dampings(self) -> list[float]:
        return [float(group["damping"]) for group in self.groups]

    @property
    def failed(self) -> bool:
        """Whether there is nothing to search for."""
        return self.choice is not None and self.choice.update is None

    def fail(self, reason: str, *, is_sound: bool = True) -> None:
        self.choice, self.is_sound = Choice(None, reason), is_sound

    def differentiate(self) -> None:
        """Loss and gradient; the update fails where they are not finite."""
        self.loss, self.gradient = self.point.gradient()
        if not bool(self.loss.isfinite().all()):
            self.fail("the loss is not finite", is_sound=False)
        elif not all(bool(own.isfinite().all()) for own in self.gradient):
            self.fail("the gradient is not finite", is_sound=False)

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
        return [
            Proposal(slope, solution.x, solution.model, float(group["damping"]), float(group["lr"]))
            for slope, solution, group in zip(self.gradient, self.solutions, self.groups, strict=True)
        ]

    def situation(self) -> Situation:
        """What the search decides by."""
        return Situation(
            float(self.loss),
            self.proposals,
            self.point,
            self.curvature,
            self.held_out,
            self.seen,
            self.plan.num_gradient / self.population if self.population else 0.0,
        )

    def ratio(self) -> float | None:
        """Actual over predicted change of the loss, where both are known."""
        choice = self.choice
        if choice is None or choice.loss is None or choice.change >= 0:
            return None
        before = float(self.loss) if choice.before is None else choice.before
        return (choice.loss - before) / choice.change

    def outcomes(self, *, accepted: bool) -> list[Outcome]:
        """What the damping of each block follows."""
        if not accepted or self.choice is None:
            return [Outcome(False)] * len(self.groups)
        ratio = self.ratio()
        if self.choice.lengths:  # a block without a direction has no part in the ratio either
            return [Outcome(True, None if own is None else ratio, own) for own in self.choice.lengths]
        return [Outcome(True, ratio)] * len(self.groups)

    def cost(self, add_up: Callable[[Sequence[float]], Sequence[float]]) -> StepCost:
        """What the step used; ``add_up`` adds up numbers over all ranks."""
        ledger = self.point.samples.ledger
        own = (ledger.totals.get("gradient", 0), ledger.work.gradient_samples, ledger.totals.get("checks", 0))
        gradient, num_samples, checks, everything = add_up([*own, ledger.total])
        per_sample = gradient / max(num_samples, 1)
        number = self.plan.num_gradient
        rest = (everything - checks - number * per_sample) / per_sample if per_sample else 0.0
        signal = None if self.choice is None else self.choice.signal
        return StepCost(number, signal, rest, self.population or math.inf)

    def report(self, step: int, *, accepted: bool, traffic: dict[str, int]) -> StepReport:
        choice = self.choice
        assert choice is not None
        return StepReport(
            step=step,
            accepted=accepted,
            reason=choice.reason,
            loss=float(self.loss),
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
            },
            phases=self.watch.phases,
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
                )
            )
        return reports
