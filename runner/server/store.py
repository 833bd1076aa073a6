"""A server: holds shards, the first as their primary, others as the replica of another server's.

Every connection has a thread; a shard has a lock. A primary hands each prepared or applied gradient to its replica
before it acknowledges it. The replica does the same arithmetic in the same order, so it holds the same bits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.launch import network
from runner.server.gradients import Gradient
from runner.server.links import BROKEN, Address, ServerLink, accept, connect
from runner.server.partition import ServerShard
from runner.server.shard import ServedShard
from runner.training.fault_injection import Faults
from strategies.optimizer.updates import Groups, OptimizerFactory

Answer = tuple[dict[str, Any], Sequence[Tensor]]
DONE: Answer = ({}, ())


@dataclass
class _Entry:
    """A shard that this server holds; `replica` leads to who holds it too, where this is the primary, at `address`.
    `alone`: the address of one that is down, in every answer until there is another: the first may be to a worker that
    waits no more."""

    shard: ServedShard
    lock: threading.Lock = field(default_factory=threading.Lock)
    replica: ServerLink | None = None
    address: Address | None = None
    alone: Address | None = None


class Store:
    """The shards of one server.

    Args:
        shards: the pieces of all shards.
        groups, factory, dtype: as of `ServedShard`.
        secret, timeout: of connections.
        address: of this host.
        faults: those of this rank.
    """

    def __init__(
        self,
        shards: Sequence[ServerShard],
        groups: Groups,
        factory: OptimizerFactory,
        dtype: torch.dtype,
        secret: bytes,
        timeout: float,
        address: str,
        faults: Faults,
    ) -> None:
        self._shards, self._groups, self._factory, self._dtype = shards, groups, factory, dtype
        self._secret, self._timeout, self._faults = secret, timeout, faults
        self._entries: dict[int, _Entry] = {}
        self._failed: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._listener = network.listener(address)
        accept(self._listener, secret, timeout, self._serve)

    @property
    def address(self) -> Address:
        """The address at which this server listens."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def wait(self, coordinator: ServerLink) -> None:
        """Return when the coordinator closes its connection. Raises what a request has raised."""

        def closed() -> None:
            with suppress(*BROKEN):
                coordinator.patient().receive()
            self._failed.put(None)

        threading.Thread(target=closed, daemon=True).start()
        if (error := self._failed.get()) is not None:
            raise error

    def _serve(self, link: ServerLink, hello: Mapping[str, Any]) -> None:
        link.patient()
        try:
            while True:
                fields, tensors = link.receive()
                answer, results = self._handle(fields, tensors)
                link.send("", results, **answer)
        except BROKEN:
            link.close()
        except BaseException as error:
            self._failed.put(error)

    def _handle(self, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> Answer:
        op, number = fields["op"], fields.get("shard", -1)
        if op == "load":
            shard = ServedShard(self._shards[number], self._groups, self._factory, self._dtype)
            shard.load(fields, tensors)
            self._entries[number] = _Entry(shard)
            return DONE
        if op == "ping":  # no answer while an update hangs, for which workers would ask again and again
            for entry in [*self._entries.values()]:
                with entry.lock:
                    pass
            return DONE
        entry = self._entries[number]
        if op == "pull":  # a lock: an update that is half done would be a version of nobody
            with entry.lock:
                return {"version": entry.shard.version}, entry.shard.pull(tensors)
        with entry.lock:
            answer: Answer = getattr(self, f"_{op}")(entry, fields, tensors)
            return answer

    def _push(self, entry: _Entry, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> Answer:
        """A slice of a synchronous step."""
        entry.shard.push(fields["step"], fields["slice"], Gradient.of(tensors))
        return DONE

    def _prepare(self, entry: _Entry, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> Answer:
        self._faults.begin(fields["step"])
        self._faults.at("collective")
        if missing := entry.shard.prepare(fields["step"], fields["slices"]):
            return {"missing": missing}, ()
        total = entry.shard.total
        assert total is not None
        self._forward(entry, "prepared", total.tensors(), shard=fields["shard"], step=fields["step"])
        return {"missing": [], "square": total.square(), "alone": entry.alone}, ()

    def _prepared(self, entry: _Entry, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> Answer:
        """What the primary has prepared."""
        if fields["step"] == entry.shard.version + 1:
            entry.shard.total = Gradient.of(tensors)
        return DONE

    def _apply(self, entry: _Entry, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> Answer:
        self._faults.at("optimizer")
        entry.shard.apply(fields["step"], fields["scale"], fields["options"])
        return DONE

    def _arrive(self, entry: _Entry, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> Answer:
        """A slice that updates at once; `pulled` is the version from which its gradient was computed."""
        self._faults.begin(fields["step"])
        self._faults.at("optimizer")
        staleness = entry.shard.version - fields["pulled"]
        if entry.shard.arrive(fields["unit"], fields["floor"], Gradient.of(tensors)):
            self._forward(entry, "arrive", tensors, **{k: v for k, v in fields.items() if k != "op"})
        return {"staleness": staleness, "alone": entry.alone}, ()

    def _gradient(self, entry: _Entry, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> Answer:
        """The prepared gradient."""
        return {}, entry.shard.gradient()

    def _configure(self, entry: _Entry, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> Answer:
        entry.shard.configure(fields["options"])
        return DONE

    def _state(self, entry: _Entry, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> Answer:
        answer, found = entry.shard.state()
        return answer, [tensor.clone() for tensor in found]

    def _replicate(self, entry: _Entry, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> Answer:
        """Give the server at `address` the shard as it is now, and from now on every change."""
        state, found = entry.shard.state()
        address = tuple(fields["address"])
        try:
            link = connect(address, self._secret, self._timeout)
            link.send("replica")
            link.request("load", found, shard=fields["shard"], **state)
        except BROKEN:
            return {"alone": True}, ()
        if entry.replica is not None:
            entry.replica.close()
        entry.replica, entry.address, entry.alone = link, address, None
        return {"alone": False}, ()

    def _forward(self, entry: _Entry, op: str, tensors: Sequence[Tensor], **fields: Any) -> None:
        """Hand a change to the replica, if there is one."""
        if entry.replica is None:
            return
        try:
            entry.replica.request(op, tensors, **fields)
        except BROKEN:
            entry.replica, entry.alone = None, entry.address
