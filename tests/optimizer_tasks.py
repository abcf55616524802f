"""A small network with its data in double precision, for the tests of the optimizer."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from blockhf import BlockHF, FixedStep
from blockhf.plan import Sizes, draw_plan

Factory = Callable[..., BlockHF]
FACTORIES: dict[str, Factory] = {"default": BlockHF, "paper": BlockHF.paper, "martens": BlockHF.martens}
FIXED: dict[str, Any] = {"damping": 0.01, "search": FixedStep()}
LOSSES: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "cross_entropy": F.cross_entropy}


class Task:
    """A model, a batch and the objective that brings them together."""

    def __init__(
        self,
        loss: str = "mse",
        *,
        model: Callable[[], nn.Module] | None = None,
        reduction: str = "mean",
        num_samples: int = 16,
        seed: int = 0,
    ) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = (model or mlp)().double()
            inputs = torch.randn(num_samples, 3, dtype=torch.float64)
            targets = (
                torch.randint(2, (num_samples,))
                if loss == "cross_entropy"
                else torch.randn(num_samples, 2, dtype=torch.float64)
            )
        self.batch = (inputs, targets)
        self.loss, self.reduction = LOSSES[loss], reduction

    def objective(self, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        outputs = self.model(inputs)
        return outputs, self.loss(outputs, targets, reduction=self.reduction)

    def front(self, num_samples: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch
        return inputs[:num_samples], targets[:num_samples]

    def drawn(self, num_samples: int, step: int = 0, seed: int = 0) -> tuple[Tensor, Tensor]:
        """The samples that a step draws for the curvature where none are held out."""
        total = len(self.batch[1])
        plan = draw_plan([total], Sizes(total, num_samples), seed + step + 1)
        return plan.curvature.take(self.batch, 0)[0]

    def copy(self) -> Task:
        return copy.deepcopy(self)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def values(model: nn.Module) -> Tensor:
    """A flat copy of all parameters."""
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def move_(model: nn.Module, change: Tensor) -> None:
    """Add a flat vector to all parameters."""
    pieces = torch.split(change, [param.numel() for param in model.parameters()])
    with torch.no_grad():
        for param, piece in zip(model.parameters(), pieces, strict=True):
            param.add_(piece.view(param.shape))


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of all that a rejected step must leave alone."""
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def equal(a: Any, b: Any) -> bool:
    """Whether two nestings are the same to the last bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint gives back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_layer(model: nn.Module) -> list[Tensor]:
    """A flat copy of each layer's parameters."""
    return [values(layer) for layer in model.children() if list(layer.parameters())]


def written(model: nn.Module) -> list[Tensor]:
    """What ``direction`` wrote, one flat vector per layer."""
    return [
        torch.cat([param.grad.reshape(-1) for param in layer.parameters()])
        for layer in model.children()
        if list(layer.parameters())
    ]


def dense_loss(task: Task, batch: Any) -> Tensor:
    return task.objective(batch)[1].detach()


def dense_gradient(task: Task, batch: Any) -> Tensor:
    """The gradient, flat, over all parameters."""
    gradients = torch.autograd.grad(task.objective(batch)[1], list(task.model.parameters()))
    return torch.cat([gradient.reshape(-1) for gradient in gradients])


def dense_gauss_newton(task: Task, batch: Any) -> Tensor:
    """``Jᵀ H J`` over all parameters, by the Jacobian and the Hessian themselves."""
    inputs, targets = batch
    params = dict(task.model.named_parameters())
    sizes = [param.numel() for param in params.values()]

    def outputs_at(vector: Tensor) -> Tensor:
        pieces = torch.split(vector, sizes)
        named = {name: piece.view(params[name].shape) for name, piece in zip(params, pieces, strict=True)}
        return functional_call(task.model, named, (inputs,)).reshape(-1)

    def loss_of(flat: Tensor) -> Tensor:
        return task.loss(flat.view(len(inputs), -1), targets, reduction=task.reduction)

    point = values(task.model)
    jacobian = jacrev(outputs_at)(point)
    hessian = jacrev(jacrev(loss_of))(outputs_at(point))
    return (jacobian.T @ hessian @ jacobian).detach()


def slices(groups: list[dict[str, Any]]) -> list[slice]:
    """The place of each block in the flat vector of all parameters, in order."""
    sizes = [sum(param.numel() for _, param in group["params"]) for group in groups]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


class Graphs:
    """Everything that autograd keeps for backward passes while this is watching, and when it is let go."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = self.num_kept = 0
        self.activations: list[weakref.ref[Tensor]] = []

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    def _pack(self, tensor: Tensor) -> Graphs.Kept:
        # A view of a parameter, such as the transpose of a weight, takes no memory of its own.
        size = 0 if tensor._base is not None or tensor.is_leaf else tensor.nbytes
        kept = Graphs.Kept(tensor.detach())  # with its history, it would hold itself
        self.num_kept += 1
        self._add(size)
        weakref.finalize(kept, self._add, -size)
        return kept

    def _add(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @contextlib.contextmanager
    def watch(self, model: nn.Module) -> Iterator[Graphs]:
        """Without the garbage collector: what is gone must be gone at once."""
        for module in model.modules():
            module.register_forward_hook(
                lambda module, args, output: self.activations.append(weakref.ref(output))
            )
        gc.collect()
        gc.disable()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor):
                yield self
        finally:
            gc.enable()

    def assert_gone(self) -> None:
        assert self.num_kept > 0
        assert self.activations
        assert self.live_bytes == 0
        assert not any(activation() is not None for activation in self.activations)
