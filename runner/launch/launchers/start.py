"""From a config to what its launcher starts: described for a dry run, or started and watched."""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.config.launch import Launch
from runner.errors import ConfigError
from runner.launch.launchers import network
from runner.launch.launchers.commands import Place, Started, exported
from runner.launch.launchers.connection import PAYLOAD_FILE, Task, new_secret, silence_of
from runner.launch.launchers.deepspeed import deepspeed
from runner.launch.launchers.host_assignment import address_of, meeting
from runner.launch.launchers.mpirun import mpirun
from runner.launch.launchers.rank_table import rank_table
from runner.launch.launchers.rendezvous import Front
from runner.launch.launchers.slurm import slurm
from runner.launch.launchers.supervisor import supervise
from runner.launch.launchers.torchrun import torchrun
from runner.training.offload_folder import own_folder

LAUNCHERS: dict[str, Callable[[Launch, Place], Started]] = {
    "torchrun": torchrun,
    "mpirun": mpirun,
    "slurm": slurm,
    "deepspeed": deepspeed,
    "rank_table": rank_table,
}
NEEDS = {
    "mpirun": ("mpirun", "apt-get install openmpi-bin, or your site's module"),
    "slurm": ("srun", "it belongs to Slurm; start on a machine of the cluster"),
    "deepspeed": ("pdsh", "apt-get install pdsh, or launch.options=[--launcher,openmpi]"),
}
"""The program that a launcher is, or uses, and where it comes from."""


def check(launch: Launch) -> None:
    """Raise ConfigError for what would keep `launch` from starting: a missing program, a host that has no address."""
    program, source = NEEDS.get(launch.launcher, ("", ""))
    several = len(launch.hosts) > 1
    if launch.launcher == "deepspeed" and (not several or "--launcher" in launch.options):
        program = ""
    if program and shutil.which(program) is None:
        raise ConfigError(f"launch = {launch.launcher!r} needs the program {program}, which is not here: {source}.")
    elsewhere = [host.name for host in launch.hosts if not network.is_here(network.resolve(host.name))]
    uses_remote = launch.launcher in ("torchrun", "mpirun", "rank_table") and not launch.by_hand
    if elsewhere and uses_remote and launch.remote and shutil.which(launch.remote[0]) is None:
        raise ConfigError(
            f"launch.remote = {list(launch.remote)}: the program {launch.remote[0]}, which is to reach "
            f"{', '.join(elsewhere)}, is not here; name another, or launch.remote=[] to start the commands yourself."
        )
    if not launch.by_hand:
        address_of(launch)


def described(
    launch: Launch, world_size: int, folder: Path, meeting: tuple[str, int], overrides: tuple[str, ...] = ()
) -> Started:
    """What `launch` starts for ranks that are told what they need in `folder`. Nothing is written, started or asked."""
    place = Place(
        folder,
        world_size,
        *meeting,
        sys.executable,
        Path.cwd(),
        exported(launch.export),
        overrides,
    )
    return LAUNCHERS[launch.launcher](launch, place)


def started(
    entry: str, payload: object, launch: Launch, *, world_size: int, run_dir: Path, device: str, stoppable: bool
) -> Any:
    """Call `entry` in `world_size` ranks that a launcher starts; return what it returns in rank 0.

    The arguments are those of `runner.launch.run_ranks`, and so is what is raised.
    """
    run_dir, address, silence = run_dir.absolute(), address_of(launch), silence_of(launch.timeout)
    with own_folder(run_dir, "join") as folder, network.listener(address) as listener:
        seats = seats_of(launch) if launch.launcher == "rank_table" else ()
        with (folder / PAYLOAD_FILE).open("wb") as file:
            pickle.dump(payload, file, protocol=pickle.HIGHEST_PROTOCOL)
        front = Front(listener, new_secret(folder), silence)
        Task(
            address,
            listener.getsockname()[1],
            entry,
            world_size,
            str(run_dir),
            device,
            launch.timeout,
            launch.threads,
            launch.launcher,
            seats,
        ).write(folder)
        plan = described(launch, world_size, folder, meeting(launch))
        for name, content in plan.files.items():
            (folder / name).write_text(content, encoding="utf-8")
        return supervise(
            plan,
            front,
            world_size=world_size,
            names=frozenset(host.name for host in launch.hosts),
            placed=[seat[0] for seat in seats],
            here=frozenset(host.name for host in launch.hosts if network.is_here(network.resolve(host.name))),
            remote=launch.remote,
            directory=Path.cwd(),
            run_dir=run_dir,
            launcher=launch.launcher,
            timeout=launch.timeout,
            stoppable=stoppable,
        )


def seats_of(launch: Launch) -> tuple[tuple[str, int, int, int], ...]:
    """Per rank: its host, its local rank, how many ranks are there, its device."""
    found = {
        rank: (host.name, local, len(host.ranks), device)
        for host in launch.hosts
        for local, (rank, device) in enumerate(zip(host.ranks, host.devices, strict=True))
    }
    return tuple(found[rank] for rank in sorted(found))
