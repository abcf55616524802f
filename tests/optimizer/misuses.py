"""What users get wrong when they make an optimizer, set it up or load its state, and what they are told."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from blockhf import (
    Auto,
    BlockHF,
    ByCoefficient,
    Cholesky,
    EmpiricalFisher,
    FixedStep,
    GaussNewton,
    Kronecker,
    LevenbergMarquardt,
    MonteCarloFisher,
    NoiseScale,
    Subspace,
    blocks,
)
from optimizer_tasks import Task, equal, mlp, snapshot


@dataclass(frozen=True)
class Misuse:
    """Something that is wrong, and what comes of it.

    Attributes:
        act: Does it.
        kind: The exception or the warning.
        message: An expression that the whole message has to fit.
    """

    act: Callable[[], Any]
    kind: type[Exception]
    message: str


def exactly(message: str) -> str:
    """An expression for a message of which nothing is left open."""
    return re.escape(message)


def refused(message: str, act: Callable[[], Any], kind: type[Exception] = ValueError) -> Misuse:
    return Misuse(act, kind, message)


def make(groups: Callable[[Any], Any], **options: Any) -> Callable[[], BlockHF]:
    """Constructs an optimizer for what is chosen of a model."""
    return lambda: BlockHF(groups(mlp()), **options)


def option(name: str, value: Any, bound: str) -> Misuse:
    """An option of a group that is out of bounds."""
    message = exactly(f"{name} of block '2' is {value!r}, but must be {bound}.")

    def act() -> None:
        groups = blocks.by_layer(mlp())
        groups[1][name] = value
        BlockHF(groups)

    return refused(message, act)


def setting(message: str, **settings: Any) -> Misuse:
    return refused(exactly(message), make(blocks.single, **settings))


def unknown(*names: str) -> Misuse:
    """Options that other optimizers have."""
    have = "lr, damping, max_cg_steps, cg_rtol, cg_progress, warm_start, slow_start, weight_decay, "
    have += "decoupled_weight_decay"
    some = f"option{'s' if len(names) > 1 else ''} {', '.join(names)}"
    message = f"Block 'all' has the {some}, which BlockHF does not have. A group may have {have}."

    def act() -> None:
        BlockHF([{**blocks.single(mlp())[0], **dict.fromkeys(names, 0.1)}])

    return refused(exactly(message), act)


def class_for_object(name: str, kind: type) -> Misuse:
    message = f"{name} is the class {kind.__name__}. Pass an object: {kind.__name__}()."
    return setting(message, **{name: kind})


def frozen(model: nn.Module) -> list[Tensor]:
    model[0].weight.requires_grad_(False)
    return list(model.parameters())


def distributed_tensor() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        BlockHF([nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh))])
    finally:
        dist.destroy_process_group()


CONSTRUCTIONS: dict[str, Misuse] = {
    "the model itself": refused(
        r"is a Sequential, not its parameters\. Pass blocks\.by_module\(model\).*or model\.parameters\(\)",
        make(lambda model: model),
        TypeError,
    ),
    "a bare tensor": refused("should be an iterable", make(lambda model: model[0].weight), TypeError),
    "a set": refused(
        exactly("A set of parameters has no order in which to save their state. Give a list."),
        make(lambda model: set(model.parameters())),
        TypeError,
    ),
    "a set in a group": refused(
        exactly("A set of parameters has no order in which to save their state. Give a list."),
        make(lambda model: [{"params": set(model.parameters())}]),
        TypeError,
    ),
    "an empty list": refused("optimizer got an empty parameter list", make(lambda model: [])),
    "an empty group": refused(
        exactly("Block 'head' is empty. Give it parameters or leave it out."),
        make(lambda model: [{"params": [], "name": "head"}]),
    ),
    "a parameter that is used up": refused(
        "optimizer got an empty parameter list", make(lambda model: (p for p in list(model.parameters())[:0]))
    ),
    "a name for a parameter": refused(
        exactly("Block 'head' holds number 0, a str and not a tensor."),
        make(lambda model: [{"params": ["0.weight"], "name": "head"}]),
    ),
    "a group without parameters": refused(
        r"A block is a mapping with its parameters under 'params', and this is \{'weights': 3\}\. "
        r"blocks\.by_module\(model\) makes such groups\.",
        make(lambda model: [{"weights": 3}]),
    ),
    "a piece of a tensor": refused(
        r"Parameter number 0 of block 'block0' is a DTensor.*whole parameters on each rank, and let "
        r"blockhf\.mesh\(block=\.\.\., data=\.\.\.\) share out the work",
        distributed_tensor,
    ),
    "a name twice": refused(
        exactly("Two blocks have the name 'layer'. Rename one."),
        make(lambda model: [{"params": model[i].parameters(), "name": "layer"} for i in (0, 2)]),
    ),
    "a parameter twice": refused(
        exactly("Parameter number 1 is twice in block 'block0'. Name it once."),
        make(lambda model: [model[0].weight, model[0].weight]),
    ),
    "a parameter in two blocks": refused(
        exactly("Parameter number 0 is in two blocks, 'all' and 'bias'. Leave it in one of them."),
        make(
            lambda model: [
                {"params": model.parameters(), "name": "all"},
                {"params": [model[0].bias], "name": "bias"},
            ]
        ),
    ),
    "a frozen parameter": refused(
        exactly(
            "Parameter number 0 of block 'block0' has no gradient: it is frozen. Take it out of the group, "
            "or thaw it with requires_grad_(True)."
        ),
        make(frozen),
    ),
    "whole numbers": refused(
        exactly("of block 'block0' is of torch.int64; only real floating-point parameters can be optimized."),
        make(lambda model: [torch.zeros(3, dtype=torch.int64)]),
    ),
    "complex numbers": refused(
        exactly("of block 'block0' is of torch.complex64; only real floating-point parameters"),
        make(lambda model: [nn.Parameter(torch.zeros(3, dtype=torch.complex64))]),
    ),
    "two types in a block": refused(
        exactly(
            "Block 'block0' mixes parameters of dtype torch.float32 and torch.float64. "
            "Give each dtype a block of its own."
        ),
        make(lambda model: [model[0].weight, nn.Parameter(torch.zeros(3).double())]),
    ),
    "two devices in a block": refused(
        exactly(
            "Block 'block0' mixes parameters of device cpu and meta. Give each device a block of its own."
        ),
        make(lambda model: [model[0].weight, nn.Parameter(torch.zeros(3, device="meta"))]),
    ),
    "a computed tensor": refused("non-leaf", make(lambda model: [model[0].weight * 2])),
    "momentum": unknown("momentum"),
    "Adam's options": unknown("betas", "eps"),
    "an unknown option of all groups": refused(
        "unexpected keyword argument 'nesterov'", make(blocks.single, nesterov=True), TypeError
    ),
}

AT_LEAST_0, BELOW_1 = "a number of at least 0", "at least 0 and below 1"
PAIR = "None or a pair (num_updates, max_cg_steps) of whole numbers"
SIZE = "must be a whole number of at least 1"
OPTIONS: dict[str, Misuse] = {
    "a negative lr": option("lr", -0.1, AT_LEAST_0),
    "an lr that is a word": option("lr", "fast", AT_LEAST_0),
    "an infinite damping": option("damping", math.inf, AT_LEAST_0),
    "a damping that is no number": option("damping", math.nan, AT_LEAST_0),
    "a negative weight decay": option("weight_decay", -1e-4, AT_LEAST_0),
    "a weight decay that is no number": option("weight_decay", math.nan, AT_LEAST_0),
    "a decoupled weight decay that is a number": option("decoupled_weight_decay", 0.1, "True or False"),
    "no CG steps": option("max_cg_steps", 0, "a whole number of at least 1"),
    "half a CG step": option("max_cg_steps", 2.5, "a whole number of at least 1"),
    "a tolerance of 1": option("cg_rtol", 1.0, BELOW_1),
    "a negative progress": option("cg_progress", -1e-9, BELOW_1),
    "a warm start above 1": option("warm_start", 1.1, "between 0 and 1"),
    "a slow start that is no pair": option("slow_start", 10, PAIR),
    "no curvature samples": setting(
        f"curvature_batch_size is 0, but {SIZE}, a share between 0 and 1, or None.", curvature_batch_size=0
    ),
    "a share above 1": setting(
        f"curvature_batch_size is 1.2, but {SIZE}, a share between 0 and 1, or None.",
        curvature_batch_size=1.2,
    ),
    "a negative micro-batch": setting(f"micro_batch_size is -4, but {SIZE}, or None.", micro_batch_size=-4),
    "True for a size": setting(f"micro_batch_size is True, but {SIZE}, or None.", micro_batch_size=True),
    "a dataset for the population": setting(f"population is [1, 2], but {SIZE}, or None.", population=[1, 2]),
    "a seed that is no number": setting(
        "seed is 'zero', but must be a whole number of at least 0.", seed="zero"
    ),
    "an unknown reduction": setting(
        "reduction is 'none', but must be 'mean', 'sum', or a function from a batch to the total weight of "
        "its mean.",
        reduction="none",
    ),
    "a word for damping": setting(
        "damping is 'high', which is no DampingRule. Derive it from DampingRule.", damping="high"
    ),
    "a negative damping": setting("damping is -1.0, but must not be negative.", damping=-1),
    "a function for a search": refused(
        r"search is .*, which is no Search\. Derive it from Search\.",
        make(blocks.single, search=lambda situation: None),
    ),
    "a curvature for a search": setting(
        "search is GaussNewton(), which is no Search. Derive it from Search.", search=GaussNewton()
    ),
    "a word for a curvature": setting(
        "curvature is 'ggn', which is no Curvature. Derive it from Curvature.", curvature="ggn"
    ),
    "adaptive damping without the loss": setting(
        "LevenbergMarquardt needs the loss after each step, which FixedStep does not evaluate. Use "
        "FixedStep(evaluates=True) or Backtracking(), or a constant damping.",
        damping=LevenbergMarquardt(),
        search=FixedStep(),
    ),
    "no draws": refused(
        exactly("num_draws is 0, but must be at least 1."),
        lambda: MonteCarloFisher(lambda logits: None, num_draws=0),
    ),
    **{
        f"the class {kind.__name__}": class_for_object(name, kind)
        for name, kind in {
            "curvature": EmpiricalFisher,
            "products": Auto,
            "damping": ByCoefficient,
            "search": Subspace,
            "solver": Cholesky,
            "preconditioner": Kronecker,
            "sampling": NoiseScale,
        }.items()
    },
}


def adam(state: dict[str, Any]) -> dict[str, Any]:
    model = mlp()
    other = torch.optim.Adam(blocks.by_layer(model))
    model(torch.ones(1, 3)).sum().backward()
    other.step()
    return other.state_dict()


def wider(state: dict[str, Any]) -> dict[str, Any]:
    """Of a method that keeps no directions, whose shapes would tell."""
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2))
    return BlockHF(blocks.by_layer(model)).state_dict()


def other_widths(state: dict[str, Any]) -> dict[str, Any]:
    state["state"][0]["direction"] = torch.zeros(7, 3)
    return state


def other_step(state: dict[str, Any]) -> dict[str, Any]:
    state["state"][0] = [1, 2]
    return state


def without_lr(state: dict[str, Any]) -> dict[str, Any]:
    del state["param_groups"][1]["lr"]
    return state


def bad_lr(state: dict[str, Any]) -> dict[str, Any]:
    state["param_groups"][2]["lr"] = -1.0
    return state


def fewer_blocks(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "param_groups": state["param_groups"][:2]}


def fewer_params(state: dict[str, Any]) -> dict[str, Any]:
    state["param_groups"][0]["params"] = [0]
    return state


def old_format(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "policies": {"damping": {"average": 1.0}}}


def loads(change: Callable[[dict[str, Any]], Any]) -> Callable[[], None]:
    """Loads a changed state, and looks whether anything has come of it."""

    def act() -> None:
        task = Task()
        optimizer = BlockHF.martens(blocks.by_layer(task.model))
        optimizer.step(task.objective, task.batch)
        changed = change(copy.deepcopy(optimizer.state_dict()))
        before = snapshot(task.model, optimizer)
        try:
            optimizer.load_state_dict(changed)
        finally:
            assert equal(snapshot(task.model, optimizer), before)

    return act


STATES: dict[str, Misuse] = {
    "the state of Adam": refused(
        "The saved state is not one of BlockHF, or of another version: block '0' has no cg_progress, "
        "cg_rtol, damping, max_cg_steps, slow_start, warm_start there",
        loads(adam),
    ),
    "the state of a wider model": refused(
        r"The parameters of block '0' have shapes \[\[7, 3\], \[7\]\] in the saved state, and "
        r"\[\[4, 3\], \[4\]\] in the optimizer: the model is another one",
        loads(wider),
    ),
    "a direction of a wider model": refused(
        r"direction of parameter 0 has shape \(7, 3\), and the parameter \(4, 3\): the model is another one",
        loads(other_widths),
    ),
    "a state that lacks an option": refused("block '2' has no lr there", loads(without_lr)),
    "a state with an option out of bounds": refused(
        "lr of block '4' is -1.0, but must be a number of at least 0", loads(bad_lr)
    ),
    "the state of fewer blocks": refused(
        "The saved state has 2 blocks, and the optimizer 3", loads(fewer_blocks)
    ),
    "the state of fewer parameters": refused(
        "Block '0' has 1 parameters in the saved state, and 2 in the optimizer", loads(fewer_params)
    ),
    "a list for a state": refused(
        "This is no state of an optimizer: it has no 'state' and 'param_groups'", loads(lambda state: [1])
    ),
    "a path for a state": refused("This is no state of an optimizer", loads(lambda state: "model.pt")),
    "the state of a model": refused(
        "This is no state of an optimizer", loads(lambda state: mlp().state_dict())
    ),
    "a state of version 0.1": refused(
        "The state of 'damping' was saved by blockhf 0.1.*Start the run anew", loads(old_format)
    ),
    "a state that is a list": refused("The saved state of parameter 0 is a list", loads(other_step)),
}

TABLE = {**CONSTRUCTIONS, **OPTIONS, **STATES}
