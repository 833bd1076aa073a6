"""The device to run on, and how many ranks. torch is imported where there may be GPUs alone."""

from __future__ import annotations

from runner.config.schema import Config
from runner.errors import ConfigError

DESCRIBING = ("plan", "explain")
"""Jobs that run nothing."""


def device_of(config: Config) -> tuple[str, int]:
    """The device to run on, and how many ranks. Raises ConfigError for too few GPUs."""
    machine = config.cluster.machine
    if machine is not None and config.world_size is None and config.job.name in DESCRIBING:
        return "cpu", 1 if config.parallel.mode == "stand_alone" else machine.devices  # only described
    gpus = 0 if config.device == "cpu" else _gpus()
    alone = config.parallel.mode == "stand_alone"
    wanted = 1 if alone else config.world_size
    if config.launch.hosts:  # this machine has a part of the ranks
        wanted = max(len(host.ranks) for host in config.launch.hosts)
    if config.device == "cuda" or (config.device == "auto" and gpus >= (wanted or 1)):
        if gpus < (wanted or 1):
            raise ConfigError(
                "MW801",
                f"device = cuda needs {wanted or 1} GPUs (world_size), but this machine has {gpus}; set "
                f"world_size={max(gpus, 1)} or device=cpu.",
            )
        return "cuda", config.launch.ranks or wanted or gpus
    return "cpu", config.launch.ranks or wanted or 8


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
