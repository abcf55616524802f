"""Checks of what a user may set: settings of the optimizer, policies, options of a parameter group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from blockhf.blocks import check_block
from blockhf.curvature import Curvature, Products
from blockhf.linalg import Solver
from blockhf.policies import DampingRule, Sampling, Search
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
}
"""The policies by the optimizer's names for them, and what each must be."""

SETTINGS = ("curvature_batch_size", "micro_batch_size", "population", "reduction", "measure_memory")
"""Settings of the optimizer that are numbers, words or flags."""


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise where a setting of the optimizer is out of bounds."""
    if settings["reduction"] not in ("mean", "sum"):
        raise ValueError(f"reduction is {settings['reduction']!r}, but must be 'mean' or 'sum'.")
    for name in ("curvature_batch_size", "micro_batch_size", "population"):
        value = settings[name]
        share = name == "curvature_batch_size" and isinstance(value, float) and 0 < value <= 1
        if value is not None and not share and (not isinstance(value, int) or value < 1):
            shares = " a share between 0 and 1," if name == "curvature_batch_size" else ""
            raise ValueError(
                f"{name} is {value!r}, but must be a whole number of at least 1,{shares} or None."
            )


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


def read_policies(state_dict: Mapping[str, Any]) -> dict[str, PolicyState]:
    """The policies' part of a saved state.

    Raises:
        ValueError: It was saved by a version that kept it otherwise.
    """
    found = {}
    for name, saved in state_dict.get("policies", {}).items():
        if name not in POLICIES or set(saved) != {"shared", "blocks"}:
            raise ValueError(
                f"The state of {name!r} was saved by blockhf 0.1, which kept it in another form. Start the "
                "run anew, or finish it with that version."
            )
        found[name] = PolicyState.from_dict(saved)
    return found


def check_new_group(param_group: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A parameter group with a list of parameters and a name of its own.

    Raises:
        ValueError: It cannot be a block beside the others.
    """
    group = dict(param_group)
    if isinstance(group["params"], set):
        raise TypeError("A set of parameters has no order in which to save their state. Give a list.")
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


def describe_groups(groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Blocks, their parameters and their options, as something to compare."""
    found: dict[str, Any] = {"the blocks": [group["name"] for group in groups]}
    for group in groups:
        kinds = [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in group["params"]]
        found[f"the parameters of block {group['name']!r}"] = kinds
        found |= {f"{name} of block {group['name']!r}": group.get(name) for name in defaults}
    return found
