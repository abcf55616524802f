"""Preconditioners: their factors by hand, their operators' laws, and what they save conjugate gradients."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from blockhf import (
    BlockHF,
    CurvatureDraws,
    Diagonal,
    DoubleBackward,
    GaussNewton,
    Hessian,
    Hutchinson,
    Kronecker,
    Nystrom,
    Precondition,
    SignedGradients,
    blocks,
    conjugate_gradient,
)
from blockhf.objective import Evaluation, Problem, Reduction
from blockhf.operators import Damped, DiagonalBlock, LinearOperator
from blockhf.preconditioners.draws import Noise, curvature_draw, signed_slopes
from blockhf.solvers import Solution
from cases import as_blocks
from optimizer_tasks import Task, equal, values

NUM_DRAWS = 20_000


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem_of(
    model: nn.Module, inputs: Tensor, loss: Callable[[Tensor], Tensor] | None = None, **options: Any
) -> Problem:
    """With half the mean square of the outputs, unless another loss is given."""

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(batch)
        if loss is not None:
            return outputs, loss(outputs)
        squares = outputs.square().flatten(1).sum(1) / 2
        return outputs, squares.sum() if options.get("reduction") == "sum" else squares.mean()

    problem = Problem(objective, inputs, as_blocks(blocks.single(model)), **options)
    problem.linearize = lambda problem, _: DoubleBackward().linearize(GaussNewton(), problem)
    problem.differentiate()
    return problem


def prepared(preconditioner: Any, problem: Problem, damping: float = 0.1) -> LinearOperator:
    (inverse,) = preconditioner.prepare(problem, problem.matrix(), [damping])
    assert inverse is not None
    return inverse


def factors(model: nn.Module, inputs: Tensor, **options: Any) -> dict[str, dict[str, Tensor]]:
    preconditioner = Kronecker(max_size=options.pop("max_size", 8192))
    prepared(preconditioner, problem_of(model, inputs, **options))
    return preconditioner.state_dict()["factors"]


def moment(rows: Tensor, bias: bool = True) -> Tensor:
    rows = rows.reshape(-1, rows.shape[-1])
    rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], 1) if bias else rows
    return rows.T @ rows / len(rows)


# --- random cotangents --------------------------------------------------------------------------------


def mse(outputs: tuple[Tensor, ...]) -> Tensor:
    return outputs[0].square().mean()


def cross_entropy(outputs: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(outputs[0], torch.arange(len(outputs[0])) % outputs[0].shape[1])


def tied(outputs: tuple[Tensor, ...]) -> Tensor:
    shifted = outputs[0] + outputs[1] * torch.tensor([1.0, -1.0, 0.0])
    return F.cross_entropy(shifted, torch.tensor([0, 1])) + outputs[1].square().mean()


@pytest.mark.parametrize(
    ("outputs", "loss", "num_samples"),
    [
        pytest.param([randn(3, 2)], mse, 3, id="mse"),
        pytest.param([randn(2, 4)], cross_entropy, 2, id="cross entropy"),
        pytest.param([randn(2, 3), 0.1 * randn(2, 1)], tied, 2, id="several outputs"),
        pytest.param([randn(3, 2)], cross_entropy, 7, id="no samples first"),
        pytest.param([randn(2, 3)], cross_entropy, None, id="no samples"),
    ],
)
def test_a_draws_covariance_is_the_losss_hessian_by_the_outputs(
    outputs: list[Tensor], loss: Any, num_samples: int | None
) -> None:
    sizes = [output.numel() for output in outputs]

    def flat_loss(flat: Tensor) -> Tensor:
        pieces = torch.split(flat, sizes)
        return loss(tuple(p.view(output.shape) for p, output in zip(pieces, outputs, strict=True)))

    H = torch.func.jacrev(torch.func.jacrev(flat_loss))(torch.cat([output.flatten() for output in outputs]))
    assert bool((torch.linalg.eigvalsh(H) > -1e-3).all())
    leaves = tuple(output.clone().requires_grad_() for output in outputs)
    evaluation = Evaluation(leaves, loss(leaves), num_samples)
    draws = torch.stack(
        [
            torch.cat([r.flatten() for r in curvature_draw(evaluation, Noise(3, number=number))])
            for number in range(1000)
        ]
    )
    covariance = draws.T @ draws / len(draws)
    deviation = (H.diagonal().clamp_min(1e-3).sqrt()[:, None] * H.diagonal().clamp_min(1e-3).sqrt()) * (
        2 / len(draws)
    ) ** 0.5
    assert float(((covariance - H) / deviation).abs().max()) < 5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_signed_slopes_have_the_empirical_fishers_covariance(reduction: Reduction) -> None:
    logits = randn(4, 3).requires_grad_()
    loss = F.cross_entropy(logits, torch.tensor([0, 1, 2, 0]), reduction=reduction)
    evaluation = Evaluation((logits,), loss, 4, reduction)
    (slopes,) = torch.autograd.grad(evaluation.loss, logits, retain_graph=True)
    if reduction == "mean":
        slopes = 2 * slopes  # r / 4 for each of 4 samples; the mean of r rᵀ is the sum of (r / 2) (r / 2)ᵀ
    draws = torch.stack([signed_slopes(evaluation, Noise(0, number=number))[0] for number in range(2000)])
    assert torch.equal(draws.abs(), slopes.abs().expand_as(draws))
    within = torch.einsum("nic,nid->icd", draws, draws) / len(draws)
    torch.testing.assert_close(within, torch.einsum("ic,id->icd", slopes, slopes))
    between = torch.einsum("nc,nd->cd", draws[:, 0], draws[:, 1]) / len(draws)
    assert float(between.abs().max()) < 5 / len(draws) ** 0.5 * float(slopes.abs().max()) ** 2


@pytest.mark.parametrize("draw", [curvature_draw, signed_slopes])
def test_draws_follow_from_the_seed_and_leave_torchs_own_alone(draw: Any) -> None:
    logits = randn(4, 3).requires_grad_()
    evaluation = Evaluation((logits,), F.cross_entropy(logits, torch.tensor([0, 1, 2, 0])), 4)
    state = torch.get_rng_state()
    one, same, other = (draw(evaluation, Noise(seed))[0] for seed in (5, 5, 6))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["normal", "signs"])
@given(place=st.integers(0, 200), length=st.integers(1, 150))
def test_a_samples_noise_does_not_depend_on_the_part_it_is_in(kind: str, place: int, length: int) -> None:
    everything = getattr(Noise(7), kind)(torch.empty(400, 3))
    some = getattr(Noise(7, place), kind)(torch.empty(length, 3))
    assert torch.equal(some, everything[place : place + length])
    assert len(everything.unique()) == (1200 if kind == "normal" else 2)


# --- the factors of the inputs, by hand ---------------------------------------------------------------


class Called(nn.Module):
    """One matrix, used as a function says."""

    def __init__(self, shape: tuple[int, int], call: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.call = nn.Parameter(randn(*shape, seed=1)), call

    def forward(self, inputs: Tensor) -> Tensor:
        return self.call(self.weight, inputs)


X2, X3, PICTURES, LINES = randn(6, 3), randn(4, 5, 3), randn(3, 2, 7, 6), randn(3, 2, 9)
CONV = nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 1), dilation=(1, 2))
CONV1D = nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2)


@pytest.mark.parametrize(
    ("model", "inputs", "expected"),
    [
        pytest.param(nn.Linear(3, 2), X2, moment(X2), id="linear"),
        pytest.param(nn.Linear(3, 2, bias=False), X2, moment(X2, False), id="linear without bias"),
        pytest.param(nn.Linear(3, 2), X3, moment(X3), id="linear on sequences"),
        pytest.param(Called((3, 2), lambda W, x: x @ W), X2, moment(X2, False), id="x @ W"),
        pytest.param(Called((3, 2), lambda W, x: x @ W), X3, moment(X3, False), id="sequences @ W"),
        pytest.param(Called((2, 3), lambda W, x: (W @ x.T).T), X2, moment(X2, False), id="W @ x"),
        pytest.param(Called((3, 2), lambda W, x: (W.T @ x.T).T), X2, moment(X2, False), id="W.T @ x"),
        pytest.param(Called((2, 3), lambda W, x: F.linear(x, W)), X2, moment(X2, False), id="F.linear"),
        pytest.param(
            CONV,
            PICTURES,
            moment(F.unfold(PICTURES, (3, 2), (1, 2), (1, 1), (2, 1)).transpose(1, 2)),
            id="conv2d",
        ),
        pytest.param(
            CONV1D,
            LINES,
            moment(F.unfold(LINES[:, :, None], (1, 3), (1, 2), (0, 1), (1, 2)).transpose(1, 2)),
            id="conv1d",
        ),
        pytest.param(
            nn.Embedding(4, 3),
            torch.tensor([[0, 1], [1, 3], [1, 0]]),
            torch.tensor([2, 3, 0, 1], dtype=torch.float64) / 6,
            id="embedding",
        ),
    ],
)
def test_the_factor_of_the_inputs_is_their_second_moment(
    model: nn.Module, inputs: Tensor, expected: Tensor
) -> None:
    ((key, own),) = factors(model.double(), inputs).items()
    torch.testing.assert_close(own["inputs"], expected)
    assert {"cotangents", "inverse inputs", "inverse cotangents"} <= own.keys(), key


def test_a_layer_that_is_used_twice_has_the_moment_of_both_uses() -> None:
    model = nn.Linear(3, 3).double()
    shared = nn.Sequential(model, nn.Tanh(), model)
    hidden = torch.tanh(model(X2)).detach()
    (own,) = factors(shared, X2).values()
    torch.testing.assert_close(own["inputs"], (moment(X2) + moment(hidden)) / 2)


@pytest.mark.parametrize("options", [{"micro_batch_size": 4}, {"reduction": "sum"}], ids=str)
def test_micro_batches_and_sums_have_the_same_factor_of_the_inputs(options: dict[str, Any]) -> None:
    (own,) = factors(nn.Linear(3, 2).double(), X2, **options).values()
    torch.testing.assert_close(own["inputs"], moment(X2))


def test_a_sum_has_the_means_factor_of_the_cotangents_times_the_number_of_samples() -> None:
    model = nn.Linear(3, 2).double()
    (mean,), (total,) = (factors(model, X2, reduction=r).values() for r in ("mean", "sum"))
    torch.testing.assert_close(total["cotangents"], len(X2) * mean["cotangents"])


def test_the_factor_of_the_cotangents_is_the_losss_curvature_up_to_the_noise_of_the_draw() -> None:
    (own,) = factors(nn.Linear(3, 2).double(), randn(NUM_DRAWS, 3)).values()
    torch.testing.assert_close(own["cotangents"], torch.eye(2, dtype=torch.float64), rtol=0.05, atol=0.05)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x[:, 0])
        return self.cell(x[:, 1], state)[0]


class TiedWeights(nn.Module):
    """One matrix, for the way there and for the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.T


