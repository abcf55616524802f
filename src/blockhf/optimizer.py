"""``BlockHF``: the only room that knows all the others."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from blockhf.blocks import Block, check_block
from blockhf.curvature import Auto, Curvature, GaussNewton, Products
from blockhf.damping import ByCoefficient, Constant, DampingRule, LevenbergMarquardt, Outcome
from blockhf.distributed import Crew, Summed, share_out
from blockhf.flops import Meter
from blockhf.objective import Objective, Problem, Reduction, Share, batch_size, take
from blockhf.operators import BlockMatrix, Counted, Damped, DiagonalBlock
from blockhf.preconditioners import Identity, Kronecker, Preconditioner
from blockhf.report import BlockReport, StepReport, Stopwatch
from blockhf.sampling import AllSamples, NoiseScale, Sampling, Spent
from blockhf.search import Backtracking, Choice, FixedStep, Proposal, Search, Subspace
from blockhf.solvers import (
    BlockSolver,
    Cholesky,
    ConjugateGradient,
    GaussSeidel,
    Solution,
    Solved,
    Status,
    System,
    num_iterates,
    worth_of,
)

# The policies, and the method by which each is asked.
_POLICIES = {
    "curvature": "at",
    "products": "linearize",
    "damping": "update",
    "search": "choose",
    "solver": "solve",
    "preconditioner": "prepare",
    "sampling": "size",
}
_FEWEST_SAMPLES = 600
"""Neither gradient nor, where a share is asked for, curvature is taken from fewer, if there are as many."""

_SMALL_BLOCK = 1000
"""Where no block has more parameters, half as many samples are enough for curvature."""

_SETTINGS = ("curvature_batch_size", "micro_batch_size", "population", "reduction", "measure_memory")


def _plain() -> dict[str, Any]:
    """CG alone, on the whole batch."""
    return {
        "curvature_batch_size": None,
        "solver": ConjugateGradient(),
        "preconditioner": Identity(),
        "sampling": AllSamples(),
    }


class BlockHF(Optimizer):
    """Block-diagonal Hessian-free optimization.

    A parameter group is a block; ``blockhf.blocks`` makes groups from a model. For each block the local
    quadratic model of the loss is minimized by conjugate gradients, which multiply with the block's part
    of the curvature matrix and never form it. One group is ordinary Hessian-free optimization.

    The defaults are a method that needs no tuning (docs/method.md): a few preconditioned iterations, step
    lengths chosen on samples that were held out, damping that adapts, and a gradient from as many samples as
    the noise asks for. Pass as large a batch as you can. ``BlockHF.paper`` is the paper's method and
    ``BlockHF.martens`` that of Martens, both in this class.

    Every option of the first list is a group option: groups may set their own, and each is read afresh
    at each step, so schedulers and edits of ``param_groups`` take effect.

    Args:
        params: Groups, as from ``blocks.by_module(model)``, or parameters, which make one block.
        lr: Multiplies the block's direction before the search.
        damping: Added to the diagonal of the block's matrix: a number, or a rule that adapts it.
        max_cg_steps: The most CG iterations in a step.
        cg_rtol: CG stops where the residual has fallen to this share of the gradient.
        cg_progress: CG stops where the model no longer improves by this share per iteration
            (``solvers.conjugate_gradient`` has the rule); 0 switches it off.
        warm_start: CG starts from this multiple of the last solution; 0 starts from zero.
        slow_start: ``(num_updates, max_cg_steps)``: fewer CG iterations in the first updates.

        curvature_batch_size: How many samples of the gradient's, from their front, curvature is taken from; a
            share of them, as the nearest multiple of 600 (of 300, where no block has more than 1,000
            parameters); or ``None`` for all.
        micro_batch_size: How many samples are in memory at a time; the result is the same.
        population: How many samples there are in all, where batches are drawn from a finite set and its own
            loss is what counts: ``len(dataset)``. Matters once batches are a good part of it.
        reduction: Whether the objective's loss is the mean or the sum over its samples.
        curvature: Which matrix: ``GaussNewton()``, ``Hessian()``, ``EmpiricalFisher()``, …
        products: How to multiply with it: ``Auto()``, ``Traced()``, ``Formed()``, ``DoubleBackward()``.
        search: How far to go: ``Subspace()``, ``Backtracking()``, ``FixedStep()``, ``BestIterate()``.
        solver: Solves the blocks' systems: ``Cholesky()``, ``ConjugateGradient()``, ``GaussSeidel()``, …
        preconditioner: Makes an approximate inverse of each block's matrix for CG: ``Kronecker()``,
            ``Diagonal()``, ``Nystrom()``, ``Identity()``.
        sampling: How many samples of the batch the gradient is taken from: ``NoiseScale()``,
            ``AllSamples()``.
        measure_memory: Whether the report has the peak memory by phase. The peak is that of the device,
            or on the CPU of the process, and is reset for the purpose.
        mesh: Ranks that share the work (docs/scaling.md), from ``blockhf.mesh(block=…, data=…)``. Every rank
            makes the optimizer and all calls of it alike, with its own samples as the batch. Rank 0's
            parameters are copied to the others.

    Example:
        >>> from torch import nn
        >>> from blockhf import blocks
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Linear(3, 1)
        >>> inputs, targets = torch.randn(20, 3), torch.randn(20, 1)
        >>> def objective(batch):
        ...     outputs = model(batch[0])
        ...     return outputs, nn.functional.mse_loss(outputs, batch[1])
        >>> optimizer = BlockHF(blocks.single(model))
        >>> first = optimizer.step(objective, (inputs, targets))
        >>> optimizer.report.accepted, bool(optimizer.report.loss_after < first)
        (True, True)
    """

    report: StepReport | None
    """What the last step did."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1.0,
        damping: float | DampingRule | None = None,
        max_cg_steps: int = 5,
        cg_rtol: float = 1e-6,
        cg_progress: float = 0.0,
        warm_start: float = 0.0,
        slow_start: tuple[int, int] | None = None,
        curvature_batch_size: int | float | None = 0.03,
        micro_batch_size: int | None = None,
        population: int | None = None,
        reduction: Reduction = "mean",
        curvature: Curvature | None = None,
        products: Products | None = None,
        search: Search | None = None,
        solver: BlockSolver | None = None,
        preconditioner: Preconditioner | None = None,
        sampling: Sampling | None = None,
        measure_memory: bool = True,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.curvature: Curvature = curvature or GaussNewton()
        self.products: Products = products or Auto()
        self.damping: DampingRule = (
            ByCoefficient()
            if damping is None
            else Constant(float(damping))
            if isinstance(damping, (int, float))
            else damping
        )
        self.search: Search = search or Subspace()
        self.solver: BlockSolver = solver or Cholesky()
        self.preconditioner: Preconditioner = preconditioner or Kronecker()
        self.sampling: Sampling = sampling or NoiseScale()
        self.curvature_batch_size = curvature_batch_size
        self.micro_batch_size = micro_batch_size
        self.population = population
        self.reduction: Reduction = reduction
        self.measure_memory = measure_memory
        self.report = None
        self._meter = Meter()
        self._counts: Sequence[int] = ()  # how many of the curvature's samples each rank has
        self._check_settings()
        defaults = {
            "lr": lr,
            "damping": self.damping.initial,
            "max_cg_steps": max_cg_steps,
            "cg_rtol": cg_rtol,
            "cg_progress": cg_progress,
            "warm_start": warm_start,
            "slow_start": slow_start,
        }
        super().__init__(params, defaults)
        self._crew = None if mesh is None else self._join(Crew(mesh))

    @classmethod
    def paper(
        cls,
        params: Iterable[Any],
        *,
        lr: float = 0.1,
        damping: float = 0.0,
        max_cg_steps: int = 30,
        cg_rtol: float = 0.0,
        warm_start: float = 0.95,
        **options: Any,
    ) -> BlockHF:
        """Algorithm 1 of the paper to the letter.

        Plain CG on the Gauss-Newton matrix with constant damping, warm-started, and a fixed step.

        Args:
            params: As for ``BlockHF``.
            lr: The learning rate.
            damping: The constant damping.
            max_cg_steps: The most CG iterations.
            cg_rtol: The CG stop criterion.
            warm_start: The paper's "momentum".
            options: Further options of ``BlockHF``, e.g. ``curvature_batch_size`` and ``slow_start``.
        """
        return cls(
            params,
            lr=lr,
            damping=damping,
            max_cg_steps=max_cg_steps,
            cg_rtol=cg_rtol,
            cg_progress=0.0,
            warm_start=warm_start,
            **{"search": FixedStep(), **_plain(), **options},
        )

    @classmethod
    def martens(
        cls,
        params: Iterable[Any],
        *,
        damping: float | DampingRule | None = None,
        max_cg_steps: int = 50,
        cg_progress: float = 5e-4,
        warm_start: float = 0.95,
        **options: Any,
    ) -> BlockHF:
        """Hessian-free optimization as Martens (2010) has it, in blocks.

        Plain CG until it makes little progress, warm-started, with Levenberg-Marquardt damping and
        backtracking.

        Args:
            params: As for ``BlockHF``.
            damping: A number, or a rule that adapts it.
            max_cg_steps: The most CG iterations.
            cg_progress: His stopping rule's constant.
            warm_start: How much of the last solution CG starts from.
            options: Further options of ``BlockHF``.
        """
        return cls(
            params,
            damping=LevenbergMarquardt() if damping is None else damping,
            max_cg_steps=max_cg_steps,
            cg_progress=cg_progress,
            warm_start=warm_start,
            **{"search": Backtracking(), **_plain(), **options},
        )

    @torch.enable_grad()
    def step(self, objective: Objective, batch: Any = None, curvature: Any = None) -> Tensor:  # type: ignore[override]
        """Make one update; ``report`` then says what it did.

        Args:
            objective: Returns outputs and loss for a batch, or without arguments if there is no batch.
            batch: The gradient batch: any nesting of tensors whose first dimension is that of the samples.
            curvature: The curvature batch, if it is not to be the front of the gradient batch.

        Returns:
            The loss at the starting point.
        """
        with self._problem(objective, batch, curvature) as problem:
            watch = Stopwatch(problem.devices[0], memory=self.measure_memory)
            found = self._directions(problem, watch)
            if found.reason is not None:
                return self._reject(found, Choice(None, found.reason))

            with watch.phase("search"):
                choice = self.search.choose(problem, float(found.loss), found.proposals)
                if choice.update is None:
                    return self._reject(found, choice)
                problem.commit(choice.update)
            return self._accept(found, choice)

    @torch.enable_grad()
    def direction(self, objective: Objective, batch: Any = None, curvature: Any = None) -> Tensor:
        """Write the negated directions into ``.grad`` and leave the parameters to another optimizer.

        Arguments and result are those of ``step``. No samples are held out. Where the directions cannot be
        had, because something is not finite, ``.grad`` becomes ``None``, and other optimizers skip the
        parameter.
        """
        with self._problem(objective, batch, curvature, searches=False) as problem:
            watch = Stopwatch(problem.devices[0], memory=self.measure_memory)
            found = self._directions(problem, watch)
            if found.reason is not None:
                self.zero_grad(set_to_none=True)
                return self._reject(found, Choice(None, found.reason))
            for block, proposal in zip(problem.blocks, found.proposals, strict=True):
                for param, change in zip(block.params, block.unflatten(proposal.direction), strict=True):
                    param.grad = change.neg()
            problem.commit(None)
            return self._accept(found, Choice(None, "directions written to .grad"))

    def _directions(self, problem: Problem, watch: Stopwatch) -> _Found:
        """Steps 1 to 3 of the paper's Algorithm 1."""
        # 1. The gradient on the gradient batch.
        with watch.phase("gradient"):
            loss, gradient = problem.differentiate()
            found = _Found(problem, watch, loss, self._groups(problem.blocks))
            if not _finite(loss):
                return found.failed("the loss is not finite", sound=False)
            if not all(map(_finite, gradient)):
                return found.failed("the gradient is not finite", sound=False)

        # 2. The curvature on a part of it, ready for products.
        with watch.phase("curvature"):
            uses_curvature = getattr(self.search, "uses_curvature", False) and problem.held_out_batch is None
            own, mine = problem, list(range(len(problem.blocks)))
            if self._crew is not None:
                if not uses_curvature:
                    problem.release()  # of the gradient's graph, which curvature could have shared
                own, mine = self._crew.own(problem, self._counts)
            groups = [found.groups[index] for index in mine]
            max_steps = [self._max_steps(*pair) for pair in zip(groups, own.blocks, strict=True)]
            dampings = [float(group["damping"]) for group in groups]
            matrix, inverses = None, []
            if mine:
                sizes = [block.size for block in own.blocks]
                matrix = own.matrix(
                    [worth_of(self.solver, *pair) for pair in zip(sizes, max_steps, strict=True)]
                )
                inverses = list(self.preconditioner.prepare(own, matrix, dampings))

        # 3. Conjugate gradients on each block.
        with watch.phase("solve"):
            if matrix is not None:
                counters = [Counted(DiagonalBlock(matrix, place)) for place in range(len(mine))]
                systems = [
                    System(
                        index=place,
                        operator=Damped(counter, damping),
                        rhs=-gradient[index],
                        start=self._start(group, block),
                        preconditioner=inverse,
                        rtol=group["cg_rtol"],
                        progress=group["cg_progress"],
                        max_steps=limit,
                        record=self.search.record,
                    )
                    for place, (index, counter, damping, group, block, inverse, limit) in enumerate(
                        zip(mine, counters, dampings, groups, own.blocks, inverses, max_steps, strict=True)
                    )
                ]
                found.solved = dict(zip(mine, self._solve(systems, matrix, counters), strict=True))
                for place, formed in getattr(matrix, "dense", {}).items():
                    # A product each, or else a factorization.
                    flops = 2 * counters[place].num_products * formed.numel() or len(formed) ** 3 // 3
                    problem.meter.add("formed", flops)
            if self._crew is not None:
                most = [
                    num_iterates(self.search.record, self._max_steps(group, block))
                    for group, block in zip(found.groups, problem.blocks, strict=True)
                ]
                found.solved = self._crew.exchange(problem.blocks, found.solved, most)
            found.proposals = [
                Proposal(
                    slope,
                    solved.x,
                    solved.model,
                    float(group["damping"]),
                    float(group["lr"]),
                    solved.iterates,
                )
                for slope, solved, group in zip(gradient, found.solutions, found.groups, strict=True)
            ]
            if any(solution.status is Status.NON_FINITE for solution in found.solutions):
                return found.failed("the curvature is not finite")
            if all(proposal.norm == 0.0 for proposal in found.proposals) and any(
                solution.status is Status.NONPOSITIVE_CURVATURE for solution in found.solutions
            ):
                return found.failed("no block has a direction of positive curvature")
            if own is not problem:
                own.release()
            if not uses_curvature:
                problem.release()
        return found

    def _solve(
        self, systems: Sequence[System], matrix: BlockMatrix, counters: Sequence[Counted]
    ) -> list[Solved]:
        """All systems at once, or, where their times decide who solves which, one by one."""
        together = self._crew is None or not self._crew.has_rows
        found, times = [], []
        for some in [systems] if together else [[system] for system in systems]:
            start = time.perf_counter()
            found += self.solver.solve(some, matrix)
            times += [(time.perf_counter() - start) / len(some)] * len(some)
        notes = list(getattr(matrix, "notes", ())) or [type(self.products).__name__] * len(systems)
        return [
            Solved(solution, counter.num_products, note, seconds)
            for solution, counter, note, seconds in zip(found, counters, notes, times, strict=True)
        ]

    def _accept(self, found: _Found, choice: Choice) -> Tensor:
        for group, block, solution in zip(found.groups, found.problem.blocks, found.solutions, strict=True):
            for param, own in zip(block.params, block.unflatten(solution.x), strict=True):
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                if group["warm_start"] > 0 and self._owns(block.name):
                    state["direction"] = own.clone()
                else:
                    state.pop("direction", None)
        ratio = None
        if choice.loss is not None and choice.change < 0:
            before = float(found.loss) if choice.before is None else choice.before
            ratio = (choice.loss - before) / choice.change
        self.report = self._report(found, choice, accepted=True, ratio=ratio)
        outcomes = [Outcome(True, ratio)] * len(found.groups)
        if choice.lengths:  # a block without a direction has no part in the ratio either
            outcomes = [Outcome(True, None if own is None else ratio, own) for own in choice.lengths]
        self._adapt(found, choice, outcomes)
        return found.loss

    def _reject(self, found: _Found, choice: Choice) -> Tensor:
        """Leave parameters, buffers and state alone; more damping where damping can be to blame."""
        self.report = self._report(found, choice, accepted=False)
        if found.sound:
            self._adapt(found, choice, [Outcome(False) for _ in found.groups])
        return found.loss

    def _adapt(self, found: _Found, choice: Choice, outcomes: Sequence[Outcome]) -> None:
        together = self._crew is not None and getattr(self.sampling, "needs_signal", False)
        self.sampling.update(found.spent(choice, self._crew.add_up if self._crew and together else list))
        for group, outcome in zip(found.groups, outcomes, strict=True):
            group["damping"] = self.damping.update(float(group["damping"]), outcome)

    def _problem(self, objective: Objective, batch: Any, curvature: Any, *, searches: bool = True) -> Problem:
        for group in self.param_groups:
            _check_options(group["name"], group)
        blocks = self._blocks()
        if not blocks:
            raise ValueError("Every parameter is frozen. Thaw some with requires_grad_(True).")
        self._meter.totals.clear()
        if batch is None:
            if self._crew is not None:
                raise ValueError("On a mesh the samples are shared out: pass them to step() as the batch.")
            return self._make_problem(objective, None, blocks, curvature)
        sizes, given = self._sizes(blocks, batch, curvature)
        rank = 0 if self._crew is None else self._crew.rank

        # Of each rank's samples, the last are held out, and the first are the gradient's and the curvature's.
        num_available, num_held_out = sum(sizes), 0
        if self.population is not None and num_available > self.population:
            raise ValueError(
                f"population is {self.population}, but the batch alone has {num_available} samples."
            )
        if searches and hasattr(self.search, "num_held_out"):
            num_held_out = self.search.num_held_out(num_available, self.sampling.size(num_available))
        held_out = share_out(num_held_out, sizes)
        num_samples = num_available - num_held_out
        if num_held_out > 0 or not getattr(self.sampling, "needs_signal", False):
            num_samples = max(self.sampling.size(num_samples), min(_FEWEST_SAMPLES, num_samples))
        left = [size - number for size, number in zip(sizes, held_out, strict=True)]
        gradients = share_out(num_samples, left)
        curved = (
            given if curvature is not None else share_out(self._num_curvature_samples(num_samples), gradients)
        )
        own, self._counts = sizes[rank], curved
        shared: dict[str, Any] = {}
        seen = [0] * len(sizes)
        if self.population is not None and num_held_out > 0:
            seen = share_out(min(num_held_out, num_samples), gradients)
        if self._crew is not None:
            shared = {
                "share": Share.of(gradients, rank),
                "curvature_share": Share.of(curved, rank),
                "held_out_share": Share.of(held_out, rank),
                "seen_share": Share.of(seen, rank),
                "total": self._crew.team.sum,
            }
        # One sample, with no weight, stands in where there is none.
        end = max(gradients[rank], 1)
        return self._make_problem(
            objective,
            take(batch, 0, end) if gradients[rank] < own else batch,
            blocks,
            max(curved[rank], 1) if curvature is None else curvature,
            held_out_batch=take(batch, own - max(held_out[rank], 1), own) if num_held_out > 0 else None,
            seen_batch=take(batch, end - max(seen[rank], 1), end) if any(seen) else None,
            population=self.population,
            **shared,
        )

    def _blocks(self) -> list[Block]:
        blocks = []
        for group in self.param_groups:
            if trainable := tuple(param for param in group["params"] if param.requires_grad):
                blocks.append(Block(group["name"], trainable))
        return blocks

    def _make_problem(
        self, objective: Objective, batch: Any, blocks: Sequence[Block], curvature: Any, **rest: Any
    ) -> Problem:
        return Problem(
            objective,
            batch,
            blocks,
            curvature,
            self.micro_batch_size,
            self.reduction,
            linearize=self._linearize,
            meter=self._meter,
            **rest,
        )

    def _num_curvature_samples(self, num_samples: int) -> int:
        size = self.curvature_batch_size
        if isinstance(size, float):
            # In whole steps, as products are traced, and the trace checked, anew for each new size.
            largest = max(block.size for block in self._blocks())
            unit = _FEWEST_SAMPLES // 2 if largest <= _SMALL_BLOCK else _FEWEST_SAMPLES
            size = max(round(size * num_samples / unit), 1) * unit
        return min(num_samples if size is None else size, num_samples)

    def _linearize(self, problem: Problem, num_products: Sequence[int]) -> BlockMatrix:
        matrix = self.products.linearize(self.curvature, problem, num_products)
        return matrix if problem.total is None else Summed.over(problem.total, matrix, problem.blocks)

    def _groups(self, blocks: Sequence[Block]) -> list[dict[str, Any]]:
        groups = {group["name"]: group for group in self.param_groups}
        return [groups[block.name] for block in blocks]

    def _start(self, group: dict[str, Any], block: Block) -> Tensor | None:
        last = [self.state.get(param, {}).get("direction") for param in block.params]
        if group["warm_start"] == 0 or all(direction is None for direction in last):
            return None
        return block.flatten(last).mul_(group["warm_start"])

    def _max_steps(self, group: dict[str, Any], block: Block) -> int:
        if group["slow_start"] is not None:
            num_updates, max_cg_steps = group["slow_start"]
            if self._updates(block.params[0]) < num_updates:
                return int(min(max_cg_steps, group["max_cg_steps"]))
        return int(group["max_cg_steps"])

    # On a mesh

    def _join(self, crew: Crew) -> Crew:
        if crew.has_rows and isinstance(self.solver, GaussSeidel):
            raise ValueError(
                "GaussSeidel solves one block after the other. Use a mesh with block=1, or Cholesky()."
            )
        params = [param for group in self.param_groups for param in group["params"]]
        crew.join(self._description(), self._blocks(), params)
        return crew

    def _description(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        found: dict[str, Any] = {"the blocks": [group["name"] for group in self.param_groups]}
        for group in self.param_groups:
            kinds = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in group["params"]]
            found[f"the parameters of block {group['name']!r}"] = kinds
            found |= {f"{name} of block {group['name']!r}": group.get(name) for name in self.defaults}
        found |= {name: getattr(self, name) for name in _SETTINGS}
        found |= {name: _described(policy) for name, policy in self._policies()}
        return found

    def _sizes(self, blocks: Sequence[Block], batch: Any, curvature: Any) -> tuple[list[int], list[int]]:
        """How many samples, and curvature samples of their own, all ranks have."""
        own = [batch_size(batch), 0 if curvature is None else batch_size(curvature)]
        if self._crew is None:
            return [own[0]], [own[1]]
        met = self._crew.meet(own, (batch, curvature), self._description(), blocks, self._move)
        return [number for number, _ in met], [number for _, number in met]

    def _move(self, change_owners: Callable[[], None]) -> None:
        state, groups = self.state_dict(), self.param_groups
        change_owners()
        self.load_state_dict(state)
        self.param_groups = groups  # torch puts copies in place, and whoever holds a group would edit the old

    def _owns(self, name: str) -> bool:
        return self._crew is None or self._crew.owns(name)

    def _report(
        self, found: _Found, choice: Choice, *, accepted: bool, ratio: float | None = None
    ) -> StepReport:
        done = max(self._updates(param) for block in found.problem.blocks for param in block.params)
        meter = found.problem.meter
        return StepReport(
            step=done if accepted else done + 1,
            accepted=accepted,
            reason=choice.reason,
            loss=float(found.loss),
            loss_after=choice.loss,
            loss_before=choice.before,
            compared=choice.compared,
            signal=choice.signal,
            predicted=choice.change if accepted else None,
            ratio=ratio,
            blocks=self._block_reports(found, choice) if found.solutions else (),
            work={
                **dataclasses.asdict(found.problem.work),
                **({} if self._crew is None else self._crew.team.traffic.summary()),
                "flops": meter.total - meter.totals.get("checks", 0),
                **{f"{kind}_flops": flops for kind, flops in meter.totals.items()},
                "gradient_batch": found.problem.sum_over,
                "curvature_batch": found.problem.num_curvature_total,
            },
            phases=found.watch.phases,
            loads=self._crew.loads(found.problem.blocks, found.solved) if self._crew is not None else (),
        )

    def _block_reports(self, found: _Found, choice: Choice) -> list[BlockReport]:
        return [
            BlockReport(
                name=block.name,
                size=block.size,
                status=str(solved.solution.status),
                num_steps=solved.solution.num_steps,
                num_products=solved.num_products,
                residual=solved.solution.residual,
                decrease=-solved.solution.model,
                damping=proposal.damping,
                norm=proposal.norm,
                coefficient=share,
                products=solved.note,
            )
            for block, solved, proposal, share in zip(
                found.problem.blocks,
                found.solved.values(),
                found.proposals,
                found.shares(choice),
                strict=True,
            )
        ]

    def _updates(self, param: Tensor) -> int:
        return int(self.state[param]["step"]) if param in self.state else 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a block."""
        group = dict(param_group)
        if isinstance(group["params"], set):
            raise TypeError("A set of parameters has no order in which to save their state. Give a list.")
        group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        name = group["name"] = str(group.get("name", f"block{len(self.param_groups)}"))
        named = [
            item if isinstance(item, tuple) else (f"number {index}", item)
            for index, item in enumerate(group["params"])
        ]
        check_block(name, named)
        for other in self.param_groups:
            if other["name"] == name:
                raise ValueError(f"Two blocks have the name {name!r}. Rename one.")
            taken = set(other["params"])
            for label, param in named:
                if param in taken:
                    raise ValueError(
                        f"Parameter {label} is in two blocks, {other['name']!r} and {name!r}. "
                        "Leave it in one of them."
                    )
        _check_options(name, {**self.defaults, **group})
        super().add_param_group(group)

    def state_dict(self) -> dict[str, Any]:
        """As with any optimizer, and the state of those policies that have one under ``"policies"``.

        On a mesh all ranks have to call it; each gets the state of all blocks, which loads anywhere.
        """
        state = self.own_state()
        if self._crew is not None:
            state |= self._crew.gathered({name: state[name] for name in ("state", "policies")})
        return state

    def own_state(self) -> dict[str, Any]:
        """What this process keeps of ``state_dict()``; no other process is asked."""
        state = super().state_dict()
        state["policies"] = {
            name: policy.state_dict() for name, policy in self._policies() if hasattr(policy, "state_dict")
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, after which the next step is the one that the saved optimizer would have made."""
        # Torch's distributed checkpoints turn the parameters' numbers into words.
        by_number = {int(key): value for key, value in state_dict["state"].items()}
        super().load_state_dict({**state_dict, "state": by_number})
        saved = dict(state_dict.get("policies", {}))
        foreign = [group for group in self.param_groups if not self._owns(group["name"])]
        for group in foreign:
            for param in group["params"]:
                if param in self.state:
                    self.state[param].pop("direction", None)
        for name, policy in self._policies():
            if hasattr(policy, "load_state_dict") and name in saved:
                policy.load_state_dict(saved[name])
        if foreign and hasattr(self.preconditioner, "forget"):
            self.preconditioner.forget({group["name"] for group in foreign})

    def __getstate__(self) -> dict[str, Any]:
        if self._crew is not None:
            raise TypeError("An optimizer on a mesh cannot be copied. Copy its state_dict().")
        own = {name: getattr(self, name) for name in (*_POLICIES, *_SETTINGS, "report")}
        return {**super().__getstate__(), **own, "_meter": Meter(), "_crew": None, "_counts": ()}

    def _policies(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in _POLICIES]

    def _check_settings(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {self.reduction!r}, but must be 'mean' or 'sum'.")
        for name in ("curvature_batch_size", "micro_batch_size", "population"):
            value = getattr(self, name)
            share = name == "curvature_batch_size" and isinstance(value, float) and 0 < value <= 1
            if value is not None and not share and (not isinstance(value, int) or value < 1):
                shares = " a share between 0 and 1," if name == "curvature_batch_size" else ""
                raise ValueError(
                    f"{name} is {value!r}, but must be a whole number of at least 1,{shares} or None."
                )
        for name, policy in self._policies():
            if isinstance(policy, type):
                raise ValueError(
                    f"{name} is the class {policy.__name__}. Pass an object: {policy.__name__}()."
                )
            if policy is not None and not hasattr(policy, _POLICIES[name]):
                raise ValueError(f"{name} is {policy!r}, which has no method {_POLICIES[name]}().")
        if self.damping.needs_ratio and not self.search.evaluates:
            raise ValueError(
                f"{type(self.damping).__name__} needs the loss after each step, which "
                f"{type(self.search).__name__} does not evaluate. Use FixedStep(evaluates=True) or "
                "Backtracking(), or a constant damping."
            )


@dataclasses.dataclass
class _Found:
    """What a step knows before it decides how far to go."""

    problem: Problem
    watch: Stopwatch
    loss: Tensor
    groups: list[dict[str, Any]]
    solved: dict[int, Solved] = dataclasses.field(default_factory=dict)
    proposals: list[Proposal] = dataclasses.field(default_factory=list)
    reason: str | None = None
    sound: bool = True

    def failed(self, reason: str, *, sound: bool = True) -> _Found:
        """No directions; ``sound`` says whether at least loss and gradient were finite."""
        self.reason, self.sound = reason, sound
        return self

    @property
    def solutions(self) -> list[Solution]:
        return [solved.solution for solved in self.solved.values()]

    def spent(self, choice: Choice, add_up: Callable[[Sequence[float]], Sequence[float]]) -> Spent:
        """What the step used; ``add_up`` adds up numbers over all ranks."""
        problem, totals = self.problem, self.problem.meter.totals
        own = (totals.get("gradient", 0), problem.work.gradient_samples, totals.get("checks", 0))
        gradient, num_samples, checks, everything = add_up([*own, problem.meter.total])
        per_sample = gradient / max(num_samples, 1)
        rest = (everything - checks - problem.sum_over * per_sample) / per_sample if per_sample else 0.0
        return Spent(problem.sum_over, choice.signal, rest, problem.population or math.inf)

    def shares(self, choice: Choice) -> Sequence[float]:
        return choice.coefficients or [0.0] * len(self.groups)


def _described(policy: Any) -> str:
    """A policy's kind and settings, without what it has learned."""
    settings = {
        name: value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__
        for name, value in sorted(getattr(policy, "__dict__", {}).items())
        if not name.startswith("_")
    }
    return f"{type(policy).__name__}({', '.join(f'{name}={value}' for name, value in settings.items())})"


def _finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _check_options(block: str, options: dict[str, Any]) -> None:
    def demand(name: str, holds: Any, bound: str) -> None:
        value = options[name]
        try:
            fine = bool(holds(value))
        except (TypeError, ValueError, OverflowError):
            fine = False
        if not fine:
            raise ValueError(f"{name} of block {block!r} is {value!r}, but must be {bound}.")

    demand("lr", lambda lr: 0 <= float(lr) < math.inf, "a number of at least 0")
    demand("damping", lambda damping: 0 <= float(damping) < math.inf, "a number of at least 0")
    demand("max_cg_steps", lambda steps: steps >= 1 and steps == int(steps), "a whole number of at least 1")
    demand("cg_rtol", lambda rtol: 0 <= rtol < 1, "at least 0 and below 1")
    demand("cg_progress", lambda progress: 0 <= progress < 1, "at least 0 and below 1")
    demand("warm_start", lambda share: 0 <= share <= 1, "between 0 and 1")
    demand(
        "slow_start",
        lambda slow: (
            slow is None
            or (len(slow) == 2 and slow[0] >= 0 and slow[1] >= 1 and all(n == int(n) for n in slow))
        ),
        "None or a pair (num_updates, max_cg_steps) of whole numbers",
    )
