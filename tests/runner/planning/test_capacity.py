"""A run that is too large for this machine is refused before anything starts, in one paragraph."""

from __future__ import annotations

import time
from array import array

import pytest
from composing import compose_config
from small import MODES, SMALL

from runner.errors import ConfigError
from runner.launch.startup import EVERY, MANY, Starting
from runner.planning import capacity as machine
from runner.planning.joint import prepare_decided
from strategies.runtime.flight_recorder import CELLS, STARTED

LARGE = ("+recipe=llama_8b", "data.batch_size=8")
GB = 10**9


@pytest.fixture
def room(monkeypatch):
    """`room(memory=..., threads=..., files=..., own=...)` sets the machine's resources; None: unlimited."""

    def put(memory=None, threads=None, files=None, own=None):
        monkeypatch.setattr(machine, "memory_at_hand", lambda: memory)
        monkeypatch.setattr(machine, "threads_at_hand", lambda: threads)
        monkeypatch.setattr(machine, "open_files", lambda: files)
        monkeypatch.setattr(machine, "own_processes", lambda: own)

    return put


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("given", "words", "said"),
    [
        ({"memory": 24 * GB}, ("+recipe=ffn_auto", "world_size=1000"), ("world_size = 1000", "40 GB", "24 GB")),
        ({"threads": 500}, ("+recipe=ffn_auto", "world_size=96"), ("world_size = 96", "threads", "500")),
        ({"own": 500}, ("+recipe=ffn_auto", "world_size=96"), ("ulimit -u",)),
        ({"files": 256}, ("+recipe=ffn_auto", "world_size=256"), ("ulimit -n",)),
        ({"memory": 24 * GB}, LARGE, ("8,030,261,248", "16.2 GB", "8 ranks", "one process that verify", "24 GB")),
        ({"memory": 24 * GB}, (*LARGE, "parallel.zero.stage=0"), ("8 ranks at least 1,029 GB",)),
        ({"memory": 24 * GB}, (*LARGE, "parallel=auto", "parallel.zero.stage=auto"), ("8 ranks at least 129 GB",)),
        ({"memory": 200 * 10**6}, (*SMALL, *MODES["semi_auto"], "model.args.hidden=200000"), ("peak of a step",)),
    ],
    ids=["memory of ranks", "threads", "a user's", "connections", "model", "replicas", "open", "plan"],
)
def test_too_large(command, left, room, given, words, said):
    room(**given)
    done = command("verify", *words, "train.precision=bf16" if words[0] == LARGE[0] else "train.precision=fp32")
    assert done.code == 2 and len(done.paragraphs) == 1, done.err
    assert all(part in done.err for part in (*said, "launch.check_memory=false")), done.err
    assert not [path for path in left() if path.suffix]


def test_what_fits_is_not_refused(room):
    room(memory=4 * 45 * 10**6, threads=24, files=64, own=24)
    assert prepare_decided(compose_config(*SMALL, *MODES["semi_auto"]), None).world_size == 4


@pytest.mark.parametrize("words", [("launch.check_memory=false",), ("launch=torchrun",), ("job=plan",)])
def test_only_what_starts_here_is_checked(room, words):
    room(memory=10**6, threads=1, files=1, own=1)
    assert prepare_decided(compose_config(*SMALL, *MODES["semi_auto"], *words), None).world_size == 4


def test_a_plan_needs_no_memory(room):
    room(memory=10**6)
    with pytest.raises(ConfigError, match="too large for this machine"):
        prepare_decided(compose_config(*SMALL, *MODES["semi_auto"]), None)
    assert prepare_decided(compose_config(*SMALL, *MODES["semi_auto"], "job=explain"), None).world_size == 4


def test_a_slow_start_is_reported(tmp_path, monkeypatch, capsys):
    files = [tmp_path / str(rank) for rank in range(MANY + 1)]
    starting, started = Starting(files), time.monotonic()
    cells = array("q", bytes(8 * CELLS))
    files[1].write_bytes(cells.tobytes())
    starting.look()
    assert not capsys.readouterr().out
    monkeypatch.setattr(time, "monotonic", lambda: started + EVERY + 1)
    starting.look()
    starting.look()
    assert capsys.readouterr().out.startswith("starting: 1 of 17 ranks run")
    cells[STARTED] = 1
    files[2].write_bytes(cells.tobytes())
    monkeypatch.setattr(time, "monotonic", lambda: started + 3 * EVERY)
    starting.look()
    assert not capsys.readouterr().out
