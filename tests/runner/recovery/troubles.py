"""Datasets that disturb the process that reads them, and rank functions that disturb themselves.

`TROUBLE` in the environment names what happens, and `TROUBLE_MARK` a file that says that it has happened once.
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch.distributed as dist
from networks import Points

from runner.checkpoint import writing


def once(what):
    """Whether trouble of the kind `what` is due; it happens once."""
    mark = Path(os.environ["TROUBLE_MARK"])
    if os.environ["TROUBLE"] != what or mark.exists():
        return False
    mark.touch()
    return True


class Troubled(Points):
    """Signals in the constructor, during preparation; slow files in the ranks."""

    def __init__(self, **args):
        super().__init__(**args)
        for name in ("SIGKILL", "SIGSTOP"):
            if once(name):
                os.kill(os.getpid(), getattr(signal, name))
        if os.environ.get("RANK") == "2" and once("killed as it starts"):
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("RANK") == "2" and os.environ["TROUBLE"] == "killed in the rescue":
            killed_in_the_rescue()
        if once("raise"):
            raise RuntimeError("the data is not there yet")
        if os.environ["TROUBLE"] == "slow files":
            slow_files()
        if os.environ["TROUBLE"] == "slow rank 0" and os.environ["RANK"] == "0":
            slow_files()

    def __getitem__(self, index):
        if os.environ["TROUBLE"] == "slow rows" and dist.get_world_size() == 2:
            time.sleep(0.8)
        if os.environ["TROUBLE"] == "full disk" and dist.get_world_size() == 2 and os.environ["RANK"] == "1":
            fill()
        return super().__getitem__(index)


class HangsBeforeAStep:
    """Rank 1 hangs before step 3; the others wait for it in a call of their own."""

    def before_step(self, state):
        if state.step == 3 and state.rank == 1:
            time.sleep(1000)
        dist.barrier()


class KilledAsItSaves:
    """Rank 3 is killed before the save of step 4: the others wait for it in the start of a process group."""

    def checkpoint(self, state):
        if state.rank == 3 and state.step == 4 and once("killed as it saves"):
            os.kill(os.getpid(), signal.SIGKILL)


def killed_in_the_rescue():
    plain = writing.write_bytes

    def write_bytes(path, content):
        if path.parent.suffix == ".rescue" and path.suffix == ".pt":
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(path, content)

    writing.write_bytes = write_bytes


def slow_files():
    """Every block is slow to read, and there are many."""
    writing.BLOCK = 400
    plain = writing.recorder.advance

    def advance(count=1):
        time.sleep(0.08)
        plain(count)

    writing.recorder.advance = advance


def fill():
    """From now on no file of this process can grow, as on a full disk."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    print("these words find no room")


def stop(rank, payload):
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep(rank, payload):
    time.sleep(1000)


def compute(rank, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))
    return "done"


def kill_the_server(rank, payload):
    if rank.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def full_log(rank, payload):
    print("a line")
    sys.stdout.flush()
    fill()
    raise AssertionError("the line before has raised")
