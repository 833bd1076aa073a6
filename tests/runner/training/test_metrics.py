"""The metrics of a run: on disk, on the console, and after a resume."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from runner.launch import logs
from runner.training.metrics import FILE, Expected, Metrics


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_constant=pytest.fail)
        for line in (run_dir / FILE).read_text(encoding="utf-8").splitlines()
    ]


def train(metrics: Metrics, first: int, last: int) -> None:
    for step in range(first, last + 1):
        metrics.step(step, loss=1 / step, lr=0.1, seconds=0.5, samples=32)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_line_per_step_at_once(tmp_path: Path) -> None:
    with Metrics(tmp_path, log_every=10, progress=False) as metrics:
        metrics.step(1, loss=1 / 3, lr=0.1, seconds=0.5, samples=32, waited=0.2)
        values = {"loss": 1 / 3, "lr": 0.1, "seconds": 0.5, "data_seconds": 0.2, "samples_per_second": 64.0}
        assert records(tmp_path) == [{"step": 1, **values}]
        metrics.step(2, loss=0.25, lr=0.1, seconds=0.5, samples=32, grad_norm=2.5)
        metrics.evaluation(2, {"accuracy": 0.75})
        assert records(tmp_path)[1]["grad_norm"] == 2.5
        assert records(tmp_path)[2] == {"step": 2, "evaluation": {"accuracy": 0.75}}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_json(tmp_path: Path, bad: float) -> None:
    with Metrics(tmp_path, log_every=1, progress=False) as metrics:
        train(metrics, 1, 1)
        metrics.step(2, loss=bad, lr=0.1, seconds=0.5, samples=32)
        metrics.evaluation(2, {"accuracy": bad})
    assert records(tmp_path)[1]["loss"] is None
    assert records(tmp_path)[2]["evaluation"] == {"accuracy": None}


def test_resuming_drops_what_will_be_written_again(tmp_path: Path) -> None:
    with Metrics(tmp_path, log_every=10, progress=False) as metrics:
        train(metrics, 1, 4)
        metrics.evaluation(4, {"accuracy": 0.5})
        train(metrics, 5, 7)
    with Metrics(tmp_path, log_every=10, progress=False, first_step=5) as metrics:
        assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 4]
        train(metrics, 5, 6)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3, 4, 4, 5, 6]


def test_a_line_cut_off_by_a_kill(tmp_path: Path) -> None:
    with Metrics(tmp_path, log_every=10, progress=False) as metrics:
        train(metrics, 1, 2)
    with (tmp_path / FILE).open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "lo')
    with Metrics(tmp_path, log_every=10, progress=False, first_step=3) as metrics:
        train(metrics, 3, 3)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


def test_a_line_without_end_ends_the_file(tmp_path: Path) -> None:
    with Metrics(tmp_path, log_every=10, progress=False) as metrics:
        train(metrics, 1, 2)
    os.truncate(tmp_path / FILE, 2**40)
    with Metrics(tmp_path, log_every=10, progress=False, first_step=3) as metrics:
        train(metrics, 3, 3)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


def test_a_fresh_run_starts_empty(tmp_path: Path) -> None:
    for _ in range(2):
        with Metrics(tmp_path, log_every=10, progress=False) as metrics:
            train(metrics, 1, 3)
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


def test_a_file_that_is_removed_begins_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    with Metrics(tmp_path / "run", log_every=10, progress=False) as metrics:
        train(metrics, 1, 2)
        shutil.rmtree(tmp_path / "run")
        train(metrics, 3, 5)
    assert [record["step"] for record in records(tmp_path / "run")] == [3, 4, 5]
    assert capsys.readouterr().out.count("metrics.jsonl was removed") == 1


def test_lines_on_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Metrics(tmp_path, log_every=4, total_steps=10) as metrics:
        train(metrics, 1, 10)
        metrics.evaluation(10, {"accuracy": 0.9375, "loss": 0.25})
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "step  4/10  loss 0.25  lr 0.1  500 ms/step  64 samples/s  3 s left",
        "step  8/10  loss 0.125  lr 0.1  500 ms/step  64 samples/s  1 s left",
        "step 10/10  loss 0.1  lr 0.1  500 ms/step  64 samples/s",
        "step 10/10  evaluation  accuracy 0.9375  loss 0.25",
    ]
    assert err == ""


def test_a_line_says_how_long_steps_wait_for_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Metrics(tmp_path, log_every=1, total_steps=2) as metrics:
        for step, waited in ((1, 0.3), (2, 0.02)):
            metrics.step(step, loss=0.5, lr=0.1, seconds=0.5, samples=32, waited=waited)
    first, second = capsys.readouterr().out.splitlines()
    assert "  500 ms/step (60% waiting for data)  64 samples/s" in first
    assert "  500 ms/step  64 samples/s" in second


def test_a_line_compares_with_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = Expected(memory=3 << 30, tokens=1000, at_peak=0.2)
    with Metrics(tmp_path, log_every=2, total_steps=1000, expected=expected) as metrics:
        for step, seconds in ((1, 0.75), (2, 0.25)):
            metrics.step(step, loss=0.5, lr=0.1, seconds=seconds, samples=32, memory=step << 30)
    assert capsys.readouterr().out == (
        "step    2/1000  loss 0.5  lr 0.1  500 ms/step  64,000 tokens/s  MFU 40.0%  memory 2.0 GiB / 3.0 GiB  "
        "8.32 min left\n"
    )


def test_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, terminal = io.StringIO(), Terminal()
    monkeypatch.setattr(sys, "stdout", logs.Echo(log, terminal))
    with Metrics(tmp_path, log_every=1, total_steps=3, first_step=2) as metrics:
        train(metrics, 2, 3)
        metrics.say("a checkpoint was written")
    assert log.getvalue() == "a checkpoint was written\n"  # the progress bar is only for the terminal
    shown = terminal.getvalue()
    assert "a checkpoint was written\n" in shown
    assert "3/3" in shown and "loss=0.333" in shown
    assert "step 3/3" not in shown  # no lines in addition to the progress bar


@pytest.mark.parametrize(("progress", "bar"), [("auto", True), (True, True), (False, False)])
def test_whether_there_is_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: Any, bar: bool) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with Metrics(tmp_path, log_every=1, total_steps=2, progress=progress) as metrics:
        train(metrics, 1, 2)
    assert ("step 2/2" not in terminal.getvalue()) == bar
    assert ("2/2 [" in terminal.getvalue()) == bar


def test_a_console_that_goes_away() -> None:
    read, write = os.pipe()
    console, log = open(write, "w", buffering=1, encoding="utf-8"), io.StringIO()
    echo = logs.Echo(log, console)
    print("seen", file=echo)
    assert os.read(read, 100) == b"seen\n"
    os.close(read)
    print("unseen", file=echo)
    print("later", file=echo)
    assert (
        log.getvalue() == "seen\nunseen\nThe console is closed (Broken pipe); output goes on in this log only.\nlater\n"
    )
    with pytest.raises(BrokenPipeError):
        console.close()
