"""The ways to a product: traced and formed, against the same dense matrices as the double backward."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor
import torch.nn.functional as F
from torch import Tensor, nn

from blockhf import (
    Auto,
    BlockHF,
    Cholesky,
    DoubleBackward,
    EmpiricalFisher,
    Formed,
    GaussNewton,
    Hessian,
    MonteCarloFisher,
    Subspace,
    Traced,
    blocks,
)
from blockhf.blocks import Block
from blockhf.curvature import auto, traced
from blockhf.curvature.formed import FormingError
from blockhf.curvature.trace import Trace
from blockhf.fx_graphs import TracingError
from blockhf.objective import Problem
from blockhf.operators import BlockMatrix
from cases import Case
from test_curvature import (
    CASES,
    ONE_PER_NETWORK,
    PARTITIONS,
    RTOL,
    dense_gauss_newton,
    dense_hessian,
    linearized,
    table,
)

CANNOT_BE_FORMED = ("batch norm in train mode", "dropout", "gru", "lstm", "pendulum", "heat")


@pytest.mark.parametrize("partition", PARTITIONS)
@table(CASES)
def test_traced_gauss_newton_equals_the_dense_blocks(case: Case, partition: str) -> None:
    actual = linearized(GaussNewton(), case, partition, products=Traced())
    assert actual.error(dense_gauss_newton(case)) < RTOL


@table(ONE_PER_NETWORK)
def test_a_traced_hessian_equals_the_dense_blocks(case: Case) -> None:
    assert linearized(Hessian(), case, products=Traced()).error(dense_hessian(case)) < RTOL


@table([case for case in ONE_PER_NETWORK if "train mode" not in case.name])
def test_traced_micro_batches_equal_those_of_the_double_backward(case: Case) -> None:
    for budget in (0, 2**40):
        traced_one = linearized(
            GaussNewton(), case, products=Traced(memory_budget=budget), micro_batch_size=2
        )
        plain = linearized(GaussNewton(), case, micro_batch_size=2)
        for index, block in enumerate(plain.blocks):
            vector = torch.randn(block.size, dtype=torch.float64)
            expected = plain.matrix.product(index, index, vector)
            torch.testing.assert_close(
                traced_one.matrix.product(index, index, vector), expected, rtol=1e-10, atol=1e-12
            )


@table(CASES)
def test_formed_blocks_equal_the_dense_blocks_or_say_why_not(case: Case) -> None:
    try:
        actual = linearized(GaussNewton(), case, products=Formed())
    except FormingError:
        assert any(name in case.name.lower() for name in CANNOT_BE_FORMED), case.name
    else:
        assert actual.error(dense_gauss_newton(case)) < RTOL


def mlp(*sizes: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def squares(model: nn.Module) -> Callable[[Any], tuple[Tensor, Tensor]]:
    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.mse_loss(outputs, batch[1])

    return objective


def data(num_samples: int, num_inputs: int = 3, num_outputs: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randn(num_samples, num_inputs, generator=generator, dtype=torch.float64),
        torch.randn(num_samples, num_outputs, generator=generator, dtype=torch.float64),
    )


@pytest.fixture
def num_traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the traces that are made."""
    counter = [0]
    init = Trace.__init__

    def counting(self: Trace, *args: Any) -> None:
        counter[0] += 1
        init(self, *args)

    monkeypatch.setattr(traced.Trace, "__init__", counting)
    return counter


def step(optimizer: BlockHF, model: nn.Module, num_samples: int) -> None:
    optimizer.step(squares(model), data(num_samples))


def test_an_epoch_with_a_partial_last_batch_is_traced_twice_and_the_next_epochs_not_at_all(
    num_traces: list[int],
) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.by_layer(model), products=Traced())
    for _ in range(3):
        for num_samples in (8, 8, 8, 5):
            step(optimizer, model, num_samples)
    assert num_traces == [2]


def test_a_last_batch_that_is_dropped_leaves_one_trace(num_traces: list[int]) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.by_layer(model), products=Traced())
    for _ in range(5):
        step(optimizer, model, 8)
    assert num_traces == [1]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: model.eval(), id="mode"),
        pytest.param(lambda model: model[0].weight.requires_grad_(False), id="frozen parameter"),
    ],
)
def test_another_mode_or_other_parameters_are_traced_anew(
    change: Callable[[nn.Module], Any], num_traces: list[int]
) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.by_layer(model), products=Traced())
    step(optimizer, model, 8)
    change(model)
    step(optimizer, model, 8)
    step(optimizer, model, 8)
    assert num_traces == [2]


