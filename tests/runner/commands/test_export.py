"""`run export`: the file, what it reports as changed, and what it refuses."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_what_has_no_program_is_refused(command: Callable[..., Any]) -> None:
    assert command("export", "+recipe=gpt_pipeline").err.rstrip().endswith("[MW465]")
    assert command("export", "pytorch", "+recipe=quickstart").err.rstrip().endswith("[MW204]")
    unwritable = command("export", "+recipe=quickstart", "export.file=/proc/nothing/here.py")
    assert unwritable.code == 2 and unwritable.err.rstrip().endswith("[MW603]")
