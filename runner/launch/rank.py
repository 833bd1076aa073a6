"""The first thing that runs in a rank: it ties the process to its parent before anything can go wrong.

In this order: an own process group, signals, the watch on the parent, the log; then torch and the work. Invariant:
from the first line on, a rank whose parent has gone ends within moments, together with every process that it
started, and a rank that fails reports it through its connection before its peers can notice.
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
from multiprocessing.connection import Connection

from runner.launch import leaving, logs, messages, stopping
from runner.launch.failure import Done, Reported, from_exception
from runner.launch.liveness import forks_of
from runner.launch.messages import RESCUE, STOP, WHERE
from runner.launch.orders import Orders, log_of


def enter(orders: Orders) -> None:
    """Execute `orders` in this process, report the outcome, and in case of failure end the process at once."""
    try:
        # What this rank starts can be ended with it, and Ctrl-C reaches the parent alone.
        if os.getpgrp() != os.getpid():  # a launcher may have done it
            os.setpgrp()
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=_end_with_parent, args=(orders.connection,), daemon=True).start()
        logs.attach(log_of(orders.group.run_dir, orders.rank), orders.console.number if orders.console else None)
        faulthandler.enable(all_threads=False)
        faulthandler.register(signal.SIGUSR1, all_threads=False)  # the parent asks where a rank hangs
        os.environ.clear()
        os.environ.update(orders.environment)
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # the user's own modules, after everything that is installed

        from runner.launch.worker import work  # torch; here, so that failing to import it is reported too

        value = work(orders)
        packed = None
        if orders.rank == 0:
            packed = json.dumps(value).encode() if orders.plain else pickle.dumps(value)
        done = Done(packed)
    except BaseException as error:
        with suppress(OSError):  # the log may be on a disk that is full, which the parent must learn
            if not isinstance(error, Reported):  # whose process has printed its own
                traceback.print_exc()
        _flush()
        messages.report(orders.connection, from_exception(orders.rank, error))
        # Without the usual exit handlers: they could wait for ranks that will not answer.
        os._exit(1)
    _flush()
    messages.report(orders.connection, done)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()


def _end_with_parent(connection: Connection) -> None:
    try:
        while order := messages.receive(connection):
            if order == STOP:
                stopping.request()
            elif order == RESCUE:
                leaving.leave()
                _flush()
                os._exit(1)
            elif order == WHERE:
                for process in (os.getpid(), *forks_of(os.getpid())):
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGUSR1)
    except (EOFError, OSError):  # the parent's end is closed
        os.killpg(0, signal.SIGKILL)
