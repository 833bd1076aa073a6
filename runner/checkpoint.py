"""Checkpoints: each rank its own slices, through torch.distributed.checkpoint, and never half of one.

A checkpoint is a folder `step-00000100`. It is written under a hidden name beside its place, flushed to the disk, and
renamed when every rank is done: a folder with that name is complete, whatever happened. Keys carry name and place, such
as `model/dense1.weight[0:256,0:784]`, so that a slice that several ranks hold is stored once and can be found under
another plan; what belongs to one rank alone is under `rank-00003/`. Loading restores a run in place: it goes on bit for
bit.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from runner.continuation import check_same
from runner.errors import ConfigError
from strategies.engine.communicator import Communicator
from strategies.engine.program import Program
from strategies.engine.updates import Updates, UpdateState
from strategies.graph import Source
from strategies.layout import Layout

HEADER = "checkpoint.json"
READING = (OSError, RuntimeError, ValueError, KeyError, EOFError, AttributeError, pickle.UnpicklingError)
"""What torch and python raise when they read a damaged file."""
NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Content:
    """What is saved and restored. `tensors` are this rank's buffers by name (parameters come from `updates`); `plan`
    and `config` are JSON, `fingerprint` is a hash of graph and plan."""

    program: Program
    communicator: Communicator
    tensors: Mapping[str, Tensor]
    updates: Updates
    scheduler: LRScheduler | None
    plan: Mapping[str, Any]
    config: Mapping[str, Any]
    fingerprint: str = ""

    @property
    def rank(self) -> int:
        """This rank's number among all; within its stage of a pipeline it is `communicator.rank`."""
        return self.communicator.world_rank

    @property
    def sources(self) -> tuple[Source, ...]:
        """Everything of the model that is saved, in an order that is the same on all ranks."""
        return tuple(source for source in self.program.sources if source.kind in ("parameter", "buffer"))

    def place(self, source: Source) -> str:
        """Name and place of this rank's slice: `dense1.weight[0:256,0:784]`."""
        block = self._layout(source).block(source.spec.shape, self.program.mesh, self.communicator.rank)
        return f"{source.name}[{','.join(f'{start}:{stop}' for start, stop in block)}]"

    def keeps(self, number: int, source: Source) -> bool:
        """Whether this rank stores the slice of the `number`-th source: the replicas take turns."""
        mesh, replicas = self.program.mesh, self._layout(source).replica_axes(self.program.mesh)
        return mesh.index(self.communicator.rank, replicas) == number % mesh.product(replicas)

    def _layout(self, source: Source) -> Layout:
        return self.program.layouts[source.id]


def save(folder: Path, step: int, content: Content, keep: int | None = None) -> Path:
    """Store `content` after optimizer step `step` as `folder/step-...`; drop all but the last `keep`. Collective.

    An interrupted save leaves a hidden folder, which `clean` removes; the checkpoints before it are not touched.
    """
    target = folder / f"step-{step:08d}"
    partial = folder / f".{target.name}.partial"
    first = content.rank == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier(content)
    _write(partial, _collect(content), alone=content.communicator.world == 1)
    _barrier(content)
    if first:
        header = {"step": step, "fingerprint": content.fingerprint, "plan": content.plan, "config": content.config}
        _write_text(partial / HEADER, json.dumps(header, indent=1))
        _sync(partial)
        _put(partial, target)
        _drop(folder, step, keep)
    _barrier(content)
    return target


