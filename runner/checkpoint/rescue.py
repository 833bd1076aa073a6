"""Rescue checkpoints: after a failure, the surviving ranks write their shards without communication.

A rank whose peer is down cannot run collectives, but weights and states of the last complete step are still in its
memory. It writes all of them, including replicated tensors, into a folder `.step-00000100.rescue`; the next start makes
a checkpoint of that if nothing is missing. Invariant: a rescued checkpoint is the complete state after one step.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner import run_folder
from runner.checkpoint import content, folder, rng_state, saving, writing
from runner.checkpoint import manifest as header
from runner.checkpoint.branch import on_branch
from runner.checkpoint.content import Content
from runner.checkpoint.manifest import READING
from runner.checkpoint.saving import DEFAULT, SHARDED, Mark, RankSave, SaveFailed, SaveOptions
from runner.errors import ConfigError
from runner.launch import leaving, logs
from runner.run_folder.lineage import Lineage
from strategies.core.bounded_files import read_json
from strategies.core.layout import Block

RESCUED = "rescued.json"
UPDATE = 5.0
"""Seconds for an update that is under way to end."""


class Intact:
    """The last step after which this rank's state is complete and in memory, and the RNG states at that step; none
    unless `enabled`. Whoever changes the state waits while another thread saves it."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled
        self._changed = threading.Condition()
        self._left = self._brief = False
        self.step: int | None = None
        self._random: Mapping[str, Any] = {}

    def after(self, step: int) -> None:
        """Record that the state is that after `step`, until `changes` is called."""
        if self._enabled:
            with self._changed:
                self.step, self._random = step, rng_state.states()
                self._changed.notify_all()

    def trained(self, step: int) -> None:
        """Record that `step` is the last one, so that its state is saved where what follows fails."""
        self._enabled = True
        self.after(step)

    def changes(self, *, brief: bool = True) -> None:
        """Record that the state is being modified; `brief`: until the next call of `after`, which waits for no other
        rank."""
        with self._changed:
            self.step, self._brief = None, brief
            self._changed.notify_all()

    def leave(
        self,
        place: Path,
        given: Callable[[], Content],
        position: Callable[[int], tuple[int, int]],
        patience: float = 0.0,
    ) -> None:
        """Write this rank's part, once, into the folder of checkpoints `place`. No collective. Where that fails, its
        log says why.

        Args:
            place: the folder.
            given: the state.
            position: where the data continues after a step.
            patience: seconds for a brief change that another thread makes to end.
        """
        if not self._enabled:
            return
        with self._changed:
            if self._left:
                return
            self._changed.wait_for(lambda: self.step is not None or not self._brief, patience)
            if self.step is None:
                logs.note(f"{leaving.NOTHING}weights or buffers were being changed")
                return
            self._left = True
            try:
                self._write(place, replace(given(), random=self._random), self.step, position(self.step))
            except (OSError, SaveFailed, ConfigError) as error:
                logs.note(f"{leaving.NOTHING}{error}")

    @staticmethod
    def _write(place: Path, own: Content, step: int, position: tuple[int, int]) -> None:
        world, stages = own.communicator.world, own.communicator.stages
        partial = folder.hidden(folder.target(place, step), "rescue")
        partial.mkdir(parents=True, exist_ok=True)
        made = saving.header_of(step, own, SHARDED, position, None)
        appearing = partial / f"{RESCUED}.{own.rank}"
        writing.write_bytes(appearing, json.dumps({"header": header.to_text(made), "stages": stages}).encode())
        os.replace(appearing, partial / RESCUED)
        RankSave(partial, own, SaveOptions(copies=world), made).write(content.shards(own, world))


def collect(place: Path, branch: Lineage | None) -> Path | None:
    """Make checkpoints of the complete rescue folders of the run of `branch` in `place`, and remove the rest. Returns
    the newest one made. For one process, when no rank runs. Prints the outcome."""
    made = None
    for partial in sorted(place.glob(run_folder.RESCUED)):
        try:
            made = _complete(partial, branch) or made
        except (SaveFailed, *READING) as error:
            print(f"rescue: what the other ranks left of {folder.shown(partial)} is not enough: {error}", flush=True)
        with suppress(OSError):
            folder.erase(partial)
    return made


def _complete(partial: Path, branch: Lineage | None) -> Path | None:
    rescued = read_json(partial / RESCUED)
    saved = header.from_text(rescued["header"])
    target = folder.target(partial.parent, saved.step)
    known = branch is None or branch.includes(saved.run, saved.step)
    if not known or (target.exists() and on_branch(target, branch)):
        return None
    marks = saving.marks_in(partial, range(saved.world_size))
    missing = sorted(set(range(saved.world_size)) - {mark.rank for mark in marks})
    if missing and saved.config["parallel"]["zero"]["stage"] != 0:
        raise SaveFailed(f"under ZeRO rank {missing[0]} alone has its part of the states")
    if len({mark.stage for mark in marks}) < rescued["stages"]:
        raise SaveFailed("no rank of a stage of the pipeline is left")
    marks = [*_once(partial, marks), *(_stand_in(partial, rank, marks[0]) for rank in missing)]
    (partial / RESCUED).unlink()
    saving.commit(partial, marks, saved, DEFAULT, None, writing.Companions())
    ranks = f" without rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}" if missing else ""
    print(f"rescue: {target.name} is made of what the ranks had in memory{ranks}", flush=True)
    return target


def _once(partial: Path, marks: Sequence[Mark]) -> list[Mark]:
    """`marks` without the files of tensors of which others hold every block; these files are removed. What they would
    cost is their checksum, between two attempts."""
    first: dict[tuple[int, str, Block], str] = {}
    for mark in marks:
        for key, entry in mark.tensors.items():
            for part in entry.parts:
                first.setdefault((mark.stage, key, part.block), part.file)
    kept = []
    for mark in marks:
        spare = {part.file for entry in mark.tensors.values() for part in entry.parts} - set(first.values())
        for name in spare:
            (partial / name).unlink()
        files = {name: stamp for name, stamp in mark.files.items() if name not in spare}
        kept.append(replace(mark, files=files, tensors={} if spare else mark.tensors))
    return kept


def _stand_in(partial: Path, rank: int, other: Mark) -> Mark:
    """Use another rank's RNG states for a rank that left no files."""
    assert other.plain is not None
    name = f"rank-{rank:05d}.pt"
    stamp = writing.copy(partial / other.plain, partial / name)
    return replace(other, rank=rank, files={name: stamp}, tensors={}, plain=None)
