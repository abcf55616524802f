"""``blockhf bench mesh``: updates on one rank and on several, beside what the machine and ``plan`` say.

The ranks are real processes with gloo between them, of one thread each. All that is compared is measured by
the same processes in one run, in turns: updates on rank 0 alone, while the others wait, updates on meshes of
all ranks, and plain matrix products on rank 0 and on all ranks at once, which tells what the machine itself
allows. The best turn of each counts.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import blockhf
from blockhf import blocks
from blockhf.blocks import Group
from blockhf.meshes import assign
from blockhf_lab import bench, calibration, files, plan
from blockhf_lab.autoencoder import Autoencoder
from blockhf_lab.data import digits
from blockhf_lab.peers import Network

SHARE_BAR = 0.9
"""Of what the placement allows, a mesh of blocks has to reach as much."""

PREDICTION_BAR = 0.15
"""By so much a predicted speed-up on two ranks may be wrong."""

_LIMIT = datetime.timedelta(seconds=600)
_LAYERS = [*itertools.pairwise((784, 1000, 500, 250, 30)), *itertools.pairwise((30, 250, 500, 1000, 784))]


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        ranks: How many processes there are at most; meshes have 2 and as many.
        curvature: Samples of curvature; the gradient has five times as many.
        cg_steps: CG iterations of each block.
        repetitions: Turns of each candidate.
        seed: Of the weights.
        small: A small network in place of the paper's, to try it out.
    """

    ranks: int = 2
    curvature: int = 1200
    cg_steps: int = 30
    repetitions: int = 7
    seed: int = 0
    small: bool = False

    def __post_init__(self) -> None:
        if self.ranks not in (2, 4):
            raise ValueError(f"ranks is {self.ranks}, but must be 2 or 4.")
        for name in ("curvature", "cg_steps", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1.")
        if self.curvature > 1200:
            raise ValueError(
                f"curvature is {self.curvature}, but must be at most 1200: there are 6,000 digits."
            )


@dataclass(frozen=True)
class Turn:
    """Seconds of an update: of the CG phase and of all phases, on the slowest rank; and its products."""

    solve: float
    update: float
    products: int = 0


@dataclass(frozen=True)
class Row:
    """A mesh against one rank on the same blocks.

    Attributes:
        blocks: The partition.
        mesh: The mesh.
        one: Best turns on one rank.
        many: Best turns on the mesh.
        placement: The speed-up of CG that the blocks' costs allow on ranks that do not disturb each other.
        machine: How many ranks' worth of matrix products all ranks at once make.
        predicted: The same turns, by ``plan``: on one rank and on the mesh.
        traffic: What ``report.work`` counts of a rank: calls and bytes by purpose.
    """

    blocks: str
    mesh: str
    one: Turn
    many: Turn
    placement: float
    machine: float
    predicted: tuple[Turn, Turn]
    traffic: Mapping[str, int] = field(default_factory=dict)

    def speed_up(self, phase: str) -> float:
        return float(getattr(self.one, phase) / getattr(self.many, phase))

    def predicted_speed_up(self, phase: str) -> float:
        one, many = self.predicted
        return float(getattr(one, phase) / getattr(many, phase))

    def allowed(self, ranks: int) -> float:
        """The speed-up of CG that placement and machine allow."""
        return self.placement * min(self.machine / ranks, 1.0)


# In each rank


def _worker(rank: int, num_ranks: int, folder: str, settings: Settings) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks, timeout=_LIMIT
    )
    found = _measure(rank, num_ranks, settings)
    if rank == 0:
        files.write(Path(folder) / "found.json", files.to_json(found))
    dist.barrier()
    dist.destroy_process_group()


def partitions(model: nn.Module) -> dict[str, list[Group]]:
    """The paper's two blocks, and two whose products cost as nearly the same as whole layers allow."""
    layers = blocks.by_layer(model)
    first = set(equal_halves([sum(param.numel() for _, param in layer["params"]) for layer in layers]))
    halves: list[list[Any]] = [[], []]
    for index, layer in enumerate(layers):
        halves[index not in first] += layer["params"]
    return {
        "encoder / decoder": blocks.by_module(model),
        "equal": [{"params": half, "name": name} for half, name in zip(halves, ("a", "b"), strict=True)],
    }