def load(path: Path, content: Content) -> int:
    """Restore weights, buffers, optimizer, scheduler and random states in place; returns the optimizer step after which
    they were saved. Collective.

    Raises StrategyError if the run is not the one that was saved (naming what differs), ConfigError if `path` is no
    checkpoint or a damaged one.
    """
    step = check(path, plan=content.plan, config=content.config, fingerprint=content.fingerprint)
    with _damaged(path):
        stored = _stored(path)
        mine = {content.place(source): source for source in content.sources}
        own = f"rank-{content.rank:05d}/"
        wanted = [key for key in stored if key.startswith(own) or _after(key, 1) in mine or _after(key, 2) in mine]
        lacking = [place for place in mine if f"model/{place}" not in stored]
        if lacking or f"{own}plain" not in stored:
            raise KeyError(f"{lacking[0] if lacking else own} is missing")
        tensors = {key: torch.empty(stored[key][0], dtype=stored[key][1]) for key in wanted}
        _read(path, tensors)
        plain = torch.load(io.BytesIO(tensors.pop(f"{own}plain").numpy().tobytes()), weights_only=True)
    for place, source in mine.items():
        value = tensors[f"model/{place}"]
        if source.kind == "parameter":
            content.updates.set_weight(source.name, value)
        else:
            content.tensors[source.name].copy_(value)
    state = UpdateState(plain=plain["updates"])
    for key, value in tensors.items():
        kind, _, rest = key.partition("/")
        if kind == "optimizer":
            name, _, place = rest.partition("/")
            state.sliced.setdefault(name, {})[mine[place].name] = value
        elif key.startswith(own):
            state.own[rest] = value
    content.updates.load(state)
    if content.scheduler is not None and plain["scheduler"] is not None:
        content.scheduler.load_state_dict(plain["scheduler"])
    _set_random(plain["random"])
    return step


def check(path: Path, *, plan: Mapping[str, Any], config: Mapping[str, Any], fingerprint: str) -> int:
    """The optimizer step after which `path` was saved, if the run with this plan, config and fingerprint may continue
    it; nothing but the header is read. Raises as `load`."""
    header = _read_header(path)
    check_same(path, header, plan=plan, config=config, fingerprint=fingerprint)
    return int(header["step"])


def newest(folder: Path) -> Path | None:
    """The complete checkpoint with the most steps in `folder`."""
    return max(_complete(folder), key=_number, default=None)


