"""Which rank a process is, as the launcher that started it says in the environment.

Each launcher has its own four names for the same four numbers. A pure function; nothing is guessed: a variable that is
missing or is no number is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from runner.errors import ConfigError


@dataclass(frozen=True)
class Identity:
    """0 <= rank < world_size; 0 <= local_rank < local_world_size, among the ranks of the same host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "deepspeed": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}
"""Rank, world size, local rank and local world size, by launcher."""


def identity(launcher: str, environment: Mapping[str, str]) -> Identity:
    """Raises ConfigError for a process that `launcher` has not started."""
    names = VARIABLES[launcher]
    lacking = [name for name in names if not environment.get(name, "").isdigit()]
    if lacking:
        raise ConfigError(
            f"this process was to be started by {launcher}, but {', '.join(lacking)} "
            f"{'are' if len(lacking) > 1 else 'is'} not set to a number; start it with `run train launch={launcher}`."
        )
    return Identity(*(int(environment[name]) for name in names))
