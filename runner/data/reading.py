"""Read ahead: worker processes read the coming micro-batches of a rank while it computes.

Which rows a micro-batch has is known beforehand (`runner.data.order`), so torch's DataLoader hands the coming ones out
to its workers, and returns their tensors in the same order. The invariant: a rank gets the same tensors with any number
of workers, because a row follows from (seed, epoch, row) alone. A worker makes its own dataset, as every rank does, so
that no two processes share the position in an open file.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, pairwise
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from runner.config.schema import Data
from runner.data.loader import SHARED_MEMORY
from runner.errors import ConfigError
from runner.launch import logs
from runner.launch.failure import UNWRITABLE, CauseOrder, Failure, Reported, from_exception, killed_by, oom_kills
from runner.launch.server import tie_to_parent
from runner.launch.temporary_folder import socket_folder

LOOKS = 6
"""Micro-batches after which `data.workers=auto` decides; the first is not counted."""
SHARE, SECONDS, IDLE = 0.02, 0.01, 0.001
"""Reading that takes more of the time between two micro-batches, and longer, is left to workers: more than IDLE seconds
where a GPU has nothing to do meanwhile."""
MOST = 16
"""Workers that `auto` starts at most."""


@dataclass(frozen=True)
class RowRequest:
    """The rows of one micro-batch, and the epoch to which they belong."""

    rows: tuple[int, ...]
    epoch: int


Load = Callable[[RowRequest], list[Tensor]]


class _MicroBatches(Dataset[Any]):
    """What a worker reads from, with the loader that `make` returns. What goes wrong is returned as a Failure."""

    def __init__(self, make: Callable[[], Load]) -> None:
        self._make, self._load = make, None

    def __getitem__(self, request: RowRequest) -> list[Tensor] | Failure:
        try:
            self._load = self._load or self._make()
            return self._load(request)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            return from_exception(0, error)

    _load: Load | None


class BatchReader:
    """Reads the micro-batches of one rank, in the order of `requests`.

    Args:
        load: reads one in this process.
        make: returns what reads one in another process.
        requests: all micro-batches that will be read.
        section: the keys of the config.
        pinned: whether the device copies from page-locked memory.
    """

    def __init__(
        self, load: Load, make: Callable[[], Load], requests: Iterable[RowRequest], section: Data, *, pinned: bool
    ) -> None:
        self._load, self._make, self._requests = load, make, iter(requests)
        self._section, self._pinned = section, pinned
        self._undecided = section.workers == "auto"
        self._looks: list[tuple[float, float, float]] = []
        self._ahead: Iterator[Any] | None = None
        self._pending: deque[RowRequest] = deque()
        self._processes: list[BaseProcess] = []
        self._sockets, self._resources = "", ExitStack()
        self._oom_kills: int | None = None
        self.workers = 0
        """How many processes read at the moment."""
        self.waited = 0.0
        """Seconds that `next` took, of all calls."""

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read ahead inside of the block."""
        if isinstance(self._section.workers, int):
            self._start(self._section.workers)
        try:
            yield
        finally:
            self.close()

    def next(self) -> list[Tensor]:
        """The next micro-batch, on the CPU.

        Raises:
            ConfigError: its rows do not make a batch.
            Reported: dataset or collate fail in a worker, or one has died. In this process exceptions of dataset and
                collate are passed on unchanged.
            OSError: there is no room for workers in shared memory.
        """
        started = time.perf_counter()
        try:
            return self._next(started)
        finally:
            self.waited += time.perf_counter() - started

    def _next(self, started: float) -> list[Tensor]:
        if self._ahead is None:
            busy = time.thread_time()
            tensors = self._load(next(self._requests))
            if self._undecided:
                self._decide(started, time.perf_counter(), time.thread_time() - busy)
            return [tensor.pin_memory() for tensor in tensors] if self._pinned else tensors
        found = self._read_ahead(self._ahead)
        if not isinstance(found, Failure):
            self._pending.popleft()
            return found
        if self._section.workers == "auto":  # what a process can read only itself
            self.close()
            logs.note(f"data: this rank reads without workers, because a worker {found.what}")
            return self._next(time.perf_counter())
        if found.refusal == "config":
            raise ConfigError(found.code, found.text)
        raise Reported(found)

    def _read_ahead(self, ahead: Iterator[Any]) -> list[Tensor] | Failure:
        try:
            found: list[Tensor] | Failure = next(ahead)
        except (RuntimeError, OSError, EOFError) as error:  # the last two where a tensor of a dead worker is fetched
            if isinstance(error, OSError) and error.errno in UNWRITABLE and error.filename is None:
                raise OSError(error.errno, error.strerror, SHARED_MEMORY) from error
            ended = self._processes and wait([process.sentinel for process in self._processes], timeout=5)
            for process in self._processes:
                if process.sentinel in ended:
                    process.join()  # its files are closed, and its connections reset, before its exit code is there
                    raise Reported(_death(process, self._oom_kills)) from error
            raise
        return found

    def close(self) -> None:
        """Stop the workers; micro-batches that they have read ahead will be read again."""
        if self._ahead is not None:
            self._requests = chain(tuple(self._pending), self._requests)
            self._ahead, self.workers = None, 0
            self._pending.clear()
            for process in self._processes:
                if process.is_alive():
                    process.kill()
            self._processes.clear()
        self._resources.close()
        self._sockets = ""

    def _decide(self, started: float, ended: float, busy: float) -> None:
        """Start workers where reading takes time: as many as keep up, but beyond 2 no more than keep the cores of this
        rank busy. `busy` are the seconds in which it computed."""
        self._looks.append((started, ended, busy))
        if len(self._looks) <= LOOKS:
            return
        self._undecided = False
        looks = self._looks[1:]
        between = min(after[0] - before[0] for before, after in pairwise(looks))
        reading, computing = min(end - start for start, end, _ in looks), min(busy for *_, busy in looks)
        if reading > (IDLE if self._pinned else SECONDS) and reading > SHARE * between:
            enough = math.ceil(reading / max(between - reading, SECONDS / 10)) + 1
            room = max(2, int(torch.get_num_threads() * reading / max(computing, reading / MOST)))
            self._start(min(enough, room, MOST))

    def _start(self, workers: int) -> None:
        self.workers = workers
        if not workers:
            return
        parts: Iterable[Iterable[RowRequest]] = [self._requests]
        if not self._section.persistent_workers:
            parts = (part for _, part in groupby(self._requests, attrgetter("epoch")))
        self._ahead = chain.from_iterable(map(self._read, parts))

    def _read(self, requests: Iterable[RowRequest]) -> Iterator[Any]:
        """The micro-batches of `requests`, from new workers."""

        def handed_out() -> Iterator[RowRequest]:
            for request in requests:
                self._pending.append(request)
                yield request

        before, self._oom_kills = {process.pid for process in active_children()}, oom_kills()
        if not self._sockets:
            self._sockets = str(self._resources.enter_context(socket_folder()))
        with warnings.catch_warnings():
            # torch counts processors where a worker may wait for a disk; python 3.12 warns of threads, of which a
            # worker uses none.
            warnings.simplefilter("ignore")
            loader = iter(
                DataLoader(
                    _MicroBatches(self._make),
                    batch_size=None,
                    sampler=handed_out(),
                    collate_fn=_unchanged,
                    num_workers=self.workers,
                    prefetch_factor=self._section.prefetch,
                    pin_memory=self._pinned,
                    worker_init_fn=partial(_begin, os.getpid(), self._sockets),
                    multiprocessing_context="fork",
                    generator=torch.Generator(),  # else it would draw its seed from the generator of training
                )
            )
        self._processes = [process for process in active_children() if process.pid not in before]
        # torch's handler would raise at any place, in the midst of a step or of another exception's handler. Without it
        # a dead worker is found where its micro-batch does not come, within 5 s.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        yield from loader


