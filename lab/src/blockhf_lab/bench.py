"""``blockhf bench``: what products and updates cost, in time and memory, beside other libraries.

An absolute time says more about the machine than about the code, so everything is compared within one
run: the candidates take turns, and the best turn of each counts. Each way's product is checked against
that of the double backward before it is timed.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import json
import math
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console, RenderableType
from rich.console import Group as Together
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

import blockhf
from blockhf import BlockHF, blocks
from blockhf.blocks import Group
from blockhf.curvature import DoubleBackward, Formed, GaussNewton, Products, Traced
from blockhf.linalg import Damped, DiagonalBlock, conjugate_gradient
from blockhf.policy import PolicyState
from blockhf.report import StepReport, Stopwatch
from blockhf_lab import lstm, peers, residual
from blockhf_lab.autoencoder import Autoencoder, reconstruction_error
from blockhf_lab.data import digits
from blockhf_lab.peers import Multiply, Network, UnavailableError, Way
from blockhf_lab.transformer import Transformer

SAMPLES = {
    "autoencoder": 1200,
    "residual": 256,
    "residual-channels-last": 256,
    "lstm": 1200,
    "transformer": 32,
}
"""The networks, and how many samples each is measured on."""

TOLERANCE = 1e-3
"""By how much a product in float32 may differ from the double backward's, relative to its norm."""


@dataclass(frozen=True)
class _Step:
    """What an update of the paper has: the gradient's batch, those of curvature, the damping."""

    batch: int
    curvature_batches: tuple[int, ...]
    damping: float


