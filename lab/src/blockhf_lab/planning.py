"""The command ``blockhf plan``: from its options to tables, a figure and a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from blockhf_lab import bench, calibration, files, plan
from blockhf_lab.plan import Machine, Mesh, Model, Prediction, Scaling, Update, short

_FEW = 2
_REPETITIONS = 3
_MOST = 1e24  # of numbers whose products are still far from overflowing
_MOST_LAYERS = 10_000
_MOST_RANKS = 1_000_000


@dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
        task: A network of the experiments; none is a transformer of ``parameters``.
        blocks: ``single``, ``module``, ``layer`` or a number of blocks; none is the network's own.
        parameters: Of the transformer.
        layers: Of the transformer.
        tokens: Of the transformer's samples.
        gradient_batch: Samples; none is the task's own.
        curvature_batch: The same for curvature.
        cg_steps: CG iterations; none is the task's own.
        micro_batch: Samples in memory at a time.
        ranks: How many; their mesh is the best one.
        block: The mesh itself, instead.
        data: The mesh itself, instead.
        bandwidths: Of the networks between ranks, in GB/s.
        latencies: The same in microseconds; one for all or one for each.
        flops: Floating point operations a second of a rank; none measures this machine.
        memory_bandwidth: GB/s of a rank's memory, if it is not measured.
        efficiency: What a rank keeps of its speed while the others are at work.
    """

    task: str = ""
    blocks: str = ""
    parameters: float | None = None
    layers: int = 24
    tokens: int = 2048
    gradient_batch: int | None = None
    curvature_batch: int | None = None
    cg_steps: int | None = None
    micro_batch: int | None = None
    ranks: int | None = None
    block: int | None = None
    data: int | None = None
    bandwidths: Sequence[float] = (25.0,)
    latencies: Sequence[float] = (10.0,)
    flops: float | None = None
    memory_bandwidth: float = 1000.0
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        if bool(self.task) == (self.parameters is not None):
            raise ValueError(
                f"Name either a task, {', '.join(calibration.TASKS)}, or --parameters of a transformer."
            )
        if self.task and self.task not in calibration.TASKS:
            raise ValueError(f"There is no task {self.task!r}. There are {', '.join(calibration.TASKS)}.")
        if not self.task and self.flops is None:
            raise ValueError("A network that is not here cannot be measured. Give the --flops of a rank.")
        if self.ranks is not None and (self.block is not None or self.data is not None):
            raise ValueError("Give either --ranks, or --block and --data.")
        for name in ("parameters", "flops", "memory_bandwidth", "efficiency"):
            value = getattr(self, name)
            if value is not None and not 0 < value < _MOST:
                raise ValueError(f"{name} is {value:g}, but must be above 0 and below {_MOST:g}.")
        for name in ("tokens", "gradient_batch", "curvature_batch", "cg_steps", "micro_batch"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < _MOST:
                raise ValueError(f"{name} is {value}, but must be at least 1 and below {_MOST:g}.")
        for name, most in (("layers", _MOST_LAYERS), ("ranks", _MOST_RANKS), ("block", _MOST_RANKS)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name} is {value}, but must be at least 1 and at most {most}.")
        if self.data is not None and not 1 <= self.data <= _MOST_RANKS:
            raise ValueError(f"data is {self.data}, but must be at least 1 and at most {_MOST_RANKS}.")
        for bandwidth in self.bandwidths:
            if not 0 < bandwidth < math.inf:
                raise ValueError(f"bandwidth is {bandwidth}, but must be above 0 and finite.")
        for latency in self.latencies:
            if not 0 <= latency < math.inf:
                raise ValueError(f"latency is {latency}, but must be at least 0 and finite.")
        if len(self.latencies) not in (1, len(self.bandwidths)):
            raise ValueError(
                f"There are {len(self.bandwidths)} bandwidths and {len(self.latencies)} latencies. Give one "
                "latency, or one for each bandwidth."
            )

    def update(self) -> Update:
        own = calibration.TASKS.get(self.task, calibration.Setting("", 512, 64, 30))
        gradient = own.gradient_batch if self.gradient_batch is None else self.gradient_batch
        curvature = min(own.curvature_batch, gradient)
        return Update(
            gradient,
            curvature if self.curvature_batch is None else self.curvature_batch,
            own.cg_steps if self.cg_steps is None else self.cg_steps,
            self.micro_batch,
        )

    def model_and_machine(self) -> tuple[Model, Machine]:
        """Counted, and where no flops are given, measured."""
        given = None
        if self.flops is not None:
            given = Machine.of_flops(self.flops, memory=1e9 * self.memory_bandwidth)
        if self.parameters is not None:
            if self.blocks not in ("", "layer", "single") and not self.blocks.isdecimal():
                raise ValueError(f"blocks is {self.blocks!r}, but must be layer, single or a number.")
            number = 1 if self.blocks == "single" else int(self.blocks) if self.blocks.isdecimal() else None
            assert given is not None
            return plan.transformer(self.parameters, self.layers, self.tokens, number), given
        setting = calibration.TASKS[self.task]
        samples = self.update().curvature_batch if given is None else _FEW
        case = bench.network(setting.network, min(samples, bench.SAMPLES[setting.network]))
        groups = calibration.partition(case, self.blocks)
        model, measured = calibration.describe(case, groups, _REPETITIONS if given is None else 0)
        return model, given or measured

    def machines(self, machine: Machine) -> list[Machine]:
        """The machine in each of the networks."""
        latencies = list(self.latencies) * (len(self.bandwidths) if len(self.latencies) == 1 else 1)
        return [
            replace(machine, bandwidth=1e9 * bandwidth, latency=1e-6 * latency, efficiency=self.efficiency)
            for bandwidth, latency in zip(self.bandwidths, latencies, strict=True)
        ]

    def predict(self, model: Model, update: Update, machine: Machine) -> Prediction:
        """On the mesh that is asked for."""
        if self.block is not None or self.data is not None:
            return plan.predict(model, update, machine, Mesh(self.block or 1, self.data or 1))
        return plan.best(model, update, machine, 2 if self.ranks is None else self.ranks)


def run(request: Request, console: Console, *, out: Path | None = None, plot: Path | None = None) -> None:
    """Show the plan; write it to ``out`` and its figure to ``plot``, as PNG and SVG."""
    update = request.update()
    model, machine = request.model_and_machine()
    machines = request.machines(machine)
    content: dict[str, Any] = {
        "model": asdict(model),
        "update": asdict(update),
        "measured": request.flops is None,
        "threads": torch.get_num_threads(),
        "networks": [],
    }
    console.print(_introduction(model, update, machine, request), soft_wrap=True)
    console.print(_blocks_table(model, update))
    found = []
    for machine in machines:
        words = network_words(machine)
        prediction = request.predict(model, update, machine)
        one = plan.predict(model, update, machine, Mesh())
        adam = plan.data_parallel_adam(model, update, machine, prediction.mesh.ranks)
        alone = plan.data_parallel_adam(model, update, machine, 1)
        scaled = plan.scaling(model, update, machine)
        found.append((words, scaled))
        console.print(update_table(words, prediction, one, adam, alone))
        console.print(scaling_table(words, scaled))
        content["networks"].append(
            {
                "machine": asdict(machine),
                "block_hf": _record(prediction, one),
                "adam": _record(adam, alone),
                "scaling": [
                    {"block_hf": _record(ours, scaled.block_hf[0]), "adam": _record(other, scaled.adam[0])}
                    for ours, other in zip(scaled.block_hf, scaled.adam, strict=True)
                ],
            }
        )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        files.write(out, files.to_json(content, indent=2))
        console.print(f"Written: {out}", soft_wrap=True)
    if plot is not None:
        from blockhf_lab import figures

        figure = figures.scaling(found, title=model.name[:1].upper() + model.name[1:])
        plot.parent.mkdir(parents=True, exist_ok=True)
        for suffix, draw in ((".png", figures.png), (".svg", figures.svg)):
            files.write(plot.with_suffix(suffix), draw(figure))
            console.print(f"Written: {plot.with_suffix(suffix)}", soft_wrap=True)


def _record(prediction: Prediction, one: Prediction) -> dict[str, Any]:
    return {
        **asdict(prediction),
        "seconds": prediction.seconds,
        "speed_up": one.seconds / prediction.seconds,
        "sent": prediction.sent,
        "bytes": prediction.bytes,
    }


# Tables


def network_words(machine: Machine) -> str:
    """Bandwidth and latency in words.

    >>> network_words(Machine(1, 1, 1, bandwidth=1e8, latency=0.02))
    '0.1 GB/s, 20 ms'
    """
    latency = machine.latency
    shown = f"{1e3 * latency:g} ms" if latency >= 1e-3 else f"{1e6 * latency:g} µs"
    return f"{machine.bandwidth / 1e9:g} GB/s, {shown}"


def _introduction(model: Model, update: Update, machine: Machine, request: Request) -> str:
    how = "measured here" if request.flops is None else "as given"
    return (
        f"{model.name}: {short(model.parameters)} parameters, {len(model.blocks)} blocks; gradient from "
        f"{update.gradient_batch:,} samples, curvature from {update.curvature_batch:,}, {update.cg_steps} CG "
        f"iterations.\nA rank makes {short(machine.gradient)} multiplications a second in gradients and "
        f"{short(machine.product)} in products, {how}."
    )


def _blocks_table(model: Model, update: Update, most: int = 8) -> Table:
    table = _table("Multiplications of an update")
    table.add_column("", no_wrap=True)
    for head in ("parameters", "a sample", "an update"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_row(
        "gradient",
        short(model.parameters),
        short(model.gradient),
        short(model.gradient * update.gradient_batch),
    )
    count = update.num_products * update.curvature_batch
    shown = model.blocks if len(model.blocks) <= most else (*model.blocks[: most - 1], model.blocks[-1])
    for part in shown:
        if part is shown[-1] and len(shown) < len(model.blocks):
            table.add_row("…")
        table.add_row(
            f"products of {part.name}",
            short(part.parameters),
            short(part.product),
            short(part.product * count),
        )
    total = sum(part.product for part in model.blocks)
    table.add_row("all products", short(model.parameters), short(total), short(total * count))
    return table


def update_table(
    words: str, ours: Prediction, one: Prediction, adam: Prediction, adam_alone: Prediction
) -> Table:
    """An update on a mesh, beside one of Adam on as many ranks."""
    ranks = f"{ours.mesh.ranks} ranks" if ours.mesh.ranks > 1 else "1 rank"
    table = _table(f"An update on {ranks}, {ours.mesh} (block x data), {words}")
    table.add_column("of the busiest rank", no_wrap=True)
    for head in ("block HF", "Adam"):
        table.add_column(head, justify="right", no_wrap=True)

    def rows(kind: str, show: Callable[[float], str], *found: dict[str, float]) -> None:
        for name in dict.fromkeys(name for each in found for name in each):
            cells = [show(each[name]) if name in each else "–" for each in found]
            table.add_row(f"{kind}: {name}", *cells)

    def sent(prediction: Prediction) -> dict[str, float]:
        return {message.purpose: message.sent for message in prediction.messages}

    rows("multiplications", short, ours.multiplications, adam.multiplications)
    rows("memory", size, ours.memory, adam.memory)
    rows("sent", size, sent(ours), sent(adam))
    rows("computing", duration, ours.computing, adam.computing)
    rows("messages", duration, ours.sending, adam.sending)
    table.add_section()
    table.add_row("memory", size(ours.bytes), size(adam.bytes))
    table.add_row("sent", size(ours.sent), size(adam.sent))
    table.add_row("time", duration(ours.seconds), duration(adam.seconds))
    table.add_row("speed-up", f"{one.seconds / ours.seconds:.2f}", f"{adam_alone.seconds / adam.seconds:.2f}")
    return table


def scaling_table(words: str, scaled: Scaling) -> Table:
    """More and more ranks."""
    table = _table(f"More ranks, {words}: block HF on the best mesh, and data-parallel Adam")
    for head in (
        "ranks",
        "mesh",
        "time",
        "speed-up",
        "messages",
        "sent",
        "memory",
        "Adam: time",
        "speed-up",
        "messages",
        "sent",
    ):
        table.add_column(head, justify="right")
    rows = zip(
        scaled.ranks,
        scaled.block_hf,
        plan.speed_ups(scaled.block_hf),
        scaled.adam,
        plan.speed_ups(scaled.adam),
        strict=True,
    )
    for ranks, ours, faster, adam, adam_faster in rows:
        table.add_row(
            f"{ranks:,}",
            str(ours.mesh),
            duration(ours.seconds),
            f"{faster:.1f}",
            f"{ours.waiting:.0%}",
            size(ours.sent),
            size(ours.bytes),
            duration(adam.seconds),
            f"{adam_faster:.1f}",
            f"{adam.waiting:.0%}",
            size(adam.sent),
        )
    return table


def size(num_bytes: float) -> str:
    """Bytes for people.

    >>> size(40), size(11_349_256), size(7.88e9)
    ('40 B', '11.3 MB', '7.88 GB')
    """
    for unit, letters in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{_three(num_bytes / unit)} {letters}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> duration(4986.2), duration(0.0314), duration(2e-5), duration(0.0)
    ('4,986 s', '31.4 ms', '20 µs', '0 s')
    """
    if seconds >= 1:
        return f"{_three(seconds)} s"
    if seconds >= 1e-3:
        return f"{_three(1e3 * seconds)} ms"
    return f"{_three(1e6 * seconds)} µs" if seconds > 0 else "0 s"


def _three(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
