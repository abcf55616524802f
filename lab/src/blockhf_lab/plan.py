"""``blockhf plan``: what an update costs on a mesh of processes, in work, memory, messages and time.

A model of four kinds of records and one function: ``predict`` takes a ``Model`` (what a sample costs), an
``Update`` (how many samples and iterations), a ``Machine`` (how fast) and a ``Mesh`` (how many), and gives a
``Prediction``. ``data_parallel_adam`` gives one for Adam. Nothing here measures anything: ``calibration``
does. docs/scaling.md has the equations, and how good they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from blockhf.meshes import assign, estimated_costs

NUMBER = 4
"""Bytes of a number, in float32."""

VECTOR_PASSES = 15
"""Reads and writes of a vector of the block's size in a CG iteration, the product's own left out."""

CG_VECTORS = 6
"""Vectors of the block's size in CG: right-hand side, solution, residual, direction, product, spare."""

RESIDUALS = 2
"""What products keep of a sample, in activations: values and derivatives."""

LINEARIZATION = 2
"""Forward passes to linearize: one for the residuals, and one to see that the loss is the objective's own."""

_HEADER, _SOLUTION_HEAD = 3, 7  # numbers in float64: of a rank, and of each block's solution
RANKS = tuple(2**power for power in range(11))
"""1 to 1,024."""


# What goes in


@dataclass(frozen=True)
class Part:
    """A block.

    Attributes:
        name: Its name.
        parameters: How many.
        product: Multiplications of a product with its matrix, for one sample.
        first: How many parameters its first tensor has; ranks place blocks by it.
    """

    name: str
    parameters: int
    product: float
    first: int = 0


@dataclass(frozen=True)
class Model:
    """What a sample costs.

    Attributes:
        name: For people.
        blocks: In the network's order.
        forward: Multiplications of a forward pass.
        gradient: Multiplications of a gradient, the forward pass included.
        activations: Numbers that a gradient keeps between its two passes.
        sample_bytes: The size of a sample, by its tensors: inputs, targets.
    """

    name: str
    blocks: tuple[Part, ...]
    forward: float
    gradient: float
    activations: float
    sample_bytes: Sequence[int]

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.blocks)


@dataclass(frozen=True)
class Update:
    """An update by the paper's recipe.

    Attributes:
        gradient_batch: Samples of the gradient.
        curvature_batch: Samples of the curvature.
        cg_steps: CG iterations of each block; a warm start takes one product more.
        micro_batch: Samples that are in memory at a time. Where curvature has more of them than that, each
            product linearizes anew.
    """

    gradient_batch: int
    curvature_batch: int
    cg_steps: int
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        for name in ("gradient_batch", "curvature_batch", "cg_steps", "micro_batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1.")
        if self.curvature_batch > self.gradient_batch:
            raise ValueError(
                f"curvature_batch is {self.curvature_batch}, but must be at most gradient_batch, "
                f"{self.gradient_batch}: curvature is taken from samples of the gradient."
            )

    @property
    def num_products(self) -> int:
        return self.cg_steps + 1


@dataclass(frozen=True)
class Machine:
    """How fast a rank is, and what is between the ranks.

    Attributes:
        gradient: Multiplications a second in gradients.
        product: In products.
        forward: In forward passes.
        memory: Bytes a second that CG's vectors are read and written with.
        bandwidth: Bytes a second that a rank can send, and receive meanwhile.
        latency: Seconds until a message arrives.
        efficiency: The share of its speed that a rank keeps while all others are at work, as where they
            share a memory; 1 on machines of their own.
    """

    gradient: float
    product: float
    forward: float
    memory: float = 1e12
    bandwidth: float = math.inf
    latency: float = 0.0
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        for name in ("gradient", "product", "forward", "memory", "bandwidth", "efficiency"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be above 0.")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency is {self.latency}, but must be at least 0.")

    @classmethod
    def of_flops(cls, flops: float, **rest: float) -> Machine:
        """One of so many floating point operations a second, two of which are a multiplication."""
        return cls(flops / 2, flops / 2, flops / 2, **rest)


@dataclass(frozen=True)
class Mesh:
    """Ranks: ``block`` coordinates solve different blocks, each by ``data`` ranks that share the samples."""

    block: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        if self.block < 1 or self.data < 1:
            raise ValueError(f"The mesh is {self}, but neither side may be less than 1.")

    @property
    def ranks(self) -> int:
        return self.block * self.data

    def __str__(self) -> str:
        return f"{self.block} x {self.data}"