@pytest.mark.parametrize(
    ("model", "inputs", "factored", "diagonal"),
    [
        # The joint projection of queries, keys and values adds its bias by itself.
        pytest.param(Attentive(), randn(3, 5, 4), 2, 1, id="attention"),
        pytest.param(Cell(), randn(5, 2, 3), 2, 0, id="lstm cell"),
        pytest.param(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), X2, 1, 2, id="layer norm"),
        pytest.param(nn.Conv2d(2, 4, 3, groups=2), PICTURES, 0, 2, id="grouped convolution"),
        pytest.param(TiedWeights(), X2, 0, 1, id="tied weights"),
    ],
)
def test_matrices_have_factors_with_their_biases_and_the_rest_a_diagonal(
    model: nn.Module, inputs: Tensor, factored: int, diagonal: int
) -> None:
    found = factors(model.double(), inputs).values()
    assert (sum("inputs" in own for own in found), sum("diagonal" in own for own in found)) == (
        factored,
        diagonal,
    )


def test_of_a_factor_that_is_too_large_only_the_diagonal_is_kept() -> None:
    (own,) = factors(nn.Linear(3, 2).double(), X2, max_size=3).values()
    torch.testing.assert_close(own["inputs"], moment(X2).diagonal())
    assert own["cotangents"].shape == (2, 2)


