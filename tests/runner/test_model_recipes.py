"""The recipes of full architectures and of known plans: each agrees with one process, uses the known collectives, and
trains."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import hydra
import pytest
import torch

from runner.build.modules import cast, objective
from runner.cli import recipes
from runner.config import load as config
from runner.config.origins import Origins
from runner.data.loader import flatten_batch, global_batch
from runner.planning.datasets import datasets
from runner.planning.sources import request_of
from strategies.capture import capture, loss_in
from strategies.core.program import LoweringOptions, Program
from strategies.core.steps import LOCAL
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.runtime.simulate import Simulation

TEXT = ("gpt", "llama", "moe", "megatron_tp", "megatron_sp", "mesh_3d", "vocab_ffn", "gpt_padded")
"""Recipes on text, of which tests need little."""
DIGITS = ("resnet", "vit", "mesh_2d", "boundary", "mae_784")
DROPOUT = ("gpt", "megatron_tp", "megatron_sp", "vit")
RANKS = 8


class Simulated:
    """A recipe in double precision, with one layer and without dropout, lowered for simulated ranks."""

    def __init__(self, name: str) -> None:
        changes = [f"+recipe={name}", "train.precision=fp64"]
        if name in TEXT:
            changes.append("+data.args.limit=200000")
        if (name in TEXT and name != "vocab_ffn") or name == "vit":
            changes.append("model.args.layers=1")
        if name in DROPOUT:
            changes.append("model.args.dropout=0")
        recipes.register()
        with hydra.initialize_config_module("conf", version_base="1.3"):
            made = config.load(hydra.compose("config", changes), Origins(changes))
        dataset, _, collate = datasets(made)
        names, tensors = flatten_batch(global_batch(dataset, collate, range(made.data.batch_size)))
        self.batch = cast(tensors, torch.float64)
        self.step = objective(made, names)
        captured = capture(self.step, self.batch, training=True)
        self.plan = make_plan(captured.graph, request_of(made, RANKS))
        self.program: Program = lower(captured.graph, self.plan, LoweringOptions())
        # clones, because the eager step writes buffers
        self.values = {name: tensor.detach().clone() for name, tensor in captured.tensors.items()}
        self.values |= dict(zip(names, self.batch, strict=True))

    def differences(self) -> dict[str, float]:
        """The errors of the loss and of every gradient, relative to the largest element of the eager one."""
        simulation = Simulation(self.program, self.values)
        (losses,) = simulation.run()
        simulation.backward(losses)
        loss: Any = loss_in(self.step(*self.batch))
        loss.backward()
        truth = {name: parameter.grad for name, parameter in self.step.model.named_parameters()}
        found = simulation.gradients()
        assert found.keys() == truth.keys()
        gaps = {"loss": max(abs(one.item() - loss.item()) / loss.item() for one in losses)}
        rounding = 1e-6 * max(one.abs().max().item() for one in truth.values())
        for name, expected in truth.items():  # the bias of keys has zero gradient: softmax ignores it
            gap = (found[name] - expected).abs().max().item()
            gaps[name] = gap / max(expected.abs().max().item(), rounding)
        return gaps

    def collectives(self, inside: str) -> tuple[dict[str, int], dict[str, int]]:
        """Count the forward and backward collectives of activations at operators whose names start with `inside`."""
        parameters = {source.id for source in self.program.sources if source.kind == "parameter"}
        forward: Counter[str] = Counter()
        backward: Counter[str] = Counter()
        for one in self.program.redistributions:
            if one.operator.startswith(inside) and one.value.id not in parameters:
                forward.update(step.kind for step in one.forward if step.kind not in LOCAL)
                backward.update(step.kind for step in one.backward if step.kind not in LOCAL)
        return dict(forward), dict(backward)


simulated = cache(Simulated)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*TEXT, *DIGITS])
def test_one_process_agrees(name: str) -> None:
    assert max(simulated(name).differences().values()) <= 1e-10


def test_tensor_parallel_layers_have_two_all_reduces_each_way() -> None:
    assert simulated("megatron_tp").collectives("layers.0") == ({"all_reduce": 2}, {"all_reduce": 2})
    layouts = simulated("megatron_tp").plan.tensors
    assert str(layouts["tokens.weight"]) == "(tp, -)"
    assert str(layouts["layers.0.attention.q_proj.weight"]) == "(tp, -)"
    assert str(layouts["layers.0.attention.o_proj.weight"]) == "(-, tp)"


def test_with_sequence_parallelism_they_are_pairs_of_gather_and_scatter() -> None:
    pairs = {"all_gather": 2, "reduce_scatter": 2}
    assert simulated("megatron_sp").collectives("layers.0") == (pairs, pairs)


def test_the_vocabulary_stays_sliced_through_the_loss() -> None:
    """No logits are gathered; the loss itself communicates one number per token."""
    for name in ("megatron_tp", "vocab_ffn"):
        program = simulated(name).program
        sent = [one for one in program.redistributions if one.operator.startswith("loss")]
        logits = [one for one in sent if len(one.spec.shape) == 3]
        assert not logits, name


def test_tokens_travel_to_their_experts_and_back() -> None:
    both = {"all_to_all": 2}
    assert simulated("moe").collectives("layers.0.feed_forward.experts.up_proj") == (
        {"all_to_all": 1},
        {"all_to_all": 1},
    )
    assert simulated("moe").collectives("layers.0.feed_forward.combine") == ({"all_to_all": 1}, {"all_to_all": 1})
    forward, backward = simulated("moe").collectives("layers.0")
    assert {kind: count for kind, count in forward.items() if kind != "all_reduce"} == both
    assert {kind: count for kind, count in backward.items() if kind != "all_reduce"} == both
    assert str(simulated("moe").plan.tensors["layers.0.feed_forward.experts.up_proj.weight"]) == "(d0, -, -)"


@pytest.mark.slow
def test_experts_on_three_axes() -> None:
    plan = simulated("mesh_3d").plan
    assert plan.mesh.axes == (("dp", 2), ("ep", 2), ("tp", 2))
    assert str(plan.tensors["layers.0.feed_forward.experts.up_proj.weight"]) == "(ep, -, tp)"
    assert str(plan.tensors["layers.0.feed_forward.experts.down_proj.weight"]) == "(ep, tp, -)"
    forward, _ = simulated("mesh_3d").collectives("layers.0.feed_forward.experts.up_proj")
    assert forward == {"all_to_all": 1}


@pytest.mark.slow
def test_the_boundary_gathers_rows_forward_and_scatters_gradients_back() -> None:
    boundary = simulated("boundary")
    assert boundary.collectives("dense3") == ({"all_gather": 1}, {"reduce_scatter": 1})
    assert [boundary.collectives(name) for name in ("dense1", "dense2")] == [({}, {}), ({}, {})]


def test_columns_and_rows_need_one_sum_for_two_layers() -> None:
    assert simulated("mesh_2d").collectives("dense2") == ({}, {})
    assert simulated("mesh_2d").collectives("dense3") == ({}, {"all_reduce": 1})
    assert simulated("mesh_2d").collectives("relu@1") == ({"all_reduce": 1}, {})


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "gpt_padded" else pytest.mark.slow) for n in (*TEXT, *DIGITS)]
)
def test_processes_agree(start, tmp_path, name: str) -> None:
    limit = [f"+data.args.cache={tmp_path}", "+data.args.limit=200000"] if name in TEXT else []
    ended = start(f"+recipe={name}", "verify.steps=2", *limit, verb="verify")
    assert ended.verdict["passed"] and ended.value <= (1e-10 if name == "resnet" else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TEXT, *DIGITS])
def test_the_loss_falls(start, tmp_path, name: str) -> None:
    limit = [f"+data.args.cache={tmp_path}", "+data.args.limit=200000"] if name in TEXT else []
    ended = start(f"+recipe={name}", "train.steps=30", "train.log_every=100", *limit)
    assert sum(ended.losses[-5:]) < 0.9 * sum(ended.losses[:5])
