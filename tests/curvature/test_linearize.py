"""The curvature without the optimizer: every way to it gives the dense matrix, and nothing is left behind."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf import (
    Auto,
    Curvature,
    DoubleBackward,
    EmpiricalFisher,
    Formed,
    GaussNewton,
    Hessian,
    Products,
    Status,
    Traced,
    blocks,
    curvature,
)

WAYS: list[Products] = [Auto(), Traced(), Formed(), DoubleBackward()]
ways = pytest.mark.parametrize("products", WAYS, ids=lambda way: type(way).__name__)


class Task:
    """A small classifier with a dense matrix to compare with."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.batch = torch.randn(12, 4, dtype=torch.float64), torch.randint(0, 3, (12,))
        self.groups = blocks.by_layer(self.model)

    def objective(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = self.model(batch[0])
        return outputs, F.cross_entropy(outputs, batch[1])

    def dense(self) -> Tensor:
        """``Jᵀ H J`` of the mean, sample by sample."""
        params, total = list(self.model.parameters()), torch.zeros(43, 43, dtype=torch.float64)
        for sample, target in zip(*self.batch, strict=True):
            outputs = self.model(sample)
            (slope,) = torch.autograd.grad(F.cross_entropy(outputs, target), outputs, create_graph=True)
            J, H = (_rows(of, by) for of, by in ((outputs, params), (slope, [outputs])))
            total += J.T @ H @ J / len(self.batch[0])
        return total.detach()


def _rows(of: Tensor, by: list[Tensor]) -> Tensor:
    """The Jacobian of a vector, row by row."""
    rows = [torch.autograd.grad(entry, by, retain_graph=True) for entry in of]
    return torch.stack([torch.cat([own.reshape(-1) for own in row]) for row in rows])


@pytest.fixture
def task() -> Task:
    return Task()


@pytest.fixture
def dense(task: Task) -> Tensor:
    return task.dense()


@ways
def test_the_matrix_is_the_dense_one(task: Task, dense: Tensor, products: Products) -> None:
    with curvature.linearize(task.objective, task.batch, task.groups, products=products) as G:
        assert G.shape == (43, 43)
        torch.testing.assert_close(G.to_dense(), dense)
        torch.testing.assert_close(G.dense("0"), dense[:25, :25])
        torch.testing.assert_close(G["2"].to_dense(), dense[25:, 25:])
        vectors = torch.randn(43, 3, dtype=torch.float64)
        torch.testing.assert_close(G @ vectors[:, 0], dense @ vectors[:, 0])
        torch.testing.assert_close(G @ vectors, dense @ vectors)
        torch.testing.assert_close(G["0"] @ vectors[:25], dense[:25, :25] @ vectors[:25])


@ways
@pytest.mark.parametrize("micro_batch_size", [None, 7])
def test_micro_batches_change_nothing(
    task: Task, dense: Tensor, products: Products, micro_batch_size: int | None
) -> None:
    with curvature.linearize(
        task.objective, task.batch, task.groups, products=products, micro_batch_size=micro_batch_size
    ) as G:
        torch.testing.assert_close(G.to_dense(), dense)


@pytest.mark.parametrize(
    "kind", [GaussNewton(), Hessian(), EmpiricalFisher()], ids=lambda kind: kind.describe()
)
def test_any_curvature_will_do(task: Task, kind: Curvature) -> None:
    with curvature.linearize(task.objective, task.batch, task.groups, curvature=kind) as G:
        whole = G.to_dense()
        torch.testing.assert_close(whole, whole.T)
        torch.testing.assert_close(G.dense("0"), whole[:25, :25])


def test_an_objective_without_a_batch(task: Task, dense: Tensor) -> None:
    with curvature.linearize(lambda: task.objective(task.batch), None, task.groups) as G:
        torch.testing.assert_close(G.to_dense(), dense)


@ways
def test_the_spectrum(task: Task, dense: Tensor, products: Products) -> None:
    expected = torch.linalg.eigvalsh(dense).flip(0)[:4]
    with curvature.linearize(task.objective, task.batch, task.groups, products=products) as G:
        values, vectors = G.eigsh(k=4, tol=1e-10)
        torch.testing.assert_close(values, expected)
        torch.testing.assert_close(dense @ vectors, vectors * values, atol=1e-8, rtol=0)
        assert float((G.trace(num_draws=200) - dense.trace()).abs()) < 0.1 * float(dense.trace())
        error = torch.linalg.vector_norm(G.diagonal(num_draws=400) - dense.diagonal())
        assert float(error) < 0.2 * float(torch.linalg.vector_norm(dense.diagonal()))


def test_the_diagonal_of_a_stored_block_is_exact(task: Task, dense: Tensor) -> None:
    with curvature.linearize(task.objective, task.batch, task.groups, products=Formed()) as G:
        torch.testing.assert_close(G["0"].diagonal(), dense[:25, :25].diagonal())
        torch.testing.assert_close(G["2"].trace(), dense[25:, 25:].trace())


def test_solving(task: Task, dense: Tensor) -> None:
    b = torch.randn(43, dtype=torch.float64)
    with curvature.linearize(task.objective, task.batch, task.groups) as G:
        found = G.solve(b, damping=1e-2, rtol=1e-12)
    assert found.status is Status.CONVERGED
    expected = torch.linalg.solve(dense + 1e-2 * torch.eye(43, dtype=torch.float64), b)
    torch.testing.assert_close(found.x, expected)


def test_scipy(task: Task, dense: Tensor) -> None:
    from scipy.sparse.linalg import eigsh

    with curvature.linearize(task.objective, task.batch, task.groups) as G:
        operator = G.to_scipy()
        assert operator.shape == (43, 43)
        assert operator.dtype == np.float64
        np.testing.assert_allclose(operator @ np.ones(43), dense.numpy() @ np.ones(43))
        found = eigsh(operator, k=2, return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(found), torch.linalg.eigvalsh(dense)[-2:].numpy())


def test_parameters_buffers_flags_and_random_numbers_stay(task: Task) -> None:
    task.model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3)).double()
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    random = torch.get_rng_state()
    with curvature.linearize(task.objective, task.batch, blocks.by_layer(task.model)) as G:
        first, second = (G @ torch.ones(G.shape[0], dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)  # the same mask in every product
    assert all(torch.equal(value, before[name]) for name, value in task.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(param.requires_grad and param.grad is None for param in task.model.parameters())


@ways
def test_nothing_outlives_the_context(task: Task, products: Products) -> None:
    kept: list[weakref.ref[Tensor]] = []

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs, loss = task.objective(batch)
        kept.append(weakref.ref(outputs))
        return outputs, loss

    with curvature.linearize(objective, task.batch, task.groups, products=products) as G:
        G @ torch.ones(43, dtype=torch.float64)
    gc.collect()
    assert kept
    assert all(ref() is None for ref in kept)


def test_it_works_where_gradients_are_switched_off(task: Task, dense: Tensor) -> None:
    with torch.no_grad(), curvature.linearize(task.objective, task.batch, task.groups) as G:
        torch.testing.assert_close(G.to_dense(), dense)


def test_misuse_says_what_to_do(task: Task) -> None:
    no_groups = pytest.raises(
        ValueError, match=r"There are no groups\. Pass the blocks, e\.g\. blocks\.by_layer"
    )
    with no_groups, curvature.linearize(task.objective, task.batch):
        pass
    with curvature.linearize(task.objective, task.batch, task.groups) as G:
        with pytest.raises(KeyError, match=r"There is no block 'head'\. There are '0', '2'\."):
            G["head"]
        with pytest.raises(ValueError, match=r"The matrix is 43 x 43.*shape \(5,\)"):
            G @ torch.ones(5)
        with pytest.raises(ValueError, match="k is 44, but must be between 1 and 43"):
            G.eigsh(44)
