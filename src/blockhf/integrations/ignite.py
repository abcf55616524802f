"""Ignite: the function that an ``Engine`` calls for each batch.

::

    trainer = Engine(update_function(optimizer, objective))
    trainer.run(loader, max_epochs=5)

``trainer.state.output`` is the loss. ``optimizer.report`` has the rest, for handlers to log. Ignite's
``Checkpoint`` saves and loads the optimizer like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blockhf.objective import Objective
from blockhf.optimizer import BlockHF


def update_function(
    optimizer: BlockHF, objective: Objective, prepare_batch: Callable[[Any], Any] = lambda batch: batch
) -> Callable[[Any, Any], float]:
    """From an engine and a batch to the loss, by one update.

    Args:
        optimizer: Makes the updates.
        objective: Returns outputs and loss for a batch.
        prepare_batch: Makes of what the loader gives what the objective takes, e.g. on another device.
    """

    def update(engine: Any, batch: Any) -> float:
        return float(optimizer.step(objective, prepare_batch(batch)))

    return update
