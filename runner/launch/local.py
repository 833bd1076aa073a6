"""The ranks of one run on this machine: forks of the fork server, supervised until the last one has ended.

Invariant: however `run_ranks` ends (result, failure, Ctrl-C, SIGTERM), no rank and nothing that a rank started is alive
afterwards; should the parent be killed, the fork server ends them. Elastic ranks that are killed are started anew.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from pathlib import Path
from typing import Any

from runner.errors import RunFailed
from runner.launch import failure, leaving, messages, network
from runner.launch.failure import Done, Failure
from runner.launch.forks import Fork, fork, server_ending, warm
from runner.launch.interrupts import Interrupts
from runner.launch.liveness import Signs, forks_of
from runner.launch.orders import OPEN_FILES, GroupOrders, Orders
from runner.launch.rank import enter
from runner.launch.server import Descriptor
from runner.launch.startup import Starting
from runner.launch.supervision import SupervisedRank, Supervision
from runner.launch.temporary_folder import remove_sockets
from strategies.runtime.flight_recorder import PROGRESS, read_cells

STOP = 1.0  # seconds between asking a rank to end and killing it
LOOK = 0.1  # seconds between two looks at ranks that save
ANSWER = 20.0  # seconds for the fork server to say how a rank has ended, on a machine that is busy
RESCUE = 10.0  # seconds in which a rank that saves its state writes nothing
DUMPED = 0.1  # seconds in which a process writes its stack
SHORT_LIFE, SHORT_LIVES = 1.0, 5  # seconds; so many lives of at most this length, one after the other, are the last


@dataclass(frozen=True)
class LocalRanks:
    """The ranks that are started here, in the order of their local ranks.

    Attributes:
        ranks: their numbers among all ranks.
        devices: the number of each one's GPU, where there are GPUs.
        address, port: where the store of the rendezvous listens; rank 0's part binds to them, and port 0 is any there.
    """

    ranks: tuple[int, ...]
    devices: tuple[int, ...]
    address: str = network.LOOPBACK
    port: int = 0


def run_ranks(
    entry: str,
    payload: object,
    *,
    world_size: int,
    run_dir: Path,
    device: str,
    timeout: float,
    threads: int,
    stoppable: bool = False,
    rescue: bool = False,
    until: Callable[[], bool] | None = None,
    part: LocalRanks | None = None,
    devices: Sequence[int] = (),
    name: str | None = None,
    elastic: bool = False,
) -> Any:
    """Call `entry` in `world_size` new processes that form one process group; return its result in rank 0.

    Args:
        entry, world_size, device, timeout, threads: as in `runner.launch.orders.GroupOrders`; with "cuda" rank r takes
            GPU r, or that of `devices`.
        payload: plain data that pickle can carry; so must be the result of rank 0.
        run_dir: every rank writes `run_dir/ranks/RANK.log`, appending; rank 0's stdout is shown on the console too.
        stoppable: the ranks can stop after the current step, and return; the first signal requests it, Ctrl-C only
            where that saves something.
        rescue: after a failure the other ranks get time to save their state.
        until: as in `Supervision`.
        part: which of the ranks are started here, and where they meet the others; None: all. Without rank 0 here the
            result is None.
        name: the name of a single process that is not a rank, such as "the preparation".
        elastic: as in `GroupOrders`.

    Raises:
        RunFailed, ConfigError, StrategyError: as `Supervision.wait`.
        KeyboardInterrupt: SIGINT arrived, or SIGTERM or SIGHUP (Terminated).
    """
    together = part is None and Path(OPEN_FILES).is_dir()
    part = part or LocalRanks((*range(world_size),), (*(devices or range(world_size)),))
    if network.is_loopback(part.address):
        part = replace(part, address=network.loopback())
    group = GroupOrders(entry, world_size, run_dir.absolute(), device, timeout, threads, elastic)
    (group.run_dir / "ranks").mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()  # the parent's output comes before that of rank 0
    warm()
    ranks = [_LocalRank(rank, group.run_dir) for rank in part.ranks]
    supervision = _LocalSupervision(ranks, group, rescue, name, until)
    supervision.stall.untimed = together and device == "cpu" and not elastic
    with Interrupts(supervision.stop_ranks if stoppable else None) as interrupts, ExitStack() as resources:
        content = resources.enter_context(tempfile.TemporaryFile())
        pickle.dump(payload, content, protocol=pickle.HIGHEST_PROTOCOL)
        content.flush()
        store = resources.enter_context(tempfile.TemporaryFile()) if together else None
        listener = None
        if 0 in part.ranks and store is None:
            listener = resources.enter_context(network.listener(part.address, part.port))
        try:
            for local_rank, rank in enumerate(ranks):
                first = rank.number == 0
                orders = Orders(
                    group=group,
                    rank=rank.number,
                    local_rank=local_rank,
                    local_world_size=len(ranks),
                    device=part.devices[local_rank],
                    environment=dict(os.environ),
                    payload=Descriptor(content.fileno()),
                    store=None if store is None else Descriptor(store.fileno()),
                    address=part.address,
                    port=part.port if listener is None else listener.getsockname()[1],
                    listener=Descriptor(listener.fileno()) if first and listener is not None else None,
                    console=Descriptor(1) if first else None,
                    connection=rank.far_end,
                    own_address=part.address,
                )
                supervision.starting.look()
                rank.start(orders, name or f"rank {rank.number}")
            if listener is not None:
                listener.close()  # it is rank 0's now; without rank 0 nothing may connect
            supervision.stall.signs = [Signs(rank.pid, computing=device == "cpu") for rank in ranks]
            supervision.wait(interrupts)
            deadline = time.monotonic() + STOP  # to exit; killing a rank during its exit loses nothing
            for rank in ranks:
                rank.join(deadline)
        finally:
            interrupts.hold()
            _stop(ranks)
            remove_sockets()
    result = ranks[0].report
    assert isinstance(result, Done)
    return None if result.value is None else pickle.loads(result.value)


class _LocalRank(SupervisedRank):
    """A rank that is a fork."""

    def __init__(self, number: int, run_dir: Path) -> None:
        super().__init__(number, run_dir)
        self.connection, self.far_end = connection.Pipe()
        self._process: Fork | None = None
        self._orders: Orders | None = None
        self._started, self._short_lives = 0.0, 0
        self._oom_kills: int | None = None

    def start(self, orders: Orders, name: str) -> None:
        """Start the process and hand it the far end of the connection with its `orders`."""
        self._orders, self._started, self._oom_kills = orders, time.monotonic(), failure.oom_kills()
        self._process = fork(enter, (orders,), name, orders.group.timeout)
        self.far_end.close()

    def start_again(self) -> bool:
        """Start another process with the same orders; False where the last ones have ended too soon."""
        assert self._orders is not None
        self._short_lives = self._short_lives + 1 if time.monotonic() < self._started + SHORT_LIFE else 0
        if self._short_lives >= SHORT_LIVES:
            return False
        self.forget()
        self.connection, self.far_end = connection.Pipe()
        self.start(replace(self._orders, connection=self.far_end), f"rank {self.number}")
        return True

    @property
    def pid(self) -> int:
        """The process, once it is started."""
        assert self._process is not None
        return self._process.pid

    @property
    def sources(self) -> list[Any]:
        ended = [] if self.report is not None or self._process is None else [self._process.sentinel]
        return [*super().sources, *ended]

    def listen(self) -> None:
        super().listen()
        if self.report is None and self._process is not None and (code := self._process.exitcode) is not None:
            self.report = failure.from_exit(self.number, code, self.output(), self._oom_kills)

    def ending(self) -> Failure:
        self.join(time.monotonic() + ANSWER)  # the end of the connection is a little ahead of the exit code
        code = None if self._process is None else self._process.exitcode
        if code is None:
            return self.failed("ended before it was done, and the fork server, which knows how, does not answer")
        return failure.from_exit(self.number, code, self.output(), self._oom_kills)

    def request_stack(self) -> None:
        self.send_signal(signal.SIGUSR1)
        for worker in forks_of(self.pid):
            time.sleep(DUMPED)  # stacks that are written to one log at a time mix
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGUSR1)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank alone, if it is alive."""
        if self._process is not None and self._process.exitcode is None:
            with suppress(ProcessLookupError):  # it has just ended; the fork server knows before this process does
                os.kill(self._process.pid, number)

    def send_signal_to_all(self, number: signal.Signals) -> None:
        """Send a signal to the rank and to everything that it started."""
        self.send_signal(number)  # it may not have its own process group yet
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):  # the group is empty
                os.killpg(self._process.pid, number)

    def join(self, deadline: float) -> bool:
        """Wait until the process has ended; True if it has, or never was started."""
        if self._process is not None:
            self._process.join(max(0.0, deadline - time.monotonic()))
        return self._process is None or self._process.exitcode is not None


