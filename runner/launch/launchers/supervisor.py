"""A run whose ranks are started by a launcher, here and on other hosts: started, monitored, and ended from here.

What `runner.launch.local` does for forks of this machine, over lines instead of pipes. Invariants: however `supervise`
ends, every connection is closed, upon which the ranks end themselves on any host, and no launcher of this run is alive
here; and messages to the user name the ranks and their hosts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from runner.config.launch import Launch
from runner.errors import ConfigError, RunFailed
from runner.launch import failure, hangs, messages, network
from runner.launch.failure import DUMP, CauseOrder, Done, Failure
from runner.launch.hangs import Stall
from runner.launch.interrupts import Interrupts, error_of
from runner.launch.launchers.commands import Command, Started
from runner.launch.launchers.connection import Front, Task, silence_of
from runner.launch.local import CAUSE, ECHO
from runner.launch.logs import read_since
from runner.launch.messages import STOP, WHERE
from runner.launch.orders import flight_record_of, log_of
from strategies.core.errors import StrategyError

JOIN = 120.0  # seconds at least that ranks may take to join: each of them imports torch
LEAVE = 15.0  # seconds for launchers to end by themselves after their ranks have
END = 3.0  # and after a failure
LOOK = 0.2  # between two polls of the launchers
LOG = "launch.log"


class _Seat:
    """The supervisor's state of one rank. `report` is its outcome, None until received. `lost`: the connection broke
    unexpectedly, so the host, or the network to it, is down. `wordless`: the rank ended without a report, as after a
    kill."""

    def __init__(self, number: int, host: str, run_dir: Path) -> None:
        self.number, self.host = number, host
        self.log, self.flight_record = log_of(run_dir, number), flight_record_of(run_dir, number)
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self.line: Connection | None = None
        self.report: Done | Failure | None = None
        self.lost = self.wordless = False

    def listen(self) -> None:
        """Receive pending messages without blocking."""
        if self.line is None or self.report is not None:
            return
        try:
            if self.line.poll(0):
                self.report = messages.reported(self.line)
        except (EOFError, ConnectionResetError):
            self.wordless = True
            place = failure.dumped_place(self.said())
            what = "ended before it was done (was it killed?)"
            self.report = Failure(self.number, time.monotonic(), CauseOrder.CAUSE, what, place)
        except OSError as error:
            self.lost = True
            what = f"no longer answers: {error.strerror}"
            self.report = Failure(self.number, time.monotonic(), CauseOrder.CAUSE, what)

    def send(self, order: str) -> None:
        """Send an order to the rank."""
        if self.line is not None:
            with suppress(OSError):  # it has ended, which `listen` reports
                messages.send(self.line, order)

    def said(self) -> str:
        """The rank's log output since its start, if its log is readable here."""
        return read_since(self.log, self.log_start)


