"""How a run opens: with a walk, and trials of Gauss-Newton steps, until these take over."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockhf.batches import lengths, stratified, without
from blockhf.bookkeeping import BlockOptimizer
from blockhf.meeting import Meeting
from blockhf.options import PLAN
from blockhf.plan import Role, check_population
from blockhf.policies import AdamWalk, DampingRule, Sampling, Stretch, Walk
from blockhf.policies.walk import ENOUGH, besides
from blockhf.policy import State
from blockhf.scalars import read
from blockhf.update import BESIDES, Update
from blockhf.walking import Checked, Walked, end_stretch, take_part, take_stretch

TRIED = 1024
"""Samples that tell, at the most, what a Gauss-Newton step on trial has gained."""

WAITS = "waits"
"""Under what name the walk keeps where it is while Gauss-Newton steps are tried."""

FIRST_SAMPLES = 2048
"""Of the first Gauss-Newton step after a walk: with fewer the gradient costs less than the curvature."""


class Opening(BlockOptimizer):
    """An optimizer whose runs open with a walk."""

    damping: DampingRule
    sampling: Sampling
    walk: Walk
    population: int | None
    seed: int

    @property
    def _memory(self) -> State:
        return self.policy_state[PLAN].shared

    def _draw(self) -> int:
        """The seed of a step's draws."""
        counts = ("num_updates", "num_rejected", "num_walks")
        return self.seed + 1 + sum(int(self._memory.get(name, 0)) for name in counts)

    def _walk(self, met: Meeting) -> Tensor | None:
        """Take small steps, unless the walk is over; the loss before them."""
        policy, state = self.walk, self.policy_state["walk"]
        if not isinstance(policy, AdamWalk) or not self._can_walk(met):
            return None
        part = stretch = self._stretch(policy, met)
        if stretch is None:
            return None
        found: Walked | Checked | None = None
        with met.watch.phase("walk"):
            if stretch.ends or not stretch.is_part:
                take = end_stretch if stretch.ends else take_stretch
                found = take(policy, stretch, state, met, self.mesh.rank, self._draw())
                if not math.isfinite(found.loss):  # a Gauss-Newton step says what is wrong
                    return None
                part = None
                if isinstance(found, Checked):
                    self._note_cost(0, met)
                else:
                    self._note_stretch(policy, stretch, met, found)
                    part = self._stretch(policy, met) if stretch.ends else None
            taken = None
            if part is not None and part.is_part:
                taken = take_part(policy, part, state, met, self.mesh.rank, self._draw())
                if taken is None and found is None:
                    return None
                if taken is not None:
                    self._note_cost(part.num_steps, met)
        self._memory["num_walks"] = self._memory.get("num_walks", 0) + 1
        params = [param for block in met.before.blocks for param in block.params]
        done = max(map(self._updates, params)) + 1
        if not isinstance(found, Walked) or found.taken:
            for param in params:
                self.state[param]["step"] = self._updates(param) + 1
        told = found or taken
        assert told is not None
        self.report = told.report(done, stretch, self.ledger, met.watch.phases)
        if found is not None and taken is not None and part is not None:
            self.report.work["small_steps"] += part.num_steps
        return told.own_loss

    def _stretch(self, policy: AdamWalk, met: Meeting) -> Stretch | None:
        """The next stretch, or part of one."""
        (forward,) = self.mesh.add_up([met.structure.forward_flops or 0.0])
        return policy.stretch(
            sum(met.sizes),
            forward / len(met.sizes),
            sum(block.size for block in met.before.blocks),
            met.structure.num_positions,
            self.policy_state["walk"].shared,
            again=self._comes_again(sum(met.sizes)),
            joins=self._is_new(sum(met.sizes)),
        )

    def _comes_again(self, total: int) -> bool:
        """Whether a batch of so many samples is a set that comes again, as far as that is known."""
        return bool(self._memory.get("again", False)) or total == self.population

    def _is_new(self, total: int) -> bool:
        """Whether batches of so many samples are new ones each time, as far as that is known."""
        is_part = self.population is not None and total < self.population
        return is_part or bool(self._memory.get("differs", False))

    def _cost(self, num_steps: int, met: Meeting) -> float:
        """What this step has cost so far, with so many small steps."""
        (flops,) = self.mesh.add_up([float(self.ledger.repeated)])
        return float(flops + num_steps * besides(sum(block.size for block in met.before.blocks)))

    def _note_cost(self, num_steps: int, met: Meeting) -> None:
        """Take down what a part of a stretch has cost, or of its check."""
        state = self.policy_state["walk"].shared
        state["part_cost"] = float(state.get("part_cost", 0.0)) + self._cost(num_steps, met)

    def _note_stretch(self, policy: AdamWalk, stretch: Stretch, met: Meeting, walked: Walked) -> None:
        """Tell the policy what a stretch has gained; where it tries Gauss-Newton steps now, prepare them.

        They begin with what the walk shows, with at least as many samples, and with little damping. The walk
        itself waits where it is: small steps from where they lead would be long ones there.
        """
        state = self.policy_state["walk"]
        cost = float(state.shared.pop("part_cost", 0.0)) + self._cost(stretch.num_steps, met)
        counted = sum(met.sizes) * math.sqrt(met.structure.num_positions)
        is_enough = counted >= ENOUGH or self._comes_again(sum(met.sizes))
        gain, num_steps = walked.loss - walked.after, walked.num_steps
        policy.note_stretch(walked.after, gain, cost, num_steps, state.shared, is_enough=is_enough)
        if not policy.is_trying(state.shared):
            return
        self.policy_state["sampling"].shared.setdefault("size", max(stretch.num_samples, FIRST_SAMPLES))
        for block in met.before.blocks:
            shown, own = block.values(), state.of(block.name)
            own[WAITS] = shown + own.pop("offset").to(shown) if "offset" in own else shown
        for group in self.param_groups:
            if group["damping"] == self.damping.initial:  # and not set by hand
                group["damping"] = policy.damping * self.damping.initial

    def _walk_rests(self) -> bool:
        """Whether the walk is over, or waits for a trial of Gauss-Newton steps."""
        state = self.policy_state["walk"].shared
        is_trying = isinstance(self.walk, AdamWalk) and self.walk.is_trying(state)
        return is_trying or bool(state.get("is_over", False))

    def _judge_trial(self, met: Meeting, update: Update) -> None:
        """Tell the walk what a Gauss-Newton step has gained; it may be over now."""
        policy, state = self.walk, self.policy_state["walk"]
        if not isinstance(policy, AdamWalk) or not policy.is_trying(state.shared):
            return
        (flops,) = self.mesh.add_up([float(self.ledger.repeated)])
        with self.ledger.once():
            gain = self._gained(met, update)
        policy.note_step(gain, flops + BESIDES, state.shared)
        if state.shared.get("is_over", False):
            state.blocks.clear()
        elif not policy.is_trying(state.shared):
            for block in met.before.blocks:
                shown, place = block.values(), state.of(block.name).pop(WAITS, None)
                if place is not None and len(place) == len(shown):
                    state.of(block.name)["offset"] = place.to(shown) - shown

    def _gained(self, met: Meeting, update: Update) -> float:
        """By how much a step has lowered the loss of samples that it did not see, or of a set's own.

        That of those held out will not do, as the lengths of its directions were fitted to them. Where it has
        seen all but a few, any samples have to do.
        """
        total, plan = sum(met.sizes), update.plan
        others = torch.arange(total, device="cpu")
        roles = [role.places for role in (plan.gradient, plan.held_out) if role is not None]
        seen = [places for places in roles if places is not None]
        if not self._comes_again(total) and len(seen) == len(roles):
            unseen = without(torch.cat(seen), total)
            others = unseen if 8 * len(unseen) >= TRIED else others
        number = min(TRIED, len(others))
        generator = torch.Generator("cpu").manual_seed(self._draw())
        role = Role(met.sizes, others[stratified(number, len(others), generator)])
        now = [block.values() for block in met.before.blocks]
        point = met.make_point(*role.take(met.batch, self.mesh.rank), now)
        back = [old - new for old, new in zip(met.before.origin, now, strict=True)]
        (before,), (after,) = read(
            [point.loss_at(back), point.loss_at([torch.zeros_like(own) for own in now])]
        )
        return before - after if math.isfinite(before - after) else 0.0

    def _can_walk(self, met: Meeting) -> bool:
        """Whether it is a sample of a kind that can be shared out among small steps."""
        if met.batch is None or met.given is not None or met.complete or lengths(met.batch):
            return False
        check_population(self.population, sum(met.sizes))
        params = [param for block in met.before.blocks for param in block.params]
        return all(param.dtype in (torch.float32, torch.float64) for param in params)