# --- the operators ------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[], Any]] = {
    "kronecker": Kronecker,
    "kronecker, diagonal factors": lambda: Kronecker(max_size=2),
    "draws": lambda: Diagonal(CurvatureDraws()),
    "signed": lambda: Diagonal(SignedGradients(), exponent=0.75),
    "hutchinson": lambda: Diagonal(Hutchinson(10)),
    "nystrom": lambda: Nystrom(8),
}
all_makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.LayerNorm(6), nn.Linear(6, 3)
        ).double()


@all_makers
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_an_inverse_is_linear_symmetric_and_positive_definite(
    make: Callable[[], Any], damping: float
) -> None:
    problem = problem_of(network(), randn(50, 4))
    inverse = prepared(make(), problem, damping)
    size = problem.blocks[0].size
    dense = torch.stack([inverse @ column for column in torch.eye(size, dtype=torch.float64)])
    vector = randn(size, seed=9)
    torch.testing.assert_close(inverse @ vector, dense @ vector)
    torch.testing.assert_close(dense, dense.T)
    assert float(torch.linalg.eigvalsh(dense)[0]) > 0


@all_makers
def test_with_a_preconditioner_cg_finds_the_same_in_fewer_iterations(make: Callable[[], Any]) -> None:
    scales = torch.logspace(-2, 1, 20, dtype=torch.float64)
    inputs, targets = randn(300, 20, seed=2) @ randn(20, 20, seed=8) * scales, torch.arange(300) % 5
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(20, 5).double()
    problem = problem_of(model, inputs, lambda outputs: F.cross_entropy(outputs, targets))
    preconditioner = Nystrom(20) if isinstance(make(), Nystrom) else make()
    operator = Damped(DiagonalBlock(problem.matrix(), 0), 1e-7)
    for _ in range(10):  # averages over the steps
        inverse = prepared(preconditioner, problem, 1e-7)
    rhs = problem.differentiate()[1][0]

    def solve(inverse: LinearOperator | None, rtol: float) -> Solution:
        return conjugate_gradient(operator, rhs, preconditioner=inverse, rtol=rtol, max_steps=5000)

    exact = solve(None, 1e-11).x
    torch.testing.assert_close(solve(inverse, 1e-11).x, exact, rtol=1e-3, atol=1e-5 * float(exact.norm()))
    assert solve(inverse, 1e-3).num_steps < 0.6 * solve(None, 1e-3).num_steps


