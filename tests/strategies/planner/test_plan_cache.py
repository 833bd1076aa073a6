"""The plan cache: hits, misses, and damaged entries."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from strategies.capture import Objective, capture
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.request import OperatorStrategy, Request
from strategies.planner import plan_cache
from strategies.planner.planner import make_plan

REQUEST = Request("semi_auto", 4)


def graph_of(width: int) -> OperatorGraph:
    step = Objective(nn.Linear(8, width), nn.CrossEntropyLoss(), ("0", "1"), ("1",))
    return capture(step, (torch.randn(8, 8), torch.zeros(8, dtype=torch.long)), training=True).graph


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return graph_of(16)


@pytest.fixture(scope="module")
def plan(graph: OperatorGraph) -> Plan:
    return make_plan(graph, REQUEST)


def refuse(text: str) -> None:
    pytest.fail(text)


def test_a_stored_plan_is_found(graph: OperatorGraph, plan: Plan, tmp_path: Path) -> None:
    folder, key = tmp_path / "a" / "b", plan_cache.key_of(graph, REQUEST)
    assert plan_cache.load(folder, key, refuse, Plan.from_json) is None
    plan_cache.store(folder, key, plan.to_json(), refuse)
    assert plan_cache.load(folder, key, refuse, Plan.from_json) == plan
    assert [path.name for path in folder.iterdir()] == [f"{key}.json"]


def test_a_question_is_graph_request_and_code(graph: OperatorGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    key = plan_cache.key_of(graph, REQUEST)
    assert plan_cache.key_of(graph_of(16), Request("semi_auto", 4)) == key
    others = [
        plan_cache.key_of(graph_of(24), REQUEST),
        plan_cache.key_of(graph, replace(REQUEST, world_size=8)),
        plan_cache.key_of(graph, replace(REQUEST, mesh=(("a", 4),))),
        plan_cache.key_of(graph, replace(REQUEST, strategies={"linear": OperatorStrategy(((4, 1), (1, 1)), None)})),
        plan_cache.key_of(graph, REQUEST, "another cluster"),
    ]
    monkeypatch.setattr(plan_cache, "code_of", lambda folder: "another version")
    others.append(plan_cache.key_of(graph, REQUEST))
    assert len({key, *others}) == 7


DAMAGES = {
    "cut short": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "something else": lambda text: "[1, 2]",
    "null": lambda text: "null",
    "another plan": lambda text: text.replace('"semi_auto"', '"auto"'),
    "an older form": lambda text: json.dumps({"plan": json.loads(text)["plan"]}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_reported_and_not_used(
    damage: str, graph: OperatorGraph, plan: Plan, tmp_path: Path
) -> None:
    plan_cache.store(tmp_path, "key", plan.to_json(), refuse)
    file, said = tmp_path / "key.json", list[str]()
    file.write_text(DAMAGES[damage](file.read_text(encoding="utf-8")), encoding="utf-8")
    assert plan_cache.load(tmp_path, "key", said.append, Plan.from_json) is None
    (line,) = said
    assert line.startswith(f"plan cache: {file} cannot be used (") and line.endswith("so the plan is searched anew.")
    assert not any(name in line for name in ("KeyError", "TypeError", "AttributeError"))
    plan_cache.store(tmp_path, "key", plan.to_json(), refuse)
    assert plan_cache.load(tmp_path, "key", refuse, Plan.from_json) == plan


def test_a_folder_that_cannot_be_written_costs_a_warning(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    said: list[str] = []
    plan_cache.store(tmp_path / "file" / "plans", "key", plan.to_json(), said.append)
    (line,) = said
    assert line.startswith("plan cache: the plan cannot be kept in ")


def test_an_entry_that_cannot_be_finished_leaves_nothing(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    said: list[str] = []
    monkeypatch.setattr(plan_cache.os, "replace", fail)
    plan_cache.store(tmp_path, "key", plan.to_json(), said.append)
    assert said == [f"plan cache: the plan cannot be kept in {tmp_path} (No space left on device)."]
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_go_first(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST", 3)
    for number in range(5):
        plan_cache.store(tmp_path, f"key{number}", plan.to_json(), refuse)
        os.utime(tmp_path / f"key{number}.json", (number, number))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["key2", "key3", "key4"]


def test_many_may_write_and_drop_at_once(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry is complete or absent, also while other processes replace it and evict the oldest."""
    monkeypatch.setattr(plan_cache, "MOST", 3)

    def work(number: int) -> int:
        key, found = f"{number % 7:032d}", 0
        for _ in range(30):
            plan_cache.store(tmp_path, key, plan.to_json(), refuse)
            entry = plan_cache.load(tmp_path, key, refuse, Plan.from_json)
            assert entry in (plan, None)
            found += entry is not None
        return found

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(16))) > 0
    assert len(list(tmp_path.iterdir())) <= 3
