"""The TCP connection between the command that started a run and each of its ranks, on any host.

Both ends prove that they know the run's secret before anything is read. Invariant: while a connection is open, both
ends are alive and reach each other; the system closes it when one has ended, or after `silence` seconds without a
packet, so both ends notice a host that is cut off.
"""

from __future__ import annotations

import locale
import os
import queue
import resource
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from runner.launch import messages
from runner.launch.orders import GroupOrders

GREETING = 10.0
"""Seconds that the two ends of a connection may take to know each other."""
_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MOST = 512 if _FILES == resource.RLIM_INFINITY else min(512, _FILES // 4)
"""Callers that may be unknown at one time, each of which holds an open file; the others wait in the system's queue."""
HASTE, PAUSE = 2.0, 0.02
"""Seconds that a caller may take to say who it is where many are unknown, and between two looks where all may be."""
FLUSH = 2.0  # seconds for the last output of rank 0 to reach the console
TASK_FILE, SECRET_FILE, PAYLOAD_FILE, STORE_FILE = "line.json", "secret", "payload.pickle", "store"


@dataclass(frozen=True)
class Task:
    """What every rank of a run reads; plain data, in the run's folder for ranks.

    Attributes:
        group: what the ranks share.
        address, port: where the command listens.
        launcher: which one starts the ranks.
        seats: per rank the name of its host, its local rank, the number of ranks there, and the number of its device;
            empty if only the launcher knows.
    """

    group: GroupOrders
    address: str
    port: int
    launcher: str
    seats: tuple[tuple[str, int, int, int], ...] = ()

    def write(self, folder: Path) -> None:
        """Write it into `folder`."""
        (folder / TASK_FILE).write_bytes(TypeAdapter(Task).dump_json(self))

    @classmethod
    def read(cls, folder: Path) -> Task:
        """Raises OSError or ValueError if there is none in `folder`."""
        return TypeAdapter(Task).validate_json((folder / TASK_FILE).read_bytes())


@dataclass(frozen=True)
class Hello:
    """The first message of a rank.

    Attributes:
        rank: the calling rank; it connects a second time, with `console`, for its console output.
        host, address: where it runs.
        store: where rank 0 listens for the others; None of other ranks.
    """

    rank: int
    host: str
    address: str
    console: bool = False
    store: tuple[str, int] | None = None

    @classmethod
    def read(cls, fields: Any) -> Hello:
        """Raises OSError if `fields` is not a valid one."""
        try:
            return TypeAdapter(Hello).validate_python(fields)
        except ValueError as error:
            raise OSError("what arrived is no greeting") from error


def new_secret(folder: Path) -> bytes:
    """A fresh secret, which only the owner of `folder` can read there."""
    secret = secrets.token_bytes(32)
    file = folder / SECRET_FILE
    file.touch(mode=0o600)
    file.write_bytes(secret)
    return secret


def call(address: str, port: int, secret: bytes, silence: float) -> Connection:
    """Connect to the command. Raises OSError without an answer, AuthenticationError if the other end is not the
    command."""
    plain = socket.create_connection((address, port), timeout=max(GREETING, silence))
    plain.settimeout(None)
    connection = _opened(plain, silence)
    _may_wait(connection, messages.SILENCE)  # others may be before this one
    answer_challenge(connection, secret)
    deliver_challenge(connection, secret)
    _may_wait(connection, 0.0)
    return connection


def answer(plain: socket.socket, secret: bytes, silence: float, patience: float) -> Connection:
    """The connection of a caller who knows the secret; each of its words may take `patience` seconds.
    Raises OSError, EOFError or AuthenticationError."""
    connection = _opened(plain, silence)
    try:
        _may_wait(connection, patience)
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
    except BaseException:
        connection.close()
        raise
    return connection


def _opened(plain: socket.socket, silence: float) -> Connection:
    """The connection of a socket, which fails after `silence` seconds without a sign of life from the other end."""
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # a first probe after half of the time, three more in the other half
    first, between = max(1, int(silence / 2)), max(1, int(silence / 6))
    limits = {"KEEPIDLE": first, "KEEPINTVL": between, "KEEPCNT": 3, "USER_TIMEOUT": int(silence * 1000)}
    for name, value in limits.items():
        if hasattr(socket, f"TCP_{name}"):
            plain.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
    return Connection(plain.detach())


def _may_wait(connection: Connection, seconds: float) -> None:
    """Set the receive timeout of the connection; 0 disables it."""
    with socket.socket(fileno=connection.fileno()) as plain:
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
        plain.detach()


def own_address(connection: Connection) -> str:
    """The address of this end of a connection."""
    with socket.socket(fileno=connection.fileno()) as plain:
        address = str(plain.getsockname()[0])
        plain.detach()
    return address


class Acceptor:
    """Takes calls at `listener` until it is closed. `arrived` yields the ranks that have called since; they begin as
    soon as `ranks` have called, rank 0 among them."""

    def __init__(self, listener: socket.socket, secret: bytes, silence: float, ranks: int = 0) -> None:
        self.listener, self._absent = listener, ranks
        self._secret, self._silence = secret, silence
        self._arrived: queue.SimpleQueue[tuple[Hello, Connection]] = queue.SimpleQueue()
        self._consoles: list[threading.Thread] = []
        self._store: tuple[str, int] | None = None
        self._waiting: list[Connection] = []
        self._unknown = 0
        """Callers who have not said yet who they are."""
        self._counting = threading.Lock()

    def take(self) -> None:
        """Answer one call, in the background; call it when `listener` is readable."""
        if self._unknown >= MOST:
            time.sleep(PAUSE)
            return
        try:
            plain, _ = self.listener.accept()
        except OSError:  # too many open files, or the caller has disconnected
            time.sleep(PAUSE)
            return
        with self._counting:
            self._unknown += 1
            patience = GREETING if self._unknown < MOST / 4 else HASTE
        threading.Thread(target=self._answer, args=(plain, patience), daemon=True).start()

    def arrived(self) -> Iterator[tuple[Hello, Connection]]:
        """Ranks that have called, with their lines. As soon as all have, they receive the address of rank 0's store,
        where each waits for the others: until then one that imports slowly is late for nobody."""
        while not self._arrived.empty():
            hello, connection = self._arrived.get()
            if hello.store is not None:
                self._store = hello.store
            self._waiting.append(connection)
            self._absent -= 1
            yield hello, connection
        if self._store is not None and self._absent <= 0:
            for connection in self._waiting:
                with suppress(OSError):  # the reader of the connection detects that it is broken
                    messages.send(connection, self._store)
            self._waiting.clear()

    def close(self) -> None:
        """Accept no more connections, and flush the console output."""
        self.listener.close()
        for thread in self._consoles:
            thread.join(FLUSH)

    def _answer(self, plain: socket.socket, patience: float) -> None:
        """Learn who calls; each word may take `patience` seconds."""
        connection: Connection | None = None
        try:
            connection = answer(plain, self._secret, self._silence, patience)
            hello = Hello.read(messages.receive(connection))
            _may_wait(connection, 0.0)
        except (OSError, EOFError, AuthenticationError):
            if connection is not None:
                connection.close()
            return  # a stranger, or a rank that has ended: the launcher reports that
        finally:
            with self._counting:
                self._unknown -= 1
        if hello.console:
            self._consoles.append(threading.current_thread())
            _show(connection)
        else:
            self._arrived.put((hello, connection))


def _show(connection: Connection) -> None:
    """Copy rank 0's console output to this command's stdout until it has ended."""
    encoding = locale.getpreferredencoding(False)  # in which `logs.attach` writes
    with (
        connection,
        open(os.dup(connection.fileno()), encoding=encoding, errors="replace") as lines,
        suppress(OSError),
    ):
        for line in lines:  # until the rank has ended, or the console is closed
            sys.stdout.write(line)
            sys.stdout.flush()
