"""Checks of what a user may set: settings of the optimizer, policies, options of a parameter group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from blockhf.blocks import check_block
from blockhf.curvature import Curvature, Products
from blockhf.linalg import Solver
from blockhf.policies import DampingRule, Sampling, Search, Walk
from blockhf.policy import Policy, PolicyState
from blockhf.preconditioners import Preconditioner

POLICIES: Mapping[str, type[Policy]] = {
    "curvature": Curvature,
    "products": Products,
    "damping": DampingRule,
    "search": Search,
    "solver": Solver,
    "preconditioner": Preconditioner,
    "sampling": Sampling,
    "walk": Walk,
}
"""The policies by the optimizer's names for them, and what each must be."""

PLAN = "plan"
"""The name under which the optimizer keeps what draws and warnings go by."""

SETTINGS = (
    "curvature_batch_size",
    "micro_batch_size",
    "population",
    "reduction",
    "measure_memory",
    "seed",
)
"""Settings of the optimizer that are numbers, words or flags."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise where a setting of the optimizer is out of bounds."""
    if settings["reduction"] not in ("mean", "sum") and not callable(settings["reduction"]):
        raise ValueError(
            f"reduction is {settings['reduction']!r}, but must be 'mean', 'sum', or a function from a batch "
            "to the total weight of its mean."
        )
    for name in ("curvature_batch_size", "micro_batch_size", "population"):
        value = settings[name]
        share = name == "curvature_batch_size" and isinstance(value, float) and 0 < value <= 1
        if value is not None and not share and (not _is_whole(value) or value < 1):
            shares = " a share between 0 and 1," if name == "curvature_batch_size" else ""
            raise ValueError(
                f"{name} is {value!r}, but must be a whole number of at least 1,{shares} or None."
            )
    if not _is_whole(settings["seed"]) or settings["seed"] < 0:
        raise ValueError(f"seed is {settings['seed']!r}, but must be a whole number of at least 0.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_policies(policies: Mapping[str, Any]) -> None:
    """Raise where a policy is something else, or where two do not fit together."""
    for name, policy in policies.items():
        kind = POLICIES[name]
        if isinstance(policy, type):
            raise ValueError(f"{name} is the class {policy.__name__}. Pass an object: {policy.__name__}().")
        if not isinstance(policy, kind):
            raise ValueError(
                f"{name} is {policy!r}, which is no {kind.__name__}. Derive it from {kind.__name__}."
            )
    damping, search = policies["damping"], policies["search"]
    if damping.needs_ratio and not search.evaluates:
        raise ValueError(
            f"{type(damping).__name__} needs the loss after each step, which {type(search).__name__} does "
            "not evaluate. Use FixedStep(evaluates=True) or Backtracking(), or a constant damping."
        )


def coupled_decay(group: Mapping[str, Any]) -> float:
    """The factor of a block's penalty, where its weight decay is part of the loss."""
    return 0.0 if group["decoupled_weight_decay"] else float(group["weight_decay"])


def check_group(block: str, options: Mapping[str, Any]) -> None:
    """Raise where an option of a parameter group is out of bounds."""

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

    demand("weight_decay", lambda decay: 0 <= float(decay) < math.inf, "a number of at least 0")
    demand("decoupled_weight_decay", lambda is_decoupled: isinstance(is_decoupled, bool), "True or False")


NEW_OPTIONS: Mapping[str, Any] = {"weight_decay": 0.0, "decoupled_weight_decay": False}
"""Options of a group that states of earlier versions do not have, and what stood for them."""


def with_new_options(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A saved state of this version or an earlier one, with the options that have come since."""
    return {**state_dict, "param_groups": [{**NEW_OPTIONS, **own} for own in state_dict["param_groups"]]}


def check_is_state(state_dict: Any) -> None:
    """Raise where something else is given for a saved state."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        raise ValueError("This is no state of an optimizer: it has no 'state' and 'param_groups'.")


def shapes(groups: Sequence[Mapping[str, Any]]) -> list[list[list[int]]]:
    """Those of the parameters, group by group: what tells the state of another model."""
    return [[list(param.shape) for param in group["params"]] for group in groups]


def check_state(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> None:
    """Raise where a saved state is not one of such groups, before anything is changed."""
    check_is_state(state_dict)
    saved = state_dict["param_groups"]
    if len(saved) != len(groups):
        raise ValueError(f"The saved state has {len(saved)} blocks, and the optimizer {len(groups)}.")
    params: dict[int, Tensor] = {}
    for group, own in zip(saved, groups, strict=True):
        # Torch adds defaults of its own when a state is loaded.
        if missing := sorted((set(defaults) & set(own)) - set(group)):
            raise ValueError(
                f"The saved state is not one of BlockHF, or of another version: block {own['name']!r} has no "
                f"{', '.join(missing)} there."
            )
        check_group(str(group.get("name", own["name"])), group)
        if len(group["params"]) != len(own["params"]):
            raise ValueError(
                f"Block {own['name']!r} has {len(group['params'])} parameters in the saved state, and "
                f"{len(own['params'])} in the optimizer."
            )
        params.update(zip(group["params"], own["params"], strict=True))
    known = state_dict.get("shapes") or shapes(groups)
    for own, kept, now in zip(groups, known, shapes(groups), strict=True):
        if kept != now:
            raise ValueError(
                f"The parameters of block {own['name']!r} have shapes {kept} in the saved state, and {now} "
                "in the optimizer: the model is another one."
            )
    for number, kept in state_dict["state"].items():
        if not isinstance(kept, Mapping):
            raise ValueError(
                f"The saved state of parameter {number} is a {type(kept).__name__}, and not a mapping: it "
                "was not saved by BlockHF."
            )
        direction, param = kept.get("direction"), params.get(int(number))
        if direction is not None and param is not None and direction.shape != param.shape:
            raise ValueError(
                f"The saved direction of parameter {number} has shape {tuple(direction.shape)}, and the "
                f"parameter {tuple(param.shape)}: the model is another one."
            )


def read_policies(state_dict: Mapping[str, Any]) -> dict[str, PolicyState]:
    """The policies' part of a saved state.

    Raises:
        ValueError: It was saved by a version that kept it otherwise.
    """
    found = {}
    for name, saved in state_dict.get("policies", {}).items():
        # Torch's distributed checkpoints leave out what is empty.
        if name not in (*POLICIES, PLAN) or not set(saved) <= {"shared", "blocks"}:
            raise ValueError(
                f"The state of {name!r} was saved by blockhf 0.1, which kept it in another form. Start the "
                "run anew, or finish it with that version."
            )
        found[name] = PolicyState.from_dict({"shared": {}, "blocks": {}, **saved})
    return found


def check_params(params: Any) -> None:
    """Raise where something else is given for the parameters."""
    if isinstance(params, nn.Module):
        raise TypeError(
            f"The first argument is a {type(params).__name__}, not its parameters. Pass "
            "blocks.by_module(model), blocks.by_layer(model), or model.parameters() for one block."
        )
    if isinstance(params, (set, frozenset)):
        raise TypeError(_NO_ORDER)


_NO_ORDER = "A set of parameters has no order in which to save their state. Give a list."


def check_new_group(param_group: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A parameter group with a list of parameters and a name of its own.

    Raises:
        ValueError: It cannot be a block beside the others.
    """
    if not isinstance(param_group, Mapping) or "params" not in param_group:
        raise ValueError(
            f"A block is a mapping with its parameters under 'params', and this is {param_group!r}. "
            "blocks.by_module(model) makes such groups."
        )
    group = dict(param_group)
    if isinstance(group["params"], (set, frozenset)):
        raise TypeError(_NO_ORDER)
    group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    name = group["name"] = str(group.get("name", f"block{len(others)}"))
    named = [
        item if isinstance(item, tuple) else (f"number {index}", item)
        for index, item in enumerate(group["params"])
    ]
    check_block(name, named)
    for other in others:
        if other["name"] == name:
            raise ValueError(f"Two blocks have the name {name!r}. Rename one.")
        taken = set(other["params"])
        for label, param in named:
            if param in taken:
                raise ValueError(
                    f"Parameter {label} is in two blocks, {other['name']!r} and {name!r}. "
                    "Leave it in one of them."
                )
    return group


_FROM_OTHERS = ("params", "name", "param_names", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""Keys of a group that torch and its schedulers put there."""


def check_known(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise where a group has an option that the optimizer would not look at."""
    if unknown := sorted(set(group) - {*defaults, *_FROM_OTHERS}):
        raise ValueError(
            f"Block {group['name']!r} has the option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)}, "
            f"which BlockHF does not have. A group may have {', '.join(defaults)}."
        )


def describe_groups(groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Blocks, their parameters and their options, as something to compare."""
    found: dict[str, Any] = {"the blocks": [group["name"] for group in groups]}
    for group in groups:
        kinds = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in group["params"]]
        found[f"the parameters of block {group['name']!r}"] = kinds
        found |= {f"{name} of block {group['name']!r}": group.get(name) for name in defaults}
    return found
