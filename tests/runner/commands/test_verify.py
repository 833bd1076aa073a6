"""The comparison of two recorded runs: the tolerances and the verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from runner.commands.verify import ROUNDING, TOLERANCE, compare


def recorded(folder: Path, weights: dict[str, Tensor], gradients: dict[str, Tensor]) -> Path:
    folder.mkdir()
    torch.save({"loss": 1.0, "gradients": gradients}, folder / "step-1.pt")
    torch.save(weights, folder / "weights.pt")
    return folder


@pytest.mark.parametrize(
    ("mean", "error", "passed"),
    [
        (1e-9, 1e-8, True),  # rounding error alone
        (1e-9, 1e-3, False),
        (3.0, 1e-6, True),
        (3.0, 1e-3, False),
    ],
)
def test_a_running_mean_is_compared_relative_to_its_deviation(
    tmp_path: Path, mean: float, error: float, passed: bool
) -> None:
    found, truth = (
        recorded(
            tmp_path / name,
            {"norm.running_mean": torch.full((2,), value), "norm.running_var": torch.ones(2)},
            {"norm.weight": torch.ones(2)},
        )
        for name, value in (("ours", mean + error), ("theirs", mean))
    )
    assert compare(found, truth, TOLERANCE["fp32"], ROUNDING["fp32"]).passed == passed


def test_other_weights_are_compared_relative_to_their_size(tmp_path: Path) -> None:
    found, truth = (
        recorded(tmp_path / name, {"mean": torch.full((2,), value), "norm.running_var": torch.ones(2)}, {})
        for name, value in (("ours", 1.1e-9), ("theirs", 1e-9))
    )
    comparison = compare(found, truth, TOLERANCE["fp32"], ROUNDING["fp32"])
    assert comparison.differences["weight", "mean"] == pytest.approx(0.1, rel=1e-3)
