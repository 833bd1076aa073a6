"""`python -m benchmarks.gpu`: every part runs on a CPU, the page lists every path of a GPU, and it is honest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import page
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.paths import NO_PART, NOT_HERE, PATHS, in_code, lines

ROOT = Path(__file__).parents[1]


def stored(device: str, **rows: dict[str, object]) -> dict[str, object]:
    parts = {name: {"rows": {name: row}, "seconds": 1.0} for name, row in rows.items()}
    return {"device": device, "name": "a card", "torch": "2", "date": "2026-11-23", "seconds": 9.0, "parts": parts}


def test_every_file_that_asks_for_a_device_is_listed() -> None:
    assert {*in_code(ROOT)} == {*PATHS}, "add or remove its row in benchmarks/gpu/paths.py"
    assert {part for _, part in PATHS.values()} <= {*PARTS, NOT_HERE, NO_PART}


def test_lines_that_ask_for_a_device_are_found(tmp_path: Path) -> None:
    file = tmp_path / "asks.py"
    text = [
        '"""On cuda."""',
        "a = torch.cuda.Stream()",
        "if device != 'cpu':",
        "    b(pin_memory=True)",
        "c = 'cuda:0'",
    ]
    file.write_text("\n".join([*text, "d = 'cpu'"]), encoding="utf-8")
    assert lines(file) == [2, 3, 4, 5]


def test_the_page_is_that_of_the_stored_run() -> None:
    file = ROOT / "docs" / "gpu.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    assert (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8") == page.text(content), (
        "write it with python -m benchmarks.gpu --page"
    )


def test_only_what_a_gpu_did_without_an_error_has_run() -> None:
    assert page.state("train", None) == "never run"
    assert page.state("train", stored("cpu", train={})) == "never run", "on a CPU"
    assert page.state("train", stored("cuda", memory={})) == "never run", "another part"
    assert page.state("train", stored("cuda", train={"error": "no"})) == "run, failed"
    assert page.state("train", stored("cuda", train={})) == "run 2026-11-23"
    assert "| train | failed: no |" in page.text(stored("cuda", train={"error": "no"}))


def test_without_a_gpu_one_paragraph_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("runner.planning.clusters._gpus", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    assert main() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "has 0" in said


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=900)
    content = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {*content["parts"]} == {*PARTS}
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "## A step against the plain loop" in text and "## Memory" in text and "after `run calibrate`" in text
    assert all(row["difference"] < 1e-3 for name, row in content["parts"]["ratio"]["rows"].items() if "fp32" in name)
