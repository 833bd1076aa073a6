"""What is left of a run of parameter servers that has ended: its members, and those of the next attempt."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.launch.failure import KILLED, CauseOrder, Done, Failure
from runner.launch.local import _LocalSupervision
from runner.server import roles
from runner.server.fleet import PLACE, over


def test_members_of_the_next_attempt_wait_for_its_coordinator(tmp_path: Path) -> None:
    found: list[Any] = []
    (tmp_path / PLACE).write_text(over(0), encoding="utf-8")
    jobs: list[Any] = [SimpleNamespace(folder=tmp_path, attempt=attempt) for attempt in range(2)]
    assert roles._coordinator(jobs[0]) is None
    member = threading.Thread(target=lambda: found.append(roles._coordinator(jobs[1])))
    member.start()
    member.join(5 * roles.LOOK)
    assert member.is_alive()
    (tmp_path / PLACE).write_text(over(1), encoding="utf-8")
    member.join(100 * roles.LOOK)
    assert found == [None]


@pytest.mark.parametrize("code", [KILLED, "MW710"])
def test_a_rank_that_fails_after_all_work_is_done_is_missed_by_nobody(code: str, capsys: Any) -> None:
    report = Failure(1, 0.0, CauseOrder.CAUSE, "failed: ValueError: wrong", code=code)
    supervision: Any = object.__new__(_LocalSupervision)
    supervision.group = SimpleNamespace(elastic=True)
    supervision._forks = [SimpleNamespace(report=Done(b"")), SimpleNamespace(report=report, number=1)]
    supervision.replace_killed()
    assert supervision._forks[1].report == Done(None)
    assert ("rank 1 failed: ValueError: wrong; the others have done its work" in capsys.readouterr().out) == (
        code != KILLED
    )
