"""Kronecker factors, by hand, and their averages over the steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import BlockHF, Kronecker, NoiseScale, PolicyState, blocks, conjugate_gradient
from blockhf.linalg import Damped, DiagonalBlock
from blockhf.preconditioners.moments import sum_of_products
from preconditioner_tasks import X2, moment, point_of, prepared, randn

NUM_DRAWS = 20_000


def factors(model: nn.Module, inputs: Tensor, **options: Any) -> dict[str, dict[str, Tensor]]:
    preconditioner, state = Kronecker(max_size=options.pop("max_size", 8192)), PolicyState()
    prepared(preconditioner, point_of(model, inputs, **options), state=state)
    return only_factors(state)


def only_factors(state: PolicyState) -> dict[str, dict[str, Tensor]]:
    """Those of the only block."""
    (own,) = state.to_dict()["blocks"].values()
    return own["factors"]


class Called(nn.Module):
    """One matrix, used as a function says."""

    def __init__(self, shape: tuple[int, int], call: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.call = nn.Parameter(randn(*shape, seed=1)), call

    def forward(self, inputs: Tensor) -> Tensor:
        return self.call(self.weight, inputs)


X3, PICTURES, LINES = randn(4, 5, 3), randn(3, 2, 7, 6), randn(3, 2, 9)
CONV = nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 1), dilation=(1, 2))
CONV1D = nn.Conv1d(2, 3, 3, stride=2, padding=1, dilation=2)
CUBES = randn(2, 2, 4, 3, 5)


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
            nn.Conv3d(2, 3, (4, 3, 5)),
            CUBES,
            moment(CUBES.flatten(1)),
            id="conv3d, one place for each sample",
        ),
        pytest.param(
            nn.Conv2d(2, 4, 3, groups=2),
            PICTURES,
            torch.stack(
                [moment(F.unfold(channel, 3).transpose(1, 2)) for channel in PICTURES.split(1, dim=1)]
            ),
            id="grouped conv2d",
        ),
        pytest.param(
            nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1, bias=False),
            PICTURES,
            moment(PICTURES.movedim(1, -1), False),
            id="transposed conv2d",
        ),
        pytest.param(
            nn.ConvTranspose1d(2, 4, 3, dilation=3, output_padding=2, groups=2, bias=False),
            LINES,
            LINES.movedim(1, 0).square().mean((1, 2))[:, None, None],
            id="transposed and grouped conv1d",
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


class TiedEmbedding(nn.Module):
    """One matrix, for the embedding and for the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.embed(tokens)) @ self.embed.weight.T


class TwiceGrouped(nn.Module):
    """One matrix, for convolutions with one group and with two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(4, 2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(x, self.weight), self.weight, groups=2)


class Scaled(nn.Module):
    """A vector by which each position is scaled, as in root-mean-square norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 4), nn.Parameter(randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


@pytest.mark.parametrize(
    ("model", "inputs", "factored", "diagonal"),
    [
        # The joint projection of queries, keys and values adds its bias by itself.
        pytest.param(Attentive(), randn(3, 5, 4), 2, 1, id="attention"),
        pytest.param(Cell(), randn(5, 2, 3), 2, 0, id="lstm cell"),
        pytest.param(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), X2, 3, 0, id="layer norm"),
        pytest.param(nn.Conv2d(2, 4, 3, groups=2), PICTURES, 1, 0, id="grouped convolution"),
        pytest.param(nn.ConvTranspose2d(2, 4, 3), PICTURES, 2, 0, id="transposed convolution"),
        pytest.param(nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)), PICTURES, 3, 0, id="batch norm"),
        pytest.param(TwiceGrouped(), PICTURES, 0, 1, id="one matrix in two groupings"),
        pytest.param(TiedWeights(), X2, 1, 0, id="tied weights"),
        pytest.param(TiedEmbedding(), torch.tensor([[0, 2], [1, 4]]), 1, 0, id="tied embedding"),
        pytest.param(Scaled(), X2, 2, 0, id="scaled"),
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


