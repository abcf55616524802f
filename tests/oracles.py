"""Dense curvature matrices by ``torch.func``, none of it shared with the library.

Rows and columns are in the order of ``model.named_parameters()``, in which a tied parameter is there once.
Each function takes a case and the batches that make up its samples: one batch, or the parts into which
it was split. Every part is run once and in order from the case's seed on, so that random numbers are
those of a model that runs on the same parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.func import functional_call, grad, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

from cases import Case, Network, leaves

Batch = tuple[Tensor, Tensor]
Function = Callable[[Tensor], Tensor]


def gauss_newton(case: Case, *batches: Batch) -> Tensor:
    r""":math:`J^\top H J` of the mean loss, with dense ``J`` and dense ``H``."""

    def share(model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        shapes: list[torch.Size] = []

        def outputs(params: Tensor) -> Tensor:
            tensors = leaves(_call(model, params, inputs))
            shapes[:] = [tensor.shape for tensor in tensors]
            return torch.cat([tensor.flatten() for tensor in tensors])

        def loss(flat: Tensor) -> Tensor:
            pieces = flat.split([shape.numel() for shape in shapes])
            tensors = tuple(piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True))
            return case.loss_of(tensors, targets)

        J, flat = _jacobian(outputs, _flat(model), case.network)
        return J.T @ jacrev(grad(loss))(flat) @ J

    return _mean(case, batches, share)


def loss_hessian(case: Case, *batches: Batch) -> Tensor:
    """The second derivatives of the mean loss."""

    def share(model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch

        def loss(params: Tensor) -> Tensor:
            return case.loss_of(_call(model, params, inputs), targets)

        return _jacobian(_gradient(loss, case.network), _flat(model), case.network)[0]

    return _mean(case, batches, share)


def empirical_fisher(case: Case, *batches: Batch) -> Tensor:
    r""":math:`\frac1N \sum_i g_i g_i^\top`; the batches are of one sample each."""

    def share(model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        assert len(targets) == 1

        def loss(params: Tensor) -> Tensor:
            return case.loss_of(_call(model, params, inputs), targets)

        slope = _gradient(loss, case.network)(_flat(model))
        return torch.outer(slope, slope)

    return _mean(case, batches, share)


def monte_carlo_fisher(
    case: Case, distribution: Callable[..., Distribution], num_draws: int, draw_seed: int, *batches: Batch
) -> Tensor:
    """The mean of the outer products for targets that are drawn from ``draw_seed`` on, part by part."""
    model = case.model()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(case.seed)
        predicted = [distribution(*leaves(model(inputs))) for inputs, _ in batches]
        torch.manual_seed(draw_seed)
        drawn = [[each.sample() for _ in range(num_draws)] for each in predicted]

    def share(model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch

        def surprise(params: Tensor) -> Tensor:
            predicted = distribution(*leaves(_call(model, params, inputs)))
            return -predicted.log_prob(targets).reshape(len(targets), -1).sum(1)

        slopes, _ = _jacobian(surprise, _flat(model), case.network)
        return slopes.T @ slopes / len(targets)

    redrawn = [
        [(inputs, targets) for (inputs, _), targets in zip(batches, draw, strict=True)]
        for draw in zip(*drawn, strict=True)
    ]
    return torch.stack([_mean(case, draw, share) for draw in redrawn]).mean(0)


def categorical_fisher(case: Case, batch: Batch) -> tuple[Tensor, Tensor]:
    """The Fisher matrix of a model of logits, and the variance of each entry of a one-draw estimate.

    Both are sums over all classes that might be drawn.
    """
    model = case.model()
    inputs, targets = batch
    J, logits = _jacobian(lambda params: _call(model, params, inputs), _flat(model), case.network)
    probabilities = logits.softmax(1)
    slopes = (probabilities.unsqueeze(1) - torch.eye(logits.shape[1])) @ J  # of each sample and class
    outer = slopes.unsqueeze(3) * slopes.unsqueeze(2)
    mean = torch.einsum("nc,ncpq->npq", probabilities, outer)
    variance = torch.einsum("nc,ncpq->npq", probabilities, outer.square()) - mean.square()
    return mean.mean(0), variance.sum(0) / len(targets) ** 2


def positions(model: nn.Module) -> dict[Tensor, Tensor]:
    """For each parameter, the rows that are its own in a dense matrix."""
    params = list(model.parameters())
    rows = torch.arange(sum(param.numel() for param in params))
    return dict(zip(params, rows.split([param.numel() for param in params]), strict=True))


def _mean(case: Case, batches: Sequence[Batch], share: Callable[[nn.Module, Batch], Tensor]) -> Tensor:
    """The mean over samples of what ``share`` makes of each part."""
    model = case.model()
    if model.training:
        # In train mode the running statistics are written and never read, and torch.func cannot write them.
        torch.func.replace_all_batch_norm_modules_(model)
    with torch.random.fork_rng(), sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(case.seed)
        shares = [len(batch[1]) * share(model, batch) for batch in batches]
    return torch.stack(shares).sum(0) / sum(len(batch[1]) for batch in batches)


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def _call(model: nn.Module, params: Tensor, inputs: Tensor) -> Any:
    """The outputs as a function of the parameters."""
    named = dict(model.named_parameters())
    pieces = params.split([param.numel() for param in named.values()])
    values = {
        name: piece.view(param.shape) for (name, param), piece in zip(named.items(), pieces, strict=True)
    }
    return functional_call(model, values, (inputs,))


def _jacobian(function: Function, point: Tensor, network: Network) -> tuple[Tensor, Tensor]:
    """The Jacobian and the value of a function, which is called once."""
    if network.functional:
        return jacrev(lambda point: (value := function(point), value), has_aux=True)(point)
    point = point.clone().requires_grad_()
    values = function(point)
    rows = [torch.autograd.grad(value, point, retain_graph=True)[0] for value in values]
    return torch.stack(rows), values.detach()


def _gradient(function: Function, network: Network) -> Function:
    if network.functional:
        return grad(function)

    def gradient(point: Tensor) -> Tensor:
        return torch.autograd.grad(function(point), point, create_graph=True)[0]

    return gradient
