"""The coordinator's view of servers and workers: who is there, which server holds what, and who computes which slice.

Threads only read connections and put what arrives into one queue; everything is decided in the thread that calls `run`.
A shard has holders, the first of which is its primary. Invariant: an update is acknowledged only when every holder has
it, so any one of them can go on alone.
"""

from __future__ import annotations

import os
import queue
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.errors import RunFailed
from runner.launch import network
from runner.launch.launchers.connection import new_secret
from runner.server.links import BROKEN, Link, accept, connect

PLACE, OVER = "coordinator", "over"
"""The file that says where the coordinator listens, and its content when all is done."""
Unit = tuple[int, int]
"""Step, and slice of it."""


class Fleet:
    """Servers and workers of a run.

    Args:
        folder: where they find the coordinator; only the owner of the run can read it.
        servers: how many shards, and servers, there are.
        replicas: how many further holders a shard shall have.
        timeout: seconds without anything that anybody waits for.
        welcome: what a worker that joins needs beside what servers hold.

    Attributes:
        results: what workers have reported, by unit.
        counts: how often something happened: workers and servers that joined or went, units handed out again.
    """

    def __init__(
        self, folder: Path, servers: int, replicas: int, timeout: float, welcome: Callable[[], list[Tensor]]
    ) -> None:
        self._folder, self._replicas, self._timeout, self._welcome = folder, replicas, timeout, welcome
        self._secret = new_secret(folder)
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._servers: dict[int, Link] = {}
        self._addresses: dict[int, tuple[str, int]] = {}
        self._holders: list[list[int]] = [[] for _ in range(servers)]
        self._callers: list[Link] = []
        self._over = False
        self._workers: set[Link] = set()
        self._idle: deque[Link] = deque()
        self._busy: dict[Link, Unit] = {}
        self._todo: deque[Unit] = deque()
        self._given: dict[str, Any] = {}
        self.results: dict[Unit, Mapping[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self._listener = network.listener(network.LOOPBACK)
        accept(self._listener, self._secret, timeout, self._called)
        _publish(folder, str(self._listener.getsockname()[1]))

    # Members

    def _called(self, link: Link, hello: Mapping[str, Any]) -> None:
        """In a separate thread: read what a member sends until it ends."""
        self._callers.append(link.patient())
        if self._over:
            link.close()
            return
        member = hello["server"] if hello["op"] == "server" else None
        if member is None:
            self._events.put(lambda: self._worker_joined(link))
        else:
            self._events.put(lambda: self._server_joined(member, tuple(hello["address"])))
        try:
            while True:
                fields, _ = link.receive()
                self._events.put(partial(self._heard, link, fields))
        except BROKEN:
            self._events.put((lambda: self._worker_gone(link)) if member is None else (lambda: self._probe(member)))

    def _worker_joined(self, link: Link) -> None:
        try:
            link.send("welcome", self._welcome())
        except BROKEN:
            return  # its end is in the queue, too
        self.counts["workers_joined"] += 1
        self._workers.add(link)
        self._idle.append(link)

    def _worker_gone(self, link: Link) -> None:
        if link not in self._workers:
            return
        self._workers.remove(link)
        self.counts["workers_lost"] += 1
        if link in self._idle:
            self._idle.remove(link)
        if (unit := self._busy.pop(link, None)) is not None:
            self.counts["slices_again"] += 1
            self._todo.appendleft(unit)

    def _heard(self, link: Link, fields: Mapping[str, Any]) -> None:
        """A worker reports a slice, or that it does not reach a server."""
        if fields["op"] == "lost":
            for server in fields["servers"]:
                self._probe(server)
            self._send(link, "layout", **self._layout())
            return
        self._idle.append(link)
        self.results[self._busy.pop(link)] = fields
        for shard in fields["alone"]:
            self._keep_primary(shard)

    def _send(self, link: Link, op: str, **fields: Any) -> bool:
        try:
            link.send(op, **fields)
        except BROKEN:
            return False  # its end is in the queue, too
        return True

    def _server_joined(self, server: int, address: tuple[str, int]) -> None:
        self._server_gone(server)  # the process before it, if nothing was heard of its end yet
        try:
            self._servers[server] = connect(address, self._secret, self._timeout)
            self._servers[server].send("coordinator")
        except BROKEN:
            return
        self._addresses[server] = address
        self.counts["servers_joined"] += 1
        if any(self._holders):
            self._replicate()

    def _probe(self, server: int) -> None:
        """Find out whether a server is alive."""
        if server in self._servers:
            self.request(server, "ping")

    def _server_gone(self, server: int) -> None:
        if (link := self._servers.pop(server, None)) is None:
            return
        link.close()
        self.counts["servers_lost"] += 1
        for number, holders in enumerate(self._holders):
            if server in holders:
                holders.remove(server)
                if not holders:
                    raise RunFailed(
                        "MW711",
                        f"server {server} is down, and with it the only copy of shard {number}: its parameters and "
                        "states go on from the newest checkpoint (launch.max_restarts). parallel.server.replicas=1 "
                        "keeps a second copy on another server.",
                    )

    def _keep_primary(self, shard: int) -> None:
        """The primary of `shard` does not reach its replica any more: what it acknowledges from now on is not there."""
        self._holders[shard] = self._holders[shard][:1]

    def _replicate(self) -> None:
        """Give every shard as many holders as it shall have, those with the fewest shards first."""
        for number, holders in enumerate(self._holders):
            load = Counter(server for others in self._holders for server in others)
            free = [server for server in self._servers if server not in holders]
            for server in sorted(free, key=lambda one: (load[one], one))[: 1 + self._replicas - len(holders)]:
                answer = self.request(holders[0], "replicate", shard=number, address=self._addresses[server])
                if answer is not None and not answer[0]["alone"]:
                    holders.append(server)

    # Servers

    def request(
        self, server: int, op: str, tensors: Sequence[Tensor] = (), **fields: Any
    ) -> tuple[dict[str, Any], list[Tensor]] | None:
        """The answer of a server; None where it is down. Raises RunFailed where that loses a shard."""
        try:
            return self._servers[server].request(op, tensors, **fields)
        except BROKEN:
            self._server_gone(server)
            return None

    def request_primary(self, shard: int, op: str, **fields: Any) -> tuple[dict[str, Any], list[Tensor]]:
        """The answer of the first holder of `shard` that answers."""
        while True:
            if (answer := self.request(self._holders[shard][0], op, shard=shard, **fields)) is not None:
                if answer[0].get("alone"):
                    self._keep_primary(shard)
                return answer

    def send_to_holders(self, op: str, **fields: Any) -> None:
        """Send the same to all holders of every shard, and wait until all have done it."""
        requests = [(server, shard) for shard, holders in enumerate(self._holders) for server in holders]
        waiting = []
        for server, shard in requests:  # all of them work at once
            try:
                self._servers[server].send(op, shard=shard, **fields)
                waiting.append(server)
            except (*BROKEN, KeyError):
                self._server_gone(server)
        for server in waiting:
            try:
                if server in self._servers:
                    self._servers[server].receive()
            except BROKEN:
                self._server_gone(server)

    def place(self, states: Sequence[tuple[Mapping[str, Any], Sequence[Tensor]]]) -> None:
        """Give every server its shard, and every shard its replica."""
        self._run(lambda: len(self._servers) == len(self._holders), "a server")
        self._holders = [[shard] for shard in range(len(self._holders))]
        for shard, (fields, tensors) in enumerate(states):
            self.request(shard, "load", tensors, shard=shard, **fields)
        self._replicate()

    @property
    def shards(self) -> range:
        """The numbers of the shards."""
        return range(len(self._holders))

    def _layout(self) -> dict[str, Any]:
        """Where workers find the primary of every shard."""
        return {"servers": [[holders[0], *self._addresses[holders[0]]] for holders in self._holders]}

    # Slices

    def hand_out(self, units: Iterator[Unit] | Sequence[Unit], given: Mapping[str, Any]) -> None:
        """Let workers compute `units`, with `given` in every order."""
        self._todo.extend(units)
        self._given = dict(given)

    def compute_again(self, units: Sequence[Unit]) -> None:
        """Let workers compute units a second time, and return when they are done."""
        self.counts["slices_again"] += len(units)
        for unit in units:
            self.results.pop(unit, None)
        self._todo.extend(units)
        self.wait_for(units)
        for unit in units:
            self.results.pop(unit)

    def outstanding(self) -> list[Unit]:
        """Units that are not done."""
        return [*self._busy.values(), *self._todo]

    def wait_for(self, units: Sequence[Unit]) -> None:
        """Return when `units` are done. Raises RunFailed where no worker reports anything for too long."""
        self._run(lambda: all(unit in self.results for unit in units), "a worker")

    def _run(self, done: Callable[[], bool], whom: str) -> None:
        while True:
            self._assign()
            if done():
                return
            try:
                self._events.get(timeout=self._timeout)()
            except queue.Empty:
                raise RunFailed(
                    "MW712", f"nothing was heard of {whom} for {self._timeout:g} s (launch.timeout)."
                ) from None

    def _assign(self) -> None:
        while self._todo and self._idle and all(self._holders):
            link, unit = self._idle.popleft(), self._todo.popleft()
            self._busy[link] = unit
            self._send(link, "unit", unit=unit, floor=min(self.outstanding()), **self._given, **self._layout())

    def close(self) -> None:
        """Let all members end, also those that have just come."""
        _publish(self._folder, OVER)
        self._over = True
        self._listener.close()
        for link in [*self._callers]:
            link.close()


def _publish(folder: Path, content: str) -> None:
    """Write the file that members look for."""
    hidden = folder / f".{PLACE}"
    hidden.write_text(content, encoding="utf-8")
    os.replace(hidden, folder / PLACE)
