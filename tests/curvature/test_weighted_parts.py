"""Micro-batches of a weighted mean: matrices are those of the whole batch, whatever their kind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical

from blockhf import (
    Block,
    Curvature,
    DoubleBackward,
    EmpiricalFisher,
    Formed,
    GaussNewton,
    Hessian,
    MonteCarloFisher,
    Products,
    Samples,
    Traced,
    blocks,
    curvature,
)

Batch = tuple[Tensor, Tensor]


def matrix(kind: Curvature, products: Products, size: int | None, labels: list[int]) -> Tensor:
    torch.manual_seed(0)
    model = nn.Linear(2, 3).double()
    batch = torch.randn(len(labels), 2, dtype=torch.float64), torch.tensor(labels)

    def objective(batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.cross_entropy(outputs, batch[1])

    with curvature.linearize(
        objective,
        batch,
        blocks.single(model),
        curvature=kind,
        products=products,
        micro_batch_size=size,
        reduction=lambda batch: (batch[1] >= 0).sum(),
    ) as G:
        return G.to_dense()


WAYS = [
    (GaussNewton(), DoubleBackward()),
    (GaussNewton(), Formed()),
    (GaussNewton(), Traced()),
    (Hessian(), DoubleBackward()),
    (EmpiricalFisher(), DoubleBackward()),
    (EmpiricalFisher(), Traced()),
]


@pytest.mark.parametrize(("kind", "products"), WAYS, ids=repr)
@pytest.mark.parametrize("labels", [[0, -100, 1, 2, 2], [-100, -100, 1, 0, 2]], ids=["mixed", "none in one"])
def test_parts_make_the_whole(kind: Curvature, products: Products, labels: list[int]) -> None:
    whole = matrix(kind, products, None, labels)
    assert whole.norm() > 0
    torch.testing.assert_close(matrix(kind, products, 2, labels), whole)


def test_a_fisher_matrix_of_drawn_targets_counts_all_samples_alike() -> None:
    model = nn.Linear(2, 3)
    batch = torch.randn(5, 2), torch.tensor([0, -100, 1, 2, 2])
    block = Block("all", tuple(model.parameters()))
    samples = Samples(model, batch, [block], micro_batch_size=2, reduction=lambda own: (own[1] >= 0).sum())
    kind = MonteCarloFisher(lambda logits: Categorical(logits=logits))
    assert [part.weight for part in samples.parts] == [0.25, 0.5, 0.25]
    assert [kind.weight(samples, part) for part in samples.parts] == [0.4, 0.4, 0.2]