# What comes out


@dataclass(frozen=True)
class Message:
    """What the busiest rank exchanges for a purpose, in one update.

    Attributes:
        purpose: As in ``report.work`` of a real run.
        calls: How many collectives.
        handed: Bytes that the rank hands over to them; ``report.work`` counts these.
        sent: Bytes that it sends for it, its part in passing on what is others' included.
        rounds: Messages that wait for each other.
    """

    purpose: str
    calls: int
    handed: int
    sent: float
    rounds: int

    def seconds(self, machine: Machine) -> float:
        return self.rounds * machine.latency + self.sent / machine.bandwidth


@dataclass(frozen=True)
class Prediction:
    """What an update costs.

    Attributes:
        optimizer: Whose update.
        mesh: On which mesh.
        multiplications: Of the busiest rank, by phase.
        memory: Bytes of a rank, by what they hold.
        messages: What is sent.
        computing: Seconds of the busiest rank, by phase, without what it waits for messages.
        sending: Seconds of messages, by purpose.
        loads: What share of the slowest coordinate's time in CG each coordinate has to do.
    """

    optimizer: str
    mesh: Mesh
    multiplications: dict[str, float]
    memory: dict[str, float]
    messages: tuple[Message, ...]
    computing: dict[str, float]
    sending: dict[str, float]
    loads: tuple[float, ...] = field(default=())

    @property
    def seconds(self) -> float:
        return sum(self.computing.values()) + sum(self.sending.values())

    @property
    def solving(self) -> float:
        """Seconds from the first product until all directions are known everywhere."""
        return self.computing.get("CG", 0.0) + sum(
            self.sending.get(name, 0.0) for name in ("products", "directions")
        )

    @property
    def waiting(self) -> float:
        """The share of the time that goes into messages."""
        return sum(self.sending.values()) / self.seconds

    @property
    def sent(self) -> float:
        return sum(message.sent for message in self.messages)

    @property
    def bytes(self) -> float:
        """Memory of a rank."""
        return sum(self.memory.values())


def predict(model: Model, update: Update, machine: Machine, mesh: Mesh) -> Prediction:
    """An update of block-diagonal HF, by the paper's recipe, on a mesh.

    >>> model = Model("two layers", (Part("0", 10, 60.0), Part("1", 10, 40.0)), 20.0, 60.0, 4.0, (8,))
    >>> machine, update = Machine(1e3, 1e3, 1e3), Update(100, 10, 9)
    >>> one, two = (predict(model, update, machine, Mesh(block)) for block in (1, 2))
    >>> round(one.computing["CG"], 6), round(two.computing["CG"], 6)
    (10.0, 6.0)
    """
    of_gradient = math.ceil(update.gradient_batch / mesh.ranks)
    of_curvature = math.ceil(update.curvature_batch / mesh.data)
    share = machine.efficiency if mesh.ranks > 1 else 1.0
    linearization = LINEARIZATION * model.forward * of_curvature
    again = 0.0
    if update.micro_batch is not None and update.micro_batch < of_curvature:
        again = model.forward * of_curvature

    # A product of each block: what it computes, and the sum over the ranks that share the samples.
    computed = [
        (part.product * of_curvature / machine.product + again / machine.forward) / share
        + VECTOR_PASSES * NUMBER * part.parameters / machine.memory / share
        for part in model.blocks
    ]
    summed = [all_reduce("products", NUMBER * part.parameters, mesh.data) for part in model.blocks]
    each = [seconds + message.seconds(machine) for seconds, message in zip(computed, summed, strict=True)]
    rows = _rows(model, mesh.block)
    loads = [sum(each[index] for index in row) for row in rows]
    slowest = loads.index(max(loads))
    own = rows[slowest]
    kept = max(sum(model.blocks[index].parameters for index in row) for row in rows)

    messages = _messages(model, update, mesh, rows, slowest)
    return Prediction(
        optimizer="block HF",
        mesh=mesh,
        multiplications={
            "gradient": model.gradient * of_gradient,
            "linearization": linearization,
            "products": update.num_products
            * sum(model.blocks[index].product * of_curvature + again for index in own),
        },
        memory={
            "parameters, gradient, directions": 3.0 * NUMBER * model.parameters,
            "directions gathered": float(
                sum(mesh.block * message.handed for message in messages if message.purpose == "directions")
            ),
            "CG": NUMBER * (kept + CG_VECTORS * max(model.blocks[index].parameters for index in own)),
            "activations": NUMBER
            * model.activations
            * max(_at_a_time(update, of_gradient), RESIDUALS * _at_a_time(update, of_curvature)),
        },
        messages=messages,
        computing={
            "gradient": model.gradient * of_gradient / machine.gradient / share,
            "linearization": linearization / machine.forward / share,
            "CG": update.num_products * sum(computed[index] for index in own),
            "step": 4 * NUMBER * model.parameters / machine.memory / share,
        },
        sending={message.purpose: message.seconds(machine) for message in messages},
        loads=tuple(load / max(loads) for load in loads),
    )