def test_factors_are_averages_and_inverses_come_at_intervals() -> None:
    model, preconditioner, state = nn.Linear(3, 2).double(), Kronecker(decay=0.6, every=2), PolicyState()
    batches = [randn(6, 3, seed=seed) for seed in range(5)]
    average, inverses = moment(batches[0]), []
    for step, inputs in enumerate(batches):
        prepared(preconditioner, point_of(model, inputs), state=state)
        average = average.lerp(moment(inputs), max(0.4, 1 / (step + 1)))
        (own,) = only_factors(state).values()
        torch.testing.assert_close(own["inputs"], average)
        inverses.append(own["inverse inputs"])
    fresh = [not torch.equal(one, other) for one, other in itertools.pairwise(inverses)]
    assert fresh == [True, False, True, False]  # at the steps 1, 2 and 4


def test_factors_that_are_not_finite_are_not_taken_in() -> None:
    model, state = nn.Linear(3, 2).double(), PolicyState()
    prepared(Kronecker(), point_of(model, X2), state=state)
    before = only_factors(state)
    prepared(Kronecker(), point_of(model, X2 * float("inf")), state=state)
    after = only_factors(state)
    for key, own in after.items():
        assert all(bool(tensor.isfinite().all()) for tensor in own.values())
        assert torch.equal(own["inputs"], before[key]["inputs"])


def test_the_factors_of_a_tied_matrix_have_the_trace_of_both_uses() -> None:
    """And without one of the uses they are the other's."""
    one, other = (_positive(3, 1), _positive(5, 2)), (_positive(3, 3), _positive(5, 4).diagonal())
    columns, rows = sum_of_products(one, other)
    dense = [torch.kron(a, b if b.dim() > 1 else torch.diag(b)) for a, b in (one, other, (columns, rows))]
    torch.testing.assert_close(dense[2].trace(), dense[0].trace() + dense[1].trace())
    columns, rows = sum_of_products(one, (torch.zeros(3, 3).double(), torch.zeros(5).double()))
    torch.testing.assert_close(torch.kron(columns, rows), dense[0])


def _positive(size: int, seed: int) -> Tensor:
    root = randn(size, size, seed=seed)
    return root @ root.T


def test_a_tied_embedding_is_preconditioned_for_both_uses() -> None:
    tokens = torch.tensor([[0, 2], [1, 4], [2, 2]])
    (own,) = factors(TiedEmbedding().double(), tokens).values()
    assert own["inputs"].shape == (3, 3)
    assert own["cotangents"].shape == (5, 5)
    seen = own["cotangents"].diagonal()
    assert bool((seen > 0).all()), "the head sees all tokens"


