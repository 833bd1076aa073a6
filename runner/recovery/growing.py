"""Growing back: when a run that lost ranks for good may take them in again.

A host that was lost returns once it can be reached by `launch.remote` and itself reaches this command; a rank that
failed on a host that is up is tried again after a checkpoint, and after twice as many each time that this fails.
Asking never waits: the run is supervised meanwhile. Does not import torch.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from socket import socket

from runner.checkpoint.folder import complete
from runner.config.launch import Launch
from runner.launch import network
from runner.launch.launchers.host_assignment import address_of

EVERY = 5.0
"""Seconds between two questions to a host."""
ANSWER = 10.0
"""Seconds that a host has for its answer."""
CALL = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5).close()"
"""What a host runs to show that the way back is open too."""


class HostProbe:
    """Whether `words`, run every few seconds, succeed."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    def answers(self, now: float) -> bool:
        """Start the command, or look at how it ended, without waiting for it."""
        if self._process is None:
            if now - self._started < EVERY:
                return False
            self._started = now
            try:
                self._process = subprocess.Popen(
                    self.words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
            except OSError:  # no process can be started here just now
                return False
        code = self._process.poll()
        if code is None and now - self._started < ANSWER:
            return False
        self.close()
        return code == 0

    def close(self) -> None:
        """End the process that asks, if it still runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Return:
    """The return of what a smaller run does without. Called while that runs; True ends it after the step at hand.

    Args:
        launch: of the complete run.
        lost: hosts that are down; empty where a rank failed on a host that is up.
        checkpoints: the folder of the run's checkpoints.
        after: number of checkpoints after which a rank is tried again.

    Attributes:
        requested: whether something has returned.
    """

    def __init__(self, launch: Launch, lost: Collection[str], checkpoints: Path, after: int) -> None:
        self.lost, self.checkpoints, self.after = tuple(lost), checkpoints, after
        self.before = {path.name for path in complete(checkpoints)}
        self.requested = False
        self.returned: tuple[str, ...] = ()
        self.listener: socket | None = None
        self.probes: dict[str, HostProbe] = {}
        if self.lost and launch.remote:
            address = address_of(launch)
            self.listener = network.listener(address)
            self.listener.setblocking(False)
            call = shlex.join([sys.executable, "-c", CALL, address, str(self.listener.getsockname()[1])])
            self.probes = {name: HostProbe([*launch.remote, name, call]) for name in self.lost}

    def __call__(self) -> bool:
        if self.listener is not None:
            with suppress(BlockingIOError):
                self.listener.accept()[0].close()
            now = time.monotonic()
            self.returned = tuple(name for name, probe in self.probes.items() if probe.answers(now))
            self.requested = bool(self.returned)
        elif not self.lost:
            self.requested = len({path.name for path in complete(self.checkpoints)} - self.before) >= self.after
        return self.requested

    def __str__(self) -> str:
        if self.returned:
            return f"host {', '.join(self.returned)} answer{'s' if len(self.returned) == 1 else ''} again"
        return "lost ranks are tried again after a checkpoint"

    def close(self) -> None:
        """Close all probes."""
        for probe in self.probes.values():
            probe.close()
        if self.listener is not None:
            self.listener.close()