def _rows(model: Model, num_rows: int) -> list[list[int]]:
    """Which blocks each coordinate owns, as a real mesh places them."""
    sizes = [part.parameters for part in model.blocks]
    owners = assign(estimated_costs(sizes, [part.first for part in model.blocks]), num_rows).owners
    return [[index for index, owner in enumerate(owners) if owner == row] for row in range(num_rows)]


def data_parallel_adam(model: Model, update: Update, machine: Machine, ranks: int) -> Prediction:
    """An update of Adam on the same gradient batch, whose samples the ranks share."""
    samples = math.ceil(update.gradient_batch / ranks)
    share = machine.efficiency if ranks > 1 else 1.0
    message = all_reduce("sums", NUMBER * model.parameters, ranks)
    return Prediction(
        optimizer="Adam",
        mesh=Mesh(1, ranks),
        multiplications={"gradient": model.gradient * samples},
        memory={
            "parameters, gradient": 2.0 * NUMBER * model.parameters,
            "moments": 2.0 * NUMBER * model.parameters,
            "activations": NUMBER * model.activations * _at_a_time(update, samples),
        },
        messages=(message,) if ranks > 1 else (),
        computing={
            "gradient": model.gradient * samples / machine.gradient / share,
            "step": 10 * NUMBER * model.parameters / machine.memory / share,
        },
        sending={"sums": message.seconds(machine)} if ranks > 1 else {},
    )


