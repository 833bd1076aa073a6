"""The coordinator's view of servers and workers: who is there, which server holds what, and who computes which slice.

Threads only read connections and put what arrives into one queue; everything is decided in the thread that calls `run`.
A shard has holders, the first of which is its primary. Invariant: an update is acknowledged only when every holder has
it, so any one of them can go on alone. A member that hangs becomes one that was killed: on the host of the coordinator
it is killed, as its open connection proves that it runs; on another host its connections are closed, upon which it ends
should it ever go on. Holders of a shard are on different hosts where there are several.
"""

from __future__ import annotations

import os
import queue
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.errors import RunFailed
from runner.launch import network
from runner.launch.launchers.connection import new_secret
from runner.launch.liveness import RunningTime
from runner.run_folder.atomic import replace_text
from runner.server.links import BROKEN, Address, ServerLink, accept, connect

PLACE, OVER = "coordinator", "over"
"""The file that says where the coordinator listens, and its content when all is done."""
Unit = tuple[int, int]
"""Step, and slice of it."""
State = tuple[Mapping[str, Any], Sequence[Tensor]]
"""Of a shard, as `ServedShard.state` makes it."""
LOOK = 0.5
"""Seconds between two looks for workers that hang, at most."""
SILENT = 2.5
"""Timeouts after which a worker hangs: one to notice that another member does, one of the coordinator on a server."""


