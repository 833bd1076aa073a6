"""Supervising the ranks of a run, forks of this machine or processes of a launcher, until all have succeeded or one has
failed; and the error for the user, which names the rank, its host, and the place.

Invariant: a failure is reported only after the others had time to report theirs, which may be the cause.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from runner.errors import ConfigError, RunFailed
from runner.launch import failure, hangs, messages
from runner.launch.failure import CauseOrder, Done, Failure
from runner.launch.hangs import Stall
from runner.launch.interrupts import Interrupts, error_of
from runner.launch.logs import read_since
from runner.launch.orders import GroupOrders, flight_record_of, log_of
from strategies.core.errors import StrategyError

# Seconds. From the first failure on, the worst case on one machine is ECHO + DUMP + 2 STOP, within 5 s in total.
CAUSE = 0.3  # to learn which other ranks failed independently at the same time
ECHO = 2.0  # to learn the cause behind a timeout or a lost connection
DUMP = 0.5  # for a hung rank to write where it is
ELASTIC = 4  # timeouts after which a run of elastic ranks hangs: until then rank 0 ends those that do


class SupervisedRank:
    """The supervisor's handle of one rank, through its connection.

    Attributes:
        host: where it runs; empty on this machine, and while it is not known.
        report: its outcome, None until received.
        lost: the connection broke unexpectedly, so the host, or the network to it, is down.
        wordless: the rank ended without a report, as after a kill.
    """

    def __init__(self, number: int, run_dir: Path, host: str = "") -> None:
        self.number, self.host = number, host
        self.log, self.flight_record = log_of(run_dir, number), flight_record_of(run_dir, number)
        self.flight_record.unlink(missing_ok=True)
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self.connection: Connection | None = None
        self.report: Done | Failure | None = None
        self.lost = self.wordless = False

    @property
    def sources(self) -> list[Any]:
        """The handles to wait for."""
        return [] if self.report is not None or self.connection is None else [self.connection]

    def listen(self) -> None:
        """Receive pending messages without blocking."""
        if self.report is not None or self.connection is None:
            return
        try:
            if self.connection.poll(0):
                self.report = messages.reported(self.connection)
        except (EOFError, ConnectionResetError):
            self.wordless = True
            self.report = self.ending()
        except OSError as error:
            self.lost = True
            self.report = self.failed(f"no longer answers: {error.strerror}")

    def ending(self) -> Failure:
        """The failure of a rank that has closed its connection without a report."""
        return self.failed("ended before it was done (was it killed?)", failure.dumped_place(self.output()))

    def failed(self, what: str, where: str = "") -> Failure:
        """A failure of this rank that is noticed here."""
        return Failure(self.number, time.monotonic(), CauseOrder.CAUSE, what, where)

    def send(self, order: str) -> None:
        """Send an order to the rank, if it is alive."""
        if self.connection is not None:
            with suppress(OSError):  # it has ended, which `listen` reports
                messages.send(self.connection, order)

    def forget(self) -> None:
        """Forget the process and how it has ended: another one takes its place."""
        self.close()
        self.connection, self.report, self.lost, self.wordless = None, None, False, False
        self.log_start = self.log.stat().st_size if self.log.exists() else 0

    def request_stack(self) -> None:
        """Let the rank and its data workers write their stacks into its log."""
        self.send(messages.WHERE)

    def close(self) -> None:
        """Close the connection, upon which a rank that is still alive ends itself."""
        if self.connection is not None:
            self.connection.close()

    def output(self) -> str:
        """The rank's log output since its start, if its log is readable here."""
        return read_since(self.log, self.log_start)


