"""The content of plan.json: the keys that scripts rely on, and predictions that match real ranks."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.quickstart import Net as Quickstart
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions
from strategies.core.request import OperatorStrategy, Request
from strategies.lowering.lowering import lower
from strategies.optimizer.buckets import predicted as predicted_gradients
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.zero import traffic as zero_traffic
from strategies.planner.description import communication, describe
from strategies.planner.planner import make_plan
from strategies.runtime import initial_weights as weights
from tests.ranks import start_ranks
from tests.strategies.machines import cluster
from tests.strategies.on_ranks import Case, Result
from tests.strategies.simulated_model import TOLERANCE, Model


class Awkward(nn.Module):
    """Comparisons, no_grad, a tied and a frozen weight, a foreign weight, several results, a buffer that is written, an
    operator without a rule, a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.dense, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)
        self.spare = nn.Linear(2, 2)
        self.head.weight = self.emb.weight
        self.head.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        h = self.dense(self.emb(x))
        a, b = (h * (h > 0)).chunk(2, -1)
        h = torch.renorm(torch.cat([a, b.exp()], -1), 2, 0, 1.0)
        with torch.no_grad():
            scale = h.abs().amax()
        h = F.linear(h / scale, self.dense.weight.t()) * self.calls
        return self.head(self.dense(h)).transpose(1, 2)


def awkward() -> Model:
    torch.manual_seed(0)
    tokens = torch.randint(0, 16, (8, 4))
    return Model(Awkward(), nn.CrossEntropyLoss(), (tokens, tokens.roll(1, 1)))


def quickstart() -> tuple[Model, Plan]:
    torch.manual_seed(0)
    model = Model(Quickstart(), nn.MSELoss(), (torch.randn(16, 32), torch.randn(16, 16)))
    return model, make_plan(
        model.graph, Request("auto", 8, strategies={"matmul": OperatorStrategy(((2, 4), (4, 1)), None)})
    )


def described(model: Model, plan: Plan, **options: Any) -> dict[str, Any]:
    keywords = {"cluster": cluster(2, 8), "settings": OptimizerSettings(**options)}
    return json.loads(
        json.dumps(
            describe(model.graph, plan, lower(model.graph, plan, LoweringOptions(partial_loss=True)), **keywords)
        )
    )


def test_keys_that_scripts_rely_on() -> None:
    content = described(*quickstart())
    assert content["mesh"] == {"d0": 2, "d1": 4}
    assert [operator["name"] for operator in content["operators"]] == [
        "matmul",
        "relu",
        "matmul2",
        "loss.broadcast_tensors",
        "loss.mse_loss",
    ]
    first, relu, second = content["operators"][:3]
    assert (first["in_strategy"], first["out_strategy"], first["origin"]) == ([[2, 4], [4, 1]], [[2, 1]], "configured")
    assert first["device_matrix"] == [2, 4, 1]
    assert (relu["module"], relu["op"], relu["in_strategy"], relu["origin"]) == ("relu", "relu", [[2, 4]], "propagated")
    assert second["in_strategy"] == [[2, 4], [4, 1]] and second["local_shapes"] == [[8, 4], [4, 16]]
    assert first["source"].startswith("models/matmul.py:")
    (change,) = relu["redistributions"]
    assert change["operand"] == 0
    assert change["forward"] == [
        {"step": "reduce_scatter dim 1 over d1", "collective": "reduce_scatter", "group": [0, 1, 2, 3], "bytes": 768}
    ]
    assert change["backward"] == [
        {"step": "all_gather dim 1 over d1", "collective": "all_gather", "group": [0, 1, 2, 3], "bytes": 768}
    ]
    weight = content["parameters"]["matmul.weight"]
    assert (weight["shape"], weight["local_shape"]) == ([32, 16], [8, 16])
    assert (weight["replica_group_size"], weight["replica_group"]) == (2, [0, 4])
    assert set(content["search"]) == {"algorithm", "seconds", "cost", "lower_bound", "propagation"}
    cost = content["cost"]
    assert cost["total"] == cost["compute"] + cost["communication"] + cost["optimizer"]
    assert cost["compute"] == cost["forward"] + cost["backward"] + cost["recomputed"]
    assert cost["communication"] == sum(cost["redistributions"].values()) + cost["gradients_exposed"]
    assert content["memory"]["parameters"] == (8 * 16 + 4 * 16) * 8
    memory = content["memory"]
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
    assert memory["total"] == sum(memory[part] for part in parts)
    assert memory["held"] < memory["peak"] == memory["peaks"][memory["peak_in"]] <= 2 * memory["total"]
    assert content["unsliced"] == []


def test_the_plan_can_be_read_from_its_description() -> None:
    model, plan = quickstart()
    assert Plan.from_json(described(model, plan)) == plan


