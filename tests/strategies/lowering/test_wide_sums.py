"""Reductions across ranks accumulate in fp32: a sharded contraction in bf16 is rounded once, as on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from models.ffn import FFN
from strategies.capture import Captured, Objective, capture
from strategies.core.plan import Plan
from strategies.core.program import Compute, LoweringOptions, Program
from strategies.core.request import OperatorStrategy, Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.runtime.simulate import Simulation

SIZES = [96, 64, 48, 32, 4]
SLICED = {
    "dense1.matmul": OperatorStrategy(((2, 4), (4, 1)), None),
    "dense3.matmul": OperatorStrategy(((1, 8), (8, 1)), None),
}


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(32, SIZES[0], generator=draw).to(dtype), torch.randint(0, 4, (32,), generator=draw)


def net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return FFN(SIZES).to(dtype)


def captured(dtype: torch.dtype) -> Captured:
    step = Objective(net(dtype), nn.CrossEntropyLoss(), ("0", "1"), ("1",))
    return capture(step, batch(dtype), training=True)


def planned(seen: Captured) -> Plan:
    return make_plan(seen.graph, Request("auto", 8, strategies=SLICED))


def eager(dtype: torch.dtype) -> dict[str, Tensor]:
    model, (x, y) = net(dtype), batch(dtype)
    nn.functional.cross_entropy(model(x), y).backward()
    return {name: parameter.grad.double() for name, parameter in model.named_parameters() if parameter.grad is not None}


def gradients(seen: Captured, options: LoweringOptions, dtype: torch.dtype) -> dict[str, Tensor]:
    x, y = batch(dtype)
    values = {name: value.detach() for name, value in copy.deepcopy(seen.tensors).items()} | {"0": x, "1": y}
    simulation = Simulation(lower(seen.graph, planned(seen), options), values)
    (losses,) = simulation.run()
    simulation.backward(losses)
    return {name: gradient.double() for name, gradient in simulation.gradients().items()}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - one).abs().max() / one.abs().max()) for name, one in expected.items())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1.5e-2), (torch.float16, 1e-3)])
def test_gradients_are_those_of_one_device(dtype: torch.dtype, limit: float) -> None:
    """Through relus, which different rounding can flip."""
    seen, expected = captured(dtype), eager(dtype)
    assert worst(gradients(seen, LoweringOptions(), dtype), expected) < limit
    assert worst(gradients(seen, LoweringOptions(wide_sums=False), dtype), expected) > limit


def dtypes(program: Program, added: bool) -> list[str]:
    """The dtypes of forward redistributions with partial sums (`added`), or of those without."""
    pairs = [(r.spec.dtype, any(step.before.partial for step in r.forward)) for r in program.redistributions]
    return [dtype for dtype, partial in pairs if partial is added]


def test_only_sums_are_wide() -> None:
    seen = captured(torch.bfloat16)
    options = [LoweringOptions(partial_loss=True, wide_sums=on) for on in (True, False)]
    made, narrow = (lower(seen.graph, planned(seen), one) for one in options)
    assert set(dtypes(made, added=True)) == {"float32"} and "bfloat16" in dtypes(narrow, added=True)
    assert dtypes(made, added=False) == dtypes(narrow, added=False) and "bfloat16" in dtypes(made, added=False)


def test_nothing_is_cast_in_single_precision() -> None:
    seen = captured(torch.float32)
    program = lower(seen.graph, planned(seen), LoweringOptions(partial_loss=True))
    assert (
        program.instructions
        == lower(seen.graph, planned(seen), LoweringOptions(partial_loss=True, wide_sums=False)).instructions
    )
    assert not any(isinstance(one, Compute) and one.target == "aten.to.dtype" for one in program.instructions)