_STEPS = {
    "autoencoder": _Step(6000, (3000, 1200, 600), 0.0),
    "residual": _Step(2048, (512, 256, 128), 0.1),
}
_TURN = 0.03
_LSTM_PATTERNS = {"bottom": r"^lstm\.layers\.0\.", "middle": r"^lstm\.layers\.1\.", "top": ""}
_LIBRARIES = ("curvlinops-for-pytorch", "backpack-for-pytorch", "jax", "numpy")
_MATRIX_PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        networks: Names out of ``SAMPLES``; none is all.
        samples: Samples instead of each network's own number, to try things out.
        repetitions: Turns of each candidate.
        threads: Threads of torch and of JAX; none is their own choice.
        compile: Measure compiled products too, which takes minutes.
        everything: Products: trace long networks too. Updates: the paper's largest curvature batch and the
            residual network too. Either takes minutes.
        profile: Say where the time of a CG iteration goes.
        seed: Of weights, samples and vectors.
        device: Where products are measured.
    """

    networks: tuple[str, ...] = ()
    samples: int | None = None
    repetitions: int = 7
    threads: int | None = None
    compile: bool = False
    everything: bool = False
    profile: bool = False
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        try:
            torch.zeros(1, device=self.device).tolist()
        except (RuntimeError, AssertionError, ImportError) as error:
            raise ValueError(f"There is no device {self.device!r} here: {_first_line(error)}.") from error
        for name in self.networks:
            if name not in SAMPLES:
                raise ValueError(f"There is no network {name!r}. There are {', '.join(SAMPLES)}.")
        for option in ("samples", "repetitions", "threads"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ValueError(f"{option} is {value}, but must be at least 1.")

    def chosen(self, among: Sequence[str]) -> list[str]:
        """The networks to measure, out of those that a benchmark is for."""
        names = [name for name in among if not self.networks or name in self.networks]
        if not names:
            raise ValueError(f"This benchmark is for the networks {', '.join(among)}.")
        return names


@dataclass(frozen=True)
class Row:
    """What one way to a product costs.

    Attributes:
        network: The network.
        way: The way.
        product: Time of a product, in gradients.
        linearization: Time of what is done once a step, in gradients.
        seconds: Time of a product.
        peak_mib: Memory of a linearization and a product, over that before, where the machine tells.
        first_seconds: Time of the first linearization and product: tracing and compiling happen there.
        difference: From the product by double backward.
        note: Why there are no numbers, or what else there is to say.
    """

    network: str
    way: str
    product: float | None = None
    linearization: float | None = None
    seconds: float | None = None
    peak_mib: float | None = None
    first_seconds: float | None = None
    difference: float | None = None
    note: str = ""


def network(name: str, samples: int, seed: int = 0) -> Network:
    """A network by its name, with random samples."""
    torch.manual_seed(seed)
    if name == "autoencoder":
        model: nn.Module = Autoencoder()
        pictures = torch.rand(samples, 784)
        groups = blocks.by_module(model)
        return Network(
            name,
            model,
            (pictures, pictures),
            reconstruction_error,
            peers.jax_autoencoder,
            peers.jax_squared_error,
            groups,
        )
    if name == "lstm":
        model = lstm.SequenceClassifier(1, 10)
        batch = torch.rand(samples, 49, 1), torch.randint(10, (samples,))
        groups = blocks.by_pattern(model, _LSTM_PATTERNS)
        return Network(
            name, model, batch, F.cross_entropy, peers.jax_lstm, peers.jax_cross_entropy, groups, is_long=True
        )
    if name == "transformer":
        model = Transformer()
        batch = torch.randint(100, (samples, 128)), torch.randint(100, (samples, 128))
        in_jax = peers.jax_transformer(num_heads=4)
        groups = blocks.by_pattern(model, {"bottom": r"^(tokens|positions|layers\.0)", "top": ""})
        return Network(name, model, batch, _token_loss, in_jax, peers.jax_cross_entropy, groups)
    if name not in SAMPLES:
        raise ValueError(f"There is no network {name!r}. There are {', '.join(SAMPLES)}.")
    convolutional = residual.ResidualNetwork()
    pictures, labels = torch.rand(samples, 3, 32, 32), torch.randint(10, (samples,))
    layout = "NCHW"
    if name == "residual-channels-last":
        convolutional = convolutional.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        pictures = pictures.contiguous(memory_format=torch.channels_last)
        layout = "NHWC"
    return Network(
        name,
        convolutional,
        (pictures, labels),
        F.cross_entropy,
        peers.jax_residual(layout),
        peers.jax_cross_entropy,
        residual.groups(convolutional),
    )


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Time and memory


def best(candidates: dict[str, Callable[[], Any]], repetitions: int, device: str = "cpu") -> dict[str, float]:
    """The least seconds of each candidate, all of them run in turns. They should have run before.

    A candidate that is quick runs several times in its turn, and their mean is what the turn counts for. A
    turn ends when the device is done.
    """
    seconds = dict.fromkeys(candidates, math.inf)
    calls = dict.fromkeys(candidates, 1)
    with _uninterrupted():
        for repetition in range(repetitions):
            for name, run in candidates.items():
                time.sleep(0.005)  # lets the threads of the one before go to sleep
                start = time.perf_counter()
                for _ in range(calls[name]):
                    run()
                _wait_for(device)
                seconds[name] = min(seconds[name], (time.perf_counter() - start) / calls[name])
                if repetition == 0:
                    calls[name] = max(1, math.ceil(_TURN / seconds[name]))
    return seconds


def _wait_for(device: str) -> None:
    if torch.device(device).type != "cpu":
        torch.get_device_module(device).synchronize()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """No garbage collection in between."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def peak_mib(run: Callable[[], Any], device: str = "cpu") -> float | None:
    """By how much the process' memory rises at most in a call, or ``None`` where the machine does not tell.

    What ``run`` returns is kept until its end. On a device it is the memory of the device.
    """
    if torch.device(device).type == "cpu" and not os.access("/proc/self/clear_refs", os.W_OK):
        return None
    gc.collect()
    with suppress(OSError, AttributeError):  # gives back what the allocator has put by, or it goes uncounted
        ctypes.CDLL(None).malloc_trim(0)
    watch = Stopwatch(torch.device(device), memory=True)
    with watch.phase("before"):
        pass
    with watch.phase("run"):
        run()
    before, after = (watch.phases[name].peak_bytes for name in ("before", "run"))
    return None if before is None or after is None else (after - before) / 2**20


# Products