def test_for_a_linear_layer_with_squared_error_the_kronecker_inverse_is_all_but_exact() -> None:
    inputs = randn(4000, 10) * torch.logspace(-1, 1, 10, dtype=torch.float64)
    problem = problem_of(nn.Linear(10, 2).double(), inputs)
    preconditioner = Kronecker()
    for _ in range(10):
        inverse = prepared(preconditioner, problem, 1e-8)
    operator = Damped(DiagonalBlock(problem.matrix(), 0), 1e-8)
    rhs = randn(22, seed=1)
    assert conjugate_gradient(operator, rhs, rtol=1e-2, max_steps=500).num_steps > 10
    assert conjugate_gradient(operator, rhs, preconditioner=inverse, rtol=1e-2, max_steps=500).num_steps <= 3


# --- over the steps -----------------------------------------------------------------------------------


def test_factors_are_averages_and_inverses_come_at_intervals() -> None:
    model, preconditioner = nn.Linear(3, 2).double(), Kronecker(decay=0.6, every=2)
    batches = [randn(6, 3, seed=seed) for seed in range(5)]
    average, inverses = moment(batches[0]), []
    for step, inputs in enumerate(batches):
        prepared(preconditioner, problem_of(model, inputs))
        average = average.lerp(moment(inputs), max(0.4, 1 / (step + 1)))
        (own,) = preconditioner.state_dict()["factors"].values()
        torch.testing.assert_close(own["inputs"], average)
        inverses.append(own["inverse inputs"])
    fresh = [not torch.equal(one, other) for one, other in itertools.pairwise(inverses)]
    assert fresh == [True, False, True, False]  # at the steps 1, 2 and 4


def test_factors_that_are_not_finite_are_not_taken_in() -> None:
    model, preconditioner = nn.Linear(3, 2).double(), Kronecker()
    prepared(preconditioner, problem_of(model, X2))
    before = preconditioner.state_dict()["factors"]
    prepared(preconditioner, problem_of(model, X2 * float("inf")))
    after = preconditioner.state_dict()["factors"]
    for key, own in after.items():
        assert all(bool(tensor.isfinite().all()) for tensor in own.values())
        assert torch.equal(own["inputs"], before[key]["inputs"])


