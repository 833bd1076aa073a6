"""The comparison of two recorded runs: the tolerances and the verdict."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from small import MODES, SMALL
from torch import Tensor, nn

from runner.commands.verify import ROUNDING, TOLERANCE, compare, leave_out_overflows
from runner.errors import RunFailed
from runner.report.comparison import computes_in_less, of_step
from strategies.capture import Objective, capture


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
    assert compare(found, truth, TOLERANCE["fp32"], ROUNDING["fp32"], frozenset()).passed == passed


@pytest.mark.parametrize(
    ("size", "error", "zero", "passed"),
    [
        (5e-4, 1e-6, False, False),
        (5e-4, 1e-6, True, True),  # fp64 has shown that it cancels out
        (5e-4, 1e-4, True, False),
        (1e-7, 1e-8, False, True),
        (1e-7, 1e-5, False, False),
    ],
)
def test_a_gradient_that_cancels_out_is_compared_relative_to_the_largest(
    tmp_path: Path, size: float, error: float, zero: bool, passed: bool
) -> None:
    found, truth = (
        recorded(tmp_path / name, {}, {"bias": torch.full((2,), value), "weight": torch.ones(2)})
        for name, value in (("ours", size + error), ("theirs", size))
    )
    zeros = frozenset({"bias"} if zero else ())
    comparison = compare(found, truth, TOLERANCE["fp32"], ROUNDING["fp32"], frozenset(), zeros)
    assert comparison.passed == passed and comparison.small == {"bias"}
    assert comparison.may_be_rounding != passed


def test_steps_that_overflow_in_fp16_are_left_out(tmp_path: Path) -> None:
    """Ranks overflow in other steps than one process, which are skipped; in all steps, nothing is left."""
    weights, ours, theirs = {"a": torch.ones(2)}, tmp_path / "ours", tmp_path / "theirs"
    for folder, value in ((ours, math.inf), (theirs, 1.0)):
        recorded(folder, weights, {"a": torch.full((2,), value)})
    with pytest.raises(RunFailed, match="overflow in fp16 in every step"):
        leave_out_overflows(ours, theirs)
    for folder, value in ((ours, math.inf), (theirs, 1.0)):
        for step, gradient in ((1, value), (2, 2.0)):
            torch.save({"loss": 1.0, "gradients": {"a": torch.full((2,), gradient)}}, folder / f"step-{step}.pt")
    assert not compare(ours, theirs, TOLERANCE["fp16"], ROUNDING["fp16"], frozenset()).passed
    assert leave_out_overflows(ours, theirs) == "1"
    comparison = compare(ours, theirs, TOLERANCE["fp16"], ROUNDING["fp16"], frozenset())
    assert comparison.passed and comparison.differences["grad", "a"] == 0


class Casts(nn.Module):
    """Computes in double precision but for its loss, for a parameter of complex numbers, or for a mask alone."""

    def __init__(self, less: str) -> None:
        super().__init__()
        self.less, self.dense = less, nn.Linear(4, 4)
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64)) if less == "turn" else 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = (self.dense(x) * (x > 0).float() * self.turn).abs()
        return (y.float() if self.less == "loss" else y).square().mean()


@pytest.mark.parametrize("less", ["loss", "turn", ""])
def test_what_a_model_itself_casts_to_less_is_compared_as_that(less: str) -> None:
    net = Casts(less).double()
    graph = capture(Objective(net, None, ("x",), ()), (torch.randn(4, 4).double(),), training=True).graph
    found = computes_in_less(graph)
    assert (
        (found is not None and found[0] == "fp32" and {"loss": "(to,", "turn": "turn"}[less] in found[1])
        if less
        else found is None
    )
    assert computes_in_less(None) is None


def test_other_weights_are_compared_relative_to_their_size(tmp_path: Path) -> None:
    found, truth = (
        recorded(tmp_path / name, {"mean": torch.full((2,), value), "norm.running_var": torch.ones(2)}, {})
        for name, value in (("ours", 1.1e-9), ("theirs", 1e-9))
    )
    comparison = compare(found, truth, TOLERANCE["fp32"], ROUNDING["fp32"], frozenset())
    assert comparison.differences["weight", "mean"] == pytest.approx(0.1, rel=1e-3)


def test_imaginary_parts_are_compared(tmp_path: Path) -> None:
    found, truth = (
        recorded(tmp_path / name, {"weight": torch.full((2,), value)}, {"weight": torch.full((2,), value)})
        for name, value in (("ours", 1.0 + 2.0j), ("theirs", 1.0 + 1.0j))
    )
    comparison = compare(found, truth, TOLERANCE["fp32"], ROUNDING["fp32"], frozenset())
    assert (
        comparison.differences["weight", "weight"]
        == comparison.differences["grad", "weight"]
        == pytest.approx(0.5**0.5)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("model", "operator"), [("Logarithm", "log"), ("Root", "sqrt")])
def test_numbers_that_are_not_finite_on_one_process_either(start, model: str, operator: str) -> None:
    words = (*SMALL, *MODES["data_parallel"], "world_size=2", f"model.target=hooked.{model}")
    with pytest.raises(RunFailed, match="not finite on one process") as found:
        start(*words, verb="verify")
    assert found.value.code == "MW719" and "hooked.py" in str(found.value)


@pytest.mark.parametrize(("gap", "passes"), [(4e-16, True), (4e-15, False)])
def test_gradients_that_nearly_cancel_may_differ_by_neighbouring_numbers(gap: float, passes: bool) -> None:
    """A scale before another batch norm: a millionth of the largest gradient, made of terms as large as that one."""
    largest, small = torch.tensor([1.0]), torch.tensor([1e-6], dtype=torch.float64)
    truth = {"loss": 1.0, "gradients": {"scale": small, "weight": largest}}
    sharded = {"loss": 1.0, "gradients": {"scale": small + gap, "weight": largest}}
    _, found = of_step(sharded, truth, 1e-10, 1e-12)
    assert (found["grad", "scale"] <= 1e-10) is passes
