"""Plans as sharding configs of torchtitan. Its classes are written here as its source documents them, with the checks
that they make; slow tests run the configs in torchtitan itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from exports import built, imported, loss_of
from loops import gpt, next_token, tokens
from test_exchange import MEGATRON, sequence_parallel
from torch import nn

import meshwright
from runner.planning.clusters import cluster_of
from runner.planning.estimate import step_price
from strategies.core.layout import Layout
from strategies.planner.by_module import beyond_borders
from strategies.planner.declared_layouts import Declared, declared_plan


class MeshAxisName(str, Enum):
    DP, CP, TP = "dp", "cp", "tp"


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True, slots=True)
class SpmdLayout:
    axis_types: dict[MeshAxisName, Any]
    partition_spec: tuple[Any, ...] | None = None

    def __post_init__(self) -> None:
        sliced = [one.dim for one in self.axis_types.values() if isinstance(one, Shard)]
        assert len({*sliced}) == len(sliced) and not (sliced and self.partition_spec)

    def at(self, axis: str) -> Any:
        """The dim that an axis slices, or its type."""
        for dim, used in enumerate(self.partition_spec or ()):
            if used is not None and axis in (used if isinstance(used, tuple) else (used,)):
                return dim
        own = self.axis_types[MeshAxisName(axis)]
        return own.dim if isinstance(own, Shard) else own


@dataclass(kw_only=True, slots=True)
class LocalMapConfig:
    in_grad_placements: tuple[SpmdLayout | None, ...] | None


@dataclass(kw_only=True, slots=True)
class ShardingConfig:
    state_shardings: dict[str, SpmdLayout] = field(default_factory=dict)
    in_src_shardings: dict[str, SpmdLayout] | None = None
    in_dst_shardings: dict[str, SpmdLayout] | None = None
    out_src_shardings: SpmdLayout | tuple[SpmdLayout, ...] | None = None
    out_dst_shardings: SpmdLayout | None = None
    local_map: LocalMapConfig | None = None


@pytest.fixture
def torchtitan(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    content = {
        "spmd_types": {"R": "R", "I": "I", "P": "P", "V": "V", "S": Shard},
        "torchtitan": {},
        "torchtitan.distributed": {},
        "torchtitan.distributed.parallel_dims": {"MeshAxisName": MeshAxisName, "SpmdLayout": SpmdLayout},
        "torchtitan.protocols": {},
        "torchtitan.protocols.sharding": {"LocalMapConfig": LocalMapConfig, "ShardingConfig": ShardingConfig},
    }
    for name, members in content.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    yield


def shown(layout: SpmdLayout) -> tuple[Any, ...]:
    assert {*layout.axis_types} == {*MeshAxisName}  # every axis is declared
    return tuple(layout.at(axis) for axis in ("dp", "cp", "tp"))


def borders(config: ShardingConfig) -> list[tuple[Any, ...]]:
    found = [(one or {}).get("input") for one in (config.in_src_shardings, config.in_dst_shardings)]
    return [shown(one) for one in (*found, config.out_src_shardings, config.out_dst_shardings) if one is not None]


def test_megatron_is_what_torchtitan_writes_itself(tmp_path: Path, torchtitan: None) -> None:
    plan = meshwright.from_tp_plan(MEGATRON, gpt(torch.float32), tokens(), loss=next_token, mesh={"dp": 2, "tp": 2})
    assert plan.expressible("torchtitan") == []
    program = imported(plan.export("torchtitan", tmp_path / "configs.py"))
    assert program.PARALLEL_DIMS == {
        "dp_replicate": 2, "dp_shard": 1, "cp": 1, "tp": 2, "pp": 1, "ep": 1, "world_size": 4
    }  # fmt: skip
    configs = program.SHARDINGS
    columns, rows = (configs[f"layers.*.attention.{name}"] for name in ("q_proj", "o_proj"))
    # colwise_config, rowwise_config and norm_config of torchtitan's decoder_sharding, without sequence parallelism
    assert {name: shown(one) for name, one in columns.state_shardings.items()} == dict.fromkeys(
        ("weight", "bias"), ("R", "R", 0)
    )
    assert borders(columns)[1:3] == [(0, "R", "R"), (0, "R", 2)]
    assert shown(rows.state_shardings["weight"]) == ("R", "R", 1)
    assert borders(rows) == [(0, "R", 2), (0, "R", 2), (0, "R", "P"), (0, "R", "I")]
    norm = configs["layers.*.attention_norm"]
    assert shown(norm.state_shardings["weight"]) == ("R", "R", "I") and borders(norm)[0] == (0, "R", "I")
    assert shown(configs["tokens"].state_shardings["weight"]) == ("R", "R", 0)
    assert borders(configs["tokens"]) == [(0, "R", "R"), (0, "R", "R"), (0, "R", "P"), (0, "R", "I")]
    assert configs["tokens"].local_map is not None and configs["positions"].local_map is None
    module = gpt()
    program.set_sharding_configs(module)
    given: dict[str, Any] = {path: getattr(part, "_sharding_config", None) for path, part in module.named_modules()}
    for path, part in module.named_modules():
        own = [name for name, _ in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))]
        assert not own or {*given[path].state_shardings} == {*own}
    assert given["layers.1.attention.q_proj"].in_src_shardings.keys() == {"input"}
    assert given["layers.1.attention"].in_dst_shardings.keys() == {"x"}


def test_sequence_parallelism_is_declared_by_dims(tmp_path: Path, torchtitan: None) -> None:
    module = gpt(torch.float32)
    plan = meshwright.from_tp_plan(sequence_parallel(), module, tokens(), loss=next_token, mesh={"dp": 2, "tp": 2})
    program = imported(plan.export("torchtitan", tmp_path / "configs.py", allow_changes=True))
    configs = program.SHARDINGS
    assert shown(configs["layers.*.attention_norm"].state_shardings["weight"]) == ("R", "R", "R")
    assert borders(configs["layers.*.attention"])[:2] == [(0, "R", 1), (0, "R", "R")]
    assert borders(configs["layers.*.feed_forward.down_proj"])[2:] == [(0, "R", "P"), (0, "R", 1)]


def test_an_axis_that_slices_nothing_slices_no_sequences(tmp_path: Path, torchtitan: None) -> None:
    replicated = {"layers.*.attention.q_proj": None}
    plan = meshwright.from_tp_plan(replicated, gpt(torch.float32), tokens(), loss=next_token, mesh={"dp": 2, "tp": 2})
    dims = imported(plan.export("torchtitan", tmp_path / "configs.py")).PARALLEL_DIMS
    assert (dims["dp_replicate"], dims["cp"], dims["tp"]) == (2, 1, 2)


def test_a_dim_over_two_axes_has_a_partition_spec(tmp_path: Path, torchtitan: None) -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    batch = torch.randn(8, 8), torch.randn(8, 4)
    rows = {"0": [[2, 1], [2, 1]], "1": [[4, 1]], "2": [[4, 1], [1, 1]]}
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": {"dp": 2, "tp": 2}, "plan_cache": None, "strategies": rows}
    plan = meshwright.plan(module, batch, search="sharding_propagation", zero=1, **options)
    assert "optimizer" in {change.kind for change in plan.expressible("torchtitan")}  # it has replicas, or fully_shard
    file = tmp_path / "configs.py"
    with pytest.raises(meshwright.CodedError) as error:
        plan.export("torchtitan", file)
    assert error.value.code == "MW465" and not file.exists()
    program = imported(plan.export("torchtitan", file, allow_changes=True))
    layout = program.SHARDINGS["2"].in_dst_shardings["input"]
    assert layout.partition_spec == ((MeshAxisName.DP, MeshAxisName.TP), None)
    assert shown(layout) == (0, "R", 0)


LLAMA = {
    "tokens": "embedding_rowwise",
    "layers.*.attention.[qkv]_proj": "colwise",
    "layers.*.feed_forward.gate_proj": "colwise",
    "layers.*.feed_forward.up_proj": "colwise",
    **dict.fromkeys(("layers.*.attention.o_proj", "layers.*.feed_forward.down_proj"), "rowwise"),
    "head": "colwise",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "styles"),
    [("gpt", MEGATRON), ("gpt", sequence_parallel()), ("llama", LLAMA), ("llama", None), ("dense", None)],
)
def test_torchtitan_itself_trains_the_configs_as_one_device(
    on_ranks: Callable[..., Any], tmp_path: Path, model: str, styles: dict[str, Any] | None
) -> None:
    """None: the best plan of less memory than the best has."""
    module, (batch, _) = built(model)
    options: dict[str, Any] = {"loss": loss_of, "mesh": {"dp": 2, "tp": 2}}
    if styles is None:
        options |= {"for_target": "torchtitan", "plan_cache": None}
        most = meshwright.plan(module, batch, **options).memory
        plan = meshwright.plan(module, batch, memory_limit=int(0.6 * most), **options)
        assert any(any(one["dims"]) for one in plan.content["tensors"].values())
    else:
        plan = meshwright.from_tp_plan(styles, module, batch, **options)
    assert plan.expressible("torchtitan") == []
    file = plan.export("torchtitan", tmp_path / "configs.py")
    found = on_ranks("sharded", (file, model), module="titans")
    assert found["stored"] == plan.content["memory"]["parameters"]  # bytes of a rank
    assert max(found["loss"], found["gradient"]) < 1e-5, found


class Residual(nn.Module):
    """Two products and what goes round them: [rows, width] -> [rows, width]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "width"), [(8, 4096), (4096, 4096), (65536, 256)])
