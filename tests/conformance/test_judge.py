"""Tests of the judge: a wrongly recorded case fails, and an unknown one is named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.judge import Verdict, judge

ROOT = Path(__file__).parents[2]
X, W = {"tensor": "x", "shape": [16, 8]}, {"param": "w", "shape": [8, 32]}
CASE: dict[str, Any] = {
    "id": "small",
    "suite": "concrete",
    "mode": "semi_auto",
    "search_mode": None,
    "device_num": 8,
    "context": {"dataset_strategy": "full_batch"},
    "inputs": [X],
    "params": [{"name": "w", "shape": [8, 32]}],
    "network": [
        {"id": 0, "op": "MatMul", "in": [X, W], "name": "product", "in_strategy": [[2, 4], [4, 1]]},
        {"id": 1, "op": "ReLU", "in": [{"node": 0, "shape": [16, 32]}], "name": "relu", "in_strategy": [[8, 1]]},
    ],
    "expected": {"ok": True},
}


def with_(path: str, value: Any) -> dict[str, Any]:
    """CASE with something else in one place, e.g. `network.0.op`."""
    case = deepcopy(CASE)
    *way, last = [int(word) if word.isdigit() else word for word in path.split(".")]
    place: Any = case
    for word in way:
        place = place[word]
    place[last] = value
    return case


def verdict(path: str, value: Any) -> Verdict:
    return judge(with_(path, value), 2**15)


def layout(tensor_map: list[int]) -> dict[str, Any]:
    return {"param_layouts": {"w": {"device_matrix": [2, 4], "tensor_map": tensor_map}}}


def before_relu(collective: str) -> dict[str, Any]:
    return {"graph_assertions": [{"check": "node_inputs_has", "node": "ReLU-0", "inputs": [collective]}]}


RIGHT: list[dict[str, Any]] = [
    {"ok": True},
    {"strategies": {"MatMul-op": [[2, 4], [4, 1]], "Default/network-Net/ReLU-op3": [[8, 1]]}},
    {"strategies": {"_VirtualDataset-op": [[1, 1]]}},
    {"local_param_shapes": {"network.w": [2, 32]}},
    layout([0, -1]),
    before_relu("ReduceScatter-0"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"strategies": {"MatMul-op": [[2, 4], [4, 2]]}}, r"MatMul \[\[\[2, 4\], \[4, 1\]\]\], not"),
    ({"strategies": {"_VirtualDataset-op": [[8, 1]]}}, r"inputs \[\[1, 1\]\], not \[\[8, 1\]\]"),
    ({"local_param_shapes": {"w": [8, 32]}}, r"has slices \[2, 32\]"),
    ({"local_param_shapes": {"v": [2, 32]}}, "no parameter v"),
    (layout([1, -1]), "rank 0 holds"),
    (before_relu("AllGather-0"), "no AllGather before ReLU-0"),
    (before_relu("MatMul-0"), "something is sent between MatMul-0 and ReLU-0"),
]


@pytest.mark.few(2)
@pytest.mark.parametrize("expected", RIGHT)
def test_right_is_passed(expected: dict[str, Any]) -> None:
    found = verdict("expected", expected)
    assert (found.kind, found.ran) == ("passed", True), found.reason


@pytest.mark.parametrize(("expected", "reason"), WRONG)
def test_a_wrong_record_fails_with_its_reason(expected: dict[str, Any], reason: str) -> None:
    found = verdict("expected", expected)
    assert found.kind == "failed"
    assert re.search(reason, found.reason), found.reason


def error(rule: str) -> dict[str, Any]:
    return {"error": {"trigger": [{"op": "MatMul(product)", "rule": rule}]}}


@pytest.mark.slow
def test_a_refusal_must_come_and_be_about_the_recorded_rule() -> None:
    case = with_("network.0.in_strategy", [[2, 4], [2, 1]])
    assert judge({**case, "expected": error("contraction_mismatch")}, 2**15) == Verdict("passed")
    other = judge({**case, "expected": error("strategy_rank")}, 2**15)
    assert other.kind == "failed"
    assert "another reason than strategy_rank" in other.reason
    assert judge({**case, "expected": error("a rule of tomorrow")}, 2**15) == Verdict("passed")
    unrelated = {"error": {"trigger": [{"op": "ReLU(relu)", "rule": "a rule of tomorrow"}]}}
    assert judge({**case, "expected": unrelated}, 2**15).kind == "failed"
    assert verdict("expected", error("contraction_mismatch")).kind == "failed"
    assert judge(case, 2**15).kind == "failed"


def test_cases_that_only_we_support_differ_once_they_ran() -> None:
    case = with_("network.0.out_strategy", [[1, 8]])
    found = judge({**case, "expected": error("out_layout_rule")}, 2**15)
    assert (found.kind, found.ran) == ("differs", True)


def test_unknown_cases_are_named() -> None:
    assert verdict("network.1.op", "Frobnicate") == Verdict("not mapped", "operator Frobnicate")
    assert verdict("mode", "hybrid_parallel") == Verdict("not mapped", "mode hybrid_parallel")
    assert verdict("network.0.in.1.shape", [9, 32]).kind == "not mapped"


def test_sizes_that_are_left_open_are_found() -> None:
    assert verdict("inputs.0.shape", [None, 8]).ran
    assert verdict("inputs.0.shape", ["sym(divisor=8)", 8]).ran


@pytest.mark.slow
def test_any_file_of_the_format_is_taken(tmp_path: Path) -> None:
    unknown = {**with_("network.1.op", "Frobnicate"), "id": "unknown"}
    wrong = {**with_("expected", WRONG[2][0]), "id": "wrong"}
    file = tmp_path / "cases.json"
    file.write_text(json.dumps([CASE, unknown, wrong]), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/conformance"]
    done = subprocess.run(
        [*command, "-k", "recorded_case", "--cases", str(file)],
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 1
    assert "not mapped: unknown: operator Frobnicate" in done.stdout
    assert "failed: wrong: parameter w has slices [2, 32], not [8, 32]" in done.stdout
    assert "concrete: 1 of 3 passed (33.3 %), 0 differs, 1 not mapped, 1 failed" in done.stdout