def test_the_trace_that_was_used_last_is_remembered_longest(num_traces: list[int]) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.single(model), products=Traced(max_traces=2))
    for num_samples in (8, 5, 8, 6, 8, 7, 8):
        step(optimizer, model, num_samples)
    assert num_traces == [4]


def test_no_more_traces_are_remembered_than_allowed(num_traces: list[int]) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.single(model), products=Traced(max_traces=1))
    for num_samples in (8, 5, 8):
        step(optimizer, model, num_samples)
    assert num_traces == [3]


def test_a_number_that_the_objective_takes_from_elsewhere_is_noticed_when_it_changes(
    num_traces: list[int],
) -> None:
    model, weight = mlp(3, 4, 2), [1.0]

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, weight[0] * F.mse_loss(outputs, batch[1])

    group = blocks.single(model)
    block = [Block("all", tuple(param for _, param in group[0]["params"]))]
    vector = torch.ones(block[0].size, dtype=torch.float64)
    products = Traced()

    def product() -> Tensor:
        problem = Problem(objective, data(8), block, curvature_batch=4)
        problem.differentiate()
        return products.linearize(GaussNewton(), problem).product(0, 0, vector)

    first = product()
    for number in range(2, 8):  # however often, if it stays for a while
        weight[0] = float(number)
        torch.testing.assert_close(product(), number * first)
        torch.testing.assert_close(product(), number * first)
        assert num_traces == [number]
    for number in range(8, 11):
        weight[0] = float(number)
        product()
    weight[0] = 11.0
    with pytest.raises(TracingError, match="changes from call to call"):
        product()


def test_an_objective_that_always_changes_ends_in_a_tracing_error() -> None:
    model, calls = mlp(3, 4, 2), [0]

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        calls[0] += 1
        outputs = model(batch[0])
        return outputs, calls[0] * F.mse_loss(outputs, batch[1])

    optimizer = BlockHF.martens(blocks.single(model), products=Traced())
    with pytest.raises(TracingError, match=r"changes from call to call|is off by"):
        optimizer.step(objective, data(8))


@pytest.fixture
def nothing_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_SMALLEST", 0)


def branching(model: nn.Module) -> Callable[[Any], tuple[Tensor, Tensor]]:
    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        if float(outputs.detach().sum()) > 1e9:
            outputs = outputs.abs()
        return outputs, F.mse_loss(outputs, batch[1])

    return objective


@pytest.mark.usefixtures("nothing_is_too_small")
@pytest.mark.parametrize("micro_batch_size", [None, 3])
def test_where_tracing_fails_one_warning_says_why_and_the_step_is_that_of_the_double_backward(
    micro_batch_size: int | None,
) -> None:
    losses = {}
    for way in (Auto(), DoubleBackward()):
        model = mlp(3, 40, 2)
        optimizer = BlockHF.martens(
            blocks.single(model), products=way, max_cg_steps=3, micro_batch_size=micro_batch_size
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                optimizer.step(branching(model), data(8))
        assert len(caught) == (1 if isinstance(way, Auto) else 0)
        assert all("cannot be traced" in str(warning.message) for warning in caught)
        assert optimizer.report is not None
        losses[type(way)] = optimizer.report.loss_after
    assert losses[Auto] == losses[DoubleBackward]


@pytest.mark.usefixtures("nothing_is_too_small")
def test_a_small_block_is_formed_and_a_large_one_is_traced_and_the_report_says_so() -> None:
    model = mlp(3, 4000, 5, 2)
    optimizer = BlockHF.martens(blocks.by_layer(model), max_cg_steps=100, cg_progress=0.0)
    step(optimizer, model, 8)
    assert optimizer.report is not None
    first, middle, last = (block.products for block in optimizer.report.blocks)
    assert first.startswith("traced")
    assert middle.startswith("traced")
    assert last.startswith("formed, 12 x 12: cheaper than 100 products")
    assert "formed" in str(optimizer.report)


@pytest.mark.usefixtures("nothing_is_too_small")
def test_by_default_only_small_blocks_are_formed_for_the_sake_of_an_exact_solution() -> None:
    model = mlp(3, 300, 40, 2)  # 1,200, 12,040 and 82 parameters
    ways = {}
    for small in (1000, 2000):
        optimizer = BlockHF(blocks.by_layer(model), solver=Cholesky(small=small))
        step(optimizer, model, 600)
        assert optimizer.report is not None
        ways[small] = [block.products.partition(",")[0] for block in optimizer.report.blocks]
        assert [block.num_products for block in optimizer.report.blocks][1:] == [5, 0]
    assert ways == {1000: ["traced", "traced", "formed"], 2000: ["formed", "traced", "formed"]}
    assert Cholesky().small == 1000


def test_a_tiny_problem_is_left_to_the_double_backward() -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.by_layer(model))
    step(optimizer, model, 8)
    assert optimizer.report is not None
    assert {block.products for block in optimizer.report.blocks} == {
        "double backward: too small for other ways to pay"
    }


