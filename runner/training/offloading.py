"""`parallel.offload` on a rank: the modules whose kept tensors are meant, and what was moved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from runner.config.schema import Config
from runner.errors import ConfigError
from strategies.core.addressing import inside
from strategies.core.errors import closest
from strategies.runtime.activation_offload import Activations, meant
from strategies.runtime.disk import Disk
from strategies.runtime.offload import Moved, Offload


def offload_of(config: Config, folder: Path | None) -> Offload:
    """What the config asks for, in the engine's terms; `folder` is that of `runner.training.offload_folder`."""
    wanted = config.parallel.offload
    larger_than = int(wanted.activations.larger_than * 1e6)
    return Offload(
        wanted.optimizer, wanted.parameters, wanted.activations.to, wanted.activations.modules, larger_than, folder
    )


def activations(module: nn.Module, offload: Offload, device: str) -> Activations | None:
    """Take away what `module` keeps for backward as `offload` says. The counts are in what is returned."""
    if offload.activations == "none":
        return None
    disk = Disk(offload.place) if offload.activations == "disk" else None
    found = Activations(torch.device(device), offload.larger_than, disk)
    staying: list[Tensor] = [*module.parameters(), *module.buffers()]
    found.attach(meant(module, offload.modules), staying)
    return found


def check_modules(config: Config, model: nn.Module) -> None:
    """Raises ConfigError for a glob that means no module."""
    names = [name for name, _ in model.named_modules() if name]
    for glob in config.parallel.offload.activations.modules:
        if not any(inside(glob, name) for name in names):
            raise ConfigError(
                f"parallel.offload.activations.modules: {glob!r} matches no module of the model.{closest(glob, names)}"
            )


def change(before: Mapping[str, Moved], after: Mapping[str, Moved]) -> dict[str, int]:
    """Bytes of one step, under the names that metrics.jsonl uses; `held` is a state, not a change."""
    found: dict[str, int] = {}
    for kind, now in after.items():
        then = before.get(kind, Moved())
        found |= {f"{kind}_out": now.out - then.out, f"{kind}_back": now.back - then.back, f"{kind}_held": now.held}
    return found


def told(moved: Mapping[str, Moved], offload: Offload) -> str:
    """One line for the end of a run: what rank 0 moved."""
    parts = []
    for kind, one in moved.items():
        what = "placed operators, host" if kind == "place" else f"{kind} to {getattr(offload, kind)}"
        parts.append(f"{what}: {one.out:,} bytes out, {one.back:,} back")
        if one.held:
            parts[-1] += f", at most {one.held:,} there"
    return "offload (rank 0): " + "; ".join(parts)
