"""The targets of an export: how each one is written, and what it cannot say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runner.errors import ConfigError, allowed
from runner.export import (
    autoparallel_placements,
    deepspeed_config,
    tensor_parallel,
    torch_program,
    torch_styles,
    torchtitan_config,
)
from runner.export.changes import Change
from runner.planning.prepare import Prepared


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        file: the name of its file in a run folder.
        changes: what it lays out otherwise than a plan.
        text: the content of the file, with a title.
    """

    file: str
    changes: Callable[[Prepared], list[Change]]
    text: Callable[[Prepared, str], str]


TARGETS = {
    "torch": Target("parallel_torch.py", torch_program.changes, torch_program.program),
    "parallelize_module": Target("parallelize_module.py", torch_styles.changes, torch_styles.program),
    "deepspeed": Target("deepspeed.json", deepspeed_config.changes, deepspeed_config.config),
    "torchtitan": Target("torchtitan_sharding.py", torchtitan_config.changes, torchtitan_config.config),
    "autoparallel": Target("placements.json", torch_program.changes, autoparallel_placements.content),
    "transformers": Target("distributed_config.json", tensor_parallel.changes, tensor_parallel.distributed_config),
}


def target_of(name: str) -> Target:
    """Raises ConfigError for a name that is none."""
    if not isinstance(name, str) or name not in TARGETS:
        raise ConfigError("MW466", f"There is no target {name!r} of an export.{allowed(str(name), TARGETS)}")
    return TARGETS[name]


def exported(name: str, prepared: Prepared, title: str, *, allow_changes: bool = False) -> str:
    """The content of the file. Raises ConfigError for a plan that the target cannot say, unless with
    `allow_changes`."""
    target = target_of(name)
    found = target.changes(prepared)
    if found and not allow_changes:
        shown = "; ".join(map(str, found[:3])) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
        raise ConfigError(
            "MW465",
            f"The target {name} would make {len(found)} changes to the plan: {shown}. Export with "
            "allow_changes=True (export.allow_changes=true in a command), or plan without them.",
        )
    return target.text(prepared, title)
