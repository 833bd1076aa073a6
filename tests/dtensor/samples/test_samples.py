"""A slice of the samples of torch's own tests: programs and plans of ours are equal to one device."""

from __future__ import annotations

import pytest
import torch

from tests.dtensor.samples import __main__ as command

SETTINGS = command.Settings((2,), torch.float64, samples=2, placements=4, plans=2)
FUNCTIONS = ("addmm", "cumsum")


@pytest.mark.slow
def test_a_slice_of_the_samples_is_equal_to_one_device() -> None:
    rows = list(command.every(FUNCTIONS, SETTINGS, limit=300, jobs=1))
    assert {row.name for row in rows} == {*FUNCTIONS}
    assert all(row.calls and row.plans for row in rows)
    assert [(row.name, row.wrong, row.errors, row.ours) for row in rows if row.wrong or row.errors or row.ours] == []
