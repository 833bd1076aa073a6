"""What this machine has at hand for new processes: memory and threads. Does not import torch.

A container has what its control groups leave it, whatever the host has: version 1 and 2, at every level that can be
seen. Where the system says nothing (no /proc), nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def memory_at_hand(root: Path = ROOT) -> int | None:
    """Bytes that new processes can take before the kernel ends one; None where the system does not say."""
    found = _fields(root / "proc/meminfo")
    if "MemAvailable" not in found:
        return None
    rooms = [1024 * (found["MemAvailable"] + found.get("SwapFree", 0))]
    for folder in _groups(root, "memory"):
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            most, now = _number(folder / limit), _number(folder / used)
            if most is not None and now is not None:
                rooms.append(most - now + _fields(folder / "memory.stat").get(cache, 0))
    return max(0, min(rooms))


def threads_at_hand(root: Path = ROOT) -> int | None:
    """How many more threads, of any processes, the kernel allows; None where the system does not say."""
    try:
        now = int((root / "proc/loadavg").read_text(encoding="ascii").split()[3].partition("/")[2])
    except (OSError, ValueError, IndexError):
        return None
    most = [_number(root / "proc/sys/kernel" / name) for name in ("threads-max", "pid_max")]
    rooms = [one - now for one in most if one is not None]
    for folder in _groups(root, "pids"):
        limit, used = _number(folder / "pids.max"), _number(folder / "pids.current")
        if limit is not None and used is not None:
            rooms.append(limit - used)
    return max(0, min(rooms)) if rooms else None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups that may limit what `controller` counts, up to the outermost."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = top / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents)


def _number(file: Path) -> int | None:
    """The number in a file; None where there is none, or `max`."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdigit() else None


def _fields(file: Path) -> dict[str, int]:
    """The first number of every line, by its first word."""
    try:
        lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def open_files() -> int | None:
    """How many files and connections a process may hold open; None for any number."""
    try:
        import resource
    except ImportError:  # not on every system
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def own_processes() -> int | None:
    """How many threads this user may have in all; None for any number, which is root's."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    return None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft
