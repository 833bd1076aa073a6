"""Recomputed modules: bitwise equal gradients, fewer bytes between forward and backward, exactly as many as
predicted; saved operators and collectives run once."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.gpt import GPT
from models.losses import NextTokenLoss
from strategies.capture import Captured, Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions
from strategies.core.request import OperatorStrategy, RecomputeRequest, Request
from strategies.lowering.lowering import lower
from strategies.memory.trace import saved_tensors, trace
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.description import describe
from strategies.planner.planner import make_plan
from strategies.runtime import initial_weights as weights
from strategies.runtime.communicator import Communicator
from strategies.runtime.module_tree import build
from tests.ranks import start_ranks
from tests.strategies.machines import cluster
from tests.strategies.recomputed_entries import Case, Ran

POLICIES = {
    "full": RecomputeRequest("full"),
    "kept collectives": RecomputeRequest("full", communication="keep"),
    "selective": RecomputeRequest("selective"),
    "repeated collectives": RecomputeRequest("selective", communication="recompute"),
    "kinds": RecomputeRequest(("gelu", "layer_norm")),
    "modules": RecomputeRequest("full", ("layers.*.feed_forward", "norm")),
    "sliced": RecomputeRequest("full", slice_inputs=True),
    "selective sliced": RecomputeRequest("selective", slice_inputs=True),
}
LAYERS = ("layers.0", "layers.1")


def captured(model: nn.Module, *batch: Tensor) -> Captured:
    return capture(Objective(model, NextTokenLoss(), ("0", "1"), ("1",)), batch, training=True)


@pytest.fixture(scope="module")
def gpt() -> Captured:
    torch.manual_seed(0)
    tokens = torch.randint(0, 32, (4, 16))
    return captured(GPT(32, 16, 16, 2, 2, dropout=0.2, attention_dropout=0.1), tokens, tokens.roll(1))


def planned(found: Captured, wanted: RecomputeRequest | None, world_size: int = 1) -> Plan:
    return make_plan(found.graph, Request("data_parallel", world_size, recompute=wanted))


def step(found: Captured, plan: Plan, *batch: Tensor, steps: int = 1) -> tuple[float, dict[str, Tensor], int]:
    """Loss, every gradient (and buffer), and the bytes stored between forward and backward, on one rank."""
    program = lower(found.graph, plan, LoweringOptions(partial_loss=True))
    trainable = {source.name for source in program.sources if source.trainable}
    tensors = {name: nn.Parameter(t.clone()) if name in trainable else t.clone() for name, t in found.tensors.items()}
    module = build(program, tensors, Communicator(plan.mesh, 0), "cpu")
    stored, loss = 0, torch.zeros(())
    for key in range(steps):
        with saved_tensors([*tensors.values(), *batch]) as saved:
            loss = module(*batch, *([key] if program.random else []))
        stored = sum(saved.values())
        del saved
        loss.backward()
    kept = {name: one for name, one in tensors.items() if name not in trainable}
    return loss.item(), {name: tensors[name].grad for name in trainable} | kept, stored


def batch_of(found: Captured) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 32, (4, 16), generator=torch.Generator().manual_seed(3))
    return tokens, tokens.roll(1)


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_equal_to_the_bit_and_bytes_are_those_predicted(gpt, policy):
    batch = batch_of(gpt)
    loss, truth, without = step(gpt, planned(gpt, None), *batch, steps=2)
    plan = planned(gpt, POLICIES[policy])
    found_loss, found, stored = step(gpt, plan, *batch, steps=2)
    assert found_loss == loss
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[name], truth[name]) for name in truth)
    assert stored < without
    assert stored == trace(lower(gpt.graph, plan, LoweringOptions(partial_loss=True)), OptimizerSettings()).activations


def test_full_recompute_stores_layer_inputs_and_tensors_outside_of_layers(gpt):
    batch = batch_of(gpt)
    _, _, stored = step(gpt, planned(gpt, POLICIES["full"]), *batch)
    row = 4 * 16 * 16 * 4  # one value of batch x length x width
    outside = 4 * 16 * 16 + row + 2 * 4 * 16 * 4 + row + 4 * 16 * 32 * 4 * 2 + 16 * 8  # masks, norms, logits, positions
    assert 2 * row < stored < 2 * row + outside + 4 * row


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.name().partition("::")[2].partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def calls(found: Captured, wanted: RecomputeRequest | None) -> Counter[str]:
    with Calls() as mode:
        step(found, planned(found, wanted), *batch_of(found))
    return mode.count


def test_saved_operators_run_once(gpt):
    plain, full, selective = (calls(gpt, wanted) for wanted in (None, POLICIES["full"], POLICIES["selective"]))
    products = {"addmm", "mm", "bmm"}
    assert sum(full[name] for name in products) > sum(plain[name] for name in products)
    assert {name: selective[name] for name in products} == {name: plain[name] for name in products}
    assert selective["gelu"] == 2 * plain["gelu"] == full["gelu"]
    assert selective["native_layer_norm"] == plain["native_layer_norm"] + 4
    kinds = calls(gpt, POLICIES["kinds"])
    assert kinds["rand"] == plain["rand"]
    assert full["rand"] > plain["rand"]


class Repeated(nn.Module):
    """A buffer that is written, a module that is called twice, several results, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(Half() for _ in range(3))
        self.head = nn.Linear(8, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.head(x)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm1d(16), nn.Sequential(nn.Linear(8, 8), nn.Softplus())

    def forward(self, x: Tensor) -> Tensor:
        best, where = self.norm(x).sort(-1)
        left, right = self.inner(best).split(4, -1)
        return x + torch.cat([right * left.exp(), left], -1).gather(-1, where).softmax(-1) + F.relu(x)


@pytest.mark.few(1)
@pytest.mark.parametrize("operators", ["full", "selective", ("split", "sort", "softmax"), ("exp", "linear")])
def test_written_buffers_shared_modules_and_several_results(operators):
    torch.manual_seed(1)
    batch = batch_of(None)
    found = captured(Repeated(), *batch)
    _, truth, without = step(found, planned(found, None), *batch, steps=2)
    plan = planned(found, RecomputeRequest(operators, ("blocks.*",)))
    _, again, stored = step(found, plan, *batch, steps=2)
    assert "blocks.0.norm.running_mean" in truth
    for name, value in truth.items():
        assert torch.equal(again[name], value), name
    assert stored < without
    assert (
        stored == trace(lower(found.graph, plan, LoweringOptions(partial_loss=True)), OptimizerSettings()).activations
    )


def test_nothing_stays_after_backward(gpt):
    program = lower(gpt.graph, planned(gpt, POLICIES["selective"]), LoweringOptions(partial_loss=True))
    trainable = {source.name for source in program.sources if source.trainable}
    tensors = {name: nn.Parameter(t.clone()) if name in trainable else t for name, t in gpt.tensors.items()}
    module, alive = build(program, tensors, Communicator(program.mesh, 0), "cpu"), []

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = func(*args, **(kwargs or {}))
            found = results if isinstance(results, (tuple, list)) else (results,)
            alive.extend(weakref.ref(one.untyped_storage()) for one in found if isinstance(one, Tensor))
            return results

    gc.disable()
    try:
        with Made():
            loss = module(*batch_of(gpt), 3)
            still_alive = sum(ref() is not None for ref in alive)
            loss.backward()
            del loss
        left = {ref().data_ptr() for ref in alive if ref() is not None}
    finally:
        gc.enable()
    own = {one.untyped_storage().data_ptr() for one in tensors.values()}
    own |= {one.grad.untyped_storage().data_ptr() for one in tensors.values() if one.grad is not None}
    assert still_alive > 10
    assert left <= own


def test_recomputation_is_part_of_the_plan(gpt):
    plan = planned(gpt, POLICIES["selective"])
    assert plan.recompute is not None
    assert plan.recompute.modules == LAYERS
    assert {name.rpartition(".")[2] for name in plan.recompute.kept} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "scaled_dot_product_attention"
    }  # fmt: skip
    assert plan.recompute.keeps_communication
    assert Plan.from_json(plan.to_json()) == plan
    assert planned(gpt, None).recompute is None
    assert planned(gpt, RecomputeRequest("full", ("layers.*", "layers.0.attention"))).recompute.modules == LAYERS
    kinds = planned(gpt, POLICIES["kinds"]).recompute
    assert "layers.0.feed_forward.gelu" not in kinds.kept
    assert "layers.0.feed_forward_dropout" in kinds.kept


