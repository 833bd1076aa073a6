"""A long search reports its progress."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from runner.planning import sources

GRAPH: Any = SimpleNamespace(operators=[0] * 7)
REQUEST: Any = SimpleNamespace(world_size=512)


@pytest.mark.parametrize("fails", [False, True])
def test_a_long_search_reports_progress_and_leaves_no_thread(monkeypatch, fails):
    monkeypatch.setattr(sources, "EVERY", 0.01)
    said: list[str] = []
    before = threading.active_count()
    try:
        with sources.search_progress(said.append, GRAPH, REQUEST):
            deadline = time.monotonic() + 10
            while len(said) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            if fails:
                raise ValueError("no plan")
    except ValueError:
        assert fails
    assert threading.active_count() == before
    assert said[0] == "searching: 7 operators on 512 ranks, 0 s so far" and len(said) >= 2


def test_a_short_search_says_nothing():
    said: list[str] = []
    with sources.search_progress(said.append, GRAPH, REQUEST):
        pass
    assert said == []
