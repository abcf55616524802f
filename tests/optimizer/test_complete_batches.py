"""A batch that is all there is has no noise: the default finds out, says so, and trains on all of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from blockhf import AllSamples, BlockHF, NoiseScale, blocks
from blockhf.batches import fingerprint
from blockhf.plan import FEW_SAMPLES, Batch, why_complete


def network(*more: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), *more, nn.Linear(8, 1)).double()


def wave(num_samples: int = 40) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, num_samples, dtype=torch.float64)[:, None]
    return x, torch.sin(3 * x)


def fit(model: nn.Module) -> Any:
    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.mse_loss(outputs, batch[1])

    return objective


def reasons(optimizer: BlockHF, model: nn.Module, *batches: Any) -> list[str]:
    found = []
    for batch in batches:
        optimizer.step(fit(model), batch)
        assert optimizer.report is not None
        found.append(optimizer.report.complete)
    return found


@pytest.mark.parametrize(
    ("batch", "is_complete"),
    [
        (Batch(None), True),
        (Batch(64), False),
        (Batch(64, again=True), True),
        (Batch(64, population=64), True),
        (Batch(64, population=65, again=True), False),
        (Batch(64, takes_all=True), True),
        (Batch(FEW_SAMPLES + 1, population=FEW_SAMPLES + 1), False),
        (Batch(FEW_SAMPLES + 1, takes_all=True), True),
        (Batch(64, again=True, looks_for_noise=True), False),
        (Batch(64, again=True, is_random=True), False),
    ],
)
def test_what_is_known_of_a_batch_decides(batch: Batch, is_complete: bool) -> None:
    assert bool(why_complete(batch)) == is_complete


def test_the_same_samples_again_are_all_there_are_until_others_come() -> None:
    model, batch = network(), wave()
    order = torch.randperm(40)
    shuffled = tuple(own[order] for own in batch)
    optimizer = BlockHF(blocks.single(model))
    again = "the batch is the same again"
    assert reasons(optimizer, model, batch, shuffled, batch) == ["", again, again]
    assert optimizer.report is not None
    assert optimizer.report.work["gradient_batch"] == 40
    other = tuple(own[:39] for own in batch)
    assert reasons(optimizer, model, other, batch, batch) == ["", "", ""]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"population": 40}, "the batch is the population"),
        ({"population": 41}, ""),
        ({"sampling": AllSamples()}, "all samples are asked for"),
        ({"sampling": NoiseScale()}, ""),
        ({"damping": 0.1}, ""),
    ],
)
def test_what_the_user_says_holds(options: dict[str, Any], reason: str) -> None:
    model = network()
    optimizer = BlockHF(blocks.single(model), **options)
    assert reasons(optimizer, model, wave(), wave()) == [reason, reason]


def test_dropout_is_noise() -> None:
    model = network(nn.Dropout(0.5))
    assert reasons(BlockHF(blocks.single(model)), model, wave(), wave()) == ["", ""]
    model.eval()
    assert reasons(BlockHF(blocks.single(model)), model, wave(), wave())[1]


def test_the_default_fits_a_small_set_to_many_digits() -> None:
    model, batch = network(), wave()
    optimizer = BlockHF(blocks.single(model))
    for _ in range(80):
        loss = optimizer.step(fit(model), batch)
    assert float(loss) < 1e-7
    assert optimizer.report is not None
    assert "Jacobian" in optimizer.report.blocks[0].products


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    models = [network(), network()]
    optimizers = [BlockHF(blocks.single(model)) for model in models]
    for _ in range(3):
        optimizers[0].step(fit(models[0]), wave())
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    losses = [
        [float(own.step(fit(model), wave())) for _ in range(3)]
        for own, model in zip(optimizers, models, strict=True)
    ]
    assert losses[0] == losses[1]


def test_a_copy_of_the_optimizer_keeps_the_choice() -> None:
    model = network()
    optimizer = BlockHF(blocks.single(model))
    reasons(optimizer, model, wave(), wave())
    twin_model, twin = copy.deepcopy((model, optimizer))
    assert type(twin.search) is type(optimizer.search)
    assert float(optimizer.step(fit(model), wave())) == float(twin.step(fit(twin_model), wave()))


def test_a_fingerprint_tells_batches_apart() -> None:
    x, y = torch.randn(6, 3), torch.arange(6)
    same = fingerprint((x, y))
    assert fingerprint((x.clone(), y)) == same
    assert fingerprint((x.flip(0), y.flip(0))) == same
    assert len({same, fingerprint((x.flip(0), y)), fingerprint((x, y + 1)), fingerprint((-x, y))}) == 4
    assert fingerprint((x, ["a"] * 6)) is None


def test_steps_that_change_nothing_are_called_a_stall() -> None:
    point = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)

    def objective() -> tuple[Tensor, Tensor]:
        residuals = torch.cat([point - 3, point + 1])  # the best is 1, and the loss there is not zero
        return residuals, residuals.square().sum() / 2

    optimizer = BlockHF([point])
    said = []
    for _ in range(12):
        optimizer.step(objective)
        assert optimizer.report is not None
        said.append("stalled: " in str(optimizer.report))
    assert said == [False] * 9 + [True] * 3
    with torch.no_grad():
        point += 1
    optimizer.step(objective)
    assert "stalled" not in str(optimizer.report)


def test_where_exact_solutions_are_dear_one_step_finds_out_and_the_batch_is_a_sample_again() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 60), nn.Tanh(), nn.Linear(60, 30))
    batch = torch.randn(300, 4), torch.randint(30, (300,))

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.cross_entropy(outputs, batch[1])

    optimizer = BlockHF(blocks.single(model))
    found = []
    while len(found) < 3 or not any(found[:-2]):
        optimizer.step(objective, batch)
        assert optimizer.report is not None
        found.append(bool(optimizer.report.complete))
        assert found[-1] == ("costs as much as" in str(optimizer.report.details()))
    assert found == [False] * (len(found) - 3) + [True, False, False]


def test_dear_exact_solutions_wait_until_steps_on_a_sample_lower_the_loss_but_slowly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blockhf.methods.DEAR", 0.0)
    model, batch = network(), wave()
    optimizer = BlockHF(blocks.single(model))
    losses = []
    while not losses or not optimizer.report.complete:
        losses.append(float(optimizer.step(fit(model), batch)))
        assert optimizer.report is not None
        assert len(losses) < 60
    sampled = losses[:-1]
    assert len(sampled) > 3
    assert sampled[-1] >= 0.8 * sampled[-4]
    assert reasons(optimizer, model, *[batch] * 3) == ["the batch is the same again"] * 3
