"""Jointly optimised choices in explain and in the report, with the runner-up and the difference."""

from __future__ import annotations

import pytest

from runner.report.text import decision_rows, decision_table

GPT = (
    *("+recipe=gpt", "parallel=data_parallel", "parallel.mesh=null", "~parallel.strategies", "+parallel.strategies={}"),
    *("parallel.dataset_strategy=data_parallel", "world_size=8", "data.batch_size=8"),
)
DECISION = {
    **{"zero": 1, "stages": 1, "micro_batches": 1, "recompute": "none", "modules": None, "seconds": 0.002},
    **{"tried": 3, "pruned": 4, "over": 1, "refused": 0},
    "runner_up": {
        **{"zero": 2, "stages": 2, "micro_batches": 4, "recompute": "full", "seconds": 0.0021},
        "modules": ["layers.0", "layers.1"],
    },
}


def test_every_key_has_both_values():
    assert decision_rows(DECISION) == [
        ("parallel.zero.stage", "1", "2"),
        ("parallel.pipeline.stages", "no pipeline", "2"),
        ("parallel.pipeline.micro_batches", "no pipeline", "4"),
        ("parallel.recompute", "none", "full in 2 layers, the first of every stage"),
        ("seconds per step", "2.00 ms", "2.10 ms, 5.00% more"),
    ]
    assert decision_table(DECISION).endswith("3 choices evaluated, 4 pruned because their bounds are no better, 1 too "
                                         "large for the memory of a rank, 0 without a plan")  # fmt: skip


def test_without_a_runner_up_there_is_only_what_was_chosen():
    assert decision_rows(DECISION | {"runner_up": None})[-1] == ("seconds per step", "2.00 ms", "")


@pytest.mark.slow
def test_explain_and_the_report_show_it(start, capsys):
    words = ("parallel.zero.stage=auto", "parallel.recompute=auto", "parallel.memory_limit=3MB")
    ended = start(*GPT, *words, verb="explain")
    said, decided = capsys.readouterr().out, ended.plan["search"]["decided"]
    assert "jointly optimised" in said and "runner-up" in said
    shown = (ended.folder / "report.html").read_text(encoding="utf-8")
    for row in decision_rows(decided):
        assert all(cell in said for cell in row), row
        assert "".join(f"<td>{cell}</td>" for cell in row) in shown, row
