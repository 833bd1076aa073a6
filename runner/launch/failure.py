"""Failures of ranks: finding the root cause among several, and the error message about it.

A rank that fails takes its peers down: their collectives break or time out. So failures have an `order`:
a rank that raised or was killed comes before one that timed out, which comes before one that lost its connection; among
equals the earliest is the cause. Nothing here imports torch: the parent reads these values.
"""

from __future__ import annotations

import enum
import errno
import os
import re
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from runner.errors import ConfigError, RunFailed
from runner.launch import hangs
from runner.launch.orders import flight_record_of
from strategies.core.errors import CodedError, StrategyError


class CauseOrder(enum.IntEnum):
    """How close a failure is to the cause; smaller is closer."""

    CAUSE = 0
    TIMEOUT = 1
    PEER_LOST = 2


@dataclass(frozen=True)
class Done:
    """The report of a rank that succeeded; `value` is the result of rank 0, pickled or as JSON, None elsewhere."""

    value: bytes | None


RAISED = "failed: "
RAISED_CODE, KILLED, HUNG, NOT_FINITE, DISK_FULL = "MW710", "MW711", "MW712", "MW719", "MW720"


@dataclass(frozen=True)
class Failure:
    """One failed rank.

    Attributes:
        rank: which one.
        at: when, in seconds of `time.monotonic`, which all processes of a machine share.
        order: how close it is to the cause.
        what: a clause that follows "rank 3 of 8", such as `failed: ValueError: ...` or `was killed by SIGKILL`.
        where: operator and source line, as far as they are known.
        refusal: "config" or "strategy" where the exception says that the input is wrong, else None.
        text: the exception's own text.
        code: the kind of failure, for `run explain CODE`.
    """

    rank: int
    at: float
    order: CauseOrder
    what: str
    where: str = ""
    refusal: str | None = None
    text: str = ""
    code: str = RAISED_CODE

    @property
    def raised(self) -> bool:
        """Whether it is an exception, whose traceback is in the rank's log."""
        return self.what.startswith(RAISED)


_TIMEOUT = re.compile(
    r"timed out waiting|wait timeout after|application timeout|collective operation timeout|watchdog.*timed? ?out|"
    r"timed out after \d+ ?ms",
    re.IGNORECASE,
)
_PEER_LOST = re.compile(
    r"connection (was )?(likely )?(reset|closed|refused)|broken pipe|socket closed|failed to recv, got 0 bytes|"
    r"connectfullmesh failed|ncclremoteerror|remote process exited|read error|write error|sendbytes failed|"
    r"connection aborted|nccl communicator was aborted",
    re.IGNORECASE,
)
FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
"""Errors of a write without room: the disk is full, a quota is used up, a file is as large as it may be."""
LOG_LINES = 15
DUMP = 0.5  # seconds for a hung rank to write where it is
_LIBRARIES = frozenset({"torch", "deepspeed", "numpy", "runner", "strategies", "multiprocessing"})


def from_exception(rank: int, error: BaseException) -> Failure:
    """The failure of a rank whose entry raised `error`."""
    chain = list(_chain(error))
    text = _first_paragraph(error)
    name = type(error).__name__
    refusal = "config" if isinstance(error, ConfigError) else "strategy" if isinstance(error, StrategyError) else None
    # Only runtime errors (torch's distributed ones are) and broken sockets can be the echo of another rank's end.
    echoes = [str(link) for link in chain if isinstance(link, RuntimeError | ConnectionError)]
    if any(_TIMEOUT.search(echo) for echo in echoes):
        order = CauseOrder.TIMEOUT
    elif any(_PEER_LOST.search(echo) for echo in echoes):
        order = CauseOrder.PEER_LOST
    else:
        order = CauseOrder.CAUSE
    full = "the disk is full: " if any(getattr(link, "errno", None) in FULL for link in chain) else ""
    return Failure(
        rank=rank,
        at=time.monotonic(),
        order=order,
        what=f"failed: {full}{name}: {text}" if text else f"failed: {full}{name}",
        where=_where(chain),
        refusal=refusal,
        text=str(error),
        code=_code(error, bool(full)),
    )


def _code(error: BaseException, full: bool) -> str:
    if isinstance(error, CodedError):
        return error.code
    return DISK_FULL if full else NOT_FINITE if isinstance(error, FloatingPointError) else RAISED_CODE


