"""A flight recorder: a few integers per rank that another process can read while the rank hangs, and after it died.

Every call and wait is recorded before it happens, with one store each; a process that reads them finds which rank waits
for which. Strings (the ranks of a group, the operator of a call) are written once, when they become known. One process
is one rank, so there is one `recorder`. Invariant: a group and a call site keep their number while the process lives.
"""

from __future__ import annotations

import json
import mmap
import os
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

STEP, PHASE, GROUP, NUMBER, KIND, PLACE, STARTED, PROGRESS, SAVES = range(9)
"""Cells. STARTED counts the steps of this process; GROUP is that of the call that is waited for, 0 for none, and NUMBER
that call's among those of its group. PROGRESS grows inside of a phase: rows that were read, bytes that were written.
SAVES grows by one when this rank begins to save, and by one more when it has written its part."""
FIRST, CELLS = 16, 2048
"""A group's cell, from FIRST on, has the number of calls that this rank has joined."""
PHASES = ("the start", "data loading", "forward", "backward", "update", "evaluation", "saving")
START, DATA, FORWARD, BACKWARD, UPDATE, EVALUATION, SAVING = range(len(PHASES))
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive", "broadcast", "barrier")
SUM, GATHER, SCATTER, EXCHANGE, SEND, RECEIVE, BROADCAST, BARRIER = range(len(KINDS))

ALL = "all ranks"
"""The group of calls that are not over axes of a mesh."""


class FlightRecorder:
    """Cells in this process's own memory, until `attach` puts them into a file."""

    def __init__(self) -> None:
        self.cells: Any = memoryview(array("q", bytes(8 * CELLS)))
        self._groups: dict[Hashable, int] = {}
        self._places: dict[str, int] = {}
        self._lines: list[str] = []
        self._file: int | None = None

    def attach(self, path: Path) -> None:
        """Show everything in the file `path` from now on: the cells, then a line of JSON per text."""
        path.unlink(missing_ok=True)  # somebody may still look at that of a process before
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(self._file, bytes(8 * CELLS) + "".join(self._lines).encode())
        shown = memoryview(mmap.mmap(self._file, 8 * CELLS)).cast("q")
        shown[:] = self.cells
        self.cells = shown

    def _write(self, **entry: Any) -> None:
        line = json.dumps(entry) + "\n"
        self._lines.append(line)
        if self._file is not None:
            os.write(self._file, line.encode())

    def know(self, group: Hashable, ranks: Iterable[int], over: str = "") -> None:
        """`group` is what calls of `ranks` go through, along the axes `over`; all make theirs known in one order."""
        if group not in self._groups and FIRST + len(self._groups) < CELLS:
            self._groups[group] = FIRST + len(self._groups)
            self._write(group=self._groups[group], ranks=sorted(ranks), over=over)

    def place(self, text: str) -> int:
        """The number of what calls are made for: an operator, or anything else that a user knows."""
        if text not in self._places:
            self._places[text] = len(self._places) + 1
            self._write(place=self._places[text], text=text)
        return self._places[text]

    def text(self, place: int) -> str:
        """What calls of a place are made for; empty for none."""
        return list(self._places)[place - 1] if 0 < place <= len(self._places) else ""

    def explain(self, texts: Mapping[str, str]) -> None:
        """More about the texts of places: the source line of an operator."""
        self._write(explained={text: more for text, more in texts.items() if text in self._places})

    def enter(self, group: Hashable, kind: int) -> int:
        """A call is about to be made; it is waited for until `leave`. Returns its number in the group."""
        cells, slot = self.cells, self._groups.get(group, 0)
        cells[NUMBER] = number = cells[slot] + 1 if slot else 0
        cells[KIND] = kind
        cells[GROUP] = slot
        if slot:
            cells[slot] = number
        return number

    def leave(self) -> None:
        """The call is done, or in flight; not reached where it fails, so that the call stays readable."""
        self.cells[GROUP] = 0

    def call(self, group: Hashable, kind: int, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """The result of a call over `group`, which is recorded while it runs."""
        self.enter(group, kind)
        result = function(*args, **named)
        self.leave()
        return result

    def among_all(self, what: str, kind: int, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """Record a call as `call` does, of all ranks; `what` is named in place of an operator."""
        before, self.cells[PLACE] = self.cells[PLACE], self.place(what)
        result = self.call(ALL, kind, function, *args, **named)
        self.cells[PLACE] = before
        return result

    def again(self, group: Hashable, kind: int, number: int) -> None:
        """A call in flight is waited for now, until `leave`."""
        cells = self.cells
        cells[NUMBER], cells[KIND] = number, kind
        cells[GROUP] = self._groups.get(group, 0)

    def at(self, phase: int) -> None:
        """Record that another phase of the step begins."""
        self.cells[PHASE] = phase

    def advance(self, count: int = 1) -> None:
        """Count `count` more rows read, or bytes written."""
        self.cells[PROGRESS] += count

    def begin(self, step: int) -> None:
        """Record that another step begins."""
        self.cells[STEP] = step
        self.cells[STARTED] += 1


recorder = FlightRecorder()


class Awaited:
    """Work in flight, with the call that it belongs to, for the time that it is waited for."""

    def __init__(self, work: Any, group: Hashable, kind: int, number: int) -> None:
        self._work, self._call = work, (group, kind, number)

    def wait(self) -> None:
        """Wait until it is done."""
        recorder.again(*self._call)
        self._work.wait()
        recorder.leave()


def with_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with the number of the place for which it is called before its arguments."""

    def run(place: int, *args: Any) -> Any:
        recorder.cells[PLACE] = place
        return function(*args)

    run.__name__ = run.__qualname__ = function.__name__
    run.__module__ = function.__module__
    return run


def read_cells(path: Path) -> Sequence[int]:
    """The cells in a file that `attach` made; none where there is none."""
    try:
        with path.open("rb") as file:
            content = file.read(8 * CELLS)
    except FileNotFoundError:
        return ()
    return memoryview(content).cast("q") if len(content) == 8 * CELLS else ()


def read_texts(path: Path) -> list[dict[str, Any]]:
    """The texts in such a file."""
    with path.open("rb") as file:
        file.seek(8 * CELLS)
        lines = file.read().decode().split("\n")[:-1]  # the last one may be half written
    return [json.loads(line) for line in lines]
