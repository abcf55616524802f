"""One random case: its matrices against dense ones, and its steps against what is promised of any step."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import blockhf
from blockhf import curvature as curvatures
from blockhf.curvature.jacobian import FormingError
from blockhf.fx_graphs import TracingError
from blockhf_lab.fuzz import policies
from blockhf_lab.fuzz.oracle import Dense, dense
from blockhf_lab.fuzz.problems import Problem, draw_problem
from blockhf_lab.fuzz.states import Snapshot, differs, holds_graph

CLEAR = (ValueError, TypeError, FormingError, TracingError)
"""Errors that a user can act upon, where they come with a sentence."""


class Broken(Exception):
    """A promise does not hold; the message says which."""


@dataclass
class Verdict:
    """What came of a case.

    Attributes:
        words: What it was made of.
        checks: What was checked.
        refusals: Clear errors.
        findings: What is wrong.
    """

    words: dict[str, str] = field(default_factory=dict)
    checks: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)

    def run(self, name: str, check: Callable[[], None]) -> bool:
        """Run a check; whether it came to its end."""
        try:
            check()
        except Broken as error:
            self.findings.append(f"{name}: {error}")
        except CLEAR as error:
            text = str(error)
            if len(text.split()) < 4:
                self.findings.append(f"{name}: unclear {type(error).__name__}: {text}")
            else:
                self.refusals.append(f"{name}: {type(error).__name__}: {text}")
        except Exception as error:
            self.findings.append(f"{name}: unclear {type(error).__name__}: {str(error)[:300]}")
        else:
            self.checks.append(name)
            return True
        return False


def tolerance(problem: Problem) -> float:
    """How far from a dense matrix a product may be, relative to the matrix."""
    return 1e-8 if problem.dtype == torch.float64 else 2e-4


def run_case(rng: Random) -> Verdict:
    """Draw a case and check it."""
    problem = draw_problem(rng)
    verdict = Verdict(dict(problem.words))
    if rng.random() < 0.5:
        verdict.run("matrix", lambda: check_matrix(rng, problem))
    elif rng.random() < 0.7:
        verdict.run("block step", lambda: check_step(rng, problem))
    factory, options = policies.draw_factory(rng), policies.draw_options(rng, problem)
    verdict.words |= policies.words(factory, options)
    verdict.run("promises", lambda: check_promises(rng, problem, factory, options))
    return verdict


# Against the dense matrix


def _names(problem: Problem, model: nn.Module) -> list[str]:
    """The parameters' names in the order of the blocks."""
    known = {id(param): name for name, param in model.named_parameters()}
    params = [own[1] if isinstance(own, tuple) else own for g in problem.groups(model) for own in g["params"]]
    return [known[id(param)] for param in params]


def _micro_batch(rng: Random, problem: Problem) -> int | None:
    return policies.draw_micro_batch(rng, problem) if problem.splits else None


def check_matrix(rng: Random, problem: Problem) -> None:
    """The matrix by some way to products is the dense one."""
    curvature = policies.draw_curvature(rng, problem, exact=True)
    products = policies.draw_products(rng, problem, curvature)
    micro, model = _micro_batch(rng, problem), problem.model
    seed = rng.getrandbits(40)
    torch.manual_seed(seed)
    kind = type(curvature).__name__
    expected = dense(problem, problem.in_double(), _names(problem, model), 0, kind)
    before = {name: own.clone() for name, own in model.state_dict().items()}
    torch.manual_seed(seed)
    start = torch.get_rng_state()
    batch = problem.batch(0) if problem.has_batch else None
    with curvatures.linearize(
        problem.objective(),
        batch,
        problem.groups(),
        curvature=curvature,
        products=products,
        reduction=problem.reduction,
        micro_batch_size=micro,
    ) as G:
        found = G.to_dense().double()
        blocks = [G.dense(name).double() for name in G.names]
    if differs(before, dict(model.state_dict())):
        raise Broken("linearize moved parameters or buffers")
    if differs(start, torch.get_rng_state()):
        raise Broken("linearize moved torch's random numbers")
    what = f"{kind} by {type(products).__name__}, micro-batches of {micro}"
    allowed = tolerance(problem)
    if problem.dtype == torch.float32 and _off(found, expected.matrix) > allowed * expected.scale:
        torch.manual_seed(seed)
        allowed = max(allowed, 2 * rounding(problem, expected, kind))
    _compare(what, found, expected.matrix, allowed, expected.scale)
    start_of = 0
    for name, own in zip(G.names, blocks, strict=True):
        part = expected.matrix[start_of : start_of + len(own), start_of : start_of + len(own)]
        _compare(f"{what}, block {name}", own, part, allowed, expected.scale)
        start_of += len(own)


