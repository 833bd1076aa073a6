"""Failures of ranks: finding the root cause among several, and the error message about it.

A rank that fails takes its peers down: their collectives break or time out. So failures have an `order`:
a rank that raised or was killed comes before one that timed out, which comes before one that lost its connection; among
equals the earliest is the cause. Nothing here imports torch: the parent reads these values.
"""

from __future__ import annotations

import enum
import errno
import io
import os
import re
import resource
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from runner.errors import ConfigError, text_of
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
LOST_PEER = "lost its connection to another rank, which has ended or cannot be reached; its command says why"
RAISED_CODE, KILLED, HUNG, NOT_FINITE, DISK_FULL = "MW710", "MW711", "MW712", "MW719", "MW720"
NO_MEMORY = "MW721"


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


class Reported(Exception):
    """What a process that a rank has started reports; the `failure` becomes that of the rank."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.what)
        self.failure = failure


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
UNWRITABLE = {
    errno.EFBIG: "a file may not be larger (ulimit -f)",
    errno.EROFS: "the file system is read-only",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "the disk is full"),
}
"""The message for each error of a write."""
SHORT = frozenset((errno.ENOMEM, errno.EAGAIN))
_SHORT = re.compile(
    r"can't start new thread|resource temporarily unavailable|(cannot|can't|can not) allocate memory|bad_alloc",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile("OutOfMemoryError|DefaultCPUAllocator|(can't|cannot) allocate memory|bad_alloc", re.IGNORECASE)
LIMITS = (
    (resource.RLIMIT_AS, "v", 1024),
    (resource.RLIMIT_DATA, "d", 1024),
    (resource.RLIMIT_NPROC, "u", 1),
)
"""Limits of memory and of threads, the flag of the shell's `ulimit` that sets each, and its unit. Root may have any
number of threads."""
LOG_LINES = 15
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
"""Characters that a log may hold and a terminal would obey."""
_CONNECTED = frozenset({"torch", "deepspeed", "runner", "strategies", "multiprocessing"})
"""Packages whose code raises where a connection between ranks breaks."""
_LIBRARIES = frozenset({*_CONNECTED, "numpy", "pydantic"})


def from_exception(rank: int, error: BaseException) -> Failure:
    """The failure of a rank whose entry raised `error`."""
    if isinstance(error, Reported):
        return replace(error.failure, rank=rank, at=time.monotonic())
    chain = list(_chain(error))
    text = _first_paragraph(error) + _limits(chain)
    name = "" if isinstance(error, CodedError) else type(error).__name__  # whose text is a sentence
    refusal = "config" if isinstance(error, ConfigError) else "strategy" if isinstance(error, StrategyError) else None
    echoes = [str(link) for link in chain if _may_echo(link)]
    errors = {getattr(link, "errno", None) for link in chain}
    why, code = next((words for number, words in UNWRITABLE.items() if number in errors), ""), RAISED_CODE
    if why:
        code = DISK_FULL
    elif not isinstance(error, CodedError) and any(
        isinstance(link, MemoryError) or _NO_MEMORY.search(_named(link)) for link in chain
    ):
        why, code = "memory ran out", NO_MEMORY
    elif isinstance(error, FloatingPointError):
        code = NOT_FINITE
    return Failure(
        rank=rank,
        at=time.monotonic(),
        order=_order("\n".join(echoes)),
        what=RAISED + ": ".join(filter(None, (why, name, text))),
        where=_where(chain),
        refusal=refusal,
        text=text_of(error),
        code=error.code if isinstance(error, CodedError) else code,
    )


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}"


def _may_echo(link: BaseException) -> bool:
    """Whether it may be the echo of another rank's end: a runtime error (torch's distributed ones are) or a broken
    socket, raised by torch or this project. Code of the user has connections of its own."""
    if not isinstance(link, RuntimeError | ConnectionError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(link.__traceback__)]
    if not frames or type(link).__module__.startswith("torch.") or re.search(r"\.cc:\d+\]", str(link)):
        return True
    package = str(frames[-1].f_globals.get("__name__", "")).partition(".")[0]
    of_worker = frames[-1].f_code.co_name == "reraise"  # by torch, what a data worker has raised
    return package in _CONNECTED and not of_worker


def _limits(chain: Sequence[BaseException]) -> str:
    """The limits of this process that memory or threads may have reached."""
    short = any(isinstance(one, MemoryError) or getattr(one, "errno", None) in SHORT for one in chain)
    if not short and not any(_SHORT.search(str(one)) for one in chain if isinstance(one, RuntimeError)):
        return ""
    found = []
    for which, flag, unit in LIMITS:
        limit, _ = resource.getrlimit(which)
        if limit != resource.RLIM_INFINITY and (which != resource.RLIMIT_NPROC or os.geteuid()):
            found.append(f"{limit // unit} (ulimit -{flag})")
    return f"; the limits of this process: {', '.join(found)}" if found else ""


def _order(text: str) -> CauseOrder:
    if _TIMEOUT.search(text):
        return CauseOrder.TIMEOUT
    return CauseOrder.PEER_LOST if _PEER_LOST.search(text) else CauseOrder.CAUSE


def from_exit(rank: int, code: int, log: str, oom_kills_before: int | None = None) -> Failure:
    """The failure of a rank that ended with exit code `code` (negative: a signal) without a report, with the log
    `log`; `oom_kills` were `oom_kills_before` when it was started."""
    what, where = f"ended with exit code {code} before it was done", ""
    if code < 0:
        what = killed_by(-code, oom_kills_before)
        where = dumped_place(log)  # of a crash handler, unless the signal was SIGKILL
    # a watchdog of the communication library ends its process by SIGABRT
    order = _order(log) if -code == signal.SIGABRT else CauseOrder.CAUSE
    return Failure(rank, time.monotonic(), order, what, where, code=KILLED)


def killed_by(number: int, oom_kills_before: int | None = None) -> str:
    """The description of a process that was ended by signal `number`; `oom_kills` were so many when it was started."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if number != signal.SIGKILL:
        return f"was killed by {name}"
    now = oom_kills()
    if now is None or oom_kills_before is None:
        return f"was killed by {name} (was memory short?)"
    if now > oom_kills_before:
        return f"was killed by {name} (memory was short: the kernel's OOM killer was at work)"
    return f"was killed by {name} (not by the kernel's OOM killer)"


