"""Saving checkpoints, blocking or in the background.

A rank writes its files under a hidden name, and then a mark next to them; rank 0, once all marks exist, merges them and
renames the folder. Marks are files, so saving needs no collective. Beside training, a thread copies the rank's shards
to the host's memory until the next update (see `Copies`), from which a process of low CPU priority writes them; there
is one save at a time. Invariants: a checkpoint is a snapshot of the state at the call of `save`, whatever training does
meanwhile; a folder gets its name when every element of every tensor is in some file that is on the disk, and not
before.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from operator import gt, lt
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from runner.checkpoint import branch, content, folder, index, writing
from runner.checkpoint.content import Content
from runner.checkpoint.folder import HEADER, INDEX
from runner.checkpoint.manifest import Header, Stamp, to_text
from runner.checkpoint.reading import Checkpoint
from runner.checkpoint.shared_buffers import SharedBuffers, WrittenFile
from strategies.runtime.flight_recorder import SAVES, recorder
from strategies.runtime.shards import Shard, Shards
from strategies.runtime.tensor_files import StoredTensor

SHARDED, MERGED = "sharded", "merged"
SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.25
"""Seconds between two looks at what other ranks have written: at first, and after a while."""
TIMEOUT = 3600.0
"""Seconds that nothing may be written while a rank waits for others; one that dies or hangs is noticed earlier, by
whoever started it."""


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. The text says which rank and why."""


@dataclass(frozen=True)
class SaveOptions:
    """How to save: the `form` (sharded, merged or both), how many copies of what replicas hold, how many checkpoints to
    `keep`. `best` says which metric is better ("min" or "max"), where the best one is kept too."""

    form: str = SHARDED
    copies: int = 1
    keep: int | None = None
    best: str | None = None


DEFAULT = SaveOptions()


@dataclass(frozen=True)
class Mark:
    """The files that a rank has written. `stage` is its pipeline group; `plain` its file of non-tensor state, if other
    ranks need it; `copies` those of its files that are copies, with the files of which they are; `run` the id of its
    run."""

    rank: int
    stage: int
    files: Mapping[str, Stamp]
    tensors: Mapping[str, StoredTensor]
    plain: str | None
    copies: Mapping[str, str] = field(default_factory=dict)
    run: str = ""


_MARK = TypeAdapter(Mark)


class Saver:
    """Saves checkpoints while the ranks wait, or in the `background`. Every rank has one; all ranks call `save` in the
    same order."""

    def __init__(self, background: bool = True) -> None:
        self._background = background
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._copies = Copies()
        self._known: dict[tuple[int, int], content.Stored] = {}

    def save(
        self,
        path: Path,
        step: int,
        given: Content,
        wanted: SaveOptions = DEFAULT,
        *,
        position: tuple[int, int] = (0, 0),
        metric: float | None = None,
    ) -> Path:
        """Save a checkpoint (collective).

        In the background, return at once, or when the save before is done, and call no collective but a barrier where
        that is not done; call `wait_for_copies` before weights change. An interrupted save leaves a hidden folder,
        which `folder.clean` removes; checkpoints before it are not touched.

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
            SaveFailed, OSError: a rank could not write its part, such as on a full disk; in the background that of the
                save before.
            ConfigError: the optimizer's state has something that no checkpoint can store.
        """
        self.wait()
        recorder.cells[SAVES] += 1
        target = folder.target(path, step)
        partial = folder.hidden(target)
        if not self._background:
            if given.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            _barrier()
        partial.mkdir(parents=True, exist_ok=True)
        work = RankSave(partial, given, wanted, header_of(step, given, wanted.form, position, metric))
        known = self._known.setdefault((id(given.program), work.replicas), {})
        shards = content.shards(given, work.replicas, known)
        if not self._background:
            work.run(shards)
            _barrier()
            return target
        copied = self._copies.begin(shards, given.buffers().keys())

        def run() -> None:
            try:
                self._copies.carry_out()
                work.run(copied, self._copies.opener())
            except BaseException as error:  # raised by the next call of this object
                self._failure = error

        self._thread = threading.Thread(target=run, name=f"save-{step}", daemon=True)
        self._thread.start()
        return target

    def wait_for_copies(self) -> None:
        """Wait until weights and states may change; called before every update."""
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

    def close(self) -> None:
        """Return when everything is saved, as `wait`, and nothing more will be."""
        self.wait()
        self._copies.close()

    @property
    def busy(self) -> bool:
        """Whether something is being saved."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the reusable host buffers."""
        return self._copies.bytes


