"""Policy optimization with the Fisher matrix: natural gradients in a trust region (Schulman et al., 2015).

The surrogate of a policy gradient is not convex in the logits, so Gauss-Newton says nothing. The Fisher
matrix of the policy does: it is the curvature of the divergence between the old policy and the new one. A
search of a few lines makes each step as long as a bound on that divergence. ``python examples/policy.py``
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from blockhf import (
    AllSamples,
    BlockHF,
    Choice,
    ConjugateGradient,
    Identity,
    MonteCarloFisher,
    PolicyState,
    Search,
    Situation,
    blocks,
)


@dataclass(frozen=True)
class TrustRegion(Search):
    """As far as the divergence, by the quadratic model, stays below a bound."""

    bound: float = 0.02

    def choose(self, situation: Situation, state: PolicyState) -> Choice:
        curvature = sum(proposal.curvature for proposal in situation.proposals)
        scale = math.sqrt(2 * self.bound / max(curvature, 1e-12))
        update = [scale * proposal.direction for proposal in situation.proposals]
        after = float(situation.point.loss_at(update))
        if not after < situation.loss:
            return Choice(None, "the surrogate does not fall within the trust region")
        change = sum(proposal.change(scale) for proposal in situation.proposals)
        return Choice(update, f"{scale:.2g} of the direction", change=change, loss=after)


class CartPole:
    """Many poles at once, each on a cart that is pushed left or right (Barto, Sutton & Anderson, 1983)."""

    def __init__(self, number: int) -> None:
        self.state = 0.05 * (2 * torch.rand(number, 4) - 1)

    def step(self, action: Tensor) -> Tensor:
        """Whether each pole has fallen."""
        _, speed, angle, spin = self.state.unbind(1)
        force = 20.0 * action - 10.0
        push = (force + 0.05 * spin**2 * angle.sin()) / 1.1
        twist = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
        rates = torch.stack([speed, push - 0.05 * twist * angle.cos() / 1.1, spin, twist], dim=1)
        self.state = self.state + 0.02 * rates
        return (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)


def rollout(policy: nn.Module, number: int, length: int) -> tuple[tuple[Tensor, ...], float]:
    """Observations, actions, advantages and log-probabilities while poles stand, and how long they did."""
    poles, standing = CartPole(number), torch.ones(number, dtype=torch.bool)
    kept = []
    with torch.no_grad():
        for _ in range(length):
            seen = poles.state
            predicted = Categorical(logits=policy(seen))
            action = predicted.sample()
            kept.append((seen, action, predicted.log_prob(action), standing))
            standing = standing & ~poles.step(action)
    seen, action, log_prob, alive = (torch.stack(own) for own in zip(*kept, strict=True))
    to_go = alive.float().flip(0).cumsum(0).flip(0)  # rewards that are still to come
    baseline = (to_go * alive).sum(1) / alive.sum(1).clamp_min(1)
    advantage = to_go - baseline[:, None]
    advantage = advantage / advantage[alive].std().clamp_min(1e-6)
    return tuple(own[alive] for own in (seen, action, advantage, log_prob)), float(to_go[0].mean())


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--poles", type=int, default=64)
    parser.add_argument("--length", type=int, default=200)
    parser.add_argument("--width", type=int, default=32)
    arguments = parser.parse_args(argv)

    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, arguments.width), nn.Tanh(), nn.Linear(arguments.width, 2))

    def objective(batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        seen, action, advantage, old = batch
        logits = policy(seen)
        ratio = (Categorical(logits=logits).log_prob(action) - old).exp()
        return logits, -(ratio * advantage).mean()

    optimizer = BlockHF(
        blocks.single(policy),
        curvature=MonteCarloFisher(lambda logits: Categorical(logits=logits)),
        search=TrustRegion(),
        solver=ConjugateGradient(),
        preconditioner=Identity(),
        sampling=AllSamples(),
        damping=1e-2,
        max_cg_steps=10,
        curvature_batch_size=0.25,
    )
    times = []
    for step in range(arguments.steps):
        batch, time = rollout(policy, arguments.poles, arguments.length)
        optimizer.step(objective, batch)
        times.append(time)
        if step % 5 == 0:
            print(f"poles stand for {time:.0f} of {arguments.length} steps; {optimizer.report}")
    print(f"poles stand for {times[0]:.0f} -> {times[-1]:.0f} of {arguments.length} steps")
    return {"times": times}


if __name__ == "__main__":
    main()
