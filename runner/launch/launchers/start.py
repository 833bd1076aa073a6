"""Start the ranks of a config, with one import of torch per machine.

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
from runner.launch.launchers.commands import LAUNCHERS, LaunchSite, Started, exported
from runner.launch.launchers.connection import PAYLOAD_FILE, Acceptor, Task, new_secret
from runner.launch.launchers.host_assignment import address_of, meeting, part_by_hand, seats_of
from runner.launch.launchers.supervisor import supervise
from runner.launch.launchers.warm_hosts import WarmHosts
from runner.launch.messages import silence_of
from runner.launch.orders import GroupOrders
from runner.launch.temporary_folder import own_folder


@dataclass(frozen=True)
class Ready:
    """The result of `entries.prepare_alone`: the ranks to start, the pickled `Prepared` for them, the checkpoint to
    continue, the run and step of it and of those that it continued, and the stages and micro-batches of the pipeline,
    one each without."""

    world_size: int
    device: str
    prepared: bytes
    resume: str | None
    ancestry: tuple[tuple[str, int], ...]
    pipeline: tuple[int, int] = (1, 1)


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
    return Ready(**run_alone("prepare_alone", payload, config, run_dir, "the preparation"))


def run_alone(entry: str, payload: object, config: Config, run_dir: Path, name: str) -> Any:
    """Call the function `entry` of `runner.commands.entries` in a lone process of the fork server, called `name`."""
    return local.run_ranks(
        f"runner.commands.entries:{entry}",
        payload,
        world_size=1,
        run_dir=run_dir,
        device="cpu",
        timeout=config.launch.timeout,
        threads=config.launch.threads,
        name=name,
    )


def start(
    entry: str,
    ready: Ready,
    config: Config,
    run_dir: Path,
    payload: dict[str, Any],
    until: Callable[[], bool] | None = None,
    hosts: WarmHosts | None = None,
) -> Any:
    """Run `entry` on all ranks with `payload` and the pickled preparation; returns the result of rank 0, None if
    another command started it. Once `until` is True the ranks stop after the step at hand. `hosts` are the processes of
    hosts that stay from one call to the next. Exceptions are those of `runner.launch.run_ranks`."""
    launch, content = config.launch, payload | {"prepared": ready.prepared, "resume": ready.resume}
    stoppable = config.job.name == "train"
    if launch.launcher == "local" or launch.by_hand:
        return local.run_ranks(
            entry,
            content,
            world_size=ready.world_size,
            run_dir=run_dir,
            device=ready.device,
            timeout=launch.timeout,
            threads=launch.threads,
            stoppable=stoppable,
            rescue=launch.rescue and stoppable,
            until=until,
            part=part_by_hand(launch),
            devices=launch.devices,
            elastic=config.parallel.elastic,
        )
    run_dir, address = run_dir.absolute(), address_of(launch)
    elastic = config.parallel.elastic
    group = GroupOrders(entry, ready.world_size, run_dir, ready.device, launch.timeout, launch.threads, elastic)
    with own_folder(run_dir, "join") as folder, network.listener(address) as listener:
        with (folder / PAYLOAD_FILE).open("wb") as file:
            pickle.dump(content, file, protocol=pickle.HIGHEST_PROTOCOL)
        awaited = 1 if elastic else ready.world_size
        acceptor = Acceptor(listener, new_secret(folder), silence_of(launch.timeout), awaited)
        seats = seats_of(launch) if launch.launcher == "rank_table" else ()
        task = Task(group, address, listener.getsockname()[1], launch.launcher, seats)
        task.write(folder)
        plan = described(launch, group.world_size, folder, meeting(launch))
        for name, text in plan.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        return supervise(plan, acceptor, task, launch, stoppable=stoppable, until=until, hosts=hosts, attempt=folder)


def check(launch: Launch) -> None:
    """Raise ConfigError if `launch` cannot start: a missing program, a host that has no address."""
    spec = LAUNCHERS.get(launch.launcher)
    direct = launch.launcher == "deepspeed" and (len(launch.hosts) <= 1 or "--launcher" in launch.options)
    if spec is not None and spec.program is not None and not direct:
        program, source = spec.program
        if shutil.which(program) is None:
            raise ConfigError(
                "MW703", f"launch = {launch.launcher!r} needs the program {program}, which is not here: {source}."
            )
    elsewhere = [host.name for host in launch.hosts if not network.is_here(network.resolve(host.name))]
    uses_remote = spec is not None and spec.remote and not launch.by_hand
    if elsewhere and uses_remote and launch.remote and shutil.which(launch.remote[0]) is None:
        raise ConfigError(
            "MW703",
            f"launch.remote = {list(launch.remote)}: the program {launch.remote[0]}, which is to reach "
            f"{', '.join(elsewhere)}, is not here; name another, or launch.remote=[] to start the commands yourself.",
        )
    if not launch.by_hand and not (spec is not None and spec.submits):
        address_of(launch)


def described(
    launch: Launch,
    world_size: int,
    folder: Path,
    meeting: tuple[str, int],
    overrides: tuple[str, ...] = (),
    device: str = "auto",
) -> Started:
    """The processes and files of `launch` for ranks that read their inputs from `folder`. Nothing is written, started
    or resolved."""
    environment = exported(launch.export)
    site = LaunchSite(folder, world_size, *meeting, sys.executable, Path.cwd(), environment, overrides, device)
    return LAUNCHERS[launch.launcher].described(launch, site)