def test_the_plan_reports_the_bytes(gpt):
    plan = planned(gpt, POLICIES["full"])
    program = lower(gpt.graph, plan, LoweringOptions(partial_loss=True))
    content = describe(gpt.graph, plan, program, settings=OptimizerSettings(), cluster=cluster(8))
    without = trace(replace(program, recompute=None), OptimizerSettings())
    entry = content["recompute"]
    assert entry["modules"] == LAYERS
    traced = trace(program, OptimizerSettings())
    assert entry["stored_bytes"] == traced.activations < without.activations
    assert content["memory"]["activations"] == traced.kept < without.kept  # the batch and the loss are there too
    assert entry["stored_bytes_without"] == without.activations
    assert entry["sent_again_bytes"] == 0


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (
            RecomputeRequest("full", ("layer.*",)),
            r"^parallel.recompute.modules: 'layer.\*' matches no module .* Did you",
        ),
        (RecomputeRequest(("gelu", "relu")), r"^parallel.recompute.operators: no operator of kind 'relu' is in .*gelu"),
        (RecomputeRequest(("embedding",)), r"no operator of kind 'embedding'"),
    ],
)
def test_globs_and_kinds_that_match_nothing(gpt, wanted, text):
    with pytest.raises(StrategyError, match=text):
        planned(gpt, wanted)


