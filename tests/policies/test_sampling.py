"""The size of the gradient's sample: arithmetic on numbers, and what the optimizer makes of it."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch

from blockhf import AllSamples, Backtracking, BlockHF, NoiseScale, NoWalk, blocks
from blockhf.policies import StepCost
from blockhf.policy import State
from optimizer_tasks import Task


def test_all_samples_are_all_there_are() -> None:
    sampling, state = AllSamples(), State()
    sampling.update(StepCost(10, 0.5, 100.0), state)
    assert sampling.size(17, state) == 17


@pytest.mark.parametrize(("available", "expected"), [(4096, 1024), (10, 2), (3, 1), (1, 1)])
def test_the_first_sample_is_the_share_to_start_with(available: int, expected: int) -> None:
    assert NoiseScale(start=0.25, least=0.05).size(available, {}) == expected


@pytest.mark.parametrize(
    ("signal", "rest", "expected"),
    [
        pytest.param(0.5, 1024.0, 1024, id="as much noise as signal, and as dear as the rest"),
        pytest.param(0.5, 1296.0, 1152, id="the root of scale times rest"),
        pytest.param(0.5, 1e6, 1536, id="not faster than change"),
        pytest.param(0.5, 1.0, 672, id="not slower than change, 683, which is made coarse"),
        pytest.param(-3.0, 1024.0, 1536, id="no signal at all"),
        pytest.param(5.0, 1024.0, 672, id="nothing but signal"),
        pytest.param(None, 1024.0, 1024, id="unknown"),
        pytest.param(math.nan, 1024.0, 1024, id="no number"),
        pytest.param(math.inf, 1024.0, 1024, id="infinite"),
    ],
)
def test_the_size_follows_the_noise_scale(signal: float | None, rest: float, expected: int) -> None:
    sampling, state = NoiseScale(start=0.25, least=0.05, change=1.5), State()
    sampling.update(StepCost(1024, signal, rest), state)
    assert sampling.size(4096, state) == expected


@pytest.mark.parametrize("number", [200, 600, 4000])
@pytest.mark.parametrize("scale", [5.0, 300.0, 20_000.0])
@pytest.mark.parametrize("fixed", [20.0, 5000.0])
def test_the_size_buys_the_most_progress_where_curvature_grows_with_it(
    number: int, scale: float, fixed: float
) -> None:
    """Against all sizes: curvature at ten gradients a sample, from at most 600 samples."""

    def price(size: float) -> float:
        return size + fixed + 10 * min(size, 600)

    sampling, state = NoiseScale(start=number, least=1, change=1e6), State()
    rest = price(number) - number
    cost = StepCost(number, number / (number + scale), rest, growing=rest - fixed, full=600)
    assert cost.price(number) == pytest.approx(price(number))
    signal = min(max(number / (number + scale), 0.02), 0.98)  # what is far from 1/2 is not believed
    noise = number * (1 - signal) / signal
    best = max(range(1, 60_000), key=lambda size: size / ((size + noise) * price(size)))
    sampling.update(cost, state)
    assert sampling.size(60_000, state) == pytest.approx(best, rel=0.04, abs=1)


def test_sizes_come_again() -> None:
    sampling, state = NoiseScale(start=0.05, least=0.01), State()
    sizes = {sampling.size(available, state) for available in range(12_000, 1_200_000, 120)}
    assert len(sizes) <= 7 * 17
    assert all(
        abs(sampling.size(available, state) / (0.05 * available) - 1) < 1 / 30
        for available in range(400, 9000)
    )


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        pytest.param(500.0, 832, id="816, the root of 500 times 1000 over 1 - 500 / 2000, and not 707"),
        pytest.param(1500.0, 1728, id="1732, the root of 1500 times 500 over 1 - 1500 / 2000, and not 870"),
        pytest.param(1990.0, 2000, id="all there are"),
    ],
)
def test_of_a_finite_set_more_are_taken_as_those_left_out_lean_the_other_way(
    scale: float, expected: int
) -> None:
    n, population = 1000, 2000
    signal = (1 - scale / population) / (1 + scale * (1 / n - 1 / population))
    sampling, state = NoiseScale(change=1000.0), State()
    rest = 1000.0 if scale < 1000 else 500.0
    sampling.update(StepCost(n, signal, rest, population), state)
    assert sampling.size(population, state) == expected


def test_the_signal_of_a_finite_set_is_what_drawing_from_one_gives() -> None:
    """Vectors whose mean has the length that makes the noise scale, halves of them drawn at random."""
    generator = torch.Generator().manual_seed(0)
    population, n, held_out, dimension = 200, 80, 40, 30
    vectors = torch.randn(population, dimension, generator=generator, dtype=torch.float64)
    vectors -= vectors.mean(0)
    vectors += 0.4 * torch.eye(dimension, dtype=torch.float64)[0]
    scale = float(vectors.var(0).sum()) / 0.16
    assert scale > 0.8 * population
    orders = torch.rand(20_000, population, generator=generator).argsort(1)
    mean = (orders < n).double() @ vectors / n
    other = (orders >= population - held_out).double() @ vectors / held_out
    own_slope, left_slope = (mean * mean).sum(1), (mean * other).sum(1)
    expected = (1 - scale / population) / (1 + scale * (1 / n - 1 / population))
    deviation = float(left_slope.std()) / math.sqrt(len(left_slope)) / float(own_slope.mean())
    assert float(left_slope.mean() / own_slope.mean()) == pytest.approx(expected, abs=4 * deviation)
    assert deviation < 0.01


def test_the_noise_scale_is_a_geometric_mean_with_a_memory() -> None:
    sampling, state = NoiseScale(memory=0.5, change=100.0, least=0.05), State()
    sampling.update(StepCost(100, 0.5, 100.0), state)
    sampling.update(StepCost(100, 0.2, 100.0), state)  # noise scales of 100 and of 400
    assert sampling.size(10_000, state) == 500  # the least share
    assert sampling.size(1000, state) == 144  # near the root of 200 times 100


def test_the_size_is_between_the_least_share_and_all() -> None:
    sampling, state = NoiseScale(start=0.25, least=0.1), State()
    sampling.update(StepCost(1000, 0.5, 1000.0), state)
    assert sampling.size(100, state) == 100
    assert sampling.size(100_000, state) == 10_000


def test_a_saved_state_goes_on_alike() -> None:
    sampling, one = NoiseScale(), State()
    sampling.update(StepCost(1000, 0.3, 500.0), one)
    other = json.loads(json.dumps(one))
    for state in (one, other):
        sampling.update(StepCost(900, 0.6, 800.0), state)
    assert sampling.size(4000, one) == sampling.size(4000, other)
    assert one == other


def test_a_sampling_learns_nothing_but_what_is_in_the_state() -> None:
    sampling, learned = NoiseScale(), State()
    sampling.update(StepCost(1000, 0.3, 500.0), learned)
    assert learned
    assert sampling.size(4000, {}) == NoiseScale().size(4000, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": -1}, "start is -1, but must be a positive number, or below 1 a share of the batch."),
        (
            {"start": math.inf},
            "start is inf, but must be a positive number, or below 1 a share of the batch.",
        ),
        ({"least": 0.0}, "least is 0.0, but must be a positive number, or below 1 a share of the batch."),
        ({"change": 1.0}, "change is 1.0, but must be above 1."),
        ({"memory": 1.0}, "memory is 1.0, but must be at least 0 and below 1."),
        ({"memory": -0.1}, "memory is -0.1, but must be at least 0 and below 1."),
    ],
)
def test_an_invalid_sampling_is_refused_with_value_and_bound(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        NoiseScale(**options)


def gradient_batches(optimizer: BlockHF, task: Task, method: str = "step") -> list[int]:
    sizes = []
    for _ in range(2):
        getattr(optimizer, method)(task.objective, task.batch)
        assert optimizer.report is not None
        sizes.append(optimizer.report.work["gradient_batch"])
    return sizes


def test_where_too_few_samples_are_there_to_hold_some_out_the_gradient_takes_them_all() -> None:
    task = Task(num_samples=100)
    assert gradient_batches(BlockHF(blocks.by_layer(task.model)), task) == [100, 100]


def test_with_a_search_that_holds_nothing_out_the_gradient_takes_all() -> None:
    task = Task(num_samples=200)
    optimizer = BlockHF(blocks.by_layer(task.model), search=Backtracking())
    assert gradient_batches(optimizer, task) == [200, 200]


def test_directions_come_from_the_whole_batch_and_leave_the_damping_alone() -> None:
    task = Task(num_samples=200)
    optimizer = BlockHF(blocks.by_layer(task.model))
    before = [group["damping"] for group in optimizer.param_groups]
    assert gradient_batches(optimizer, task, "direction") == [200, 200]
    assert [group["damping"] for group in optimizer.param_groups] == before


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [
        pytest.param(300, 225, id="all that is not held out"),
        pytest.param(1200, 256, id="few"),
        pytest.param(20_992, 256, id="as many as in any larger batch"),
    ],
)
def test_the_first_gradient_takes_few_of_what_is_not_held_out(num_samples: int, expected: int) -> None:
    task = Task(num_samples=num_samples)
    optimizer = BlockHF(blocks.by_layer(task.model), walk=NoWalk())
    assert gradient_batches(optimizer, task)[0] == expected


@pytest.mark.parametrize("walk", [None, NoWalk()])
def test_a_population_that_is_smaller_than_the_batch_is_refused(walk: NoWalk | None) -> None:
    task = Task(num_samples=300)
    optimizer = BlockHF(blocks.by_layer(task.model), population=150, walk=walk)
    with pytest.raises(ValueError, match=r"^population is 150, but the batch alone has 300 samples\."):
        optimizer.step(task.objective, task.batch)


@pytest.mark.parametrize("value", [0, -3, 2.5, "many"])
def test_a_population_that_is_no_number_of_samples_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^population is .*, but must be a whole number of at least 1, or"):
        BlockHF(blocks.by_layer(Task().model), population=value)  # type: ignore[arg-type]


def test_a_finite_set_is_fitted_further_where_its_size_is_known() -> None:
    """As many weights as half the samples: what is held out leans against what is seen."""

    def fit(population: int | None) -> float:
        torch.manual_seed(0)
        inputs, targets = torch.randn(800, 300).double(), torch.randn(800, 1).double()
        model = torch.nn.Linear(300, 1).double()

        def objective(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            outputs = model(batch[0])
            return outputs, torch.nn.functional.mse_loss(outputs, batch[1])

        optimizer = BlockHF(blocks.single(model), population=population)
        for _ in range(15):
            order = torch.randperm(800)
            optimizer.step(objective, (inputs[order], targets[order]))
        return float(objective((inputs, targets))[1].detach())

    least = 1 - 300 / 800  # about what remains of targets that are noise
    without, known = fit(None), fit(800)
    assert known < 1.1 * least
    assert known - least < 0.5 * (without - least)
