"""Functions that tests run in real ranks. A separate module, because ranks import their function by its dotted name."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from runner.errors import ConfigError
from runner.launch.orders import RankContext
from strategies.core.errors import StrategyError


class OperatorError(RuntimeError):
    """An error with its operator, as the engine raises it."""

    operator = "dense1.matmul"


def describe(rank: RankContext, payload: Any) -> dict[str, Any]:
    """The environment of a rank, including a sum over all ranks."""
    total = torch.tensor(float(rank.rank))
    dist.all_reduce(total)
    print(f"hello from rank {rank.rank}")
    os.write(2, f"raw words of rank {rank.rank}\n".encode())
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "PLANET")
    return {
        "payload": payload,
        "total": total.item(),
        "context": (rank.rank, rank.world_size, rank.local_rank, rank.device, str(rank.run_dir)),
        "environment": {name: os.environ.get(name) for name in names},
        "threads": torch.get_num_threads(),
        "backend": dist.get_backend(),
        "store": type(dist.distributed_c10d._get_default_store().underlying_store).__name__,
    }


def fail(rank: RankContext, payload: tuple[int, str]) -> None:
    """The payload names the failing rank and the kind of failure; all others wait for it in a collective."""
    note_pid(rank)
    culprit, way = payload
    dist.barrier()
    if rank.rank == culprit:
        print("these are the last words")
        if way == "raise":
            raise OperatorError("the shapes do not fit")
        if way == "late":  # the connections break before the cause is reported
            dist.destroy_process_group()
            time.sleep(0.5)
            raise ValueError("this is the cause")
        if way == "strategy":
            raise StrategyError("MW402", "matmul cannot be sliced by 3. Use 2 or 4.")
        if way == "config":
            raise ConfigError("MW314", "data.path: there is no such file.")
        if way == "exit":
            os._exit(7)
        if way == "hang":
            hang()
        os.kill(os.getpid(), signal.Signals[way])
    dist.all_reduce(torch.ones(1))


def hang() -> None:
    while True:
        time.sleep(0.1)


def fail_everywhere(rank: RankContext, payload: None) -> None:
    dist.barrier()
    time.sleep(0.3)  # a rank that ends while another one connects would break its start
    raise ValueError("nobody can do this")


def fail_in_torch(rank: RankContext, payload: None) -> None:
    torch.nn.functional.linear(torch.ones(2, 3), torch.ones(4, 5))


def wait_forever(rank: RankContext, payload: None) -> None:
    """Record the pids of this rank and of processes that it starts, then wait until they are killed."""
    start_children(rank)
    note_pid(rank)
    hang()


def leave_a_child(rank: RankContext, payload: None) -> None:
    start_children(rank)


def start_children(rank: RankContext) -> None:
    """Start one child in the rank's process group, and an orphan in a new session."""
    child = subprocess.Popen(["sleep", "1000"])
    (rank.run_dir / f"pid.child{rank.rank}").write_text(str(child.pid), encoding="utf-8")
    orphan = subprocess.check_output(["sh", "-c", "setsid sleep 1000 >&- 2>&- & echo $!"])
    (rank.run_dir / f"pid.orphan{rank.rank}").write_text(orphan.decode(), encoding="utf-8")


def count_the_server(rank: RankContext, payload: None) -> tuple[int, int]:
    """The thread counts of the process from which this rank was forked, and of this one."""
    status = Path(f"/proc/{os.getppid()}/status").read_text(encoding="utf-8")
    return int(status.partition("Threads:")[2].split()[0]), threading.active_count()


def unpicklable(rank: RankContext, payload: None) -> object:
    return lambda: None


def call_user_module(rank: RankContext, payload: str) -> str:
    return str(__import__(payload).NAME)


def sum_slowly(rank: RankContext, payload: float) -> float:
    total = torch.zeros(1)
    for _ in range(50):
        step = torch.full((1,), payload)
        dist.all_reduce(step)
        total += step
        time.sleep(0.01)
    return float(total.item())


def note_pid(rank: RankContext) -> None:
    (rank.run_dir / f"pid.{rank.rank}").write_text(str(os.getpid()), encoding="utf-8")
