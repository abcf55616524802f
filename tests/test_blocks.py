"""Partitions, their mistakes, and the flat vector of a block."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from blockhf import BlockHF, blocks
from blockhf.blocks import ROOT, Block

LAWS = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


class Nested(nn.Module):
    """Parameters at the root, in the middle and at the leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.encoder = nn.Module()
        self.encoder.position = nn.Parameter(torch.zeros(5))
        self.encoder.attention = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        self.encoder.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 2)


def tied() -> nn.Module:
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "mix": nn.Linear(3, 3), "out": nn.Linear(3, 4)})
    model["out"].weight = model["embed"].weight
    return model


def frozen() -> nn.Module:
    model = chain()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": chain,
    "nested": Nested,
    "tied": tied,
    "frozen": frozen,
    "lone layer": lambda: nn.Linear(2, 1),
}

ATTENTION = ["encoder.attention.0.weight", "encoder.attention.0.bias", "encoder.attention.1.weight"]
NORM = ["encoder.norm.weight", "encoder.norm.bias"]
HEAD = ["head.weight", "head.bias"]

EXPECTED: list[tuple[str, str, Callable[[nn.Module], Any], dict[str, list[str]]]] = [
    ("single", "chain", blocks.single, {"all": ["0.weight", "0.bias", "2.weight", "2.bias"]}),
    ("single", "frozen", blocks.single, {"all": ["2.weight"]}),
    ("by_module", "chain", blocks.by_module, {"0": ["0.weight", "0.bias"], "2": ["2.weight", "2.bias"]}),
    (
        "by_module",
        "nested",
        blocks.by_module,
        {ROOT: ["scale"], "encoder": ["encoder.position", *ATTENTION, *NORM], "head": HEAD},
    ),
    (
        "by_module depth 2",
        "nested",
        lambda model: blocks.by_module(model, depth=2),
        {
            ROOT: ["scale"],
            "encoder": ["encoder.position"],
            "encoder.attention": ATTENTION,
            "encoder.norm": NORM,
            "head": HEAD,
        },
    ),
    ("by_module", "lone layer", blocks.by_module, {ROOT: ["weight", "bias"]}),
    (
        "by_module",
        "tied",
        blocks.by_module,
        {"embed": ["embed.weight"], "mix": ["mix.weight", "mix.bias"], "out": ["out.bias"]},
    ),
    ("by_module", "frozen", blocks.by_module, {"2": ["2.weight"]}),
    (
        "by_layer",
        "nested",
        blocks.by_layer,
        {
            ROOT: ["scale"],
            "encoder": ["encoder.position"],
            "encoder.attention.0": ATTENTION[:2],
            "encoder.attention.1": ATTENTION[2:],
            "encoder.norm": NORM,
            "head": HEAD,
        },
    ),
    (
        "by_pattern",
        "nested",
        lambda model: blocks.by_pattern(model, {"biases": r"bias$", "encoder": r"^encoder\.", "rest": ""}),
        {
            "biases": ["encoder.attention.0.bias", "encoder.norm.bias", "head.bias"],
            "encoder": ["encoder.position", ATTENTION[0], ATTENTION[2], NORM[0]],
            "rest": ["scale", "head.weight"],
        },
    ),
    (
        "by_size",
        "chain",
        lambda model: blocks.by_size(model, 2),
        {"block0": ["0.weight"], "block1": ["0.bias", "2.weight", "2.bias"]},
    ),
]

PARTITIONS: dict[str, Callable[[nn.Module], list[blocks.Group]]] = {
    "single": blocks.single,
    "by_module": blocks.by_module,
    "by_module depth 2": lambda model: blocks.by_module(model, depth=2),
    "by_module depth 9": lambda model: blocks.by_module(model, depth=9),
    "by_layer": blocks.by_layer,
    "by_pattern": lambda model: (
        blocks.by_pattern(model, {"weights": "weight$", "rest": ""})
        if any(not name.endswith("weight") for name, p in model.named_parameters() if p.requires_grad)
        else blocks.by_pattern(model, {"weights": "weight$"})
    ),
    "by_size 1": lambda model: blocks.by_size(model, 1),
    "by_size, one each": lambda model: blocks.by_size(
        model, sum(param.requires_grad for param in model.parameters())
    ),
}


