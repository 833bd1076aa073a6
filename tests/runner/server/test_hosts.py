"""Parameter servers on several hosts, which are addresses of this machine: equal to one, whichever is lost."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from composing import compose_config
from small import SMALL

from runner import checkpoint as checkpoints
from runner.launch.launchers.warm_hosts import HostProcess
from runner.server.fleet import Fleet

HERE = Path(__file__).parent
SERVED = (*SMALL, "parallel=parameter_server", "world_size=5", "train.log_every=1", "launch.timeout=20")
ADAM = "optimizer={target: torch.optim.AdamW, args: {lr: 0.05}}"
HOSTS = ("launch=rank_table", "launch.hosts=[127.0.0.1:3,127.0.0.2:2]")
TWO = ("parallel.server.servers=2", "parallel.server.replicas=1")
SLOW = ("data.target=slow_rows.Slow", "train.steps=150")


@pytest.fixture(autouse=True)
def visible(monkeypatch):
    paths = [os.environ["PYTHONPATH"], str(HERE), str(HERE.parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.syspath_prepend(str(HERE))


def stored(run):
    """Checksums of the tensors of the last checkpoint."""
    files = checkpoints.read(checkpoints.newest(run.folder / "checkpoints")).header.files
    return {name: stamp for name, stamp in files.items() if name.endswith("safetensors")}


@pytest.mark.parametrize(
    ("servers", "hosts", "expected"),
    [
        (2, "127.0.0.1:5", (1, 2)),
        (2, "127.0.0.1:3,127.0.0.2:2", (1, 3)),
        (3, "127.0.0.1:3,127.0.0.2:2", (1, 3, 2)),
        (2, "127.0.0.1:1,127.0.0.2:4", (1, 2)),
    ],
)
def test_servers_are_on_all_hosts(servers, hosts, expected):
    words = ("launch=rank_table", f"launch.hosts=[{hosts}]", f"parallel.server.servers={servers}")
    assert compose_config(*SERVED, *words).server_ranks == expected


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("aab", [[0, 2], [1, 2], [2, 0]]),
        ("aaa", [[0, 1], [1, 0], [2, 0]]),
        ("abab", [[0, 1], [1, 0], [2, 3], [3, 2]]),
    ],
)
def test_a_replica_is_on_another_host(hosts, expected):
    fleet = object.__new__(Fleet)
    fleet._replicas, fleet._holders = 1, [[number] for number in range(len(hosts))]
    fleet._servers = fleet._addresses = dict.fromkeys(range(len(hosts)))
    fleet._places = {number: (name, None) for number, name in enumerate(hosts)}
    fleet.request = lambda *given, **named: ({"alone": False}, [])
    fleet._replicate()
    assert fleet._holders == expected


def test_a_replica_moves_when_a_host_comes(monkeypatch):
    fleet = object.__new__(Fleet)
    fleet._replicas, fleet._holders = 1, [[0, 1], [1, 0]]
    fleet._servers = fleet._addresses = dict.fromkeys(range(3))
    fleet._places = {0: ("a", None), 1: ("a", None), 2: ("b", None)}
    fleet.request = lambda *given, **named: ({"alone": False}, [])
    fleet._replicate()
    assert fleet._holders == [[0, 2], [1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("parallel.server.parameters=[inner.*]",)], ids=["served", "kept"])
def test_two_hosts_equal_one(start, words):
    alone = start(*SERVED, ADAM, "parallel.server.servers=2", *words, folder="alone")
    hosts = start(*SERVED, ADAM, *TWO, *HOSTS, *words, folder="hosts")
    assert hosts.losses == alone.losses and stored(hosts) == stored(alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "lost"),
    [
        pytest.param(("data.batch_size=24",), {"workers_lost": 2}, id="workers"),
        pytest.param(TWO, {"workers_lost": 1, "servers_lost": 1}, id="server and worker"),
    ],
)
def test_a_host_is_lost_and_comes_back(start, monkeypatch, capfd, words, lost):
    """All of its processes are killed; the run starts it again, and its servers and workers join."""
    made, plain = [], HostProcess.__init__

    def begin(self, *given):
        made.append(self)
        plain(self, *given)

    monkeypatch.setattr(HostProcess, "__init__", begin)
    alone = start(*SERVED, ADAM, *SLOW, *words, folder="alone")
    metrics = alone.folder.parent / "hit" / "metrics.jsonl"

    def lose():
        while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 10:
            time.sleep(0.05)
        os.killpg(made[1].pid, signal.SIGKILL)

    threading.Thread(target=lose, daemon=True).start()
    hit = start(*SERVED, ADAM, *SLOW, *words, *HOSTS, folder="hit")
    counts = [record["server"] for record in hit.records if "server" in record]
    assert {key: sum(one.get(key, 0) for one in counts) for key in lost} == lost
    joined = {key.replace("lost", "joined"): count for key, count in lost.items()}
    later = counts[5:]
    assert {key: sum(one.get(key, 0) for one in later) for key in joined} == joined
    assert hit.losses == alone.losses and stored(hit) == stored(alone)
    assert "on 127.0.0.2" in capfd.readouterr().out and not (hit.folder / "restarts.jsonl").exists()
