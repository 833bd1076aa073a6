"""Hang diagnosis: which rank blocks which, from the flight recorders of simulated and of real ranks."""

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from observed import ranks_of_this_process
from small import MODES, SMALL

from runner.errors import RunFailed
from runner.launch import hangs
from runner.launch.hangs import GRACE, Stall, diagnose, read_state
from strategies.runtime.flight_recorder import GATHER, PLACE, RECEIVE, SEND, SUM, FlightRecorder
from tests.ranks import start_ranks

WORLD = 4


@pytest.fixture
def ranks(tmp_path):
    """The flight recorders of four ranks in a mesh (dp 2, tp 2), with the groups world, tp and dp."""
    found = []
    for rank in range(WORLD):
        one = FlightRecorder()
        one.attach(tmp_path / f"{rank}.where")
        row, column = rank // 2 * 2, rank % 2
        one.know("world", range(WORLD), "dp, tp")
        one.know("tp", [row, row + 1], "tp")
        one.know("dp", [column, column + 2], "dp")
        found.append(one)
    return found


@pytest.fixture
def diagnosed(tmp_path):
    files = [tmp_path / f"{rank}.where" for rank in range(WORLD)]
    return lambda timeout=5.0, halted=(): diagnose([read_state(file) for file in files], timeout, halted)


def join(rank, group, kind=SUM, text=None):
    """The rank enters a collective of the operator `text`."""
    rank.cells[PLACE] = 0 if text is None else rank.place(text)
    rank.enter(group, kind)


def test_nobody_waits(ranks, diagnosed):
    for rank in ranks:
        join(rank, "world")
        rank.leave()
    assert diagnosed() is None


def test_ranks_that_never_joined(ranks, diagnosed):
    for rank in ranks:
        join(rank, "world")
        rank.leave()
    for number in (0, 3):
        join(ranks[number], "world", GATHER, "mlp.down")
        ranks[number].explain({"mlp.down": "mlp.down (linear, llama.py:88)", "never called": "elsewhere"})
    found = diagnosed()
    assert found.hung == (1, 2)
    assert found.text == (
        "ranks 1, 2 of 4 never joined all_gather #2 over (dp, tp) of operator mlp.down (linear, llama.py:88), in which "
        "ranks 0, 3 waited 5 s"
    )


def test_the_one_who_keeps_all_waiting_is_found_behind_the_others(ranks, diagnosed):
    join(ranks[0], "tp")  # waits for 1, which waits for 3, which is in no call
    join(ranks[1], "dp", text="the loss")
    found = diagnosed()
    assert found.hung == (3,)
    assert found.text == "rank 3 of 4 never joined all_reduce #1 over (dp) of the loss, in which rank 1 waited 5 s"


def test_ranks_that_wait_for_each_other(ranks, diagnosed):
    join(ranks[0], "tp", SUM, "first")
    join(ranks[1], "world", GATHER, "second")
    join(ranks[2], "world", GATHER, "second")
    join(ranks[3], "world", GATHER, "second")
    found = diagnosed()
    assert found.hung == ()
    assert found.text == (
        "ranks 0, 1 wait for each other: rank 0 in all_reduce #1 over (tp) of first, "
        "rank 1 in all_gather #1 over (dp, tp) of second"
    )


def test_one_who_came_to_a_halt_inside_of_a_call_that_all_had_joined(ranks, diagnosed):
    join(ranks[0], "tp")
    ranks[0].leave()
    join(ranks[1], "tp")
    join(ranks[0], "tp")
    assert diagnosed().text.startswith("rank 1 of 4 never joined all_reduce #2 over (tp), in which rank 0 waited")


def test_one_who_halted_in_a_call_that_all_have_joined(ranks, diagnosed):
    """Only its missing heartbeat distinguishes it from the rank that waits for it."""
    join(ranks[0], "tp", GATHER, "weight")
    join(ranks[1], "tp", GATHER, "weight")
    join(ranks[2], "world", SUM, "the loss")
    join(ranks[3], "world", SUM, "the loss")
    assert diagnosed().hung == (0, 1)
    found = diagnosed(halted=[1])
    assert found.hung == (1,)
    assert found.text == "rank 1 of 4 came to a halt in all_gather #1 over (tp) of weight, in which rank 0 waited 5 s"


def test_one_who_halted_in_a_call_of_all(ranks, diagnosed):
    for rank in ranks:
        join(rank, "world")
    assert diagnosed() is None
    assert diagnosed(halted=[2]).text == (
        "rank 2 of 4 came to a halt in all_reduce #1 over (dp, tp), in which ranks 0, 1, 3 waited 5 s"
    )


def test_ranks_that_make_different_calls(ranks, diagnosed):
    join(ranks[0], "tp", SUM, "first")
    join(ranks[1], "tp", GATHER, "second")
    assert diagnosed().text == (
        "ranks 0, 1 disagree: rank 0 in all_reduce #1 over (tp) of first, rank 1 in all_gather #1 over (tp) of second"
    )


def test_one_who_receives_waits_for_one_who_has_not_sent(ranks, diagnosed):
    join(ranks[0], "tp", SEND)
    join(ranks[1], "tp", RECEIVE)
    assert diagnosed() is None  # in transfer
    ranks[0].leave()
    ranks[1].leave()
    join(ranks[1], "tp", RECEIVE)
    assert diagnosed().hung == (0,)


def test_one_that_is_behind_where_nobody_is_seen_to_wait(ranks, diagnosed):
    """As on a GPU, where calls return before they complete."""
    for number, rank in enumerate(ranks):
        for _ in range(3 - (number == 2)):
            join(rank, "world")
            rank.leave()
    assert diagnosed(8.0).hung == (2,)
    assert diagnosed(8.0).text == (
        "rank 2 of 4 never joined call #3 over (dp, tp), which ranks 0, 1, 3 made; nothing has moved on for 8 s"
    )


