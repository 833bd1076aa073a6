"""The connection between a command and its ranks: which callers are accepted, and that a lost one is detected."""

from __future__ import annotations

import pickle
import resource
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing import AuthenticationError
from multiprocessing.connection import Pipe, wait
from pathlib import Path

import pytest

from runner.errors import ConfigError
from runner.launch import messages, network
from runner.launch.failure import CauseOrder, Done, Failure
from runner.launch.launchers.connection import GREETING, Acceptor, Hello, Task, call, new_secret, own_address
from runner.launch.orders import GroupOrders
from tests.ranks import start_ranks

SECRET = b"s" * 32


@pytest.fixture
def acceptor() -> Iterator[Acceptor]:
    with network.listener(network.LOOPBACK) as listener:
        made = Acceptor(listener, SECRET, 5.0)
        yield made
        made.close()


def answering(acceptor: Acceptor, seconds: float = 3.0) -> list[tuple[Hello, object]]:
    """The ranks that have connected: waits some seconds, or until the first one does."""
    found: list[tuple[Hello, object]] = []
    until = time.monotonic() + seconds
    while not found and time.monotonic() < until:
        if wait([acceptor.listener], 0.02):
            acceptor.take()
        found += acceptor.arrived()
    return found


def calling(
    acceptor: Acceptor, hello: Hello, secret: bytes = SECRET, seconds: float = 5.0
) -> tuple[threading.Thread, list[object]]:
    """A rank that connects, in a background thread. Returns the thread and a list for its message or its error."""
    received: list[object] = []

    def rank() -> None:
        try:
            connection = call(network.LOOPBACK, acceptor.listener.getsockname()[1], secret, seconds)
            assert own_address(connection) == network.LOOPBACK
            messages.send(connection, asdict(hello))
            received.append(messages.receive(connection))
        except (OSError, EOFError, AuthenticationError) as error:
            received.append(type(error))

    thread = threading.Thread(target=rank)
    thread.start()
    return thread, received


def test_ranks_receive_the_address_of_the_store(acceptor: Acceptor) -> None:
    second, received_by_second = calling(acceptor, Hello(1, "b", "10.0.0.2"))
    assert [hello.rank for hello, _ in answering(acceptor)] == [1]
    assert received_by_second == []
    first, received_by_first = calling(acceptor, Hello(0, "a", "10.0.0.1", store=("10.0.0.1", 77)))
    assert [hello.rank for hello, _ in answering(acceptor)] == [0]
    first.join(3)
    second.join(3)
    assert received_by_first == received_by_second == [["10.0.0.1", 77]]


def test_the_store_waits_until_all_have_called() -> None:
    """Its timeout is launch.timeout, and a process that is started anew imports first."""
    with network.listener(network.LOOPBACK) as listener:
        acceptor = Acceptor(listener, SECRET, 5.0, ranks=2)
        first, received_by_first = calling(acceptor, Hello(0, "a", "10.0.0.1", store=("10.0.0.1", 77)))
        assert [hello.rank for hello, _ in answering(acceptor)] == [0]
        first.join(0.2)
        assert received_by_first == []
        second, received_by_second = calling(acceptor, Hello(1, "b", "10.0.0.2"))
        assert [hello.rank for hello, _ in answering(acceptor)] == [1]
        first.join(3)
        second.join(3)
        assert received_by_first == received_by_second == [["10.0.0.1", 77]]
        acceptor.close()


def test_strangers_are_not_heard(acceptor: Acceptor) -> None:
    thread, received = calling(acceptor, Hello(0, "a", "a", store=("a", 1)), secret=b"another")
    assert answering(acceptor, 1.0) == []
    thread.join(3)
    assert received in ([AuthenticationError], [EOFError], [ConnectionResetError])


def test_a_silent_stranger_holds_nobody_up(acceptor: Acceptor) -> None:
    with socket.create_connection(acceptor.listener.getsockname()):
        began = time.monotonic()
        assert answering(acceptor, 0.3) == []
        assert time.monotonic() - began < GREETING / 2
        thread, _ = calling(acceptor, Hello(0, "a", "a", store=("a", 1)))
        assert [hello.rank for hello, _ in answering(acceptor)] == [0]
        thread.join(3)