class Copies:
    """Copies of a rank's shards in the host's memory, made while training computes the next gradients.

    Weights and optimizer states change in updates alone, so there is time until the next one: another thread copies (on
    a GPU on a separate stream, to pinned memory), and `wait_for_copies`, before an update, waits for the remaining
    copies. What changes earlier, such as the statistics of a batch norm, is copied at once. Buffers are reused; there
    is one set of copies at a time, a snapshot of the values at `begin`.
    """

    def __init__(self) -> None:
        self._buffers = SharedBuffers({}, False)
        self._remaining: list[tuple[Tensor, Tensor]] = []
        self._start: torch.cuda.Event | None = None
        self._end: torch.cuda.Event | None = None
        self._under_way = threading.Event()
        self._under_way.set()

    @property
    def bytes(self) -> int:
        """The bytes of all buffers."""
        return self._buffers.bytes

    def opener(self) -> Callable[[Path], WrittenFile] | None:
        """What opens a file for the copies."""
        return self._buffers.opener()

    def close(self) -> None:
        """Nothing more will be written."""
        self._buffers.close()

    def begin(self, shards: Shards, at_once: Collection[str]) -> dict[str, list[Shard]]:
        """Start copying `shards` and return the destination tensors; those of the keys `at_once` are complete on
        return."""
        self._under_way.clear()
        self._remaining, self._end = [], None
        copies: dict[str, list[Shard]] = {}
        self._fit(shards)
        for key, ones in shards.items():
            buffers = self._buffers.tensors[key]
            copies[key] = [replace(one, view=buffer) for buffer, one in zip(buffers, ones, strict=True)]
            pairs = [(buffer, one.view) for buffer, one in zip(buffers, ones, strict=True)]
            if key in at_once:
                _copy(pairs, False)
            else:
                self._remaining += pairs
        device = self._device()
        self._start = None if device is None else torch.cuda.current_stream(device).record_event()
        return copies

    def carry_out(self) -> None:
        """Make the remaining copies; runs in a background thread. Returns when everything is copied."""
        try:
            if self._start is None:
                _copy(self._remaining, False)
                return
            stream = torch.cuda.Stream(self._device())  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                stream.wait_event(self._start)
                _copy(self._remaining, True)
                self._end = stream.record_event()
        finally:
            self._remaining = []
            self._under_way.set()
        self._end.synchronize()

    def wait_for_copies(self) -> None:
        """Return when the copied tensors may change: on a GPU, by kernels launched from now on."""
        self._under_way.wait()
        if self._end is not None:
            torch.cuda.current_stream().wait_event(self._end)

    def _device(self) -> torch.device | None:
        return next((source.device for _, source in self._remaining if source.is_cuda), None)

    def _fit(self, shards: Shards) -> None:
        """Make buffers for `shards`, unless those that there are fit."""
        shapes = {key: [(one.view.shape, one.view.dtype) for one in ones] for key, ones in shards.items()}
        pinned = any(one.view.is_cuda for ones in shards.values() for one in ones)
        if (shapes, pinned) != (self._buffers.shapes, self._buffers.pinned):
            self._buffers.close()
            self._buffers = SharedBuffers(shapes, pinned)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]], later: bool) -> None:
    """Copy tensors in one call, for which the interpreter's lock is given up once."""
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([copy for copy, _ in pairs], [source for _, source in pairs], non_blocking=later)


