"""Inputs of a rank: `Orders` from the process that starts it, `RankContext` for its entry, and its files in the run
folder.

Imports no torch: parents write these values, ranks read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from runner.launch.network import LOOPBACK
from runner.launch.server import Descriptor

OPEN_FILES = "/proc/self/fd"
"""Where a process finds its open files by descriptor, on Linux."""


@dataclass(frozen=True)
class GroupOrders:
    """The launch parameters that all ranks of a run share.

    Attributes:
        entry: "package.module:function", called in each rank with (RankContext, payload).
        run_dir: absolute.
        device: "cpu" (gloo) or "cuda" (nccl).
        timeout: seconds that a rank may wait for another one in a collective.
        threads: torch's threads per rank.
        elastic: rank 0 has a process group of its own and the others have none: they find each other by themselves. One
            of the others that is killed is started anew.
    """

    entry: str
    world_size: int
    run_dir: Path
    device: str
    timeout: float
    threads: int
    elastic: bool = False


@dataclass(frozen=True)
class RankContext:
    """The identity of this rank.

    Attributes:
        rank: 0 <= rank < world_size.
        local_rank: the rank among those of this machine.
        device: "cpu" or "cuda:1"; on a GPU it is already the current device.
        run_dir: the folder of the run, absolute.
        address: where ranks of other hosts reach this one.
    """

    rank: int
    world_size: int
    local_rank: int
    device: str
    run_dir: Path
    address: str = LOOPBACK


@dataclass(frozen=True)
class Orders:
    """The launch parameters of a rank.

    Attributes:
        group: those of all ranks.
        device: the number of the rank's own GPU, where there are GPUs.
        environment: the parent's environment variables at this moment.
        payload: an open file that holds the pickled payload.
        store: if all ranks are on this machine, an open file without a name in which the rendezvous keeps its keys:
            nobody but these processes can open it.
        address, port: elsewhere, where the store of the rendezvous listens; `listener` is the listening socket, for
            rank 0 only, and `secret` comes before all keys.
        console: where rank 0's stdout is shown.
        own_address: where ranks of other hosts reach this one.
        plain: whether the result of rank 0 is sent as JSON, which the other end can read without trusting it.
        connection: reports are sent here, and STOP is received; when the parent's end closes, the rank ends.
    """

    group: GroupOrders
    rank: int
    local_rank: int
    local_world_size: int
    device: int
    environment: dict[str, str]
    payload: Descriptor
    store: Descriptor | None
    address: str
    port: int
    connection: Connection
    secret: str = ""
    listener: Descriptor | None = None
    console: Descriptor | None = None
    own_address: str = LOOPBACK
    plain: bool = False

    @property
    def context(self) -> RankContext:
        """The part of which the entry is informed."""
        device = "cpu" if self.group.device == "cpu" else f"cuda:{self.device}"
        place = self.group.run_dir, self.own_address
        return RankContext(self.rank, self.group.world_size, self.local_rank, device, *place)


def log_of(run_dir: Path, rank: int) -> Path:
    """The log of rank `rank` of the run in `run_dir`."""
    return run_dir / "ranks" / f"{rank}.log"


def flight_record_of(run_dir: Path, rank: int) -> Path:
    """The flight record that rank `rank` of the run in `run_dir` keeps while it runs."""
    return run_dir / "ranks" / f"{rank}.where"