def ways(case: Network, options: Options) -> Iterator[tuple[str, Callable[[], Way]]]:
    """The ways to be compared, the double backward first: the others are checked against it."""
    long = case.is_long and not options.everything

    def traced(name: str, compile: bool) -> Callable[[], Way]:
        def make() -> Way:
            if long:
                raise UnavailableError("left out: tracing it takes minutes; --all includes it")
            if compile and not options.compile:
                raise UnavailableError("left out: compiling takes minutes; --compile includes it")
            return peers.ours(name, case, Traced(compile=compile))

        return make

    yield "double backward", lambda: peers.ours("double backward", case, DoubleBackward())
    yield "traced", traced("traced", False)
    yield "traced, compiled", traced("traced, compiled", True)
    yield "three backward passes", lambda: peers.three_backward_passes(case)
    yield "curvlinops", lambda: peers.curvlinops(case)
    yield "BackPACK", lambda: peers.backpack(case)
    yield "JAX", lambda: peers.jax(case)


@dataclass
class _Candidate:
    way: Way
    multiply: Multiply
    vector: Any
    difference: float
    first_seconds: float
    peak_mib: float | None

    def product(self) -> Any:
        return self.multiply(self.vector)


def products(case: Network, options: Options) -> list[Row]:
    """The cost of a Gauss-Newton product, one block, by each way."""
    generator = torch.Generator().manual_seed(options.seed)
    vector = torch.randn(sum(param.numel() for param in case.params), generator=generator)
    vector = vector.to(options.device)
    case.gradient()
    rows: dict[str, Row] = {}
    candidates: dict[str, _Candidate] = {}
    expected: Tensor | None = None
    for name, make in ways(case, options):
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                candidate, result = _prepare(make(), vector, expected, options.device)
            for warning in caught:  # the peers' own are of no interest here
                if str(warning.message).startswith("Compiling failed"):
                    raise UnavailableError(str(warning.message))
        except UnavailableError as error:
            rows[name] = Row(case.name, name, note=str(error))
            continue
        except Exception as error:  # a peer may fail in any way; the others go on
            rows[name] = Row(case.name, name, note=f"fails: {_first_line(error)}")
            continue
        expected = result if expected is None else expected
        if not candidate.difference <= TOLERANCE:
            rows[name] = Row(
                case.name,
                name,
                difference=candidate.difference,
                note=f"wrong: it differs by {candidate.difference:.1e}",
            )
            continue
        candidates[name] = candidate
        rows[name] = Row(case.name, name)
    timed: dict[str, Callable[[], Any]] = {"gradient": case.gradient}
    for name, candidate in candidates.items():
        timed[name] = candidate.product
        timed[f"{name}: linearization"] = candidate.way.linearize
        if candidate.way.gradient is not None:
            candidate.way.gradient()
            timed[f"{name}: gradient"] = candidate.way.gradient
    seconds = best(timed, options.repetitions, options.device)
    unit = seconds["gradient"]
    for name, candidate in candidates.items():
        own = seconds.get(f"{name}: gradient")
        rows[name] = Row(
            case.name,
            name,
            product=seconds[name] / unit,
            linearization=seconds[f"{name}: linearization"] / unit,
            seconds=seconds[name],
            peak_mib=candidate.peak_mib,
            first_seconds=candidate.first_seconds,
            difference=candidate.difference,
            note="" if own is None else f"its own gradient costs {own / unit:.2f}",
        )
    peak = peak_mib(case.gradient, options.device)
    gradient = Row(case.name, "gradient", product=1.0, seconds=unit, peak_mib=peak, note="the unit")
    result_rows = [gradient, *rows.values()]
    if case.is_long:
        result_rows.append(_formed(case, vector, rows["double backward"], options))
    return result_rows


def _prepare(way: Way, vector: Tensor, expected: Tensor | None, device: str) -> tuple[_Candidate, Tensor]:
    """Warm a way up and see whether its product is right, and what memory it takes."""
    own = way.enter(vector)
    start = time.perf_counter()
    result = way.leave(way.linearize()(own))
    _wait_for(device)
    first_seconds = time.perf_counter() - start
    difference = 0.0 if expected is None else _difference(result, expected)
    peak = peak_mib(partial(_once, way.linearize, own), device)
    return _Candidate(way, way.linearize(), own, difference, first_seconds, peak), result


def _difference(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other))


def _first_line(error: Exception) -> str:
    message = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {message[0][:100]}"


