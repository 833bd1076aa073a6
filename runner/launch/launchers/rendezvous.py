"""The end of the line at the command that started a run: it takes the ranks' calls and tells them where to meet.

Calls are answered beside everything else, so that a stranger who says nothing holds nobody up. Invariant: a rank gets
one seat; whoever does not know the secret is not heard.
"""

from __future__ import annotations

import locale
import os
import queue
import resource
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

from runner.launch import messages
from runner.launch.launchers.connection import GREETING, Hello, answer

_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MOST = 512 if _FILES == resource.RLIM_INFINITY else min(512, _FILES // 4)
"""Callers that may be unknown at one time, each of which holds an open file; the others wait in the system's queue."""
HASTE, PAUSE = 2.0, 0.02
"""Seconds that a caller may take to say who it is where many are unknown, and between two looks where all may be."""
FLUSH = 2.0  # seconds for the last words of rank 0 to reach the console


class Front:
    """Takes calls at `listener` until it is closed. `arrived` yields the ranks that have called since."""

    def __init__(self, listener: socket.socket, secret: bytes, silence: float) -> None:
        self.listener = listener
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
        except OSError:  # no more open files, or the caller has gone
            time.sleep(PAUSE)
            return
        with self._counting:
            self._unknown += 1
            patience = GREETING if self._unknown < MOST / 4 else HASTE
        threading.Thread(target=self._answer, args=(plain, patience), daemon=True).start()

    def arrived(self) -> Iterator[tuple[Hello, Connection]]:
        """Ranks that have called, with their lines. As soon as rank 0 has, all of them are told where its store is."""
        while not self._arrived.empty():
            hello, connection = self._arrived.get()
            if hello.store is not None:
                self._store = hello.store
            self._waiting.append(connection)
            yield hello, connection
        if self._store is not None:
            for connection in self._waiting:
                with suppress(OSError):  # whoever watches the line learns that it is broken
                    messages.send(connection, self._store)
            self._waiting.clear()

    def close(self) -> None:
        """Take no more calls, and let what has been said on the console be seen."""
        self.listener.close()
        for thread in self._consoles:
            thread.join(FLUSH)

    def _answer(self, plain: socket.socket, patience: float) -> None:
        try:
            connection, hello = answer(plain, self._secret, self._silence, patience)
        except (OSError, EOFError, AuthenticationError):
            return  # a stranger, or a rank that has ended: the launcher tells of that
        finally:
            with self._counting:
                self._unknown -= 1
        if hello.console:
            self._consoles.append(threading.current_thread())
            _show(connection)
        else:
            self._arrived.put((hello, connection))


def _show(connection: Connection) -> None:
    """Copy what rank 0 shows to this command's stdout, until it has ended."""
    encoding = locale.getpreferredencoding(False)  # in which `logs.attach` writes
    with (
        connection,
        open(os.dup(connection.fileno()), encoding=encoding, errors="replace") as lines,
        suppress(OSError),
    ):
        for line in lines:  # until the rank has ended, or nobody looks at the console any more
            sys.stdout.write(line)
            sys.stdout.flush()