def equal_halves(sizes: Sequence[int]) -> tuple[int, ...]:
    """Which layers to put with the first, so that products with the two blocks cost the same.

    A block need not be a run of layers. Its tangent begins at its first layer and goes through all that come
    after, and a cotangent comes back; in its own layers there are also the change of the parameters and the
    gradient by them.

    >>> equal_halves([2, 2, 2])
    (0,)
    """

    def cost(block: Sequence[int]) -> int:
        return 2 * sum(sizes[min(block) + 1 :]) + 2 * sum(sizes[index] for index in block)

    def unevenness(chosen: tuple[int, ...]) -> float:
        rest = [index for index in range(len(sizes)) if index not in chosen]
        costs = cost(chosen), cost(rest)
        return max(costs) / sum(costs)

    others = range(1, len(sizes))
    candidates = [
        (0, *chosen) for number in range(len(sizes) - 1) for chosen in itertools.combinations(others, number)
    ]
    return min(candidates, key=unevenness)


def _measure(rank: int, num_ranks: int, settings: Settings) -> dict[str, Any]:
    """All candidates, in turns."""
    images = digits().train_images[: 5 * settings.curvature]
    own = images[rank::num_ranks]  # so that curvature is taken from the same samples as on one rank
    meshes = {
        f"{block} x {data}": blockhf.mesh(block=block, data=data)
        for block, data in ((2, num_ranks // 2), (1, num_ranks))
    }
    together: dict[str, Callable[[], Any]] = {"machine": _matrix_products(settings)}
    alone: dict[str, Callable[[], Any]] = {"machine": together["machine"]} if rank == 0 else {}
    for name in ("encoder / decoder", "equal"):
        if rank == 0:
            alone[name] = _stepper(name, (images, images), settings)
        dist.barrier()
        for shape, mesh in meshes.items():
            together[f"{name}, {shape}"] = _stepper(name, (own, own), settings, mesh=mesh)
    network = _network_between(sum(inner * outer for inner, outer in _LAYERS), num_ranks)
    models = _described(images, settings) if rank == 0 else {}

    turns: dict[str, list[Turn]] = {}
    for _ in range(settings.repetitions):
        for name in ("machine", "encoder / decoder", "equal"):
            dist.barrier()
            if rank == 0:
                turns.setdefault(f"{name}, alone", []).append(_turn(alone[name]))
            for candidate in [key for key in together if key.startswith(name)]:
                dist.barrier()
                turn = _turn(together[candidate])
                everyone: list[Any] = [None] * num_ranks
                dist.all_gather_object(everyone, turn)
                slowest = Turn(
                    max(each.solve for each in everyone),
                    max(each.update for each in everyone),
                    turn.products,
                )
                turns.setdefault(f"{candidate}, together", []).append(slowest)
    traffic = {
        name: {
            key: value
            for key, value in run.optimizer.report.work.items()
            if key.endswith(("_messages", "_bytes"))
        }
        for name, run in together.items()
        if isinstance(run, bench.Stepper) and run.optimizer.report is not None
    }
    return {
        "turns": {name: [asdict(turn) for turn in found] for name, found in turns.items()},
        "traffic": traffic,
        "network": network,
        "models": models,
    }


def _stepper(name: str, batch: tuple[Tensor, Tensor], settings: Settings, **options: Any) -> bench.Stepper:
    case = _case(settings, batch)
    return bench.Stepper(
        case,
        partitions(case.model)[name],
        batch,
        curvature_batch_size=settings.curvature,
        max_cg_steps=settings.cg_steps,
        **options,
    )


def _case(settings: Settings, batch: tuple[Tensor, Tensor]) -> Network:
    torch.manual_seed(settings.seed)
    case = bench.network("autoencoder", 1, settings.seed)
    if settings.small:
        case = replace(case, model=Autoencoder((784, 40, 20, 10)))
    return replace(case, batch=batch)


def _matrix_products(settings: Settings) -> Callable[[], None]:
    """The network's layers on the curvature's samples, without anything else."""
    generator = torch.Generator().manual_seed(settings.seed)
    sizes = [(784, 40)] if settings.small else _LAYERS
    pairs = [
        (torch.randn(settings.curvature, inner, generator=generator), torch.randn(inner, outer))
        for inner, outer in sizes
    ]

    def run() -> None:
        for _ in range(1 if settings.small else 20):  # about a second, so that a hiccup does not count
            for inputs, weight in pairs:
                inputs @ weight

    run()
    return run


def _turn(run: Callable[[], Any]) -> Turn:
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    if isinstance(run, bench.Stepper):
        report = run.optimizer.report
        assert report is not None
        return Turn(report.phases["solve"].seconds, report.seconds, report.num_products)
    return Turn(seconds, seconds)


def _network_between(num_numbers: int, num_ranks: int) -> dict[str, float]:
    """Bandwidth and latency between these processes, from sums of many numbers and of one."""

    def seconds(tensor: Tensor) -> float:
        best = math.inf
        for _ in range(5):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            best = min(best, time.perf_counter() - start)
        return best

    many, one = torch.ones(num_numbers), torch.ones(1)
    message = plan.all_reduce("sums", plan.NUMBER * num_numbers, num_ranks)
    long, short = seconds(many), seconds(one)
    return {"latency": short / message.rounds, "bandwidth": message.sent / max(long - short, 1e-9)}


def _described(images: Tensor, settings: Settings) -> dict[str, Any]:
    """What ``plan`` has to know, measured on one rank."""
    samples = images[: settings.curvature]
    found = {}
    for name in ("encoder / decoder", "equal"):
        case = _case(settings, (samples, samples))
        model, machine = calibration.describe(case, partitions(case.model)[name], settings.repetitions)
        found[name] = {"model": asdict(model), "machine": asdict(machine)}
    return found


# Afterwards


def rows(found: Mapping[str, Any], num_ranks: int, settings: Settings) -> list[Row]:
    """What was measured, beside what was to be expected."""

    def best(name: str) -> Turn:
        turns = found["turns"][name]
        return Turn(
            min(turn["solve"] for turn in turns),
            min(turn["update"] for turn in turns),
            min(turn["products"] for turn in turns),
        )

    limit = num_ranks * best("machine, alone").update / best("machine, together").update
    update = plan.Update(5 * settings.curvature, settings.curvature, settings.cg_steps)
    results = []
    for name, described in found["models"].items():
        model = plan.Model(
            **{
                **described["model"],
                "blocks": tuple(plan.Part(**part) for part in described["model"]["blocks"]),
            }
        )
        machine = plan.Machine(
            **{**described["machine"], **found["network"], "efficiency": min(limit / num_ranks, 1.0)}
        )
        for candidate in found["turns"]:
            if not (candidate.startswith(name) and candidate.endswith(", together")):
                continue
            shape = candidate.split(", ")[1]
            mesh = plan.Mesh(*map(int, shape.split(" x ")))
            costs = [part.product for part in model.blocks]
            one, many = (plan.predict(model, update, machine, each) for each in (plan.Mesh(), mesh))
            results.append(
                Row(
                    name,
                    shape,
                    best(f"{name}, alone"),
                    best(candidate),
                    sum(costs) / assign(costs, mesh.block).time * mesh.data,
                    limit,
                    (_predicted(one, update, model), _predicted(many, update, model)),
                    found["traffic"][f"{name}, {shape}"],
                )
            )
    return results


def _predicted(found: plan.Prediction, update: plan.Update, model: plan.Model) -> Turn:
    return Turn(found.solving, found.seconds, update.num_products * len(model.blocks))


def measure(num_ranks: int, settings: Settings) -> dict[str, Any]:
    """Start so many ranks and wait for what they found; where one fails, its error is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_worker, args=(num_ranks, folder, settings), nprocs=num_ranks)  # type: ignore[no-untyped-call]
        content: dict[str, Any] = files.read_json(Path(folder) / "found.json")
    return content


def run(settings: Settings, out: Path | None, console: Console, page: Path | None = None) -> None:
    """Measure, show a table and write ``out``; put the table into a page of the documentation."""
    if page is not None:
        with_table(page.read_text(encoding="utf-8"), "")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.touch()  # a file that cannot be written shall not cost minutes
    content: dict[str, Any] = {
        "benchmark": "mesh",
        "settings": asdict(settings),
        "cores": os.cpu_count(),
        "threads": 1,
        "python": platform.python_version(),
        "versions": {"blockhf": blockhf.__version__, "torch": torch.__version__},
        "runs": [],
    }
    console.print(_introduction(settings), soft_wrap=True)
    lines: list[str] = [_introduction(settings), ""]
    for num_ranks in (2,) if settings.ranks == 2 else (2, settings.ranks):
        found = measure(num_ranks, settings)
        measured = rows(found, num_ranks, settings)
        console.print(table(num_ranks, measured))
        lines += markdown(num_ranks, measured)
        if measured[0].machine < 1:
            console.print(
                "All ranks at once made less than one alone: something else keeps the machine busy, and "
                "these numbers mean little. Measure again when it is quiet.",
                soft_wrap=True,
            )
        content["runs"].append({"ranks": num_ranks, "rows": [asdict(row) for row in measured], **found})
        if num_ranks == 2:
            content["blocks"] = claimed(measured)
            content["checks"] = checks(measured)
            for words, holds in content["checks"].items():
                console.print(f"{'holds' if holds else 'FAILS'}: {words}", soft_wrap=True)
    if out is not None:
        files.write(out, files.to_json(content, indent=2))
        console.print(f"Written: {out}", soft_wrap=True)
    if page is not None:
        text = with_table(page.read_text(encoding="utf-8"), "\n".join(lines))
        files.write(page, text.encode())
        console.print(f"Written: {page}", soft_wrap=True)


def claimed(measured: Sequence[Row]) -> dict[str, dict[str, float]]:
    """What the page of the paper's claims reads: the CG phase on one rank and on two."""
    return {
        row.blocks: {"one": row.one.solve, "two": row.many.solve, "machine": row.machine}
        for row in measured
        if row.mesh == "2 x 1"
    }


def checks(measured: Sequence[Row]) -> dict[str, bool]:
    """The bars, in words, and whether they hold, for the mesh of two blocks."""
    found = {}
    for row in measured:
        if row.mesh != "2 x 1":
            continue
        counts = row.one.products, row.many.products
        found[f"{row.blocks}: as many products on one rank as on two, {counts[0]} and {counts[1]}"] = (
            counts[0] == counts[1]
        )
        reached = row.speed_up("solve") / row.allowed(2)
        found[f"{row.blocks}: {reached:.0%} of what the placement allows, at least {SHARE_BAR:.0%}"] = (
            reached >= SHARE_BAR
        )
        for phase in ("solve", "update"):
            wrong = row.predicted_speed_up(phase) / row.speed_up(phase) - 1
            found[
                f"{row.blocks}: speed-up of the {phase} predicted {wrong:+.0%}, within {PREDICTION_BAR:.0%}"
            ] = abs(wrong) <= PREDICTION_BAR
    return found


def _introduction(settings: Settings) -> str:
    return (
        f"torch {torch.__version__}; {os.cpu_count()} cores, ranks of one thread; autoencoder, curvature "
        f"from {settings.curvature:,} samples, {settings.cg_steps} CG iterations; the best of "
        f"{settings.repetitions} turns."
    )


_HEADS = ("blocks", "mesh", "phase", "1 rank", "on it", "speed-up", "allowed", "reached", "predicted", "off")


def _cells(num_ranks: int, row: Row) -> list[list[str]]:
    """Measured, allowed and predicted: a line for CG and one for the whole update."""
    lines = []
    for phase, words in (("solve", "CG"), ("update", "update")):
        speed_up, predicted = row.speed_up(phase), row.predicted_speed_up(phase)
        allowed = row.allowed(num_ranks)
        lines.append(
            [
                row.blocks if phase == "solve" else "",
                row.mesh if phase == "solve" else "",
                words,
                f"{getattr(row.one, phase):.2f} s",
                f"{getattr(row.many, phase):.2f} s",
                f"{speed_up:.2f}",
                f"{allowed:.2f}" if phase == "solve" else "",
                f"{speed_up / allowed:.0%}" if phase == "solve" else "",
                f"{predicted:.2f}",
                f"{predicted / speed_up - 1:+.0%}",
            ]
        )
    return lines


def _title(num_ranks: int, measured: Sequence[Row]) -> str:
    return f"{num_ranks} ranks; all at once make {measured[0].machine:.2f} times the matrix products of one"


def table(num_ranks: int, measured: Sequence[Row]) -> Table:
    """For the terminal."""
    shown = Table(title=_title(num_ranks, measured), title_justify="left", box=box.SIMPLE_HEAD)
    for place, head in enumerate(_HEADS):
        shown.add_column(head, justify="left" if place < 3 else "right", no_wrap=True)
    for row in measured:
        for cells in _cells(num_ranks, row):
            shown.add_row(*cells)
    return shown


def markdown(num_ranks: int, measured: Sequence[Row]) -> list[str]:
    """The same table, in lines for a page."""
    lines = [_title(num_ranks, measured) + ":", "", f"| {' | '.join(_HEADS)} |"]
    lines.append(f"|{'---|' * 3}{'---:|' * (len(_HEADS) - 3)}")
    lines += [f"| {' | '.join(cells)} |" for row in measured for cells in _cells(num_ranks, row)]
    return [*lines, ""]


def with_table(page: str, text: str) -> str:
    r"""A page with this text between its marks.

    >>> with_table("a\n<!-- bench mesh: begin -->\n<!-- bench mesh: end -->\n", "b").splitlines()
    ['a', '<!-- bench mesh: begin -->', '', 'b', '', '<!-- bench mesh: end -->']
    """
    begin, end = "<!-- bench mesh: begin -->\n", "<!-- bench mesh: end -->"
    if begin not in page or end not in page:
        raise ValueError(f"The page has no place for the table. Write {begin.strip()} and {end} into it.")
    before, rest = page.split(begin, 1)
    return f"{before}{begin}\n{text.strip()}\n\n{end}{rest.split(end, 1)[1]}"