def _formed(case: Network, vector: Tensor, reference: Row, options: Options) -> Row:
    """The cost of the paper's blocks, formed: once a step, and then next to nothing."""
    expected = peers.ours("", case, DoubleBackward(), case.groups).linearize()(vector)
    way = peers.ours("formed", case, Formed(), case.groups)
    candidate, _ = _prepare(way, vector, expected, options.device)
    if not candidate.difference <= TOLERANCE:
        return Row(case.name, "formed", note=f"wrong: it differs by {candidate.difference:.1e}")
    seconds = best(
        {"gradient": case.gradient, "form": way.linearize, "product": candidate.product},
        options.repetitions,
        options.device,
    )
    sizes = ", ".join(str(sum(param.numel() for _, param in group["params"])) for group in case.groups)
    note = f"blocks of {sizes} parameters"
    linearization = seconds["form"] / seconds["gradient"]
    if reference.product is not None:
        note += f"; forming them costs as much as {linearization / reference.product:.1f} products"
    return Row(
        case.name,
        "formed",
        product=seconds["product"] / seconds["gradient"],
        linearization=linearization,
        seconds=seconds["product"],
        peak_mib=candidate.peak_mib,
        first_seconds=candidate.first_seconds,
        difference=candidate.difference,
        note=note,
    )


# Updates


@dataclass(frozen=True)
class StepRow:
    """What an update costs.

    Attributes:
        network: The network.
        optimizer: The optimizer and its settings.
        seconds: Time of an update.
        ratio: In updates of what ``unit`` names.
        unit: What the ratio refers to.
        num_products: Products in the update, all blocks together.
        phases: Seconds of the phases of the quickest update.
        note: How it was measured, where that is not by the clock alone.
    """

    network: str
    optimizer: str
    seconds: float
    ratio: float
    unit: str
    num_products: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    note: str = ""


class Stepper:
    """Makes one and the same update again and again, and remembers the quickest one's phases."""

    def __init__(
        self, case: Network, groups: Sequence[Group], batch: tuple[Tensor, Tensor], **settings: Any
    ) -> None:
        self.optimizer = BlockHF.paper(groups, measure_memory=False, **settings)
        self.case, self.batch = case, batch
        for _ in range(2):  # traces, and gets a direction to start from
            self._step()
        self._params = [param.detach().clone() for param in case.params]
        self._state = self.optimizer.state_dict()
        self.phases: dict[str, float] = {}
        self.num_products = 0
        self.statuses: list[str] = []

    def __call__(self) -> None:
        self.optimizer.load_state_dict(self._state)
        with torch.no_grad():
            for param, value in zip(self.case.params, self._params, strict=True):
                param.copy_(value)
        report = self._step()
        self.num_products = report.num_products
        self.statuses = [block.status for block in report.blocks]
        phases = {name: phase.seconds for name, phase in report.phases.items()}
        if not self.phases or sum(phases.values()) < self.seconds:
            self.phases = phases

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def note(self) -> str:
        limits = [group["max_cg_steps"] + 1 for group in self.optimizer.param_groups]
        early = self.num_products < sum(limits)
        return f"CG ended early: {', '.join(self.statuses)}" if early else ""

    def _step(self) -> StepReport:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what an update costs is measured, and not where it leads
            self.optimizer.step(self.case.objective, self.batch)
        assert self.optimizer.report is not None
        return self.optimizer.report


def steps(name: str, options: Options) -> list[StepRow]:
    """Updates of HF, block HF and Adam at the paper's settings, in turns.

    The autoencoder has the carried digits, the residual network random pictures: there are none to carry,
    and the updates cost the same.
    """
    paper = _STEPS[name]
    sizes = paper.curvature_batches if options.everything else paper.curvature_batches[1:]
    shrink = (options.samples or sizes[0]) / sizes[0]
    batch = _step_batch(name, max(1, round(paper.batch * shrink)), options.seed)
    pairs: dict[str, str] = {}
    runs: dict[str, Callable[[], Any]] = {}
    for size in (max(1, int(size * shrink)) for size in sizes):
        for kind in ("HF", "block HF"):
            case = network(name, 1, options.seed)
            groups = blocks.single(case.model) if kind == "HF" else case.groups
            stepper = Stepper(case, groups, batch, curvature_batch_size=size, damping=paper.damping)
            runs[f"{kind}, curvature {size}"] = stepper
        pairs[f"block HF, curvature {size}"] = f"HF, curvature {size}"
    adam = f"Adam, batch {len(batch[0])}"
    runs[adam] = _adam(network(name, 1, options.seed), batch)
    runs[adam]()
    seconds = best(runs, options.repetitions)
    seconds |= {key: run.seconds for key, run in runs.items() if isinstance(run, Stepper)}
    rows = []
    for key, run in runs.items():
        ratio = seconds[key] / seconds[adam]
        if not isinstance(run, Stepper):
            rows.append(StepRow(name, key, seconds[key], ratio, adam))
            continue
        beside = f"{seconds[key] / seconds[pairs[key]]:.2f} × {pairs[key]}" if key in pairs else ""
        note = "; ".join(filter(None, [beside, run.note]))
        rows.append(StepRow(name, key, seconds[key], ratio, adam, run.num_products, run.phases, note))
    return rows