class RankSave:
    """One rank's part of one save into the folder `partial`: everything but the shards is taken at once, and `run`
    calls no collective."""

    def __init__(self, partial: Path, given: Content, wanted: SaveOptions, header: Header) -> None:
        self._partial, self._given, self._wanted, self._header = partial, given, wanted, header
        self._name = f"rank-{given.rank:05d}"
        self._plain = content.plain(given, wanted.copies)

    @property
    def replicas(self) -> int:
        """How many replicas store a shard. What ZeRO partitions is in the memory of one rank alone; others copy its
        file instead."""
        return 1 if self._given.split else self._wanted.copies

    def run(self, shards: Shards, opened: Callable[[Path], WrittenFile] | None = None) -> None:
        """Write this rank's files, that of the shards as `opened`; on rank 0, wait for the others and commit. Raises
        SaveFailed, ConfigError."""
        shown = folder.shown(self._partial)
        try:
            self.write(shards, self._wanted.copies - self.replicas, opened)
        except BaseException as error:
            with suppress(OSError):  # if even that fails, the other ranks notice that this one is down
                writing.write_bytes(self._partial / f"{self._name}.failed", f"{type(error).__name__}: {error}".encode())
            if isinstance(error, OSError):
                raise SaveFailed(f"rank {self._given.rank} could not write its part of {shown}: {error}") from error
            raise
        recorder.cells[SAVES] += 1
        if self._given.rank == 0:
            world = range(self._given.communicator.world)
            _await(self._partial, {rank: _mark(self._partial, rank) for rank in world})
            marks = marks_in(self._partial, world)
            try:
                commit(self._partial, marks, self._header, self._wanted, self._given.published, self._given.companions)
            except OSError as error:
                raise SaveFailed(f"{shown} could not be completed: {error}") from error

    def write(self, shards: Shards, copied: int = 0, opened: Callable[[Path], WrittenFile] | None = None) -> None:
        """Write this rank's files, copies of the files of as many ranks before it as `copied` says, and its mark.
        Raises OSError, SaveFailed, and ConfigError for a state that cannot be stored."""
        given, name, partial = self._given, self._name, self._partial
        plain = writing.write_bytes(partial / f"{name}.pt", content.serialised(self._plain))
        stamp, tensors = writing.write(partial / f"{name}.safetensors", writing.of_shards(shards), opened)
        files, copies = {f"{name}.pt": plain, f"{name}.safetensors": stamp}, {}
        world = given.communicator.world
        for back in range(1, min(copied + 1, world)):
            other = (given.rank - back) % world
            source = partial / f"rank-{other:05d}.safetensors"
            copy = f"{name}.copy-of-{other:05d}.safetensors"
            _await(partial, {other: source})
            copies[copy], files[copy] = source.name, writing.copy(source, partial / copy)
        needed = f"{name}.pt" if given.communicator.rank < self._wanted.copies else None
        mark = Mark(given.rank, given.communicator.stage, files, tensors, needed, copies, given.lineage.run)
        writing.write_bytes(_mark(partial, given.rank), _MARK.dump_json(mark))


def header_of(step: int, given: Content, form: str, position: tuple[int, int], metric: float | None) -> Header:
    """The header of a checkpoint, still without its files."""
    identity = given.plan, given.config, given.fingerprint
    run, history = given.lineage.run, given.lineage.history
    world, samples, pending = given.communicator.world, given.samples, given.pending
    return Header(step, position, form, world, *identity, {}, (), metric, samples, run, history, pending)


def _await(partial: Path, files: Mapping[int, Path]) -> None:
    """Return when every rank has written its file, with increasing intervals between looks. Raises SaveFailed where one
    of them gave up, or nothing has been written in `TIMEOUT` seconds."""
    missing = dict(files)
    began = moved = time.monotonic()
    size = -1
    while True:
        for rank, file in list(missing.items()):
            if (failed := partial / f"rank-{rank:05d}.failed").is_file():
                reason = failed.read_text(encoding="utf-8")
                raise SaveFailed(f"rank {rank} could not write its part of {folder.shown(partial)}: {reason}")
            if file.is_file():
                del missing[rank]
        if not missing:
            return
        now = time.monotonic()
        if (written := _size(partial)) != size:
            size, moved = written, now
        if now > moved + TIMEOUT:
            rank = min(missing)
            raise SaveFailed(
                f"rank {rank} has written nothing of its part of {folder.shown(partial)} for {TIMEOUT:g} s"
            )
        time.sleep(min(LONGEST_PAUSE, max(SHORTEST_PAUSE, (now - began) / 10)))


