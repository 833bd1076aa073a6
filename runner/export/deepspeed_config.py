"""A plan as the config of DeepSpeed: ZeRO over the ranks that share a slice, and AutoTP's rules for linear layers.

AutoTP slices the linear layers that its patterns name, by columns or by rows. What its users sum or gather itself, such
as a table in slices of the vocabulary, stays replicated. Source: deepspeed.module_inject.autotp_config.
"""

from __future__ import annotations

import json
import re
from typing import Any

from runner.export.changes import Change, of_optimizer
from runner.export.tensor_parallel import of_rows, of_styles, styles_of
from runner.planning.prepare import Prepared
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.planner.module_styles import AUTOTP, axes_of

SPECS: dict[str, dict[str, Any]] = {
    "colwise": {"partition_type": "column"},
    "colwise_gather_output": {"partition_type": "column", "gather_output": True},
    "rowwise": {"partition_type": "row"},
    "replicate": {"partition_type": "skip"},
    "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
}
"""AutoTP's words for the styles of transformers that it has."""
PRECISION: dict[str, dict[str, Any]] = {
    "bf16": {"enabled": True},
    "fp16": {"enabled": True},
    "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
}
"""Its sections for `train.precision`; without one it trains in the dtype of the module."""


def changes(prepared: Prepared) -> list[Change]:
    """What DeepSpeed lays out otherwise. It broadcasts parameters as bytes, which torch refuses where there are no
    dims."""
    assert prepared.graph is not None and prepared.plan is not None
    copies = prepared.plan.mesh.others(axes_of(prepared.plan))
    scalars = [
        Change("parameter", source.name, "a number without dims", "an error of DeepSpeed; give it one dim", 0, 0.0)
        for source in prepared.graph.of_kind("parameter")
        if not source.spec.shape
    ]
    return [*scalars, *of_styles(prepared, AUTOTP), *of_rows(prepared), *of_optimizer(prepared, {0, 1, 2, 3}, copies)]


def config(prepared: Prepared, title: str) -> str:
    """The JSON of a config of DeepSpeed, for `deepspeed.initialize(config=...)`."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    axes, train = axes_of(plan), prepared.config.train
    rows = prepared.config.data.batch_size // train.accumulate
    copies = plan.mesh.size // plan.mesh.product(axes)
    content: dict[str, Any] = {
        "_comment": f"{title}, by Meshwright",
        "train_micro_batch_size_per_gpu": rows // copies,
        "gradient_accumulation_steps": train.accumulate,
        "gradient_clipping": train.clip or 0.0,  # left out, it would be 1.0
        "zero_optimization": {"stage": prepared.config.parallel.zero.known},
        "zero_allow_untested_optimizer": True,  # any that works by element
    }
    section = "torch_autocast" if train.precision == "bf16_autocast" else train.precision
    if section in PRECISION:
        scale = {"loss_scale": train.loss_scale} if train.loss_scale else {}  # dynamic without
        content[section] = PRECISION[section] | (scale if section == "fp16" else {})
    if axes:
        content["tensor_parallel"] = {
            "autotp_size": plan.mesh.product(axes),
            "partition_config": {"use_default_specs": False, "layer_specs": _specs(graph, plan)},
        }
    return json.dumps(content, indent=2) + "\n"


def _specs(graph: OperatorGraph, plan: Plan) -> list[dict[str, Any]]:
    """AutoTP's rules: the patterns of all modules of one style share a rule."""
    patterns: dict[str, list[str]] = {}
    for key, style in styles_of(graph, plan, AUTOTP, axes_of(plan)).items():
        name = r"\d+".join(map(re.escape, key.split("*")))
        patterns.setdefault(style, []).append(rf"{name}\.weight$")
    return [{"patterns": names, **SPECS[style]} for style, names in patterns.items()]
