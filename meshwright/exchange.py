"""Plans that others made, as plans here: priced, proven, explained, and compared with the best one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.plans import Batch, Loss, Plan, config_of, planned
from runner.commands.diff import differences
from runner.config.load import validated
from runner.config.origins import Origins
from runner.data.loader import flatten_batch
from runner.errors import ConfigError
from runner.export import tensor_parallel
from strategies.core.graph import OperatorGraph
from strategies.core.mesh import Mesh
from strategies.planner.declared_layouts import Declared, declared_plan

AXIS = "tp"


def from_tp_plan(
    tp_plan: Mapping[str, Any] | str,
    module: nn.Module,
    batch: Batch,
    *,
    mesh: int | Mapping[str, int],
    loss: Loss | None = None,
    **options: Any,
) -> Plan:
    """Read a plan by module: `tp_plan` of transformers, or the `parallelize_plan` of torch's `parallelize_module`.

    Args:
        tp_plan: {glob of modules or parameters: name of a style of transformers, or style of torch}; `auto`: that of
            the module, a model of transformers.
        module, batch, loss: as for `meshwright.plan`.
        mesh: the number of ranks that share every module; or {axis: size} with the axis `tp` for them, whose other axes
            slice the batch.
        **options: `cluster`, `optimizer`, `seed`, `device`, `zero`, and further keys of the section `parallel`.

    Returns:
        The plan. What the entries leave open follows from what is computed: operators take values as they come, and
        modules without an entry are replicated.

    Raises:
        ConfigError, StrategyError: a style without a layout here, an entry that matches nothing, or a mesh without the
            axis.
    """
    if tp_plan == "auto":
        tp_plan = dict(getattr(module, "tp_plan", None) or {})
    if not isinstance(tp_plan, Mapping) or not tp_plan:
        raise ConfigError(
            "MW882",
            "meshwright.from_tp_plan: there is no plan to read; give a dict such as "
            '{"layers.*.attention.q_proj": "colwise"}, or "auto" with a model of transformers that has a tp_plan.',
        )
    axes = {AXIS: mesh} if isinstance(mesh, int) else dict(mesh)
    if AXIS not in axes:
        raise ConfigError(
            "MW882",
            f"meshwright.from_tp_plan: the mesh {axes} has no axis {AXIS!r}, the one that styles slice modules over; "
            f"name it so.",
        )
    given = tp_plan

    def layouts(graph: OperatorGraph) -> Declared:
        return tensor_parallel.declared(
            given, graph, Mesh(tuple(axes.items())), (AXIS,), [name for name, _ in module.named_modules()]
        )

    return _declared(layouts, module, batch, axes, loss, options)


def _declared(
    layouts: Callable[[OperatorGraph], Declared],
    module: nn.Module,
    batch: Batch,
    axes: Mapping[str, int],
    loss: Loss | None,
    options: Mapping[str, Any],
) -> Plan:
    names, tensors = flatten_batch(batch)
    known = {"cluster": None, "optimizer": torch.optim.AdamW, "seed": 0, "device": "auto"}
    given = {name: options.get(name, value) for name, value in known.items()}
    parallel = {name: value for name, value in options.items() if name not in known}
    config = config_of(module, tensors, loss, axes, parallel=parallel, **given)
    return planned(config, module, names, tensors, loss, lambda graph: declared_plan(graph, layouts(graph)))


@dataclass(frozen=True)
class Excess:
    """A plan beside another of the same step; printed, what differs.

    Attributes:
        plan, other: the two plans.
    """

    plan: Plan
    other: Plan

    @property
    def share(self) -> float:
        """By how much a step of the plan takes longer than one of the other: 0.04 is 4 %."""
        return self.plan.cost / self.other.cost - 1

    def __str__(self) -> str:
        headline = f"the plan takes {abs(self.share):.1%} {'longer' if self.share >= 0 else 'less'} than the other"
        return f"{headline}\n{differences(self.plan.content, self.other.content)}"


def compare(plan: Plan, other: Plan | None = None) -> Excess:
    """Compare the layouts, seconds and bytes of two plans of one module.

    Args:
        plan: of `plan`, of one of the functions that read plans, or of `load` with a module.
        other: None: the best plan of the same step on as many ranks, which is searched, with its certificate.
    """
    return Excess(plan, best(plan) if other is None else other)


def best(plan: Plan) -> Plan:
    """The best plan of the step of another plan, on as many ranks in any mesh, with the same stage of ZeRO and the same
    recomputation; searched exactly, with a certificate."""
    own = plan.planned("best")
    content = own.prepared.config.model_dump(mode="json")
    content["parallel"] |= {"mesh": None, "plan": None, "strategies": {}, "set_data_parallel": [], "layouts": {}}
    content["parallel"] |= {"dataset_strategy": "data_parallel", "search": "dynamic_programming", "memory_limit": None}
    config, names = validated(content, Origins()), own.prepared.names
    return planned(config, own.objective.model, names, own.batch, own.loss)
