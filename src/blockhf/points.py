"""Points that are drawn anew for each step: how many of them to ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blockhf.batches import batch_size
from blockhf.policy import State

FIRST = 500
"""How many points the first step asks for."""

MOST_NUMBERS = 2**27
"""The most entries of a Jacobian, points times parameters."""


def draw(points: Callable[[int], Any], memory: State) -> Any:
    """New points, about as many as the last steps call for; ``memory`` is kept from step to step."""
    batch = points(number := memory.setdefault("num_points", FIRST))
    try:
        batch_size(batch)
    except ValueError as error:
        raise ValueError(f"points({number}) has to return a batch of new points: {error}") from error
    return batch


def learn(memory: State, loss: float, loss_after: float | None, num_params: int) -> None:
    """Ask for more points where those of the last step were fitted better than new ones are.

    >>> memory = {"num_points": 500, "last_loss_after": 1.0}
    >>> learn(memory, loss=4.0, loss_after=0.5, num_params=1000)
    >>> memory["num_points"]
    550
    """
    last = memory.get("last_loss_after")
    if last is not None and last > 0:
        gap = loss / last
        number = memory["num_points"] * (1.1 if gap > 2 else 0.97 if gap < 1.3 else 1.0)
        memory["num_points"] = int(min(max(number, FIRST), max(FIRST, MOST_NUMBERS // num_params)))
    memory["last_loss_after"] = loss_after
