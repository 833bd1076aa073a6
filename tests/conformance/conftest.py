"""`--cases FILE` checks another file of recorded cases; the summary counts per suite and lists every failing case."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DEFAULT = HERE / "cases.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", default=str(DEFAULT), help="a file of recorded cases in place of ours")


def cases_file(config: pytest.Config) -> Path:
    return Path(config.getoption("--cases", default=str(DEFAULT)))


def pytest_configure(config: pytest.Config) -> None:
    if not cases_file(config).is_file():
        raise pytest.UsageError(
            f"--cases {cases_file(config)} is not a file; give one of the format of {DEFAULT.name}."
        )


def recorded(config: pytest.Config) -> list[dict[str, Any]]:
    """The cases that are a network; those about the algebra of layouts have a separate test."""
    return [case for case in json.loads(cases_file(config).read_text(encoding="utf-8")) if case.get("network")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames and metafunc.module.__name__.endswith("test_cases"):
        cases = recorded(metafunc.config)
        metafunc.parametrize("case", cases, ids=[f"{case['suite']}-{case['id']}" for case in cases])


@pytest.fixture(scope="session")
def own_cases(pytestconfig: pytest.Config) -> bool:
    """Whether the cases are those of this folder, for which every reason is recorded."""
    return cases_file(pytestconfig).resolve() == DEFAULT


def crashed(report: pytest.TestReport) -> dict[str, Any]:
    """The report of a case that raised an unexpected error."""
    suite, _, case = report.nodeid.partition("[")[2].rstrip("]").partition("-")
    last = str(report.longrepr).strip().splitlines()[-1]
    return {"case": case, "suite": suite, "verdict": "failed", "reason": last, "ran": False}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found = [
        dict(report.user_properties) or crashed(report)
        for key in ("passed", "failed")
        for report in terminalreporter.getreports(key)
        if report.when == "call" and "::test_recorded_case" in report.nodeid
    ]
    if not found:
        return
    terminalreporter.section("conformance")
    for entry in found:
        if entry["reason"]:
            terminalreporter.write_line(f"{entry['verdict']}: {entry['case']}: {entry['reason']}")
    for suite in dict.fromkeys(entry["suite"] for entry in found):
        mine = [entry for entry in found if entry["suite"] == suite]
        counts, ran = Counter(entry["verdict"] for entry in mine), sum(entry["ran"] for entry in mine)
        share = 100 * counts["passed"] / len(mine)
        others = ", ".join(f"{counts[kind]} {kind}" for kind in ("differs", "not mapped", "failed"))
        terminalreporter.write_line(
            f"{suite}: {counts['passed']} of {len(mine)} passed ({share:.1f} %), {others}; {ran} run on simulated ranks"
        )
