"""Messages between a rank and its command: a line of JSON, followed by the bytes of a result.

Ranks may be behind a network. Invariant: no received data is unpickled here, and a malformed message raises OSError, as
a broken connection does.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

from runner.launch.failure import CauseOrder, Done, Failure

STOP = "stop"
"""What a parent sends to ranks that shall stop after the step at hand."""
RESCUE = "rescue"
"""What a parent sends to ranks that shall save their memory and end, because another one is down."""
WHERE = "where"
"""What a command sends to ranks of any host that shall write their stack into their log."""
LONGEST = 1 << 24
"""Bytes of a message without a result."""
SILENCE = 60.0


def silence_of(timeout: float) -> float:
    """Seconds of silence allowed on a connection to a host if collectives may take `timeout`."""
    return min(timeout, SILENCE)


def send(connection: Connection, value: Any) -> None:
    """Send a plain value. Raises OSError where the line is broken."""
    connection.send_bytes(json.dumps(value).encode())


def receive(connection: Connection) -> Any:
    """The next plain value. Raises EOFError when the other end is closed, OSError if the message is malformed."""
    return _read(connection.recv_bytes(LONGEST))


def _read(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise OSError("what arrived is no message") from error


def report(connection: Connection, outcome: Done | Failure) -> None:
    """Send the outcome of a rank."""
    fields = asdict(outcome)
    value = fields.pop("value", None)
    head = json.dumps({"kind": type(outcome).__name__, "valued": value is not None, **fields})
    connection.send_bytes(head.encode() + b"\n" + (value or b""))


def reported(connection: Connection) -> Done | Failure:
    """What `report` has sent. Raises EOFError and OSError as `receive`."""
    head, _, value = connection.recv_bytes().partition(b"\n")
    fields = _read(head)
    try:
        kind, valued = fields.pop("kind"), fields.pop("valued")
        if kind == Done.__name__:
            return Done(value if valued else None)
        return Failure(**fields | {"order": CauseOrder(fields["order"])})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise OSError("what arrived is no report") from error
