"""Observations of a run: the processes of its ranks, and the tensors that it stored."""

from pathlib import Path

from runner import checkpoint as checkpoints
from runner.launch import forks


def ranks_of_this_process():
    """The child processes of this process's fork server."""
    server = forks.warm().pid
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == server and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def content(folder):
    """Every tensor of the last checkpoint, by key."""
    path = checkpoints.newest(folder / "checkpoints")
    opened = checkpoints.read(path)
    tensors = {key: opened.read(key) for key in opened.tensors}
    return path.name, tensors
