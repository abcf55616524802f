"""What ``blockhf.check`` looks at, one thing after the other."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from blockhf.batches import take
from blockhf.curvature import Curvature, DoubleBackward, GaussNewton, Traced
from blockhf.curvature.auto import LONGEST_GRAPH
from blockhf.curvature.loss_hessian import (
    Diagonal,
    HessianProduct,
    Softmax,
    closed_forms,
    second_derivatives,
    ties_samples,
)
from blockhf.diagnosis import ZERO, bypassed, wrong_with_curvature
from blockhf.fx_graphs import TracingError
from blockhf.linalg import BlockOperator, lanczos
from blockhf.objective import Evaluation, check_outputs
from blockhf.optimizer import BlockHF
from blockhf.policy import PolicyState
from blockhf.preconditioners.kronecker import parameters_with_factors
from blockhf.samples import NORMS, Part, Samples

_MANY_BLOCKS = 20
_MUCH_MEMORY = 2**31
_STEEP = 1e8


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        topic: What was looked at, in a word.
        text: What was found.
        remedy: What to do about it; empty where nothing has to be done.
    """

    topic: str
    text: str
    remedy: str = ""

    @property
    def is_problem(self) -> bool:
        return bool(self.remedy)

    def __str__(self) -> str:
        mark = "!" if self.is_problem else " "
        return f"{mark} {self.topic:10} {self.text}." + (f"\n{'':13}-> {self.remedy}." if self.remedy else "")


