"""The optimizers of the arena, with eight settings each of which an equal search chooses one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from blockhf_lab.arena.base import Task
from blockhf_lab.optimizers import Spec

DEFAULT = "blockhf"
"""The library's default, which has nothing to search."""

NAMES = (DEFAULT, "K-FAC", "Adam", "AdamW", "SGD, Nesterov", "Muon", "SOAP", "L-BFGS")
UNTUNED = {DEFAULT: "blockhf", "K-FAC": "blockhf:solver=Precondition"}
"""What families run with where nothing was searched for; K-FAC then has the default's damping."""
SHARED = {"Adam": "AdamW"}
"""Families that take the setting of another one's search, as they differ in weight decay alone."""
_DAMPINGS = ("ByCoefficient", 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 1e-1, 1)


def settings(task: Task, family: str) -> list[str]:
    """The settings of a family that the search tries; none where it does not apply.

    Four rates with two batches, or eight with one. L-BFGS has two rates, two numbers of iterations on a
    batch, and two batches, the larger one all samples. K-FAC is ``BlockHF`` with the preconditioner as its
    solution; it has the default's rule and seven dampings.
    """
    small, large = task.batches

    def grid(text: str, rates: Sequence[float]) -> list[str]:
        name, _, rest = text.partition(":")
        options = f",{rest}" if rest else ""
        sizes = dict.fromkeys((small, large))
        return [f"{name}:lr={rate:g},batch={size}{options}" for rate in rates for size in sizes]

    if family == "L-BFGS":
        if not task.has_lbfgs:
            return []
        sizes = (large,) if task.is_complete else (large, 1_000_000)
        rates = (0.25, 0.5, 1, 2) if task.is_complete else (0.5, 1)
        rest = "history_size=50,line_search_fn=strong_wolfe"
        return [
            str(Spec.parse(f"lbfgs:lr={rate},max_iter={steps},batch={size},{rest}"))
            for rate, steps, size in itertools.product(rates, (5, 20), sizes)
        ]
    found = {
        DEFAULT: ["blockhf"],
        "K-FAC": [f"blockhf:solver=Precondition,damping={damping}" for damping in _DAMPINGS],
        "Adam": grid("adam", task.rates),
        "AdamW": grid("adamw", task.rates),
        "SGD, Nesterov": grid("sgd:momentum=0.9,nesterov=true", task.sgd_rates),
        "Muon": grid("muon", [3 * rate for rate in task.rates]),
        "SOAP": grid("soap", task.rates),
    }
    if family not in found:
        raise ValueError(f"There is no optimizer {family!r} in the arena. There are {', '.join(NAMES)}.")
    return [str(Spec.parse(text)) for text in found[family]]


def family_of(optimizer: str) -> str:
    """The family of a spec.

    >>> family_of("sgd:lr=0.1,momentum=0.9,nesterov=true"), family_of("blockhf:solver=Precondition")
    ('SGD, Nesterov', 'K-FAC')
    """
    spec = Spec.parse(optimizer)
    if spec.name == "blockhf":
        is_kfac = spec.options.get("solver") == "Precondition" or spec.options.get("without") == "cg"
        return "K-FAC" if is_kfac else (DEFAULT if not spec.options else str(spec))
    own = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD, Nesterov", "muon": "Muon", "soap": "SOAP"}
    return own.get(spec.name, "L-BFGS" if spec.name == "lbfgs" else str(spec))
