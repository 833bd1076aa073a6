"""A slice of the samples of torch's own tests: programs and plans of ours are equal to one device."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.dtensor.samples import __main__ as command
from tests.dtensor.samples.on_ranks import outcomes

SETTINGS = command.Settings((2,), torch.float64, samples=2, placements=4, plans=2)
FUNCTIONS = (
    *("linalg.solve_triangular", "linalg.norm.subgradients_at_zero", "linalg.householder_product"),
    *("remainder", "masked_fill", "addmm", "flatten", "cumsum", "nn.functional.nll_loss", "nn.functional.rms_norm"),
)


@pytest.mark.slow
def test_a_slice_of_the_samples_is_equal_to_one_device() -> None:
    rows = list(command.every(FUNCTIONS, SETTINGS, limit=300, jobs=1))
    assert {row.name for row in rows} == {*FUNCTIONS}
    assert all(row.calls and row.plans for row in rows)
    assert [(row.name, row.wrong, row.errors, row.ours) for row in rows if row.wrong or row.errors or row.ours] == []


@pytest.mark.slow
def test_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that leaves out its corrections."""

    def uncorrected(jobs: Sequence[command.Job], mesh: tuple[int, ...]) -> list[str]:
        with monkeypatch.context() as left_out:
            left_out.setattr("runner.export.plain_torch._Complete.SCANS", ())
            return list(outcomes(jobs, mesh))

    monkeypatch.setattr(command, "outcomes", uncorrected)
    (row,) = command.every(["cumsum"], SETTINGS, limit=300, jobs=1)
    assert row.wrong and not row.ours