class Supervision:
    """Supervises `ranks`, those of `group` that were started from here.

    Args:
        ranks: the handles; of all ranks, or those of one host.
        group: what the ranks share.
        name: the name of a lone process that is not a rank.
        until: called while the ranks run; once it is True they stop after the step at hand, and return.
    """

    poll_interval = 1.0
    """Seconds between two looks at what sends no message."""

    def __init__(
        self,
        ranks: Sequence[SupervisedRank],
        group: GroupOrders,
        name: str | None = None,
        until: Callable[[], bool] | None = None,
    ) -> None:
        self.ranks, self.group, self.name, self.until = ranks, group, name, until
        patience = group.timeout * (ELASTIC if group.elastic else 1)
        self.stall = Stall([rank.flight_record for rank in ranks], patience)

    def patience(self, failures: Sequence[Failure]) -> float:
        """Seconds in which other ranks may report a failure that is closer to the cause."""
        return CAUSE if failure.root_cause(failures).order is CauseOrder.CAUSE else ECHO

    def receive(self, seconds: float) -> None:
        """Wait for messages, `seconds` at most."""
        connection.wait([source for rank in self.ranks for source in rank.sources], seconds)

    def check(self, now: float) -> None:
        """Called while the ranks run. Raises RunFailed."""

    def replace_killed(self) -> None:
        """Start ranks anew that others can do without."""

    def wait(self, interrupts: Interrupts) -> None:
        """Return when every rank has reported success.

        Raises:
            RunFailed: a rank raised, died or hung; the text names it, the place, and shows the end of its log.
            ConfigError, StrategyError: a rank raised one of these, which say that the input is wrong.
            KeyboardInterrupt: a rank failed while a signal was to stop all of them.
        """
        deadline: float | None = None
        while True:
            for rank in self.ranks:
                rank.listen()
            self.replace_killed()
            failures = [rank.report for rank in self.ranks if isinstance(rank.report, Failure)]
            now = time.monotonic()
            if failures:
                if interrupts.stopping:
                    raise error_of(
                        interrupts.requested or signal.SIGTERM
                    )  # which reached ranks that were not training yet
                limit = now + self.patience(failures)
                deadline = min(deadline or limit, limit)
                if now >= deadline or all(rank.report for rank in self.ranks):
                    self.raise_failed(failures)
            elif all(rank.report for rank in self.ranks):
                return
            elif self.stall.detected():
                self.raise_failed([])
            else:
                self.check(now)
                if self.until is not None and not self.nothing_to_save() and self.until():
                    self.until = None
                    for rank in self.ranks:
                        rank.send(messages.STOP)
            self.receive(self.poll_interval if deadline is None else min(self.poll_interval, max(0.0, deadline - now)))

    def raise_failed(self, failures: Sequence[Failure]) -> None:
        """Raise the error that reports `failures`; without any, the ranks hang."""
        cause = failure.root_cause(failures) if failures else None
        if cause is not None and cause.refusal is not None:
            raise (ConfigError if cause.refusal == "config" else StrategyError)(cause.code, cause.text)
        here = {rank.number: rank for rank in self.ranks}
        named = self.ranks[0] if cause is None else here[cause.rank]
        shown = None if cause is None or cause.order is CauseOrder.TIMEOUT else cause
        if cause is not None and (named.lost or named.wordless or cause.order is not CauseOrder.CAUSE):
            self._raise_lost()
        if self.name is not None and cause is None:
            place = self._places([named])[named.number]
            was = f"It was in {place}" if place else "It was stopped, or did not say where it was"
            sentence = f"{self.name} hung: it has shown no sign of life for {self.group.timeout:g} s. {was}."
        elif cause is not None and (shown is not None or self.name is not None):
            same = [other.rank for other in failures if other is not cause and other.what == cause.what]
            sentence = failure.message(cause, same, self.group.world_size, self.name)
            if cause.order is CauseOrder.PEER_LOST:  # a rank that another command has started
                lost = replace(cause, what=failure.LOST_PEER)
                sentence, shown = failure.message(lost, same, self.group.world_size), replace(cause, code="MW713")
            if len({rank.host for rank in self.ranks}) > 1:
                sentence = f"on {named.host}, {sentence}"
        else:
            sentence, number = self._hang(cause, here)
            named = here[number]
        code = failure.HUNG if shown is None else shown.code
        raise RunFailed(
            code,
            f"{sentence}{failure.end_of_log(shown, named.log, named.output())}",
            rank=named.number if self.name is None else None,
        )

    def _raise_lost(self) -> None:
        """Raise the error that names the hosts that no longer answer, if there are any."""
        hosts = {rank.host for rank in self.ranks if rank.lost}
        gone = [rank for rank in self.ranks if rank.host in hosts and (rank.lost or rank.report is None)]
        if gone:
            raise RunFailed(
                "MW713",
                f"{by_host(gone, self.group.world_size)} no longer answers: nothing was heard from there for "
                f"{messages.silence_of(self.group.timeout):g} s. The host, or the way to it, is down.",
                rank=gone[0].number,
                hosts=tuple(dict.fromkeys(rank.host for rank in gone)),
            )

    def _hang(self, cause: Failure | None, here: Mapping[int, SupervisedRank]) -> tuple[str, int]:
        """The sentence about ranks that hang, and the one of `here` to look at; `cause` has timed out."""
        count, timeout = self.group.world_size, self.group.timeout
        at = [hangs.read_state(flight_record_of(self.group.run_dir, number)) for number in range(count)]
        diagnosis = hangs.diagnose(at, timeout)
        silent = [number for number, rank in here.items() if rank.report is None]
        suspects = silent if diagnosis is None else diagnosis.hung
        places = self._places([here[number] for number in suspects if number in here])
        halted = [number for number, place in places.items() if not place and number in silent]
        if halted and not here[halted[0]].host and (diagnosis is None or len(halted) < len(diagnosis.hung)):
            # Ranks that respond only wait, in a call that all have joined, for one that does not respond.
            diagnosis = hangs.diagnose(at, timeout, halted) or diagnosis
        there = f" (rank {cause.rank} in {cause.where})" if cause is not None and cause.where else ""
        if diagnosis is not None:
            sentence, suspects = diagnosis.text, diagnosis.hung
        elif cause is None:
            sentence = f"no rank has moved on for {timeout:g} s"
        elif not silent:
            sentence = failure.message(cause, [], count).rstrip(".")
        elif here[silent[0]].host:
            who = by_host([here[number] for number in silent], count)
            sentence = (
                f"{who} did not answer: the others waited {timeout:g} s in a collective{there}. The host, or the way "
                "to it, is down, or it hangs"
            )
        elif len(silent) == 1:
            hung = f"rank {silent[0]} of {count} hung: the others waited {timeout:g} s in a collective that it did not"
            place = f" It was in {places[silent[0]]}." if places[silent[0]] else ""
            return f"{hung} join{there}.{place}", silent[0]
        else:
            sentence = f"rank {cause.rank} of {count} waited {timeout:g} s in vain{cause.where and f' ({cause.where})'}"
        for number in suspects:
            on = f" on {here[number].host}" if number in here and here[number].host else ""
            sentence += f". Rank {number}{on} was in {'the start' if (spot := at[number]) is None else spot.text}"
            if places.get(number):
                sentence += f", {places[number]}"
            elif number in places and number in silent:
                sentence += " and did not say where"
        named = [*[number for number in suspects if number in here][-1:], *([] if cause is None else [cause.rank])]
        return f"{sentence}.", [*named, *here][0]

    @staticmethod
    def _places(ranks: Sequence[SupervisedRank]) -> dict[int, str]:
        """The places in the code where `ranks` are, from the stacks that they write; empty for one that writes
        none."""
        for rank in ranks:
            rank.request_stack()
        time.sleep(DUMP)
        return {rank.number: failure.dumped_place(rank.output()) for rank in ranks}

    def stop_ranks(self, number: int) -> bool:
        """Request all ranks to stop after the current step, at the signal `number`; False for Ctrl-C before anything
        could be lost."""
        if number == signal.SIGINT and self.nothing_to_save():
            return False
        for rank in self.ranks:
            rank.send(messages.STOP)
        return True

    def nothing_to_save(self) -> bool:
        """Whether no rank has done a step yet."""
        return not hangs.any_step_done([rank.flight_record for rank in self.ranks])


def by_host(ranks: Sequence[SupervisedRank], world_size: int) -> str:
    """`host b (ranks 2, 3 of 4)`, host by host."""
    parts = []
    for host in dict.fromkeys(rank.host for rank in ranks):
        numbers = [str(rank.number) for rank in ranks if rank.host == host]
        sentence = f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)} of {world_size}"
        parts.append(f"host {host} ({sentence})" if host else sentence)
    return ", ".join(parts)
