"""``BlockHF``: the only room that knows all the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from blockhf.batches import Share
from blockhf.blocks import Block
from blockhf.curvature import Auto, Curvature, Factored, GaussNewton, Products
from blockhf.hints import at_first_step
from blockhf.isolation import Restored
from blockhf.linalg import (
    Cholesky,
    CountedProducts,
    PendingSolution,
    Shifted,
    Solution,
    Solver,
    Status,
    System,
    settle,
)
from blockhf.meeting import Meeting
from blockhf.meshes import SolvedBlock
from blockhf.methods import NamedMethods
from blockhf.objective import Objective, Reduction, what_to_step
from blockhf.options import check_group
from blockhf.point import Linearizer, Point
from blockhf.points import learn
from blockhf.policies import (
    AdamWalk,
    ByCoefficient,
    Choice,
    Constant,
    DampingRule,
    NoiseScale,
    NoWalk,
    Sampling,
    Search,
    Subspace,
    Walk,
)
from blockhf.preconditioners import Kronecker, Preconditioner
from blockhf.report import Stopwatch
from blockhf.samples import Samples, look_at
from blockhf.update import Update


class BlockHF(NamedMethods):
    """Block-diagonal Hessian-free optimization.

    A parameter group is a block; ``blockhf.blocks`` makes groups from a model. For each block the local
    quadratic model of the loss is minimized by conjugate gradients, which multiply with the block's part
    of the curvature matrix and never form it. One group is ordinary Hessian-free optimization.

    The defaults are a method that needs no tuning (docs/method.md): a few preconditioned iterations, step
    lengths chosen on samples that were held out, damping that adapts, and a gradient from as many samples as
    the noise asks for. Pass as large a batch as you can. ``BlockHF.paper`` is the paper's method,
    ``BlockHF.martens`` that of Martens, and ``BlockHF.least_squares`` is for losses without noise.

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
        weight_decay: λ of the penalty λ‖w‖²/2, which enters gradient, matrix and search exactly
            (docs/howto/weight_decay.md). Give groups that shall have none, such as norms and biases, a 0.
        decoupled_weight_decay: Leave loss and curvature alone instead, and shrink the parameters by
            ``lr * weight_decay`` in each accepted step, as AdamW does.

        curvature_batch_size: How many samples of the gradient's, drawn at random, curvature is taken from; a
            share of them, as the nearest multiple of 600 (of 300, where no block has more than 1,000
            parameters); or ``None`` for all.
        micro_batch_size: How many samples are in memory at a time; the result is the same.
        population: How many samples there are in all, where batches are drawn from a finite set and its own
            loss is what counts: ``len(dataset)``. Matters once batches are a good part of it.
        reduction: Whether the objective's loss is the mean or the sum over its samples. Where it is a
            weighted mean (labels that are left out, weights of classes), and there are micro-batches or a
            mesh, a function from a batch to the sum of the weights: ``lambda batch: (batch[1] >= 0).sum()``.
        curvature: Which matrix: ``GaussNewton()``, ``Hessian()``, ``EmpiricalFisher()``, …
        products: How to multiply with it: ``Auto()``, ``Traced()``, ``Formed()``, ``DoubleBackward()``.
        search: How far to go: ``Subspace()``, ``Backtracking()``, ``FixedStep()``.
        solver: Solves the blocks' systems: ``Cholesky()``, ``ConjugateGradient()``, ``Precondition()``.
        preconditioner: Makes an approximate inverse of each block's matrix for CG: ``Kronecker()``,
            ``Diagonal()``, ``Identity()``.
        sampling: How many samples of the batch the gradient is taken from: ``NoiseScale()``,
            ``AllSamples()``.
        walk: How a run opens: ``AdamWalk()``, with small steps, or ``NoWalk()``, which is the default where
            damping, search, solver, sampling or the curvature's samples are chosen by hand.
        measure_memory: Whether the report has the peak memory by phase. The peak is that of the device,
            or on the CPU of the process, and is reset for the purpose, also for others who measure it.
        seed: Of the draws of held-out and curvature samples, which leave torch's own random numbers alone.
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

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1.0,
        damping: float | DampingRule | None = None,
        max_cg_steps: int = 4,
        cg_rtol: float = 1e-6,
        cg_progress: float = 0.0,
        warm_start: float = 0.0,
        slow_start: tuple[int, int] | None = None,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        curvature_batch_size: int | float | None = 0.03,
        micro_batch_size: int | None = None,
        population: int | None = None,
        reduction: Reduction = "mean",
        curvature: Curvature | None = None,
        products: Products | None = None,
        search: Search | None = None,
        solver: Solver | None = None,
        preconditioner: Preconditioner | None = None,
        sampling: Sampling | None = None,
        walk: Walk | None = None,
        measure_memory: bool = False,
        seed: int = 0,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if isinstance(damping, (int, float)):
            damping = Constant(float(damping))
        self.curvature: Curvature = curvature or GaussNewton()
        self.products: Products = products or Auto()
        self.damping: DampingRule = damping or ByCoefficient()
        self.search: Search = search or Subspace()
        self.solver: Solver = solver or Cholesky()
        self.preconditioner: Preconditioner = preconditioner or Kronecker()
        self.sampling: Sampling = sampling or NoiseScale()
        self.curvature_batch_size, self.micro_batch_size = curvature_batch_size, micro_batch_size
        self.population, self.measure_memory, self.seed = population, measure_memory, seed
        self.reduction: Reduction = reduction
        policies = {"products": products, "search": search, "solver": solver, "sampling": sampling}
        given = {name for name, own in {**policies, "damping": damping}.items() if own is not None}
        self.given = given if curvature_batch_size == 0.03 else given | {"curvature_batch_size"}
        self.walk: Walk = walk or (NoWalk() if self.given - {"products"} else AdamWalk())
        self.check()
        options = {
            "lr": lr,
            "damping": self.damping.initial,
            "max_cg_steps": max_cg_steps,
            "cg_rtol": cg_rtol,
            "cg_progress": cg_progress,
            "warm_start": warm_start,
            "slow_start": slow_start,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
        }
        super().__init__(params, options, mesh)

    @torch.enable_grad()
    def step(  # type: ignore[override]
        self,
        objective: Objective | None = None,
        batch: Any = None,
        curvature_batch: Any = None,
        *,
        closure: Objective | None = None,
    ) -> Tensor:
        """Make one update; ``report`` then says what it did.

        Args:
            objective: Returns outputs and loss for a batch, or without arguments if there is no batch. It
                does not call ``backward``.
            batch: The gradient batch: any nesting of tensors whose first dimension is that of the samples.
                Samples of several kinds go into a dict, each as long as it likes. A function ``points(n)``
                draws about ``n`` new samples for each step, where the loss is an integral.
            curvature_batch: The samples of the curvature, if they are not to be drawn from the batch.
            closure: Torch's name for an objective of no arguments. Beside an objective, which trainers pass
                on, it is their hooks: it is called once, and what it returns is ignored.

        Returns:
            The objective's loss at the starting point; the report's has the penalties of weight decay too.
        """
        objective, batch, curvature_batch = what_to_step(objective, batch, curvature_batch, closure)
        with self._transaction(self._blocks()) as before, contextlib.ExitStack() as stack:
            batch = self._drawn(objective, batch)
            met = self._prepare(objective, batch, curvature_batch, before, searches=True)
            if (loss := self._walk(met)) is not None:
                return loss
            update = self._begin(met)
            update.differentiate()
            if update.take_back(self.search, self.policy_state["search"]):
                self._judge_trial(met, update)
                return self._finish(update, accepted=False)
            self._find_directions(update, stack)
            if not update.failed:
                with update.watch.phase("search"):
                    update.choose(self.search, self.policy_state["search"])
            if update.choice is not None and update.choice.update is not None:
                before.protect(update.point.buffers)
                update.point.commit(update.decayed(update.choice.update))
                update.curvature.refresh_statistics()
            if not update.is_sound:
                before.put_back()
            self._judge_trial(met, update)
            return self._finish(update, accepted=not update.failed)

    @torch.enable_grad()
    def direction(self, objective: Objective, batch: Any = None, curvature_batch: Any = None) -> Tensor:
        """Write the negated directions into ``.grad`` and leave the parameters to another optimizer.

        Arguments and result are those of ``step``. No samples are held out. Where the directions cannot be
        had, because something is not finite, ``.grad`` becomes ``None``, and other optimizers skip the
        parameter.
        """
        with self._transaction(self._blocks()) as before:
            update = self._begin(self._prepare(objective, batch, curvature_batch, before, searches=False))
            update.differentiate()
            with contextlib.ExitStack() as stack:
                self._find_directions(update, stack)
            if accepted := not update.failed:
                before.protect(update.point.buffers)
                for block, proposal in zip(update.blocks, update.proposals, strict=True):
                    for param, change in zip(block.params, block.unflatten(proposal.direction), strict=True):
                        param.grad = change.neg()
                update.point.commit(None)
                update.choice = Choice(None, "directions written to .grad")
            else:
                self.zero_grad(set_to_none=True)
            return self._finish(update, accepted=accepted)

    def _find_directions(self, update: Update, stack: contextlib.ExitStack) -> None:
        """Steps 2 and 3 of the paper's Algorithm 1; the first is the gradient.

        The curvature stays in ``stack`` where the search multiplies with it.
        """
        self.mesh.check_alone(update.point.samples.structure)
        if update.failed:
            return

        # 2. The curvature on a part of it, ready for products.
        with update.watch.phase("curvature"):
            searches = self.search.uses_curvature and update.held_out is None
            point, mine = update.curvature, list(range(len(update.blocks)))
            together = self._solves_together(update, stack)
            if not together:
                point, mine = self.mesh.own_curvature(point, update.plan)
            if not searches and not (mine and point is update.curvature):
                update.curvature.samples.release()  # of a graph that the two could have shared
            systems = self._systems(update, point, mine, stack) if mine else []
            update.point.samples.structure.is_checked = True  # by those who have a block

        # 3. Conjugate gradients on each block.
        with update.watch.phase("solve"):
            pending = [
                self._begin_solution(system, update.blocks[index])
                for index, system in zip(mine, systems, strict=True)
            ]
            solved = dict(zip(mine, map(self._solved, systems, settle(pending)), strict=True))
            update.take(solved if together else self.mesh.exchange(update.blocks, solved))
            if not searches or point is not update.curvature:
                stack.close()

    def _solves_together(self, update: Update, stack: contextlib.ExitStack) -> bool:
        """Whether each process solves all blocks, from roots of which it has made some rows."""
        known, has_roots = self.policy_state["products"].shared, isinstance(self.products, Factored)
        if not update.plan.complete or not has_roots or "no_root" in known:
            return False
        stack.enter_context(update.curvature.linearize())
        if "no_root" in known:  # now it is known
            stack.close()
        return "no_root" not in known

    def _systems(
        self, update: Update, point: Point, mine: Sequence[int], stack: contextlib.ExitStack
    ) -> list[System]:
        """The linear systems of the blocks that are solved here, each with a preconditioner."""
        groups = [update.groups[index] for index in mine]
        limits = [self._max_steps(*pair) for pair in zip(groups, point.blocks, strict=True)]
        sizes = [block.size for block in point.blocks]
        budget = [self.solver.product_budget(*pair) for pair in zip(sizes, limits, strict=True)]
        operator = stack.enter_context(point.linearize(budget))
        if isinstance(operator, Shifted):  # by weight decay, which goes with the damping here
            operator = operator.operator
        relative = self.damping.is_relative
        update.check_first(operator, mine, relative=relative)
        operator = CountedProducts(operator)
        state, measured = self.policy_state["preconditioner"], (point.samples, self.curvature, operator)
        diagonals = self.preconditioner.mean_diagonals(*measured, state) if relative else None
        dampings = update.dampings(operator, mine, diagonals)
        dampings = [own + decay for own, decay in zip(dampings, point.decays, strict=True)]
        inverses = self.preconditioner.prepare(*measured, dampings, state)
        return [
            System(
                operator=operator,
                index=place,
                rhs=-update.gradient[index],
                damping=dampings[place],
                weight_decay=point.decays[place],
                penalty=point.penalty_gradient(place),
                start=self._start(groups[place], point.blocks[place]),
                preconditioner=inverses[place],
                rtol=groups[place]["cg_rtol"],
                progress=groups[place]["cg_progress"],
                max_steps=limits[place],
            )
            for place, index in enumerate(mine)
        ]

    def _begin_solution(self, system: System, block: Block) -> PendingSolution | Solution:
        if system.operator.has_influence(system.index) or system.weight_decay:
            return self.solver.begin(system, self.policy_state["solver"].of(block.name))
        return Solution(torch.zeros_like(system.rhs), Status.NO_INFLUENCE, 0, 0, 0.0, 0.0)

    def _solved(self, system: System, solution: Solution) -> SolvedBlock:
        """A solution with what it took."""
        operator = system.operator
        assert isinstance(operator, CountedProducts)
        num_products = operator.num_products[system.index]
        if (stored := operator.dense(system.index)) is not None:
            # A product each, or else a factorization.
            self.ledger.add("formed", 2 * num_products * stored.numel() or len(stored) ** 3 // 3)
        note = operator.note(system.index) or type(self.products).__name__
        return SolvedBlock(solution, num_products, note, system.damping - system.weight_decay)

    def _prepare(
        self, objective: Objective, batch: Any, curvature_batch: Any, before: Restored, *, searches: bool
    ) -> Meeting:
        """Find out how many samples there are, and of what kind."""
        for group in self.param_groups:
            check_group(group["name"], group)
        blocks = before.blocks
        structure, scope = self.structures.of(objective)
        self.ledger.begin(scope)
        met = self._meet(batch, curvature_batch)
        complete = self._adopt(batch, curvature_batch, structure, met) if searches else ""
        if searches and self.sampling.needs_signal and batch is not None:
            look_at(objective, batch, blocks, structure, self.ledger, sum(own[0] for own in met))
            self.ledger.enter(self.structures.of(objective)[1])  # now that its modules are known
        linearizer = Linearizer(self.curvature, self.products, self.policy_state["products"])
        groups = {group["name"]: group for group in self.param_groups}

        def make_point(
            own: Any,
            share: Share,
            origin: Sequence[Tensor] | None = None,
            joint: Sequence[Block] | None = None,
        ) -> Point:
            samples = Samples(
                objective,
                own,
                joint or blocks,
                share=share,
                micro_batch_size=self.micro_batch_size,
                reduction=self.reduction,
                ranks=self.mesh.everyone,
                ledger=self.ledger,
                structure=structure,
            )
            return Point(samples, linearizer, origin or before.origin, {} if joint else self._weight_decay())

        return Meeting(
            batch=batch,
            curvature_batch=curvature_batch,
            sizes=[own[0] for own in met],
            given=None if curvature_batch is None else [own[1] for own in met],
            complete=complete,
            searches=searches,
            structure=structure,
            make_point=make_point,
            groups=[groups[block.name] for block in blocks],
            before=before,
            watch=Stopwatch(blocks[0].params[0].device, memory=self.measure_memory),
        )

    def _begin(self, met: Meeting) -> Update:
        """Decide which samples are whose, and set up the points on them."""
        return Update.begin(
            self._plan(met),
            self.mesh.rank,
            met.batch,
            met.curvature_batch,
            met.make_point,
            groups=met.groups,
            population=self._known_population(sum(met.sizes)),
            watch=met.watch,
        )

    def _finish(self, update: Update, *, accepted: bool) -> Tensor:
        """Write state and report; a rejected step leaves all but the damping as it was."""
        if accepted:
            for group, block, solution in zip(update.groups, update.blocks, update.solutions, strict=True):
                for param, own in zip(block.params, block.unflatten(solution.x), strict=True):
                    state = self.state[param]
                    state["step"] = state.get("step", 0) + 1
                    if group["warm_start"] > 0 and self.mesh.owns(block.name):
                        state["direction"] = own.clone()
                    else:
                        state.pop("direction", None)
            if not self.search.evaluates:
                update.compare_with_last(self._memory)
        if accepted or (update.is_sound and self.sampling.needs_signal):  # each draws other samples
            count = "num_updates" if accepted else "num_rejected"
            self._memory[count] = self._memory.get(count, 0) + 1
        self._num_still = update.count_still(self._num_still)
        if update.is_sound:
            self._note_price(update)
        if update.is_sound and self._memory.get("is_drawn"):
            num_params = sum(block.size for block in update.blocks)
            learn(
                self._memory, update.value, None if update.choice is None else update.choice.loss, num_params
            )
        done = max(self._updates(param) for block in update.blocks for param in block.params)
        step = done if accepted else done + 1
        hints: Sequence[str] = ()
        if self.report is None:
            hints = at_first_step(update.groups, self.search, update.plan, self.population)
        self.report = update.report(step, accepted=accepted, traffic=self.mesh.traffic(), hints=hints)
        if update.is_sound:
            add_up = self.mesh.add_up if self.sampling.needs_signal else list
            self.sampling.update(update.cost(add_up), self.policy_state["sampling"].shared)
            outcomes = update.outcomes(accepted=accepted)
            for group, outcome in zip(update.groups, outcomes, strict=True):
                state = self.policy_state["damping"].of(group["name"])
                group["damping"] = self.damping.update(float(group["damping"]), outcome, state)
        return update.point.own_loss