def rounding(problem: Problem, expected: Dense, kind: str) -> float:
    """How far torch's own dense matrix in single precision is from the one in double precision.

    Second derivatives of LayerNorm over two entries, for one, lose more digits than others.
    """
    model = copy.deepcopy(problem.model)
    own = dense(problem, model, _names(problem, model), 0, kind)
    return _off(own.matrix.double(), expected.matrix) / expected.scale


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


def _compare(what: str, found: Tensor, expected: Tensor, rtol: float, scale: float) -> None:
    off = _off(found, expected)
    if not off <= rtol * scale + 1e-14:
        raise Broken(f"{what}: off by {off:.1e} where entries are up to {scale:.1e}")


def check_step(rng: Random, problem: Problem) -> None:
    """A step of the paper's method, CG to its end, is the dense solution of each block."""
    model, own_batch = problem.model, problem.has_batch and rng.random() < 0.3
    names = _names(problem, model)
    seed, lr, double = rng.getrandbits(40), rng.choice([0.1, 0.5, 1.0]), problem.dtype == torch.float64
    torch.manual_seed(seed)
    at = dense(problem, problem.in_double(), names, 0, "GaussNewton")
    torch.manual_seed(seed)
    other = dense(problem, problem.in_double(), names, 1 if own_batch else 0, "GaussNewton")
    least = 1e-4 if double else 1e-1
    damping = other.scale * rng.choice([least, 1.0]) + 1e-3
    groups = problem.groups()
    size = len(at.gradient)
    optimizer = blockhf.BlockHF.paper(
        groups,
        lr=lr,
        damping=damping,
        max_cg_steps=4 * size + 20,
        cg_rtol=1e-13 if double else 1e-6,
        warm_start=0.0,
        products=policies.draw_products(rng, problem, blockhf.GaussNewton()),
        solver=rng.choice([blockhf.ConjugateGradient(), blockhf.Cholesky()]),
        preconditioner=policies.draw_preconditioner(rng),
        micro_batch_size=_micro_batch(rng, problem),
        reduction=problem.reduction,
    )
    before = {name: own.detach().double().clone() for name, own in model.named_parameters()}
    torch.manual_seed(seed)
    batch = (problem.batch(0),) if problem.has_batch else ()
    further = {"curvature_batch": problem.batch(1)} if own_batch else {}
    loss = optimizer.step(problem.objective(), *batch, **further)
    if abs(float(loss) - float(at.loss)) > tolerance(problem) * (1 + abs(float(at.loss))):
        raise Broken(f"the loss is {float(loss)} and should be {float(at.loss)}")
    start, expected = 0, {}
    for group in optimizer.param_groups:
        number = sum(param.numel() for param in group["params"])
        part = slice(start, start + number)
        matrix = other.matrix[part, part] + damping * torch.eye(number, dtype=torch.float64)
        expected[group["name"]] = -lr * torch.linalg.solve(matrix, at.gradient[part])
        start += number
    whole = torch.cat(list(expected.values()))
    now = dict(model.named_parameters())
    moved = torch.cat([(now[name].detach().double() - before[name]).reshape(-1) for name in names])
    largest = max(float(whole.abs().max()), 1e-3 * max(float(own.abs().max()) for own in before.values()))
    _compare("the block step", moved, whole, 1e-6 if double else 5e-3, largest)


# Against the promises


