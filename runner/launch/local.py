"""The ranks of one run on this machine: forks of the fork server, monitored until the last one has ended.

Invariant: however `run_ranks` ends (result, failure, Ctrl-C, SIGTERM), no rank and nothing that a rank started is alive
afterwards; should the parent be killed, the fork server ends them.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from runner.errors import RunFailed
from runner.launch import failure, hangs, messages, network
from runner.launch.failure import CauseOrder, Done, Failure, raise_failed
from runner.launch.forks import Fork, fork, server_ending, warm
from runner.launch.hangs import Stall
from runner.launch.interrupts import Interrupts, error_of
from runner.launch.liveness import Signs
from runner.launch.logs import read_since
from runner.launch.messages import STOP as STOP_ORDER
from runner.launch.orders import OPEN_FILES, Orders, flight_record_of, log_of
from runner.launch.rank import enter
from runner.launch.server import Descriptor
from runner.launch.startup import Starting

# Seconds. From the first failure on, the worst case is ECHO + DUMP + 2 STOP, within the 5 s promised in total.
CAUSE = 0.3  # to learn which other ranks failed independently at the same time
ECHO = 2.0  # to learn the cause behind a timeout or a lost connection
STOP = 1.0  # between asking a rank to end and killing it
RESCUE = 10.0  # for the other ranks to save their state
LOOK = 1.0  # between two polls of the flight records


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
    address: str
    port: int

    @classmethod
    def all_of(cls, world_size: int) -> LocalRanks:
        """All ranks on this machine."""
        every = tuple(range(world_size))
        return cls(every, every, network.LOOPBACK, 0)


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
    part: LocalRanks | None = None,
    name: str | None = None,
) -> Any:
    """Call `entry` in `world_size` new processes that form one process group; return its result in rank 0.

    Args:
        entry: "package.module:function", called in each rank with (runner.launch.worker.RankContext, payload).
        payload: plain data that pickle can carry; so must be the result of rank 0.
        run_dir: every rank writes `run_dir/ranks/RANK.log`, appending; rank 0's stdout is shown on the console too.
        device: "cpu" (gloo) or "cuda" (nccl; rank r takes GPU r).
        timeout: seconds that a rank may wait for another one in a collective.
        threads: torch's threads per rank.
        stoppable: the ranks can stop after the current step, and return; the first signal requests it, Ctrl-C only
            where that saves something.
        rescue: after a failure the other ranks get time to save their state.
        part: which of the ranks are started here, and where they meet the others; None: all. Without rank 0 here the
            result is None.
        name: the name of a single process that is not a rank, such as "the preparation".

    Raises:
        RunFailed: a rank raised, died or hung; the text names it, the place, and shows the end of its log.
        ConfigError, StrategyError: a rank raised one of these, which say that the input is wrong.
        KeyboardInterrupt: SIGINT arrived, or SIGTERM or SIGHUP (Terminated).
    """
    together = part is None and Path(OPEN_FILES).is_dir()
    part = part or LocalRanks.all_of(world_size)
    if network.is_loopback(part.address):
        network.require_loopback()
    run_dir = run_dir.absolute()
    (run_dir / "ranks").mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()  # the parent's output comes before that of rank 0
    warm()
    ranks = [_Rank(rank, run_dir) for rank in part.ranks]
    starting = Starting([rank.flight_record for rank in ranks])

    def stop(number: int) -> bool:
        if number == signal.SIGINT and not hangs.any_step_done([rank.flight_record for rank in ranks]):
            return False
        for rank in ranks:
            rank.request_stop()
        return True

    with Interrupts(stop if stoppable else None) as interrupts, ExitStack() as resources:
        content = resources.enter_context(tempfile.TemporaryFile())
        pickle.dump(payload, content, protocol=pickle.HIGHEST_PROTOCOL)
        content.flush()
        store = resources.enter_context(tempfile.TemporaryFile()) if together else None
        listener = None
        if 0 in part.ranks and store is None:
            listener = resources.enter_context(network.listener(part.address, part.port))
        port = part.port if listener is None else listener.getsockname()[1]
        try:
            for local_rank, rank in enumerate(ranks):
                first = rank.number == 0
                orders = Orders(
                    entry=entry,
                    rank=rank.number,
                    world_size=world_size,
                    local_rank=local_rank,
                    local_world_size=len(ranks),
                    run_dir=run_dir,
                    device="cpu" if device == "cpu" else f"cuda:{part.devices[local_rank]}",
                    timeout=timeout,
                    threads=threads,
                    environment=dict(os.environ),
                    payload=Descriptor(content.fileno()),
                    store=None if store is None else Descriptor(store.fileno()),
                    address=part.address,
                    port=port,
                    secret="",
                    listener=Descriptor(listener.fileno()) if first and listener is not None else None,
                    console=Descriptor(1) if first else None,
                    plain=False,
                    connection=rank.far_end,
                )
                starting.look()
                rank.start(orders, name or f"rank {rank.number}")
            if listener is not None:
                listener.close()  # rank 0 holds it now; without rank 0 nothing may connect
            signs = [Signs(rank.pid, computing=device == "cpu") for rank in ranks]
            hung = _watch(ranks, starting, Stall([rank.flight_record for rank in ranks], timeout, signs))
            failures = [rank.report for rank in ranks if isinstance(rank.report, Failure)]
            if failures and interrupts.stopping:
                raise error_of(interrupts.requested)  # which reached ranks that were not training yet
            if failures or hung:
                if failures and (ending := server_ending()):  # which leaves no exit codes
                    raise RunFailed("MW715", f"the fork server, of which {name or 'every rank'} is a fork, {ending}.")
                try:
                    raise_failed(failures, ranks, run_dir, world_size, timeout, name)
                except RunFailed as failed:
                    if rescue:
                        _let_rescue(ranks, failed.hung)
                    raise
        finally:
            interrupts.hold()
            _stop(ranks)
            for rank in ranks:
                rank.flight_record.unlink(missing_ok=True)
    result = ranks[0].report
    assert isinstance(result, Done)
    return None if result.value is None else pickle.loads(result.value)


class _Rank:
    """The parent's handle of one rank. `report` is its outcome, None until received."""

    def __init__(self, number: int, run_dir: Path) -> None:
        self.number = number
        self.log, self.flight_record = log_of(run_dir, number), flight_record_of(run_dir, number)
        self.flight_record.unlink(missing_ok=True)
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        self.report: Done | Failure | None = None
        self.ended = False
        self.connection, self.far_end = connection.Pipe()
        self._process: Fork | None = None

    def start(self, orders: Orders, name: str) -> None:
        """Start the process and hand it the far end of the connection with its `orders`."""
        self._process = fork(enter, (orders,), name, orders.timeout)
        self.far_end.close()

    @property
    def pid(self) -> int:
        """The process, once it is started."""
        assert self._process is not None
        return self._process.pid

    @property
    def sources(self) -> list[Any]:
        """The handles to wait for: the report until received, and the end of the process."""
        end = [] if self.ended or self._process is None else [self._process.sentinel]
        return [self.connection, *end] if self.report is None else end

    def listen(self) -> None:
        """Receive pending messages without blocking."""
        assert self._process is not None
        if self.report is None:
            try:
                if self.connection.poll(0):
                    self.report = messages.reported(self.connection)
            except (EOFError, ConnectionError):
                self._process.join(STOP)  # the end of the connection is a little ahead of the exit code
                if self._process.exitcode is None:
                    what = "ended before it was done, and the fork server, which knows how, does not answer"
                    self.report = Failure(self.number, time.monotonic(), CauseOrder.CAUSE, what)
        code = self._process.exitcode
        self.ended = code is not None
        if self.report is None and code is not None:
            self.report = failure.from_exit(self.number, code, self.said())

    def said(self) -> str:
        """This rank's log output since its start."""
        return read_since(self.log, self.log_start)

    def request_stop(self) -> None:
        """Request the rank to stop after the current step."""
        try:
            messages.send(self.connection, STOP_ORDER)
        except OSError:
            return  # it has ended, which `listen` reports

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank alone, if it is alive."""
        if self._process is not None and self._process.exitcode is None:
            try:
                os.kill(self._process.pid, number)
            except ProcessLookupError:
                return  # it has just ended; the fork server knows before this process does

    def send_signal_to_all(self, number: signal.Signals) -> None:
        """Send a signal to the rank and to everything that it started."""
        self.send_signal(number)  # it may not have its own process group yet
        if self._process is not None:
            try:
                os.killpg(self._process.pid, number)
            except (ProcessLookupError, PermissionError):
                return  # the group is empty

    def wait(self, seconds: float) -> bool:
        """Wait until the process has ended, `seconds` at most; True if it has, or never was started."""
        if self._process is None:
            return True
        self._process.join(max(0.0, seconds))
        return self._process.exitcode is not None

    def close(self) -> None:
        """Close the connection, upon which a rank that is still alive ends itself."""
        self.connection.close()
        self.far_end.close()


def _watch(ranks: Sequence[_Rank], starting: Starting, stall: Stall) -> bool:
    """Return when all ranks have ended well, or when one has failed and the others had time to say why; True where they
    hang, and none has noticed."""
    deadline: float | None = None
    while True:
        for rank in ranks:
            rank.listen()
        failures = [rank.report for rank in ranks if isinstance(rank.report, Failure)]
        now = time.monotonic()
        if failures:
            limit = CAUSE if failure.root_cause(failures).order is CauseOrder.CAUSE else ECHO
            deadline = min(deadline or now + limit, now + limit)
        elif all(rank.report for rank in ranks):
            deadline = deadline or now + STOP  # to exit; killing a rank during its exit loses nothing
        sources = [source for rank in ranks for source in rank.sources]
        if failures and all(rank.report for rank in ranks):
            return False
        if not sources or (deadline is not None and now >= deadline):
            return False
        starting.look()
        if deadline is None and stall.found():
            return True
        connection.wait(sources, LOOK if deadline is None else deadline - now)


def _let_rescue(ranks: Sequence[_Rank], hung: Sequence[int]) -> None:
    """End the ranks that hang, so that the others notice, and give these time to save."""
    for rank in ranks:
        if rank.number in hung:
            rank.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + RESCUE
    for rank in ranks:
        rank.wait(deadline - time.monotonic())


def _stop(ranks: Sequence[_Rank]) -> None:
    """End every rank that is alive, and everything that any of them started."""
    warm().wake()
    if not all(rank.wait(0) for rank in ranks):
        for rank in ranks:
            rank.send_signal_to_all(signal.SIGTERM)
            rank.send_signal(signal.SIGKILL)  # the rank itself may treat SIGTERM as a request
        deadline = time.monotonic() + STOP
        for rank in ranks:
            rank.wait(deadline - time.monotonic())
    for rank in ranks:
        rank.send_signal_to_all(signal.SIGKILL)
        rank.close()
    deadline = time.monotonic() + STOP
    for rank in ranks:
        rank.wait(deadline - time.monotonic())
