"""What `parallel.offload` asks for, in the engine's terms."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from runner.config.schema import Config
from runner.errors import ConfigError
from strategies.core.addressing import means_module
from strategies.core.errors import closest
from strategies.runtime.offload import Offload


def offload_of(config: Config, folder: Path | None) -> Offload:
    """What the config asks for, in the engine's terms; `folder` is that of `runner.launch.temporary_folder`."""
    wanted = config.parallel.offload
    larger_than = int(wanted.activations.larger_than * 1e6)
    return Offload(
        wanted.optimizer, wanted.parameters, wanted.activations.to, wanted.activations.modules, larger_than, folder
    )


def check_modules(config: Config, model: nn.Module) -> None:
    """Raises ConfigError for a glob that matches no module."""
    names = [name for name, _ in model.named_modules() if name]
    for glob in config.parallel.offload.activations.modules:
        if not any(means_module(glob, name) for name in names):
            raise ConfigError(
                "MW211",
                f"parallel.offload.activations.modules: {glob!r} matches no module of the model.{closest(glob, names)}",
            )
