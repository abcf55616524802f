"""Methods by their names: settings of ``BlockHF`` that belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from blockhf.batches import (
    batch_size,
    check_curvature_batch,
    check_kinds,
    joint_fingerprint,
    lengths,
    marks,
    proportions,
)
from blockhf.curvature import Auto, Curvature, Factored, GaussNewton
from blockhf.curvature.factored import price
from blockhf.ledger import GRADIENT, PRODUCT
from blockhf.linalg import Cholesky, ConjugateGradient
from blockhf.meeting import Meeting
from blockhf.objective import check_objective
from blockhf.opening import Opening
from blockhf.plan import (
    FEW_SAMPLES,
    WITHOUT_BATCH,
    Batch,
    Plan,
    Sizes,
    choose_sizes,
    draw_plan,
    why_complete,
)
from blockhf.points import draw
from blockhf.policies import (
    AdamWalk,
    AllSamples,
    Backtracking,
    DampingRule,
    FixedStep,
    Geodesic,
    LevenbergMarquardt,
    NoWalk,
    RelativeDamping,
    Search,
    Stretch,
)
from blockhf.policies.walk import SMALL_STEP
from blockhf.policy import PolicyState
from blockhf.preconditioners import Identity
from blockhf.samples import Structure
from blockhf.update import Update
from blockhf.walking import Walked

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on


def _plain() -> dict[str, Any]:
    """CG alone, on the whole batch."""
    return {
        "curvature_batch_size": None,
        "solver": ConjugateGradient(),
        "preconditioner": Identity(),
        "sampling": AllSamples(),
        "walk": NoWalk(),
    }


DEAR = 300.0
"""Products that exact solutions may cost at once where a batch comes again."""

SET_UP = 100 * SMALL_STEP
"""What the first exact solution takes to be traced and checked, in counted operations: as long as a hundred
small steps of a small network."""

WINDOW = 3
"""A batch whose exact solutions are dear is a sample while the loss falls by a fifth in so many steps."""

_LEAST_SQUARES = {"curvature_batch_size", "products", "solver", "search", "sampling", "damping"}


def without_noise() -> dict[str, Any]:
    """For a batch that is all there is: all samples everywhere, exact solutions where they can be had."""
    return {
        "curvature_batch_size": None,
        "products": Factored(other=Auto(), warns=False, worth=2500),
        "solver": Cholesky(),
        "search": Geodesic(),
        "sampling": AllSamples(),
        "damping": RelativeDamping(),
    }


class NamedMethods(Opening):
    """The methods that ``BlockHF`` has by name. All take the options of ``BlockHF``.

    Attributes:
        given: Settings that the user has chosen, which hold whatever the batch is like.
    """

    given: set[str]
    search: Search
    curvature: Curvature
    curvature_batch_size: int | float | None
    population: int | None
    micro_batch_size: int | None
    _num_still: int = 0
    _replaced: dict[str, Any] | None = None
    """What a batch without noise has put aside."""

    def _drawn(self, objective: Any, batch: Any) -> Any:
        """The batch, or new points where a function that draws them is given."""
        check_objective(objective)
        is_drawn = callable(batch)
        if is_drawn or "is_drawn" in self._memory:
            self._memory["is_drawn"] = is_drawn
        if is_drawn and not self.mesh.is_alone:
            raise ValueError("On a mesh points cannot be drawn by a function. Draw them, and pass a batch.")
        return draw(batch, self._memory) if is_drawn else batch

    def _meet(self, batch: Any, curvature_batch: Any) -> list[list[int]]:
        """Of each process how many samples it has, how many for curvature, and what to know them by again."""
        check_curvature_batch(batch, curvature_batch)
        check_kinds(batch, self.micro_batch_size)
        numbers = [0 if given is None else batch_size(given) for given in (batch, curvature_batch)]
        if batch is not None and self.population is None and self._looks_for_sets():
            is_over = self._memory.get("differs") or self._memory.get("is_drawn")
            numbers += [] if is_over else marks(batch, FEW_SAMPLES)

        def describe() -> dict[str, Any]:
            return {**self._description(), "the proportions of the kinds of samples": proportions(batch)}

        return self.mesh.meet(numbers, (batch, curvature_batch), describe)

    def _adopt(
        self, batch: Any, curvature_batch: Any, structure: Structure, met: Sequence[Sequence[int]]
    ) -> str:
        """Take the policies for a batch that is all there is, or for a sample; why it is all, if it is."""
        memory, again = self._memory, False
        num_samples = None if batch is None else sum(own[0] for own in met)
        is_drawn = memory.get("is_drawn", False)
        if len(met[0]) > 2:
            number = joint_fingerprint([own[2:] for own in met])
            again = number is not None and number == memory.get("fingerprint")
            memory.update(differs="fingerprint" in memory and not again, fingerprint=number, again=again)
            again = again and not self._falls_fast(sum(own[0] for own in met))
        reason = why_complete(
            Batch(
                num_samples,
                self.population,
                takes_all=self.given == {"sampling"} and isinstance(self.sampling, AllSamples),
                looks_for_noise="sampling" in self.given and self.sampling.needs_signal,
                is_random=structure.is_random,
                again=again,
                is_drawn=is_drawn,
            )
        )
        if curvature_batch is not None or not self._can_be_exact():
            reason = ""
        if bool(reason) != (self._replaced is not None):
            own = {name: policy for name, policy in without_noise().items() if name not in self.given}
            before = {name: vars(self)[name] for name in own}
            vars(self).update(own if reason else self._replaced or {})
            self._replaced = before if reason else None
        if bool(reason) != memory.get("is_complete", False):
            memory["is_complete"] = bool(reason)
            self._renew(is_first="num_updates" not in memory)
        return "all samples are asked for" if self.given >= _LEAST_SQUARES else reason

    def _falls_fast(self, total: int) -> bool:
        """Whether exact solutions are dear, and cheaper steps still lower the loss a good deal."""
        memory = self._memory
        last = memory.get("last_losses", ())
        if "num_walks" in memory and not self._walk_rests():
            return not self._has_walked_enough(total)
        if "price" not in memory and "num_walks" in memory:
            return True  # a step will tell
        if memory.get("is_complete") or memory.get("price", 0.0) <= DEAR:
            return False
        return len(last) <= WINDOW or last[-1] < 0.8 * last[-1 - WINDOW]

    def _has_walked_enough(self, total: int) -> bool:
        """Whether exact solutions are cheap, and the walk has cost as much as the first of them will.

        So what both cost together is at most twice what the better one alone would have.
        """
        if total > FEW_SAMPLES or "price" not in self._memory or not self._can_be_exact():
            return False
        walked = self.policy_state["walk"].shared.get("total", 0.0)
        return bool(self._memory["price"] <= DEAR and walked >= self._memory["exact_cost"])

    def _note_stretch(self, policy: AdamWalk, stretch: Stretch, met: Meeting, walked: Walked) -> None:
        """Tell the policy what a stretch has gained, and take down what exact solutions would cost."""
        super()._note_stretch(policy, stretch, met, walked)
        total, sizes = sum(met.sizes), [block.size for block in met.before.blocks]
        if total > FEW_SAMPLES or lengths(met.batch):
            return
        own = (met.structure.forward_flops or 0.0, float(met.structure.num_outputs), 1.0)
        forward, num_outputs, number = self.mesh.add_up(list(own))
        gradient = self._note_exact(total, num_outputs / number, GRADIENT * forward / number, sizes)
        self._memory["exact_cost"] = self._memory["price"] * PRODUCT * gradient + SET_UP

    def _note_exact(self, total: int, num_outputs: float, gradient: float, sizes: Sequence[int]) -> float:
        """Take down how many products exact solutions cost; the result is the cost of a gradient.

        Args:
            total: Samples.
            num_outputs: Outputs of a sample.
            gradient: Counted operations of its gradient; some operations of small models are not counted.
            sizes: Parameters of the blocks.
        """
        gradient = total * max(gradient, 6.0 * sum(sizes))
        self._memory["price"] = price(int(total * num_outputs), sizes, gradient)
        return gradient

    def _note_price(self, update: Update) -> None:
        """Take down the loss, and what exact solutions would cost, while it is open which way is better."""
        memory, ledger = self._memory, update.point.samples.ledger
        total = sum(update.plan.gradient.sizes)
        is_settled = memory.get("differs", True) or memory.get("is_complete") or total > FEW_SAMPLES
        if is_settled or not self._can_be_exact():
            return
        own = (ledger.totals.get("gradient", 0), ledger.work.gradient_samples)
        gradient, number = self.mesh.add_up([float(each) for each in own])
        num_outputs = float(update.point.samples.structure.num_outputs)
        sizes = [block.size for block in update.blocks]
        self._note_exact(total, num_outputs, gradient / max(number, 1.0), sizes)
        memory["last_losses"] = [*memory.get("last_losses", ()), update.value][-1 - WINDOW :]

    def _looks_for_sets(self) -> bool:
        """Whether it matters that a batch comes again: it is all there is, and its own loss counts."""
        return self._can_be_exact() or (isinstance(self.walk, AdamWalk) and self.sampling.needs_signal)

    def _known_population(self, num_samples: int) -> int | None:
        """How many samples there are in all: as the user says, or as many as come again and again."""
        comes_again = self._memory.get("again", False) and not self._memory.get("is_complete", False)
        return num_samples if self.population is None and comes_again else self.population

    def _can_be_exact(self) -> bool:
        """Whether neither choices of the user nor numbers nor earlier steps speak against it."""
        free = not {"solver", "products", "search", "damping"} & self.given
        free = free and "no_root" not in self.policy_state["products"].shared
        free = free and not ("sampling" in self.given and self.sampling.needs_signal)
        params = [param for group in self.param_groups for param in group["params"]]
        usual = all(param.dtype in (torch.float32, torch.float64) for param in params)
        return free and usual and isinstance(self.curvature, GaussNewton)

    def _renew(self, *, is_first: bool) -> None:
        """Begin anew with damping and search, but for what is set by hand."""
        self.policy_state["search"] = PolicyState()
        self.policy_state["damping"] = PolicyState()
        for group in self.param_groups:
            if not is_first or group["damping"] == self.defaults["damping"]:
                group["damping"] = self.damping.initial

    def _plan(self, met: Meeting) -> Plan:
        """Which samples are taken for what in a Gauss-Newton step."""
        if met.batch is None:
            return replace(WITHOUT_BATCH, complete=met.complete)
        wanted = choose_sizes(
            sum(met.sizes),
            self.search,
            self.sampling,
            self.policy_state["sampling"].shared,
            curvature_batch_size=self.curvature_batch_size,
            largest_block=max(block.size for block in met.before.blocks),
            population=self._known_population(sum(met.sizes)),
            searches=met.searches,
            positions=met.structure.num_positions,
        )
        if lengths(met.batch) and (self.micro_batch_size is not None or not self.mesh.is_alone):
            wanted = Sizes(sum(met.sizes), sum(met.sizes))  # or else the parts would not be in proportion
        return replace(draw_plan(met.sizes, wanted, self._draw(), met.given), complete=met.complete)

    @classmethod
    def paper(
        cls,
        params: Iterable[Any],
        *,
        lr: float = 0.1,
        damping: float = 0.0,
        max_cg_steps: int = 30,
        cg_rtol: float = 0.0,
        cg_progress: float = 0.0,
        warm_start: float = 0.95,
        **options: Any,
    ) -> Self:
        """Algorithm 1 of the paper to the letter.

        Plain CG on the Gauss-Newton matrix with constant damping, warm-started, and a fixed step.

        Args:
            params: As for ``BlockHF``.
            lr: The learning rate.
            damping: The constant damping.
            max_cg_steps: The most CG iterations.
            cg_rtol: The CG stop criterion.
            cg_progress: Another one, which the paper does not have.
            warm_start: The paper's "momentum".
            options: Further options of ``BlockHF``, e.g. ``curvature_batch_size`` and ``slow_start``.
        """
        make: Callable[..., Self] = cls  # with a subclass's options
        return make(
            params,
            lr=lr,
            damping=damping,
            max_cg_steps=max_cg_steps,
            cg_rtol=cg_rtol,
            cg_progress=cg_progress,
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
    ) -> Self:
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
        make: Callable[..., Self] = cls  # with a subclass's options
        return make(
            params,
            damping=LevenbergMarquardt() if damping is None else damping,
            max_cg_steps=max_cg_steps,
            cg_progress=cg_progress,
            warm_start=warm_start,
            **{"search": Backtracking(), **_plain(), **options},
        )

    @classmethod
    def least_squares(
        cls,
        params: Iterable[Any],
        *,
        damping: float | DampingRule | None = None,
        max_cg_steps: int = 250,
        **options: Any,
    ) -> Self:
        """For losses without noise: physics-informed networks, curve fits, small data (docs/physics.md).

        Each step takes all samples of the batch and solves each block's system exactly, among the parameters
        or among the samples, whichever are fewer. Damping follows the reduction ratio, relative to the
        curvature, and the step is shrunk for as long as the loss falls. Pass the same samples at each step.
        Where Jacobians cannot be stored, one warning says why, and conjugate gradients solve.

        Args:
            params: As for ``BlockHF``.
            damping: A number, or a rule that adapts it.
            max_cg_steps: The most CG iterations, where exact solutions cannot be had.
            options: Further options of ``BlockHF``.
        """
        make: Callable[..., Self] = cls  # with a subclass's options
        return make(
            params,
            max_cg_steps=max_cg_steps,
            **{
                **without_noise(),
                "products": Factored(other=Auto()),
                "walk": NoWalk(),
                **({} if damping is None else {"damping": damping}),
                **options,
            },
        )
