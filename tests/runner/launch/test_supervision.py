"""Which error reports the failures of ranks on several hosts; no process is started."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from runner.errors import ConfigError, RunFailed
from runner.launch import supervision
from runner.launch.failure import CauseOrder, Failure
from runner.launch.orders import GroupOrders
from runner.launch.supervision import SupervisedRank, Supervision


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervision:
    """Four ranks, two on each of the hosts a and b."""
    monkeypatch.setattr(supervision, "DUMP", 0.0)
    (tmp_path / "ranks").mkdir()
    ranks = [SupervisedRank(number, tmp_path, host) for number, host in enumerate("aabb")]
    return Supervision(ranks, GroupOrders("module:function", 4, tmp_path, "cpu", 5.0, 1))


def failed(run: Supervision, rank: int, order: CauseOrder, what: str, **more: str) -> None:
    run.ranks[rank].report = Failure(rank, time.monotonic(), order, what, **more)


def error_of(run: Supervision) -> RunFailed:
    with pytest.raises(RunFailed) as caught:
        run.raise_failed([rank.report for rank in run.ranks if isinstance(rank.report, Failure)])
    return caught.value


def test_the_first_cause_is_named_and_not_its_echo(run: Supervision) -> None:
    failed(run, 0, CauseOrder.PEER_LOST, "failed: RuntimeError: connection reset by peer")
    failed(run, 3, CauseOrder.CAUSE, "failed: ValueError: no", where="net.py:3 (forward)", code="MW719")
    error = error_of(run)
    assert (error.code, error.rank, error.hosts) == ("MW719", 3, ())
    assert str(error).startswith("on b, rank 3 of 4 failed: ValueError: no. Where: net.py:3 (forward).")
    assert str(run.ranks[3].log) in str(error)


def test_a_rank_of_another_command_that_is_gone_is_not_an_error_of_gloo(run: Supervision) -> None:
    failed(run, 0, CauseOrder.PEER_LOST, "failed: RuntimeError: [pair.cc:537] Connection reset by peer", where="loss")
    error = error_of(run)
    assert (error.code, error.rank) == ("MW713", 0)
    assert "rank 0 of 4 lost its connection to another rank" in str(error) and "pair.cc" not in str(error)
    assert f"The traceback is in {run.ranks[0].log}" in str(error)


def test_a_host_that_is_cut_off_is_named_with_all_of_its_ranks(run: Supervision) -> None:
    run.ranks[2].lost = True
    failed(run, 2, CauseOrder.CAUSE, "no longer answers: Connection timed out")
    failed(run, 0, CauseOrder.PEER_LOST, "failed: RuntimeError: connection reset by peer")
    error = error_of(run)
    assert (error.code, error.rank, error.hosts) == ("MW713", 2, ("b",))
    assert str(error).startswith("host b (ranks 2, 3 of 4) no longer answers")


def test_a_rank_that_fails_by_itself_is_named_although_a_host_is_lost_later(run: Supervision) -> None:
    run.ranks[2].lost = True
    failed(run, 0, CauseOrder.CAUSE, "failed: ValueError: no")
    failed(run, 2, CauseOrder.CAUSE, "no longer answers: Connection timed out")
    assert (error_of(run).code, error_of(run).rank) == ("MW710", 0)


def test_ranks_that_do_not_answer_are_named(run: Supervision) -> None:
    for rank in (0, 1, 2):
        failed(run, rank, CauseOrder.TIMEOUT, "failed: RuntimeError: timed out waiting", where="net.py:3 (forward)")
    error = error_of(run)
    assert (error.code, error.rank) == ("MW712", 3)
    assert str(error).startswith("host b (rank 3 of 4) did not answer: the others waited 5 s in a collective (rank 0 ")
    assert "Rank 3 on b was in the start and did not say where." in str(error)


def test_wrong_input_has_its_own_code(run: Supervision) -> None:
    failed(run, 1, CauseOrder.CAUSE, "failed: ConfigError: no", refusal="config", text="no", code="MW310")
    with pytest.raises(ConfigError) as caught:
        run.raise_failed([rank.report for rank in run.ranks if isinstance(rank.report, Failure)])
    assert (caught.value.code, str(caught.value)) == ("MW310", "no")