def _death(process: BaseProcess, oom_kills_before: int | None) -> Failure:
    """The failure of a rank whose worker has ended by itself."""
    code = process.exitcode or 0
    how = killed_by(-code, oom_kills_before) if code < 0 else f"ended with exit code {code}"
    text = f"lost its data worker, process {process.pid}, which {how}"
    remedy = "data.workers=0 reads in the rank itself"
    if code in (-signal.SIGKILL, -signal.SIGBUS):
        remedy = f"data.prefetch=1 or fewer data.workers take less memory, {remedy}"
    return Failure(0, time.monotonic(), CauseOrder.CAUSE, f"{text}; {remedy}", code="MW820")


def _unchanged(value: Any) -> Any:
    return value


def _begin(rank: int, sockets: str, number: int) -> None:
    """Tie a worker to the process `rank`, which alone decides when it ends: a scheduler sends its signals to all
    processes, and the rank still trains to the end of a step. Its tensors are fetched from a socket in `sockets`."""
    signal.set_wakeup_fd(-1)  # shared with the rank, which would take a signal of the worker for its own
    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signal_number, signal.SIG_IGN)
    tie_to_parent(signal.SIGKILL, rank)
    folder, tempfile.tempdir = tempfile.gettempdir(), sockets
    get_temp_dir()  # made once, where tempfile says
    tempfile.tempdir = folder
