"""A slice of the samples of torch's own tests: programs and plans of ours are equal to one device."""

from __future__ import annotations

import pytest
import torch

from runner.export import plain_torch
from tests.dtensor.samples import __main__ as command

SETTINGS = command.Settings((2,), torch.float64, samples=2, placements=4, plans=2)
FUNCTIONS = ("addmm", "cumsum")


@pytest.mark.slow
def test_a_slice_of_the_samples_is_equal_to_one_device() -> None:
    rows = list(command.every(FUNCTIONS, SETTINGS, limit=300, jobs=1))
    assert {row.name for row in rows} == {*FUNCTIONS}
    assert all(row.calls and row.plans for row in rows)
    assert [(row.name, row.wrong, row.errors, row.ours) for row in rows if row.wrong or row.errors or row.ours] == []


@pytest.mark.slow
def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loss that DTensor averages slice by slice, with gradients that are too large."""
    monkeypatch.setattr(plain_torch._Means, "LOSSES", ())  # which the forked ranks inherit
    (row,) = command.every(["nn.functional.mse_loss"], SETTINGS, limit=300, jobs=1)
    assert row.calls and any("gradient of operand" in one for one in row.wrong) and not row.errors and not row.ours
