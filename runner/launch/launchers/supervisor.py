"""A run whose ranks are started by a launcher, here and on other hosts: started, supervised, and ended from here.

Invariants: however `supervise` ends, every connection is closed, upon which the ranks end themselves on any host, and
no launcher of this run is alive here; and messages to the user name the ranks and their hosts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any

from runner.config.launch import Launch
from runner.errors import RunFailed
from runner.launch import failure, network
from runner.launch.failure import CauseOrder, Done, Failure
from runner.launch.interrupts import Interrupts
from runner.launch.launchers.commands import Command, Started
from runner.launch.launchers.connection import Acceptor, Task
from runner.launch.launchers.warm_hosts import LOG, HostProcess, WarmHosts, reaching
from runner.launch.logs import read_since
from runner.launch.messages import silence_of
from runner.launch.supervision import CAUSE, ECHO, SupervisedRank, Supervision, by_host

JOIN = 120.0  # seconds at least that ranks may take to join: each of them imports torch
LEAVE = 15.0  # seconds for launchers to end by themselves after their ranks have
END = 3.0  # and after a failure
AGAIN = 5.0  # seconds between two tries to start elastic ranks on a host that is down


class LaunchedSupervision(Supervision):
    """Supervises the ranks of a task, which call at `acceptor`, and the launchers that start them."""

    poll_interval = 0.2

    def __init__(
        self,
        acceptor: Acceptor,
        task: Task,
        launch: Launch,
        until: Callable[[], bool] | None = None,
        again: Callable[[str], HostProcess | None] | None = None,
    ) -> None:
        run_dir = task.group.run_dir
        (run_dir / "ranks").mkdir(parents=True, exist_ok=True)
        hosts = [seat[0] for seat in task.seats] or [""] * task.group.world_size
        ranks = [SupervisedRank(number, run_dir, host) for number, host in enumerate(hosts)]
        super().__init__(ranks, task.group, until=until)
        self.names = {network.resolve(host.name): host.name for host in launch.hosts}
        self.acceptor, self.launcher = acceptor, task.launcher
        self.log = run_dir / LOG
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self.processes: list[tuple[Command, subprocess.Popen[bytes] | HostProcess]] = []
        self.join_limit = max(self.group.timeout, JOIN)
        self.join_by = time.monotonic() + self.join_limit
        self.ended_at: float | None = None
        self.again, self.tried = again, dict[str, float]()

    def start(self, command: Command, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a launcher in its own process group: Ctrl-C reaches only this command, which ends everything."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.processes.append((command, process))

    @property
    def absent(self) -> list[SupervisedRank]:
        """The ranks that have not joined yet."""
        return [rank for rank in self.ranks if rank.connection is None]

    @property
    def joining(self) -> bool:
        """Whether ranks are absent without which none begins."""
        return self.ranks[0] in self.absent if self.group.elastic else bool(self.absent)

    def stop_ranks(self, number: int) -> bool:
        """As `Supervision.stop_ranks`; also False while ranks join: those that are absent would not be requested."""
        return not self.joining and super().stop_ranks(number)

    def nothing_to_save(self) -> bool:
        visible = any(rank.flight_record.exists() for rank in self.ranks)
        return visible and super().nothing_to_save()

    def patience(self, failures: Sequence[Failure]) -> float:
        if all(self.ranks[failed.rank].wordless for failed in failures):
            return silence_of(self.group.timeout) + CAUSE  # a launcher that loses a host kills the other ranks
        return super().patience(failures)

    def receive(self, seconds: float) -> None:
        sources = [source for rank in self.ranks for source in rank.sources]
        if self.absent or self.group.elastic:
            sources.append(self.acceptor.listener)
        else:
            self.acceptor.listener.close()  # all ranks have joined: accept no more connections
        if self.acceptor.listener in connection.wait(sources, seconds):
            self.acceptor.take()
        for hello, accepted in self.acceptor.arrived():
            rank = self.ranks[hello.rank]
            if rank.connection is not None:  # elastic: the process before it is down, which is not noticed yet
                rank.forget()
            rank.connection = accepted
            rank.host = rank.host or self.names.get(hello.address, hello.host)

    def replace_killed(self) -> None:
        first = self.ranks[0].report
        if not self.group.elastic or isinstance(first, Failure):
            return
        for rank in self.ranks[1:]:
            found = rank.report
            if isinstance(found, Failure) and (rank.lost or rank.wordless or found.order is not CauseOrder.CAUSE):
                if first is None:
                    print(f"rank {rank.number} on {rank.host} {found.what}; the others go on", flush=True)
                rank.forget()
            if first is not None and rank.connection is None:  # all work is done
                rank.report = Done(None)

    def check(self, now: float) -> None:
        needed = self.processes
        if self.group.elastic:
            needed = [(command, process) for command, process in needed if command.host == self.ranks[0].host]
            if self.ranks[0].report is None:
                self._start_again(now)
        if ended := [(command, process) for command, process in needed if process.poll()]:
            self.ended_at = self.ended_at or now  # its ranks may have something to say
            if now >= self.ended_at + ECHO:
                raise self._ended(*ended[0])
        elif now >= self.join_by and self.joining:
            raise RunFailed(
                "MW714",
                f"{by_host(self.absent, len(self.ranks))} did not join within {self.join_limit:g} s."
                f"{self._last_words()}",
            )

    def _start_again(self, now: float) -> None:
        """Start the ranks of hosts anew that are down, all but those of the host of rank 0, every few seconds."""
        for place, (command, process) in enumerate(self.processes):
            name = command.host
            down = isinstance(process, HostProcess) and (process.cut_off or process.poll() is not None)
            if not down or name is None or name == self.ranks[0].host or now < self.tried.get(name, 0.0) + AGAIN:
                continue
            self.tried[name] = now
            if self.again is not None and (found := self.again(name)) is not None:
                self.processes[place] = command, found

    def stop(self, patience: float) -> None:
        """Give launchers `patience` seconds to exit; close all connections; kill the remaining local processes."""
        self._wait_for_launchers(patience)
        for rank in self.ranks:
            rank.close()
        self.acceptor.close()
        for number, seconds in ((None, END), (signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0)):
            for _, process in self.processes:
                if number is not None and process.poll() is None:
                    os.killpg(process.pid, number)
            self._wait_for_launchers(seconds)
        for rank in self.ranks:
            rank.flight_record.unlink(missing_ok=True)

    def _wait_for_launchers(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for _, process in self.processes:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)

    def _ended(self, command: Command, process: subprocess.Popen[bytes] | HostProcess) -> RunFailed:
        absent, code = self.absent, process.returncode
        assert code is not None
        before = f"before {by_host(absent, len(self.ranks))} had joined" if absent else "before its ranks were done"
        where = "" if command.host is None else f" on {command.host}"
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return RunFailed("MW716", f"{self.launcher}{where} ended with {how} {before}.{self._last_words()}")

    def _last_words(self) -> str:
        """The output of the launchers, for the end of a message."""
        return failure.end_of_log(None, self.log, read_since(self.log, self.log_start))


def supervise(
    started: Started,
    acceptor: Acceptor,
    task: Task,
    launch: Launch,
    *,
    stoppable: bool,
    until: Callable[[], bool] | None = None,
    hosts: WarmHosts | None = None,
    attempt: Path,
) -> Any:
    """Start the commands, supervise the ranks until the last one is done, and return the result of rank 0.

    Args:
        started: commands of the launcher.
        acceptor: accepts the connections of the ranks.
        task: the description of the run for the ranks.
        launch: the hosts; commands for others of them go through `launch.remote`, or are printed for the user.
        stoppable: the ranks can stop after the current step, and return; the first signal requests it.
        until: as in `Supervision`.
        hosts: the processes of hosts that stay, which take the place of the commands for them.
        attempt: the folder that the ranks read.

    Raises:
        RunFailed, ConfigError, StrategyError: as `Supervision.wait`; a launcher failed, or a host is down.
        KeyboardInterrupt: SIGINT arrived, or SIGTERM or SIGHUP (Terminated).
    """
    again = None if hosts is None else partial(hosts.begin, attempt=attempt)
    supervision = LaunchedSupervision(acceptor, task, launch, until, again)
    patience = 0.0
    sys.stdout.flush()
    with Interrupts(supervision.stop_ranks if stoppable else None) as interrupts:
        try:
            for command in started.commands:
                warm = None if hosts is None or command.host is None else hosts.begin(command.host, attempt)
                if warm is not None:
                    supervision.processes.append((command, warm))
                elif (found := reaching(command, launch.remote)) is not None:
                    supervision.start(command, *found)
                else:
                    print(f"start on {command.host}: {command.shell(Path.cwd())}", flush=True)
            supervision.wait(interrupts)
            patience = LEAVE
        finally:
            interrupts.hold()
            supervision.stop(patience)
    result = supervision.ranks[0].report
    assert isinstance(result, Done) and result.value is not None
    return json.loads(result.value)