class Fleet:
    """Servers and workers of a run.

    Args:
        folder: where they find the coordinator; only the owner of the run can read it.
        address: of this host, where they reach the coordinator.
        host: its name.
        servers: how many shards, and servers, there are.
        replicas: how many further holders a shard shall have.
        timeout: seconds without anything that anybody waits for.
        welcome: what a worker that joins needs beside what servers hold.
        keeping: whether workers keep parameters, which one that joins needs too.

    Attributes:
        results: what workers have reported, by unit.
        counts: how often something happened: workers and servers that joined or went, units handed out again.
    """

    def __init__(
        self,
        folder: Path,
        address: str,
        host: str,
        servers: int,
        replicas: int,
        timeout: float,
        welcome: Callable[[], list[Tensor]],
        keeping: bool,
        attempt: int,
    ) -> None:
        self._folder, self._replicas, self._timeout, self._welcome = folder, replicas, timeout, welcome
        self._keeping, self._host, self._attempt = keeping, host, attempt
        self._secret = new_secret(folder)
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._servers: dict[int, ServerLink] = {}
        self._processes: dict[ServerLink, tuple[str, int]] = {}
        """Hosts and process ids."""
        self._ranks: dict[ServerLink, int] = {}
        self._places: dict[int, tuple[str, ServerLink]] = {}
        """Of every server its host, and the connection that it has opened."""
        self._clock = RunningTime()
        self._requested: dict[ServerLink, float] = {}
        """Since when workers owe an answer."""
        self._addresses: dict[int, tuple[str, int]] = {}
        self._holders: list[list[int]] = [[] for _ in range(servers)]
        self._callers: list[ServerLink] = []
        self._over = False
        self._workers: dict[ServerLink, Address] = {}
        self._joining: dict[ServerLink, Address] = {}
        self._computed: dict[ServerLink, set[int]] = {}
        """The slices of this step that workers have computed; of what they keep each has the gradient of its own."""
        self._ring: list[ServerLink] = []
        self._generation = 0
        self._reduced: dict[ServerLink, Mapping[str, Any]] = {}
        self._answers: dict[ServerLink, tuple[dict[str, Any], list[Tensor]]] = {}
        self._idle: deque[ServerLink] = deque()
        self._busy: dict[ServerLink, Unit] = {}
        self._todo: deque[Unit] = deque()
        self._given: dict[str, Any] = {}
        self.results: dict[Unit, Mapping[str, Any]] = {}
        self.counts: Counter[str] = Counter()
        self._listener = network.listener(address)
        accept(self._listener, self._secret, timeout, self._called)
        _publish(folder, f"{address} {self._listener.getsockname()[1]}")

    # Members

    def _called(self, link: ServerLink, hello: Mapping[str, Any]) -> None:
        """Read what a member sends until it ends, in a separate thread."""
        self._callers.append(link.patient())
        if self._over:
            link.close()
            return
        member = hello["server"] if hello["op"] == "server" else None
        self._processes[link], self._ranks[link] = (hello["host"], hello["process"]), hello["rank"]
        address = tuple(hello["address"])
        if member is None:
            self._events.put(lambda: self._worker_joined(link, address))
        else:
            self._events.put(lambda: self._server_joined(member, address, link))
        try:
            while True:
                self._events.put(partial(self._heard, link, *link.receive()))
        except BROKEN:
            self._events.put((lambda: self._worker_gone(link)) if member is None else (lambda: self._probe(member)))

    def _worker_joined(self, link: ServerLink, address: Address) -> None:
        if self._keeping:
            self._joining[link] = address
        else:
            self._welcomed(link, address)

    def _welcomed(self, link: ServerLink, address: Address, kept: State | None = None) -> None:
        try:
            link.send("welcome", self._welcome())
            if kept is not None:
                link.send("load", kept[1], **kept[0])
        except BROKEN:
            return  # its end is in the queue, too
        self.counts["workers_joined"] += 1
        self._workers[link] = address
        self._idle.append(link)

    def _worker_gone(self, link: ServerLink) -> None:
        self._joining.pop(link, None)
        self._requested.pop(link, None)
        if link not in self._workers:
            return
        del self._workers[link]
        self._computed.pop(link, None)
        self.counts["workers_lost"] += 1
        if self._keeping and not self._workers:
            raise RunFailed(
                "MW711",
                "all workers are down, and with them the parameters that they keep (parallel.server.parameters): these "
                "and their states are lost. launch.max_restarts lets a run continue from the newest checkpoint.",
            )
        if link in self._idle:
            self._idle.remove(link)
        if (unit := self._busy.pop(link, None)) is not None:
            self.counts["slices_again"] += 1
            self._todo.appendleft(unit)

    def _heard(self, link: ServerLink, fields: dict[str, Any], tensors: list[Tensor]) -> None:
        """A worker reports a slice, or that it does not reach a server, or answers a request."""
        self._requested.pop(link, None)
        if fields["op"] in ("reduced", "broken"):
            if fields["generation"] == self._generation:
                self._reduced[link] = fields
            return
        if fields["op"] in ("state", "gradient"):
            self._answers[link] = fields, tensors
            return
        if fields["op"] == "lost":
            for server in fields["servers"]:
                self._probe(server)
            self._ask(link, "layout", **self._layout())
            return
        self._idle.append(link)
        unit = self._busy.pop(link)
        self.results[unit] = fields
        self._computed.setdefault(link, set()).add(unit[1])
        for shard, replica in fields["alone"]:
            self._keep_primary(shard, replica)

    def _send(self, link: ServerLink, op: str, **fields: Any) -> None:
        with suppress(*BROKEN):  # its end is in the queue, too
            link.send(op, **fields)

    def _ask(self, link: ServerLink, op: str, **fields: Any) -> None:
        """Send a worker what it answers."""
        self._requested.setdefault(link, self._clock.now)
        self._send(link, op, **fields)

    def _end_hanging(self) -> None:
        """End the workers that have owed an answer for too long, where others are left."""
        late = self._clock.look() - SILENT * self._timeout
        hanging = [link for link, since in self._requested.items() if since < late and link in self._processes]
        if len(hanging) < len(self._workers):
            for link in hanging:
                self._kill(link)

    def _kill(self, link: ServerLink) -> None:
        """Kill the process at the other end, which hangs, once; hang up where it is on another host."""
        host, process = self._processes.pop(link, ("", 0))
        if process:
            rank = self._ranks[link]
            print(f"rank {rank} gives no answer (launch.timeout: {self._timeout:g} s); it is ended", flush=True)
        if process and host == self._host:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        elif process:
            link.close()

    def _server_joined(self, server: int, address: tuple[str, int], caller: ServerLink) -> None:
        self._server_gone(server)  # the process before it, if nothing was heard of its end yet
        try:
            self._servers[server] = connect(address, self._secret, self._timeout)
            self._servers[server].send("coordinator")
        except BROKEN:
            return
        self._processes[self._servers[server]] = self._processes[caller]
        self._ranks[self._servers[server]] = self._ranks[caller]
        self._addresses[server], self._places[server] = address, (self._processes[caller][0], caller)
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
        host, caller = self._places.pop(server)
        if host != self._host:
            caller.close()
        self.counts["servers_lost"] += 1
        for number, holders in enumerate(self._holders):
            if server in holders:
                holders.remove(server)
                if not holders:
                    raise RunFailed(
                        "MW711",
                        f"server {server} (rank {self._ranks[link]}) is down, and with it the "
                        f"{'last' if self._replicas else 'only'} copy of the parameters and states of shard {number}. "
                        "launch.max_restarts lets a run continue from the newest checkpoint."
                        + (
                            " Its other copy was lost before a server had a new one."
                            if self._replicas
                            else " parallel.server.replicas=1 keeps a second copy on another server."
                        ),
                    ) from None  # a broken connection is how this server heard of it

    def _keep_primary(self, shard: int, replica: Sequence[Any]) -> None:
        """The primary of `shard` does not reach the replica at this address any more: what it acknowledges from now on
        is not there. Workers may report one that has been replaced since."""
        primary, *others = self._holders[shard]
        self._holders[shard] = [primary, *(one for one in others if self._addresses[one] != tuple(replica))]

    def _replicate(self) -> None:
        """Give every shard its replica, on another host than its primary's if there is one, and there on the server
        with the fewest shards. A replica on the same host moves as soon as there is a server elsewhere."""
        if not self._replicas:
            return
        for number, holders in enumerate(self._holders):
            load = Counter(server for others in self._holders for server in others)
            together = {server: self._places[server][0] == self._places[holders[0]][0] for server in self._servers}
            free = [server for server in self._servers if server not in holders]
            if len(holders) > 1:
                free = [server for server in free if together[holders[1]] and not together[server]]
            if not free:
                continue
            server = min(free, key=lambda one: (together[one], load[one], one))
            answer = self.request(holders[0], "replicate", shard=number, address=self._addresses[server])
            if answer is not None and not answer[0]["alone"]:
                holders[1:] = [server]

    # What workers keep

    def admit(self, state: Callable[[], State], first: int) -> None:
        """Between two steps: let workers join that have come, with the `state` of what workers keep. At the beginning
        wait for `first` of them."""
        if not self._workers:
            self._run(lambda: len(self._joining) >= first, "a worker")
        if not self._joining:
            return
        kept = state()
        for link, address in [*self._joining.items()]:
            self._welcomed(link, address, kept)
        self._joining.clear()

    def reduce(self, step: int, slices: int) -> tuple[float, int]:
        """Let workers add up the gradients of what they keep. Slices of a worker that is killed are recomputed, and
        the others make a ring without it.

        Returns:
            The sum of squares, and the bytes sent.
        """
        while True:
            owners = {number: link for link in self._workers for number in self._computed.get(link, ())}
            if missing := [number for number in range(slices) if number not in owners]:
                self.compute_again([(step, number) for number in missing])
                continue
            members = [*self._workers]
            if members != self._ring:
                self._ring, self._generation = members, self._generation + 1
            self._reduced = {}
            for position, link in enumerate(members):
                own = [number for number in range(slices) if owners[number] is link]
                ahead = self._workers[members[(position + 1) % len(members)]]
                place = {"generation": self._generation, "position": position, "size": len(members), "ahead": ahead}
                self._ask(link, "reduce", step=step, slices=own, **place)
            self._run(self._all_reduced, "a worker")
            answers = [self._reduced[link] for link in members if link in self._reduced]
            if len(answers) == len(members) and all(one["op"] == "reduced" for one in answers):
                return answers[0]["square"], sum(one["sent"] for one in answers)
            self._ring = []

    def _all_reduced(self) -> bool:
        """Whether the workers of the ring have added up, or cannot."""
        waiting = [link for link in self._ring if link not in self._reduced]
        broken = any(one["op"] == "broken" for one in self._reduced.values())
        return not waiting or broken or any(link not in self._workers for link in waiting)

    def update_kept(self, **fields: Any) -> None:
        """Let every worker update what it keeps."""
        self._computed.clear()
        for link in [*self._workers]:
            self._send(link, "apply", **fields)

    def request_worker(self, op: str) -> tuple[dict[str, Any], list[Tensor]]:
        """The answer of any worker about what all of them keep."""
        while True:
            link = next(iter(self._workers))
            self._answers.pop(link, None)
            self._ask(link, op)
            self._run(lambda link=link: link in self._answers or link not in self._workers, "a worker")  # type: ignore[misc]
            if link in self._answers:
                fields, tensors = self._answers.pop(link)
                del fields["op"]
                return fields, tensors

    # Servers

    def request(
        self, server: int, op: str, tensors: Sequence[Tensor] = (), **fields: Any
    ) -> tuple[dict[str, Any], list[Tensor]] | None:
        """The answer of a server; None where it is down. Raises RunFailed where that loses a shard."""
        try:
            return self._servers[server].request(op, tensors, **fields)
        except BROKEN as error:
            self._server_failed(server, error)
            return None

    def _server_failed(self, server: int, error: BaseException) -> None:
        """A server is down, or hangs and is ended."""
        if isinstance(error, TimeoutError):
            self._kill(self._servers[server])
        self._server_gone(server)

    def request_primary(self, shard: int, op: str, **fields: Any) -> tuple[dict[str, Any], list[Tensor]]:
        """The answer of the first holder of `shard` that answers."""
        while True:
            if (answer := self.request(self._holders[shard][0], op, shard=shard, **fields)) is not None:
                if (replica := answer[0].get("alone")) is not None:
                    self._keep_primary(shard, replica)
                return answer

    def send_to_holders(self, op: str, **fields: Any) -> None:
        """Send the same to all holders of every shard, and wait until all have done it."""
        requests = [(server, shard) for shard, holders in enumerate(self._holders) for server in holders]
        waiting = []
        for server, shard in requests:  # all of them work at once
            try:
                self._servers[server].send(op, shard=shard, **fields)
                waiting.append(server)
            except (*BROKEN, KeyError) as error:
                self._server_failed(server, error)
        for server in waiting:
            try:
                if server in self._servers:
                    self._servers[server].receive()
            except BROKEN as error:
                self._server_failed(server, error)

    def place(self, states: Sequence[State]) -> None:
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
        """The addresses by which workers find the primary of every shard."""
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
        heard = self._clock.look()
        while True:
            self._assign()
            if done():
                return
            self._end_hanging()
            try:
                self._events.get(timeout=LOOK)()
                heard = self._clock.look()
            except queue.Empty:
                if (silence := self._clock.look() - heard) > (SILENT + 1) * self._timeout:
                    raise RunFailed(
                        "MW712",
                        f"{self._owing() or f'nothing was heard of {whom}'} for {silence:.0f} s "
                        f"(launch.timeout: {self._timeout:g} s).",
                    ) from None

    def _owing(self) -> str:
        """The workers that owe an answer, and so hang, as the beginning of a sentence; "" where none does."""
        ranks = sorted(self._ranks[link] for link in self._requested if link in self._ranks)
        who = "the worker on rank" if len(ranks) == 1 else "the workers on ranks"
        return f"{who} {', '.join(map(str, ranks))} gave no answer" if ranks else ""

    def _assign(self) -> None:
        while self._todo and self._idle and all(self._holders):
            link, unit = self._idle.popleft(), self._todo.popleft()
            self._busy[link] = unit
            self._ask(link, "unit", unit=unit, floor=min(self.outstanding()), **self._given, **self._layout())

    def close(self, done: bool) -> None:
        """Let all members end, also those that have just come; `done`: those to come have nothing left to do, else
        they wait for the coordinator of the next attempt."""
        if done:
            _publish(self._folder, over(self._attempt))
        else:
            (self._folder / PLACE).unlink()
        self._over = True
        self._listener.close()
        for link in [*self._callers]:
            link.close()


def over(attempt: int) -> str:
    """What the file of members says when all is done; those of the next attempt wait for their coordinator."""
    return f"{OVER} {attempt}"


def _publish(folder: Path, content: str) -> None:
    """Write the file that members look for."""
    replace_text(folder / PLACE, content)
