"""Connections between coordinator, servers and workers: a request is a JSON object followed by the bytes of tensors.

Both ends prove that they know the run's secret before anything is read, and nothing that arrives is unpickled.
Invariant: a broken connection raises OSError or EOFError, at once where the process at the other end has been killed.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from runner.launch import network
from runner.launch.launchers.connection import GREETING, answer, call
from runner.launch.messages import silence_of

BROKEN = (OSError, EOFError)
"""What a connection raises whose other end has ended."""
LOOK = 1.0
"""Seconds of a part of a wait."""
LONGEST = 1 << 26
"""Bytes of a JSON object."""
_LENGTH = struct.Struct(">I")
Address = tuple[str, int]


class ServerLink:
    """One end of a connection. `sent` and `received` count the bytes of tensors."""

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # of the handshake
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
        self._socket.settimeout(min(timeout, LOOK))
        self._timeout = timeout
        self.sent = self.received = 0

    def patient(self, seconds: float = math.inf) -> ServerLink:
        """This link, which from now on waits `seconds` for a message."""
        self._timeout = seconds
        return self

    def send(self, op: str, tensors: Sequence[Tensor] = (), **fields: Any) -> None:
        """Send a message with tensors on the CPU."""
        described = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        head = json.dumps({"op": op, "tensors": described, **fields}).encode()
        self._all(self._socket.send, memoryview(_LENGTH.pack(len(head)) + head))
        for tensor in tensors:
            if tensor.numel():
                self._all(self._socket.send, _bytes(tensor.detach().contiguous()))
                self.sent += tensor.nbytes

    def receive(self, into: Sequence[Tensor] = ()) -> tuple[dict[str, Any], list[Tensor]]:
        """The next message and its tensors, the first of which are read into the memory of `into`.

        Raises EOFError when the other end is closed, OSError if the message is malformed.
        """
        length = _LENGTH.unpack(self._exactly(memoryview(bytearray(_LENGTH.size))))[0]
        if length > LONGEST:
            raise OSError("what arrived is no message")
        try:
            fields = json.loads(bytes(self._exactly(memoryview(bytearray(length)))))
            kinds = [(getattr(torch, dtype), tuple(shape)) for dtype, shape in fields.pop("tensors")]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OSError("what arrived is no message") from error
        tensors = []
        for number, (dtype, shape) in enumerate(kinds):
            if number < len(into):
                tensor = into[number]
                if tensor.dtype != dtype or tensor.shape != shape:
                    raise OSError(
                        f"a tensor of {dtype} {shape} arrived for one of {tensor.dtype} {tuple(tensor.shape)}"
                    )
            else:
                tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                self._exactly(_bytes(tensor))
                self.received += tensor.nbytes
            tensors.append(tensor)
        return fields, tensors

    def request(
        self, op: str, tensors: Sequence[Tensor] = (), into: Sequence[Tensor] = (), **fields: Any
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """Send a request and return its answer."""
        self.send(op, tensors, **fields)
        return self.receive(into)

    def close(self) -> None:
        """Close it; a thread that waits for a message, at either end, gets EOFError or OSError."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, view: memoryview) -> memoryview:
        """Fill `view`."""
        return self._all(self._socket.recv_into, view)

    def _all(self, move: Callable[[memoryview], int], view: memoryview) -> memoryview:
        """Move all bytes of `view`. A wait counts by its parts, so that a job that is suspended has lost none."""
        done, waited = 0, 0.0
        while done < len(view):
            try:
                count = move(view[done:])
            except TimeoutError:
                waited += LOOK
                if waited < self._timeout:
                    continue
                raise
            if not count:
                raise EOFError("the connection was closed")
            done, waited = done + count, 0.0
        return view


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor with elements."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def connect(address: Address, secret: bytes, timeout: float) -> ServerLink:
    """A connection to who listens at `address`. Raises OSError where nobody does."""
    try:
        return ServerLink(call(*address, secret, _silence(address[0], timeout)), timeout)
    except AuthenticationError as error:
        raise ConnectionError("somebody else listens there") from error


def _silence(address: str, timeout: float) -> float:
    """Seconds without a sign of life from who is reached through an address: a host may be lost, a process ends."""
    return timeout if network.is_loopback(address) else silence_of(timeout)


def accept(
    listener: socket.socket, secret: bytes, timeout: float, serve: Callable[[ServerLink, Mapping[str, Any]], None]
) -> None:
    """Start a thread that calls `serve` with each caller's connection and first message, in a thread for each."""

    def answered(plain: socket.socket) -> None:
        try:
            silence = _silence(plain.getsockname()[0], timeout)
            link = ServerLink(answer(plain, secret, silence, GREETING), timeout)
            hello, _ = link.patient().receive()  # a member opens its data first
            link.patient(timeout)
        except (*BROKEN, AuthenticationError):
            return  # a stranger, or a process that has ended
        serve(link, hello)

    def listen() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=answered, args=(plain,), daemon=True).start()

    threading.Thread(target=listen, daemon=True).start()
