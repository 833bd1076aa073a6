"""Inputs of a rank: `Orders` from the process that starts it, `RankContext` for its entry, and its files in the run
folder.

Imports no torch: parents write these values, ranks read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from runner.launch.server import Descriptor

OPEN_FILES = "/proc/self/fd"
"""Where a process finds its open files by descriptor, on Linux."""


@dataclass(frozen=True)
class Orders:
    """The launch parameters of a rank.

    Attributes:
        entry: "package.module:function".
        run_dir: absolute; the log is `run_dir/ranks/RANK.log`.
        local_rank, local_world_size: the rank among those of its host, and how many these are.
        device: the rank's own device, "cpu" or "cuda:1".
        timeout: seconds that a collective may wait.
        threads: torch's threads in this rank.
        environment: the parent's environment variables at this moment.
        payload: an open file that holds the pickled payload.
        store: if all ranks are on this machine, an open file without a name in which the rendezvous keeps its keys:
            nobody but these processes can open it.
        address, port: elsewhere, where the store of the rendezvous listens; `listener` is the listening socket, for
            rank 0 only, and `secret` comes before all keys.
        console: where rank 0's stdout is shown.
        plain: whether the result of rank 0 is sent as JSON, which the other end can read without trusting it.
        connection: reports are sent here, and STOP is received; when the parent's end closes, the rank ends.
    """

    entry: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    run_dir: Path
    device: str
    timeout: float
    threads: int
    environment: dict[str, str]
    payload: Descriptor
    store: Descriptor | None
    address: str
    port: int
    secret: str
    listener: Descriptor | None
    console: Descriptor | None
    plain: bool
    connection: Connection


@dataclass(frozen=True)
class RankContext:
    """The identity of this rank.

    Attributes:
        rank: 0 <= rank < world_size.
        local_rank: the rank among those of this machine.
        device: "cpu" or "cuda:LOCAL_RANK"; on a GPU it is already the current device.
        run_dir: the folder of the run, absolute.
    """

    rank: int
    world_size: int
    local_rank: int
    device: str
    run_dir: Path


def log_of(run_dir: Path, rank: int) -> Path:
    """Where rank `rank` of the run in `run_dir` writes."""
    return run_dir / "ranks" / f"{rank}.log"


def flight_record_of(run_dir: Path, rank: int) -> Path:
    """The flight record that rank `rank` of the run in `run_dir` keeps while it runs."""
    return run_dir / "ranks" / f"{rank}.where"