def _size(partial: Path) -> int:
    """The bytes of all files at this moment."""
    with suppress(FileNotFoundError), os.scandir(partial) as files:
        return sum(file.stat().st_size for file in files)
    return 0


def marks_in(partial: Path, ranks: Collection[int]) -> list[Mark]:
    """The marks of those of `ranks` that have written their files."""
    marks = (_mark(partial, rank) for rank in ranks)
    return [_MARK.validate_json(mark.read_bytes()) for mark in marks if mark.is_file()]


def commit(
    partial: Path,
    marks: Sequence[Mark],
    header: Header,
    wanted: SaveOptions,
    published: frozenset[str] | None,
    companions: writing.Companions,
) -> Path:
    """Put the files together and give the folder its name; drop older checkpoints. Returns its place.

    Raises SaveFailed where an element is in no file, OSError where the disk is full.
    """
    shown = folder.shown(partial)
    if strangers := [mark for mark in marks if mark.run != header.run]:
        raise SaveFailed(
            f"{shown}: rank {strangers[0].rank} is of run {strangers[0].run}, and rank 0 of {header.run}; two runs "
            "save in one folder"
        )
    files = {name: stamp for mark in marks for name, stamp in mark.files.items()}
    copies = {copy: file for mark in marks for copy, file in mark.copies.items()}
    if different := [copy for copy, file in copies.items() if files[copy] != files[file]]:
        raise SaveFailed(f"{shown}: {different[0]} is not like the file of which it is a copy")
    stages = sorted({mark.stage for mark in marks})
    sharded: dict[str, StoredTensor] = {}
    for stage in stages:  # of a tensor that several pipeline groups store, the parts in the first one count
        sharded = sharded | index.joined(mark.tensors for mark in marks if mark.stage == stage) | sharded
    sharded = index.with_copies(sharded, copies)
    try:
        chosen = index.chosen(sharded)
    except ValueError as error:
        raise SaveFailed(f"{shown} is not complete: {error}") from error
    plain = (tuple(mark.plain for mark in marks if mark.stage == stage and mark.plain is not None) for stage in stages)
    header = replace(header, files=files, plain=tuple(plain))
    forms = [sharded]
    if wanted.form != SHARDED:
        made, merged = writing.merged(Checkpoint(partial, header, chosen), partial, published, companions)
        files |= made
        forms.append(merged)
    if wanted.form == MERGED:
        for name in {part.file for entry in sharded.values() for part in entry.parts}:
            (partial / name).unlink()
            del files[name]
        del forms[0]
    files[INDEX] = writing.write_bytes(partial / INDEX, json.dumps(list(map(index.to_json, forms))).encode())
    for mark in marks:
        _mark(partial, mark.rank).unlink(missing_ok=True)
    writing.write_bytes(partial / HEADER, to_text(replace(header, files=files)).encode())
    folder.sync(partial)
    target = folder.target(partial.parent, header.step)
    folder.put(partial, target)
    branch.drop(target.parent, header.step, wanted.keep, better_of(wanted.best), header.lineage)
    return target


def better_of(best: str | None) -> branch.Better | None:
    """Whether a value of a metric is better than the best so far, for "min" or "max"; NaN never is."""
    if best is None:
        return None
    better = {"min": lt, "max": gt}[best]
    return lambda value, so_far: not math.isnan(value) and (so_far is None or better(value, so_far))


def _mark(partial: Path, rank: int) -> Path:
    return partial / f"rank-{rank:05d}.done"


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(_patient())


@cache
def _patient() -> dist.ProcessGroup:
    """A process group of all ranks without launch.timeout, since writing may take longer."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(days=7))
    return group