def test_torch_order_and_devices_left_over() -> None:
    """`dense.matmul` is written x [m, k], w [k, n]; plan.json gives the linear operator's own operands."""
    torch.manual_seed(0)
    model = Model(nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.MSELoss(), (torch.randn(16, 16), torch.randn(16, 32)))
    plan = make_plan(
        model.graph, Request("semi_auto", 16, strategies={"0.matmul": OperatorStrategy(((2, 1), (1, 4)), ((2, 4),))})
    )
    (linear, *_) = described(model, plan)["operators"]
    assert linear["in_strategy"] == [[2, 1], [4, 1], [4]]
    assert linear["device_matrix"] == [2, 1, 4, 2]
    assert linear["out_strategy"] == [[2, 4]]


def test_operators_without_a_rule_are_listed() -> None:
    model = awkward()
    content = described(model, make_plan(model.graph, Request("semi_auto", 4)))
    assert any(text.startswith("renorm (renorm, planner/test_description.py:") for text in content["unsliced"])
    assert content["parameters"]["emb.weight"]["aliases"] == ["head.weight"]
    assert not content["parameters"]["head.bias"]["trainable"]


def test_bytes_are_the_sum_of_the_parts() -> None:
    model, plan = quickstart()
    program = lower(model.graph, plan, LoweringOptions(partial_loss=True))
    content = described(model, plan)
    parts = Counter({"all_reduce": 8 * 2})  # the loss: one double over eight ranks, 14 / 8 elements rounded up
    parts.update(predicted_gradients(program, measure=False))
    for operator in content["operators"]:
        for change in operator["redistributions"]:
            for step in (*change["forward"], *change["backward"]):
                parts[step["collective"]] += step["bytes"]
    assert content["communication"] == {kind: sent for kind, sent in parts.items() if sent}


def test_micro_batches_and_stages() -> None:
    model, plan = quickstart()
    program = lower(model.graph, plan, LoweringOptions(partial_loss=True))
    once, thrice = communication(program, OptimizerSettings()), communication(program, OptimizerSettings(accumulate=3))
    assert thrice["reduce_scatter"] == 3 * once["reduce_scatter"]
    assert thrice["all_reduce"] == once["all_reduce"]  # the gradients and the loss, once per step
    sums = predicted_gradients(program, measure=False)["all_reduce"]
    sharded = lower(model.graph, plan, LoweringOptions(sharded_optimizer=True, partial_loss=True))
    zero = communication(sharded, OptimizerSettings(1))
    assert zero["all_reduce"] - zero_traffic.predicted(sharded, 1)["all_reduce"] == once["all_reduce"] - sums
    compute, accumulated = (described(model, plan, accumulate=count)["cost"]["compute"] for count in (1, 3))
    assert accumulated == pytest.approx(3 * compute)
    sharded = described(model, plan, stage=3)["memory"]
    assert sharded["parameters"] == (8 * 16 + 4 * 16) * 8 // 2


# --- on real ranks

SEEDS = range(6)


@pytest.fixture(scope="module")
def executed(draw: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, list[Plan], list[Result]]:
    model, folder = awkward(), tmp_path_factory.mktemp("run")
    file = folder / "initial.pt"
    weights.write(file, {name: model.values[name] for name in model.captured.tensors})
    plans = [model.random_plan(draw, seed) for seed in SEEDS] + [make_plan(model.graph, Request("semi_auto", 4))]
    batch = dict(zip(("0", "1"), model.batch, strict=True))
    cases = [Case(model.graph, plan, file, batch) for plan in plans]
    return (
        model,
        plans,
        start_ranks("tests.strategies.on_ranks:steps", cases, 4, folder),
    )


@pytest.mark.slow
def test_predicted_bytes_are_sent(executed: tuple[Model, list[Plan], list[Result]]) -> None:
    model, plans, results = executed
    for plan, result in zip(plans, results, strict=True):
        assert result.predicted == result.sent  # per rank and collective
        program = lower(model.graph, plan, LoweringOptions(partial_loss=True))
        predicted = Counter(communication(program, OptimizerSettings()))
        predicted.subtract(predicted_gradients(program, measure=False))
        for kind in {kind for rank in result.sent for kind in rank}:
            most = max(rank.get(kind, 0) for rank in result.sent) + (
                12 if kind == "all_reduce" and program.loss_axes else 0
            )
            if kind != "exchange":
                assert abs(predicted[kind] - most) <= 8  # the loss is counted by the runner: 8 to 12 bytes
            else:
                assert predicted[kind] >= most  # step by step, the busiest rank


def test_real_ranks_train_like_the_model(executed: tuple[Model, list[Plan], list[Result]]) -> None:
    model, _, results = executed
    for result in results:
        assert abs(result.loss - model.loss.item()) < TOLERANCE
        assert result.gradients.keys() == model.gradients.keys()
        for name, found in result.gradients.items():
            truth = model.gradients[name]
            assert (found - truth).abs().max() <= TOLERANCE * truth.abs().max().clamp_min(1e-3)


def test_real_ranks_keep_names_and_order(executed: tuple[Model, list[Plan], list[Result]]) -> None:
    model, _, results = executed
    expected = [name for name, _ in model.net.named_parameters()]
    assert all(result.names == expected for result in results)
