"""Saving checkpoints, blocking or in the background.

A rank writes its own files under a hidden name; rank 0 waits for all of them and puts them together (see `committing`).
Beside training, a thread copies the rank's pieces to the host's memory until the next update (see `Copies`), and
writes them with low CPU priority; there is one save at a time, so a rank never holds more than one
copy. Invariant: a checkpoint is a snapshot of the state at the call of `save`, whatever training does meanwhile.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from runner.checkpoint import committing, content, folder, writing
from runner.checkpoint.committing import Mark, SaveFailed, SaveOptions
from runner.checkpoint.content import Content
from runner.checkpoint.manifest import Header
from strategies.runtime.flight_recorder import SAVES, recorder
from strategies.runtime.shards import Shard, Shards

SHARDED = SaveOptions()
TIMEOUT = 3600.0
"""Seconds that nothing may be written while a rank waits for others; one that dies or hangs is noticed earlier, by
whoever started it."""
LOWEST = 19


def save(
    path: Path,
    step: int,
    given: Content,
    wanted: SaveOptions = SHARDED,
    *,
    position: tuple[int, int] = (0, 0),
    metric: float | None = None,
) -> Path:
    """Save a checkpoint while the ranks wait (collective).

    An interrupted save leaves a hidden folder, which `folder.clean` removes; checkpoints before it are not touched.

    Args:
        path: the folder of the run's checkpoints.
        step: the optimizer step after which this is.
        given: the state of this rank.
        wanted: form, copies and retention.
        position: epoch and row at which the data continues.
        metric: the value by which the best checkpoint is chosen.

    Returns:
        The checkpoint, `path/step-...`.

    Raises:
        SaveFailed, OSError: a rank could not write its part, such as on a full disk.
        ConfigError: the optimizer's state has something that no checkpoint can store.
    """
    partial = folder.hidden(folder.target(path, step))
    recorder.cells[SAVES] += 1
    if given.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    _Save(partial, given, wanted, header_of(step, given, wanted, position, metric)).run(
        content.pieces(given, 1 if given.split else wanted.copies)
    )
    _barrier()
    return folder.target(path, step)


class Copies:
    """Copies of a rank's pieces in the host's memory, made while training computes the next gradients.

    Weights and optimizer states change in updates alone, so there is time until the next one: another thread copies (on
    a GPU on a separate stream, to pinned memory), and `wait_for_copies`, before an update, waits for the remaining
    copies. What changes earlier, such as the statistics of a batch norm, is copied at once. Buffers are reused; there
    is one set of copies at a time, a snapshot of the values at `begin`.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, list[Tensor]] = {}
        self._left: list[tuple[Tensor, Tensor]] = []
        self._begun: torch.cuda.Event | None = None
        self._ended: torch.cuda.Event | None = None
        self._under_way = threading.Event()
        self._under_way.set()

    @property
    def bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers)

    def begin(self, pieces: Shards, at_once: Collection[str]) -> dict[str, list[Shard]]:
        """Start copying `pieces` and return the destination tensors; those of the keys `at_once` are complete on
        return."""
        self._under_way.clear()
        self._left, self._ended = [], None
        found: dict[str, list[Shard]] = {}
        for key, ones in pieces.items():
            found[key] = [replace(one, view=buffer) for buffer, one in zip(self._fitting(key, ones), ones, strict=True)]
            pairs = [(copy.view, one.view) for copy, one in zip(found[key], ones, strict=True)]
            if key in at_once:
                _copy(pairs, False)
            else:
                self._left += pairs
        device = next((source.device for _, source in self._left if source.is_cuda), None)
        self._begun = None if device is None else torch.cuda.current_stream(device).record_event()
        return found

    def carry_out(self) -> None:
        """Make the remaining copies; runs in a background thread. Returns when everything is copied."""
        try:
            if self._begun is None:
                _copy(self._left, False)
                return
            device = next(source.device for _, source in self._left if source.is_cuda)
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                stream.wait_event(self._begun)
                _copy(self._left, True)
                self._ended = stream.record_event()
        finally:
            self._left = []
            self._under_way.set()
        self._ended.synchronize()

    def wait_for_copies(self) -> None:
        """Return when the copied tensors may change: on a GPU, by kernels launched from now on."""
        self._under_way.wait()
        if self._ended is not None:
            torch.cuda.current_stream().wait_event(self._ended)

    def _fitting(self, key: str, pieces: Sequence[Shard]) -> list[Tensor]:
        buffers = self._buffers.get(key, [])
        shapes = [(one.view.shape, one.view.dtype) for one in pieces]
        if [(buffer.shape, buffer.dtype) for buffer in buffers] != shapes:
            buffers = [torch.empty(one.view.shape, dtype=one.view.dtype, pin_memory=one.view.is_cuda) for one in pieces]
            self._buffers[key] = buffers
        return buffers


def _copy(pairs: Sequence[tuple[Tensor, Tensor]], later: bool) -> None:
    with torch.no_grad():
        for copy, source in pairs:
            copy.copy_(source, non_blocking=later)