class Examination:
    """Looks at an objective on some samples; each look yields findings, and costs go to ``figures``."""

    def __init__(self, samples: Samples, groups: Sequence[Mapping[str, Any]], curvature: Curvature) -> None:
        self.samples, self.groups, self.curvature = samples, groups, curvature
        self.findings: list[Finding] = []
        self.figures: dict[str, float] = {}
        self.is_over, self.is_random, self.has_products = False, False, True
        self.evaluation: Evaluation
        self.looks: list[Callable[[], Iterator[Finding]]] = [
            self.contract,
            self.randomness,
            self.loss_by_outputs,
            self.interactions,
            self.products,
            self.tracing,
            self.factors,
            self.forming,
            self.step,
            self.size_of_the_batch,
        ]

    @cached_property
    def part(self) -> Part:
        return self.samples.parts[0]

    @property
    def is_gauss_newton(self) -> bool:
        return isinstance(self.curvature, GaussNewton)

    def contract(self) -> Iterator[Finding]:
        """Whether the loss is computed from the outputs."""
        try:
            self.evaluation = self.samples.evaluate(self.part, fresh=True)
            if not self.evaluation.loss.requires_grad:
                raise ValueError(
                    "The loss does not depend on any parameter through the graph. Leave out detach(), .data "
                    "and torch.no_grad() in the objective."
                )
            check_outputs(self.evaluation, twice_in_loss=self.is_gauss_newton)
        except (ValueError, TypeError) as error:
            self.is_over = True
            yield _from_message("outputs", str(error))
            return
        shapes = ", ".join(str(tuple(output.shape)) for output in self.evaluation.outputs)
        number = self.figures["outputs_per_sample"] = self.samples.structure.num_outputs
        yield Finding("outputs", f"the loss is computed from outputs of shape {shapes}, {number} per sample")

    def randomness(self) -> Iterator[Finding]:
        """Whether two calls differ, and whether they do with the same random numbers."""
        samples, first = self.samples, self.evaluation
        again = samples.evaluate(self.part, fresh=True)
        other = samples.evaluate(Part(self.part.batch), fresh=True)
        if not _same(first, again):
            self.is_random = True
            yield Finding(
                "random",
                "two calls with the same random numbers differ",
                "Take out what changes from call to call: counters, other generators, numpy's random numbers",
            )
        elif not _same(first, other):
            self.is_random = True
            yield Finding("random", "the forward pass draws random numbers, which are replayed within a step")
        else:
            yield Finding("random", "nothing is random")

    def loss_by_outputs(self) -> Iterator[Finding]:
        """Whether the loss's second derivatives by the outputs are zero, negative or without bound."""
        if not self.is_gauss_newton:
            return
        outputs = self.evaluation.outputs
        try:
            product = second_derivatives(self.evaluation)
            forms = None if product is None else closed_forms(outputs, product)
        except RuntimeError as error:
            self.has_products = False
            reason = str(error).strip().splitlines()[0]
            yield Finding(
                "loss", f"it cannot be differentiated twice ({reason})", "Pass curvature=EmpiricalFisher()"
            )
            return
        if product is None:
            yield _from_message("loss", ZERO)
            return
        low, high = _extremes(outputs, product)
        if high == low == 0:
            yield _from_message("loss", ZERO)
        elif not math.isfinite(high - low) or max(high, -low) * self._spread() > _STEEP:
            yield Finding(
                "loss",
                f"its second derivatives by the outputs reach {max(high, -low):.1e}: they have no bound",
                "Return as outputs what comes before the logarithm or the division, e.g. logits, and compute "
                "the loss by a function that is safe, e.g. cross_entropy",
            )
        elif low < -1e-3 * high:
            yield Finding(
                "loss",
                f"it is not convex in the outputs: its second derivatives reach from {low:.1e} to {high:.1e}",
                "Return other outputs, e.g. those in which it is convex, or pass curvature=EmpiricalFisher()",
            )
        else:
            kinds = {Softmax: "cross entropy", Diagonal: "a diagonal Hessian"}
            known = " and ".join(dict.fromkeys(kinds[type(form)] for form in forms or ()))
            known = known or "no closed form"
            yield Finding("loss", f"convex in the outputs, {known}; largest second derivative {high:.1e}")

    def _spread(self) -> float:
        """How large the outputs are, squared, over the loss: curvature times this has no unit."""
        square = max(float(output.detach().square().mean()) for output in self.evaluation.outputs)
        return square / max(abs(float(self.evaluation.loss)), 1e-30)

    def interactions(self) -> Iterator[Finding]:
        """Whether a sample's outputs, or its part of the loss, depend on other samples."""
        samples, outputs = self.samples, self.evaluation.outputs
        if samples.batch is None or samples.num_samples < 2:
            return
        norms = [type(m).__name__ for m in samples.structure.modules if isinstance(m, NORMS) and m.training]
        half = samples.num_samples // 2
        first = all(output.dim() and len(output) == samples.num_samples for output in outputs)
        mixed = bool(norms)
        if first and not self.is_random and not mixed:
            own = samples.evaluate(Part(take(samples.batch, 0, half)), fresh=True).outputs
            whole = [output[:half] for output in outputs]
            mixed = not all(map(_close, own, whole))
        if mixed:
            cause = f"by {norms[0]} in training" if norms else "somewhere in the forward pass"
            yield Finding(
                "samples",
                f"they see each other in the outputs, {cause}",
                "Keep batches and micro-batches large, as each part has statistics of its own, and expect no "
                "blocks to be formed; GroupNorm, LayerNorm or eval() would keep samples apart",
            )
        elif not first:
            yield Finding("samples", "the outputs do not have the samples first, so no blocks are formed")
        tied = False
        if self.is_gauss_newton and self.has_products and first:
            product = second_derivatives(self.evaluation)
            tied = product is not None and ties_samples(outputs, product)
        if tied:
            yield Finding(
                "samples",
                "the loss ties samples together, as contrastive losses do",
                "Leave micro_batch_size unset, as losses of parts do not add up to it, and pass batches as "
                "large as the loss is meant for",
            )
        if not mixed and not tied and first:
            yield Finding("samples", "each sample's outputs and loss depend on that sample alone")
            parts = Samples(
                samples.objective,
                samples.batch,
                samples.blocks,
                micro_batch_size=half,
                structure=samples.structure,
            )
            if not self.is_random and samples.reduction == "mean" and (wrong := parts.wrong_with_parts()):
                yield _from_message("samples", wrong)

    def products(self) -> Iterator[Finding]:
        """Whether products can be made, what they say, and what they cost."""
        if not self.has_products:
            return
        samples, blocks = self.samples, self.samples.blocks
        for _ in range(2):  # the first one is counted, which takes longer
            began = time.perf_counter()
            with samples.ledger.counting("gradient"):
                evaluation = samples.evaluate(self.part, fresh=True)
                found = torch.autograd.grad(evaluation.loss, samples.params, allow_unused=True)
            gradient_seconds = time.perf_counter() - began
        gradients = iter(found)
        gradient = [block.flatten([next(gradients) for _ in block.params]) for block in blocks]
        try:
            operator = DoubleBackward(memory_budget=2**62).operator(self.curvature, samples)
            wrong = wrong_with_curvature(operator, gradient, 0.0, float(evaluation.loss))
        except ValueError as error:
            self.has_products = False
            yield _from_message("products", str(error))
            return
        if wrong is not None and not any(
            finding.topic == "loss" and finding.remedy for finding in self.findings
        ):
            yield _from_message("products", wrong)
        if (missed := bypassed(operator, gradient, [block.name for block in blocks])) is not None:
            yield _from_message("blocks", missed)
        self._cost(operator, gradient, gradient_seconds)
        figures, memory = self.figures, operator.num_bytes
        figures["linearization_bytes"] = memory
        yield Finding(
            "products",
            f"by double backward one with a block takes {figures['product_in_gradients']:.1f} gradients "
            f"on average, {figures['product_seconds_in_gradients']:.1f} by the clock, and holds "
            f"{memory / 2**20:.0f} MiB for {samples.num_samples} samples",
        )
        if memory > _MUCH_MEMORY:
            size = max(1, int(samples.num_samples * 2**29 / memory))
            yield Finding(
                "memory",
                f"the curvature of the whole batch would hold {memory / 2**30:.1f} GiB",
                f"Pass micro_batch_size={size}, which holds 0.5 GiB at a time",
            )

    def _cost(self, operator: BlockOperator, gradient: Sequence[Tensor], gradient_seconds: float) -> None:
        ledger = self.samples.ledger
        before, began = ledger.totals.get("product", 0), time.perf_counter()
        for index, own in enumerate(gradient):
            operator.product(index, index, own)
        number = len(gradient)
        per_gradient = max(ledger.known("gradient") or 0, 1)
        self.figures["gradient_flops"] = per_gradient
        self.figures["product_in_gradients"] = (
            (ledger.totals.get("product", 0) - before) / number / per_gradient
        )
        seconds = (time.perf_counter() - began) / number
        self.figures["product_seconds_in_gradients"] = seconds / max(gradient_seconds, 1e-9)

    def tracing(self) -> Iterator[Finding]:
        """Whether the objective can be traced, and how long that takes."""
        samples = self.samples
        if samples.batch is None or not self.has_products:
            return
        number = samples.structure.num_nodes
        if number > LONGEST_GRAPH:
            yield Finding("tracing", f"not tried, as a graph of {number} nodes takes long")
            return
        few = samples.on(take(samples.batch, 0, min(8, samples.num_samples)), None)
        began = time.perf_counter()
        try:
            Traced().linearize(self.curvature, few, [1] * len(samples.blocks), PolicyState())
        except TracingError as error:
            yield Finding(
                "tracing",
                f"impossible, as {error}; products are by double backward, and products=DoubleBackward() "
                "spares the warning",
            )
            return
        seconds = self.figures["tracing_seconds"] = time.perf_counter() - began
        yield Finding("tracing", f"possible, in {seconds:.1f} s; it is done once products have paid for it")

    def factors(self) -> Iterator[Finding]:
        """Which blocks have Kronecker factors."""
        blocks = self.samples.blocks
        numbers = parameters_with_factors(self.evaluation.outputs, blocks)
        self.figures["share_with_factors"] = sum(numbers) / sum(block.size for block in blocks)
        without = [
            block.name for block, number in zip(blocks, numbers, strict=True) if 2 * number < block.size
        ]
        share = f"{100 * self.figures['share_with_factors']:.0f} % of the parameters have Kronecker factors"
        names = ", ".join(map(repr, without[:5])) + (", …" if len(without) > 5 else "")
        yield Finding("factors", f"{share}; mostly a diagonal have {names}" if without else share)

    def forming(self) -> Iterator[Finding]:
        """What it would cost to write down the matrices of small blocks."""
        samples = self.samples
        passes = samples.structure.num_outputs
        element = samples.params[0].element_size()
        total = passes * samples.num_samples * sum(block.size for block in samples.blocks) * element
        self.figures["forming_in_gradients"], self.figures["jacobian_bytes"] = passes, total
        yield Finding(
            "forming",
            f"Jacobians take about {passes} gradients, and {total / 2**20:.0f} MiB where all are stored",
        )

    def step(self) -> Iterator[Finding]:
        """What a default step costs, by making one and taking it back."""
        samples = self.samples
        if not self.has_products:
            return
        began = time.perf_counter()
        try:
            report = _tried_step(samples, self.groups, self.curvature)
        except (ValueError, RuntimeError) as error:
            yield _from_message("step", str(error))
            return
        seconds = time.perf_counter() - began
        cost = self.figures["step_in_gradients"] = report.work["flops"] / self.figures["gradient_flops"]
        self.figures["step_seconds"] = seconds
        outcome = "accepted" if report.accepted else f"rejected: {report.reason}"
        yield Finding("step", f"a first default step takes {cost:.0f} gradients, {seconds:.1f} s ({outcome})")
        number = len(samples.blocks)
        if number > _MANY_BLOCKS:
            yield Finding(
                "blocks",
                f"there are {number} blocks, each with products of its own",
                "Pass fewer, e.g. blocks.by_module(model), where steps cost too much",
            )

    def size_of_the_batch(self) -> Iterator[Finding]:
        """How much of the gradient is noise, from the gradients of two halves."""
        samples = self.samples
        if samples.batch is None or samples.num_samples < 4:
            return
        half = samples.num_samples // 2
        halves = []
        for start in (0, half):
            part = Part(take(samples.batch, start, start + half))
            loss = samples.evaluate(part, fresh=True).loss
            found = torch.autograd.grad(loss, samples.params, allow_unused=True, materialize_grads=True)
            halves.append(torch.cat([own.reshape(-1).float() for own in found]))
        one, other = halves
        signal, square = float(one @ other), float(((one + other) / 2).square().sum())
        noise = max(square - signal, 0.0)
        number = samples.num_samples
        if signal <= 0.2 * square:
            wanted = min(100, max(2, math.ceil(noise / max(signal, noise / 100)))) * number
            yield Finding(
                "batch",
                f"of the gradient of {number} samples little is signal: those of its halves hardly agree",
                f"Pass about {2 ** math.ceil(math.log2(wanted))} samples a step, e.g. several batches of the "
                "loader at once",
            )
        else:
            scale = self.figures["noise_scale"] = number * noise / signal
            yield Finding("batch", f"large enough: noise and signal would be equal at {scale:.0f} samples")


