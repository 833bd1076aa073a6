"""Plans as plain torch: the file imports torch alone, and trains as one device does."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from exports import built, loss_of, weighed
from loops import SECTIONS, gpt, next_token, tokens
from torch import Tensor, nn

import meshwright
from runner.errors import RunFailed
from runner.export import dry_run, torch_program

GPT2 = {
    "attn.c_attn.weight": "packed_rowwise",  # [inputs, outputs]
    "attn.c_attn.bias": "packed_colwise",
    "attn.c_proj.weight": "colwise",
    "mlp.c_fc.weight": "rowwise",
    "mlp.c_fc.bias": "colwise",
    "mlp.c_proj.weight": "colwise",
}
"""Megatron's slices of a block of transformers' GPT-2."""
OUT = {"attention.o_proj": [[2, 1, 2], [2, 1]], "feed_forward.down_proj": [[2, 1, 2], [2, 1]]}
IN = {
    "gpt": ("attention.[qkv]_proj", "feed_forward.up_proj"),
    "llama": ("attention.[qkv]_proj", "feed_forward.gate_proj", "feed_forward.up_proj"),
}


def megatron(model: str) -> dict[str, Any]:
    """Columns, then rows, and tables in slices of the vocabulary."""
    norm = [[2, 1, 1], [1], [1]] if model == "gpt" else [[2, 1, 1], [1]]
    strategies: dict[str, Any] = {f"layers.*.{path}.matmul": strategy for path, strategy in OUT.items()}
    strategies |= {f"layers.*.{path}.matmul": [[2, 1, 1], [1, 2]] for path in IN[model]}
    strategies |= {"tokens": [[2, 1], [2, 1]], "head.matmul": [[2, 1, 1], [1, 2]], "norm": norm}
    strategies |= {"layers.*.*_norm": norm, "layers.*.add": [[2, 1, 1], [2, 1, 1]]}
    if model == "gpt":
        dropped = [[2, 1, 1]]
        strategies |= {"positions": [[1, 1], [1]], "add": [[2, 1, 1], [1, 1]], "dropout": dropped}
        strategies |= {"layers.*.*_dropout": dropped}
    return strategies | {"loss.cross_entropy_loss": [[2, 1], [2]]}


def module_of(model: str) -> nn.Module:
    return built(model)[0]


def planned(model: str, **changed: Any) -> meshwright.Plan:
    given = {"mesh": {"dp": 2, "tp": 2}, "strategies": megatron(model), "plan_cache": None} | changed
    if model == "llama":  # the other one has its batch over all ranks
        given |= {"dataset_strategy": [[2, 1], [2, 1]]}
    return meshwright.plan(module_of(model), tokens(), loss=next_token, **given)


def predicted(plan: meshwright.Plan) -> int:
    """The bytes that a rank of the exported program sends in a step."""
    changes = plan.expressible("torch", collectives=True)
    return sum(plan.content["communication"].values()) + sum(one.bytes for one in changes if one.kind == "collectives")


def modules_in(code: str) -> set[str]:
    """The packages besides the standard library that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_exported_program_trains_as_one_device(on_ranks: Callable[..., Any], tmp_path: Path, model: str) -> None:
    plan = planned(model)
    file = plan.export("torch", tmp_path / "exported.py")
    text = file.read_text(encoding="utf-8")
    assert modules_in(text) == {"torch"}
    assert '"layers.*.attention.q_proj.weight": (Replicate(), Shard(0))' in text
    worst = on_ranks("exported", (file, model), module="exports")
    assert max(worst["loss"], worst["gradient"]) < 1e-5, worst
    planned_bytes = sum(plan.content["communication"].values())
    # gradients of a value are added up once for all that read it; on CPUs DTensor gathers instead of an all-to-all
    assert planned_bytes < worst["bytes"] < 1.15 * planned_bytes, worst


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_the_bytes_of_the_exported_program_are_predicted(
    on_ranks: Callable[..., Any], tmp_path: Path, model: str
) -> None:
    plan = planned(model)
    worst = on_ranks("exported", (plan.export("torch", tmp_path / "exported.py"), model), module="exports")
    assert worst["bytes"] == pytest.approx(predicted(plan), abs=2)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "stage"), [("gpt", 0), ("llama", 0), ("llama", 3), ("tied", 0), ("shared", 0)])