def oom_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """How many processes the kernel has killed since it was booted because this machine, or a control group, had no
    memory; None where it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", vmstat.read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1])


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
    lines = CONTROL.sub("", text).rstrip().splitlines()[-LOG_LINES:]
    shown = "".join(f"\n    {line}" for line in lines) or " (empty, or not on this machine)"
    return f"\nThe end of its log, {log}:{shown}"


def dumped_place(log: str) -> str:
    """The innermost source line outside libraries in the last stack that has one, of those that `faulthandler` dumped
    into `log`: a rank and its data workers dump theirs. Without any, the innermost line of the last stack."""
    dumps = log.split("(most recent call first):")[1:]
    stacks = [re.findall(r'File "([^"]+)", line (\d+) in (\S+)', dump) for dump in reversed(dumps)]
    for frames in [[frame for frame in frames if not _is_library_file(frame[0])] for frames in stacks] + stacks:
        for file, line, function in frames:
            return _place(file, line, function)
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
    text = " ".join(text_of(error).partition("Exception raised from ")[0].strip().partition("\n\n")[0].split())
    return text if len(text) <= 2000 else text[:2000] + " ..."


def _where(chain: Sequence[BaseException]) -> str:
    operators = [operator for link in chain if isinstance(operator := getattr(link, "operator", None), str)]
    rows = [row for link in chain if isinstance(row := getattr(link, "data_row", None), int)]
    parts = [f"operator {operator}" for operator in operators[:1]] + [f"row {row} of the data" for row in rows[:1]]
    if any(getattr(link, "errno", None) in UNWRITABLE for link in chain):
        parts += filter(None, [_written(chain)])
    # The deepest link was raised first, nearest to the user's line.
    for own_only in (True,) if parts or isinstance(chain[0], CodedError) else (True, False):
        for link in reversed(chain):
            if place := _innermost(link.__traceback__, own_only):
                return ", ".join([*parts, place])
    return ", ".join(parts)


def _written(chain: Sequence[BaseException]) -> str:
    """The file that could not be written, which torch's and Python's errors of a write do not name."""
    for link in reversed(chain):
        if isinstance(link, OSError) and link.filename is not None:
            return f"writing {link.filename}"
        for frame, _ in reversed(list(traceback.walk_tb(link.__traceback__))):
            values = frame.f_locals.values()
            names = [getattr(value, "name", None) for value in values if isinstance(value, io.IOBase)]
            names += [str(value) for value in values if isinstance(value, Path) and not value.is_dir()]
            for name in names:
                if isinstance(name, str):  # a number is that of an open file without a name
                    return f"writing {name}"
    return ""


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


def _place(file: str, line: int | str, function: str) -> str:
    here = os.getcwd() + os.sep
    return f"{file.removeprefix(here)}:{line} ({function})"
