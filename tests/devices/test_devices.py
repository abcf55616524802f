"""Every policy runs on a device that is not the CPU, gives what it gives there, and rarely waits for it."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pretend
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import blockhf
from blockhf import BlockHF, NoWalk, Point, blocks
from blockhf.curvature.jacobian import FormingError
from blockhf.fx_graphs import TracingError


def categorical(logits: Tensor) -> torch.distributions.Distribution:
    return torch.distributions.Categorical(logits=logits, validate_args=False)


CHOICES: dict[str, Sequence[Any]] = {
    "curvature": [
        blockhf.GaussNewton(),
        blockhf.Hessian(),
        blockhf.EmpiricalFisher(),
        blockhf.MonteCarloFisher(categorical),
    ],
    "products": [
        blockhf.Auto(),
        blockhf.DoubleBackward(),
        blockhf.Traced(),
        blockhf.Formed(),
        blockhf.Factored(),
    ],
    "solver": [blockhf.Cholesky(), blockhf.ConjugateGradient(), blockhf.Precondition()],
    "preconditioner": [blockhf.Kronecker(), blockhf.Diagonal(), blockhf.Identity()],
    "search": [blockhf.Subspace(), blockhf.Backtracking(), blockhf.FixedStep(evaluates=True)],
    "micro_batch_size": [None, 30],
}


def pairwise() -> Iterator[dict[str, Any]]:
    """Settings among which every choice meets every other one."""
    names = list(CHOICES)
    missing = {
        ((one, i), (other, j))
        for one, other in itertools.combinations(names, 2)
        for i, j in itertools.product(range(len(CHOICES[one])), range(len(CHOICES[other])))
    }
    everything = list(itertools.product(*(range(len(CHOICES[name])) for name in names)))
    while missing:
        places = [list(zip(names, chosen, strict=True)) for chosen in everything]
        best = max(places, key=lambda own: sum(pair in missing for pair in itertools.combinations(own, 2)))
        missing -= set(itertools.combinations(best, 2))
        yield {name: CHOICES[name][place] for name, place in best}


def every() -> Iterator[dict[str, Any]]:
    for chosen in itertools.product(*CHOICES.values()):
        yield dict(zip(CHOICES, chosen, strict=True))


def label(settings: dict[str, Any]) -> str:
    return "-".join(
        str(own) if own is None or isinstance(own, int) else type(own).__name__ for own in settings.values()
    )


class Task:
    """A small classifier, on the CPU or on a device."""

    def __init__(self, device: Any = None, *, depth: int = 1, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Linear(4, 5)]
        for _ in range(depth):
            layers += [nn.Tanh(), nn.Linear(5, 5)]
        self.model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(5, 3)).to(dtype)
        self._device, self._dtype = device, dtype
        if device is not None:
            device.move(self.model)
        self.batch = self.draw()

    def draw(self, number: int = 160) -> Any:
        """A new batch."""
        batch = (torch.randn(number, 4, dtype=self._dtype), torch.randint(0, 3, (number,)))
        return batch if self._device is None else tuple(map(self._device.tensor, batch))

    def objective(self, batch: Any) -> tuple[Tensor, Tensor]:
        outputs = self.model(batch[0])
        return outputs, F.cross_entropy(outputs, batch[1])


def trained(settings: dict[str, Any], device: Any = None, dtype: torch.dtype = torch.float64) -> Any:
    """The parameters after two steps, or why there are none."""
    task = Task(device, dtype=dtype)
    optimizer = BlockHF(blocks.by_layer(task.model), max_cg_steps=12, **settings)
    try:
        for batch in (task.batch, task.draw()):
            optimizer.step(task.objective, batch)
    except (ValueError, FormingError, TracingError) as error:
        return str(error)
    params = list(task.model.parameters())
    return [param.detach() if device is None else device.home(param) for param in params]


def check(settings: dict[str, Any], device: Any) -> None:
    expected, found = trained(settings, dtype=device.dtype), trained(settings, device, device.dtype)
    if isinstance(expected, str):  # the two do not go together
        assert found == expected
        return
    assert isinstance(found, list), found
    tolerance = {"rtol": 0.0, "atol": 0.0} if device.is_exact else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("settings", [*pairwise()], ids=label)
def test_every_two_choices_give_on_a_device_what_they_give_on_the_cpu(
    settings: dict[str, Any], device: Any
) -> None:
    check(settings, device)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [*every()], ids=label)
def test_all_choices_give_on_a_device_what_they_give_on_the_cpu(
    settings: dict[str, Any], device: Any
) -> None:
    check(settings, device)


METHODS: dict[str, tuple[Callable[..., BlockHF], int]] = {
    "paper": (BlockHF.paper, 6),
    "default": (BlockHF, 10),
}


def waits_of_a_step(method: str, device: Any, *, depth: int, max_cg_steps: int) -> tuple[list[str], int]:
    """What the host waited for in the fourth step, and how many lengths of it were tried.

    The first ones check the objective.
    """
    task = Task(device, depth=depth)
    optimizer = METHODS[method][0](blocks.by_layer(task.model), max_cg_steps=max_cg_steps, walk=NoWalk())
    batches = [task.draw() for _ in range(4)]
    for batch in batches[:3]:
        optimizer.step(task.objective, batch)
    with device.counting() as found:
        optimizer.step(task.objective, batches[3])
    assert optimizer.report is not None
    assert len(optimizer.report.blocks) == depth + 2
    return found, optimizer.report.work["num_evaluations"]


@pytest.mark.filterwarnings("ignore:The loss is .* times that of the step before")
@pytest.mark.parametrize("depth", [0, 4])
@pytest.mark.parametrize("max_cg_steps", [5, 45])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_rarely_waits_for_the_device(method: str, depth: int, max_cg_steps: int, device: Any) -> None:
    found, num_tries = waits_of_a_step(method, device, depth=depth, max_cg_steps=max_cg_steps)
    assert 1 <= len(found) <= METHODS[method][1], found
    assert num_tries <= 4


@pytest.mark.parametrize("depth", [0, 4])
def test_a_stretch_of_small_steps_rarely_waits_for_the_device(depth: int, device: Any) -> None:
    """However many small steps it has: for the losses along it, and those of averages."""
    task = Task(device, depth=depth)
    optimizer = BlockHF(blocks.by_layer(task.model))
    batches, counts = [task.draw(400) for _ in range(6)], []
    for batch in batches:
        with device.counting() as found:
            optimizer.step(task.objective, batch)
        assert optimizer.report is not None
        counts.append((optimizer.report.work["small_steps"], len(found)))
    assert max(number for number, _ in counts) >= 5
    assert max(waits for _, waits in counts[1:]) <= 8, counts


@pytest.mark.parametrize("depth", [0, 4])
def test_however_often_a_step_is_shrunk_the_host_waits_but_once_more(
    depth: int, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_at, steps = Point.loss_at, itertools.count()

    def raised(point: Point, update: Sequence[Tensor]) -> Tensor:
        """As if each step of the fourth update made the loss worse."""
        return loss_at(point, update) + (1e6 if next(steps) >= before else 0.0)

    before = 3
    monkeypatch.setattr(Point, "loss_at", raised)
    found, num_tries = waits_of_a_step("default", device, depth=depth, max_cg_steps=5)
    assert num_tries == 4
    assert len(found) <= METHODS["default"][1], found


def waits_without_noise(device: Any, *, depth: int, **options: Any) -> tuple[list[str], int]:
    """What the host waited for in a step on samples that are all there are, and at how many points."""
    task = Task(device, depth=depth)
    optimizer = BlockHF(blocks.by_layer(task.model), population=160, **options)
    for _ in range(3):
        optimizer.step(task.objective, task.batch)
    with device.counting() as found:
        optimizer.step(task.objective, task.batch)
    assert optimizer.report is not None
    return found, optimizer.report.work["num_evaluations"]


def test_steps_without_noise_wait_as_often_for_one_block_as_for_many(device: Any) -> None:
    """For each length that is tried, once for each of what it takes, whatever the number of blocks."""
    (few, tries), (many, more_tries) = (waits_without_noise(device, depth=depth) for depth in (0, 4))
    assert any("geodesic" in wait for wait in few)
    assert len(few) <= 13, few
    assert max(collections.Counter(many).values()) <= max(more_tries, 2)
    assert len(set(many)) == len(set(few))
    assert (len(many) <= len(few)) or more_tries > tries


def test_what_the_pretended_device_refuses_and_counts(device: Any) -> None:
    if not device.is_exact:
        pytest.skip("it is a real one")
    here = device.tensor(torch.tensor([3.0, 4.0]))
    assert here.device == torch.zeros(1, device=pretend.NAME).device
    with pytest.raises(RuntimeError, match=r"a tensor of the CPU, .*, meets one of the device"):
        here + torch.ones(2)
    with pytest.raises(TypeError, match="that is on a device"):
        here.numpy()
    with device.counting() as found:
        assert float(here.norm()) == 5.0
        assert (here * 2).tolist() == [6.0, 8.0]
        assert here.cpu().device.type == "cpu"
        assert len(here.nonzero()) == 2
    assert len(found) == 4


def test_random_numbers_peaks_and_autocast_need_no_name_of_a_device(device: Any) -> None:
    """Dropout is replayed there as on the CPU, memory is asked for, and autocast can be on."""
    task = Task(device)
    task.model.insert(2, nn.Dropout(0.3))
    optimizer = BlockHF(blocks.by_layer(task.model), measure_memory=True)
    torch.manual_seed(1)
    losses = [float(optimizer.step(task.objective, task.batch)) for _ in range(3)]
    on_cpu = Task()
    on_cpu.model.insert(2, nn.Dropout(0.3))
    other = BlockHF(blocks.by_layer(on_cpu.model))
    torch.manual_seed(1)
    if device.is_exact:
        assert losses == [float(other.step(on_cpu.objective, on_cpu.batch)) for _ in range(3)]
    assert optimizer.report is not None
    assert optimizer.report.accepted
