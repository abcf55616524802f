"""The tasks without noise: derivatives, solutions, losses, and the optimizers they are compared with."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from blockhf_lab import costs, physics, rivals, runs, tasks
from blockhf_lab.optimizers import Spec
from blockhf_lab.physics import allen_cahn, curve_fit, gallery, inverse, networks, poisson2d, problem
from command_line import run_main

EXACT = [name for name in physics.TASKS if name not in ("allen-cahn", "curve-fit", "multiscale")]


def parameter_count(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("features", [None, networks.periodic], ids=["plain", "periodic"])
def test_jets_are_the_derivatives_of_the_value(features: Callable[..., networks.Jet] | None) -> None:
    torch.manual_seed(0)
    net = networks.JetNetwork((2 if features is None else 3, 5, 4, 1), (1.0, 0.5), features)
    points = torch.rand(6, 2, dtype=torch.float64)
    jet = net(points)

    def value(point: Tensor) -> Tensor:
        return net.value(point[None])[0, 0]

    bent = vmap(jacrev(jacrev(value)))(points)
    torch.testing.assert_close(jet.value, net.value(points))
    torch.testing.assert_close(jet.slopes[:, :, 0].T, vmap(jacrev(value))(points))
    torch.testing.assert_close(jet.second[:, 0], bent[:, 0, 0] + 0.5 * bent[:, 1, 1])


class Solution(inverse.Pulse):
    """The exact solution in the place of a network."""

    def __init__(self, task: physics.PhysicsTask, coefficients: Tensor) -> None:
        super().__init__()
        self._solution, self.own = task.solution, coefficients
        self.physics.data = torch.tensor([inverse.SPEED, inverse.DIFFUSIVITY], dtype=torch.float64)

    def forward(self, points: Tensor) -> networks.Jet:
        def value(point: Tensor) -> Tensor:
            return self._solution(point[None])[0]

        bent = torch.diagonal(vmap(jacrev(jacrev(value)))(points), dim1=1, dim2=2) @ self.own
        slopes = vmap(jacrev(value))(points).T
        return networks.Jet(self._solution(points)[:, None], slopes[:, :, None], bent[:, None])


@pytest.mark.parametrize("name", EXACT)
def test_the_solution_has_no_residual(name: str) -> None:
    task = tasks.get(name)
    net = task.make_model()
    assert isinstance(task, physics.PhysicsTask)
    assert isinstance(net, networks.JetNetwork)
    train, _ = task.load(None)
    index = torch.arange(0, len(train), 37)  # some of each kind
    residual, loss = task.objective(Solution(task, net.coefficients))(train.take(index))
    assert len(residual) == len(index)
    assert float(loss.detach()) < 1e-16


def test_the_reference_of_allen_cahn_solves_its_equation() -> None:
    found = allen_cahn.reference()
    assert found.shape == (101, 512)
    waves = math.pi * torch.fft.fftfreq(512, 1 / 512, dtype=torch.float64)
    bent = torch.fft.ifft(-waves.square() * torch.fft.fft(found)).real[1:-1]
    slope, u = (found[2:] - found[:-2]) * 50, found[1:-1]
    off = slope - allen_cahn.DIFFUSIVITY * bent - 5 * u + 5 * u**3
    assert float(off.norm() / slope.norm()) < 3e-3  # of which the difference quotient is most
    points = torch.tensor([[-1.0, 0.0], [0.25, 0.0], [0.5, 0.0]], dtype=torch.float64)
    start = points[:, 0].square() * torch.cos(math.pi * points[:, 0])
    torch.testing.assert_close(allen_cahn.solution(points), start, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "num_params", "num_points"),
    [
        ("poisson2d", 1185, 1020),
        ("poisson5d", 10_065, 3500),
        ("heat", 1185, 1100),
        ("burgers", 921, 1360),
        ("allen-cahn", 2011, 1700),
        ("multiscale", 1761, 512),
        ("inverse", 1187, 1100),
        ("curve-fit", 9, 250),
    ],
)
def test_sizes(name: str, num_params: int, num_points: int) -> None:
    task = tasks.get(name)
    train, test = task.load(None)
    torch.manual_seed(0)
    model = task.make_model()
    assert (parameter_count(model), len(train)) == (num_params, num_points)
    assert all(param.dtype == torch.float64 for param in model.parameters())
    assert 0.05 < task.test_metrics(model, test)["error"] < 2
    assert task.train_metrics(model, train)["loss"] > 1e-3
    assert (task.metric, task.is_complete, task.threads) == ("error", True, 1)


def test_the_loss_is_the_weighted_sum_of_the_means_over_the_kinds() -> None:
    task = tasks.get("heat")
    torch.manual_seed(0)
    model = task.make_model()
    train, _ = task.load(None)
    assert isinstance(task, physics.PhysicsTask)
    inside, known = task.residuals(model, train.inputs, train.targets[:, 1])
    _, loss = task.objective(model)(train.take(slice(None)))
    expected = inside[:900].square().mean() / 2 + 10 * known[900:].square().mean() / 2
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    "spec", ["blockhf", "least-squares", "full-lbfgs", "ssbfgs", "kernel-gn", "adam-lbfgs"]
)
def test_optimizers_fit_the_curve(spec: str) -> None:
    task = tasks.get("curve-fit")
    torch.manual_seed(0)
    model = task.make_model()
    train, _ = task.load(None)
    method = Spec.parse(spec).start(task, model, costs.unit(task, model, train), population=len(train))
    before = task.train_metrics(model, train)["loss"]
    for _ in range(5):
        step = method.update(train.take(slice(None)), spent=0.9)
        assert step.ge > 0 or spec not in ("full-lbfgs", "ssbfgs")
    assert task.train_metrics(model, train)["loss"] < 0.5 * before
    assert step.loss >= task.train_metrics(model, train)["loss"]


def test_self_scaled_bfgs_keeps_the_secant_equation_and_minimizes_a_quadratic() -> None:
    torch.manual_seed(0)
    root = torch.randn(6, 6, dtype=torch.float64)
    matrix = root @ root.T + torch.eye(6, dtype=torch.float64)
    point = torch.randn(6, dtype=torch.float64, requires_grad=True)
    optimizer = rivals.SelfScaledBFGS([point])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = point @ matrix @ point / 2
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(30):
        before, slope = point.detach().clone(), matrix @ point.detach()
        optimizer.step(closure)
        step, change = point.detach() - before, matrix @ point.detach() - slope
        if step.norm() > 1e-6:
            torch.testing.assert_close(optimizer.memory["inverse"] @ change, step)
    assert float(closure().detach()) < 1e-20


def test_kernel_gauss_newton_takes_the_damped_step_of_a_linear_problem() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1, dtype=torch.float64)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def objective(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        off = model(batch[0])[:, 0] - batch[1]
        return off, off.square().mean() / 2

    flat = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    rows = torch.cat([x, torch.ones(8, 1, dtype=torch.float64)], dim=1)
    gradient = rows.T @ (rows @ flat - y) / 8
    expected = flat - torch.linalg.solve(rows.T @ rows / 8 + 0.01 * torch.eye(4).double(), gradient)
    optimizer = rivals.KernelGaussNewton(model.parameters(), damping=0.01)
    before = float(objective((x, y))[1].detach())
    assert optimizer.minimize(model, objective, (x, y)) == pytest.approx(before)
    found = torch.cat([model.weight.detach().flatten(), model.bias.detach()])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("spec", ["adam-lbfgs", "ssbfgs", "least-squares"])
def test_a_resumed_run_is_the_same(spec: str, tmp_path: Path) -> None:
    data = tasks.get("curve-fit").load(None)

    def losses(folder: str, *budgets: str) -> list[float]:
        for budget in budgets:
            config = runs.Config("curve-fit", "quick", spec, budget=budget)
            with runs.Run(config, tmp_path / folder, data, resume=True) as run:
                runs.train(run)
        return [record["loss"] for record in runs.read_records(tmp_path / folder)[1:]]

    if spec == "adam-lbfgs":  # which follows the share of the budget
        assert losses("whole", "9updates") == losses("again", "9updates")
    else:
        assert losses("whole", "9updates") == losses("parts", "4updates", "9updates")


def test_a_race_of_the_curve_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "220")
    names = [part for name in ("least squares", "L-BFGS") for part in ("--family", name)]
    code = run_main(
        monkeypatch,
        "race",
        "curve-fit",
        *names,
        "--seeds",
        "0",
        "--search",
        "3updates",
        "--budget",
        "12updates",
    )
    assert code == 0
    result = json.loads(Path("runs/race-curve-fit-quick/race.json").read_text())
    assert result["key"] == "test_error"
    assert result["ends"]["least squares"]["train_loss"] < 1e-6
    assert "error ≤ 0.01" in capsys.readouterr().out


def test_points_on_the_boundary_are_on_the_boundary() -> None:
    edge = poisson2d._points()[1].points
    assert bool(((edge == 0) | (edge == 1)).any(1).all())
    assert problem.sobol(64, (-1, 0), (1, 2)).aminmax().max <= 2
    assert float(curve_fit.solution(torch.zeros(1, 1).double())) == pytest.approx(10.5, abs=1e-6)


def test_the_gallery_draws_runs_and_fills_its_page(tmp_path: Path) -> None:
    for name, specs in (
        ("curve-fit", ("blockhf", "adam:lr=0.01", "adam:lr=0.001")),
        ("heat", ("adam",)),
    ):
        data = tasks.get(name).load(None)
        for text in specs:
            folder = tmp_path / "runs" / name / Spec.parse(text).folder / "seed-0"
            with runs.Run(runs.Config(name, "quick", text, budget="3updates"), folder, data) as run:
                runs.train(run)
    page = tmp_path / "page.md"
    marks = "".join(f"<!-- {name} --><!-- end -->\n" for name in ("table", "curve-fit", "heat"))
    page.write_text(marks)
    assert gallery.run(tmp_path / "runs", tmp_path / "records", page) == ["heat", "curve-fit"]
    text = page.read_text()
    assert "BlockHF has the lowest loss on 1 of 2 tasks; not run on `heat`." in text
    assert text.count("| Adam | 0 | 3 |") == 2  # of the curve fit the better setting alone
    for name in ("heat", "curve-fit"):
        assert (tmp_path / "images" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    before = text
    gallery.fill_page(tmp_path / "records", page)
    assert page.read_text() == before
    with pytest.raises(ValueError, match="has no folder of a task"):
        gallery.run(tmp_path / "records" / "heat", tmp_path, page)


def test_fresh_points_are_drawn_for_each_step() -> None:
    task = tasks.get("poisson5d")
    torch.manual_seed(0)
    model = networks.JetNetwork((5, 8, 1), (1.0,) * 5)
    train, _ = task.load(None)
    unit = costs.unit(task, model, train)
    method = Spec.parse("blockhf:points=fresh").start(task, model, unit, population=len(train))
    losses = [method.update(train.take(slice(None)), spent=0.0) for _ in range(6)]
    assert losses[-1].loss < 0.5 * losses[0].loss
    assert losses[0].report is not None
    assert losses[0].report.work["gradient_batch"] == 500
    with pytest.raises(ValueError, match="none can be drawn anew"):
        Spec.parse("blockhf:points=fresh").start(tasks.get("heat"), model, unit)
    with pytest.raises(ValueError, match="there is fresh alone"):
        Spec.parse("blockhf:points=new")
