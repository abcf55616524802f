"""Random settings of the optimizer."""

from __future__ import annotations

from random import Random
from typing import Any

import blockhf
from blockhf_lab.fuzz.problems import Problem

FACTORIES = {
    "default": blockhf.BlockHF,
    "paper": blockhf.BlockHF.paper,
    "martens": blockhf.BlockHF.martens,
}


def draw_curvature(rng: Random, problem: Problem, *, exact: bool = False) -> blockhf.Curvature:
    """A kind of matrix; where it is to be ``exact``, one that nothing is drawn for."""
    kinds: list[blockhf.Curvature] = [blockhf.GaussNewton()] * 4
    kinds += [blockhf.Hessian(), blockhf.EmpiricalFisher()]
    if problem.loss.distribution is not None and not exact:
        kinds.append(blockhf.MonteCarloFisher(problem.loss.distribution, rng.randint(1, 2)))
    return rng.choice(kinds)


def draw_products(rng: Random, problem: Problem, curvature: blockhf.Curvature) -> blockhf.Products:
    """A way to products, the slow ones more seldom."""
    budget = rng.choice([0, 2**20])
    kinds: list[blockhf.Products] = [blockhf.Auto(memory_budget=budget)] * 10
    kinds += [blockhf.DoubleBackward(memory_budget=budget)] * 8
    if (problem.forms and isinstance(curvature, blockhf.GaussNewton)) or rng.random() < 0.05:
        kinds += [blockhf.Formed()] * 8
    drawn = isinstance(curvature, blockhf.MonteCarloFisher)
    if (problem.has_batch and not drawn) or rng.random() < 0.05:
        kinds += [blockhf.Traced(memory_budget=budget)]
    return rng.choice(kinds)


def draw_search(rng: Random) -> blockhf.Search:
    return rng.choice(
        [
            blockhf.FixedStep(),
            blockhf.FixedStep(evaluates=True),
            blockhf.Backtracking(max_tries=rng.choice([1, 3, 8])),
            blockhf.Subspace(),
            blockhf.Subspace(momentum=False, held_out=rng.choice([0.0, 0.25, 0.5])),
        ]
    )


def draw_damping(rng: Random, search: blockhf.Search) -> Any:
    constant = rng.choice([0.0, 1e-6, 1e-2, 1.0])
    rules = [blockhf.LevenbergMarquardt(), blockhf.ByCoefficient(), blockhf.LevenbergMarquardt(initial=10.0)]
    if not search.evaluates and rng.random() < 0.95:
        return constant
    return rng.choice([constant, *rules])


def draw_preconditioner(rng: Random) -> blockhf.Preconditioner:
    return rng.choice(
        [
            blockhf.Identity(),
            blockhf.Diagonal(exponent=rng.choice([0.75, 1.0]), num_draws=rng.randint(1, 2)),
            blockhf.Kronecker(every=rng.randint(1, 3), max_size=rng.choice([1, 2, 8192])),
        ]
    )


def draw_micro_batch(rng: Random, problem: Problem) -> int | None:
    """A size that makes few parts, as each costs a pass of its own."""
    parts = rng.choice([1, 1, 1, 2, 3])
    size = -(-problem.num_samples // parts)
    lonely = problem.network.mixes and (problem.num_samples % size == 1 or size == 1)
    return None if parts == 1 or lonely else size


def draw_options(rng: Random, problem: Problem) -> dict[str, Any]:
    """Keyword arguments of a factory; nearly all of them fit together and fit the problem."""
    search, curvature = draw_search(rng), draw_curvature(rng, problem)
    preconditioner = draw_preconditioner(rng)
    solvers: list[blockhf.Solver] = [blockhf.ConjugateGradient(), blockhf.Cholesky()] * 2
    if not isinstance(preconditioner, blockhf.Identity):
        solvers.append(blockhf.Precondition())
    size, least = problem.num_samples, 2 if problem.network.mixes else 1
    options = {
        "curvature": curvature,
        "products": draw_products(rng, problem, curvature),
        "search": search,
        "damping": draw_damping(rng, search),
        "preconditioner": preconditioner,
        "solver": rng.choice(solvers),
        "sampling": rng.choice([blockhf.AllSamples(), blockhf.NoiseScale(start=0.5)]),
        "reduction": problem.reduction if rng.random() < 0.9 else "mean",
        "max_cg_steps": rng.choice([1, 3, 10]),
        "cg_rtol": rng.choice([0.0, 1e-6]),
        "cg_progress": rng.choice([0.0, 5e-4]),
        "warm_start": rng.choice([0.0, 0.5, 0.95]),
        "slow_start": rng.choice([None, None, (2, 1)]),
        "micro_batch_size": draw_micro_batch(rng, problem),
        "curvature_batch_size": rng.choice([None, None, 2, size, 0.03, 0.5, least]),
        "population": rng.choice([None, None, size, 10 * size]),
        "seed": rng.randint(0, 3),
    }
    if not problem.has_batch:
        options |= {"micro_batch_size": None, "population": None}
    return options


def draw_factory(rng: Random) -> str:
    return rng.choice(list(FACTORIES))


def make(problem: Problem, model: Any, factory: str, options: dict[str, Any]) -> blockhf.BlockHF:
    """The optimizer."""
    optimizer: blockhf.BlockHF = FACTORIES[factory](problem.groups(model), **options)  # type: ignore[operator]
    return optimizer


def words(factory: str, options: dict[str, Any]) -> dict[str, str]:
    """The settings, for the record."""
    names = ("curvature", "products", "solver", "preconditioner", "search", "sampling", "damping")
    chosen = {name: type(options[name]).__name__ for name in names}
    if isinstance(options["damping"], float):
        chosen["damping"] = "number"
    return {"factory": factory, **chosen}