def test_a_model_without_repeated_layers_needs_modules():
    tokens = torch.randint(0, 32, (4, 16))
    found = captured(nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 32)), tokens, tokens)
    with pytest.raises(StrategyError, match=r"no repeated layers .* parallel.recompute.modules must name"):
        planned(found, RecomputeRequest("full"))


@pytest.fixture(scope="module")
def ran(gpt, tmp_path_factory) -> dict[str | None, list[Ran]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    weights.write(folder / "weights.pt", gpt.tensors)
    columns, rows = OperatorStrategy(((1, 1, 1), (1, 2)), None), OperatorStrategy(((1, 1, 2), (2, 1)), None)
    strategies = {
        "layers.*.attention.[qkv]_proj.matmul": columns, "layers.*.attention.o_proj.matmul": rows,
        "layers.*.feed_forward.up_proj.matmul": columns, "layers.*.feed_forward.down_proj.matmul": rows,
        "layers.*.add": OperatorStrategy(((1, 1, 1), (1, 1, 1)), None), "dropout": OperatorStrategy(((1, 1, 1),), None),
        "layers.*.*_dropout": OperatorStrategy(((1, 1, 1),), None),
    }  # fmt: skip
    request = Request("auto", 2, strategies=strategies)
    plans = [make_plan(gpt.graph, replace(request, recompute=wanted)) for wanted in (None, *POLICIES.values())]
    tokens, labels = batch_of(gpt)
    case = Case(gpt.graph, plans, folder / "weights.pt", {"0": tokens, "1": labels})
    found = start_ranks("tests.strategies.recomputed_entries:steps", case, 2, folder, timeout=60.0)
    return dict(zip([None, *POLICIES], found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_on_real_ranks_gradients_bytes_stored_and_bytes_sent(ran, policy):
    for truth, found in zip(ran[None], ran[policy], strict=True):
        assert found.loss == truth.loss
        assert found.gradients.keys() == truth.gradients.keys()
        assert all(torch.equal(found.gradients[name], one) for name, one in truth.gradients.items())
        assert found.stored < truth.stored
        for one in (found, truth):
            assert abs(one.stored - one.predicted_stored) <= 4  # a number that torch keeps as a tensor of one element
        assert found.sent == found.predicted_sent


@pytest.mark.slow
def test_collectives_are_repeated_or_kept(ran):
    sent = {policy: sum(found[0].sent.values()) for policy, found in ran.items()}
    stored = {policy: found[0].stored for policy, found in ran.items()}
    assert sent["kept collectives"] == sent["selective"] == sent[None] < sent["full"]
    assert sent["repeated collectives"] > sent["selective"]
    assert stored["full"] < stored["kept collectives"]
    assert stored["sliced"] < stored["full"]
    assert sent["sliced"] > sent["full"]


def test_modules_that_compute_with_a_buffer_that_the_step_writes_are_left_out() -> None:
    """The power iteration of a spectral norm; the statistics of a batch norm are those of the batch."""

    def layer(linear: nn.Module) -> nn.Module:
        return nn.Sequential(linear, nn.BatchNorm1d(8), nn.Tanh())

    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    net = nn.Sequential(layer(nn.Linear(8, 8)), layer(normed), layer(nn.Linear(8, 8)))
    batch = torch.randn(8, 8), torch.randn(8, 8)
    graph = capture(Objective(net, nn.MSELoss(), ("0", "1"), ("1",)), batch, training=True).graph
    plan = make_plan(graph, Request("data_parallel", 2, recompute=RecomputeRequest("full")))
    assert plan.recompute is not None and plan.recompute.modules == ("0", "2")
    with pytest.raises(StrategyError, match=r"1 cannot be recomputed, as forward computes with a buffer") as caught:
        make_plan(graph, Request("data_parallel", 2, recompute=RecomputeRequest("full", ("1",))))
    assert caught.value.code == "MW441"
