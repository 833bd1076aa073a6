"""From a config to running ranks, with one import of torch per machine.

Importing torch and its exporter costs more than everything else before the first step. So the fork server does it once;
a fork of it builds, captures and plans, local ranks are forks of it, and the parent, which talks to the user, never
imports torch at all. Processes of other launchers are described for a dry run, or started and monitored.
"""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import launch as local
from runner.config.launch import Launch
from runner.config.schema import Config
from runner.errors import ConfigError
from runner.launch import network
from runner.launch.launchers.commands import LaunchSite, Started, exported
from runner.launch.launchers.connection import PAYLOAD_FILE, Front, Task, new_secret, silence_of
from runner.launch.launchers.deepspeed import deepspeed
from runner.launch.launchers.host_assignment import address_of, meeting, part_by_hand, seats_of
from runner.launch.launchers.mpirun import mpirun
from runner.launch.launchers.rank_table import rank_table
from runner.launch.launchers.slurm import slurm
from runner.launch.launchers.supervisor import supervise
from runner.launch.launchers.torchrun import torchrun
from runner.launch.temporary_folder import own_folder

LAUNCHERS: dict[str, Callable[[Launch, LaunchSite], Started]] = {
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


@dataclass(frozen=True)
class Ready:
    """The result of `entries.prepare_alone`: the ranks to start, the pickled `Prepared` for them, the checkpoint to
    continue, and the run and step of it and of those that it continued."""

    world_size: int
    device: str
    prepared: bytes
    resume: str | None
    ancestry: tuple[tuple[str, int], ...]


def make_ready(config: Config, run_dir: Path, folder: Path) -> Ready:
    """Prepare in a process of the fork server, which prints the headline.

    Args:
        config: the run.
        run_dir: the folder to which plan.json goes.
        folder: the temporary folder to which the initial weights go.

    Returns:
        The inputs of the ranks.

    Raises:
        ConfigError, StrategyError: something is wrong with model, loss, data, strategies or devices.
        RunFailed: the preparation died or hung.
    """
    check(config.launch)
    payload = {"config": config.model_dump_json(), "folder": str(folder)}
    found = local.run_ranks(
        "runner.commands.entries:prepare_alone",
        payload,
        world_size=1,
        run_dir=run_dir,
        device="cpu",
        timeout=config.launch.timeout,
        threads=config.launch.threads,
        name="the preparation",
    )
    return Ready(**found)


def start(entry: str, ready: Ready, config: Config, run_dir: Path, payload: dict[str, Any]) -> Any:
    """Run `entry` on all ranks with `payload` and the pickled preparation; returns the result of rank 0, None if
    another command started it."""
    content = payload | {"prepared": ready.prepared, "resume": ready.resume}
    if config.launch.launcher != "local" and not config.launch.by_hand:
        return started(
            entry,
            content,
            config.launch,
            world_size=ready.world_size,
            run_dir=run_dir,
            device=ready.device,
            stoppable=config.job.name == "train",
        )
    return local.run_ranks(
        entry,
        content,
        world_size=ready.world_size,
        run_dir=run_dir,
        device=ready.device,
        timeout=config.launch.timeout,
        threads=config.launch.threads,
        stoppable=config.job.name == "train",
        rescue=config.launch.rescue and config.job.name == "train",
        part=part_by_hand(config.launch),
    )


def check(launch: Launch) -> None:
    """Raise ConfigError if `launch` cannot start: a missing program, a host that has no address."""
    program, source = NEEDS.get(launch.launcher, ("", ""))
    several = len(launch.hosts) > 1
    if launch.launcher == "deepspeed" and (not several or "--launcher" in launch.options):
        program = ""
    if program and shutil.which(program) is None:
        raise ConfigError(
            "MW703", f"launch = {launch.launcher!r} needs the program {program}, which is not here: {source}."
        )
    elsewhere = [host.name for host in launch.hosts if not network.is_here(network.resolve(host.name))]
    uses_remote = launch.launcher in ("torchrun", "mpirun", "rank_table") and not launch.by_hand
    if elsewhere and uses_remote and launch.remote and shutil.which(launch.remote[0]) is None:
        raise ConfigError(
            "MW703",
            f"launch.remote = {list(launch.remote)}: the program {launch.remote[0]}, which is to reach "
            f"{', '.join(elsewhere)}, is not here; name another, or launch.remote=[] to start the commands yourself.",
        )
    if not launch.by_hand:
        address_of(launch)


def described(
    launch: Launch, world_size: int, folder: Path, meeting: tuple[str, int], overrides: tuple[str, ...] = ()
) -> Started:
    """The processes and files of `launch` for ranks that read their inputs from `folder`. Nothing is written, started
    or resolved."""
    place = LaunchSite(
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

    Arguments and exceptions are those of `runner.launch.run_ranks`.
    """
    run_dir, address = run_dir.absolute(), address_of(launch)
    with own_folder(run_dir, "join") as folder, network.listener(address) as listener:
        with (folder / PAYLOAD_FILE).open("wb") as file:
            pickle.dump(payload, file, protocol=pickle.HIGHEST_PROTOCOL)
        front = Front(listener, new_secret(folder), silence_of(launch.timeout))
        task = Task(
            address=address,
            port=listener.getsockname()[1],
            entry=entry,
            world_size=world_size,
            run_dir=str(run_dir),
            device=device,
            timeout=launch.timeout,
            threads=launch.threads,
            launcher=launch.launcher,
            seats=seats_of(launch) if launch.launcher == "rank_table" else (),
        )
        task.write(folder)
        plan = described(launch, world_size, folder, meeting(launch))
        for name, content in plan.files.items():
            (folder / name).write_text(content, encoding="utf-8")
        return supervise(plan, front, task, launch, stoppable=stoppable)
