"""``blockhf race``: optimizers, each with settings found by an equal search, run to targets.

First every setting of a family runs with the first seed within a small budget, and the one stays whose train
loss came lowest. Then the winners run over all seeds. ``blockhf`` has nothing to search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from blockhf.experiments import commands, comparison, files
from blockhf.experiments.comparison import Comparison, Entry
from blockhf.experiments.optimizers import Spec
from blockhf.experiments.runs import Config
from blockhf.experiments.tasks import Task

_RATES = (3e-4, 1e-3, 3e-3, 1e-2)

TARGETS: Mapping[str, tuple[float, ...]] = {
    "autoencoder": (20.0, 15.0, 10.0, 7.0, 5.0),
    "lstm": (1.5, 1.0, 0.5),
    "cnn": (1.5, 1.2, 1.0),
}
"""Train losses of the full-size tasks; the small ones have their own."""


def families(task: Task) -> dict[str, list[str]]:
    """The settings that are tried, by family; each of the tuned has eight.

    ``blockhf`` gets a batch of half of the autoencoder's data, of which it takes what it needs; where the
    large batch is fixed, as for the CNN, that one.
    """
    small, large = min(task.adam_batches), task.large_batch
    rates = [f"{rate:g}" for rate in _RATES]
    tenfold = [f"{10 * rate:g}" for rate in _RATES]
    own = f"batch={task.race_batch}"
    return {
        "blockhf": [f"blockhf:{own}"],
        "K-FAC": [
            f"blockhf:{own},solver=Precondition,damping={damping}"
            for damping in ("ByCoefficient", "1e-4", "3e-4", "1e-3", "3e-3", "1e-2", "3e-2", "1e-1")
        ],
        "Adam": [f"adam:lr={rate},batch={size}" for rate in rates for size in (small, large)],
        "AdamW, cosine": [
            f"adamw:lr={rate},batch={size},schedule=cosine" for rate in rates for size in (small, large)
        ],
        "SGD, Nesterov": [
            f"sgd:lr={rate},momentum=0.9,nesterov=true,batch={size}"
            for rate in tenfold
            for size in (small, large)
        ],
        "L-BFGS": [
            f"lbfgs:lr={rate},max_iter={steps},history_size={size},line_search_fn=strong_wolfe"
            for rate, steps, size in itertools.product((0.5, 1), (5, 20), (10, 50))
        ],
    }


@dataclass(frozen=True)
class Plan:
    """A race.

    Attributes:
        task: The task's name.
        preset: Its size.
        names: The families.
        seeds: Of the final runs; the first is also that of the search.
        search: Budget of each setting in the search.
        budget: Budget of the final runs.
        threads: Threads of torch; zero for its own.
    """

    task: str
    preset: str
    names: Sequence[str]
    seeds: Sequence[int]
    search: str
    budget: str
    threads: int = 0


def run(plan: Plan, task: Task, out: Path, console: Console, *, data: Path | None = None) -> bool:
    """Search, race, and write tables, figures and a page.

    Returns:
        Whether all came to its end; the same call goes on where it was interrupted.
    """
    known = families(task)
    if unknown := [name for name in plan.names if name not in known]:
        raise ValueError(f"There is no family {', '.join(unknown)}. There are {', '.join(known)}.")
    targets = task.targets if plan.preset == "quick" else TARGETS.get(plan.task, task.targets)
    searched = {name: known[name] for name in plan.names if len(known[name]) > 1}
    chosen = {name: known[name][0] for name in plan.names}
    if searched:
        console.print("Search: each setting within", plan.search)
        configs = [
            Config(plan.task, plan.preset, spec, plan.seeds[0], plan.search, "budget", plan.threads)
            for specs in searched.values()
            for spec in specs
        ]
        if not commands.compare(configs, out / "search", console, data=data):
            return False
        (found,) = comparison.collect([out / "search"])
        by_text = {entry.optimizer: entry for entry in found.entries}
        for name, specs in searched.items():
            entries = [by_text[str(Spec.parse(spec))] for spec in specs]
            chosen[name] = min(entries, key=_lowest).optimizer
    console.print("Race:", ", ".join(f"{name}: {spec}" for name, spec in chosen.items()))
    configs = [
        Config(plan.task, plan.preset, spec, seed, plan.budget, "budget", plan.threads)
        for seed in plan.seeds
        for spec in chosen.values()
    ]
    if not commands.compare(configs, out / "race", console, data=data):
        return False
    (raced,) = comparison.collect([out / "race"])
    result = {
        "plan": asdict(plan),
        "settings": chosen,
        "targets": table(raced, {str(Spec.parse(spec)): name for name, spec in chosen.items()}, targets),
    }
    files.write(out / "race.json", files.to_json(result, indent=2))
    show(result, console)
    return True


def table(
    compared: Comparison, names: Mapping[str, str], targets: Sequence[float]
) -> dict[str, dict[str, dict[str, Any]]]:
    """For each family and target of the train loss, what it took: medians over the seeds, and how many."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for spec, entries in compared.methods():
        name = names.get(str(spec), str(spec))
        result[name] = {}
        for target in targets:
            points = [comparison.first(entry, "train_loss", target.__ge__) for entry in entries]
            result[name][f"{target:g}"] = {
                "reached": f"{len(points) - points.count(None)}/{len(points)}",
                **asdict(comparison.cost(entries, "train_loss", target.__ge__)),
            }
    return result


def show(result: Mapping[str, Any], console: Console) -> None:
    """The table of a race."""
    targets = list(next(iter(result["targets"].values())))
    rows = []
    for name, own in result["targets"].items():
        cells = [
            "–"
            if own[target]["update"] is None
            else f"{own[target]['update']:.0f} / {own[target]['ge']:.1f} / {own[target]['seconds']:.0f}"
            for target in targets
        ]
        rows.append([name, *cells, result["settings"].get(name, "")])
    shown = commands.table(["family", *(f"train ≤ {target}" for target in targets), "setting"], rows)
    shown.caption = "Updates / GE / seconds until the train loss first was that low; medians over the seeds."
    shown.caption_justify = "left"
    console.print(shown)


def _lowest(entry: Entry) -> float:
    """The lowest train loss of a run; that of one that diverged is nothing to go by."""
    losses = [value for point in entry.points if (value := point["train_loss"]) is not None]
    return math.inf if entry.status == "diverged" else min(losses, default=math.inf)
