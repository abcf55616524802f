"""Optimizers by name, with their options: what ``--optimizer`` takes.

A spec is a name and, after a colon, options with commas between them::

    adam:lr=1e-3,batch=600          any optimizer of torch.optim
    sgd:lr=0.1,momentum=0.9,schedule=cosine
    adamw:betas=0.9/0.95            a slash for pairs
    muon:lr=1e-3                    Muon for matrices, AdamW for the rest
    soap:lr=3e-3                    of pytorch-optimizer, where that is installed
    blockhf:blocks=layer            BlockHF with default settings, with the task's blocks or others
    paper:curvature=1200            the paper's recipe with the task's settings and blocks
    hf:curvature=1200               the same with one block
    least-squares                   BlockHF.least_squares, for tasks without noise
    blockhf:points=fresh            new points for each step, as many as the optimizer asks for
    kernel-gn:damping=1e-6          and ssbfgs, full-lbfgs, adam-lbfgs: for such tasks too, see ``rivals``

``batch`` is the number of samples of an update, the task's large batch unless it is named; ``curvature`` the
number of those that curvature is taken from; ``schedule=cosine`` lets ``lr`` fall to zero over the budget.
All others go to the optimizer. ``blockhf`` is told the size of the training set; for it a policy is named by
its class, ``search=Backtracking``, and ``without=`` leaves out a part of the method: ``without=momentum``
(see ``parts``).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import blockhf
from blockhf import AdamWalk, Auto, BlockHF, blocks, flops
from blockhf.blocks import Group
from blockhf.report import StepReport
from blockhf_lab.costs import Unit
from blockhf_lab.muon import Muon
from blockhf_lab.parts import WITHOUT
from blockhf_lab.ranks import ALONE, Ranks
from blockhf_lab.rivals import AdamThenLBFGS, KernelGaussNewton, SelfScaledBFGS, full_lbfgs
from blockhf_lab.tasks import Batch, Task

FIRST_ORDER: Mapping[str, Callable[..., Optimizer]] = {
    **{
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and name not in ("Optimizer", "SparseAdam")
    },
    "muon": Muon,
    "ssbfgs": SelfScaledBFGS,
    "kernel-gn": KernelGaussNewton,
    "full-lbfgs": full_lbfgs,
    "adam-lbfgs": AdamThenLBFGS,
}
"""The optimizers of torch, by their names in small letters, and ours to compare with.