@pytest.mark.usefixtures("nothing_is_too_small")
def test_the_choice_is_the_same_each_time() -> None:
    """A resumed run must make the same choice, so nothing in it goes by the clock."""
    notes = set()
    for _ in range(3):
        model = mlp(3, 60, 5, 2)
        optimizer = BlockHF.martens(blocks.by_layer(model), max_cg_steps=12)
        step(optimizer, model, 8)
        assert optimizer.report is not None
        notes.add(tuple(block.products.split(" in ")[0] for block in optimizer.report.blocks))
    assert len(notes) == 1


@pytest.mark.parametrize("products", [Traced, Formed, Auto, DoubleBackward])
def test_every_way_makes_the_same_steps(products: Callable[[], Any]) -> None:
    model = mlp(3, 6, 2)
    reference = copy.deepcopy(model)
    for one, way in ((model, products()), (reference, DoubleBackward())):
        optimizer = BlockHF.paper(
            blocks.by_layer(one), curvature_batch_size=12, products=way, damping=0.1, max_cg_steps=8
        )
        for _ in range(4):
            step(optimizer, one, 20)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_cg_on_a_formed_matrix_makes_the_iterates_of_matrix_free_cg() -> None:
    iterates = {}
    for way in (Formed(), DoubleBackward()):
        model = mlp(3, 6, 2)
        optimizer = BlockHF.paper(blocks.single(model), products=way, damping=0.1, max_cg_steps=6)
        solve = optimizer.solver.solve

        def recording(systems: Any, matrix: BlockMatrix, way: Any = way, solve: Any = solve) -> Any:
            solutions = solve([dataclasses.replace(s, record=1.3) for s in systems], matrix)
            iterates[type(way)] = [iterate.x for iterate in solutions[0].iterates]
            return solutions

        optimizer.solver = type("Recording", (), {"solve": staticmethod(recording)})()
        step(optimizer, model, 20)
    assert len(iterates[Formed]) > 3
    for one, other in zip(iterates[Formed], iterates[DoubleBackward], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_cholesky_solves_formed_blocks_outright() -> None:
    model = mlp(3, 6, 2)
    optimizer = BlockHF.paper(
        blocks.by_layer(model), products=Formed(), solver=Cholesky(), damping=0.1, max_cg_steps=1, lr=1.0
    )
    step(optimizer, model, 20)
    assert optimizer.report is not None
    for block in optimizer.report.blocks:
        assert (block.status, block.num_steps, block.num_products) == ("converged", 0, 0)
        assert block.residual < 1e-12


def test_cholesky_leaves_what_is_not_formed_to_cg() -> None:
    moved = {}
    for solver in (Cholesky(), None):
        model = mlp(3, 6, 2)
        optimizer = BlockHF.paper(blocks.by_layer(model), solver=solver, damping=0.1, max_cg_steps=4)
        step(optimizer, model, 20)
        assert optimizer.report is not None
        assert all(block.num_steps == 4 for block in optimizer.report.blocks)
        moved[solver is None] = torch.cat([param.detach().flatten() for param in model.parameters()])
    assert torch.equal(moved[True], moved[False])


def test_cholesky_leaves_a_singular_matrix_to_cg() -> None:
    model = mlp(3, 6, 2)
    optimizer = BlockHF.paper(
        blocks.single(model), products=Formed(), solver=Cholesky(), damping=0.0, max_cg_steps=4
    )
    step(optimizer, model, 2)
    assert optimizer.report is not None
    assert optimizer.report.blocks[0].num_steps > 0


@pytest.mark.parametrize("way", [Traced(), Formed()], ids=["traced", "formed"])
def test_an_objective_without_a_batch_is_refused(way: Any) -> None:
    model, batch = mlp(3, 4, 2), data(8)
    optimizer = BlockHF.martens(blocks.single(model), products=way)
    with pytest.raises((TracingError, FormingError), match="no arguments"):
        optimizer.step(lambda: squares(model)(batch))


def test_only_gauss_newton_is_formed_and_random_draws_are_not_traced() -> None:
    model = mlp(3, 4, 2)
    with pytest.raises(FormingError, match="EmpiricalFisher is not formed"):
        step(BlockHF.martens(blocks.single(model), curvature=EmpiricalFisher(), products=Formed()), model, 8)
    drawn = MonteCarloFisher(lambda mean: torch.distributions.Normal(mean, 1.0))
    with pytest.raises(TracingError, match="Monte-Carlo"):
        step(BlockHF.martens(blocks.single(model), curvature=drawn, products=Traced()), model, 8)
    with pytest.raises(FormingError, match="more than max_size, 10"):
        step(BlockHF.martens(blocks.single(model), products=Formed(max_size=10)), model, 8)


def test_a_parameter_that_no_module_owns_cannot_be_traced() -> None:
    weight = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)

    def objective(batch: Any) -> tuple[Tensor, Tensor]:
        outputs = batch[0] @ weight
        return outputs, F.mse_loss(outputs, batch[1])

    with pytest.raises(TracingError, match="1 parameters are owned by no module"):
        BlockHF.martens([weight], products=Traced()).step(objective, data(8))


