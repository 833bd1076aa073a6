"""Saving, while the ranks wait or beside training.

A rank writes its own files under a hidden name; rank 0 waits for all of them and puts them together (see `committing`).
Beside training, a step pays for a copy of the rank's pieces in the host's memory, and a thread does the rest; there is
one save at a time, so a rank never holds more than one copy. Invariant: what is stored is what was there when `save`
was called, whatever training does meanwhile.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from runner.checkpoints import committing, content, folder, writing
from runner.checkpoints.committing import Mark, SaveFailed, Wanted
from runner.checkpoints.content import Content
from runner.checkpoints.header import Header
from strategies.engine.pieces import Piece, Pieces

SHARDED = Wanted()
TIMEOUT = 600.0


def save(
    path: Path,
    step: int,
    given: Content,
    wanted: Wanted = SHARDED,
    *,
    position: tuple[int, int] = (0, 0),
    metric: float | None = None,
) -> Path:
    """Store `given` after optimizer step `step` as `path/step-...`, which is returned. Collective.

    An interrupted save leaves a hidden folder, which `folder.clean` removes; the checkpoints before it are not touched.
    Raises SaveFailed and OSError (a full disk), ConfigError for a state that no checkpoint can hold.
    """
    partial = folder.hidden(folder.target(path, step))
    if given.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier(given)
    _Save(partial, given, wanted, _header(step, given, wanted, position, metric)).run(
        content.pieces(given, wanted.copies)
    )
    _barrier(given)
    return folder.target(path, step)


class Saver:
    """Saves beside training. Every rank has one; `save` is called by all of them in the same order."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._buffers: dict[str, list[Tensor]] = {}

    def save(
        self,
        path: Path,
        step: int,
        given: Content,
        wanted: Wanted = SHARDED,
        *,
        position: tuple[int, int] = (0, 0),
        metric: float | None = None,
    ) -> None:
        """As the function `save`, but return as soon as everything is copied; wait for the save before. Calls no
        collective. Raises what that one raised."""
        self.wait()
        partial = folder.hidden(folder.target(path, step))
        partial.mkdir(parents=True, exist_ok=True)
        header = _header(step, given, wanted, position, metric)
        work = _Save(partial, given, wanted, header)
        copied, ready = self._copied(content.pieces(given, wanted.copies))

        def run() -> None:
            try:
                if ready is not None:
                    ready.synchronize()
                work.run(copied)
            except BaseException as error:  # told by the next call of this object
                self._failure = error

        self._thread = threading.Thread(target=run, name=f"save-{step}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what the last save raised, if it has."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Return when nothing is being saved any more. Raises what the last save raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    @property
    def held(self) -> int:
        """Bytes of the copies in the host's memory, which are used again."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers)

    def _copied(self, pieces: Pieces) -> tuple[dict[str, list[Piece]], torch.cuda.Event | None]:
        """Copies of `pieces` in memory that is used again, and when they are there (None: now)."""
        found: dict[str, list[Piece]] = {}
        on_gpu = False
        with torch.no_grad():
            for key, ones in pieces.items():
                buffers = self._fitting(key, ones)
                for buffer, one in zip(buffers, ones, strict=True):
                    buffer.copy_(one.view, non_blocking=True)
                    on_gpu = on_gpu or one.view.is_cuda
                found[key] = [replace(one, view=buffer) for buffer, one in zip(buffers, ones, strict=True)]
        if not on_gpu:
            return found, None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return found, event

    def _fitting(self, key: str, pieces: Sequence[Piece]) -> list[Tensor]:
        held = self._buffers.get(key, [])
        shapes = [(one.view.shape, one.view.dtype) for one in pieces]
        if [(buffer.shape, buffer.dtype) for buffer in held] != shapes:
            held = [torch.empty(one.view.shape, dtype=one.view.dtype, pin_memory=one.view.is_cuda) for one in pieces]
            self._buffers[key] = held
        return held


class _Save:
    """One rank's part of one save: everything but the pieces is taken at once, and `run` calls no collective."""

    def __init__(self, partial: Path, given: Content, wanted: Wanted, header: Header) -> None:
        self._partial, self._wanted, self._header = partial, wanted, header
        self._rank, self._stage = given.rank, given.communicator.stage
        self._needed = given.communicator.rank < wanted.copies
        self._world = given.communicator.world
        self._published, self._described = given.published, given.described
        self._plain = content.plain(given, wanted.copies)

    def run(self, pieces: Pieces) -> None:
        try:
            self.write(pieces)
        except BaseException as error:
            committing.give_up(self._partial, self._rank, error)
            if isinstance(error, OSError):
                raise SaveFailed(
                    f"rank {self._rank} could not write its part of {committing.shown(self._partial)}: {error}"
                ) from error
            raise
        if self._rank == 0:
            marks = committing.await_marks(self._partial, self._world, TIMEOUT)
            try:
                committing.commit(self._partial, marks, self._header, self._wanted, self._published, self._described)
            except OSError as error:
                raise SaveFailed(f"{committing.shown(self._partial)} could not be completed: {error}") from error

    def write(self, pieces: Pieces) -> None:
        """Write this rank's files, and say that they are there."""
        from runner.checkpoints import dcp  # imports much, at the first save

        name = f"rank-{self._rank:05d}"
        plain = writing.write_bytes(self._partial / f"{name}.pt", self._plain)
        stamp, index = dcp.store(self._partial, f"{name}.safetensors", pieces)
        files = {f"{name}.pt": plain, f"{name}.safetensors": stamp}
        needed = f"{name}.pt" if self._needed else None
        committing.leave(self._partial, Mark(self._rank, self._stage, files, index, needed))


def write_alone(partial: Path, given: Content, header: Header, pieces: Pieces) -> None:
    """Write this rank's part into the folder `partial`, whatever becomes of the others. Raises OSError."""
    _Save(partial, given, Wanted(copies=given.communicator.world), header).write(pieces)


def _header(step: int, given: Content, wanted: Wanted, position: tuple[int, int], metric: float | None) -> Header:
    world = given.communicator.world
    return Header(step, position, wanted.form, world, given.plan, given.config, given.fingerprint, {}, (), metric)


def _barrier(given: Content) -> None:
    if given.communicator.world > 1:
        dist.barrier()