def from_exit(rank: int, code: int, log: str) -> Failure:
    """The failure of a rank that ended with exit code `code` (negative: a signal) without a report, with the log
    `log`."""
    what, where = f"ended with exit code {code} before it was done", ""
    order = CauseOrder.CAUSE
    if code < 0:
        what = killed_by(-code)
        where = dumped_place(log)  # a crash handler has written one, unless the signal was SIGKILL
        if -code == signal.SIGABRT:  # a watchdog of the communication library ends its process this way
            order = (
                CauseOrder.TIMEOUT
                if _TIMEOUT.search(log)
                else CauseOrder.PEER_LOST
                if _PEER_LOST.search(log)
                else order
            )
    return Failure(rank=rank, at=time.monotonic(), order=order, what=what, where=where, code=KILLED)


def killed_by(number: int) -> str:
    """The description of a process that was ended by signal `number`."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"was killed by {name}{' (was memory short?)' if number == signal.SIGKILL else ''}"


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure to report: the one closest to the cause, the earliest among equals."""
    return min(failures, key=lambda failure: (failure.order, failure.at))


def message(cause: Failure, others: Sequence[int], world_size: int, name: str | None = None) -> str:
    """The sentence about `cause`; `others` are the other ranks that failed with the same words. `name` is that
    of a process that is not a rank."""
    too = f" (rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} too)" if others else ""
    where = f" Where: {cause.where}." if cause.where else ""
    return f"{name or f'rank {cause.rank} of {world_size}'} {cause.what.rstrip('.')}{too}.{where}"


def end_of_log(cause: Failure | None, log: Path, text: str) -> str:
    """The end of a failure message: where its traceback is, or the last lines of the process's output `text`, which is
    in `log`."""
    if cause is not None and cause.raised and os.environ.get("MESHWRIGHT_TRACEBACK") != "1":
        return f" The traceback is in {log}."
    lines = text.rstrip().splitlines()[-LOG_LINES:]
    shown = "".join(f"\n    {line}" for line in lines) or " (empty, or not on this machine)"
    return f"\nThe end of its log, {log}:{shown}"


def missing_message(waiting: Failure, missing: int, stack: str, timeout: float, world_size: int) -> str:
    """The sentence for a collective in which `waiting` timed out and which rank `missing` never joined."""
    there = f" (rank {waiting.rank} in {waiting.where})" if waiting.where else ""
    place = f" It was in {stack}." if stack else ""
    return (
        f"rank {missing} of {world_size} hung: the others waited {timeout:g} s in a collective that it did not join"
        f"{there}.{place}"
    )


def dumped_place(log: str) -> str:
    """The innermost source line outside libraries in the last stack that `faulthandler` dumped into `log`."""
    _, found, dump = log.rpartition("(most recent call first):")
    if not found:
        return ""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', dump)
    own = [frame for frame in frames if not _is_library_file(frame[0])]
    for file, line, function in own[:1] or frames[:1]:
        return _place(file, int(line), function)
    return ""


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _first_paragraph(error: BaseException) -> str:
    # torch appends its C++ stack to some messages; the log has all of it.
    text = str(error).partition("Exception raised from ")[0].strip().partition("\n\n")[0]
    return text if len(text) <= 2000 else text[:2000] + " ..."


def _where(chain: Sequence[BaseException]) -> str:
    operator = next((found for link in chain if isinstance(found := getattr(link, "operator", None), str)), None)
    parts = [f"operator {operator}"] if operator else []
    # The deepest link was raised first, nearest to the user's line.
    for own_only in (True, False):
        for link in reversed(chain):
            place = _innermost(link.__traceback__, own_only)
            if place:
                return ", ".join([*parts, place])
    return ", ".join(parts)


def _innermost(trace: TracebackType | None, own_only: bool) -> str:
    """The last frame of `trace` in code of the user or of a model, or else in a library; never in this project's own
    code, which does not help the user."""
    place = ""
    for frame, line in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        library = package in _LIBRARIES or package in sys.stdlib_module_names or file.startswith("<")
        if not (library if own_only else package in ("runner", "strategies")):
            place = _place(file, line, frame.f_code.co_name)
    return place


def _is_library_file(file: str) -> bool:
    parts = file.split(os.sep)
    if file.startswith("<") or any(name in parts for name in _LIBRARIES):
        return True
    return "site-packages" not in parts and file.startswith(sysconfig.get_paths()["stdlib"] + os.sep)