def test_styles_of_torch_train_as_one_device(
    on_ranks: Callable[..., Any], tmp_path: Path, model: str, stage: int
) -> None:
    columns = dict.fromkeys((f"layers.*.{path}" for path in IN.get(model, ())), "colwise")
    styles = {"tokens": "embedding_rowwise", "head": "colwise_gather_output", **columns}
    styles |= {f"layers.*.{path}": "rowwise" for path in OUT if model in IN}
    mesh = {"dp": 2, "tp": 2}
    plan = meshwright.from_tp_plan(styles, module_of(model), tokens(), loss=next_token, mesh=mesh, zero=stage)
    assert plan.expressible("parallelize_module") == []
    file = plan.export("parallelize_module", tmp_path / "exported.py")
    text = file.read_text(encoding="utf-8")
    assert modules_in(text) == {"torch"} and len(text.splitlines()) < 120
    assert '"head": ColwiseParallel(output_layouts=Replicate()),' in text
    worst = on_ranks("styled", (file, model), module="exports")
    assert max(worst["loss"], worst["gradient"]) < 1e-5, worst


def test_heads_that_a_module_counts_by_itself_are_not_sliced() -> None:
    """`view(batch, sequence, self.heads, x.shape[-1] // self.heads)` makes as many heads of a slice, with fewer
    columns."""

    def split(x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        return x.view(batch, sequence, 4, width // 4).transpose(1, 2)

    styles = dict.fromkeys((f"layers.*.{path}" for path in IN["gpt"]), "colwise")
    styles |= {f"layers.*.{path}": "rowwise" for path in OUT}
    module = module_of("gpt")
    for layer in range(2):
        module.get_submodule(f"layers.{layer}.attention")._split = split
    plan = meshwright.from_tp_plan(styles, module, tokens(), loss=next_token, mesh=2)
    for target in ("parallelize_module", "transformers", "deepspeed"):
        changed = {one.name for one in plan.expressible(target)}
        assert any(one.startswith("layers.0.attention.") for one in changed), target
    assert plan.expressible("torch") == []


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_fully_shard_is_zero_3_over_replicas(on_ranks: Callable[..., Any], tmp_path: Path, model: str) -> None:
    styles = dict.fromkeys((f"layers.*.{path}" for path in IN[model]), "colwise")
    styles |= {f"layers.*.{path}": "rowwise" for path in OUT}
    options: dict[str, Any] = {"loss": next_token, "mesh": {"dp": 2, "tp": 2}}
    plans = [meshwright.from_tp_plan(styles, module_of(model), tokens(), zero=stage, **options) for stage in (0, 3)]
    assert plans[1].expressible("torch") == []
    files = [plan.export("torch", tmp_path / f"{number}.py") for number, plan in enumerate(plans)]
    assert 'SHARDED: tuple[str, ...] = ("dp",)' in files[1].read_text(encoding="utf-8")
    replicated, sharded = (on_ranks("exported", (file, model), module="exports") for file in files)
    assert max(sharded["loss"], sharded["gradient"]) < 1e-5, sharded
    assert [replicated["bytes"], sharded["bytes"]] == pytest.approx([predicted(plan) for plan in plans], abs=2)
    assert sharded["stored"] == replicated["stored"] / 2


@pytest.mark.slow
def test_fully_shard_of_weights_that_are_used_without_their_module(
    on_ranks: Callable[..., Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"mesh": {"dp": 4}, "zero": 3, "strategies": {"table": [[1, 1], [4, 1]]}}
    plan = meshwright.plan(module_of("attention"), tokens(), loss=next_token, plan_cache=None, **options)
    file = plan.export("torch", tmp_path / "exported.py")
    assert 'SHARDED: tuple[str, ...] = ("dp",)' in file.read_text(encoding="utf-8")
    worst = on_ranks("exported", (file, "attention"), module="exports")
    assert max(worst["loss"], worst["gradient"]) < 1e-5, worst


@pytest.mark.slow
def test_fully_shard_of_dtypes_one_by_one(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """`fully_shard` takes one dtype at once: the norm is apart, and the parameter beside modules stays complete."""
    styles, mesh = {"table": "embedding_rowwise", "head": "colwise"}, {"dp": 2, "tp": 2}
    plan = meshwright.from_tp_plan(styles, module_of("mixed"), tokens(), loss=next_token, mesh=mesh, zero=3)
    changes = plan.expressible("torch")
    assert [one.name for one in changes if one.kind == "parameter"] == ["scale"]
    file = plan.export("torch", tmp_path / "exported.py", allow_changes=True)
    worst = on_ranks("exported", (file, "mixed"), module="exports")
    assert max(worst["loss"], worst["gradient"]) < 1e-5, worst


SEARCHED = {"mesh": {"dp": 2, "tp": 2}, "search": "dynamic_programming"}
COLUMNS = {"up.matmul": [[2, 1, 1], [1, 2]], "head.matmul": [[2, 1, 2], [2, 1]]}
DATA_PARALLEL = {"mesh": 4, "mode": "data_parallel"}


def more_sent(on_ranks: Callable[..., Any], file: Path, model: str, options: dict[str, Any]) -> float:
    """The bytes that the exported program sends beyond its plan; its numbers are those of one device, and all that it
    sends is predicted."""
    module, batches = built(model)
    loss = weighed if model == "weighed" else loss_of
    plan = meshwright.plan(module, batches[0], loss=loss, plan_cache=None, **options)
    worst = on_ranks("exported", (plan.export("torch", file, allow_changes=True), model), module="exports")
    assert max(worst["loss"], worst["gradient"]) < 1e-5, worst
    assert worst["bytes"] == pytest.approx(predicted(plan), abs=2)
    return float(worst["bytes"]) - sum(plan.content["communication"].values())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["regression", "vit", "bert", "moe", "bags"])
def test_any_architecture_trains_as_one_device(on_ranks: Callable[..., Any], tmp_path: Path, model: str) -> None:
    more_sent(on_ranks, tmp_path / "searched.py", model, SEARCHED)
    assert abs(more_sent(on_ranks, tmp_path / "data_parallel.py", model, DATA_PARALLEL)) <= 400


@pytest.mark.slow
def test_reductions_of_slices_are_those_of_one_device(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """Gradients of norms and deviations are partial sums; running sums and quantiles need all features."""
    options = {"mesh": {"dp": 2, "tp": 2}, "search": "sharding_propagation", "strategies": COLUMNS}
    more_sent(on_ranks, tmp_path / "exported.py", "reductions", options)


@pytest.mark.slow
def test_counts_and_repeats_are_those_of_one_device(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    module, batches = built("repeated")
    options = {"mesh": {"dp": 2, "tp": 2}, "search": "sharding_propagation", "strategies": COLUMNS}
    plan = meshwright.plan(module, batches[0], loss=loss_of, plan_cache=None, **options)
    file = plan.export("torch", tmp_path / "exported.py", allow_changes=True)
    worst = on_ranks("exported", (file, "repeated"), module="exports")
    assert max(worst["loss"], worst["gradient"]) < 1e-5, worst


@pytest.mark.slow
def test_what_a_model_writes_into_slices_arrives(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    options = {"mesh": {"dp": 2, "tp": 2}, "search": "sharding_propagation", "strategies": COLUMNS}
    more_sent(on_ranks, tmp_path / "exported.py", "written", options)


class PooledLast(nn.Module):
    """Pools pictures whose channels come last, as a Swin of torchvision: torch sets strides in place there."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(self.up(x).permute(0, 3, 1, 2), 1).flatten(1)


def test_pictures_whose_channels_come_last_are_pooled() -> None:
    batch = (torch.randn(8, 4, 4, 16), torch.randn(8, 16))
    options: dict[str, Any] = {"mesh": 2, "mode": "data_parallel", "plan_cache": None}
    plan = meshwright.plan(PooledLast(), batch, loss=nn.MSELoss(), **options)
    assert sum(plan.content["communication"].values()) - 64 < predicted(plan)


class WritesToView(nn.Module):
    """Its view of features is a copy where these are slices."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) * 1.0
        h[:, 3].mul_(3.0)
        return h


def test_what_a_model_would_write_into_copies_is_refused() -> None:
    sliced = {"up.matmul": [[2, 1], [1, 2]]}
    batch = (torch.randn(8, 16), torch.randn(8, 16))
    options: dict[str, Any] = {"mesh": {"dp": 2, "tp": 2}, "search": "sharding_propagation", "strategies": sliced}
    plan = meshwright.plan(WritesToView(), batch, loss=nn.MSELoss(), plan_cache=None, **options)
    with pytest.raises(RunFailed, match="cannot write into a view across slices"):
        plan.expressible("torch", collectives=True)


def test_a_loss_that_checks_its_numbers_is_counted() -> None:
    def likelihood(output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.gaussian_nll_loss(output, targets, output.exp())

    batch = (torch.randn(8, 16), torch.randn(8, 16))
    plan = meshwright.plan(nn.Linear(16, 16), batch, loss=likelihood, mesh=2, mode="data_parallel", plan_cache=None)
    assert sum(plan.content["communication"].values()) - 64 < predicted(plan)


class WithOutput(nn.Linear):
    """Returns its loss first."""

    def forward(self, x: Tensor) -> Any:
        made = super().forward(x)
        return made.square().mean(), made


def test_a_module_that_returns_more_than_its_loss_is_counted() -> None:
    plan = meshwright.plan(WithOutput(16, 16), torch.randn(8, 16), mesh=2, mode="data_parallel", plan_cache=None)
    assert sum(plan.content["communication"].values()) - 64 < predicted(plan)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_losses_of_weighed_classes_are_those_of_one_device(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    more_sent(on_ranks, tmp_path / "exported.py", "weighed", DATA_PARALLEL)


PRODUCT = "net.model.layers.*.mlp.experts.grouped_mm_fallback@"
"""Of rows with the matrices of their experts: gate and up, and down."""
WITHIN = {f"{PRODUCT}0": [[1, 1], [2, 1, 2], [1]], f"{PRODUCT}1": [[1, 2], [2, 2, 1], [1]]}
"""Slices by expert, and of the columns and rows of each."""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmoe", "mixtral", "qwen3_moe", "gpt_oss"])
def test_mixtures_of_experts_of_transformers_train_as_one_device(
    on_ranks: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    more_sent(on_ranks, tmp_path / "searched.py", family, SEARCHED)
    if family in ("olmoe", "mixtral"):
        by_hand = {"mesh": {"dp": 2, "tp": 2}, "search": "sharding_propagation", "strategies": WITHIN}
        more_sent(on_ranks, tmp_path / "slices.py", family, by_hand)
        text = (tmp_path / "slices.py").read_text(encoding="utf-8")
        assert 'experts.gate_up_proj": (Shard(0), _StridedShard(1, split_factor=2))' in text


@pytest.mark.slow
def test_rows_sorted_by_expert_are_gathered_and_listed() -> None:
    module, batch = Routing(), (torch.randn(8, 16), torch.randn(8, 16))
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": {"tp": 2}, "plan_cache": None}
    sliced = {"experts.grouped_mm_fallback@0": [[2, 1], [1, 1, 1], [1]]}
    plan = meshwright.plan(module, batch, strategies=sliced, **options)
    (change,) = (one for one in plan.expressible("torch") if "grouped" in one.name)
    assert (change.planned, change.exported, change.bytes) == ("(tp, -)", "(-, -)", 16 * 16 * 4 // 2)
    columns = {"experts.grouped_mm_fallback@0": [[1, 1], [1, 1, 2], [1]]}
    plan = meshwright.plan(module, batch, strategies=columns, **options)
    assert plan.expressible("torch") == []
    assert any(change.kind == "collectives" for change in plan.expressible("torch", collectives=True))  # it runs


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 2, "tp": 2}])
def test_a_gpt2_sends_what_its_plan_says(on_ranks: Callable[..., Any], tmp_path: Path, mesh: dict[str, int]) -> None:
    """Its queries, keys and values, which are one weight, are taken apart without a collective."""
    module, batches = built("gpt2")
    styles = {f"net.transformer.h.*.{name}": style for name, style in GPT2.items()}
    plan = meshwright.from_tp_plan(styles, module, batches[0], loss=loss_of, mesh=mesh)
    assert plan.expressible("torch") == []
    file = plan.export("torch", tmp_path / "exported.py")
    assert "_StridedShard(1, split_factor=3)" in file.read_text(encoding="utf-8")
    worst = on_ranks("exported", (file, "gpt2"), module="exports")
    assert max(worst["loss"], worst["gradient"]) < 1e-5, worst
    assert worst["bytes"] == pytest.approx(predicted(plan), abs=2)
    assert abs(worst["bytes"] - sum(plan.content["communication"].values())) < 400  # the plan's has the loss, too


@pytest.mark.slow
def test_fused_weights_are_taken_apart_in_stripes(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    module, batches = built("fused")
    options = {"mesh": {"dp": 2, "tp": 2}, "strategies": SECTIONS}
    plan = meshwright.plan(module, batches[0], loss=loss_of, plan_cache=None, **options)
    assert plan.expressible("torch") == []
    worst = on_ranks("exported", (plan.export("torch", tmp_path / "exported.py"), "fused"), module="exports")
    assert max(worst["loss"], worst["gradient"]) < 1e-5, worst
    assert worst["bytes"] == pytest.approx(predicted(plan), abs=2)


@pytest.mark.slow
def test_stripes_are_gathered_under_zero_3_and_listed() -> None:
    module, batches = built("fused")
    options: dict[str, Any] = {"mesh": {"dp": 2, "tp": 2}, "strategies": SECTIONS, "zero": 3}
    plan = meshwright.plan(module, batches[0], loss=loss_of, plan_cache=None, **options)
    assert {change.name for change in plan.expressible("torch")} == {"split", "chunk"}


def test_sections_of_other_sizes_are_gathered_and_listed() -> None:
    module, batches = built("grouped")
    columns = {"qkv.matmul": [[1, 1, 1], [1, 4]], "split_with_sizes": [[1, 1, 4]]}
    plan = meshwright.plan(module, batches[0], loss=loss_of, mesh=4, strategies=columns, plan_cache=None)
    assert plan.content["parameters"]["qkv.weight"]["packed"] == {"dim": 0, "sizes": [16, 8, 8]}
    (change,) = plan.expressible("torch")
    assert (change.name, change.exported) == ("split_with_sizes", "(-, -, -)")
    assert change.bytes == 8 * 8 * 32 * 4 * 3 // 4 and change.seconds > 0


GROUPED = {"qkv.matmul": [[2, 1, 1], [1, 2]], "split_with_sizes": [[2, 1, 2]], "head.matmul": [[2, 1, 2], [2, 1]]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategies", "zero"), [("grouped", GROUPED, 0), ("grouped", GROUPED, 3), ("fused", SECTIONS, 3)]
)
def test_sections_that_are_gathered_train_as_one_device(
    on_ranks: Callable[..., Any], tmp_path: Path, model: str, strategies: dict[str, Any], zero: int
) -> None:
    options = {"mesh": {"dp": 2, "tp": 2}, "strategies": strategies, "zero": zero}
    more_sent(on_ranks, tmp_path / "exported.py", model, options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [SEARCHED, DATA_PARALLEL], ids=["searched", "data_parallel"])
def test_statistics_of_all_rows_are_those_of_one_device(
    on_ranks: Callable[..., Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    more_sent(on_ranks, tmp_path / "exported.py", "rows", options)


CUBE: dict[str, Any] = {"layouts": {"cube": {"device_matrix": [2, 2, 2], "axes": ["a", "b", "c"]}}}
MIDDLE = {"0": [{"layout": "cube", "dims": one} for one in ([["a", "c"], None], ["b", None], ["b"])]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sharded"),
    [
        ({"mesh": {"dp": 2, "tp": 2}, "strategies": {"0": [[4, 1], [1, 1], [1]]}}, ("dp", "tp")),
        ({"mesh": dict.fromkeys("abc", 2), "strategies": MIDDLE, **CUBE}, ("a",)),
    ],
    ids=["both axes", "neighbours alone"],
)
def test_another_module_of_the_process_was_parallelized_before(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sharded: tuple[str, ...]
) -> None:
    """Of ZeRO 3, also over both axes, whose group is along none of them; `fully_shard` flattens neighbours alone."""
    module, batch = nn.Sequential(nn.Linear(8, 4)), (torch.randn(8, 8), torch.randn(8, 4))
    plan = meshwright.plan(module, batch, loss=nn.MSELoss(), zero=3, plan_cache=None, **options)
    prepared = plan.planned("test").prepared
    assert prepared.graph is not None and prepared.plan is not None
    assert torch_program.replicas(prepared.graph, prepared.plan) == sharded
    calls, twice = dry_run.calls_of, "\n_once = parallelize\ndef parallelize(module, mesh):\n"
    twice += "    _once(nn.Sequential(nn.Linear(8, 4)), make_mesh('cpu'))\n    return _once(module, mesh)\n"
    monkeypatch.setattr(dry_run, "calls_of", lambda code, *given: calls(code + twice, *given))
    assert predicted(plan) > 0


@pytest.mark.essential
def test_what_the_target_cannot_say_is_listed_and_refused(tmp_path: Path) -> None:
    plan, file = planned("gpt"), tmp_path / "exported.py"
    assert plan.expressible("torch") == []
    sequence = {"layers.0.attention.scaled_dot_product_attention": [[1, 1, 4, 1]] * 3}
    sliced = meshwright.plan(gpt(), tokens(), loss=next_token, mesh=4, strategies=sequence, plan_cache=None)
    found = [change for change in sliced.expressible("torch") if change.name in sequence]
    assert [change.kind for change in found] == ["operator"] * 3
    assert all(change.exported == "(-, -, -, -)" for change in found)
    # three quarters of q, k or v [8, 4, 8, 4] in fp64
    assert all(change.bytes == 8 * 4 * 8 * 4 * 8 * 3 // 4 and change.seconds > 0 for change in found)
    (optimizer,) = planned("gpt", zero=1).expressible("torch")
    assert optimizer.kind == "optimizer" and optimizer.bytes > 0
    for code, call in {
        "MW465": lambda: sliced.export("torch", file),
        "MW466": lambda: sliced.export("pytorch", file),
        "MW886": lambda: plan.expressible("deepspeed", collectives=True),
    }.items():
        with pytest.raises(meshwright.CodedError) as error:
            call()
        assert error.value.code == code and not file.exists()
    assert "Shard(" in sliced.export("torch", file, allow_changes=True).read_text(encoding="utf-8")


class Routing(nn.Module):
    """Rows, two of four experts for each, as in Mixtral: [rows, 16] -> [rows, 16]."""

    def __init__(self) -> None:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        super().__init__()
        config = MixtralConfig(hidden_size=16, intermediate_size=16, num_local_experts=4)
        config._experts_implementation = "grouped_mm"
        self.router, self.experts = nn.Linear(16, 4), MixtralExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.router(x).softmax(-1).topk(2)
        made: Tensor = self.experts(x, experts, weights)
        return made


class Pairs(nn.Module):
    """A bilinear form, whose operator DTensor does not know: [rows, 8] -> [rows, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.form = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        pairs: Tensor = self.form(x, x.exp())
        return pairs


@pytest.mark.slow
def test_collectives_of_the_exported_program_are_listed() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": 4, "mode": "data_parallel", "plan_cache": None}
    plan = meshwright.plan(module, (torch.randn(8, 8), torch.randn(8, 4)), **options)
    (change,) = plan.expressible("torch", collectives=True)
    parameters = sum(one.nbytes for one in module.parameters())
    assert (change.kind, change.name) == ("collectives", "all_reduce") and plan.expressible("torch") == []
    assert plan.content["communication"]["all_reduce"] + change.bytes == parameters * 2 * 3 // 4  # and no loss
    module = nn.Sequential(nn.Linear(8, 8), Chosen())
    with pytest.raises(meshwright.CodedError) as error:
        meshwright.plan(module, (torch.randn(8, 8),) * 2, **options).expressible("torch", collectives=True)
    assert error.value.code == "MW883"


@pytest.mark.slow
def test_operators_that_dtensor_does_not_know_are_gathered_and_listed(tmp_path: Path) -> None:
    batch = torch.randn(8, 8), torch.randn(8, 8)
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": 4, "plan_cache": None}
    plan = meshwright.plan(Pairs(), batch, mode="data_parallel", **options)
    changes = plan.expressible("torch")
    gathered = ("form", "(-, -)", 8 * 8 * 4 * 3 // 4)
    assert [(change.name, change.exported, change.bytes) for change in changes] == [gathered] * 2
    text = plan.export("torch", tmp_path / "exported.py", allow_changes=True).read_text(encoding="utf-8")
    assert 'REPLICATED: tuple[str, ...] = ("aten._trilinear.default",)' in text
    assert {change.kind for change in plan.expressible("torch", collectives=True)} == {"operator", "collectives"}
    assert meshwright.plan(Pairs(), batch, for_target="torch", **options).expressible("torch") == []


class Angles(nn.Module):
    """Functions whose gradients DTensor cannot compute: [rows, 8] -> [rows, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        wave = torch.polar(x.abs(), x)
        return wave.real + wave.angle() * x.sgn() + torch.angle(x) + wave.sgn().imag


@pytest.mark.slow
def test_signs_and_angles_have_gradients() -> None:
    batch = torch.randn(8, 8), torch.randn(8, 8)
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": 2, "mode": "data_parallel", "plan_cache": None}
    plan = meshwright.plan(Angles(), batch, **options)
    assert plan.expressible("torch") == []
    assert [one.name for one in plan.expressible("torch", collectives=True)] == ["all_reduce"]  # it runs


class Spread(nn.Module):
    """Deviations of columns, whose gradients are partial sums where these are sliced, and medians: [rows, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        x = x * x.std(-1, keepdim=True) + x.quantile(0.5, -1, keepdim=True)
        return x @ self.out


@pytest.mark.slow
def test_gradients_that_are_partial_sums_run() -> None:
    batch = torch.randn(8, 8), torch.randn(8, 8)
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": {"dp": 2, "tp": 2}, "plan_cache": None}
    columns = {"matmul@0": [[2, 1], [1, 2]], "matmul@1": [[2, 2], [2, 1]]}
    options |= {"strategies": columns, "search": "sharding_propagation"}
    plan = meshwright.plan(Spread(), batch, **options)
    assert {change.name for change in plan.expressible("torch")} == {"quantile"}
    assert any(change.kind == "collectives" for change in plan.expressible("torch", collectives=True))  # it runs


@pytest.mark.slow
def test_partial_sums_are_added_up_behind_an_embedding_of_sliced_rows() -> None:
    module = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Flatten())
    batch = torch.randint(16, (8, 3)), torch.randn(8, 24)
    styles = {"0": "embedding_rowwise", "1": "colwise_gather_output"}
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": {"dp": 2, "tp": 2}, "plan_cache": None}
    plan = meshwright.from_tp_plan(styles, module, batch, **options)
    assert plan.expressible("torch") == []
    plan.expressible("torch", collectives=True)  # it runs


class Tied(nn.Module):
    """A language model of torch's layers: [rows, 8] -> [rows, 8, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(32, 16), nn.Parameter(torch.zeros(8, 16))
        layers = (nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True) for _ in range(4))
        self.layers, self.norm, self.head = nn.ModuleList(layers), nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        return cast(Tensor, self.head(self.norm(x)))


@pytest.mark.slow
def test_rows_over_both_axes_of_fully_shard_run() -> None:
    """It flattens them, and rows that are flattened with tokens are stripes."""
    plan = meshwright.plan(Tied().double(), tokens(), loss=next_token, mesh={"dp": 2, "tp": 2}, zero=3, plan_cache=None)
    assert plan.expressible("torch") == []
    plan.expressible("torch", collectives=True)  # it runs


class Rows(nn.Module):
    """Recurrent layers whose rows come first: [rows, 4, 8] -> [rows, 4, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRU(8, 8, batch_first=True), nn.LSTM(8, 6, batch_first=True)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(self.second(self.first(x)[0])[0])
        return h


@pytest.mark.slow
def test_recurrent_layers_of_rows_run() -> None:
    batch = torch.randn(8, 4, 8), torch.randn(8, 4, 6)
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": 2, "mode": "data_parallel", "plan_cache": None}
    plan = meshwright.plan(Rows(), batch, **options)
    assert {change.name for change in plan.expressible("torch")} == {"first.gru", "second.lstm"}
    assert any(change.kind == "collectives" for change in plan.expressible("torch", collectives=True))  # it runs


CHANNELS = {
    "0": [[2, 1, 1, 1], [2, 1, 1, 1], [2]],  # those that are made
    "1": [[2, 2, 1, 1], [2, 1, 1, 1], [2]],  # groups
    "4": [[2, 2, 1, 1], [2, 1, 1, 1]],  # those that are added up
    "6": [[4, 1, 1, 1], [1, 1, 1, 1], [1]],  # rows, over both axes
}
"""How convolutions are sliced on the mesh {dp 2, tp 2}."""


@pytest.mark.slow
def test_operators_that_dtensor_takes_apart_are_run_or_gathered(tmp_path: Path) -> None:
    layers = nn.GroupNorm(2, 8), nn.ReLU6(), nn.ReflectionPad2d(1), nn.ReflectionPad2d((2, 0, 1, 1)), nn.ELU()
    batch = torch.randn(4, 8, 4, 4), torch.randn(4, 8, 8, 8)
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": 2, "mode": "data_parallel", "plan_cache": None}
    plan = meshwright.plan(nn.Sequential(*layers), batch, **options)
    names = {change.name.split(".")[0] for change in plan.expressible("torch")}
    assert names == {"0", "1", "2", "3"}  # not the ELU and the loss, which DTensor takes apart into others
    assert any(change.kind == "collectives" for change in plan.expressible("torch", collectives=True))  # it runs


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"mesh": SEARCHED["mesh"], "strategies": CHANNELS}, DATA_PARALLEL])
def test_convolutions_train_as_one_device(
    on_ranks: Callable[..., Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    more_sent(on_ranks, tmp_path / "exported.py", "pictures", options)


@pytest.mark.slow
def test_convolutions_run_on_slices() -> None:
    module, batches = built("pictures")
    options: dict[str, Any] = {"loss": loss_of, "mesh": {"dp": 2, "tp": 2}, "strategies": CHANNELS, "plan_cache": None}
    plan = meshwright.plan(module, batches[0], **options)
    weights = [plan.content["tensors"][f"{path}.weight"]["dims"][0] for path in (0, 1, 4)]
    assert weights == [["tp"]] * 3
    assert {change.name for change in plan.expressible("torch")} == {"2", "3", "5"}  # whose gradients DTensor lacks
    assert any(change.kind == "collectives" for change in plan.expressible("torch", collectives=True))  # it runs


@pytest.mark.slow
@pytest.mark.parametrize("options", [SEARCHED, DATA_PARALLEL], ids=["searched", "data_parallel"])
def test_operators_that_dtensor_does_not_know_train_as_one_device(
    on_ranks: Callable[..., Any], tmp_path: Path, options: dict[str, Any]
) -> None:
    more_sent(on_ranks, tmp_path / "exported.py", "recurrent", options)


@pytest.mark.slow
def test_layers_that_differ_have_entries_of_their_own(tmp_path: Path) -> None:
    strategies = megatron("gpt")
    strategies |= {"layers.0.feed_forward.up_proj.matmul": [[2, 1, 2], [2, 1]]}
    file = planned("gpt", strategies=strategies).export("torch", tmp_path / "exported.py")
    text = file.read_text(encoding="utf-8")
    assert '"layers.0.feed_forward.up_proj.weight": (Replicate(), Shard(1))' in text
    assert '"layers.1.feed_forward.up_proj.weight": (Replicate(), Shard(0))' in text
    assert '"layers.*.attention.q_proj.weight"' in text


class Chosen(nn.Module):
    """Adds to the rows that are above zero, which values decide."""

    def forward(self, x: Tensor) -> Tensor:
        out = x.clone()
        for row in (x.sum(-1) > 0).nonzero().flatten():
            out[row] = 2 * x[row]
        return out


@pytest.mark.parametrize("target", ["torch", "torchtitan"])
def test_modules_that_are_one_operator_are_listed(target: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Chosen(), nn.Linear(4, 2))
    batch = torch.randn(8, 4), torch.randn(8, 2)
    plan = meshwright.plan(module, batch, loss=nn.MSELoss(), mesh=2, mode="data_parallel", plan_cache=None)
    (change,) = (one for one in plan.expressible(target) if one.planned == "one operator")
    assert (change.kind, change.name) == ("operator", "1")


class ByValues(nn.Module):
    """Computes what DTensor cannot: what a mask selects, a transform of a function, or paths of all lengths."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        rows = self.layer(x)
        if self.kind == "mask":
            return rows[x > 0].mean()
        if self.kind == "transform":
            return (torch.vmap(lambda row: self.layer(row).tanh().sum())(x) * rows.sum(1)).mean()
        lengths = torch.full((8,), 5), torch.full((8,), 2)
        scores = rows.log_softmax(-1).expand(5, 8, 4)
        return nn.functional.ctc_loss(scores, torch.ones(8, 2, dtype=torch.long), *lengths)


@pytest.mark.parametrize("kind", ["mask", "transform", "paths"])
def test_lines_that_torch_runs_by_other_operators_are_listed(tmp_path: Path, kind: str) -> None:
    plan = meshwright.plan(ByValues(kind), (torch.randn(8, 4),), mesh=2, mode="data_parallel")
    (change,) = [one for one in plan.expressible("torch") if "may lack them" in str(one)]
    assert change.name.startswith("ctc" if kind == "paths" else "meshwright/test_exports.py:")
    with pytest.raises(meshwright.CodedError) as error:
        plan.export("torch", tmp_path / "program.py")
    assert error.value.code == "MW465" and not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_collectives_are_counted_where_autograd_has_threads_for_gpus(monkeypatch):
    """A fork of such a process cannot compute gradients; a new one counts the same."""
    net, batch = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), (torch.randn(8, 8), torch.randn(8, 4))
    plan = meshwright.plan(net, batch, loss=nn.MSELoss(), mesh={"dp": 2, "tp": 2})
    expected, started, real = plan.expressible("torch", collectives=True), [], dry_run._in_process

    def in_process(start, *given):
        started.append(start)
        return f"RuntimeError: see {dry_run.NO_FORK}" if start == "fork" else real(start, *given)

    monkeypatch.setattr(dry_run, "_in_process", in_process)
    assert plan.expressible("torch", collectives=True) == expected != []
    assert started == ["fork", "spawn"]
    local = type("Local", (nn.Sequential,), {})(*net)
    plan = meshwright.plan(local, batch, loss=nn.MSELoss(), mesh={"dp": 2, "tp": 2})
    with pytest.raises(RunFailed, match="ask before the first backward"):
        plan.expressible("torch", collectives=True)
