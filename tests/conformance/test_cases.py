"""Recorded cases of another system's tests: strategies chosen, refused and accepted.

Every case passes, or `reasons.json` says why it does not; what it says is checked, so that no reason outlives its case.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from strategies.core.errors import StrategyError
from tests.conformance.bench import Bench
from tests.conformance.forms import NotMapped
from tests.conformance.judge import judge
from tests.conformance.network import devices

HERE = Path(__file__).parent
REASONS: dict[str, str] = json.loads((HERE / "reasons.json").read_text(encoding="utf-8"))
SMALL = 2**15
"""Elements of the largest tensor of a network that is run."""
LARGE = 2**22


def check(case: dict[str, Any], most: int, own: bool, record: Any) -> None:
    verdict = judge(case, most)
    for key, value in (
        ("case", case["id"]),
        ("suite", case["suite"]),
        ("verdict", verdict.kind),
        ("reason", verdict.reason),
        ("ran", verdict.ran),
    ):
        record(key, value)
    written = REASONS.get(case["id"], "") if own else ""
    verdict_text = "passed" if verdict.kind == "passed" else f"{verdict.kind}: {verdict.reason}"
    if own and verdict.kind != "passed":
        assert written.startswith(f"{verdict.kind}: "), f"{verdict_text} (reasons.json says {written or 'nothing'})"
    elif own:
        assert not written, f"it passes now; reasons.json still says {written}"
    else:
        assert verdict.kind != "failed", verdict_text


@pytest.mark.few(6)
def test_recorded_case(case: dict[str, Any], own_cases: bool, record_property: Any) -> None:
    check(case, SMALL, own_cases, record_property)


@pytest.mark.slow
def test_recorded_case_run_at_any_size(case: dict[str, Any], own_cases: bool, record_property: Any) -> None:
    check(case, LARGE, own_cases, record_property)


def test_every_suite_passes_mostly() -> None:
    """Nine of ten cases of each suite are planned, refused or accepted as recorded, or differ with a proof."""
    cases = json.loads((HERE / "cases.json").read_text(encoding="utf-8"))
    assert REASONS.keys() <= {case["id"] for case in cases}
    assert all(len(reason.split()) > 4 for reason in REASONS.values())
    total = Counter(case["suite"] for case in cases)
    bare = Counter(case["suite"] for case in cases if REASONS.get(case["id"], "").startswith(("not mapped", "failed")))
    assert total == {"concrete": 92, "error": 60, "accepted": 381}
    assert all(10 * bare[suite] <= total[suite] for suite in total)


def cheapest_is_ours(case: dict[str, Any], ranks: int) -> None:
    """No recorded plan costs less than that of the exact search with nothing configured."""
    if "error" in case["expected"] or devices(case) > ranks:
        return
    try:
        bench = Bench(case, SMALL)
        recorded = bench.seconds(bench.lowered(bench.request)[0])
    except (NotMapped, StrategyError):
        return  # not legal here
    ours = bench.cheapest()
    assert bench.seconds(ours) <= recorded * (1 + 1e-9)
    assert ours.search["lower_bound"] <= recorded * (1 + 1e-9)


FEW = (
    "ms-test_auto_parallel_two_matmul_test_two_matmul-3",
    "ms-test_stridedslice_test_shrink_axis_mask",
    "ms-test_cumsum_ext_test_cumsum_ext_auto_parallel_sharding_propagation1",
)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FEW)
def test_no_recorded_plan_is_cheaper_than_the_exact_one(name: str) -> None:
    cases = {case["id"]: case for case in json.loads((HERE / "cases.json").read_text(encoding="utf-8"))}
    cheapest_is_ours(cases[name], 16)


@pytest.mark.slow
def test_no_recorded_plan_at_all_is_cheaper(case: dict[str, Any]) -> None:
    cheapest_is_ours(case, 16)
