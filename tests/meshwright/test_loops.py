"""A plan in a loop of the user's own: four real ranks, compared with one device in fp64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import SECTIONS, Loop, fused, gpt, interleaved, next_token, tokens

import meshwright

MEGATRON = {
    "layers.*.attention.[qkv]_proj.matmul": [[2, 1, 1], [1, 2]],
    "layers.*.attention.o_proj.matmul": [[2, 1, 2], [2, 1]],
    "layers.*.feed_forward.up_proj.matmul": [[2, 1, 1], [1, 2]],
    "layers.*.feed_forward.down_proj.matmul": [[2, 1, 2], [2, 1]],
    "head.matmul": [[2, 1, 1], [1, 2]],
}
CASES = {
    "named mesh": Loop({"mesh": {"dp": 2, "tp": 2}, "strategies": MEGATRON}, grid=(2, 2), local=True),
    "accumulated": Loop({"mesh": 4, "mode": "data_parallel"}, backwards=2, clip=0.1),
}
ZERO = {stage: Loop({"mesh": {"dp": 2, "tp": 2}, "zero": stage}, dtype=torch.float32) for stage in (1, 2, 3)}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_a_loop_trains_as_one_device(on_ranks: Callable[..., Any], name: str) -> None:
    worst = on_ranks("compared", CASES[name])
    assert max(worst.values()) < 1e-10, worst


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loop_under_zero_trains_as_one_device(on_ranks: Callable[..., Any], stage: int) -> None:
    worst = on_ranks("compared", ZERO[stage])
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.slow
def test_states_move_between_plans_and_stages(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    sliced = {"mesh": {"dp": 2, "tp": 2}, "strategies": MEGATRON}
    plans = [{**sliced, "zero": 2}, {"mesh": 4, "mode": "data_parallel"}, {**sliced, "zero": 3}, sliced]
    assert on_ranks("travelled", (tmp_path, plans)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fused_weights_are_trained_in_stripes(on_ranks: Callable[..., Any], stage: int) -> None:
    mesh = {"dp": 2, "tp": 2}
    options = {"mesh": mesh, "strategies": SECTIONS, "zero": stage}
    plan = meshwright.plan(fused(), tokens(), loss=next_token, plan_cache=None, **options)
    taken = {
        one["name"]: one["redistributions"] for one in plan.content["operators"] if one["op"] in ("split", "chunk")
    }
    assert list(taken.values()) == [[], []]  # sections are taken apart without an exchange
    local = {name: entry["local_shape"] for name, entry in plan.content["parameters"].items() if "packed" in entry}
    assert local == {"qkv.weight": [24, 16], "qkv.bias": [24], "gate_up.weight": [32, 16], "gate_up.bias": [32]}
    worst = on_ranks("compared", Loop(options, model="fused", dtype=torch.float64))
    assert max(worst.values()) < 1e-10, worst


@pytest.mark.slow
def test_gate_and_up_in_turn_are_trained_in_slices(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """The experts of GPT-OSS: a slice of every expert has as much of gate as of up."""
    styles = {"gate_up_proj": "rowwise", "gate_up_proj_bias": "colwise", "down_proj": "colwise"}
    styles = {f"net.model.layers.*.mlp.experts.{name}": style for name, style in styles.items()}
    plan = meshwright.from_tp_plan(styles, interleaved(), tokens(), loss=next_token, mesh=4)
    taken = [one for one in plan.content["operators"] if one["op"] == "slice" and ".experts" in one["name"]]
    assert [one["in_layouts"] for one in taken] == [["(-, tp)"]] * 4
    assert all(one["redistributions"] == [] for one in taken)
    worst = on_ranks("compared", Loop(file=plan.save(tmp_path / "plan.json"), model="interleaved"))
    assert max(worst.values()) < 1e-10, worst


@pytest.mark.slow
def test_a_loop_in_bf16_is_near_one_device(on_ranks: Callable[..., Any]) -> None:
    worst = on_ranks("compared", Loop({"mesh": 4}, dtype=torch.bfloat16, steps=1))
    assert max(worst.values()) < 3e-2, worst


def test_a_plan_from_a_file_is_applied(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    plan = meshwright.plan(gpt(), tokens(), loss=next_token, mesh=4, plan_cache=None)
    worst = on_ranks("compared", Loop(file=plan.save(tmp_path / "plan.json")))
    assert max(worst.values()) < 1e-10, worst


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tools_of_torch_take_module_and_optimizer(on_ranks: Callable[..., Any], stage: int) -> None:
    worst, names, shared, found = on_ranks("with_tools_of_torch", stage, 2)
    assert worst < (1e-10 if stage == 0 else 1e-5) and names == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert shared == 0 and found


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_options_that_a_step_writes_are_kept(on_ranks: Callable[..., Any], stage: int) -> None:
    worst, (found, expected) = on_ranks("with_options_of_a_step", stage, 2)
    assert worst < (1e-12 if stage == 0 else 1e-5)
    assert found == expected


@pytest.mark.parametrize(
    ("stage", "engine"),
    [(0, "native"), (3, "native"), *(pytest.param(one, "deepspeed", marks=pytest.mark.slow) for one in (1, 3))],
)
def test_evaluation_mode_is_that_of_one_device(on_ranks: Callable[..., Any], stage: int, engine: str) -> None:
    worst, codes, trained = on_ranks("evaluated", (stage, engine))
    assert worst < (1e-5 if engine == "deepspeed" else 1e-12) and codes == ["MW463"] * 4 and trained


def test_a_short_batch_is_not_taken_for_a_slice(on_ranks: Callable[..., Any]) -> None:
    assert on_ranks("short_batches", None, 2) == "MW463"


def test_ranks_with_other_weights_are_named(on_ranks: Callable[..., Any]) -> None:
    (), (line,) = on_ranks("seeded_by_rank", None, 2)
    assert "Rank 1 differs in the weights of its module" in line and "torch.manual_seed" in line


def test_weights_that_something_else_changes_are_refused(on_ranks: Callable[..., Any]) -> None:
    codes = on_ranks("written_by_others", None, 2)
    assert {case for case, code in codes.items() if not code} == {f"trained at {stage}" for stage in range(4)}
    assert len(codes) == 14 and set(codes.values()) == {"", "MW464"}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "fused"])
def test_checkpoints_of_torch_hold_the_weights(on_ranks: Callable[..., Any], tmp_path: Path, model: str) -> None:
    assert on_ranks("saved", (tmp_path / "checkpoint", model)) == 0


@pytest.mark.slow
def test_torchs_checkpoints_do_not_know_stripes(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """So state dicts hold fused weights complete. Once torch writes them, they may be DTensors."""
    complete, refused = on_ranks("striped", tmp_path / "checkpoint")
    assert complete and "overlapping chunks" in refused


@pytest.mark.slow
def test_what_cannot_be_applied_leaves_nothing_behind(on_ranks: Callable[..., Any]) -> None:
    assert on_ranks("refused", None) == ["MW461", "MW461", "MW462", "MW807", "MW464", "0"]


@pytest.mark.slow
def test_a_layout_that_no_dtensor_has_is_replicated_in_state_dicts(on_ranks: Callable[..., Any]) -> None:
    shapes, worst = on_ranks("uneven", None)
    assert shapes["0.weight"] == "(10, 8) 3" and shapes["0.bias"] == "(10,) 3" and worst < 1e-10