def _tried_step(samples: Samples, groups: Sequence[Mapping[str, Any]], curvature: Curvature) -> Any:
    """The report of a default step, of which nothing stays."""
    params = samples.params
    values = [param.detach().clone() for param in params]
    slopes = [param.grad for param in params]
    buffers = [own for module in samples.structure.modules for own in module.buffers(recurse=False)]
    kept = [own.clone() for own in buffers]
    optimizer = BlockHF([dict(group) for group in groups], curvature=curvature, reduction=samples.reduction)
    try:
        optimizer.step(samples.objective, samples.batch)
    finally:
        with torch.no_grad():
            for param, value, slope in zip(params, values, slopes, strict=True):
                param.copy_(value)
                param.grad = slope
            for own, value in zip(buffers, kept, strict=True):
                own.copy_(value)
    return optimizer.report


def _extremes(outputs: Sequence[Tensor], product: HessianProduct) -> tuple[float, float]:
    """About the smallest and the largest eigenvalue of the loss's second derivatives by the outputs."""
    sizes = [output.numel() for output in outputs]

    @dataclass(frozen=True)
    class Flat:
        sign: float

        def __matmul__(self, vector: Tensor) -> Tensor:
            pieces = torch.split(vector.to(outputs[0].dtype), sizes)
            found = product([own.view_as(output) for own, output in zip(pieces, outputs, strict=True)])
            return torch.cat([self.sign * own.reshape(-1) for own in found]).to(vector)

    generator = torch.Generator(outputs[0].device).manual_seed(0)
    dtype = torch.float64 if outputs[0].dtype == torch.float64 else torch.float32
    start = torch.empty(sum(sizes), dtype=dtype, device=outputs[0].device).normal_(generator=generator)
    if not bool((image := Flat(1.0) @ start).isfinite().all()):
        return -math.inf, math.inf
    if not bool(image.any()):
        return 0.0, 0.0
    high, low = (float(lanczos(Flat(sign), start, 1, tol=1e-2, max_steps=20)[0][0]) for sign in (1.0, -1.0))
    return -low, high


def _same(one: Evaluation, other: Evaluation) -> bool:
    return all(map(_close, (one.loss, *one.outputs), (other.loss, *other.outputs)))


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    bound = torch.finfo(one.dtype).eps ** 0.5
    return bool(
        torch.linalg.vector_norm((one - other).float()) <= bound * torch.linalg.vector_norm(one.float())
    )


def _from_message(topic: str, message: str) -> Finding:
    """A finding from a message whose last sentence says what to do."""
    *sentences, remedy = re.split(r"\. (?=[A-Z])", message.strip().rstrip("."))
    text = ". ".join(sentences) or message.rstrip(".")
    return Finding(topic, text[:1].lower() + text[1:], remedy if sentences else "Mend this in the objective")