class _LocalSupervision(Supervision):
    """Supervises forks; all of them end with the fork server."""

    def __init__(
        self,
        ranks: Sequence[_LocalRank],
        group: GroupOrders,
        rescue: bool,
        name: str | None,
        until: Callable[[], bool] | None,
    ) -> None:
        super().__init__(ranks, group, name, until)
        self._forks, self._rescue = ranks, rescue
        self.starting = Starting([rank.flight_record for rank in ranks])

    def check(self, now: float) -> None:
        self.starting.look()

    def replace_killed(self) -> None:
        first = self._forks[0].report
        if not self.group.elastic or isinstance(first, Failure):
            return
        for place, rank in enumerate(self._forks[1:], 1):
            if not isinstance(rank.report, Failure):
                continue
            what = rank.report.what
            if first is not None:  # all work is done
                if rank.report.code != failure.KILLED:
                    print(f"rank {rank.number} {what.rstrip('.')}; the others have done its work", flush=True)
                rank.report = Done(None)
            elif rank.report.code == failure.KILLED and rank.start_again():
                print(f"rank {rank.number} {what}; it is started anew", flush=True)
                if self.stall.signs:
                    self.stall.signs = [
                        Signs(rank.pid, computing=True) if at == place else sign
                        for at, sign in enumerate(self.stall.signs)
                    ]

    def raise_failed(self, failures: Sequence[Failure]) -> None:
        if failures and (ending := server_ending()):  # which leaves no exit codes
            raise RunFailed("MW715", f"the fork server, of which {self.name or 'every rank'} is a fork, {ending}.")
        try:
            super().raise_failed(failures)
        except RunFailed:
            if self._rescue:
                self._let_save()
            raise

    def _let_save(self) -> None:
        """Let all ranks save their state and end, also those that hang, but for stopped ones. Print why one saves
        nothing."""
        for place, rank in enumerate(self._forks):
            if self.stall.signs and self.stall.signs[place].stopped is not None:
                rank.send_signal(signal.SIGKILL)
            else:
                rank.send(messages.RESCUE)
        moved, before = time.monotonic(), list[int]()
        while waiting := [rank for rank in self._forks if not rank.join(0.0)]:
            progress = [cells[PROGRESS] for rank in waiting if (cells := read_cells(rank.flight_record))]
            if progress != before:
                moved, before = time.monotonic(), progress
            if time.monotonic() > moved + RESCUE:
                break
            waiting[0].join(time.monotonic() + LOOK)
        for rank in self._forks:
            reasons = [line for line in rank.output().splitlines() if line.startswith(leaving.NOTHING)]
            if rank in waiting:
                reasons.append(f"{leaving.NOTHING}it has written nothing for {RESCUE:g} s")
            for reason in reasons[-1:]:
                print(reason.replace("rescue:", f"rescue: rank {rank.number},", 1), flush=True)


def _stop(ranks: Sequence[_LocalRank]) -> None:
    """End every rank that is alive, and everything that any of them started."""
    warm().wake()
    if not all([rank.join(0.0) for rank in ranks]):
        for rank in ranks:
            rank.send_signal_to_all(signal.SIGTERM)
            rank.send_signal(signal.SIGKILL)  # the rank itself may treat SIGTERM as a request
        deadline = time.monotonic() + STOP
        for rank in ranks:
            rank.join(deadline)
    for rank in ranks:
        rank.send_signal_to_all(signal.SIGKILL)
        rank.close()
        rank.far_end.close()
    deadline = time.monotonic() + STOP
    for rank in ranks:
        rank.join(deadline)
        rank.flight_record.unlink(missing_ok=True)
