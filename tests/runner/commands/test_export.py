"""`run export`: the file, what it reports as changed, and what it refuses."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strategies.planner.module_styles import WRITTEN

GPT = (
    *("+recipe=megatron_tp", "model.args.layers=2", "model.args.width=16", "model.args.dropout=0"),
    *("parallel.plan_cache=null", "hydra.run.dir=run"),
)


def test_a_plan_becomes_a_file(command: Callable[..., Any], tmp_path: Path) -> None:
    refused = command("export", "torch", *GPT)
    assert refused.code == 2 and refused.err.rstrip().endswith("[MW465]") and not (tmp_path / "run").exists()
    done = command("export", "torch", *GPT, "export.allow_changes=true", "export.file=own.py")
    assert done.code == 0 and done.out.count("changed: operator loss.cross_entropy_loss") == 1
    text = (tmp_path / "own.py").read_text(encoding="utf-8")
    tables = {
        node.target.id: ast.unparse(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None
    }
    assert ast.literal_eval(tables["MESH"]) == {"dp": 2, "tp": 4}
    assert "'tokens.weight': (Replicate(), Shard(0))" in tables["PARAMETERS"]
    assert "'layers.*.attention.o_proj': (Shard(0), Replicate())" in tables["OUTPUTS"]
    assert json.loads((tmp_path / "run/plan.json").read_text(encoding="utf-8"))["mesh"] == {"dp": 2, "tp": 4}


def test_deepspeed_trains_in_the_precision_and_micro_batches_of_the_run(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    words = ("+recipe=data_parallel", "world_size=2", "train.accumulate=2", "data.batch_size=32", "hydra.run.dir=run")
    for precision, section in {
        "bf16": {"bf16": {"enabled": True}},
        "fp16 train.loss_scale=16": {"fp16": {"enabled": True, "loss_scale": 16.0}},
        "bf16_autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
        "fp32": {},
    }.items():
        done = command("export", "deepspeed", *words, *f"train.precision={precision}".split(), "export.file=own.json")
        assert done.code == 0, done.err
        content = json.loads((tmp_path / "own.json").read_text(encoding="utf-8"))
        assert content["train_micro_batch_size_per_gpu"] == 8 and content["gradient_accumulation_steps"] == 2
        assert {key: one for key, one in content.items() if key in ("bf16", "fp16", "torch_autocast")} == section


def test_what_has_no_program_is_refused(command: Callable[..., Any]) -> None:
    assert command("export", "+recipe=gpt_pipeline").err.rstrip().endswith("[MW465]")
    assert command("export", "pytorch", "+recipe=quickstart").err.rstrip().endswith("[MW204]")
    unwritable = command("export", "+recipe=quickstart", "export.file=/proc/nothing/here.py")
    assert unwritable.code == 2 and unwritable.err.rstrip().endswith("[MW603]")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt", "llama", "moe"])
def test_every_target_has_a_file_of_every_recipe(command: Callable[..., Any], tmp_path: Path, recipe: str) -> None:
    for target, file in {
        "torchtitan": "torchtitan_sharding.py",
        "autoparallel": "placements.json",
        "deepspeed": "deepspeed.json",
        "transformers": "distributed_config.json",
    }.items():
        words = (f"+recipe={recipe}", "parallel.plan_cache=null", f"hydra.run.dir={target}")
        done = command("export", target, *words, "export.allow_changes=true")
        assert done.code == 0, done.err
        text = (tmp_path / target / file).read_text(encoding="utf-8")
        plan = json.loads((tmp_path / target / "plan.json").read_text(encoding="utf-8"))
        if target == "torchtitan":
            names = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
            assert names == {"set_sharding_configs"} and '"tokens": ShardingConfig(' in text
            continue
        content = json.loads(text)
        if target == "autoparallel":
            assert dict(zip(content["mesh_dim_names"], content["mesh_shape"], strict=True)) == plan["mesh"]
            nodes = content["placements"]
            assert len(nodes) > len(plan["parameters"]) and all(name.startswith("primals_") for name in nodes)
        elif target == "deepspeed":
            assert content["train_micro_batch_size_per_gpu"] > 0 and content["zero_optimization"]["stage"] == 0
        else:
            sizes = content["tp_size"] * content["fsdp_size"] * content["dp_replicate_size"]
            assert sizes == math.prod(plan["mesh"].values()) and {*content["tp_plan"].values()} <= {*WRITTEN}