def test_tracing_leaves_buffers_flags_and_random_numbers_alone() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    twin = copy.deepcopy(model)
    for one, way in ((model, Traced()), (twin, DoubleBackward())):
        torch.manual_seed(0)
        optimizer = BlockHF.paper(blocks.single(one), curvature_batch_size=6, damping=0.1, products=way)
        for _ in range(3):
            step(optimizer, one, 10)
        states = torch.get_rng_state()
        assert all(param.requires_grad for param in one.parameters())
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-8, atol=1e-12)
    assert torch.equal(states, torch.get_rng_state())


def test_residuals_of_micro_batches_are_kept_as_far_as_the_budget_goes() -> None:
    model = mlp(3, 4, 2)
    runs = {}
    for budget in (0, 800, 2**30):
        problem = Problem(
            squares(model), data(12), [Block("all", tuple(model.parameters()))], micro_batch_size=3
        )
        problem.differentiate()
        matrix = Traced(memory_budget=budget).linearize(GaussNewton(), problem)
        before = problem.work.num_linearizations
        matrix.product(0, 0, torch.ones(problem.blocks[0].size, dtype=torch.float64))
        runs[budget] = problem.work.num_linearizations - before
    assert runs[0] >= 4
    assert 0 < runs[800] < 4
    assert runs[2**30] == 0


def test_traces_are_not_pickled_or_copied_and_are_made_again(num_traces: list[int]) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.single(model), products=Traced())
    step(optimizer, model, 8)
    other_model, other = pickle.loads(pickle.dumps((model, optimizer)))
    step(optimizer, model, 8)
    step(other, other_model, 8)
    assert num_traces == [2]
    assert all(map(torch.equal, model.parameters(), other_model.parameters()))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_compiled_products_equal_the_others_and_the_time_to_compile_is_told() -> None:
    model = mlp(3, 8, 2)
    reference = copy.deepcopy(model)
    compiled = Traced(compile=True)
    for one, way in ((model, compiled), (reference, Traced())):
        optimizer = BlockHF.paper(blocks.by_layer(one), damping=0.1, max_cg_steps=4, products=way)
        step(optimizer, one, 16)
        assert optimizer.report is not None
        assert ("compiled in" in optimizer.report.blocks[0].products) == (way is compiled)
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)


def test_what_is_little_else_than_matrix_products_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch._inductor, "compile", lambda module, *_: compiled.append(module) or module)
    notes = []
    for width in (8, 1024):
        model = mlp(width, width, 2)
        way = Traced(compile=True)
        optimizer = BlockHF.paper(blocks.single(model), damping=0.1, max_cg_steps=1, products=way)
        inputs, targets = torch.randn(8, width, dtype=torch.float64), torch.zeros(8, 2, dtype=torch.float64)

        def objective(batch: Any, model: nn.Module = model) -> tuple[Tensor, Tensor]:
            outputs = model(batch[0])
            return outputs, F.mse_loss(outputs, batch[1])

        optimizer.step(objective, (inputs, targets))
        assert optimizer.report is not None
        notes.append(optimizer.report.blocks[0].products)
    assert len(compiled) == 1
    assert "compiled in" in notes[0]
    assert notes[1].endswith(", not compiled, as it is matrix products")