class Saver:
    """Saves in the background. Every rank has one; all ranks call `save` in the same order."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._copies = Copies()

    def save(
        self,
        path: Path,
        step: int,
        given: Content,
        wanted: SaveOptions = SHARDED,
        *,
        position: tuple[int, int] = (0, 0),
        metric: float | None = None,
    ) -> None:
        """As the function `save`, but return at once, or when the save before is done; call `wait_for_copies` before
        weights change. No collective but a barrier where the save before is not done. Raises the error of that save."""
        self.wait()
        recorder.cells[SAVES] += 1
        partial = folder.hidden(folder.target(path, step))
        partial.mkdir(parents=True, exist_ok=True)
        header = header_of(step, given, wanted, position, metric)
        work = _Save(partial, given, wanted, header)
        copied = self._copies.begin(content.pieces(given, 1 if given.split else wanted.copies), given.buffers().keys())

        def run() -> None:
            try:
                self._copies.carry_out()
                _step_back()
                work.run(copied)
            except BaseException as error:  # raised by the next call of this object
                self._failure = error

        self._thread = threading.Thread(target=run, name=f"save-{step}", daemon=True)
        self._thread.start()

    def wait_for_copies(self) -> None:
        """Before every update: return when weights and states may change."""
        self._copies.wait_for_copies()

    def check(self) -> None:
        """Raise the error of the last save, if any."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Return when nothing is being saved any more, on any rank: none waits for another one that still writes in a
        collective of training. Raises the error of the last save."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        self.check()
        if thread is not None:
            _barrier()

    @property
    def busy(self) -> bool:
        """Whether something is being saved."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the reusable host buffers."""
        return self._copies.bytes


class _Save:
    """One rank's part of one save: everything but the pieces is taken at once, and `run` calls no collective."""

    def __init__(self, partial: Path, given: Content, wanted: SaveOptions, header: Header) -> None:
        self._partial, self._wanted, self._header = partial, wanted, header
        self._rank, self._stage = given.rank, given.communicator.stage
        self._needed = given.communicator.rank < wanted.copies
        self._world = given.communicator.world
        self._backward = wanted.copies if given.split else 1
        """Of how many ranks this one stores the files, itself and those before it: what ZeRO partitions is in the
        memory of one rank alone."""
        self._published, self._described = given.published, given.described
        self._plain = content.plain(given, wanted.copies)
        self._run = given.lineage.run

    def run(self, pieces: Shards) -> None:
        try:
            self.write(pieces)
        except BaseException as error:
            committing.give_up(self._partial, self._rank, error)
            if isinstance(error, OSError):
                raise SaveFailed(
                    f"rank {self._rank} could not write its part of {committing.shown(self._partial)}: {error}"
                ) from error
            raise
        recorder.cells[SAVES] += 1
        if self._rank == 0:
            marks = committing.await_marks(self._partial, self._world, TIMEOUT)
            try:
                committing.commit(self._partial, marks, self._header, self._wanted, self._published, self._described)
            except OSError as error:
                raise SaveFailed(f"{committing.shown(self._partial)} could not be completed: {error}") from error

    def write(self, pieces: Shards) -> None:
        """Write this rank's files and its mark."""
        name = f"rank-{self._rank:05d}"
        plain = writing.write_bytes(self._partial / f"{name}.pt", self._plain)
        stamp, index = writing.write(self._partial / f"{name}.safetensors", writing.of_shards(pieces))
        files = {f"{name}.pt": plain, f"{name}.safetensors": stamp}
        needed, copies = f"{name}.pt" if self._needed else None, {}
        for back in range(1, min(self._backward, self._world)):
            other = (self._rank - back) % self._world
            copy = f"{name}.copy-of-{other:05d}.safetensors"
            copies[copy], files[copy] = committing.copy_of(self._partial, other, copy, TIMEOUT)
        committing.leave(self._partial, Mark(self._rank, self._stage, files, index, needed, copies, self._run))


def _step_back() -> None:
    """Lower the priority of this thread below training. Linux has per-thread priorities; elsewhere they are per
    process."""
    if os.uname().sysname == "Linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)


def write_alone(partial: Path, given: Content, header: Header, pieces: Shards) -> None:
    """Write this rank's part into the folder `partial`, independently of the others. Raises OSError."""
    _Save(partial, given, SaveOptions(copies=given.communicator.world), header).write(pieces)


def header_of(
    step: int, given: Content, wanted: SaveOptions, position: tuple[int, int], metric: float | None
) -> Header:
    world, form, of = given.communicator.world, wanted.form, given.lineage
    identity = given.plan, given.config, given.fingerprint
    return Header(step, position, form, world, *identity, {}, (), metric, given.samples, of.run, of.history)


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(_patient())


@cache
def _patient() -> dist.ProcessGroup:
    """A process group of all ranks without launch.timeout, since writing may take longer."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    return group