def best(model: Model, update: Update, machine: Machine, ranks: int) -> Prediction:
    """The quickest of the meshes of so many ranks; of two as quick, that with more coordinates of blocks."""
    shapes = [Mesh(block, ranks // block) for block in range(1, ranks + 1) if ranks % block == 0]
    found = [predict(model, update, machine, mesh) for mesh in shapes if mesh.block <= len(model.blocks)]
    return min(found, key=lambda prediction: (prediction.seconds, -prediction.mesh.block))


# Messages


def _messages(
    model: Model, update: Update, mesh: Mesh, rows: Sequence[Sequence[int]], slowest: int
) -> tuple[Message, ...]:
    """In the order in which they are sent."""
    if mesh.ranks == 1:
        return ()
    messages = [
        all_gather("numbers", 8 * _HEADER, mesh.ranks),
        all_reduce("sums", NUMBER * (model.parameters + 1), mesh.ranks),  # the loss goes with the gradient
    ]
    if mesh.block > 1:
        samples = math.ceil(update.curvature_batch / mesh.ranks)
        messages.append(
            _together([all_gather("samples", samples * size, mesh.block) for size in model.sample_bytes])
        )
    if mesh.data > 1:
        own = [model.blocks[index] for index in rows[slowest]]
        flags = all_reduce("products", NUMBER * (len(own) + 2), mesh.data)  # which are formed, and how
        messages.append(
            _together(
                [flags]
                + update.num_products
                * [all_reduce("products", NUMBER * part.parameters, mesh.data) for part in own]
            )
        )
    if mesh.block > 1:
        # All say something of every block, and hand over as much as the one with most.
        largest = max(sum(model.blocks[index].parameters for index in row) for row in rows)
        sizes = 8 * _SOLUTION_HEAD * len(model.blocks), NUMBER * largest
        messages.append(_together([all_gather("directions", size, mesh.block) for size in sizes]))
    return tuple(messages)


def all_reduce(purpose: str, size: int, ranks: int) -> Message:
    """Halving and doubling (Rabenseifner; Thakur et al., 2005): as few bytes as a ring, in fewer rounds."""
    return Message(purpose, 1, size, 2 * (ranks - 1) / ranks * size, 2 * _log2(ranks))


def all_gather(purpose: str, size: int, ranks: int) -> Message:
    """Recursive doubling; ``size`` is each rank's own."""
    return Message(purpose, 1, size, float((ranks - 1) * size), _log2(ranks))


def _together(messages: Sequence[Message]) -> Message:
    """One after the other."""
    return Message(
        messages[0].purpose,
        sum(message.calls for message in messages),
        sum(message.handed for message in messages),
        sum(message.sent for message in messages),
        sum(message.rounds for message in messages),
    )


def _log2(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _at_a_time(update: Update, samples: int) -> int:
    return samples if update.micro_batch is None else min(samples, update.micro_batch)


# Models that need not exist


def transformer(parameters: float, layers: int, tokens: int, num_blocks: int | None = None) -> Model:
    """A transformer of equal layers, in blocks of consecutive layers, each layer a block by default.

    A layer of width w has 12 w² parameters (attention 4 w², feed-forward 8 w²); embeddings are left out. For
    each token a pass through it takes as many multiplications, and 2 w for each token that is attended to.
    Activations are those of Korthikanti et al. (2022), 16 w for each token and layer, where attention is
    computed without its matrix being kept.

    >>> model = transformer(24e6, layers=2, tokens=1)
    >>> [(part.parameters, round(part.product / part.parameters, 2)) for part in model.blocks]
    [(12000000, 6.0), (12000000, 4.0)]
    """
    num_blocks = layers if num_blocks is None else num_blocks
    if parameters < layers or layers < 1 or tokens < 1:
        raise ValueError(
            f"No transformer has {parameters:g} parameters, {layers} layers and {tokens} tokens. Give "
            "at least 1 of each, and a parameter for each layer."
        )
    if not 1 <= num_blocks <= layers:
        raise ValueError(f"There are {num_blocks} blocks, but must be between 1 and the {layers} layers.")
    own = round(parameters / layers)
    width = math.sqrt(own / 12)
    layer = tokens * (own + 2 * tokens * width)
    bounds = [round(place * layers / num_blocks) for place in range(num_blocks + 1)]
    counts = [stop - start for start, stop in itertools.pairwise(bounds)]
    costs = estimated_costs(counts)
    return Model(
        f"transformer of {short(parameters)} parameters, {layers} layers, {tokens:,} tokens a sample",
        tuple(
            Part(
                f"layer {start + 1}" if count == 1 else f"layers {start + 1} to {start + count}",
                count * own,
                cost * layer,
            )
            for start, count, cost in zip(bounds, counts, costs, strict=False)
        ),
        forward=layers * layer,
        gradient=3 * layers * layer,
        activations=16 * width * tokens * layers,
        sample_bytes=(8 * tokens, 8 * tokens),
    )


# Over the numbers of ranks


@dataclass(frozen=True)
class Scaling:
    """Predictions for several numbers of ranks, the first of which is 1.

    Attributes:
        ranks: How many.
        block_hf: On the best mesh of so many.
        data_alone: Block HF on as many that share the samples alone.
        adam: Data-parallel, on as many.
    """

    ranks: tuple[int, ...]
    block_hf: tuple[Prediction, ...]
    data_alone: tuple[Prediction, ...]
    adam: tuple[Prediction, ...]


def scaling(model: Model, update: Update, machine: Machine, ranks: Sequence[int] = RANKS) -> Scaling:
    """Block HF and Adam on more and more ranks."""
    return Scaling(
        tuple(ranks),
        tuple(best(model, update, machine, number) for number in ranks),
        tuple(predict(model, update, machine, Mesh(1, number)) for number in ranks),
        tuple(data_parallel_adam(model, update, machine, number) for number in ranks),
    )


def speed_ups(predictions: Sequence[Prediction]) -> list[float]:
    """Against the first of them."""
    return [predictions[0].seconds / prediction.seconds for prediction in predictions]


def short(number: float) -> str:
    """A large number in few letters.

    >>> short(1e9), short(2_837_314), short(12)
    ('1B', '2.84M', '12')
    """
    for size, letter in ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:g}"