def test_the_console(acceptor: Acceptor, capsys: pytest.CaptureFixture[str]) -> None:
    def rank() -> None:
        connection = call(network.LOOPBACK, acceptor.listener.getsockname()[1], SECRET, 5.0)
        messages.send(connection, asdict(Hello(0, "a", "a", console=True)))
        with open(connection.fileno(), "w", closefd=False, encoding="utf-8") as console:
            console.write("step 1\nstep 2\n")
        connection.close()

    thread = threading.Thread(target=rank)
    thread.start()
    assert answering(acceptor, 1.0) == []  # a console is not a rank
    thread.join(3)
    acceptor.close()
    assert capsys.readouterr().out == "step 1\nstep 2\n"


def test_tasks_and_secrets_are_files(tmp_path: Path) -> None:
    group = GroupOrders("a:b", 2, Path("/run"), "cpu", 6.0, 1)
    task = Task(group, "10.0.0.1", 7, "mpirun", (("a", 0, 1, 0), ("b", 0, 1, 0)))
    task.write(tmp_path)
    assert Task.read(tmp_path) == task
    secret = new_secret(tmp_path)
    assert len(secret) == 32 and secret == (tmp_path / "secret").read_bytes() != new_secret(tmp_path)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert (messages.silence_of(6.0), messages.silence_of(600.0)) == (6.0, 60.0)


def test_addresses() -> None:
    assert network.resolve("127.0.0.1") == "127.0.0.1" and network.resolve("localhost") in ("127.0.0.1", "::1")
    assert network.is_here("127.0.0.1") and not network.is_here("192.0.2.1")  # an address of no machine
    assert network.is_loopback("127.0.0.9") and network.is_loopback("::1") and not network.is_loopback("10.0.0.1")
    assert network.towards("127.0.0.1") == "127.0.0.1"
    assert network.interface_of("127.0.0.1") == "lo" and network.interface_of("192.0.2.1") is None
    assert network.variables("127.0.0.1") == {"GLOO_SOCKET_IFNAME": "lo"}
    with network.listener("127.0.0.1") as taken:
        address = taken.getsockname()
        assert address[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match=r"another process listens at 127\.0\.0\.1"):
            network.listener(*address)
    with pytest.raises(ConfigError, match=r"the host 'no\.such\.host\.invalid' cannot be found"):
        network.resolve("no.such.host.invalid")


@pytest.mark.slow
def test_a_crowd_of_silent_strangers_keeps_nobody_out(acceptor: Acceptor) -> None:
    """More connections than this process may open files; each is served only briefly."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    crowd = 600
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard == -1 else min(hard, 4096), hard))
    strangers = [socket.create_connection(acceptor.listener.getsockname()) for _ in range(crowd)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (crowd + 200, hard))  # too few descriptors to accept all connections
    try:
        thread, received = calling(acceptor, Hello(0, "a", "a", store=("a", 1)), seconds=60.0)
        assert [hello.rank for hello, _ in answering(acceptor, 60.0)] == [0]
        thread.join(60)
        assert received == [["a", 1]]
    finally:
        for stranger in strangers:
            stranger.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Evil:
    """Records that it was unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def test_nothing_that_arrives_is_unpickled(acceptor: Acceptor, tmp_path: Path) -> None:
    near, far = Pipe()
    for content in (pickle.dumps(Evil(tmp_path / "ran")), b"[" * 100_000, b'{"kind": "Failure"}', b"[]\nx", b""):
        far.send_bytes(content)
        with pytest.raises(OSError, match="what arrived is no"):
            messages.reported(near)
    far.send(Evil(tmp_path / "ran"))
    with pytest.raises(OSError, match="what arrived is no message"):
        messages.receive(near)
    for greeting in (["rank"], {"rank": "no", "host": "a", "address": "a"}, {"rank": 0}, None):
        with pytest.raises(OSError, match="no greeting"):
            Hello.read(greeting)
    failed = Failure(3, 1.5, CauseOrder.TIMEOUT, "failed", "here", None, "text")
    for outcome in (failed, Done(b"\n{}"), Done(None)):
        messages.report(far, outcome)
        assert messages.reported(near) == outcome
    assert not (tmp_path / "ran").exists()


def test_no_port_is_open_where_all_ranks_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rendezvous keeps its keys in an unnamed file; only gloo's own ports remain."""
    monkeypatch.setattr(network, "listener", None)  # it would be called
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    described = start_ranks("rank_entries:describe", 1, 2, tmp_path, timeout=30.0)
    assert described["total"] == 1 and described["store"] == "FileStore"
    assert {path.name for path in tmp_path.iterdir()} == {"ranks"}