def test_a_wait_for_an_earlier_call(ranks, diagnosed):
    """Rank 0 waits for its first call although it has started a second one; rank 1 has started none."""
    for _ in range(2):
        join(ranks[0], "tp")
        ranks[0].leave()
    ranks[0].again("tp", SUM, 1)
    assert diagnosed().text.startswith("rank 1 of 4 never joined all_reduce #1 over (tp)")


def test_groups_of_the_same_ranks_are_distinguished(ranks, diagnosed):
    for rank in ranks[:2]:
        rank.know("tp, again", [0, 1], "tp")
    join(ranks[0], "tp")
    join(ranks[1], "tp, again")
    assert diagnosed().text.startswith("ranks 0, 1 wait for each other")


def test_a_stall_is_noticed(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(hangs, "QUIET", 0.0)
    files = [tmp_path / f"{rank}.where" for rank in range(WORLD)]
    stall = Stall(files, timeout=-GRACE + 0.2)
    assert not stall.detected()
    time.sleep(0.3)
    assert not stall.detected()  # before the second step a rank may compile for a long time
    for rank in ranks:
        rank.begin(1)
        rank.begin(2)
    assert not stall.detected()
    time.sleep(0.3)
    assert stall.detected()
    ranks[2].begin(3)
    assert not stall.detected()  # one rank that makes progress is enough
    join(ranks[1], "tp")
    assert not stall.detected()
    time.sleep(0.3)
    for rank in (0, 2, 3):
        ranks[rank].begin(4)
    assert stall.detected()  # unless one waits in a collective


def test_every_byte_is_read_by_others(tmp_path):
    one = FlightRecorder()
    one.know("before", [0, 2], "x")
    one.attach(tmp_path / "0.where")
    one.know("after", [0, 1], "y")
    join(one, "after", GATHER, "op")
    one.begin(7)
    at = read_state(tmp_path / "0.where")
    assert (at.step, at.wait.text, at.wait.group.ranks) == (7, "all_gather #1 over (y) of op", (0, 1))
    assert {group.ranks: count for group, count in at.joined.items()} == {(0, 2): 0, (0, 1): 1}
    assert read_state(tmp_path / "1.where") is None


HANGING = (*SMALL, *MODES["semi_auto"], "launch.timeout=3")


@pytest.mark.parametrize(
    ("words", "fault", "pattern"),
    [
        (
            HANGING,
            "{kind: hang, rank: 2, step: 3, phase: forward}",
            r"rank 2 of 4 never joined \w+ #\d+ over \([d, \d]+\) of operator \S+ \(.*\), in which rank.* "
            r"waited 3 s\. Rank 2 was in forward of step 3, \S*fault_injection.py:\d+ \(hang\)\.\n",
        ),
        pytest.param(
            HANGING,
            "{kind: hang, rank: 1, step: 3, phase: data}",
            r"rank 1 of 4 never joined \w+ #\d+ over \(d\d\) of operator .* Rank 1 was in data loading of step 3, ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*SMALL, *MODES["data_parallel"], "parallel.pipeline=2", "world_size=2", "launch.timeout=3"),
            "{kind: hang, rank: 1, step: 3, phase: backward}",
            r".* Rank 1 was in backward of step 3, \S*fault_injection.py:\d+ ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*SMALL, *MODES["data_parallel"], "parallel.zero={stage: 2, engine: deepspeed}", "launch.timeout=3"),
            "{kind: hang, rank: 3, step: 2, phase: optimizer}",
            r"rank 3 of 4 never joined \w+ #\d+ over \(the ranks of ZeRO\), in which ranks 0, 1, 2 waited 3 s\. ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_hang_in_training(start, words, fault, pattern):
    began = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        start(*words, f"launch.faults=[{fault}]")
    assert re.match(pattern, str(caught.value)), str(caught.value)
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_a_callback_that_hangs_before_a_step(start):
    """While the others are in a collective that is the callback's own."""
    words = (*SMALL, *MODES["data_parallel"], "launch.timeout=2", "checkpoint.every=2")
    where = r"Rank 1 was in data loading of step 3, \S*troubles\.py:\d+ \(before_step\)"
    with pytest.raises(RunFailed, match=rf"^rank 1 of 4 never joined barrier .* waited 2 s\. {where}"):
        start(*words, "train.callbacks=[troubles.HangsBeforeAStep]")


@pytest.mark.slow
def test_a_rank_that_is_stopped_from_outside(start, tmp_path):
    """A stopped process cannot report, but keeps its locks and connections."""

    def stop():
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= 5):
            time.sleep(0.01)
        shown = str(tmp_path / "run" / "ranks" / "1.where")
        pids = [
            pid for pid in ranks_of_this_process() if shown in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
        ]
        os.kill(pids[0], signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    cause = r"^rank 1 of 4 (never joined|came to a halt in) .* Rank 1 was in .* of step \d+ and did not say where"
    with pytest.raises(RunFailed, match=cause):
        start(*HANGING, "train.steps=5000", "train.log_every=1000")
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["each other", "different calls"])
def test_a_deadlock_of_two(tmp_path, way):
    with pytest.raises(RunFailed) as caught:
        start_ranks("drill_entries:deadlock", way, 2, tmp_path, timeout=2.0)
    assert "ranks 0, 1 wait for each other: rank 0 in all_reduce #1" in str(caught.value) or way != "each other"
    assert "ranks 0, 1 disagree: rank 0 in all_reduce #1" in str(caught.value) or way == "each other"
