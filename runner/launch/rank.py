"""The first thing that runs in a rank: it ties the process to its parent before anything can go wrong.

In this order: an own process group, signals, the watch on the parent, the log; then torch and the work. Invariant:
from the first line on, a rank whose parent has gone ends within moments, together with every process that it
started, and a rank that fails says so through its connection before its neighbours can notice.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from runner.launch import logs, messages
from runner.launch.failure import from_exception
from runner.launch.messages import Done
from runner.launch.server import Descriptor
from runner.recovery import stopping

STOP = "stop"
"""What a parent sends to ranks that shall stop after the step at hand."""
WHERE = "where"
"""What a command sends to ranks of any host that shall write their stack into their log."""
OPEN_FILES = "/proc/self/fd"
"""Where a process finds its open files under names of its own, on Linux."""


@dataclass(frozen=True)
class Orders:
    """All that a rank is told.

    Attributes:
        entry: "package.module:function".
        run_dir: absolute; the log is `run_dir/ranks/RANK.log`.
        local_rank, local_world_size: the rank among those of its host, and how many these are.
        device: the rank's own device, "cpu" or "cuda:1".
        timeout: seconds that a collective may wait.
        threads: torch's threads in this rank.
        environment: the parent's environment variables at this moment.
        payload: an open file that holds the pickled payload.
        store: where all ranks are of this machine, an open file without a name in which the rendezvous keeps its keys:
            nobody but these processes can open it.
        address, port: elsewhere, where the store of the rendezvous listens; `listener` is the listening socket, for
            rank 0 only, and `secret` comes before all keys.
        console: where rank 0's stdout is shown.
        plain: whether the result of rank 0 is sent as JSON, which whoever is at the other end can read without trust.
        connection: reports go out here, and STOP comes in; that the parent's end closes is the order to end.
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


def log_of(run_dir: Path, rank: int) -> Path:
    """Where rank `rank` of the run in `run_dir` writes."""
    return run_dir / "ranks" / f"{rank}.log"


def whereabouts_of(run_dir: Path, rank: int) -> Path:
    """What rank `rank` of the run in `run_dir` says of where it is, while it runs."""
    return run_dir / "ranks" / f"{rank}.where"


def enter(orders: Orders) -> None:
    """Carry out `orders` in this process, report the outcome, and in case of failure end the process at once."""
    try:
        # What this rank starts can be ended with it, and Ctrl-C reaches the parent alone.
        if os.getpgrp() != os.getpid():  # a launcher may have seen to it
            os.setpgrp()
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=_end_with_parent, args=(orders.connection,), daemon=True).start()
        logs.attach(log_of(orders.run_dir, orders.rank), orders.console.number if orders.console else None)
        faulthandler.enable(all_threads=False)
        faulthandler.register(signal.SIGUSR1, all_threads=False)  # the parent asks where a rank hangs
        os.environ.clear()
        os.environ.update(orders.environment)
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # the user's own modules, after everything that is installed

        from runner.launch.worker import work  # torch; here, so that failing to import it is reported too

        value = work(orders)
        done = Done(_packed(value, orders.plain) if orders.rank == 0 else None)
    except BaseException as error:
        with suppress(OSError):  # the log may be on a disk that is full, which is what the parent is to hear
            traceback.print_exc()
        _flush()
        messages.report(orders.connection, from_exception(orders.rank, error))
        # Without the usual farewells: they could wait for ranks that will not answer.
        os._exit(1)
    _flush()
    messages.report(orders.connection, done)


def _packed(value: Any, plain: bool) -> bytes:
    return json.dumps(value).encode() if plain else pickle.dumps(value)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def _end_with_parent(connection: Connection) -> None:
    try:
        while order := messages.receive(connection):
            if order == STOP:
                stopping.ask()
            elif order == WHERE:
                os.kill(os.getpid(), signal.SIGUSR1)
    except (EOFError, OSError):  # the parent's end is closed
        os.killpg(0, signal.SIGKILL)
