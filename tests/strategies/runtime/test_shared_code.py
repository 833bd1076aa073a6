"""Layers with the same code share it: distinct code objects, process groups and compiled graphs do not grow with the
depth, and the results equal those of layers with separate code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from models.gpt import GPT
from models.losses import NextTokenLoss
from runner.training.execution import blamed
from strategies.capture import Captured, Objective, capture
from strategies.core.program import LoweringOptions
from strategies.core.request import OperatorStrategy, RecomputeRequest, Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.runtime import compiled, module_tree
from strategies.runtime import initial_weights as weights
from strategies.runtime.communicator import Communicator
from strategies.runtime.compiled import as_key
from strategies.runtime.module_tree import build
from strategies.runtime.slices import slices_of
from tests.ranks import start_ranks
from tests.strategies.compiled_entries import Case

TOKENS = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))
SELECTIVE = RecomputeRequest("selective", None, "keep", False)


def gpt(layers: int) -> Captured:
    torch.manual_seed(0)
    net = GPT(32, 8, 16, layers, 2, dropout=0.1, attention_dropout=0.1)
    return capture(Objective(net, NextTokenLoss(), ("0", "1"), ("1",)), (TOKENS, TOKENS), training=True)


def module_of(seen: Captured, recompute: RecomputeRequest | None = None, compiling: bool = False) -> fx.GraphModule:
    """The module of the one rank."""
    plan = make_plan(seen.graph, Request("data_parallel", 1, recompute=recompute))
    program = lower(seen.graph, plan, LoweringOptions(partial_loss=True))
    return build(program, slices_of(seen.tensors, program, 0), Communicator(program.mesh, 0), "cpu", compiled=compiling)


def units(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [unit for unit in module.modules() if isinstance(unit, fx.GraphModule)]


def codes(module: fx.GraphModule) -> int:
    return len({type(unit).forward.__code__ for unit in units(module)})


def ran(module: fx.GraphModule, key: Any) -> list[Tensor]:
    """The loss and every gradient."""
    module.zero_grad()
    loss = module(TOKENS, TOKENS, key)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [None, SELECTIVE, RecomputeRequest("full", None, "recompute", False)])
def test_codes_do_not_grow_with_the_depth(recompute: RecomputeRequest | None) -> None:
    small, large = (module_of(gpt(layers), recompute) for layers in (3, 8))
    assert codes(small) == codes(large) < 20
    assert len(units(large)) > 2 * codes(large)
    inner = [{unit.graph for unit in units(one) if unit is not one} for one in (small, large)]
    assert len(inner[0]) == len(inner[1])
    assert sum(len(graph.nodes) for graph in inner[0]) == sum(len(graph.nodes) for graph in inner[1])


@pytest.mark.parametrize("recompute", [None, SELECTIVE])
def test_numbers_are_those_of_layers_with_their_own_code(
    recompute: RecomputeRequest | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random operators draw other numbers in every layer; all layers have other weights."""
    seen = gpt(3)
    shared = module_of(seen, recompute)
    opaque = module_of(seen, compiling=True)
    monkeypatch.setattr(module_tree._Tree, "_form", lambda *_: object())
    alone = module_of(seen, recompute)
    assert codes(alone) == len(units(alone)) > codes(shared)
    assert [name for name, _ in shared.named_parameters()] == [name for name, _ in alone.named_parameters()]
    for key in (5, 6):
        truth = ran(alone, key)
        assert all(map(torch.equal, ran(shared, key), truth))
        assert all(map(torch.equal, ran(opaque, as_key(key)), truth))
    ordinals = {unit._own_0 for name, unit in shared.named_modules() if name.endswith("feed_forward_dropout")}
    assert len(ordinals) == 3


class Scaled(nn.Module):
    def __init__(self, by: Any) -> None:
        super().__init__()
        self.by, self.inner = by, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.inner.weight).mul(self.by).tanh()


def stacked(*factors: Any) -> fx.GraphModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), *(Scaled(by) for by in factors))
    seen = capture(Objective(net, nn.MSELoss(), ("0", "1"), ("1",)), (torch.ones(2, 4),) * 2, training=True)
    return module_of(seen)


def test_different_layers_share_no_code() -> None:
    same, other = stacked(2.0, 2.0), stacked(2.0, 2)
    kinds = [[type(one.get_submodule(str(layer))) for layer in (1, 2)] for one in (same, other)]
    assert kinds[0][0] is kinds[0][1] and kinds[1][0] is not kinds[1][1]
    uses = [next(unit for unit in units(same.get_submodule(layer)) if "use_" in type(unit).__name__) for layer in "12"]
    assert type(uses[0]) is type(uses[1])  # of a parameter that belongs to another module
    assert [next(unit.parameters()) for unit in uses] == [same.get_parameter(f"{layer}.inner.weight") for layer in "12"]


def test_an_error_names_the_operator_of_its_own_layer() -> None:
    seen = gpt(3)
    module = module_of(seen)
    first, second = (module.get_submodule(f"layers.{layer}.feed_forward.up_proj") for layer in (1, 2))
    assert type(first) is type(second)
    for layer, unit in ((1, first), (2, second)):
        kept, unit.weight = unit.weight, nn.Parameter(torch.zeros(3, 5))
        with pytest.raises(RuntimeError) as raised:
            module(TOKENS, TOKENS, 1)
        unit.weight = kept
        assert (blamed(raised.value, seen.graph) or "").startswith(f"layers.{layer}.feed_forward.up_proj ")


def planned(layers: int, folder: Any) -> Case:
    """A GPT with weights sliced over 2 ranks."""
    seen = gpt(layers)
    columns = OperatorStrategy(((1, 1, 1), (1, 2)), None)
    wanted = {"layers.*.feed_forward.up_proj.matmul": columns, "layers.*.attention.[qkv]_proj.matmul": columns}
    plan = make_plan(seen.graph, Request("auto", 2, strategies=wanted))
    file = folder / f"{layers}.pt"
    weights.write(file, seen.tensors)
    return Case(seen.graph, plan, file, {"0": TOKENS, "1": TOKENS})


@pytest.mark.slow
def test_compiled_graphs_and_groups_do_not_grow_with_the_depth(tmp_path: Any) -> None:
    entry = "tests.strategies.compiled_entries:depths"
    cases = [planned(layers, tmp_path) for layers in (5, 8)]
    small, large = start_ranks(entry, cases, 2, tmp_path, timeout=200.0)
    assert small == large
    assert 1 < small["graphs"] <= 12 and small["groups"] == 1 and small["breaks"] == 0


def test_layers_that_repeat_are_the_parts_that_are_compiled() -> None:
    module = module_of(gpt(6), compiling=True)
    names = {unit: name for name, unit in module.named_modules()}
    parts = [names[unit] for unit in compiled._chosen(module, at_once=0)]
    assert {f"layers.{layer}" for layer in range(6)} <= set(parts) and "" not in parts
    few = module_of(gpt(2), compiling=True)
    assert list(compiled._chosen(few, at_once=0)) == [few]
    assert list(compiled._chosen(module, at_once=compiled.AT_ONCE)) == [module]
