"""Predictions for a machine that was not calibrated stay near the measured steps that docs/ shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.step_time import predicted, wishes

FILE = Path(__file__).parents[1] / "docs" / "search" / "step_time.json"


@pytest.mark.slow
def test_steps_are_predicted_within_half_without_calibration() -> None:
    rows = json.loads(FILE.read_text(encoding="utf-8"))["outcome"]["rows"]
    measured = {(model, plan): float(milliseconds) / 1e3 for model, plan, _, milliseconds in rows}
    ratios = {
        (model, wish.name): cost.total / measured[model, wish.name]
        for model, wish, cost in predicted(("ffn", "gpt", "llama"), 8, None)
    }
    assert len(ratios) == len(measured) == 3 * len(wishes(8))
    assert {plan: ratio for plan, ratio in ratios.items() if not 1 / 1.5 < ratio < 1.5} == {}
