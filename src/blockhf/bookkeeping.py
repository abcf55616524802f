"""What an optimizer in blocks keeps: groups, policies, their state, and how all of it is saved and loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from blockhf.blocks import Block
from blockhf.isolation import Restored
from blockhf.ledger import Ledger
from blockhf.meshes import Distributed, Local, Mesh
from blockhf.options import (
    PLAN,
    POLICIES,
    SETTINGS,
    check_group,
    check_is_state,
    check_known,
    check_new_group,
    check_params,
    check_policies,
    check_settings,
    check_state,
    coupled_decay,
    describe_groups,
    read_policies,
    shapes,
    with_new_options,
)
from blockhf.policy import Policy, PolicyState
from blockhf.report import StepReport
from blockhf.samples import Structures

OWNED = ("solver", "preconditioner")
"""Policies whose state of a block only the ranks that solve the block keep."""


class BlockOptimizer(Optimizer):
    """An optimizer whose parameter groups are blocks and whose choices are policies.

    A subclass sets the attributes that ``options.POLICIES`` and ``options.SETTINGS`` name, checks them and
    calls this constructor; and it makes the steps.

    Args:
        params: The groups.
        defaults: Options of a group and their values.
        mesh: Ranks that share the work, if there are several.
    """

    report: StepReport | None
    """What the last step did."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], mesh: DeviceMesh | None) -> None:
        self.report = None
        self.ledger = Ledger()
        self.policy_state = {name: PolicyState() for name in (*POLICIES, PLAN)}
        self.mesh: Mesh = Local() if mesh is None else Distributed(mesh)
        self.structures = Structures()
        check_params(params)
        super().__init__(params, defaults)
        params = [param for group in self.param_groups for param in group["params"]]
        self.mesh.join(self._description(), params)

    def check(self) -> None:
        """Raise where a setting is out of bounds or a policy does not fit."""
        check_settings(self._settings())
        check_policies(self._policies())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a block."""
        group = check_new_group(param_group, self.param_groups)
        check_known(group, self.defaults)
        check_group(group["name"], {**self.defaults, **group})
        super().add_param_group(group)
        self.mesh.place(group["name"], self.param_groups[-1]["params"])

    def state_dict(self) -> dict[str, Any]:
        """As with any optimizer, and what the policies have learned under ``"policies"``.

        On a mesh all ranks have to call it; each gets the state of all blocks, which loads anywhere.
        """
        state = self.own_state()
        return state | self.mesh.gather_state({name: state[name] for name in ("state", "policies")})

    def own_state(self) -> dict[str, Any]:
        """What this process keeps of ``state_dict()``; no other process is asked."""
        state = super().state_dict()
        state["policies"] = {name: own.to_dict() for name, own in self.policy_state.items()}
        state["shapes"] = shapes(self.param_groups)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, after which the next step is the one that the saved optimizer would have made."""
        check_is_state(state_dict)
        policies: dict[str, PolicyState] = {}

        def check(_: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            state = with_new_options(state)
            check_state(state, self.param_groups, self.defaults)
            policies.update(read_policies(state))
            # Torch's distributed checkpoints turn the parameters' numbers into words.
            return {**state, "state": {int(key): value for key, value in state["state"].items()}}

        # Between the hooks of others: those before may mend a state, and those after see all of it.
        handles = (
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(lambda _: self._load_policies(policies), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _load_policies(self, policies: Mapping[str, PolicyState]) -> None:
        foreign = [group for group in self.param_groups if not self.mesh.owns(group["name"])]
        for group in foreign:
            for param in group["params"]:
                if param in self.state:
                    self.state[param].pop("direction", None)
        self.policy_state.update({name: policies.get(name, PolicyState()) for name in (*POLICIES, PLAN)})
        for name in OWNED:
            for group in foreign:
                self.policy_state[name].blocks.pop(group["name"], None)

    def __getstate__(self) -> dict[str, Any]:
        # Counts, structures and caches are made again.
        states = {name: PolicyState.from_dict(own.to_dict()) for name, own in self.policy_state.items()}
        made_again = {"ledger": Ledger(), "structures": Structures(), "policy_state": states}
        own = {**self._policies(), **self._settings(), "report": self.report, "mesh": self.mesh}
        own |= {name: vars(self)[name] for name in ("given", "_replaced") if name in vars(self)}
        return {**super().__getstate__(), **own, **made_again}

    def _transaction(self, blocks: Sequence[Block]) -> Restored:
        """A context that an exception leaves with all as it was before."""
        policies = {name: own.outline() for name, own in self.policy_state.items()}
        states = {param: dict(own) for param, own in self.state.items()}
        dampings = [group["damping"] for group in self.param_groups]
        gradients = [(param, param.grad) for block in blocks for param in block.params]
        report = self.report

        def put_back() -> None:
            self.policy_state, self.report = policies, report
            self.state.clear()
            self.state.update(states)
            for group, damping in zip(self.param_groups, dampings, strict=True):
                group["damping"] = damping
            for param, gradient in gradients:
                param.grad = gradient

        return Restored(blocks, put_back)

    def _policies(self) -> dict[str, Policy]:
        return {name: vars(self)[name] for name in POLICIES}

    def _settings(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in SETTINGS}

    def _description(self) -> dict[str, Any]:
        """What must be the same on all ranks."""
        described = {name: policy.describe() for name, policy in self._policies().items()}
        # Functions are not compared: each rank has its own.
        settings = {name: "a function" if callable(own) else own for name, own in self._settings().items()}
        return {**describe_groups(self.param_groups, self.defaults), **settings, **described}

    def _blocks(self) -> list[Block]:
        blocks = []
        for group in self.param_groups:
            if trainable := tuple(param for param in group["params"] if param.requires_grad):
                blocks.append(Block(group["name"], trainable))
        if not blocks:
            raise ValueError("Every parameter is frozen. Thaw some with requires_grad_(True).")
        return blocks

    def _weight_decay(self) -> dict[str, float]:
        """The factors of the penalties in the loss, by block."""
        return {group["name"]: coupled_decay(group) for group in self.param_groups}

    def _updates(self, param: Tensor) -> int:
        return int(self.state[param]["step"]) if param in self.state else 0

    def _start(self, group: dict[str, Any], block: Block) -> Tensor | None:
        last = [self.state.get(param, {}).get("direction") for param in block.params]
        if group["warm_start"] == 0 or all(direction is None for direction in last):
            return None
        last = [own if own is None else own.to(like) for own, like in zip(last, block.params, strict=True)]
        return block.flatten(last).mul_(group["warm_start"])

    def _max_steps(self, group: dict[str, Any], block: Block) -> int:
        if group["slow_start"] is not None:
            num_updates, max_cg_steps = group["slow_start"]
            if self._updates(block.params[0]) < num_updates:
                return int(min(max_cg_steps, group["max_cg_steps"]))
        return int(group["max_cg_steps"])