class Watch:
    """The seats of a run and the launchers that fill them."""

    def __init__(self, front: Front, task: Task, hosts: Iterable[str]) -> None:
        run_dir = Path(task.run_dir)
        (run_dir / "ranks").mkdir(parents=True, exist_ok=True)
        self.names = {network.resolve(name): name for name in hosts}
        placed = [seat[0] for seat in task.seats] or [""] * task.world_size
        self.seats = [_Seat(number, host, run_dir) for number, host in enumerate(placed)]
        for seat in self.seats:
            seat.flight_record.unlink(missing_ok=True)
        self.front, self.launcher, self.timeout = front, task.launcher, task.timeout
        self.log = run_dir / LOG
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self.processes: list[tuple[Command, subprocess.Popen[bytes]]] = []

    def start(self, command: Command, words: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a launcher in its own process group: Ctrl-C reaches only this command, which ends everything."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        self.processes.append((command, process))

    def stop_ranks(self, number: int) -> bool:
        """At a signal, request all ranks to stop after the current step; False for Ctrl-C before anything could be
        lost, as far as can be seen from here."""
        files = [seat.flight_record for seat in self.seats]
        if number == signal.SIGINT and any(map(Path.exists, files)) and not hangs.any_step_done(files):
            return False
        for seat in self.seats:
            seat.send(STOP)
        return True

    def wait(self, interrupts: Interrupts) -> None:
        """Return when every rank has reported success. Raises the error for the user otherwise."""
        patience = time.monotonic() + max(self.timeout, JOIN)
        deadline: float | None = None
        ended_at: float | None = None
        stall = Stall([seat.flight_record for seat in self.seats], self.timeout)
        while True:
            lines = [seat.line for seat in self.seats if seat.line is not None and seat.report is None]
            door = [] if all(seat.line for seat in self.seats) else [self.front.listener]
            if not door:
                self.front.listener.close()  # all ranks have joined: accept no more connections
            if self.front.listener in connection.wait([*door, *lines], LOOK):
                self.front.take()
            for hello, line in self.front.arrived():
                self.seats[hello.rank].line = line
                if not self.seats[hello.rank].host:
                    self.seats[hello.rank].host = self.names.get(hello.address, hello.host)
            for seat in self.seats:
                seat.listen()
            failures = [seat.report for seat in self.seats if isinstance(seat.report, Failure)]
            now = time.monotonic()
            if failures:
                limit = CAUSE if failure.root_cause(failures).order is CauseOrder.CAUSE else ECHO
                if all(seat.wordless for seat in self.seats if isinstance(seat.report, Failure)):
                    limit = silence_of(self.timeout) + CAUSE  # one that loses a host kills the other ranks
                deadline = min(deadline or now + limit, now + limit)
                if interrupts.stopping:
                    raise error_of(interrupts.requested)  # which reached ranks that were not training yet
                if now >= deadline or all(seat.report for seat in self.seats):
                    self._raise_failed(failures)
            elif all(seat.report for seat in self.seats):
                return
            elif bad := [(command, process) for command, process in self.processes if process.poll()]:
                ended_at = ended_at or now  # its ranks may have something to say
                if now >= ended_at + ECHO:
                    raise self._ended(*bad[0])
            elif stall.found():
                self._raise_hang(None)
            elif now >= patience and (absent := [seat for seat in self.seats if seat.line is None]):
                raise RunFailed(
                    "MW714",
                    f"{_named(absent, len(self.seats))} did not join within {max(self.timeout, JOIN):g} s."
                    f"{self._last_words()}",
                )

    def stop(self, patience: float) -> None:
        """Give launchers `patience` seconds to exit; close all connections; kill the remaining local processes."""
        self._wait_for_launchers(patience)
        self.front.close()
        for seat in self.seats:
            if seat.line is not None:
                seat.line.close()
        for number, seconds in ((None, END), (signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0)):
            for _, process in self.processes:
                if number is not None and process.poll() is None:
                    os.killpg(process.pid, number)
            self._wait_for_launchers(seconds)

    def _wait_for_launchers(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for _, process in self.processes:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)

    def _ended(self, command: Command, process: subprocess.Popen[bytes]) -> RunFailed:
        absent = [seat for seat in self.seats if seat.line is None]
        before = f"before {_named(absent, len(self.seats))} had joined" if absent else "before its ranks were done"
        where = "" if command.host is None else f" on {command.host}"
        how = f"exit code {process.returncode}"
        if process.returncode < 0:
            how = signal.Signals(-process.returncode).name
        return RunFailed("MW716", f"{self.launcher}{where} ended with {how} {before}.{self._last_words()}")

    def _last_words(self) -> str:
        """The output of the launchers, for the end of a message."""
        return failure.end_of_log(None, self.log, read_since(self.log, self.log_start))

    def _raise_failed(self, failures: Sequence[Failure]) -> None:
        """Raise the error that reports `failures`."""
        cause = failure.root_cause(failures)
        if cause.refusal == "config":
            raise ConfigError(cause.code, cause.text)
        if cause.refusal == "strategy":
            raise StrategyError(cause.code, cause.text)
        count = len(self.seats)
        named = self.seats[cause.rank]
        away = {seat.host for seat in self.seats if seat.lost}
        if away and (named.lost or named.wordless or cause.order is not CauseOrder.CAUSE):
            gone = [seat for seat in self.seats if seat.host in away and (seat.lost or seat.report is None)]
            raise RunFailed(
                "MW713",
                f"{_named(gone, count)} no longer answers: nothing was heard from there for "
                f"{silence_of(self.timeout):g} s. The host, or the way to it, is down.",
                rank=gone[0].number,
                hosts=tuple(dict.fromkeys(seat.host for seat in gone)),
            )
        if cause.order is CauseOrder.TIMEOUT:
            self._raise_hang(cause)
        same = [one.rank for one in failures if one is not cause and one.what == cause.what]
        several = len({seat.host for seat in self.seats}) > 1
        sentence = failure.message(cause, same, count)
        if several:
            sentence = f"on {named.host}, {sentence}"
        raise RunFailed(cause.code, f"{sentence}{failure.end_of_log(cause, named.log, named.said())}", rank=cause.rank)

    def _raise_hang(self, cause: Failure | None) -> None:
        """Raise the diagnosis of a hang from the flight records, if readable here; return if no rank is silent."""
        at = [hangs.read_state(seat.flight_record) for seat in self.seats]
        found = hangs.diagnose(at, self.timeout)
        silent = [seat for seat in self.seats if seat.report is None]
        if found is not None:
            hung = [self.seats[number] for number in found.hung]
            sentence = f"{found.text}."
        elif silent:
            hung = silent
            place = f" (rank {cause.rank} in {cause.where})" if cause is not None and cause.where else ""
            sentence = (
                f"{_named(silent, len(self.seats))} did not answer: the others waited {self.timeout:g} s in a "
                f"collective{place}. The host, or the way to it, is down, or it hangs."
            )
        else:
            return
        for seat in hung:
            seat.send(WHERE)
        time.sleep(DUMP)
        for seat in hung:
            here, place = at[seat.number], failure.dumped_place(seat.said())
            on = f" on {seat.host}" if seat.host else ""
            sentence += f" Rank {seat.number}{on} was in {'the start' if here is None else here.text}"
            sentence += f", {place}." if place else "."
        raise RunFailed("MW712", sentence)


def _named(seats: Sequence[_Seat], count: int) -> str:
    """`host b (ranks 2, 3 of 4)`, host by host."""
    hosts = dict.fromkeys(seat.host for seat in seats)
    parts = []
    for host in hosts:
        ranks = [str(seat.number) for seat in seats if seat.host == host]
        sentence = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} of {count}"
        parts.append(f"host {host} ({sentence})" if host else sentence)
    return ", ".join(parts)


