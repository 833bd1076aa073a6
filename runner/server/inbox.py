"""What reaches a worker: the coordinator's orders, and connections of other workers that want a ring."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from runner.launch import network
from runner.server.links import BROKEN, Address, ServerLink, accept, connect
from runner.server.ring import Ring

Order = tuple[dict[str, Any], list[Tensor]]


class Inbox:
    """One queue for both, so that a worker that waits for its ring hears of another one.

    Args:
        coordinator: leads to the coordinator.
        secret, timeout: of connections.
        address: of this host.
    """

    def __init__(self, coordinator: ServerLink, secret: bytes, timeout: float, address: str) -> None:
        self._secret, self._timeout = secret, timeout
        self._arriving: queue.SimpleQueue[Order | tuple[int, ServerLink] | BaseException] = queue.SimpleQueue()
        self._next: Order | None = None
        self._behind: dict[int, ServerLink] = {}
        """By generation of the ring."""
        self._ring: tuple[int, Ring] | None = None
        self._listener = network.listener(address)
        accept(self._listener, secret, timeout, self._called)
        threading.Thread(target=self._listen, args=(coordinator,), daemon=True).start()

    @property
    def address(self) -> Address:
        """The address by which other workers reach this inbox."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def _listen(self, coordinator: ServerLink) -> None:
        try:
            coordinator.patient()
            while True:
                self._arriving.put(coordinator.receive())
        except BROKEN as error:
            self._arriving.put(error)

    def _called(self, link: ServerLink, hello: Mapping[str, Any]) -> None:
        self._arriving.put((hello["generation"], link))

    def order(self) -> Order:
        """The coordinator's next order. Raises OSError or EOFError where it has closed the connection."""
        while self._next is None:
            self._take()
        found, self._next = self._next, None
        return found

    def _take(self) -> None:
        """Wait for what comes next."""
        found = self._arriving.get()
        if isinstance(found, BaseException):
            raise found
        if isinstance(found[0], int):
            self._behind[found[0]] = found[1]
        else:
            self._next = found

    def ring(self, order: Mapping[str, Any]) -> Ring | None:
        """The ring of an order, of which the worker ahead is at `order["ahead"]`. None where another order comes before
        it is complete. Raises OSError or EOFError: a worker is down."""
        generation = order["generation"]
        if self._ring is not None:
            if self._ring[0] == generation:
                return self._ring[1]
            self._ring[1].close()
            self._ring = None
        ahead = connect(tuple(order["ahead"]), self._secret, self._timeout)
        ahead.send("ring", generation=generation)
        while generation not in self._behind:
            self._take()
            if self._next is not None:
                ahead.close()
                return None
        for old in [one for one in self._behind if one < generation]:
            with suppress(OSError):
                self._behind.pop(old).close()
        self._ring = generation, Ring(order["position"], order["size"], ahead, self._behind.pop(generation))
        return self._ring[1]
