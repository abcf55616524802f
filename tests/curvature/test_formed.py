"""Blocks that are formed, against dense matrices, and their exact solutions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blockhf import (
    BlockHF,
    Cholesky,
    DoubleBackward,
    EmpiricalFisher,
    Formed,
    GaussNewton,
    PolicyState,
    Samples,
    blocks,
    conjugate_gradient,
)
from blockhf.blocks import Block
from blockhf.curvature.formed import FormingError
from blockhf.linalg import Damped, DiagonalBlock
from cases import CASES, Case
from curvature_tasks import RTOL, data, dense_gauss_newton, linearized, mlp, squares, step, table

CANNOT_BE_FORMED = ("batch norm in train mode", "dropout", "gru", "lstm", "pendulum", "heat")


@table(CASES)
def test_formed_blocks_equal_the_dense_blocks_or_say_why_not(case: Case) -> None:
    try:
        actual = linearized(GaussNewton(), case, products=Formed())
    except FormingError:
        assert any(name in case.name.lower() for name in CANNOT_BE_FORMED), case.name
    else:
        assert actual.error(dense_gauss_newton(case)) < RTOL


def test_chunks_of_which_the_last_is_shorter_form_the_same_matrix() -> None:
    """The last one's two samples of two outputs are four rows, as many as there are hidden units."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.head = nn.Parameter(torch.rand(4, 1)), nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head((self.gain * torch.tanh(inputs).T).T)

    torch.manual_seed(0)
    model = Scaled().double()
    block = [Block("all", tuple(model.parameters()))]
    matrices = []
    for chunk in (8, 3):
        samples = Samples(squares(model), data(8, num_inputs=4), block)
        formed = Formed(memory_budget=chunk * 3 * 2 * block[0].size * 8)
        matrices += formed.form(GaussNewton(), samples, [0], PolicyState())
    torch.testing.assert_close(matrices[1], matrices[0])


def test_cg_on_a_formed_matrix_makes_the_iterates_of_matrix_free_cg() -> None:
    model = mlp(3, 6, 2)
    samples = Samples(squares(model), data(20), [Block("all", tuple(model.parameters()))])
    formed = Formed().linearize(GaussNewton(), samples, [6], PolicyState())
    plain = DoubleBackward().operator(GaussNewton(), samples)
    rhs = torch.sin(torch.arange(samples.blocks[0].size, dtype=torch.float64))
    for max_steps in range(1, 7):
        one, other = (
            conjugate_gradient(Damped(DiagonalBlock(matrix, 0), 0.1), rhs, max_steps=max_steps)
            for matrix in (formed, plain)
        )
        assert one.num_steps == other.num_steps == max_steps
        torch.testing.assert_close(one.x, other.x, rtol=1e-9, atol=1e-12)


def test_cholesky_solves_formed_blocks_outright() -> None:
    model = mlp(3, 6, 2)
    optimizer = BlockHF.paper(
        blocks.by_layer(model), products=Formed(), solver=Cholesky(), damping=0.1, max_cg_steps=1, lr=1.0
    )
    step(optimizer, model, 20)
    assert optimizer.report is not None
    for block in optimizer.report.blocks:
        assert (block.status, block.num_steps, block.num_products) == ("converged", 0, 0)
        assert block.residual < 1e-12


def test_cholesky_leaves_what_is_not_formed_to_cg() -> None:
    moved = {}
    for solver in (Cholesky(), None):
        model = mlp(3, 6, 2)
        optimizer = BlockHF.paper(blocks.by_layer(model), solver=solver, damping=0.1, max_cg_steps=4)
        step(optimizer, model, 20)
        assert optimizer.report is not None
        assert all(block.num_steps == 4 for block in optimizer.report.blocks)
        moved[solver is None] = torch.cat([param.detach().flatten() for param in model.parameters()])
    assert torch.equal(moved[True], moved[False])


def test_cholesky_leaves_a_singular_matrix_to_cg() -> None:
    model = mlp(3, 6, 2)
    optimizer = BlockHF.paper(
        blocks.single(model), products=Formed(), solver=Cholesky(), damping=0.0, max_cg_steps=4
    )
    step(optimizer, model, 2)
    assert optimizer.report is not None
    assert optimizer.report.blocks[0].num_steps > 0


def test_only_gauss_newton_is_formed_and_no_large_block() -> None:
    model = mlp(3, 4, 2)
    with pytest.raises(FormingError, match="EmpiricalFisher is not formed"):
        step(BlockHF.martens(blocks.single(model), curvature=EmpiricalFisher(), products=Formed()), model, 8)
    with pytest.raises(FormingError, match=r"would take 0\.\d+ MiB, more than the memory_budget of 0"):
        step(BlockHF.martens(blocks.single(model), products=Formed(memory_budget=1000)), model, 8)