def _step_batch(name: str, size: int, seed: int) -> tuple[Tensor, Tensor]:
    if name == "autoencoder":
        pictures = digits().train_images[:size]
        return pictures, pictures
    return network(name, size, seed).batch


def _adam(case: Network, batch: tuple[Tensor, Tensor]) -> Callable[[], None]:
    optimizer = torch.optim.Adam(case.params, lr=1e-3)

    def update() -> None:
        optimizer.zero_grad()
        _, loss = case.objective(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return update


def lstm_steps(options: Options) -> list[StepRow]:
    """Updates of block HF on the LSTM, 100 CG iterations a block, with formed blocks and without.

    After eight updates by Martens' method, as at the very start CG ends before that.
    """
    curvature = min(options.samples or SAMPLES["lstm"], 1200)
    data = digits()
    pictures = data.train_images[: 5 * curvature].view(-1, 1, 28, 28)
    batch = F.avg_pool2d(pictures, 4).flatten(1).unsqueeze(2), data.train_labels[: 5 * curvature]
    trained = network("lstm", 1, options.seed)
    trainer = BlockHF.martens(trained.groups)
    for _ in range(8):
        trainer.step(trained.objective, batch)
    full, few = 100, 5
    steppers = {}
    for name, ways_, steps in (("formed", Formed(), full), ("double backward", DoubleBackward(), few)):
        case = network("lstm", 1, options.seed)
        case.model.load_state_dict(trained.model.state_dict())
        steppers[name] = Stepper(
            case,
            case.groups,
            batch,
            curvature_batch_size=curvature,
            damping=0.01,
            max_cg_steps=steps,
            products=ways_,
        )
    best(dict(steppers), options.repetitions)
    formed, graph = steppers["formed"], steppers["double backward"]
    expected = formed.num_products
    extrapolated = {**graph.phases, "solve": graph.phases["solve"] * expected / graph.num_products}
    reference = formed.seconds
    total = sum(extrapolated.values())
    unit = "formed blocks"
    return [
        StepRow(
            "lstm",
            "block HF, formed blocks",
            reference,
            1.0,
            unit,
            formed.num_products,
            formed.phases,
            formed.note,
        ),
        StepRow(
            "lstm",
            "block HF, double backward",
            total,
            total / reference,
            unit,
            expected,
            extrapolated,
            f"extrapolated to as many products: {graph.num_products} were timed",
        ),
    ]


# Memory


@dataclass(frozen=True)
class MemoryRow:
    """The peak memory of linearizing and multiplying once, over that before, and the time of a product."""

    network: str
    way: str
    micro_batch: str
    memory_budget: str
    peak_mib: float | None
    product: float
    difference: float


def memory(case: Network, options: Options) -> list[MemoryRow]:
    """What micro-batches and a memory budget do to memory and time."""
    samples = len(case.batch[0])
    quarter = max(1, samples // 4)
    generator = torch.Generator().manual_seed(options.seed)
    vector = torch.randn(sum(param.numel() for param in case.params), generator=generator)
    vector = vector.to(options.device)
    case.gradient()
    expected: Tensor | None = None
    measured = []
    timed: dict[str, Callable[[], Any]] = {"gradient": case.gradient}
    for name, kind in (("double backward", DoubleBackward), ("traced", Traced)):
        for size, budget in ((None, 0), (quarter, 0), (quarter, 2**62)):
            run = _phase(case, kind(memory_budget=budget), size)
            result = run()(vector)
            expected = result if expected is None else expected
            difference = _difference(result, expected)
            peak = peak_mib(partial(_once, run, vector))
            label = "whole" if size is None else f"{size} of {samples}"
            allowance = "–" if size is None else "unlimited" if budget else "0"
            measured.append((name, label, allowance, peak, difference))
            timed[f"{name} {label} {allowance}"] = partial(run(), vector)
    seconds = best(timed, options.repetitions)
    return [
        MemoryRow(
            case.name,
            name,
            label,
            allowance,
            peak,
            seconds[f"{name} {label} {allowance}"] / seconds["gradient"],
            difference,
        )
        for name, label, allowance, peak, difference in measured
    ]


def _phase(case: Network, how: Products, micro_batch_size: int | None) -> Callable[[], Multiply]:
    samples, state = case.samples(micro_batch_size=micro_batch_size), PolicyState()

    def linearize() -> Multiply:
        operator = how.linearize(GaussNewton(), samples, [30], state)
        return lambda vector: operator.product(0, 0, vector)

    return linearize


def _once(linearize: Callable[[], Multiply], vector: Any) -> Any:
    return linearize()(vector)


# Where the time goes


def iteration_shares(case: Network, options: Options, num_steps: int = 10) -> dict[str, float]:
    """Which share of CG iterations with traced products goes where; the profiler adds a little to each."""
    samples = case.samples()
    operator = Traced().linearize(GaussNewton(), samples, [num_steps], PolicyState())
    whole = samples.blocks[0]
    gradient = whole.flatten(case.gradient())

    class Marked:
        def __matmul__(self, vector: Tensor) -> Tensor:
            with record_function("product"):
                return Damped(DiagonalBlock(operator, 0), 1e-3) @ vector

    def solve() -> None:
        conjugate_gradient(Marked(), gradient, max_steps=num_steps)

    solve()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("iterations"):
        solve()
    total = 0.0
    spent = {"matrix products": 0.0, "other operations of the product": 0.0, "CG's vector operations": 0.0}
    for event in profiler.events():
        if event.name == "iterations":
            total = event.cpu_time_total
        if not event.name.startswith("aten::"):
            continue
        parent, inside = event.cpu_parent, False
        while parent is not None:
            inside = inside or parent.name == "product"
            parent = parent.cpu_parent
        key = (
            "matrix products"
            if event.name in _MATRIX_PRODUCTS
            else "other operations of the product"
            if inside
            else "CG's vector operations"
        )
        spent[key] += event.self_cpu_time_total
    spent["Python and the rest"] = total - sum(spent.values())
    return {name: microseconds / total for name, microseconds in spent.items()}


# Commands


def run(what: str, options: Options, out: Path | None, console: Console) -> bool:
    """Measure, show tables and write ``out``; Ctrl-C ends early with what there is until then.

    Returns:
        Whether it came to its end.
    """
    among = {
        "products": list(SAMPLES),
        "step": ["autoencoder", "lstm", "residual"],
        "memory": ["autoencoder", "residual", "residual-channels-last"],
    }[what]
    chosen = options.chosen(among)
    if what == "step" and not options.networks and not options.everything:
        chosen.remove("residual")  # its updates take minutes
    if options.threads is not None:
        torch.set_num_threads(options.threads)
        os.environ["NPROC"] = str(options.threads)  # JAX reads it when it is imported
    if options.compile:
        torch.compiler.config.force_disable_caches = True  # else the seconds are those of reading files
    content = {**_header(what, options), "finished": False, "results": []}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(out, content)  # a file that cannot be written shall not cost minutes
    console.print(_introduction(content), soft_wrap=True)
    try:
        for name in chosen:
            samples = options.samples or SAMPLES[name]
            if what == "products":
                case = network(name, samples, options.seed).to(options.device)
                rows: Sequence[Any] = products(case, options)
                console.print(_products_table(name, samples, rows))
            elif what == "step":
                rows = steps(name, options) if name in _STEPS else lstm_steps(options)
                console.print(_step_table(name, rows))
            else:
                rows = memory(network(name, samples, options.seed), options)
                console.print(_memory_table(name, samples, rows))
            content["results"] += [asdict(row) for row in rows]
        if options.profile:
            samples = options.samples or SAMPLES["autoencoder"]
            shares = iteration_shares(network("autoencoder", samples, options.seed), options)
            content["profile"] = shares
            console.print(_shares_table(samples, shares))
        content["finished"] = True
    except KeyboardInterrupt:
        console.print("Interrupted; this is what was measured until then.")
    if out is not None:
        _write(out, content)
        console.print(f"Written: {out}", soft_wrap=True)
    return bool(content["finished"])


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _header(what: str, options: Options) -> dict[str, Any]:
    versions = {"blockhf": blockhf.__version__, "torch": torch.__version__}
    for library in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[library] = importlib.metadata.version(library)
    return {
        "benchmark": what,
        "seed": options.seed,
        "repetitions": options.repetitions,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": _device_name(options.device),
        "python": platform.python_version(),
        "versions": versions,
    }


def _device_name(device: str) -> str:
    """What the device calls itself, where it does."""
    kind = torch.device(device).type
    return f"{device} ({torch.cuda.get_device_name(device)})" if kind == "cuda" else device


_LEGEND = {
    "products": (
        "Times of a product are in gradients on the same samples; 'once' is what is done once a step, ahead "
        "of the products; 'first use' is the first of both, with tracing and compiling, in seconds. MiB is "
        "the rise of the process' memory by a linearization and a product."
    ),
    "step": "Times and those of the phases are in seconds, of the quickest of the same update.",
    "memory": (
        "MiB is the rise of the process' memory by a linearization and a product; the time of a product is "
        "in gradients on the same samples."
    ),
}


def _introduction(content: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    return (
        f"{versions}; {content['cores']} cores, {content['threads']} threads, {content['device']}, float32, "
        f"seed {content['seed']}; the best of {content['repetitions']} turns\n{_LEGEND[content['benchmark']]}"
    )


def _products_table(name: str, samples: int, rows: Sequence[Row]) -> RenderableType:
    table = _table(f"{name}, {samples} samples: a Gauss-Newton product")
    table.add_column("way", no_wrap=True)
    for head in ("product", "once", "seconds", "MiB", "first use"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.way,
            _number(row.product),
            _number(row.linearization),
            _number(row.seconds, 4),
            _number(row.peak_mib, 0),
            _number(row.first_seconds, 1),
        )
    return _noted(table, {row.way: row.note for row in rows})


def _step_table(name: str, rows: Sequence[StepRow]) -> RenderableType:
    table = _table(f"{name}: an update")
    table.add_column("optimizer", no_wrap=True)
    for head in ("seconds", "ratio", "products"):
        table.add_column(head, justify="right", no_wrap=True)
    notes = {}
    for row in rows:
        phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in row.phases.items())
        notes[row.optimizer] = "; ".join(filter(None, [phases, row.note]))
        own = "" if row.num_products is None else str(row.num_products)
        table.add_row(row.optimizer, f"{row.seconds:.3f}", f"{row.ratio:.2f} × {row.unit}", own)
    return _noted(table, notes)


def _memory_table(name: str, samples: int, rows: Sequence[MemoryRow]) -> Table:
    table = _table(f"{name}, {samples} samples: memory of the products")
    for head in ("way", "micro-batch", "memory_budget"):
        table.add_column(head, no_wrap=True)
    for head in ("MiB", "product"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        wrong = "" if row.difference <= TOLERANCE else f"wrong: it differs by {row.difference:.1e}"
        table.add_row(
            row.way,
            row.micro_batch,
            row.memory_budget,
            _number(row.peak_mib, 0),
            _number(row.product),
            wrong,
        )
    return table


def _shares_table(samples: int, shares: dict[str, float]) -> Table:
    table = _table(f"autoencoder, {samples} samples: 10 CG iterations, traced")
    table.add_column("what")
    table.add_column("share", justify="right")
    for name, share in shares.items():
        table.add_row(name, f"{share:.1%}")
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)


def _noted(table: Table, notes: dict[str, str]) -> RenderableType:
    """A table with what there is to say of its rows below it, where there is room for it."""
    lines = [Text(f"  {name}: {note}", style="dim") for name, note in notes.items() if note]
    return Together(table, *lines, Text()) if lines else table


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
