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

import torch
from rich.console import Console

from blockhf_lab import commands, comparison, files, page, tables
from blockhf_lab.comparison import Comparison, Entry
from blockhf_lab.optimizers import Spec
from blockhf_lab.runs import Config
from blockhf_lab.tasks import Task

_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
_MOST_DENSE = 5000  # parameters of an optimizer that keeps a matrix of them
_HEADS = ("train at the end", "best test", "peak", "state")
_GROWTH = 1.5  # of updates between the evaluations of a search, which would else take longer than its updates

TARGETS: Mapping[str, tuple[float, ...]] = {
    "autoencoder": (20.0, 15.0, 10.0, 7.0, 5.0),
    "lstm": (1.5, 1.0, 0.5),
    "cnn": (1.5, 1.2, 1.0),
}
"""Train losses of the full-size tasks; the small ones have their own."""


def families(task: Task) -> dict[str, list[str]]:
    """The settings that are tried, by family; each of the tuned has eight.

    Four rates with two batches. Muon does well with larger rates than Adam. SGD has smaller ones where the
    loss is a sum over pixels (from 3e-3 on it diverges there), and larger ones where it is a mean cross
    entropy. L-BFGS has its line search besides the rate, and so the iterations on a batch as a choice too;
    K-FAC has dampings.

    ``blockhf`` gets all of the autoencoder's data, of which it takes what it needs; where the large batch is
    fixed, as for the CNN, that one. Tasks without noise have families of their own.
    """
    if task.is_complete:
        return _complete_families(task)
    small, large = min(task.adam_batches), task.large_batch
    own = f"batch={task.race_batch}"

    def grid(spec: str, rates: Sequence[float] = _RATES) -> list[str]:
        name, _, rest = spec.partition(":")
        options = f",{rest}" if rest else ""
        return [f"{name}:lr={rate:g},batch={size}{options}" for rate in rates for size in (small, large)]

    return {
        "blockhf": [f"blockhf:{own}"],
        "K-FAC": [
            f"blockhf:{own},solver=Precondition,damping={damping}"
            for damping in ("ByCoefficient", "1e-5", "3e-5", "1e-4", "3e-4", "1e-3", "3e-3", "1e-2")
        ],
        "Adam": grid("adam"),
        "Adam, cosine": grid("adam:schedule=cosine"),
        "AdamW": grid("adamw"),
        "AdamW, cosine": grid("adamw:schedule=cosine"),
        "SGD, Nesterov": grid(
            "sgd:momentum=0.9,nesterov=true",
            (1e-4, 3e-4, 1e-3, 3e-3) if task.metric == "loss" else (0.03, 0.1, 0.3, 1.0),
        ),
        "L-BFGS": [
            f"lbfgs:lr={rate},max_iter={steps},batch={size},history_size=50,line_search_fn=strong_wolfe"
            for rate, steps, size in itertools.product((0.5, 1), (5, 20), (large, 2 * large))
        ],
        "Muon": grid("muon", (1e-3, 3e-3, 1e-2, 3e-2)),
        "SOAP": grid("soap"),
    }