def supervise(started: Started, front: Front, task: Task, launch: Launch, *, stoppable: bool) -> Any:
    """Start the commands, monitor the ranks until the last one is done, and return the result of rank 0.

    Args:
        started: commands and files of the launcher; the files are written here.
        front: accepts the connections of the ranks.
        task: the description of the run for the ranks.
        launch: the hosts; commands for others of them go through `launch.remote`, or are printed for the user.
        stoppable: the ranks can stop after the current step, and return; the first signal requests it.

    Raises:
        RunFailed: a rank or a launcher failed, or a host is down; the text names it.
        ConfigError, StrategyError: a rank found that the input is wrong.
        KeyboardInterrupt: SIGINT arrived, or SIGTERM or SIGHUP (Terminated).
    """
    hosts = [host.name for host in launch.hosts]
    here = {name for name in hosts if network.is_here(network.resolve(name))}
    directory = Path.cwd()
    watch = Watch(front, task, hosts)
    patience = 0.0
    sys.stdout.flush()
    with Interrupts(watch.stop_ranks if stoppable else None) as interrupts:
        try:
            for command in started.commands:
                if command.host is None or command.host in here:
                    watch.start(command, command.words, {**os.environ, **command.environment})
                elif launch.remote:
                    watch.start(command, [*launch.remote, command.host, command.shell(directory)], os.environ)
                else:
                    print(f"start on {command.host}: {command.shell(directory)}", flush=True)
            watch.wait(interrupts)
            patience = LEAVE
        finally:
            interrupts.hold()
            watch.stop(patience)
            for seat in watch.seats:
                seat.flight_record.unlink(missing_ok=True)
    result = watch.seats[0].report
    assert isinstance(result, Done) and result.value is not None
    return json.loads(result.value)
