"""`python -m benchmarks.search`: outcomes survive serialization, the page has every claim, figures are stable."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.search import charts
from benchmarks.search.__main__ import PARTS, write_page
from benchmarks.search.outcome import Claim, Outcome, Record, read


def record(name: str, met: bool) -> Record:
    claim = Claim(f"the goal of {name}", "0.30 s", met)
    outcome = Outcome((claim,), ("mesh", "s"), (("8", "0.30"),), (f"search/{name}.svg",), (f"{name}.md",))
    return Record(
        name, f"The title of {name}", "2026-11-21", f"python -m benchmarks.search --only {name}", 4.0, outcome
    )


@pytest.mark.parametrize("name", PARTS)
def test_every_part_has_the_interface(name: str) -> None:
    part = importlib.import_module(f"benchmarks.search.{name}")
    assert part.TITLE and callable(part.measure)


def test_the_page_is_made_of_the_written_outcomes(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    for one in (record(PARTS[1], False), record(PARTS[0], True)):
        one.write(tmp_path / "search")
        assert read(tmp_path / "search" / f"{one.name}.json") == one
    text = write_page(tmp_path).read_text(encoding="utf-8")
    assert "1 of 2 goals are met." in text
    assert f"| [{PARTS[0]}](#{PARTS[0]}) | the goal of {PARTS[0]} | 0.30 s | yes |" in text
    assert f"| the goal of {PARTS[1]} | 0.30 s | **no** |" in text
    assert text.index(f"## {PARTS[0]}") < text.index(f"## {PARTS[1]}"), "in the order of the parts"
    assert f"![The title of {PARTS[1]}](search/{PARTS[1]}.svg)" in text and f"]({PARTS[0]}.md)" in text


def test_a_picture_depends_on_its_data_alone(tmp_path: Path) -> None:
    def rendered(name: str, seconds: float) -> str:
        charts.goals(tmp_path / name, [("8b on (8)", seconds, 0.2), ("8b on (2, 4)", 0.3, 0.2)], "CPU seconds")
        return (tmp_path / name).read_text(encoding="utf-8")

    assert rendered("one.svg", 0.1) == rendered("two.svg", 0.1) != rendered("three.svg", 0.5)
    assert "8b on (2, 4)" in rendered("one.svg", 0.1)
    assert (charts.BLUE in rendered("one.svg", 0.1)) and (charts.BLUE not in rendered("three.svg", 0.5)), (
        "missed goals are red"
    )


@pytest.mark.slow
def test_an_unknown_part_is_refused_by_its_name() -> None:
    words = [sys.executable, "-m", "benchmarks.search", "--only", "speed,sped"]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 2 and "no part is called sped; there are speed, open_mesh, scale" in done.stderr