@all_makers
def test_a_saved_state_goes_on_to_the_last_bit(make: Callable[[], Any]) -> None:
    problem, one, other = problem_of(network(), randn(50, 4)), make(), make()
    prepared(one, problem)
    other.load_state_dict(one.state_dict())
    vector = randn(problem.blocks[0].size)
    first, second = (prepared(each, problem) @ vector for each in (one, other))
    assert torch.equal(first, second)
    assert equal(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("num_steps", [1, 6])
def test_parameters_that_are_frozen_or_thawed_get_factors_of_their_own(num_steps: int) -> None:
    task = Task(num_samples=40)
    optimizer = BlockHF(blocks.single(task.model))

    def steps() -> None:
        for _ in range(num_steps):
            optimizer.step(task.objective, task.batch)

    steps()
    task.model[0].requires_grad_(False)
    steps()
    task.model[0].requires_grad_(True)
    before = task.model[0].bias.detach().clone()
    steps()
    assert bool(values(task.model).isfinite().all())
    assert not torch.equal(task.model[0].bias, before)


@pytest.mark.parametrize("preconditioner", [Kronecker, Diagonal])
def test_with_the_hessian_the_loss_alone_will_do(preconditioner: Any) -> None:
    task = Task(num_samples=40)
    optimizer = BlockHF(blocks.by_layer(task.model), curvature=Hessian(), preconditioner=preconditioner())
    losses = [float(optimizer.step(lambda batch: task.objective(batch)[1], task.batch)) for _ in range(4)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Kronecker(decay=1.0), "decay is 1.0, but must be at least 0 and below 1."),
        (lambda: Kronecker(every=0), "every and max_size are 0 and 8192, but must be at least 1."),
        (lambda: Kronecker(max_size=0), "every and max_size are 1 and 0, but must be at least 1."),
        (lambda: Diagonal(exponent=0.0), "exponent is 0.0, but must be above 0 and at most 1."),
        (lambda: Diagonal(decay=-0.1), "decay is -0.1, but must be at least 0 and below 1."),
        (lambda: Nystrom(0), "rank and every are 0 and 10, but must be at least 1."),
    ],
)
def test_an_invalid_preconditioner_is_refused_with_value_and_bound(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        make()


# --- on other devices, with other parameters ----------------------------------------------------------


@pytest.mark.parametrize("make", [Kronecker, lambda: Kronecker(every=5), Diagonal, Nystrom])
def test_state_is_taken_over_by_parameters_of_another_type(make: Callable[[], Any]) -> None:
    single, double = Task(num_samples=200), Task(num_samples=200)
    single.model.float()
    single.batch = tuple(tensor.float() for tensor in single.batch)
    saved = BlockHF(blocks.by_layer(single.model), preconditioner=make())
    saved.step(single.objective, single.batch)
    loaded = BlockHF(blocks.by_layer(double.model), preconditioner=make())
    loaded.load_state_dict(saved.state_dict())
    before = values(double.model)
    loaded.step(double.objective, double.batch)
    assert loaded.report is not None
    assert loaded.report.accepted
    assert values(double.model).dtype == before.dtype == torch.float64


def test_a_sketch_of_a_block_that_lost_a_parameter_is_made_anew() -> None:
    task = Task(num_samples=200)
    optimizer = BlockHF(blocks.single(task.model), preconditioner=Nystrom(rank=5, every=100))
    optimizer.step(task.objective, task.batch)
    task.model[0].bias.requires_grad_(False)
    optimizer.step(task.objective, task.batch)
    assert optimizer.report is not None
    assert optimizer.report.accepted


class Scalars(TorchDispatchMode):
    """Counts how often the host asks for a number."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_an_inverse_never_waits_for_the_device() -> None:
    task = Task(model=lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)))
    applied: list[int] = []

    class Asked(Precondition):
        def solve(self, systems: Any, matrix: Any) -> list[Solution]:
            with Scalars() as scalars:
                for system in systems:
                    _ = system.preconditioner @ system.rhs
            applied.append(scalars.count)
            return super().solve(systems, matrix)

    BlockHF(blocks.single(task.model), solver=Asked()).step(task.objective, task.batch)
    assert applied == [0]


@pytest.mark.parametrize(
    "preconditioner", [Kronecker(), Diagonal(CurvatureDraws(2)), Diagonal(SignedGradients())]
)
def test_micro_batches_draw_what_the_whole_batch_draws(preconditioner: Any) -> None:
    found, kept = [], []
    for micro_batch_size in (None, 30):
        task = Task(num_samples=300)
        optimizer = BlockHF(
            blocks.by_layer(task.model),
            preconditioner=copy.deepcopy(preconditioner),
            micro_batch_size=micro_batch_size,
        )
        optimizer.step(task.objective, task.batch)
        found.append(values(task.model))
        kept.append(optimizer.preconditioner.state_dict())  # type: ignore[attr-defined]
    for key in kept[0].keys() & {"factors", "averages"}:
        torch.testing.assert_close(kept[1][key], kept[0][key], rtol=1e-9, atol=1e-12)
    # With a bad preconditioner CG makes 1e-7 out of rounding; other draws would make a tenth.
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("max_cg_steps", [5, 50])
def test_kfac_forms_no_block_though_that_would_be_cheap(
    max_cg_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockhf.curvature.auto._SMALLEST", 0)
    task = Task(num_samples=300)
    optimizer = BlockHF(blocks.by_layer(task.model), solver=Precondition(), max_cg_steps=max_cg_steps)
    optimizer.step(task.objective, task.batch)
    assert optimizer.report is not None
    assert optimizer.report.accepted
    assert [block.products for block in optimizer.report.blocks] == ["no products"] * 3
    assert "product_flops" not in optimizer.report.work