@pytest.mark.parametrize(
    ("model", "partition", "expected"),
    [pytest.param(MODELS[model], *rest, id=f"{name}-{model}") for name, model, *rest in EXPECTED],
)
def test_a_partition_keeps_names_and_order(
    model: Callable[[], nn.Module],
    partition: Callable[[nn.Module], list[blocks.Group]],
    expected: dict[str, list[str]],
) -> None:
    groups = partition(model())
    assert [(g["name"], [name for name, _ in g["params"]]) for g in groups] == list(expected.items())


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_trainable_parameter_is_in_exactly_one_block(
    make: Callable[[], nn.Module], partition: Callable[[nn.Module], list[blocks.Group]]
) -> None:
    model = make()
    groups = partition(model)
    placed = [param for group in groups for _, param in group["params"]]
    trainable = [param for param in model.parameters() if param.requires_grad]
    assert sorted(map(id, placed)) == sorted(map(id, trainable))
    names = dict(model.named_parameters())
    assert all(names[name] is param for group in groups for name, param in group["params"])
    assert all(group["params"] for group in groups)


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_partition_passes_its_own_check_and_makes_an_optimizer(
    make: Callable[[], nn.Module], partition: Callable[[nn.Module], list[blocks.Group]]
) -> None:
    model = make()
    groups = partition(model)
    optimizer = BlockHF.martens(blocks.check(model, groups))
    assert [group["name"] for group in optimizer.param_groups] == [group["name"] for group in groups]
    assert [group["param_names"] for group in optimizer.param_groups] == [
        [name for name, _ in group["params"]] for group in groups
    ]


def test_check_leaves_groups_given_by_generators_usable() -> None:
    model = chain()
    groups = blocks.check(model, [{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    assert [len(group["params"]) for group in BlockHF.martens(groups).param_groups] == [2, 2]


def test_check_keeps_the_other_options_of_a_group() -> None:
    model = nn.Linear(2, 1)
    checked = blocks.check(
        model, [{"params": model.weight, "lr": 0.5, "name": "w"}, {"params": [("bias", model.bias)]}]
    )
    assert checked[0]["lr"] == 0.5
    assert checked[0]["name"] == "w"
    assert checked[1]["params"] == [("bias", model.bias)]


def integer_model() -> nn.Module:
    model = nn.Linear(2, 1)
    model.count = nn.Parameter(torch.zeros(2, dtype=torch.long), requires_grad=False)
    return model


def mixed(**kind: Any) -> nn.Module:
    return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2, **kind)})


def check_with(
    groups: Callable[[Any], list[Any]], make: Callable[[], nn.Module] = chain
) -> Callable[[], Any]:
    def call() -> Any:
        model = make()
        return blocks.check(model, groups(model))

    return call


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "in two blocks": (
        check_with(lambda m: [{"params": list(m.parameters())}, {"params": [m[0].bias], "name": "again"}]),
        "Parameter 0.bias is in two blocks, 'block0' and 'again'. Leave it in one of them.",
    ),
    "twice in a block": (
        check_with(lambda m: [{"params": [*m.parameters(), m[0].bias]}]),
        "Parameter 0.bias is twice in block 'block0'. Name it once.",
    ),
    "in no block": (
        check_with(lambda m: [{"params": m[0].parameters()}]),
        "2 parameters are in no block: 2.weight, 2.bias. Add a group for them, or freeze them with "
        "requires_grad_(False).",
    ),
    "many in no block": (
        check_with(lambda m: [{"params": [m.scale]}], Nested),
        "8 parameters are in no block: encoder.position, encoder.attention.0.weight, "
        "encoder.attention.0.bias, encoder.attention.1.weight, encoder.norm.weight, …. Add",
    ),
    "one matched by no pattern": (
        lambda: blocks.by_pattern(nn.Linear(2, 1), {"w": "weight"}),
        "1 parameter is in no block: bias. Add a group for it, or freeze it with requires_grad_(False).",
    ),
    "empty block": (
        check_with(lambda m: [{"params": m.parameters()}, {"params": [], "name": "none"}]),
        "Block 'none' is empty. Give it parameters or leave it out.",
    ),
    "pattern matches nothing": (
        lambda: blocks.by_pattern(chain(), {"all": "", "late": "^2"}),
        "Pattern '^2' of block 'late' matches no parameter that is left for it. Mend or remove it",
    ),
    "frozen in a group": (
        check_with(lambda m: [{"params": list(m.parameters())}], frozen),
        "Parameter 0.weight of block 'block0' has no gradient: it is frozen. Take it out of the group",
    ),
    "stranger in a group": (
        check_with(lambda m: [{"params": [*m.parameters(), torch.zeros(1, requires_grad=True)]}]),
        "Block 'block0' holds a tensor that is no parameter of the model.",
    ),
    "no tensor at all": (
        check_with(lambda m: [{"params": [*m.parameters(), "0.bias"]}]),
        "Block 'block0' holds a parameter of no name, a str and not a tensor.",
    ),
    "mixed devices": (
        lambda: blocks.single(mixed(device="meta")),
        "Block 'all' mixes parameters of device cpu and meta. Give each device a block of its own.",
    ),
    "mixed dtypes": (
        lambda: blocks.by_size(mixed(dtype=torch.float64), 1),
        "Block 'block0' mixes parameters of dtype torch.float32 and torch.float64. Give each dtype",
    ),
    "integer": (
        check_with(lambda m: [{"params": list(m.parameters())}], integer_model),
        "Parameter count of block 'block0' is of torch.int64; only real floating-point parameters",
    ),
    "complex": (
        lambda: blocks.single(nn.Linear(2, 1, dtype=torch.complex64)),
        "Parameter weight of block 'all' is of torch.complex64; only real floating-point parameters",
    ),
    "no blocks": (
        lambda: blocks.by_size(chain(), 0),
        "num_blocks is 0, but must be between 1 and the number of trainable parameter tensors, which is 4.",
    ),
    "more blocks than parameters": (
        lambda: blocks.by_size(frozen(), 2),
        "num_blocks is 2, but must be between 1 and the number of trainable parameter tensors, which is 1.",
    ),
    "depth 0": (
        lambda: blocks.by_module(chain(), depth=0),
        "depth is 0, but must be at least 1. For one block use blocks.single(model).",
    ),
    "nothing to train": (
        lambda: blocks.by_layer(chain().requires_grad_(False)),
        "The model has no trainable parameter. Thaw some with requires_grad_(True).",
    ),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_with_its_remedy(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        call()


def test_devices_and_dtypes_may_differ_between_blocks() -> None:
    for kind in ({"device": "meta"}, {"dtype": torch.float64}):
        assert [group["name"] for group in blocks.by_module(mixed(**kind))] == ["a", "b"]


@LAWS
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=8), data=st.data())
def test_by_size_is_as_balanced_as_contiguous_runs_can_be(sizes: list[int], data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, len(sizes)))
    model = nn.ParameterList([torch.zeros(size) for size in sizes])
    runs = [[param.numel() for _, param in g["params"]] for g in blocks.by_size(model, num_blocks)]

    assert len(runs) == num_blocks
    assert [size for run in runs for size in run] == sizes
    best = min(
        max(sum(sizes[start:stop]) for start, stop in itertools.pairwise((0, *cuts, len(sizes))))
        for cuts in itertools.combinations(range(1, len(sizes)), num_blocks - 1)
    )
    assert max(map(sum, runs)) == best


