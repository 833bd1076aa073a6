"""What a launcher starts, `python -m runner.join FOLDER [--host NAME | --wait NAME]`: one rank, or all of one host.

`run train launch=...` writes FOLDER and passes it to the launcher; users never type this. A rank calls the command that
started the run, receives the address of the store, and then runs like a local rank. With `--host` the process imports
torch once and forks the ranks of its host; with `--wait` it does so for one attempt of the run after another (see
`warm_hosts`). Invariant: a rank ends when its connection to the command closes, so nothing
outlives a run, however the launcher ends.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

from runner.errors import ConfigError, RunFailed
from runner.launch import messages, network
from runner.launch.forks import Fork, fork, warm
from runner.launch.launchers.commands import LAUNCHERS
from runner.launch.launchers.connection import PAYLOAD_FILE, SECRET_FILE, STORE_FILE, Hello, Task, call, own_address
from runner.launch.launchers.warm_hosts import Meeting
from runner.launch.local import SHORT_LIFE, SHORT_LIVES
from runner.launch.orders import OPEN_FILES, Orders
from runner.launch.rank import enter
from runner.launch.server import Descriptor


@dataclass(frozen=True)
class Identity:
    """0 <= rank < world_size; 0 <= local_rank < local_world_size, among the ranks of the same host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def identity(launcher: str, environment: Mapping[str, str]) -> Identity:
    """Raises ConfigError for a process that `launcher` has not started."""
    names = LAUNCHERS[launcher].variables or ()
    lacking = [name for name in names if not environment.get(name, "").isdigit()]
    if lacking:
        raise ConfigError(
            "MW705",
            f"this process was to be started by {launcher}, but {', '.join(lacking)} "
            f"{'are' if len(lacking) > 1 else 'is'} not set to a number; start it with `run train launch={launcher}`.",
        )
    return Identity(*(int(environment[name]) for name in names))


def main(words: Sequence[str]) -> int:
    """Returns the exit code of a host process; a rank exits the process itself."""
    folder = Path(words[0])
    try:
        if len(words) == 3 and words[1] == "--wait":
            return wait(folder, words[2])
        task = Task.read(folder)
        if len(words) == 3 and words[1] == "--host":
            return host(folder, task, words[2])
        rank(folder, identity(task.launcher, os.environ))
    except (ConfigError, RunFailed) as error:
        return _say(error)
    except (OSError, ValueError) as error:
        why = f"{folder} holds no run to join: {error}. The hosts of a launch share the run folder; those that share"
        return _say(RunFailed("MW706", f"{why} nothing are started manually, with launch.host."))
    return 0


def _say(error: ConfigError | RunFailed) -> int:
    """Print an error and return the exit code."""
    print(*(f"run: {paragraph}" for paragraph in error.marked), sep="\n", file=sys.stderr, flush=True)
    return 2 if isinstance(error, ConfigError) else 1


def host(folder: Path, task: Task, name: str, command: Connection | None = None) -> int:
    """Start the ranks of the host `name` of a table as forks of one process; wait for all of them. Elastic ranks that
    end before their time are started anew, until the connection to the `command` is closed."""
    warm()
    seats = {
        number: Identity(number, task.group.world_size, local, count)
        for number, (where, local, count, _) in enumerate(task.seats)
        if where == name
    }

    def begin(number: int) -> Fork:
        return fork(rank, (folder, seats[number]), f"rank {number}", task.group.timeout)

    processes = {number: begin(number) for number in seats}
    if task.group.elastic:
        _replace_ended(processes, begin, command)
    for process in processes.values():
        process.join()
    return int(any(process.exitcode for process in processes.values()))


def _replace_ended(processes: dict[int, Fork], begin: Callable[[int], Fork], command: Connection | None) -> None:
    """Start each rank but rank 0 anew that ends before its time, unless its last lives were short."""
    began, short = dict.fromkeys(processes, time.monotonic()), Counter[int]()
    while running := {number: process for number, process in processes.items() if process.exitcode is None}:
        sources: list[Any] = [process.sentinel for process in running.values()]
        if command in wait_for([*sources, *([] if command is None else [command])]):
            return
        for number, process in running.items():
            if number == 0 or not process.exitcode:
                continue
            now = time.monotonic()
            short[number] = short[number] + 1 if now < began[number] + SHORT_LIFE else 0
            if short[number] < SHORT_LIVES:
                processes[number], began[number] = begin(number), now


def wait(folder: Path, name: str) -> int:
    """The ranks of the host `name` for one attempt after another, until the command hangs up. Raises RunFailed where it
    cannot be reached."""
    warm()
    meeting = Meeting.read(folder)
    try:
        connection = call(meeting.address, meeting.port, (folder / SECRET_FILE).read_bytes(), meeting.silence)
        number = meeting.names.index(name)
        messages.send(connection, asdict(Hello(number, socket.gethostname(), own_address(connection))))
    except (OSError, EOFError, AuthenticationError) as error:
        raise RunFailed(
            "MW714",
            f"host {name} cannot reach the command that started the run, at {meeting.address} port {meeting.port}: "
            f"{error or 'it hung up'}.",
        ) from error
    with suppress(OSError, EOFError):  # the run is over, or its command is gone
        while True:
            attempt = Path(messages.receive(connection))
            messages.send(connection, host(attempt, Task.read(attempt), name, connection))
    return 0


def rank(folder: Path, who: Identity) -> None:
    """Run one rank to its end. Raises ConfigError or RunFailed before it could begin."""
    task = Task.read(folder)
    if who.world_size != task.group.world_size:
        raise ConfigError(
            "MW705",
            f"{task.launcher} started {who.world_size} ranks, but the run has world_size = {task.group.world_size}.",
        )
    secret = (folder / SECRET_FILE).read_bytes()
    to_command = (task.address, task.port, secret, messages.silence_of(task.group.timeout))
    first = who.rank == 0
    try:
        console = call(*to_command) if first else None
        connection = call(*to_command)
        address, name = own_address(connection), socket.gethostname()
        together = network.is_loopback(address) and Path(OPEN_FILES).is_dir()
        listener = network.listener(address) if first and not together else None
        if console is not None:
            messages.send(console, asdict(Hello(who.rank, name, address, console=True)))
        store_at = (address, 0 if listener is None else int(listener.getsockname()[1])) if first else None
        messages.send(connection, asdict(Hello(who.rank, name, address, store=store_at)))
        store = messages.receive(connection)
    except (OSError, EOFError, AuthenticationError) as error:
        raise RunFailed(
            "MW714",
            f"rank {who.rank} cannot reach the command that started the run, at {task.address} port {task.port}: "
            f"{error or 'it hung up'}.",
        ) from error
    if store == messages.STOP:
        return  # before it began
    enter(
        Orders(
            group=task.group,
            rank=who.rank,
            local_rank=who.local_rank,
            local_world_size=who.local_world_size,
            device=task.seats[who.rank][3] if task.seats else who.local_rank,
            environment=dict(os.environ),
            payload=Descriptor(os.open(folder / PAYLOAD_FILE, os.O_RDONLY)),
            store=Descriptor(os.open(folder / STORE_FILE, os.O_RDWR | os.O_CREAT, 0o600)) if together else None,
            address=store[0],
            port=store[1],
            connection=connection,
            secret=hashlib.sha256(b"the store" + secret).hexdigest(),
            listener=None if listener is None else Descriptor(listener.detach()),
            console=None if console is None else Descriptor(os.dup(console.fileno())),
            own_address=address,
            plain=True,
        )
    )
    os._exit(0)  # everything is reported; libraries that the launcher loaded could deadlock at exit