@dataclass
class Run:
    """A model, its optimizer and its problem, step by step."""

    problem: Problem
    model: nn.Module
    optimizer: blockhf.BlockHF
    number: int = 0

    @classmethod
    def make(cls, problem: Problem, model: nn.Module, factory: str, options: dict[str, Any]) -> Run:
        return cls(problem, model, policies.make(problem, model, factory, options))

    def step(self, *, curvature_batch: bool = False, spoiled: bool = False) -> Tensor:
        problem, number = self.problem, self.number
        objective = problem.objective(self.model, number)
        self.number += 1
        if not problem.has_batch:
            return self.optimizer.step(objective)
        further = problem.batch(number + 1) if curvature_batch else None
        return self.optimizer.step(objective, problem.batch(number, spoiled=spoiled), further)

    def snapshot(self) -> Snapshot:
        return Snapshot.of(self.model, self.optimizer)


def check_promises(rng: Random, problem: Problem, factory: str, options: dict[str, Any]) -> None:
    """Some steps, and what is promised of each; then resumed and copied runs that go on alike."""
    untouched = copy.deepcopy(problem.model)
    run = Run.make(problem, problem.model, factory, options)
    torch.manual_seed(rng.getrandbits(40))
    own_curvature = problem.has_batch and rng.random() < 0.15
    for _ in range(rng.randint(1, 2)):
        checked_step(run, curvature_batch=own_curvature)
    if problem.has_batch and problem.tables[0].is_floating_point() and rng.random() < 0.3:
        checked_step(run, curvature_batch=own_curvature, spoiled=True)
    random = torch.get_rng_state()
    twin = resumed(run, untouched, factory, options) if rng.random() < 0.6 else copied(run)
    torch.set_rng_state(random)
    losses = [run.step(curvature_batch=own_curvature)]
    one = run.snapshot()
    torch.set_rng_state(random)
    losses.append(twin.step(curvature_batch=own_curvature))
    changed = one.changed(twin.snapshot(), "report")
    if changed or differs(*losses):
        raise Broken(f"a resumed or copied run goes on otherwise: {', '.join(changed) or 'loss'}")


def checked_step(run: Run, *, curvature_batch: bool, spoiled: bool = False) -> None:
    """A step, and what must hold after it."""
    before = run.snapshot()
    run.problem.kept.clear()
    run.step(curvature_batch=curvature_batch, spoiled=spoiled)
    after, report = run.snapshot(), run.optimizer.report
    if report is None or report.accepted not in (True, False) or not str(report):
        raise Broken("there is no report")
    if spoiled and report.accepted:
        raise Broken("a step from a loss that is no number was accepted")
    besides = ("parameters", "buffers", "random", "state", "report")
    if changed := before.changed(after, *besides):
        raise Broken(f"a step changed {', '.join(changed)}")
    if not report.accepted:
        if changed := before.changed(after, "random", "state", "report"):
            raise Broken(f"a rejected step changed {', '.join(changed)}")
        if differs(before.state["state"], after.state["state"]):
            raise Broken("a rejected step changed the state of parameters")
    if not all(bool(own.isfinite().all()) for own in after.parameters.values()):
        raise Broken("parameters are not finite")
    if holds_graph(after.state) or any(own.grad_fn is not None for own in run.model.buffers()):
        raise Broken("the state holds a graph")
    if any(reference() is not None for reference in run.problem.kept):
        gc.collect()
        if any(reference() is not None for reference in run.problem.kept):
            raise Broken("outputs, and their graph, outlive the step")


def resumed(run: Run, untouched: nn.Module, factory: str, options: dict[str, Any]) -> Run:
    """The same run from what was saved."""
    file = io.BytesIO()
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = Run.make(run.problem, untouched, factory, options)
    twin.model.load_state_dict(saved["model"])
    twin.optimizer.load_state_dict(saved["optimizer"])
    twin.number = run.number
    return twin


def copied(run: Run) -> Run:
    """A deep copy of model and optimizer together."""
    model, optimizer = copy.deepcopy((run.model, run.optimizer))
    return Run(run.problem, model, optimizer, run.number)