def test_without_a_compiler_products_run_plain_after_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch._inductor, "compile", broken)
    model = mlp(3, 4, 2)
    optimizer = BlockHF.martens(blocks.single(model), products=Traced(compile=True))
    with pytest.warns(UserWarning, match=r"Compiling failed .*no C\+\+ compiler.*run without it"):
        step(optimizer, model, 8)
    step(optimizer, model, 8)
    assert optimizer.report is not None
    assert optimizer.report.accepted


def test_slices_of_a_recurrence_are_put_together_at_once() -> None:
    class Recurrence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3, dtype=torch.float64) / 2)

        def forward(self, inputs: Tensor) -> Tensor:
            state, states = torch.zeros_like(inputs[:, 0]), []
            for step in range(inputs.shape[1]):
                state = torch.tanh(inputs[:, step] + state @ self.weight)
                states.append(state)
            return torch.stack(states, 1)

    model, inputs = Recurrence(), torch.randn(4, 9, 3, dtype=torch.float64)

    def objective(batch: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(batch)
        return outputs, outputs.square().mean()

    problem = Problem(objective, inputs, [Block("all", (model.weight,))])
    problem.differentiate()
    products = Traced()
    vector = torch.randn(9, dtype=torch.float64)
    actual = products.linearize(GaussNewton(), problem).product(0, 0, vector)
    expected = DoubleBackward().linearize(GaussNewton(), problem).product(0, 0, vector)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    (trace,) = products._traces.values()
    targets = [str(node.target) for node in trace._product.graph.nodes]
    assert "aten.select_backward.default" not in targets
    assert "aten.stack.default" in targets


@pytest.mark.usefixtures("nothing_is_too_small")
def test_a_loaded_state_takes_as_many_samples_where_blocks_are_formed() -> None:
    """What forming costs must not depend on what the process saw before: sizes go by it."""

    def optimizer_for(model: nn.Module) -> BlockHF:
        return BlockHF(blocks.by_layer(model))

    def steps(optimizer: BlockHF, model: nn.Module) -> list[Any]:
        found = []
        for _ in range(4):
            step(optimizer, model, 6000)
            assert optimizer.report is not None
            work = optimizer.report.work
            found.append(
                (work["gradient_batch"], work["forming_flops"], work["flops"] - work["gradient_flops"])
            )
        return found

    straight = mlp(3, 300, 5, 2)
    optimizer = optimizer_for(straight)
    steps(optimizer, straight)
    resumed = copy.deepcopy(straight)
    other = optimizer_for(resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert steps(other, resumed) == steps(optimizer, straight)
    for one, two in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.usefixtures("nothing_is_too_small")
@pytest.mark.parametrize("products", [Auto, Formed])
def test_a_loss_alone_is_refused_in_our_own_words(products: Callable[[], Any]) -> None:
    model = mlp(3, 4, 2)
    optimizer = BlockHF(blocks.by_layer(model), products=products())
    with pytest.raises(ValueError, match="outputs"):
        optimizer.step(lambda batch: squares(model)(batch)[1], data(200))


def test_held_out_samples_come_in_few_sizes() -> None:
    search = Subspace()
    numbers = {search.num_held_out(60_000, wanted) for wanted in range(600, 59_000, 7)}
    assert numbers == {512, 768, 1024, 1280, 1536, 1792}


def test_chunks_of_which_the_last_is_shorter_form_the_same_matrix() -> None:
    """The last one's two samples of two outputs are four rows, as many as there are hidden units."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.head = nn.Parameter(torch.rand(4, 1)), nn.Linear(4, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head((self.gain * torch.tanh(inputs).T).T)

    torch.manual_seed(0)
    model = Scaled().double()
    block = [Block("all", tuple(model.parameters()))]
    matrices = []
    for chunk in (8, 3):
        problem = Problem(squares(model), data(8, num_inputs=4), block)
        problem.differentiate()
        formed = Formed(memory_budget=chunk * 3 * 2 * block[0].size * 8)
        matrices += formed.form(GaussNewton(), problem, [0])
    torch.testing.assert_close(matrices[1], matrices[0])