def locate(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest in it or in its `checkpoints`. Raises ConfigError."""
    if (path / HEADER).is_file():
        return path
    found = newest(path) or newest(path / "checkpoints")
    if found is None:
        why = "holds no complete checkpoint (step-...)" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"train.resume = {str(path)!r}: this folder {why}. Give a run folder, its checkpoints, or one of them."
        )
    return found


def to_continue(resume: str | None, folder: Path) -> Path | None:
    """The checkpoint that `train.resume` means for a run whose checkpoints are in `folder`, which is cleaned; None to
    start afresh.

    Raises ConfigError for a path that leads to none.
    """
    clean(folder)
    if resume is None:
        return None
    return newest(folder) if resume == "auto" else locate(Path(resume))


def clean(folder: Path) -> None:
    """Remove what interrupted saves left in `folder`. For one process, before training starts."""
    for left in sorted(folder.glob(".step-*.replaced")):
        target = folder / left.name.removeprefix(".").removesuffix(".replaced")
        if target.exists():
            shutil.rmtree(left)
        else:  # interrupted between the two renames of `_put`
            left.rename(target)
    for left in folder.glob(".step-*.partial"):
        shutil.rmtree(left)


def _collect(content: Content) -> dict[str, Tensor]:
    """What this rank stores, by key."""
    found: dict[str, Tensor] = {}
    state = content.updates.state()
    for number, source in enumerate(content.sources):
        is_parameter = source.kind == "parameter"
        value = content.updates.weight(source.name) if is_parameter else content.tensors[source.name]
        if not content.keeps(number, source):
            continue
        place = content.place(source)
        found[f"model/{place}"] = value.detach()
        for name, entries in state.sliced.items():
            if source.name in entries:
                found[f"optimizer/{name}/{place}"] = entries[source.name].detach()
    own = f"rank-{content.rank:05d}/"
    found.update({own + key: value.detach() for key, value in state.own.items()})
    found[f"{own}plain"] = torch.frombuffer(bytearray(_packed(content, state.plain)), dtype=torch.uint8)
    return found


def _packed(content: Content, options: dict[str, Any]) -> bytes:
    """What is no tensor, as bytes that can be read without running code from the file."""
    scheduler = None if content.scheduler is None else content.scheduler.state_dict()
    buffer = io.BytesIO()
    try:
        torch.save({"updates": options, "scheduler": scheduler, "random": _random()}, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        line = next((line.strip() for line in str(error).splitlines() if "global" in line), str(error))[:200]
        raise ConfigError(
            "The optimizer or its scheduler keeps something in its state that a checkpoint cannot hold; it can hold "
            f"numbers, strings, lists, dicts and tensors ({line})."
        ) from error
    return buffer.getvalue()


def _write(path: Path, tensors: dict[str, Tensor], alone: bool) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells that one process is alone
        save(tensors, storage_writer=FileSystemWriter(path, sync_files=True), no_dist=alone)


def _read(path: Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors`. Every rank reads by itself, so that one that fails says so at once."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as above
        load(tensors, storage_reader=FileSystemReader(path), no_dist=True)


def _stored(path: Path) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Shape and dtype of everything in a checkpoint, by key."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = FileSystemReader(path).read_metadata().state_dict_metadata
    return {
        key: (entry.size, entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _after(key: str, words: int) -> str:
    """A key without its first `words` words: the place of model/PLACE (1) and optimizer/STATE/PLACE (2)."""
    return key.split("/", words)[-1]


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Tell anything that goes wrong while files are read as one paragraph."""
    try:
        yield
    except (*READING, _checkpoint_error()) as error:
        text = " ".join(str(error).split())[:300]
        others = ", ".join(sorted(other.name for other in _complete(path.parent) if other != path))
        raise ConfigError(
            f"The checkpoint {path} is damaged ({type(error).__name__}: {text}). "
            + (
                f"Others beside it: {others}; choose one with train.resume=PATH."
                if others
                else "There is no other beside it."
            )
        ) from error


def _checkpoint_error() -> type[BaseException]:
    from torch.distributed.checkpoint.api import CheckpointException

    return CheckpointException


def _read_header(path: Path) -> dict[str, Any]:
    if not (path / HEADER).is_file():
        raise ConfigError(f"{path} is not a checkpoint: it has no {HEADER}. Give a folder that is called step-... .")
    with _damaged(path):
        header: dict[str, Any] = json.loads((path / HEADER).read_text())
        missing = {"step", "fingerprint", "plan", "config"} - header.keys()
        if missing:
            raise KeyError(f"{HEADER} lacks {', '.join(sorted(missing))}")
        return header


def _random() -> dict[str, Any]:
    state: Any = numpy.random.get_state(legacy=True)
    kind, words, position, has_spare, spare = state
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    numpy_state = (str(kind), words.tolist(), int(position), int(has_spare), float(spare))
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": numpy_state}


def _set_random(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    for cuda in state["cuda"]:
        torch.cuda.set_rng_state(cuda)
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])


def _put(partial: Path, target: Path) -> None:
    """Give a finished checkpoint its name; one with the same step (a run that went back) is replaced."""
    replaced = target.parent / f".{target.name}.replaced"
    if target.exists():
        target.rename(replaced)
    partial.rename(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _drop(folder: Path, step: int, keep: int | None) -> None:
    """Remove all but the last `keep` checkpoints up to `step`; hidden first, so that none is ever seen half removed."""
    if keep is None:
        return
    for old in sorted((path for path in _complete(folder) if _number(path) <= step), key=_number)[:-keep]:
        hidden = folder / f".{old.name}.partial"
        old.rename(hidden)
        shutil.rmtree(hidden)


def _complete(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if NAME.fullmatch(path.name) and (path / HEADER).is_file()]


def _number(path: Path) -> int:
    return int(path.name.partition("-")[2])


def _write_text(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _barrier(content: Content) -> None:
    if content.communicator.world > 1:
        dist.barrier()