SHAPES = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=4)


def random_block(shapes: list[tuple[int, ...]], seed: int = 0) -> Block:
    generator = torch.Generator().manual_seed(seed)
    return Block("b", tuple(torch.randn(s, generator=generator, requires_grad=True) for s in shapes))


@LAWS
@given(shapes=SHAPES)
def test_flatten_and_unflatten_undo_each_other(shapes: list[tuple[int, ...]]) -> None:
    block = random_block(shapes)
    vector = torch.arange(float(block.size))
    pieces = block.unflatten(vector)
    assert [piece.shape for piece in pieces] == [param.shape for param in block.params]
    assert torch.equal(block.flatten(pieces), vector)
    tensors = [torch.randn(shape) for shape in shapes]
    assert all(map(torch.equal, block.unflatten(block.flatten(tensors)), tensors))
    assert block.size == sum(tensor.numel() for tensor in tensors)


def test_flatten_takes_none_for_zeros_and_goes_row_by_row() -> None:
    block = random_block([(2, 2), (3,)])
    transposed = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T
    assert block.flatten([transposed, None]).tolist() == [1, 3, 2, 4, 0, 0, 0]


def test_flatten_refuses_the_wrong_number_of_tensors() -> None:
    with pytest.raises(ValueError, match="shorter"):
        random_block([(2,), (3,)]).flatten([torch.zeros(2)])


def test_unflatten_gives_views_and_values_a_copy() -> None:
    block = random_block([(2, 2), (3,)])
    vector = torch.zeros(7)
    block.unflatten(vector)[1].fill_(1.0)
    assert vector.tolist() == [0, 0, 0, 0, 1, 1, 1]

    values = block.values()
    assert not values.requires_grad
    before = block.params[0].detach().clone()
    values.zero_()
    assert torch.equal(block.params[0], before)


@pytest.mark.parametrize("write", [Block.assign_, Block.visit_])
def test_a_written_vector_is_read_back_from_the_same_storage(
    write: Callable[[Block, Tensor], None],
) -> None:
    strided = torch.randn(3, 2).T.requires_grad_()
    block = Block("b", (*random_block([(2, 2), ()]).params, strided))
    pointers = [param.data_ptr() for param in block.params]
    vector = torch.arange(float(block.size))
    write(block, vector)
    assert torch.equal(block.values(), vector)
    assert [param.data_ptr() for param in block.params] == pointers
    assert strided.stride() == (1, 2)
    assert all(param.requires_grad and param.is_leaf for param in block.params)
    vector.zero_()
    assert block.values().sum() != 0


def test_a_graph_survives_a_visit_there_and_back() -> None:
    block = random_block([(3,)])
    origin = block.values()
    loss = (block.params[0] ** 2).sum()
    block.visit_(origin + 1.0)
    block.visit_(origin)
    loss.backward()
    assert torch.equal(block.params[0].grad, 2 * origin)


def test_a_graph_notices_an_assignment() -> None:
    block = random_block([(3,)])
    loss = (block.params[0] ** 2).sum()
    block.assign_(block.values())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
