"""The state of a torch optimizer by parameter name, so that it can be loaded under a plan that groups and shards
parameters differently.

Invariant: a state tensor of a parameter's shape is a `Shard`; all else, numbers and options, is `OptimizerScalars` and
the same on all ranks that hold the parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from strategies.core.errors import StrategyError
from strategies.optimizer.kernels import CHOICES, counts_on_device

OWN = frozenset({"params", "name", "names", "moe"})
"""Entries of a group that depend on the plan."""


@dataclass
class OptimizerScalars:
    """`groups`: per parameter group its options and under "names" its parameters; `scalars`: numbers by parameter and
    state; `loss_scale` where there is one. Plain data and tensors of one element."""

    groups: list[dict[str, Any]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    loss_scale: dict[str, Any] | None = None

    def find(self, names: Sequence[str]) -> dict[str, Any] | None:
        """The group that holds one of `names`, or the only one: checkpoints before 2026-12 may name some of its
        parameters alone, those of a stage. None without groups, or without names, of which a stage may have none.

        Raises StrategyError where no group of several holds them.
        """
        wanted = set(names)
        found = next((group for group in self.groups if wanted & set(group["names"])), None)
        if found is None and wanted and self.groups:
            if len(self.groups) > 1:
                raise StrategyError(
                    "MW607",
                    f"The checkpoint has no options of the optimizer for {min(wanted)}: none of its "
                    f"{len(self.groups)} parameter groups names it. Resume from another one, or begin with the weights "
                    "alone (model.weights).",
                )
            (found,) = self.groups
        return found


@dataclass(frozen=True)
class StoredState:
    """What a checkpoint has of one optimizer state of one parameter: shape, and whether it is in the dtype of the
    stored weights."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    like_weights: bool


States = Mapping[str, Mapping[str, StoredState]]
"""By state and parameter."""


def is_scalar(value: Any, holder: Tensor) -> bool:
    """Whether a state of the parameter, or flat tensor, `holder` is no tensor over its elements."""
    return not isinstance(value, Tensor) or value.dim() == 0 or (value.numel() == 1 and value.shape != holder.shape)


def is_of_element(state: str, value: Any) -> bool:
    """Whether a state of a parameter of shape () may belong to its one element: whatever is no counter of steps."""
    return isinstance(value, Tensor) and not value.dim() and state != "step"


def groups_of(optimizer: Optimizer, members: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """`OptimizerScalars.groups` of an optimizer whose groups have the given members."""
    return [
        {"names": list(names)} | {key: value for key, value in group.items() if key not in OWN}
        for group, names in zip(optimizer.param_groups, members, strict=True)
    ]


def set_groups(optimizer: Optimizer, members: Sequence[Sequence[str]], plain: OptimizerScalars) -> None:
    """Take over the options, by name, also those that a step adds to its group, such as the number of steps."""
    for group, names in zip(optimizer.param_groups, members, strict=True):
        for key, value in (plain.find(names) or {}).items():
            if key not in OWN | CHOICES:
                group[key] = copy.deepcopy(value)


def check_goes_on(optimizer: Optimizer) -> None:
    """Raises StrategyError for an optimizer, a new one, that keeps something beside states of parameters and groups."""
    beside: set[Any] = optimizer.state_dict().keys() - {"state", "param_groups"}
    beside |= {key for key in optimizer.state if not isinstance(key, Tensor)}
    if beside:
        raise StrategyError(
            "MW609",
            f"{type(optimizer).__name__} keeps {', '.join(sorted(map(str, beside)))} beside the states of parameters, "
            "which no checkpoint holds, so no run can go on with it. Keep it in the state of parameters or in "
            "`param_groups`, or begin with the weights alone (model.weights).",
        )


def check_states(optimizer: Optimizer) -> None:
    """Raises StrategyError where tensors are in containers of the states that an optimizer has after a step."""
    for state in optimizer.state.values():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if not isinstance(value, Tensor) and any(isinstance(one, Tensor) for one in tree_leaves(value)):
                raise StrategyError(
                    "MW609",
                    f"{type(optimizer).__name__} keeps tensors in a {type(value).__name__}, {key!r} of its states, so "
                    "it is not known to which elements of a sliced parameter they belong. Keep each as its own state, "
                    "use an elementwise optimizer such as torch.optim.AdamW, or parallel=data_parallel with "
                    "parallel.zero.stage=0.",
                )


def check_shape(optimizer: Optimizer, state: str, value: Tensor, name: str, known: bool) -> None:
    """Raises StrategyError where it is not known to which elements of the parameter `name` a state belongs."""
    if not known:
        raise StrategyError(
            "MW609",
            f"{type(optimizer).__name__} keeps {state!r} of shape {tuple(value.shape)} for slices of {name}; "
            "no complete state can be made from that, so no checkpoint can hold it. Use an elementwise optimizer such "
            "as torch.optim.AdamW, or a plan that does not slice parameters.",
        )


def placed(key: str, value: Any, holder: Tensor, group: Mapping[str, Any]) -> Any:
    """A copy of a saved scalar (several parameters may share it) beside the tensor that it belongs to; counters are
    where the kernels of its `group` read them."""
    if not isinstance(value, Tensor):
        return value
    beside = value.dim() or (not holder.dim() and is_of_element(key, value)) or counts_on_device(group)
    return value.to(holder.device if beside else "cpu", copy=True)