def _complete_families(task: Task) -> dict[str, list[str]]:
    """Those for all points in each update: three settings where there is something to set."""
    with torch.random.fork_rng():
        num_params = sum(param.numel() for param in task.make_model().parameters())
    found = {
        "blockhf": ["blockhf"],
        "least squares": ["least-squares"],
        "Adam": [f"adam:lr={rate:g}" for rate in _RATES[1:]],
        "L-BFGS": ["full-lbfgs"],
        "Adam, L-BFGS": ["adam-lbfgs"],
        "SOAP": [f"soap:lr={rate:g}" for rate in _RATES[1:]],
        "self-scaled BFGS": ["ssbfgs"],
        "kernel Gauss-Newton": [f"kernel-gn:damping={damping}" for damping in ("1e-4", "1e-6", "1e-8")],
    }
    if task.draw is not None:
        found["blockhf"] = ["blockhf:points=fresh"]
        found["blockhf, all points"] = ["blockhf"]
    if num_params > _MOST_DENSE:
        del found["self-scaled BFGS"]
    return found


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
    for seed in plan.seeds:  # hours before the last of them begins
        for budget in (plan.search, plan.budget):
            config = Config(plan.task, plan.preset, "blockhf", seed, budget, "budget", plan.threads)
            config.complete()
    if unknown := [name for name in plan.names if name not in known]:
        raise ValueError(f"There is no family {', '.join(unknown)}. There are {', '.join(known)}.")
    is_own = task.is_complete or plan.preset == "quick"
    targets = task.targets if is_own else TARGETS.get(plan.task, task.targets)
    key = task.test_key if task.is_complete else "train_loss"
    names = [name for name in plan.names if Spec.parse(known[name][0]).is_available]
    if missing := [name for name in plan.names if name not in names]:
        console.print(
            f"Left out: {', '.join(missing)}, which pip install 'blockhf-lab[peers]' brings.", markup=False
        )
    if not names:
        return True
    searched = {name: known[name] for name in names if len(known[name]) > 1}
    chosen = {name: known[name][0] for name in names}
    if searched:
        console.print("Search: each setting within", plan.search)
        configs = [
            Config(plan.task, plan.preset, spec, plan.seeds[0], plan.search, "budget", plan.threads, _GROWTH)
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
    by_spec = {str(Spec.parse(spec)): name for name, spec in chosen.items()}
    result = {
        "plan": asdict(plan),
        "settings": chosen,
        "key": key,
        "targets": table(raced, by_spec, targets, key),
        "ends": ends(raced, by_spec),
        "memory": memory(raced, by_spec),
    }
    files.write(out / "race.json", files.to_json(result, indent=2))
    show(result, console)
    return True


def table(
    compared: Comparison, names: Mapping[str, str], targets: Sequence[float], key: str = "train_loss"
) -> dict[str, dict[str, dict[str, Any]]]:
    """For each family and target, of the train loss or an error, what it took: medians, and of how many."""
    result: dict[str, dict[str, dict[str, Any]]] = {}
    for spec, entries in compared.methods():
        name = names.get(str(spec), str(spec))
        result[name] = {}
        for target in targets:
            points = [comparison.first(entry, key, target.__ge__) for entry in entries]
            result[name][f"{target:g}"] = {
                "reached": f"{len(points) - points.count(None)}/{len(points)}",
                **asdict(comparison.cost(entries, key, target.__ge__)),
            }
    return result


def ends(compared: Comparison, names: Mapping[str, str]) -> dict[str, dict[str, float | None]]:
    """For each family the train loss at the end, and the best value of the test: medians over the seeds."""
    return {
        names.get(str(line.spec), str(line.spec)): {"train_loss": line.train, "best": line.best}
        for line in comparison.summaries(compared)
    }


def memory(compared: Comparison, names: Mapping[str, str]) -> dict[str, dict[str, float | None]]:
    """For each family the peak of memory, and what the optimizer keeps: medians over the seeds."""
    return {
        names.get(str(line.spec), str(line.spec)): {
            "peak_bytes": line.total.peak_bytes,
            "state_bytes": line.total.state_bytes,
        }
        for line in comparison.summaries(compared)
    }


def show(result: Mapping[str, Any], console: Console) -> None:
    """The table of a race."""
    targets = list(next(iter(result["targets"].values())))
    rows = []
    for name, own in result["targets"].items():
        cells = [_cell(own[target]) for target in targets]
        sizes = map(page.mebibytes, result["memory"][name].values())
        last = map(page.number, result["ends"][name].values())
        rows.append([name, *cells, *last, *sizes, result["settings"].get(name, "").replace(",", ", ")])
    what = "train" if result["key"] == "train_loss" else "error"
    heads = ["family", *(f"{what} ≤ {target}" for target in targets), *_HEADS, "setting"]
    caption = (
        "Updates / GE / seconds / peak of memory until the train loss, or the error, first was that low; "
        "medians over the seeds. Then the train loss at the end and the best test. The peak in "
        "MiB is beyond what was there before the run, that of the whole run in its own column, and what of "
        "it the optimizer keeps from update to update beside."
    )
    tables.show(console, heads, rows, caption=caption)


def _cell(cost: Mapping[str, Any]) -> str:
    if cost["update"] is None:
        return "–"
    spent = f"{cost['update']:.0f} / {cost['ge']:.1f} / {cost['seconds']:.0f}"
    return f"{spent} / {page.mebibytes(cost['peak_bytes'])}"


def _lowest(entry: Entry) -> float:
    """The lowest train loss of a run; that of one that diverged is nothing to go by."""
    losses = [value for point in entry.points if (value := point["train_loss"]) is not None]
    return math.inf if entry.status == "diverged" else min(losses, default=math.inf)
