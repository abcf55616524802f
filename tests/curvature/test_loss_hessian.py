"""Closed forms of the loss's Hessian by the outputs equal the dense one, and are taken only then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockhf import Evaluation
from blockhf.curvature.draws import Noise, curvature_draw
from blockhf.curvature.loss_hessian import OutputHessian, closed_forms, second_derivatives

Loss = Callable[..., Tensor]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def classes(*shape: int, num: int) -> Tensor:
    return torch.randint(0, num, shape, generator=torch.Generator().manual_seed(1))


def per_token(logits: Tensor, **options: object) -> Tensor:
    targets = classes(*logits.shape[:2], num=logits.shape[-1])
    targets[0, 1] = -100
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)  # type: ignore[arg-type]


def heads(logits: Tensor, values: Tensor) -> Tensor:
    return F.cross_entropy(logits, classes(3, num=4)) + 2 * F.mse_loss(values, torch.ones_like(values))


def variational(mean: Tensor, log_variance: Tensor, decoded: Tensor) -> Tensor:
    divergence = (mean.square() + log_variance.exp() - log_variance).sum(1).mean() / 2
    return divergence + F.binary_cross_entropy_with_logits(decoded, torch.full_like(decoded, 0.3))


WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)

CLOSED: dict[str, tuple[Loss, list[Tensor]]] = {
    "cross entropy": (lambda z: F.cross_entropy(z, classes(5, num=4)), [randn(5, 4)]),
    "sum over two classes": (
        lambda z: F.cross_entropy(z, classes(5, num=2), reduction="sum"),
        [randn(5, 2)],
    ),
    "tokens, some of them left out": (per_token, [randn(2, 3, 4)]),
    "weights of classes, smoothed": (
        lambda z: per_token(z, weight=WEIGHTS, label_smoothing=0.1),
        [randn(2, 3, 4)],
    ),
    "classes second": (lambda z: F.cross_entropy(z, classes(2, 5, num=4)), [randn(2, 4, 5)]),
    "soft targets": (lambda z: F.cross_entropy(z, torch.softmax(randn(3, 4), 1)), [randn(3, 4)]),
    "flat tokens": (lambda z: F.cross_entropy(z, classes(6, num=4)), [randn(6, 4)]),
    "a prediction that is certain": (
        lambda z: F.cross_entropy(z, classes(3, num=4), weight=WEIGHTS),
        [randn(3, 4) + torch.tensor([60.0, 0, 0, 0]) * torch.eye(3, 1)],
    ),
    "squared error": (lambda z: F.mse_loss(z, torch.ones_like(z)), [randn(3, 2, 2)]),
    "weighted squares": (lambda z: (randn(3, 2).square() * z.square()).sum(), [randn(3, 2)]),
    "binary cross entropy": (
        lambda z: F.binary_cross_entropy_with_logits(z, torch.ones_like(z), pos_weight=WEIGHTS),
        [randn(3, 4)],
    ),
    "Poisson": (lambda z: F.poisson_nll_loss(z, torch.ones_like(z)), [randn(7)]),
    "two heads": (heads, [randn(3, 4), randn(3, 1)]),
    "a variational bound": (variational, [randn(3, 2), randn(3, 2), randn(3, 4)]),
}

OPEN: dict[str, tuple[Loss, list[Tensor]]] = {
    "temperature": (lambda z: per_token(z / 2), [randn(2, 3, 4)]),
    "temperature, classes second": (lambda z: F.cross_entropy(z / 2, classes(2, 5, num=4)), [randn(2, 4, 5)]),
    "a whole sequence": (lambda z: torch.logsumexp(z.flatten(1), 1).mean(), [randn(2, 3, 3)]),
    "outputs that are tied": (
        lambda a, b: (a * b.exp()).square().mean() + b.square().mean(),
        [randn(3, 1)] * 2,
    ),
    "both ways": (
        lambda z: F.cross_entropy(z, torch.arange(3)) + F.cross_entropy(z.T, torch.arange(3)),
        [randn(3, 3)],
    ),
}


def dense(loss: Loss, outputs: Sequence[Tensor]) -> Tensor:
    sizes = [output.numel() for output in outputs]

    def flat_loss(flat: Tensor) -> Tensor:
        pieces = torch.split(flat, sizes)
        return loss(*(own.view(output.shape) for own, output in zip(pieces, outputs, strict=True)))

    return torch.func.jacrev(torch.func.jacrev(flat_loss))(
        torch.cat([output.flatten() for output in outputs])
    )


def forms_of(loss: Loss, outputs: Sequence[Tensor]) -> list[OutputHessian] | None:
    leaves = tuple(output.clone().requires_grad_() for output in outputs)
    product = second_derivatives(Evaluation(leaves, loss(*leaves), len(leaves[0])))
    assert product is not None
    return closed_forms(leaves, product)


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_form_and_its_root_equal_the_dense_hessian(name: str) -> None:
    loss, outputs = CLOSED[name]
    H, forms = dense(loss, outputs), forms_of(loss, outputs)
    assert forms is not None
    images, roots = [], []
    for form, output in zip(forms, outputs, strict=True):
        basis = torch.eye(output.numel(), dtype=output.dtype).view(-1, *output.shape)
        images.append(form.times(basis).flatten(1).T)
        roots.append(form.root_times(basis).flatten(1).T)
    torch.testing.assert_close(torch.block_diag(*images), H, rtol=1e-9, atol=1e-12)
    S = torch.block_diag(*roots)
    torch.testing.assert_close(S @ S.T, H, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OPEN)
def test_other_losses_have_no_closed_form(name: str) -> None:
    assert forms_of(*OPEN[name]) is None


@pytest.mark.parametrize("name", ["temperature", "temperature, classes second", "a whole sequence"])
def test_where_there_is_no_closed_form_a_draw_is_by_the_symmetric_root(name: str) -> None:
    loss, (output,) = OPEN[name]
    values, vectors = torch.linalg.eigh(dense(loss, [output]))
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    leaf = output.clone().requires_grad_()
    (draw,) = curvature_draw(Evaluation((leaf,), loss(leaf), len(leaf)), Noise(5))
    normal = Noise(5).normal(output.flatten(1)).flatten()
    torch.testing.assert_close(draw.flatten(), root @ normal, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_closed_forms_are_found_in_coarse_numbers(dtype: torch.dtype) -> None:
    for name in ("cross entropy", "tokens, some of them left out", "squared error"):
        loss, outputs = CLOSED[name]
        assert forms_of(loss, [output.to(dtype) for output in outputs]) is not None, name


def test_a_closed_form_of_some_samples_is_that_of_their_rows() -> None:
    loss, (logits,) = CLOSED["classes second"]
    (form,) = forms_of(loss, [logits]) or ()
    torch.testing.assert_close(form.of_samples(1, 2).times(logits[1:2]), form.times(logits)[1:2])