def test_the_scale_of_a_normalized_position_has_the_exact_block_up_to_the_noise_of_the_draw() -> None:
    model, inputs = nn.LayerNorm(2).double(), randn(NUM_DRAWS, 2)
    scale, shift = factors(model, inputs).values()
    normalized = nn.functional.layer_norm(inputs, (2,))
    expected = torch.diag((normalized.square()).mean(0))
    torch.testing.assert_close(scale["cotangents"], expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(shift["cotangents"], torch.eye(2, dtype=torch.float64), rtol=0.05, atol=0.05)
    assert scale["inputs"].item() == shift["inputs"].item() == 1.0


def normalized(model: nn.Module) -> nn.Module:
    """With statistics of its own, as it is used after training."""
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(randn(*buffer.shape, seed=len(name)).square() + 0.5)
    return model.eval()


WHITE = randn(5_000, 2, 3, 3)
SHIFTED = WHITE + randn(2, 1, 1, seed=7)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        pytest.param(nn.Conv2d(2, 4, 2, groups=2), SHIFTED, id="grouped"),
        pytest.param(nn.ConvTranspose2d(2, 3, 2, stride=2, bias=False), SHIFTED, id="transposed, disjoint"),
        pytest.param(nn.ConvTranspose2d(2, 2, 2, bias=False), WHITE, id="transposed, white inputs"),
        pytest.param(nn.ConvTranspose2d(2, 4, 2, stride=2, groups=2, bias=False), SHIFTED, id="both"),
        pytest.param(nn.BatchNorm2d(2), SHIFTED, id="batch norm"),
        pytest.param(normalized(nn.BatchNorm2d(2)), SHIFTED, id="batch norm in evaluation"),
    ],
)
def test_where_inputs_and_cotangents_are_independent_the_factors_give_the_dense_matrix(
    model: nn.Module, inputs: Tensor
) -> None:
    """Up to the noise of the draw; a bias belongs to the matrix, a scale and a shift have matrices apart."""
    point = point_of(model.double(), inputs)
    state = PolicyState()
    prepared(Kronecker(), point, state=state)
    with point.linearize() as operator:
        dense = torch.stack([operator.product(0, 0, unit) for unit in torch.eye(operator.sizes[0]).double()])
    places, pieces = [], []
    start = torch.arange(len(dense)).split([param.numel() for param in model.parameters()])
    for index, own in enumerate(only_factors(state).values()):
        stack = [own[name].reshape(-1, *own[name].shape[-2:]) for name in ("inputs", "cotangents")]
        flipped = isinstance(model, nn.ConvTranspose2d)
        pairs = list(zip(*(reversed(stack) if not flipped else stack), strict=True))
        pieces += [torch.kron(first, second) for first, second in pairs]
        rows = start[index].reshape(-1, 1)
        if isinstance(model, nn.Conv2d):  # each row of the weight ends with its bias
            rows = torch.cat([start[0].reshape(4, -1), start[1].reshape(4, 1)], dim=1)
        places.append(rows.reshape(-1))
    order = torch.cat(places)
    expected = dense[order][:, order]
    actual = torch.block_diag(*pieces)
    if isinstance(model, nn.BatchNorm2d):  # what a scale and a shift have to do with each other is left out
        expected = expected * torch.block_diag(*torch.ones(2, 2, 2, dtype=torch.float64))
    scale = expected.diagonal().mean()
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0.05, atol=0.1)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        pytest.param(nn.Conv1d(20, 6, 1, groups=2), (20, 3), id="grouped"),
        pytest.param(nn.Conv1d(20, 20, 1, groups=20), (20, 3), id="one group for each channel"),
        pytest.param(nn.ConvTranspose1d(20, 3, 2, stride=2), (20, 3), id="transposed"),
        pytest.param(nn.BatchNorm1d(20).eval(), (20, 3), id="batch norm"),
    ],
)
def test_factors_of_convolutions_and_norms_save_iterations(model: nn.Module, shape: tuple[int, ...]) -> None:
    scales = torch.logspace(-2, 1, 20, dtype=torch.float64)[:, None]
    point, state = point_of(model.double(), randn(400, *shape) * scales), PolicyState()
    for _ in range(5):  # averages over the steps
        inverse = prepared(Kronecker(), point, 1e-7, state)
    rhs = randn(sum(param.numel() for param in model.parameters()), seed=3)
    with point.linearize() as matrix:
        operator = Damped(DiagonalBlock(matrix, 0), 1e-7)
        plain, helped = (
            conjugate_gradient(
                operator, rhs, torch.zeros_like(rhs), rtol=1e-3, max_steps=400, preconditioner=by
            )
            for by in (None, inverse)
        )
    assert helped.num_steps < 0.5 * plain.num_steps


def test_of_large_factors_of_groups_only_the_diagonals_are_kept() -> None:
    model = nn.Conv2d(4, 4, 2, groups=2).double()
    inputs = randn(6, 4, 3, 3)
    (own,), (whole,) = (factors(model, inputs, max_size=size).values() for size in (3, 100))
    assert own["inputs"].shape == own["inverse inputs"].shape == (2, 1, 9)
    torch.testing.assert_close(own["inputs"][:, 0], whole["inputs"].diagonal(dim1=1, dim2=2))
    assert own["cotangents"].shape == (2, 2, 2)


def test_an_exact_block_is_inverted_with_the_whole_damping() -> None:
    point, state = point_of(nn.LayerNorm(3).double(), randn(50, 3)), PolicyState()
    inverse = prepared(Kronecker(), point, 0.1, state)
    scale, shift = (own["cotangents"] for own in only_factors(state).values())
    dense = torch.block_diag(scale, shift) + 0.1 * torch.eye(6, dtype=torch.float64)
    vector = randn(6)
    torch.testing.assert_close(inverse @ vector, torch.linalg.solve(dense, vector))


def test_factors_are_found_where_autocast_casts_the_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    inputs, targets = torch.randn(32, 5), torch.randint(3, (32,))

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(batch)
        return outputs, nn.functional.cross_entropy(outputs.float(), targets[: len(batch)])

    optimizer = BlockHF(blocks.by_layer(model), sampling=NoiseScale())
    optimizer.step(objective, inputs)
    state = optimizer.policy_state["preconditioner"]
    for name, size in (("0", 6), ("2", 5)):  # inputs and the bias
        factors = state.of(name)["factors"]["0"]
        assert factors["inputs"].shape == (size, size)
        assert factors["inputs"].dtype == torch.float32
