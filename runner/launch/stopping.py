"""Stopping between two steps: all ranks after the same one, without another collective.

The parent, or SIGTERM or SIGHUP straight from a scheduler, requests it. From then on a rank begins no further step and
writes its step to the store; when all have, the latest of these steps is the last for all. No rank is beyond it and
each can reach it, because none waits for a rank that stops earlier. Without a request a step costs one comparison.
Importing this imports no torch.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.launch.orders import RankContext

EXIT_CODE = 128 + signal.SIGTERM
"""What schedulers know as: ended because of SIGTERM."""
REQUESTED = "stop/requested"

_requested = threading.Event()
_received: list[int] = []
"""The signals that have asked this rank itself to stop."""


def request() -> None:
    """Stop this rank, and with it all others, after the current step."""
    _requested.set()


def listen() -> None:
    """Request a stop at the first SIGTERM or SIGHUP from now on, and end this process at once at a second SIGTERM. For
    the main thread."""
    near, far = socket.socketpair()
    far.setblocking(False)
    signal.set_wakeup_fd(far.fileno(), warn_on_full_buffer=False)  # a handler would wait for the end of a collective
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    threading.Thread(target=_hear, args=(near, far), daemon=True).start()


def _hear(near: socket.socket, far: socket.socket) -> None:
    terminated = False
    while received := near.recv(1):
        if received[0] in (signal.SIGTERM, signal.SIGHUP):
            if terminated and received[0] == signal.SIGTERM:
                os._exit(EXIT_CODE)
            terminated = terminated or received[0] == signal.SIGTERM
            _received.append(received[0])
            request()


def stopping_of(rank: RankContext, done: int) -> Stopping:
    """Training begins after step `done`: what `rank` checks before every step."""
    import torch.distributed as dist

    listen()
    store: Any = dist.distributed_c10d._get_default_store()
    return Stopping(rank.rank, rank.world_size, store.clone(), done=done)


class Stopping:
    """Coordinates the stop of `world_size` ranks through `store`, which no other thread of this rank uses."""

    def __init__(self, rank: int, world_size: int, store: Any, *, done: int = 0, poll: float = 1.0) -> None:
        self._rank, self._world_size, self._store, self._poll = rank, world_size, store, poll
        self._step = done
        self._last: float = math.inf
        self.signal = int(signal.SIGTERM)
        """That which reached a rank, once the ranks stop."""
        self._decided = threading.Event()
        threading.Thread(target=self._agree, daemon=True).start()

    def begin(self, step: int) -> bool:
        """Whether this rank may begin `step`; waits for the others where a stop is requested."""
        self._step = step
        if step > self._last:
            self._decided.wait()
        return step <= self._last

    def _agree(self) -> None:
        try:
            while not _requested.wait(self._poll):
                if self._store.check([REQUESTED]):  # of another rank
                    request()
            self._last = -1  # `begin` waits from here on; only now is the step read
            keys = [f"stop/{rank}" for rank in range(self._world_size)]
            self._store.set(keys[self._rank], f"{self._step} {_received[0] if _received else 0}")
            self._store.set(REQUESTED, "")
            self._store.wait(keys)
            steps, signals = zip(*(map(int, answer.split()) for answer in self._store.multi_get(keys)), strict=True)
            self.signal = max(signals) or self.signal
            self._last = max(steps)
        except RuntimeError:  # the store has gone with rank 0: it has failed, or all steps are done
            self._last = math.inf
        self._decided.set()
