"""What the survivors of a failure leave behind: their own parts, written without a word to any other rank.

A rank whose neighbour has gone can do no collective, but weights and states of the last whole step are still in its
memory. It writes all of them, also what replicas hold too, into a folder `.step-00000100.rescue`; the next start makes
a checkpoint of that if nothing is missing. Invariant: what becomes a checkpoint is the whole state after one step.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.checkpoints import chance, committing, content, folder, header, saving, writing
from runner.checkpoints.committing import Mark, SaveFailed, Wanted
from runner.checkpoints.content import Content
from runner.checkpoints.header import Header

RESCUED = "rescued.json"


class Intact:
    """The last step after which this rank's state is whole and in memory, and the random states of that moment."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._random: Mapping[str, Any] = {}

    def after(self, step: int) -> None:
        """The state is that after `step`, until something is changed."""
        self.step, self._random = step, chance.states()

    def changes(self) -> None:
        """Something of it is changed from here on."""
        self.step = None

    def leave(self, place: Path, given: Callable[[], Content], position: tuple[int, int]) -> None:
        """Write this rank's part into the folder of checkpoints `place`, if its state is whole. No collective."""
        if self.step is None:
            return
        chance.restore(self._random)
        own = given()
        world, stages = own.communicator.world, own.communicator.stages
        partial = _folder(place, self.step)
        partial.mkdir(parents=True, exist_ok=True)
        identity = own.plan, own.config, own.fingerprint
        made = Header(self.step, position, committing.SHARDED, world, *identity, {}, (), samples=own.samples)
        appearing = partial / f".{RESCUED}.{own.rank}"
        folder.write_text(appearing, json.dumps({"header": header.to_text(made), "stages": stages}))
        os.replace(appearing, partial / RESCUED)
        saving.write_alone(partial, own, made, content.pieces(own, world))


def collect(place: Path) -> Path | None:
    """Make checkpoints of what was left in `place`, as far as nothing is missing, and remove the rest; the newest one
    made. For one process, when no rank runs. Says on the console what became of it."""
    made = None
    for partial in sorted(place.glob(".step-*.rescue")):
        try:
            made = _complete(partial) or made
        except (SaveFailed, OSError, ValueError, KeyError) as error:
            print(f"rescue: what the other ranks left of {_shown(partial)} is not enough: {error}", flush=True)
        shutil.rmtree(partial, ignore_errors=True)
    return made


def _complete(partial: Path) -> Path | None:
    told = json.loads((partial / RESCUED).read_text(encoding="utf-8"))
    found = header.from_text(told["header"])
    target = folder.target(partial.parent, found.step)
    if target.exists():
        return None
    marks = committing.marks_in(partial, found.world_size)
    missing = sorted(set(range(found.world_size)) - {mark.rank for mark in marks})
    if missing and found.config["parallel"]["zero"]["stage"] != 0:
        raise SaveFailed(f"under ZeRO rank {missing[0]} alone has its part of the states")
    if len({mark.stage for mark in marks}) < told["stages"]:
        raise SaveFailed("no rank of a stage of the pipeline is left")
    marks += [_stand_in(partial, rank, marks[0]) for rank in missing]
    (partial / RESCUED).unlink()
    committing.commit(partial, marks, found, Wanted(), None, None)
    ranks = f" without rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}" if missing else ""
    print(f"rescue: {target.name} is made of what the ranks had in memory{ranks}", flush=True)
    return target


def _stand_in(partial: Path, rank: int, other: Mark) -> Mark:
    """The random states of a rank that left nothing are those of another one."""
    assert other.plain is not None
    name = f"rank-{rank:05d}.pt"
    stamp = writing.write_bytes(partial / name, (partial / other.plain).read_bytes())
    return replace(other, rank=rank, files={name: stamp}, tensors={}, plain=None)


def _folder(place: Path, step: int) -> Path:
    target = folder.target(place, step)
    return target.parent / f".{target.name}.rescue"


def _shown(partial: Path) -> str:
    return partial.name.removeprefix(".").removesuffix(".rescue")