Muon is our own: torch's takes matrices alone. SparseAdam is left out: no task has sparse gradients.
"""

OPTIONAL: Mapping[str, str] = {"soap": "SOAP"}
"""Optimizers of the package pytorch-optimizer, by our name and by its. Without it their runs can be read."""

MULTIPLY = ("muon", *OPTIONAL)
"""Optimizers whose own products and factorizations of matrices are no small part of their cost."""

SECOND_ORDER = ("blockhf", "paper", "hf", "least-squares")

FORMER = {"block-hf": "paper"}
"""Names that optimizers had before, in records and folders, and those that they have now."""

_NAMES = {
    "least-squares": "BlockHF.least_squares",
    "full-lbfgs": "L-BFGS",
    "ssbfgs": "self-scaled BFGS",
    "kernel-gn": "kernel Gauss-Newton",
    "adam-lbfgs": "Adam, then L-BFGS",
}
_OURS = ("batch", "schedule")
_OURS_SECOND = (*_OURS, "curvature", "blocks", "without", "points")
PARTITIONS: Mapping[str, Callable[[nn.Module], list[blocks.Group]]] = {
    "single": blocks.single,
    "module": blocks.by_module,
    "layer": blocks.by_layer,
}
"""Ways to blocks, by name."""


@dataclass(frozen=True)
class Spec:
    """An optimizer and its options.

    >>> spec = Spec.parse("adam: lr=1e-3, batch=600")
    >>> str(spec), spec.label
    ('adam:batch=600,lr=0.001', 'Adam, batch 600, lr 0.001')
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = (*SECOND_ORDER, *FIRST_ORDER, *OPTIONAL)
        if self.name == "sparseadam":
            raise ValueError("sparseadam is for sparse gradients, which no task here has. Take adam.")
        if self.name not in names:
            raise ValueError(f"There is no optimizer {self.name!r}. There are {', '.join(names)}.")
        batch = self.options.get("batch", 1)
        if not isinstance(batch, int) or batch < 1:
            raise ValueError(f"batch of {self.name} is {batch!r}, but must be a whole number of at least 1.")
        if self.options.get("schedule", "cosine") != "cosine":
            raise ValueError(
                f"schedule of {self.name} is {self.options['schedule']!r}; there is cosine alone."
            )
        if self.options.get("blocks", "single") not in PARTITIONS:
            raise ValueError(
                f"blocks of {self.name} is {self.options['blocks']!r}, but must be one of "
                f"{', '.join(PARTITIONS)}."
            )
        if self.options.get("without", "cg") not in WITHOUT:
            raise ValueError(
                f"without of {self.name} is {self.options['without']!r}, but must be one of "
                f"{', '.join(WITHOUT)}."
            )
        if self.options.get("points", "fresh") != "fresh":
            raise ValueError(f"points of {self.name} is {self.options['points']!r}; there is fresh alone.")
        if not self.is_available:
            return
        known = self._known()
        if unknown := [key for key in self.options if key not in known]:
            raise ValueError(
                f"{self.name} has no option {', '.join(map(repr, unknown))}. It has {', '.join(known)}."
            )
        if not self.is_second_order:
            self._check_kinds()

    def _check_kinds(self) -> None:
        """Raise where a value is of another kind than the optimizer's own; torch would fail on its way."""
        for key, parameter in inspect.signature(self._class()).parameters.items():
            own = parameter.default
            if key not in self.options or not isinstance(own, (bool, int, float, tuple)):
                continue
            kind, words = (
                (bool, "true or false")
                if isinstance(own, bool)
                else (tuple, f"{len(own)} numbers with a slash between them")
                if isinstance(own, tuple)
                else ((int, float), "a number")
            )
            value = self.options[key]
            numbers = value if isinstance(value, tuple) else ()
            if (
                not isinstance(value, kind)
                or (isinstance(value, bool) and kind is not bool)
                or (isinstance(value, (int, float)) and not math.isfinite(value))
                or (isinstance(own, tuple) and len(numbers) != len(own))
                or not all(type(number) in (int, float) for number in numbers)
            ):
                raise ValueError(f"{key} of {self.name} is {_text(value)}, but must be {words}.")

    @classmethod
    def parse(cls, text: str) -> Spec:
        """A spec out of its text.

        Raises:
            ValueError: It cannot be read, or names what there is not.
        """
        name, _, rest = text.partition(":")
        options: dict[str, Any] = {}
        for item in filter(None, (part.strip() for part in rest.split(","))):
            key, equals, value = (piece.strip() for piece in item.partition("="))
            if not (key and equals and value):
                raise ValueError(f"Cannot read {item!r} in {text!r}. Write name:option=value,option=value.")
            if key in options:
                raise ValueError(f"{key} is twice in {text!r}. Name it once.")
            options[key] = _value(value)
        name = name.strip().lower()
        return cls(FORMER.get(name, name), dict(sorted(options.items())))

    def __str__(self) -> str:
        options = ",".join(f"{key}={_text(value)}" for key, value in self.options.items())
        return f"{self.name}:{options}" if options else self.name

    @property
    def is_second_order(self) -> bool:
        return self.name in SECOND_ORDER

    @property
    def is_available(self) -> bool:
        """Whether what it needs is installed."""
        return self.name not in OPTIONAL or importlib.util.find_spec("pytorch_optimizer") is not None

    @property
    def kind(self) -> str:
        """Its name for people."""
        names = {"paper": "paper", "hf": "paper (HF)", "blockhf": "BlockHF", **_NAMES, **OPTIONAL}
        return names[self.name] if self.name in names else FIRST_ORDER[self.name].__name__

    @property
    def label(self) -> str:
        """For tables and figures."""
        return ", ".join([self.kind, *(f"{key} {_text(value)}" for key, value in self.options.items())])

    @property
    def folder(self) -> str:
        """A name for its folder."""
        return str(self).replace(":", " ").replace("/", "+").replace(" ", "_")

    def folder_in(self, out: Path, seed: int) -> Path:
        """Where a run goes; where there is one of its former name, that."""
        formers = [
            former + self.folder.removeprefix(now) for former, now in FORMER.items() if now == self.name
        ]
        folders = [out / folder / f"seed-{seed}" for folder in (self.folder, *formers)]
        return next((folder for folder in folders if (folder / "config.json").exists()), folders[0])

    def batch_size(self, task: Task) -> int:
        """Samples of an update."""
        return int(self.options.get("batch", task.large_batch))

    def partition(self, task: Task) -> Callable[[nn.Module], list[Group]] | None:
        """From a model to the blocks; first-order optimizers have none."""
        if not self.is_second_order:
            return None
        if "blocks" in self.options:
            return PARTITIONS[self.options["blocks"]]
        return blocks.single if self.name == "hf" else task.make_blocks

    def start(
        self,
        task: Task,
        model: nn.Module,
        unit: Unit,
        ranks: Ranks = ALONE,
        *,
        population: int | None = None,
    ) -> Method:
        """Set it up for a model and a training set of so many samples, if that is known.

        In this process and in the others that share the work.
        """
        rest = {key: value for key, value in self.options.items() if key not in _OURS_SECOND}
        try:
            if self.is_second_order:
                second = self._second_order(task, model, population, {**rest, "mesh": ranks.mesh})
                return Method(self, task, model, unit, second, ranks)
            return Method(self, task, model, unit, self._class()(list(model.parameters()), **rest), ranks)
        except (AttributeError, AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{self} does not work on {task.name}: {self._why(error)}") from error

    def bare(self, model: nn.Module, make_blocks: Callable[[nn.Module], list[Group]]) -> Optimizer:
        """The optimizer itself, with the spec's own options alone; ``BlockHF`` gets these blocks."""
        rest = {key: value for key, value in self.options.items() if key not in _OURS_SECOND}
        if not self.is_second_order:
            return self._class()(list(model.parameters()), **rest)
        if "curvature" in self.options:
            rest["curvature_batch_size"] = self.options["curvature"]
        if "without" in self.options:
            rest = {"walk": AdamWalk(), **WITHOUT[self.options["without"]](), **rest}
        partition = blocks.single if self.name == "hf" else make_blocks
        if "blocks" in self.options:
            partition = PARTITIONS[self.options["blocks"]]
        options = {key: _policy(value) for key, value in rest.items()}
        if self.name == "blockhf":
            return BlockHF(partition(model), **options)
        if self.name == "least-squares":
            return BlockHF.least_squares(partition(model), **options)
        return BlockHF.paper(partition(model), **options)

    def _why(self, error: Exception) -> str:
        """The reason in words; Python's own for values of a wrong kind say nothing of the options."""
        told = next(iter(str(error).splitlines()), type(error).__name__)
        if not isinstance(error, (AttributeError, TypeError)):
            return told
        words = [f"{key}={_text(value)}" for key, value in self.options.items() if key not in _OURS_SECOND]
        return f"one of its options, {', '.join(words)}, has a value of a wrong kind." if words else told

    def _second_order(
        self, task: Task, model: nn.Module, population: int | None, rest: dict[str, Any]
    ) -> BlockHF:
        partition = self.partition(task)
        assert partition is not None
        rest = {key: _policy(value) for key, value in rest.items()}
        common: dict[str, Any] = {"measure_memory": False}
        if not task.is_complete:  # where the optimizer chooses for itself
            common["products"] = Auto(compile=task.compile)
        if "points" in self.options and task.draw is None:
            raise ValueError(f"{task.name} has a fixed number of samples, of which none can be drawn anew.")
        if self.name == "blockhf" and "points" not in self.options:
            common["population"] = population
        if "curvature" in self.options:
            common["curvature_batch_size"] = self.options["curvature"]
        if "without" in self.options:
            common |= {"walk": AdamWalk(), **WITHOUT[self.options["without"]]()}
        if self.name == "blockhf":
            return BlockHF(partition(model), **{**common, **rest})
        if self.name == "least-squares":
            return BlockHF.least_squares(partition(model), **{**common, **rest})
        return BlockHF.paper(partition(model), **{**common, **task.recipe, **rest})

    def _class(self) -> Callable[..., Optimizer]:
        if not self.is_available:
            raise ValueError("it needs pytorch-optimizer. Install it with pip install 'blockhf-lab[peers]'.")
        if self.name in OPTIONAL:
            found: Callable[..., Optimizer] = getattr(
                importlib.import_module("pytorch_optimizer"), OPTIONAL[self.name]
            )
            return found
        return FIRST_ORDER[self.name]

    def _known(self) -> list[str]:
        kind = BlockHF if self.is_second_order else self._class()
        ours = _OURS_SECOND if self.is_second_order else _OURS
        hidden = (*ours, "params", "curvature_batch_size", "mesh", "kwargs")
        return [*ours, *(key for key in inspect.signature(kind).parameters if key not in hidden)]


@dataclass(frozen=True)
class Step:
    """What an update did: the loss before it, its cost in GE, and what ``BlockHF`` reports."""

    loss: float
    ge: float
    report: StepReport | None = None


class Method:
    """An optimizer at work on a model."""

    def __init__(
        self,
        spec: Spec,
        task: Task,
        model: nn.Module,
        unit: Unit,
        optimizer: Optimizer,
        ranks: Ranks = ALONE,
    ) -> None:
        self.optimizer, self._spec, self._task = optimizer, spec, task.name
        self._model, self._params, self._ranks = model, list(model.parameters()), ranks
        self._unit = unit
        self._objective = task.objective(model)
        self._draw = task.draw if "points" in spec.options else None
        self._decays = "schedule" in spec.options
        self._multiplies = spec.name in MULTIPLY
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]

    def update(self, batch: Batch, spent: float) -> Step:
        """One update on a batch, with the share of the budget that is spent."""
        if self._decays:
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 + math.cos(math.pi * min(spent, 1.0))) / 2
        if isinstance(self.optimizer, BlockHF):
            loss = self.optimizer.step(self._objective, self._draw or batch)
            report = self.optimizer.report
            assert report is not None
            return Step(float(loss), self._unit.of_report(report), report)
        if isinstance(self.optimizer, KernelGaussNewton):
            with flops.Counter() as counter:
                before = self.optimizer.minimize(self._model, self._objective, batch)
            return Step(before, counter.flops / self._unit.flops)
        if isinstance(self.optimizer, AdamThenLBFGS):
            self.optimizer.spent = spent
        num_gradients = 0

        def closure() -> Tensor:
            nonlocal num_gradients
            num_gradients += 1
            self.optimizer.zero_grad()
            _, loss = self._objective(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            return self._ranks.average(self._params, loss.detach(), len(batch[0]))

        if self._multiplies:
            loss = closure()
            with flops.Counter() as counter:
                self.optimizer.step()
            ge = self._unit.of_samples(len(batch[0])) + counter.flops / self._unit.flops
            return Step(float(loss), ge)
        # LBFGS asks for several gradients in a step; the others for one.
        try:
            loss = self.optimizer.step(closure)  # type: ignore[arg-type, assignment]
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            # Some of torch's optimizers look at their options and gradients only here.
            raise ValueError(
                f"{self._spec} does not work on {self._task}: {self._spec._why(error)}"
            ) from error
        return Step(float(loss), num_gradients * self._unit.of_samples(len(batch[0])))

    def state_bytes(self) -> int:
        """Bytes of the tensors that the optimizer keeps from one update to the next."""
        optimizer = self.optimizer  # on a mesh one process alone may ask, so nothing may be gathered
        return _bytes(optimizer.own_state() if isinstance(optimizer, BlockHF) else optimizer.state_dict())


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_bytes, value.values()))
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def _value(text: str) -> Any:
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    if "/" in text:
        return tuple(map(_value, text.split("/")))
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
    return value if isinstance(value, (int, float)) else text


def _text(value: Any) -> str:
    return "/".join(map(_text, value)) if isinstance(value, tuple) else str(value)


def _policy(value: Any) -> Any:
    """An object of the class of the library that a word names; other values as they are."""
    if not isinstance(value, str) or value not in blockhf.__all__:
        return value
    kind = getattr(blockhf, value)
    return kind() if isinstance(kind, type) else value
