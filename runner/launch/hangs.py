"""Hang diagnosis: which ranks block which, from the flight records of the ranks.

A waiting rank has recorded the process group, the sequence number of the call in that group, and the operator; it waits
for the ranks of the group that have joined fewer calls. Diagnosis does not involve the ranks, so it works for ranks
that hang in the kernel, hold a lock, are stopped, or have died. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.launch.liveness import QUIET, RunningTime, Signs
from strategies.runtime.flight_recorder import (
    FIRST,
    GROUP,
    KIND,
    KINDS,
    NUMBER,
    PHASE,
    PHASES,
    PLACE,
    SAVES,
    SAVING,
    STARTED,
    STEP,
    read_cells,
    read_texts,
)

GRACE = 2.0
"""Seconds that the communication library has, after the timeout, to notice it first."""


@dataclass(frozen=True)
class CallGroup:
    """The ranks of a process group along the axes `over`; `number` distinguishes it from others of the same ranks."""

    ranks: tuple[int, ...]
    number: int
    over: str = field(default="", compare=False)


@dataclass(frozen=True)
class AwaitedCall:
    """One rank waits in call `number` of a group; `text` describes the call."""

    group: CallGroup
    number: int
    kind: str
    text: str


@dataclass(frozen=True)
class RankState:
    """The state of one rank: how many calls of each group it has joined, and in which it waits."""

    step: int = 0
    phase: str = PHASES[0]
    wait: AwaitedCall | None = None
    joined: dict[CallGroup, int] = field(default_factory=dict)
    saves: int = 0
    """Twice the checkpoints of which this rank has written its part, and one more while it writes."""

    @property
    def text(self) -> str:
        """The phase and step."""
        return f"{self.phase} of step {self.step}" if self.step else self.phase


def read_state(path: Path) -> RankState | None:
    """Read the flight record `path` of a rank; None where it has none."""
    cells = read_cells(path)
    if not cells:
        return None
    groups: dict[int, CallGroup] = {}
    places: dict[int, str] = {}
    more: dict[str, str] = {}
    for text in read_texts(path):
        if "group" in text:
            ranks = tuple(text["ranks"])
            groups[text["group"]] = CallGroup(
                ranks, sum(group.ranks == ranks for group in groups.values()), text["over"]
            )
        elif "place" in text:
            places[text["place"]] = text["text"]
        else:
            more.update(text["explained"])
    wait = None
    slot = cells[GROUP]
    if slot in groups:
        kind = KINDS[cells[KIND]]
        description = f"{kind} #{cells[NUMBER]} over ({groups[slot].over})"
        if place := places.get(cells[PLACE]):
            description += f" of operator {more[place]}" if place in more else f" of {place}"
        wait = AwaitedCall(groups[slot], cells[NUMBER], kind, description)
    joined = {group: cells[number] for number, group in groups.items()}
    return RankState(cells[STEP], PHASES[cells[PHASE]], wait, joined, cells[SAVES])


def any_step_done(paths: Iterable[Path]) -> bool:
    """Whether any of the ranks that write `paths` has done a step since it was started."""
    return any(cells[STARTED] > 1 for cells in map(read_cells, paths) if cells)


def absent(wait: AwaitedCall, ranks: Sequence[RankState | None], halted: Collection[int] = ()) -> list[int]:
    """The ranks that have not joined the call of `wait`, or that `halted` in it."""

    def lacks(rank: int) -> bool:
        at = ranks[rank]
        return at is None or at.joined.get(wait.group, 0) < wait.number + (rank in halted and at.wait == wait)

    return [rank for rank in wait.group.ranks if lacks(rank)]


@dataclass(frozen=True)
class Diagnosis:
    """`text` describes which ranks wait for which, without a full stop; `hung` are the ranks that wait for no other."""

    text: str
    hung: tuple[int, ...]


def diagnose(ranks: Sequence[RankState | None], timeout: float, halted: Collection[int] = ()) -> Diagnosis | None:
    """The diagnosis of a hang from the flight records of all ranks; None if no rank waits for another. Ranks that
    `halted` make no progress, regardless of their recorded state: a call that all have joined cannot end without
    them."""
    waits = {rank: at.wait for rank, at in enumerate(ranks) if at is not None and at.wait is not None}
    missing = {rank: absent(wait, ranks, halted) for rank, wait in waits.items() if rank not in halted}
    for rank, wait in waits.items():
        for other, its in waits.items():
            same_call = (its.group, its.number) == (wait.group, wait.number)
            if same_call and its.kind != wait.kind and {its.kind, wait.kind} != {"send", "receive"}:
                return Diagnosis(f"{_ranks((rank, other))} disagree: {_each(waits, (rank, other))}", ())
    for rank, others in missing.items():
        hung = tuple(other for other in others if not missing.get(other))  # nor does it wait for anybody
        if hung:
            wait = waits[rank]
            with_it = tuple(other for other in missing if waits[other] == wait)
            inside = all(waits.get(other) == wait for other in hung)
            how = "came to a halt in" if inside else "never joined"
            others_waited = f"in which {_ranks(with_it)} waited {timeout:g} s"
            return Diagnosis(f"{_ranks(hung)} of {len(ranks)} {how} {wait.text}, {others_waited}", hung)
    if circle := _circle(missing):
        return Diagnosis(f"{_ranks(circle)} wait for each other: {_each(waits, circle)}", ())
    return None if waits else _late(ranks, timeout, halted) or _behind(ranks, timeout)


def _late(ranks: Sequence[RankState | None], timeout: float, halted: Collection[int]) -> Diagnosis | None:
    """The ranks that have halted while none waits in a collective, or that block the others in a save: those that have
    not written their parts, or else rank 0, which merges the parts."""
    if halted:
        sentence = f"{_ranks(tuple(halted))} of {len(ranks)} came to a halt"
        return Diagnosis(f"{sentence}, and nobody has moved on for {timeout:g} s", tuple(halted))
    saves = [0 if at is None else at.saves for at in ranks]
    late = tuple(rank for rank, count in enumerate(saves) if count < max(saves))
    if not late and max(saves) % 2 == 0 and all(at is not None and at.phase == PHASES[SAVING] for at in ranks):
        late = (0,)
    if not late or len(ranks) == 1:
        return None
    return Diagnosis(f"{_ranks(late)} of {len(ranks)} hung in saving, and nothing was written for {timeout:g} s", late)


def _behind(ranks: Sequence[RankState | None], timeout: float) -> Diagnosis | None:
    """The ranks that have joined fewer calls than others, if no rank records a wait: on a GPU collectives are
    asynchronous, and the host waits elsewhere."""
    for group in dict.fromkeys(group for at in ranks if at is not None for group in at.joined):
        joined = {rank: at.joined.get(group, 0) for rank in group.ranks if (at := ranks[rank]) is not None}
        most = max(joined.values())
        if late := tuple(rank for rank, count in joined.items() if count < most):
            ahead = tuple(rank for rank, count in joined.items() if count == most)
            sentence = f"{_ranks(late)} of {len(ranks)} never joined call #{most} over ({group.over}), which "
            return Diagnosis(f"{sentence}{_ranks(ahead)} made; nothing has moved on for {timeout:g} s", late)
    return None


def _circle(missing: dict[int, list[int]]) -> tuple[int, ...]:
    """A cycle of ranks, each waiting for the next."""
    for first in missing:
        path = [first]
        while others := [rank for rank in missing[path[-1]] if rank in missing]:
            if others[0] in path:
                return tuple(sorted(path[path.index(others[0]) :]))
            path.append(others[0])
    return ()


def _each(waits: dict[int, AwaitedCall], ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank} in {waits[rank].text}" for rank in ranks)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


class Stall:
    """Notices that a rank waits for more than `timeout` seconds, even where the communication library does not, or that
    all of them have halted.

    `files` are the ranks' flight records; `signs` are those of their processes, where these are visible. A slow rank is
    not a hang: if none waits in a collective, a rank that computes, reads or writes keeps the run alive.

    Attributes:
        untimed: collectives have no time limit of their own. Then a rank that is silent for much longer than `timeout`,
            and does not save, waits for others, too: in a collective that is not recorded, such as a user's.
    """

    untimed = False

    def __init__(self, files: Sequence[Path], timeout: float, signs: Sequence[Signs] = ()) -> None:
        self._files, self._timeout, self.signs = files, timeout, signs
        self._seen: list[bytes] = [b""] * len(files)
        self._clock = RunningTime()
        self._since = [self._clock.now] * len(files)

    def detected(self) -> bool:
        """Poll once; True if the ranks hang."""
        now, waiting, steps = self._clock.look(), [False] * len(self._files), 0
        saving = False
        for rank, file in enumerate(self._files):
            cells = read_cells(file)
            content = bytes(cells) if cells else b""
            if content != self._seen[rank]:
                self._seen[rank], self._since[rank] = content, now
            if cells:
                waiting[rank] = cells[GROUP] >= FIRST
                steps = max(steps, cells[STARTED])
                saving |= cells[PHASE] == SAVING
        for sign in self.signs:
            sign.look()
        limit = now - self._timeout - (0.0 if self.untimed else GRACE)
        if any(wait and since < limit for wait, since in zip(waiting, self._since, strict=True)):
            return True
        if not all(since < limit for since in self._since):
            return False
        if not self.signs:  # the first step may compile for long; from the second on no rank is silent for so long
            return steps > 1 and all(since < limit - QUIET for since in self._since)
        halted = any(sign.halted(self._timeout) for sign in self.signs)
        silent = [sign.lost(self._timeout) for sign in self.signs]
        return halted or all(silent) or (self.untimed and any(silent) and steps > 0 and not saving)
