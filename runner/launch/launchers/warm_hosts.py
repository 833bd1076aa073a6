"""The processes of `launch=rank_table`, one per host, which stay for all attempts of a run: each imports torch once,
and forks the ranks of its host whenever an attempt begins.

They start with the command, so they import while the run is prepared, and spare hosts (`launch.standby`) are as warm as
the others when they take a place. Invariant: a host process ends with its connection to the command, which the system
closes when either end is gone or cut off; and none that was started here outlives `WarmHosts`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

from pydantic import TypeAdapter

from runner.config.launch import Launch
from runner.launch import messages, network
from runner.launch.launchers.commands import JOIN, Command, LaunchSite, exported
from runner.launch.launchers.connection import Acceptor, new_secret
from runner.launch.launchers.host_assignment import address_of
from runner.launch.temporary_folder import own_folder

HOSTS_FILE = "hosts.json"
LOG = "launch.log"
"""In the run folder: what launchers and host processes print."""
LOOK = 0.5
"""Seconds between two looks at whether all is over."""
END = 3.0
"""Seconds for a host process to end by itself."""


@dataclass(frozen=True)
class Meeting:
    """The address by which host processes reach the command; `silence` as in `connection.call`. Plain data, in a file
    beside the secret."""

    address: str
    port: int
    silence: float
    names: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Write it into `folder`."""
        (folder / HOSTS_FILE).write_bytes(TypeAdapter(Meeting).dump_json(self))

    @classmethod
    def read(cls, folder: Path) -> Meeting:
        """Raises OSError or ValueError if there is none in `folder`."""
        return TypeAdapter(Meeting).validate_json((folder / HOSTS_FILE).read_bytes())


def reaching(command: Command, remote: tuple[str, ...]) -> tuple[list[str], Mapping[str, str]] | None:
    """The words that run a command on its host, and their environment; None where `launch.remote` is empty and the host
    is another one."""
    if command.host is None or network.is_here(network.resolve(command.host)):
        return list(command.words), {**os.environ, **command.environment}
    return ([*remote, command.host, command.shell(Path.cwd())], os.environ) if remote else None


class HostProcess:
    """The process of one host, seen as that of a launcher whose ranks are those of one attempt after another."""

    def __init__(self, words: list[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as file:  # a group of its own: Ctrl-C reaches only this command, which ends everything
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment, start_new_session=True
            )
        self.pid = self.process.pid
        self.returncode: int | None = 0
        """The exit code of the ranks of the attempt; None while they run."""
        self.connection: connection.Connection | None = None
        self.attempt: str | None = None
        self.cut_off = False

    @property
    def usable(self) -> bool:
        """Whether it can run another attempt: it has done the last one, or still imports and has not started it."""
        free = self.attempt is not None or self.poll() is not None
        return free and self.process.poll() is None and not self.cut_off

    def begin(self, attempt: Path) -> None:
        """Start the ranks of the attempt in that folder, now or as soon as the process has called."""
        self.returncode, self.attempt = None, str(attempt)
        self._send()

    def called(self, accepted: connection.Connection) -> None:
        """The process has called."""
        self.connection = accepted
        self._send()

    def poll(self) -> int | None:
        """The exit code of the ranks of the attempt, or that of the process if it has ended; None before, as from
        `Popen.poll`."""
        if self.returncode is None and self.connection is not None and not self.cut_off:
            try:
                while self.returncode is None and self.connection.poll(0):
                    self.returncode = int(messages.receive(self.connection))
            except (EOFError, OSError):
                self.cut_off = True
        if self.returncode is None:
            self.returncode = self.process.poll()
        return self.returncode

    def hang_up(self) -> None:
        """Close the connection, upon which the process ends."""
        if self.connection is not None:
            self.connection.close()

    def _send(self) -> None:
        if self.connection is not None and self.attempt is not None:
            attempt, self.attempt = self.attempt, None
            with suppress(OSError):  # it has ended, which `poll` finds
                messages.send(self.connection, attempt)


class WarmHosts:
    """The host processes of a run.

    Args:
        launch: of the complete run, with its spare hosts.
        run_dir: where they log.
        folder: what they read.
        acceptor: where they call.
    """

    def __init__(self, launch: Launch, run_dir: Path, folder: Path, acceptor: Acceptor) -> None:
        self.launch, self.folder, self.acceptor = launch, folder, acceptor
        self.log = run_dir / LOG
        self.names = tuple(host.name for host in (*launch.hosts, *launch.standby))
        self.processes: dict[str, HostProcess] = {}
        self._changing = threading.Lock()
        self._over = threading.Event()
        self._answering = threading.Thread(target=self._answer, daemon=True)
        self.address, self.port = acceptor.listener.getsockname()[:2]
        Meeting(self.address, self.port, messages.silence_of(launch.timeout), self.names).write(folder)
        self._answering.start()

    def begin(self, name: str, attempt: Path) -> HostProcess | None:
        """Start the ranks of an attempt on the host `name`; None where this command cannot reach it."""
        process = self.start(name)
        if process is not None:
            with self._changing:
                process.begin(attempt)
        return process

    def start(self, name: str) -> HostProcess | None:
        """The process of a host, started unless there is one that can be used."""
        running = self.processes.get(name)
        if running is not None and running.usable:
            return running
        site = LaunchSite(self.folder, len(self.names), self.address, self.port, sys.executable, Path.cwd())
        words = (site.python, *site.module(JOIN), str(self.folder), "--wait", name)
        found = reaching(Command(words, name, exported(self.launch.export)), self.launch.remote)
        if found is None:
            return None
        with self._changing:
            if running is not None:
                _kill(running)
            self.processes[name] = HostProcess(*found, self.log)
        return self.processes[name]

    def close(self) -> None:
        """End all of them."""
        self._over.set()
        self._answering.join()
        self.acceptor.close()
        for process in self.processes.values():
            process.hang_up()
            if process.connection is None:  # it still imports, and will find nobody
                _kill(process)
        deadline = time.monotonic() + END
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.process.wait(max(0.0, deadline - time.monotonic()))
            _kill(process)

    def _answer(self) -> None:
        """Take calls until all is over: hosts import while the run is prepared, and call before anything waits."""
        while not self._over.is_set():
            if connection.wait([self.acceptor.listener], LOOK):
                self.acceptor.take()
            with self._changing:
                for hello, accepted in self.acceptor.arrived():
                    self.processes[self.names[hello.rank]].called(accepted)


def _kill(one: HostProcess) -> None:
    """End the rest of a host process here, and let one that lives elsewhere notice it."""
    one.hang_up()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if one.process.poll() is None:
            os.killpg(one.pid, number)
            with suppress(subprocess.TimeoutExpired):
                one.process.wait(1.0)


@contextmanager
def warm_hosts(launch: Launch, run_dir: Path) -> Iterator[WarmHosts | None]:
    """The host processes of a run, which begin to import; None for launchers that start the ranks themselves."""
    if launch.launcher != "rank_table" or launch.by_hand:
        yield None
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    run_dir = run_dir.absolute()
    silence = messages.silence_of(launch.timeout)
    with own_folder(run_dir, "hosts") as folder, network.listener(address_of(launch)) as listener:
        hosts = WarmHosts(launch, run_dir, folder, Acceptor(listener, new_secret(folder), silence))
        try:
            for name in hosts.names:
                hosts.start(name)
            yield hosts
        finally:
            hosts.close()