def _place(file: str, line: int, function: str) -> str:
    here = os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{line} ({function})"


class Watched(Protocol):
    """A rank as seen by its parent. `report` is its outcome, None until received."""

    number: int
    log: Path
    report: Done | Failure | None

    def said(self) -> str:
        """Its log output since the start."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to it, if it is alive."""

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, `seconds` at most."""


def raise_failed(
    failures: Sequence[Failure],
    ranks: Sequence[Watched],
    run_dir: Path,
    world_size: int,
    timeout: float,
    name: str | None = None,
) -> None:
    """Raise the error that reports `failures`; without any, the ranks hang. `name` is that of a lone process which
    is not a rank."""
    cause = root_cause(failures) if failures else None
    hung: tuple[int, ...] = ()
    if cause is not None and cause.refusal == "config":
        raise ConfigError(cause.code, cause.text)
    if cause is not None and cause.refusal == "strategy":
        raise StrategyError(cause.code, cause.text)
    if name is not None:
        named = ranks[0]
        sentence = _alone(named, name, timeout) if cause is None else message(cause, [], world_size, name)
    elif cause is None or cause.order is CauseOrder.TIMEOUT:
        here = {rank.number: rank for rank in ranks}
        sentence, number, hung = _hang(cause, here, run_dir, world_size, timeout)
        named = here[number]
    else:
        named = next(rank for rank in ranks if rank.number == cause.rank)
        same = [other.rank for other in failures if other is not cause and other.what == cause.what]
        sentence = message(cause, same, world_size)
    rank = named.number if name is None else None
    shown = None if hung or cause is None or cause.order is CauseOrder.TIMEOUT else cause
    code = HUNG if shown is None else shown.code
    raise RunFailed(code, f"{sentence}{end_of_log(shown, named.log, named.said())}", rank=rank, hung=hung)


def _alone(process: Watched, name: str, timeout: float) -> str:
    """The sentence about a lone process that hangs."""
    process.send_signal(signal.SIGUSR1)
    process.wait(DUMP)
    place = dumped_place(process.said())
    was = f"It was in {place}" if place else "It was stopped, or did not say where it was"
    return f"{name} hung: it has shown no sign of life for {timeout:g} s. {was}."


def _hang(
    cause: Failure | None, ranks: Mapping[int, Watched], run_dir: Path, world_size: int, timeout: float
) -> tuple[str, int, tuple[int, ...]]:
    """The sentence about ranks that hang, the one of this host to look at, and those that keep the others waiting;
    `cause` has timed out."""
    at = [hangs.read_state(flight_record_of(run_dir, number)) for number in range(world_size)]
    found = hangs.diagnose(at, timeout)
    hung = () if found is None else found.hung
    suspects = [number for number, rank in ranks.items() if rank.report is None] if found is None else list(hung)
    here = [number for number in suspects if number in ranks]
    for number in here:
        ranks[number].send_signal(signal.SIGUSR1)
    deadline = time.monotonic() + DUMP
    for number in here:
        ranks[number].wait(deadline - time.monotonic())
    places = {number: dumped_place(ranks[number].said()) for number in here}
    halted = [number for number in here if not places[number] and ranks[number].report is None]
    if halted and (found is None or len(halted) < len(hung)):
        # Ranks that respond only wait, in a call that all have joined, for one that does not respond.
        found = hangs.diagnose(at, timeout, halted) or found
    if found is not None:
        suspects, hung = list(found.hung), found.hung
        here = [number for number in suspects if number in ranks]
    if found is None and cause is not None and len(suspects) == 1:
        return (
            missing_message(cause, suspects[0], places[suspects[0]], timeout, world_size),
            suspects[0],
            tuple(suspects),
        )
    if found is None and cause is not None:
        sentence = message(cause, [], world_size).rstrip(".")
        if suspects:
            sentence = f"rank {cause.rank} of {world_size} waited {timeout:g} s in vain ({cause.where})"
    else:
        sentence = f"no rank has moved on for {timeout:g} s" if found is None else found.text
    for number in suspects:
        spot, place = at[number], places.get(number)
        sentence += f". Rank {number} was in {'the start' if spot is None else spot.text}"
        if number in places:
            sentence += f", {place}" if place else " and did not say where" if ranks[number].report is None else ""
    seen = [*here[-1:], *([] if cause is None else [cause.rank]), *ranks]
    return f"{sentence}.", seen[0], hung
