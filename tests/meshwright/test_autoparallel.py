"""Plans as placements files of AutoParallel, whose format is that of its `save_placements`; and back."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import fused, gpt, next_token, tokens
from meshwright.models.gpt import GPT
from test_exchange import MEGATRON, layouts
from torch import nn

import meshwright
from runner.export.autoparallel_placements import primals

SPEC = r"(R|_?S\(\d(, \d)?\)|P\(sum\))"


def check_form(content: dict[str, Any], mesh: dict[str, int], module: nn.Module) -> None:
    """Raises AssertionError unless it is a placements file of the module and its tokens."""
    assert content.keys() == {"version", "mesh_shape", "mesh_dim_names", "placements"} and content["version"] == 1
    assert dict(zip(content["mesh_dim_names"], content["mesh_shape"], strict=True)) == mesh
    for entry in content["placements"].values():
        assert re.fullmatch(SPEC + f"{{{len(mesh)}}}", entry["output"]) and entry == {
            "output": entry["output"],
            "inputs": [entry["output"]],
        }
    count = len([*module.parameters(), *module.buffers()]) + 1
    assert [*content["placements"]] == [f"primals_{number}" for number in range(1, count + 1)]


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", [{"tp": 8}, {"dp": 2, "tp": 4}])
def test_gpt2_fits_the_format(tmp_path: Path, mesh: dict[str, int]) -> None:
    with torch.device("meta"):
        module = GPT(vocabulary=50304, length=1024, width=768, layers=12, heads=12)
    batch = tuple(torch.zeros(8, 1024, dtype=torch.int64) for _ in range(2))
    styles = {name: style for name, style in MEGATRON.items() if mesh["tp"] == 4 or "attention" not in name}
    plan = meshwright.from_tp_plan(styles, module, batch, loss=next_token, mesh=mesh, cluster="dgx_h100")
    file = plan.export("autoparallel", tmp_path / "placements.json", allow_changes=True)
    content = json.loads(file.read_text(encoding="utf-8"))
    check_form(content, mesh, module)
    numbers = {name: number for number, (name, _) in enumerate(module.named_parameters(), 1)}
    weight = content["placements"][f"primals_{numbers['layers.11.feed_forward.down_proj.weight']}"]
    assert weight["output"] == "R" * (len(mesh) - 1) + "S(1)" and weight["inputs"] == [weight["output"]]
    batch_entry = content["placements"][f"primals_{len(numbers) + len([*module.buffers()]) + 1}"]
    assert batch_entry["output"] == ("S(0)R" if len(mesh) == 2 else "R")


@pytest.mark.slow
def test_primals_are_those_of_a_joint_graph_of_torch() -> None:
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    module, (x, y) = gpt(torch.float32), tokens()
    prepared = meshwright.from_tp_plan(MEGATRON, module, (x, y), loss=next_token, mesh=2).planned("export").prepared
    assert prepared.graph is not None
    with ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, _dynamo_graph_capture_for_export(module)(x), (x,), None)
        nodes = joint.graph_module.graph.find_nodes(op="placeholder")
        theirs = {one.name: tuple(one.meta["val"].shape) for one in nodes if one.name.startswith("primals_")}
    ours = [one.spec.shape for one in primals(prepared.graph, prepared.names, prepared.targets) if one is not None]
    assert theirs == {f"primals_{number}": shape for number, shape in enumerate(ours, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_a_file_is_read_as_the_plan_that_it_is_of(tmp_path: Path, zero: int) -> None:
    module, mesh = gpt(torch.float32), {"dp": 2, "tp": 2}
    plan = meshwright.from_tp_plan(MEGATRON, module, tokens(), loss=next_token, mesh=mesh, zero=zero)
    file = plan.export("autoparallel", tmp_path / "placements.json", allow_changes=True)
    read = meshwright.from_autoparallel(file, module, tokens(), loss=next_token)
    assert layouts(read) == layouts(plan)
    for key in ("mesh", "inputs", "tensors", "communication", "memory"):
        assert read.content[key] == plan.content[key], key
    excess = meshwright.compare(read)  # priced, and beside the best plan
    assert read.cost == pytest.approx(plan.cost) and excess.other.gap is not None
    assert excess.share > 0 and "longer" in str(excess)


def test_stripes_of_fused_weights_are_written_and_read(tmp_path: Path) -> None:
    styles = {"gate_up": "packed_colwise", "down": "rowwise"}
    plan = meshwright.from_tp_plan(styles, fused(), tokens(), loss=next_token, mesh=4)
    assert plan.expressible("autoparallel") == []
    file = plan.export("autoparallel", tmp_path / "placements.json")
    nodes = json.loads(file.read_text(encoding="utf-8"))["placements"]
    assert [one["output"] for one in nodes.values()].count("_S(0, 2)") == 2
    read = meshwright.from_autoparallel(file, fused(), tokens(), loss=next_token)
    assert layouts(read) == layouts(plan)
    for key in ("mesh", "inputs", "tensors", "parameters", "communication", "memory"):
        assert read.content[key] == plan.content[key], key


@pytest.mark.slow
def test_a_file_that_is_none_or_of_another_module_is_refused(tmp_path: Path) -> None:
    module = gpt(torch.float32)
    plan = meshwright.from_tp_plan(MEGATRON, module, tokens(), loss=next_token, mesh=2)
    file = plan.export("autoparallel", tmp_path / "placements.json", allow_changes=True)
    content = json.loads(file.read_text(encoding="utf-8"))
    other = tmp_path / "other.json"
    content["placements"]["primals_1"]["output"] = "S(0)S(1)"
    other.write_text(json.dumps(content), encoding="utf-8")
    small = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
    for code, given, model in (("MW884", other, module), ("MW885", file, small), ("MW884", tmp_path / "none", module)):
        with pytest.raises(meshwright.CodedError) as error:
            meshwright.from_autoparallel(given, model, tokens(), loss=next_token)
        assert error.value.code == code