@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 2, "tp": 2}])
def test_a_plan_for_torchtitan_is_the_best_of_all_its_layouts(rows: int, width: int, mesh: dict[str, int]) -> None:
    with torch.device("meta"):
        module, batch = Residual(width), (torch.empty(rows, width), torch.empty(rows, width))
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": mesh, "cluster": "dgx_h100", "plan_cache": None}
    plan = meshwright.plan(module, batch, for_target="torchtitan", **options)
    prepared = plan.planned("test").prepared
    graph, inputs = prepared.graph, prepared.plan.inputs
    cluster = cluster_of(prepared.config, prepared.device, prepared.world_size)
    price = step_price(prepared.config, graph, lambda one: (graph, one), prepared.device, prepared.world_size, cluster)
    assert price.seconds(prepared.plan) == pytest.approx(plan.cost)
    costs = []
    for up, down, *borders in product((None, 0, 1), repeat=6):
        sliced = {"up.weight": up, "down.weight": down}
        tensors = {name: Layout(tuple(("tp",) * (place == dim) for place in (0, 1))) for name, dim in sliced.items()}
        first, last, third, fourth = ({"tp": dim} for dim in borders)
        placed = {"up": first, "down": last}, {"up": third, "down": fourth}
        declared = declared_plan(graph, Declared(prepared.plan.mesh, inputs, tensors, *placed))
        assert not any(beyond_borders(graph, declared, {}))
        costs.append(price.seconds(declared))
    assert len({*costs}) > 50 and plan.expressible("torchtitan") == []
    assert plan.cost == pytest.approx(min(costs)) and plan.gap is not None and plan.gap < 0.1
    assert plan.cost < max(costs) / 1.2


@pytest.mark.slow
def test_a_plan_for_torchtitan_has_a_certificate() -> None:
    module, (batch, _) = built("llama")
    options: dict[str, Any] = {"loss": loss_of, "cluster": "dgx_h100", "plan_cache": None}
    plan = meshwright.plan(module, batch, for_target="torchtitan", mesh=4, **options)
    assert plan.gap is not None and plan.expressible("torchtitan") == [] and plan.content["search"]["meshes"] == 3
    with pytest.raises(meshwright.CodedError) as error:
        meshwright.plan(module, batch, for_target="torchtitan", mesh=4, search="recursive_programming", **options)
    assert error.value.code == "MW410"
