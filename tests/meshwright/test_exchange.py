"""Plans of others: read, priced, proven and compared; and written for the trainers that they come from."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from exports import EXPERTS, SMALL, built, loss_of, routed
from loops import fused, gpt, next_token, tokens
from meshwright.models.gpt import GPT
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import meshwright
from strategies.planner import module_styles

COLUMNS = ("layers.*.attention.q_proj", "layers.*.attention.k_proj", "layers.*.attention.v_proj")
MEGATRON = {
    "tokens": "embedding_rowwise",
    **dict.fromkeys((*COLUMNS, "layers.*.feed_forward.up_proj"), "colwise"),
    **dict.fromkeys(("layers.*.attention.o_proj", "layers.*.feed_forward.down_proj"), "rowwise"),
    "head": "colwise",
}
SLICED = ("mesh", "inputs", "tensors", "communication", "memory", "cost")


def layouts(plan: meshwright.Plan) -> list[tuple[str, Any, Any]]:
    return [(one["name"], one["in_layouts"], one["out_layouts"]) for one in plan.content["operators"]]


def recipe(name: str) -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    """Model, batch, loss and section `parallel` of a recipe."""
    config = meshwright.compose(name)
    torch.manual_seed(0)
    model, batch = GPT(**config.model.args), torch.randint(256, (16, 65))
    from meshwright.models.losses import NextTokenLoss

    section = config.parallel.model_dump(include={"mesh", "dataset_strategy", "strategies"})
    return model, (batch[:, :-1], batch[:, 1:]), NextTokenLoss(), section


def test_a_tp_plan_of_megatron_is_the_recipe_megatron_tp() -> None:
    model, batch, loss, section = recipe("megatron_tp")
    ours = meshwright.plan(model, batch, loss=loss, plan_cache=None, **section)
    read = meshwright.from_tp_plan(MEGATRON, model, batch, loss=loss, mesh={"dp": 2, "tp": 4})
    assert layouts(read) == layouts(ours)
    for key in SLICED:
        assert read.content[key] == ours.content[key], key


@pytest.mark.slow
def test_the_plan_that_transformers_has_for_llama_is_the_recipe_hf_llama() -> None:
    config = meshwright.compose("hf_llama")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config.model.config, use_cache=False))
    written = {f"model.{name}": style for name, style in model.config.base_model_tp_plan.items() if "embed" not in name}
    x = torch.randint(256, (16, 64))
    section = config.parallel.model_dump(include={"mesh", "dataset_strategy", "strategies"})
    section["dataset_strategy"] = [[2, 1], [2, 1]]
    ours = meshwright.plan(model, {"input_ids": x, "labels": x}, plan_cache=None, **section)
    read = meshwright.from_tp_plan(written, model, {"input_ids": x, "labels": x}, mesh={"dp": 2, "tp": 2})
    assert layouts(read) == layouts(ours)
    for key in SLICED:
        assert read.content[key] == ours.content[key], key


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def labelled() -> dict[str, torch.Tensor]:
    x, _ = tokens()
    return {"input_ids": x, "labels": x}


def test_a_head_whose_bias_is_tied_to_another_module_is_replicated(tmp_path: Path) -> None:
    """transformers slices its weight alone, and then adds a plain bias to a DTensor; nor may the table be sliced."""
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, is_decoder=True
    )
    styles = {"cls.predictions.decoder": "colwise_gather_output"}
    plan = meshwright.from_tp_plan(styles, transformers.BertLMHeadModel(config), labelled(), mesh={"tp": 2})
    tied = {"cls.predictions.bias", "bert.embeddings.word_embeddings.weight"}
    assert {one.name for one in plan.expressible("transformers") if one.kind == "parameter"} == tied
    file = plan.export("transformers", tmp_path / "distributed.json", allow_changes=True)
    assert {*json.loads(file.read_text(encoding="utf-8"))["tp_plan"].values()} == {"replicate"}


def test_a_router_that_says_no_sizes_is_replicated(tmp_path: Path) -> None:
    """transformers refuses to slice the columns of a module without `out_features`."""
    model = routed("olmoe")
    styles = dict.fromkeys((f"model.layers.{layer}.mlp.gate" for layer in (0, 1)), "colwise_gather_output")
    plan = meshwright.from_tp_plan(styles, model, labelled(), mesh={"tp": 2})
    found = {one.name for one in plan.expressible("transformers") if one.kind == "parameter"}
    assert found == {f"{module}.weight" for module in styles}
    file = plan.export("transformers", tmp_path / "distributed.json", allow_changes=True)
    assert {*json.loads(file.read_text(encoding="utf-8"))["tp_plan"].values()} == {"replicate"}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2}, pytest.param({"dp": 2, "tp": 2}, marks=pytest.mark.slow)])
def test_the_loader_of_transformers_trains_the_export_as_one_device(
    on_ranks: Callable[..., Any], tmp_path: Path, mesh: dict[str, int]
) -> None:
    model = llama()
    plan = meshwright.from_tp_plan("auto", model, labelled(), mesh=mesh)
    assert plan.expressible("transformers") == []
    file = plan.export("transformers", tmp_path / "distributed.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    written, own = content["tp_plan"], model.tp_plan
    assert {name: written[name] for name in own} == own
    assert {style for name, style in written.items() if name not in own} == {"replicate"}
    assert (content["tp_size"], content["dp_replicate_size"]) == (2, mesh.get("dp", 1))
    model.save_pretrained(tmp_path / "model")
    ranks = 2 * mesh.get("dp", 1)
    worst = on_ranks("transformed", (tmp_path / "model", file), world_size=ranks, module="exports")
    assert max(worst.values()) < 1e-5, worst


def mixtral() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=16,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"dp": 2, "tp": 2}])
def test_the_loader_of_transformers_trains_a_mixture_of_experts(
    on_ranks: Callable[..., Any], tmp_path: Path, mesh: dict[str, int]
) -> None:
    """The experts are replicated, against the plan that the model has for itself."""
    model = mixtral()
    styles = {name: style for name, style in model.tp_plan.items() if "experts" not in name}
    styles |= {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    plan = meshwright.from_tp_plan(styles, model, labelled(), mesh=mesh)
    assert plan.expressible("transformers") == []
    file = plan.export("transformers", tmp_path / "distributed.json")
    written = json.loads(file.read_text(encoding="utf-8"))["tp_plan"]
    assert {name: written[name] for name in styles} == styles and {*model.tp_plan} <= {*written}
    model.save_pretrained(tmp_path / "model")
    ranks = 2 * mesh.get("dp", 1)
    worst = on_ranks("transformed", (tmp_path / "model", file), world_size=ranks, module="exports")
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh", "zero"),
    [
        *((family, {"tp": 2}, 0) for family in EXPERTS if family != "llama4_text"),
        *((family, {"dp": 2, "tp": 2}, 0) for family in ("mixtral", "olmoe", "qwen3_moe")),
        ("mixtral", {"dp": 2, "tp": 2}, 3),
    ],
)
def test_the_loader_of_transformers_trains_experts_in_slices(
    on_ranks: Callable[..., Any], tmp_path: Path, family: str, mesh: dict[str, int], zero: int
) -> None:
    model = routed(family)
    plan = meshwright.from_tp_plan("auto", model, labelled(), mesh=mesh, ep_plan="auto", zero=zero)
    assert plan.expressible("transformers") == []
    file = plan.export("transformers", tmp_path / "distributed.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["ep_plan"] == model.ep_plan and content["ep_size"] == content["tp_size"] == 2
    model.save_pretrained(tmp_path / "model")
    ranks = 2 * mesh.get("dp", 1)
    worst = on_ranks("transformed", (tmp_path / "model", file), world_size=ranks, module="exports")
    assert max(worst.values()) < 1e-5, worst


def written_as_read(plan: meshwright.Plan, model: nn.Module, folder: Path) -> Path:
    """The export of a plan to transformers, which has the styles that the family has for its experts."""
    assert plan.expressible("transformers") == []
    file = plan.export("transformers", folder / "distributed.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    own = {name: style for name, style in model.tp_plan.items() if "experts" in name and name.startswith("model.")}
    assert {name: style for name, style in content["tp_plan"].items() if name in own} == own
    assert "moe_tp_experts" in own.values() and "ep_plan" not in content
    return file


@pytest.mark.slow
def test_the_loader_of_transformers_trains_gate_and_up_in_stripes(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """But not beside replicas, with which it loads them in another order."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("phi3", **SMALL))
    styles = {"model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    copies = meshwright.from_tp_plan(styles, model, labelled(), mesh={"dp": 2, "tp": 2})
    assert "model.layers.1.mlp.chunk" in {change.name for change in copies.expressible("transformers")}
    plan = meshwright.from_tp_plan(styles, model, labelled(), mesh={"tp": 2})
    assert plan.expressible("transformers") == [] and meshwright.verify(model, labelled(), plan).passed
    file = plan.export("transformers", tmp_path / "distributed.json")
    written = json.loads(file.read_text(encoding="utf-8"))["tp_plan"]
    assert {name: written[name] for name in styles} == styles
    model.save_pretrained(tmp_path / "model")
    worst = on_ranks("transformed", (tmp_path / "model", file), world_size=2, module="exports")
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", pytest.param("llama4_text", marks=pytest.mark.slow)])
def test_slices_of_every_expert_are_read_proven_and_written(tmp_path: Path, family: str) -> None:
    """`packed_colwise` and `packed_rowwise`, which slice both matrices of an expert that one tensor holds."""
    model = routed(family)
    plan = meshwright.from_tp_plan("auto", model, labelled(), mesh=2)
    halves = {name: entry for name, entry in plan.content["parameters"].items() if "packed" in entry}
    assert {entry["packed"]["sizes"][0] * 2 for entry in halves.values()} == {64} and len(halves) == 2
    assert all(math.prod(entry["shape"]) == 2 * math.prod(entry["local_shape"]) for entry in halves.values())
    assert meshwright.verify(model, labelled(), plan).passed
    written_as_read(plan, model, tmp_path)
    again = meshwright.load(plan.save(tmp_path / "plan.json"), model, labelled())
    assert all(again.content[key] == plan.content[key] for key in ("parameters", "operators", "communication"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        *((family, {"tp": 2}) for family in ("mixtral", "olmoe", "qwen3_moe", "deepseek_v3")),
        ("mixtral", {"dp": 2, "tp": 2}),
    ],
)
def test_the_loader_of_transformers_trains_slices_of_every_expert(
    on_ranks: Callable[..., Any], tmp_path: Path, family: str, mesh: dict[str, int]
) -> None:
    model = routed(family)
    file = written_as_read(meshwright.from_tp_plan("auto", model, labelled(), mesh=mesh), model, tmp_path)
    model.save_pretrained(tmp_path / "model")
    ranks = 2 * mesh.get("dp", 1)
    worst = on_ranks("transformed", (tmp_path / "model", file), world_size=ranks, module="exports")
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"), [("mixtral", {"tp": 2}), ("qwen3_moe", {"tp": 4}), ("mixtral", {"dp": 2, "tp": 2})]
)
def test_the_loader_of_transformers_trains_a_searched_plan(
    on_ranks: Callable[..., Any], tmp_path: Path, family: str, mesh: dict[str, int]
) -> None:
    """Which slices every expert, since memory leaves no room for all of them."""
    model, options = routed(family), {"mesh": mesh, "for_target": "transformers", "plan_cache": None}
    free = meshwright.plan(model, labelled(), **options)  # type: ignore[arg-type]
    sliced = meshwright.from_tp_plan("auto", model, labelled(), mesh=mesh)
    limit = (free.memory + sliced.memory) // 2
    plan = meshwright.plan(model, labelled(), memory_limit=limit, **options)  # type: ignore[arg-type]
    assert plan.memory <= limit < free.memory and plan.gap is not None
    assert meshwright.verify(model, labelled(), plan).passed
    file = written_as_read(plan, model, tmp_path)
    model.save_pretrained(tmp_path / "model")
    worst = on_ranks("transformed", (tmp_path / "model", file), world_size=math.prod(mesh.values()), module="exports")
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.slow
@pytest.mark.parametrize("words", ["embedding_rowwise", "embedding_colwise"])
def test_the_loader_of_transformers_trains_a_table_that_is_scaled(
    on_ranks: Callable[..., Any], tmp_path: Path, words: str
) -> None:
    """The table of Gemma scales its rows within its module, and the output layer shares its weight."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "use_cache": False}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **heads, **ends))
    head = {"embedding_rowwise": "colwise_gather_output", "embedding_colwise": "rowwise_split_input"}[words]
    styles = {**model.tp_plan, "model.embed_tokens": words, "lm_head": head}
    plan = meshwright.from_tp_plan(styles, model, labelled(), mesh={"tp": 2})
    assert plan.expressible("transformers") == []
    file = plan.export("transformers", tmp_path / "distributed.json")
    assert json.loads(file.read_text(encoding="utf-8"))["tp_plan"]["model.embed_tokens"] == words
    model.save_pretrained(tmp_path / "model")
    worst = on_ranks("transformed", (tmp_path / "model", file), world_size=2, module="exports")
    assert max(worst.values()) < 1e-5, worst


def families(name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The plans of this name of all families in transformers, read from their source."""
    folder = Path(transformers.__file__).parent / "models"
    for file in sorted(folder.glob("*/configuration_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(targets[0], ast.Name) and targets[0].id == name and isinstance(node.value, ast.Dict):
                entries = zip(node.value.keys, node.value.values, strict=True)  # a `**` has no key
                yield (
                    file.parent.name,
                    {ast.literal_eval(key): ast.literal_eval(value) for key, value in entries if key},
                )


def test_every_style_of_the_families_of_transformers_is_read() -> None:
    plans = [plan for _, plan in families("base_model_tp_plan")]
    read = [module_styles.style_of(style, key) for plan in plans for key, style in plan.items()]
    assert len(plans) > 100 and sum(style.packed for style in read) > 50
    by_expert = [plan for _, plan in families("base_model_ep_plan")]
    styles = {module_styles.style_of(style, key) for plan in by_expert for key, style in plan.items()}
    assert len(by_expert) > 60 and {module_styles.STYLES[name] for name in module_styles.EXPERTS} <= styles


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "glm", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "mixtral"])
def test_the_plan_of_a_family_is_read_and_proven(family: str) -> None:
    config = transformers.AutoConfig.for_model(family, **SMALL)
    model = transformers.AutoModelForCausalLM.from_config(config)
    by_expert = "auto" if family == "mixtral" else None
    plan = meshwright.from_tp_plan("auto", model, labelled(), mesh=2, ep_plan=by_expert)
    sliced = [name for name, one in plan.content["tensors"].items() if ["tp"] in one["dims"]]
    assert len(sliced) >= 8 and meshwright.verify(model, labelled(), plan).passed


def sequence_parallel() -> dict[str, Any]:
    """The plan that torchtitan writes with the styles of torch, of a GPT."""
    entering = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    columns = dict.fromkeys((*COLUMNS, "layers.*.feed_forward.up_proj"), ColwiseParallel())
    rows = ("layers.*.attention.o_proj", "layers.*.feed_forward.down_proj")
    return {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        **dict.fromkeys(("norm", "layers.*.*_norm"), SequenceParallel()),
        "layers.*.attention": entering,
        "layers.*.feed_forward": entering,
        **columns,
        **dict.fromkeys(rows, RowwiseParallel(output_layouts=Shard(1))),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }


@pytest.mark.slow
def test_a_parallelize_plan_is_read_proven_and_compared_with_the_best() -> None:
    module = gpt()
    plan = meshwright.from_tp_plan(sequence_parallel(), module, tokens(), loss=next_token, mesh=4)
    by_name = {name: (taken, made) for name, taken, made in layouts(plan)}
    assert by_name["layers.1.attention_norm"][0][0] == "(-, tp, -)"
    assert by_name["layers.1.attention.q_proj"] == (["(-, -, -)", "(tp, -)", "(tp)"], ["(-, -, tp)"])
    assert by_name["layers.1.feed_forward.down_proj"][1] == ["(-, tp, -)"]
    seconds = plan.content["cost"]["redistributions"]  # losses and their sums alone are reduced
    assert seconds["reduce_scatter"] > 5 * seconds["all_reduce"]
    assert meshwright.verify(module, tokens(), plan).passed
    excess = meshwright.compare(plan)
    assert excess.other.gap is not None and excess.share > 0
    assert excess.plan.cost == pytest.approx(excess.other.cost * (1 + excess.share))
    assert "% longer" in str(excess) and "layers.*.attention.q_proj" in str(excess)
    sliced = [change.name for change in plan.expressible("transformers")]
    assert "layers.0.attention_norm" in sliced and "layers.0.attention.q_proj" not in sliced


@pytest.mark.parametrize("ordered", [dict, lambda plan: dict(reversed(plan.items()))], ids=["written", "reversed"])
@pytest.mark.parametrize("style", ["rowwise", None])
def test_a_name_counts_before_globs(style: Any, ordered: Any) -> None:
    plan = {"layers.*.attention.q_proj": "colwise", "layers.0.attention.q_proj": style}
    read = meshwright.from_tp_plan(ordered(plan), gpt(), tokens(), loss=next_token, mesh=2)
    shapes = [read.content["parameters"][f"layers.{layer}.attention.q_proj.weight"] for layer in (0, 1)]
    sliced = [[a // b for a, b in zip(one["shape"], one["local_shape"], strict=True)] for one in shapes]
    assert sliced == [[1, 2] if style else [1, 1], [2, 1]]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("code", "tp_plan", "mesh"),
    [
        ("MW880", {"tokens": "packed_colwise"}, 2),
        ("MW880", {"layers.*.attention.q_proj": "columns"}, 2),
        ("MW881", {"layers.*.attention.query": "colwise"}, 2),
        ("MW881", {"layers.*": "colwise"}, 2),
        ("MW882", {"tokens": "embedding_rowwise"}, {"dp": 2}),
        ("MW882", "auto", 2),
        ("MW882", {"tokens": "embedding_rowwise"}, "tp"),
    ],
)
def test_a_plan_that_cannot_be_read_is_refused(code: str, tp_plan: Any, mesh: Any) -> None:
    with pytest.raises(meshwright.CodedError) as error:
        meshwright.from_tp_plan(tp_plan, gpt(), tokens(), loss=next_token, mesh=mesh)
    assert error.value.code == code


@pytest.mark.parametrize(
    ("options", "code"),
    [({"memory_limit": 1000}, "MW501"), ({"memory_limit": 10**7}, None), ({"strategies": {"loss": [[1]]}}, "MW882")],
)
def test_options_of_a_plan_that_is_read_count_or_are_refused(options: dict[str, Any], code: str | None) -> None:
    module, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.ones(8, 8), torch.ones(8, 8))
    found = None
    try:
        meshwright.from_tp_plan({"0": "colwise"}, module, batch, loss=nn.MSELoss(), mesh=2, **options)
    except meshwright.CodedError as error:
        found = error.code
    assert found == code


def test_a_plan_of_experts_is_that_of_a_model_that_has_one() -> None:
    options: dict[str, Any] = {"loss": next_token, "mesh": 2, "ep_plan": "auto"}
    with pytest.raises(meshwright.CodedError, match="there is no ep_plan") as error:
        meshwright.from_tp_plan({"tokens": "embedding_rowwise"}, gpt(), tokens(), **options)
    assert error.value.code == "MW882"


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_only_as_many_experts_per_rank_are_exported(tmp_path: Path, count: int) -> None:
    sizes = SMALL | {"num_local_experts": count, "num_hidden_layers": 1}
    config = transformers.AutoConfig.for_model("mixtral", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config)
    by_expert = {"model.layers.*.mlp.experts": "ep_dispatch_experts", "model.layers.*.mlp.experts.*": "grouped_gemm"}
    plan = meshwright.from_tp_plan({}, model, labelled(), mesh={"tp": 2}, ep_plan=by_expert)
    changes = plan.expressible("transformers")
    matrices = [f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate_up", "down")]
    assert [change.name for change in changes if change.kind == "parameter"] == (matrices if count == 3 else [])
    assert bool(changes) == (count == 3)
    file = plan.export("transformers", tmp_path / "distributed.json", allow_changes=True)
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content.get("ep_plan") == (None if count == 3 else model.ep_plan)
    assert ("model.layers.*.mlp.experts" in content["tp_plan"]) == (count == 3)


def test_the_best_plan_takes_no_longer_than_one_of_complete_batches() -> None:
    plan = meshwright.from_tp_plan({"head": None}, gpt(), tokens(), loss=next_token, mesh=2)
    assert meshwright.compare(plan).share > -1e-9  # which a search on sliced batches exceeds by a gather


def test_plans_of_two_steps_are_not_compared() -> None:
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": 2, "plan_cache": None}
    plans = [
        meshwright.plan(nn.Linear(8, width), (torch.randn(8, 8), torch.randn(8, width)), **options) for width in (4, 8)
    ]
    for other, code in ((plans[1], "MW421"), ("plan.json", "MW204")):
        with pytest.raises(meshwright.CodedError) as error:
            meshwright.compare(plans[0], other)  # type: ignore[arg-type]
        assert error.value.code == code


@pytest.mark.slow
def test_an_export_that_transformers_cannot_say_writes_nothing(tmp_path: Path) -> None:
    module, options = gpt(torch.float32), {"loss": next_token, "mesh": 2, "zero": 1}
    gathered = meshwright.from_tp_plan(MEGATRON | {"head": "colwise_gather_output"}, module, tokens(), **options)
    (optimizer,) = gathered.expressible("transformers")
    assert (optimizer.kind, optimizer.bytes > 0) == ("optimizer", True)
    plan = meshwright.from_tp_plan(MEGATRON, module, tokens(), **options)
    names = [change.name for change in plan.expressible("transformers")]
    assert names == ["loss.cross_entropy_loss", optimizer.name]  # whose classes would be those of a rank
    file = tmp_path / "distributed.json"
    with pytest.raises(meshwright.CodedError) as error:
        plan.export("transformers", file)
    assert error.value.code == "MW465" and not file.exists()
    assert json.loads(plan.export("transformers", file, allow_changes=True).read_text(encoding="utf-8"))["tp_size"] == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["torchtitan", "transformers", "deepspeed"])
def test_operators_across_the_rows_of_ranks_are_listed(target: str) -> None:
    """Which trainers of local tensors give the rows of one rank."""
    module, (batch, _) = built("rows")
    plan = meshwright.plan(module, batch, loss=loss_of, mesh=4, mode="data_parallel", plan_cache=None)
    names = [(change.name, change.bytes < 0) for change in plan.expressible(target)]
    assert names == [("norm.batch_norm", True), ("sub", True), ("matmul", True)]


@pytest.fixture
def pretended() -> Iterator[None]:
    """A process group of four ranks without the other three."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_dtensors_are_read_as_the_plan_that_made_them(pretended: None) -> None:
    styles = {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    written = {f"layers.{layer}.feed_forward.{name}": one for layer in range(2) for name, one in styles.items()}
    device_mesh, axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), {"dp": 2, "tp": 2}
    sharded = parallelize_module(gpt(torch.float32), device_mesh["tp"], written)
    common: dict[str, Any] = {"loss": next_token, "device": "cpu"}
    read = meshwright.from_dtensor(sharded, gpt(torch.float32), tokens(), rows=("dp",), mesh=axes, **common)
    same = meshwright.from_tp_plan(written, gpt(torch.float32), tokens(), mesh=axes, **common)
    assert layouts(read) == layouts(same) and read.content["tensors"] == same.content["tensors"]
    assert read.content["tensors"]["layers.1.feed_forward.up_proj.weight"]["dims"] == [["tp"], []]
    with pytest.raises(meshwright.CodedError, match="mesh of all ranks"):
        meshwright.from_dtensor(sharded, gpt(torch.float32), tokens(), rows=("dp",), **common)
    fully_shard(sharded, mesh=device_mesh["dp"])
    again = meshwright.from_dtensor(sharded, gpt(torch.float32), tokens(), rows=("dp",), **common)
    assert again.content["tensors"] == read.content["tensors"]
    assert again.content["memory"]["parameters"] < read.content["memory"]["parameters"]


def test_a_dim_keeps_the_order_of_the_axes_that_slice_it(pretended: None) -> None:
    """`fully_shard` slices what `parallelize_module` has sliced."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module, batch, common = nn.Linear(8, 8), (torch.randn(8, 8), torch.randn(8, 8)), {"loss": nn.MSELoss()}
    weight = DTensor.from_local(torch.zeros(2, 8), device_mesh, [_StridedShard(0, split_factor=2), Shard(0)])
    plan = meshwright.from_dtensor({"weight": weight}, module, batch, **common)  # type: ignore[arg-type]
    assert plan.content["tensors"]["weight"]["dims"] == [["tp", "dp"], []]
    assert meshwright.verify(module, batch, plan).passed
    unfinished = DTensor.from_local(torch.zeros(8, 8), device_mesh, [Partial(), Replicate()])
    for state, rows in ({"weight": unfinished}, ()), ({"weight": weight}, 3):
        with pytest.raises(meshwright.CodedError) as error:
            meshwright.from_dtensor(state, module, batch, rows=rows, **common)  # type: ignore[arg-type]
        assert error.value.code == "MW882"


@pytest.mark.parametrize("rows", [("dp", "tp"), "rows"])
def test_dtensors_that_are_sliced_over_several_axes_at_once_are_read(pretended: None, rows: Any) -> None:
    """As by `fully_shard` over two axes, which it flattens into one: by the names of these, or by that of the one."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module, batch = nn.Linear(8, 4), (torch.randn(8, 8), torch.randn(8, 4))
    sharded = fully_shard(nn.Linear(8, 4), mesh=device_mesh["dp", "tp"]._flatten("rows"))
    common: dict[str, Any] = {"loss": nn.MSELoss(), "device": "cpu"}
    plan = meshwright.from_dtensor(sharded.state_dict(), module, batch, rows=rows, **common)
    assert plan.mesh == ({"rows": 4} if rows == "rows" else {"dp": 2, "tp": 2})
    assert plan.content["inputs"]["0"]["dims"] == [list(plan.mesh), []]
    assert plan.content["tensors"]["weight"]["dims"] == [[], []] and plan.content["zero"]["stage"] == 3
    for names, other in ({"module.weight": "weight"}, nn.Linear(8, 4)), ({"weight": "weight"}, nn.Linear(8, 8)):
        state = {name: sharded.state_dict()[one] for name, one in names.items()}
        with pytest.raises(meshwright.CodedError, match="give the same module"):
            meshwright.from_dtensor(state, other, batch, **common)
    with pytest.raises(meshwright.CodedError, match="axes of all ranks"):
        meshwright.from_dtensor(sharded, module, batch, mesh=4, **common)  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("placed", "packed", "sent"), [(_StridedShard(0, split_factor=2), True, []), (Shard(0), False, ["all_gather"])]
)
def test_dtensors_of_fused_weights_are_read_in_stripes_or_blocks(
    pretended: None, placed: Any, packed: bool, sent: list[str]
) -> None:
    module, device_mesh = fused(), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    tensors = {f"gate_up.{name}": one for name, one in module.gate_up.named_parameters()}
    sharded = {
        name: DTensor.from_local(one.detach().chunk(4)[0], device_mesh, [placed], shape=one.shape, stride=one.stride())
        for name, one in tensors.items()
    }
    plan = meshwright.from_dtensor(sharded, module, tokens(), loss=next_token, device="cpu")
    entries = {name: plan.content["parameters"][name] for name in tensors}
    assert [entry["local_shape"][0] for entry in entries.values()] == [16, 16]
    assert all(("packed" in entry) == packed for entry in entries.values())
    (chunk,) = [one for one in plan.content["operators"] if one["op"] == "chunk"]
    assert [step["collective"] for one in chunk["redistributions"] for step in one["forward"]] == sent
    assert meshwright.verify(module, tokens(), plan).passed


@pytest.mark.slow
def test_rules_of_autotp_mean_what_the_plan_says(tmp_path: Path) -> None:
    from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType

    plan = meshwright.from_tp_plan(MEGATRON, gpt(torch.float32), tokens(), loss=next_token, mesh={"dp": 2, "tp": 2})
    kinds = {change.kind for change in plan.expressible("deepspeed")}
    assert kinds == {"parameter", "operator"}  # the table in slices of the vocabulary
    file = plan.export("deepspeed", tmp_path / "deepspeed.json", allow_changes=True)
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["gradient_clipping"] == 0.0
    assert content["train_micro_batch_size_per_gpu"] == 4 and content["tensor_parallel"]["autotp_size"] == 2
    rules = AutoTPConfig.from_dict(content["tensor_parallel"]["partition_config"])
    expected = {"q_proj": PartitionType.COLUMN, "o_proj": PartitionType.ROW, "attention_norm": PartitionType.SKIP}
    for name, kind in expected.items():
        (path,) = [one for one, _ in gpt().named_modules() if one.startswith("layers.1") and one.endswith(name)]
        spec = rules.find_matching_spec(f"{path}.weight")
        assert spec is not None and spec.partition_type is kind
    assert not rules.use_default_specs


@pytest.mark.slow
def test_deepspeed_trains_the_export_as_one_device(on_ranks: Callable[..., Any], tmp_path: Path) -> None:
    model = llama()
    styles = {name: style for name, style in model.tp_plan.items() if "embed" not in name}
    plan = meshwright.from_tp_plan(styles, model, labelled(), mesh={"tp": 2})
    assert plan.expressible("deepspeed") == []
    file = plan.export("deepspeed", tmp_path / "deepspeed.json")
    model.save_pretrained(tmp_path / "model")
    worst = on_ranks("sped", (tmp_path / "model", file), world_size=2, module="exports")
    assert max(worst.values()) < 1e-5, worst


FUSED = {
    "model.layers.*.self_attn.qkv_proj": "packed_colwise",
    "model.layers.*.mlp.gate_up_proj": "packed_colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
"""Of Phi-3, whose queries, and half as many keys and values, are one weight, as are gate and up."""


@pytest.mark.slow
class Scaled(nn.Linear):
    """Has a parameter without dims, as the scale of CLIP."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def test_a_parameter_without_dims_is_listed_for_deepspeed() -> None:
    batch = torch.randn(8, 8), torch.randn(8, 8)
    plan = meshwright.plan(Scaled(), batch, loss=nn.MSELoss(), mesh=2, mode="data_parallel", plan_cache=None)
    assert [(one.kind, one.name) for one in plan.expressible("deepspeed")] == [("parameter", "scale")]


@pytest.mark.parametrize(("target", "entry"), [("transformers", "transformed"), ("deepspeed", "sped")])
def test_fused_weights_of_several_sizes_train_as_one_device(
    on_ranks: Callable[..., Any], tmp_path: Path, target: str, entry: str
) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "use_cache": False}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, **heads, **ends))
    plan = meshwright.from_tp_plan(FUSED, model, labelled(), mesh={"tp": 2})
    file = plan.export(target, tmp_path / "exported.json", allow_changes=True)
    style = {"transformers": "rowwise_split_input", "deepspeed": "gradient_clipping"}
    assert style[target] in file.read_text(encoding="utf-8")
    model.save_pretrained(tmp_path / "model")
    worst = on_ranks(entry, (tmp_path / "model", file), world_size=2, module="exports")
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize(("mesh", "stage"), [({"dp": 4, "tp": 1}, 1), ({"dp": 4, "tp": 1}, 2), ({"tp": 4}, 3)])
@pytest.mark.parametrize("target", ["torchtitan", "transformers"])
def test_what_zero_slices_is_listed_where_a_target_slices_nothing(
    target: str, mesh: dict[str, int], stage: int
) -> None:
    """With the bytes that it keeps in addition: of a layer that no axis slices, its gradient and its states."""
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": mesh, "optimizer": torch.optim.AdamW}
    styles, batch = {"0": "colwise_gather_output"}, (torch.randn(8, 64), torch.randn(8, 64))
    plans = [meshwright.from_tp_plan(styles, module, batch, zero=one, **options) for one in (0, stage)]
    kept = [sum(one.content["memory"][part] for part in ("parameters", "gradients", "optimizer")) for one in plans]
    assert plans[0].expressible(target) == []
    (change,) = plans[1].expressible(target)
    assert change.kind == "optimizer" and change.bytes == pytest.approx(kept[0] - kept[1], rel=0.05)


def test_a_plan_for_torch_is_the_best_that_torch_can_say() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 3, 3, padding=1))
        batch = torch.empty(1, 3, 8192, 8192), torch.empty(1, 3, 8192, 8192)
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": 4, "cluster": "dgx_h100", "plan_cache": None}
    free = meshwright.plan(module, batch, **options)
    plan = meshwright.plan(module, batch, for_target="torch", **options)
    assert {change.name for change in free.expressible("torch")} == {"0", "2"}  # pictures in slices of rows
    assert plan.expressible("torch") == []
    assert plan.gap is not None and plan.gap < 0.01 and plan.cost > 1.5 * free.cost
    rows = {"0": [[1, 1, 4, 1], [1, 1, 1, 1]]}
    with pytest.raises(meshwright.CodedError) as error:
        meshwright.plan(module, batch, for_target="torch", strategies=rows, **options)
    assert error.value.code == "MW402"


class Table(nn.Module):
    """A table of words between linear layers, which may be sliced in any way."""

    def __init__(self, width: int = 4096) -> None:
        super().__init__()
        self.words = nn.Embedding(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(self.words(x))))


EVERY_STYLE = {
    "words": ("replicate", "embedding_rowwise", "embedding_colwise"),
    "up": ("replicate", "colwise", "colwise_gather_output", "rowwise_split_input"),
    "down": ("replicate", "colwise_gather_output", "rowwise", "rowwise_split_input"),
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 4096])
@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 2, "tp": 2}])
def test_a_plan_for_transformers_is_the_best_of_all_its_styles(rows: int, mesh: dict[str, int]) -> None:
    with torch.device("meta"):
        module, batch = Table(), (torch.empty(rows, 16, dtype=torch.int64), torch.empty(rows, 16, 4096))
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": mesh, "cluster": "dgx_h100", "plan_cache": None}
    plan = meshwright.plan(module, batch, for_target="transformers", **options)
    every = [
        meshwright.from_tp_plan(dict(zip(EVERY_STYLE, styles, strict=True)), module, batch, **options)
        for styles in product(*EVERY_STYLE.values())
    ]
    possible = [one.cost for one in every if one.expressible("transformers") == []]
    assert 24 < len(possible) < len(every) and plan.expressible("transformers") == []
    assert plan.cost == pytest.approx(min(possible)) and plan.gap is not None
    assert plan.cost < max(possible) / 1.2


class Activated(nn.Linear):
    """Computes with its result inside of its module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(super().forward(x))


class ScaledTable(nn.Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3.0


class Residual(nn.Module):
    """Adds what a linear layer takes, too, and has layers that compute with their results."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words, self.up, self.down = ScaledTable(width, width), Activated(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        return self.down(h + self.up(h))


WITHIN_MODULES = {
    "words": ("replicate", "embedding_rowwise", "embedding_colwise"),
    "up": ("replicate", "colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"),
    "down": ("replicate", "colwise_gather_output", "rowwise", "rowwise_split_input"),
}


def test_what_modules_compute_with_their_results_counts_for_styles() -> None:
    """A partial sum is added up where a module returns it, behind what the module makes of it."""
    with torch.device("meta"):
        module, batch = Residual(2048), (torch.empty(64, 16, dtype=torch.int64), torch.empty(64, 16, 2048))
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": {"tp": 4}, "cluster": "dgx_h100", "plan_cache": None}
    plan = meshwright.plan(module, batch, for_target="transformers", **options)
    possible = {}
    for styles in product(*WITHIN_MODULES.values()):
        one = meshwright.from_tp_plan(dict(zip(WITHIN_MODULES, styles, strict=True)), module, batch, **options)
        if one.expressible("transformers") == []:
            possible[styles] = one.cost
    assert {up for _, up, _ in possible} == {"replicate", "colwise_gather_output"}
    assert {words for words, _, _ in possible} == {*WITHIN_MODULES["words"]}
    assert plan.cost == pytest.approx(min(possible.values()))
    replaced = meshwright.plan(module, batch, for_target="deepspeed", **options)
    parameters = replaced.content["parameters"].items()
    assert {name for name, one in parameters if one["local_shape"] != one["shape"]} == {"down.weight", "down.bias"}


class Total(nn.Linear):
    """Returns a number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


@pytest.mark.parametrize("target", ["transformers", "parallelize_module", "deepspeed", "torchtitan"])
def test_a_module_that_returns_a_number_is_planned(target: str) -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Total(16, 16))
    plan = meshwright.plan(module, (torch.randn(8, 16),), mesh={"tp": 2}, for_target=target, plan_cache=None)
    assert plan.expressible(target) == []


class Stream(nn.Module):
    """A residual stream: a linear layer may take slices of it, an addition must take it as it comes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(width, width)
        self.up, self.down, self.head = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        return self.head(h + self.down(torch.relu(self.up(h))))


def test_uses_of_a_value_that_styles_bar_apart_are_searched_apart() -> None:
    with torch.device("meta"):
        module, batch = Stream(2048), (torch.empty(64, 16, dtype=torch.int64), torch.empty(64, 16, 2048))
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": {"dp": 2, "tp": 2}, "plan_cache": None}
    plan = meshwright.plan(module, batch, cluster="dgx_h100", for_target="transformers", **options)
    assert plan.gap is not None and plan.gap < 0.2  # 0.77 where the optimum of a search is none that styles say


class Routed(nn.Module):
    """A table, experts as in Mixtral, and a linear layer."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        sizes = {"hidden_size": width, "intermediate_size": hidden, "num_local_experts": experts}
        config = transformers.MixtralConfig(**sizes)
        config._experts_implementation = "grouped_mm"
        self.words, self.head = nn.Embedding(256, width), nn.Linear(width, width, bias=False)
        self.mlp = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.mlp(self.words(x)))


WITHIN = {"experts": "moe_tp_experts", "experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise"}
BY_EXPERT = {
    "experts": "ep_dispatch_experts",
    "experts.gate_up_proj": "grouped_gemm",
    "experts.down_proj": "grouped_gemm",
}
OF_EXPERTS: dict[str, dict[str, str]] = {"replicated": {}, "within": WITHIN, "by_expert": BY_EXPERT}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "rows", "mesh", "best"),
    [
        (8, 64, {"tp": 4}, "within"),
        (6, 4, {"dp": 2, "tp": 2}, "within"),
        (8, 64, {"dp": 4}, "replicated"),
    ],
)
def test_a_plan_for_transformers_slices_experts_as_is_best(
    experts: int, rows: int, mesh: dict[str, int], best: str
) -> None:
    """Of all plans that the styles of a table, of experts and of a linear layer can say."""
    with torch.device("meta"):
        module, batch = (
            Routed(experts, 1024, 4096),
            (torch.empty(rows, 16, dtype=torch.int64), torch.empty(rows, 16, 1024)),
        )
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": mesh, "cluster": "dgx_h100", "plan_cache": None}
    plan = meshwright.plan(module, batch, for_target="transformers", **options)
    assert plan.expressible("transformers") == [] and plan.gap is not None
    costs: dict[str, list[float]] = {}
    for kind, words, head in product(OF_EXPERTS, EVERY_STYLE["words"], ("replicate", "colwise_gather_output")):
        styles = {"words": words, "head": head, **{f"mlp.{name}": style for name, style in OF_EXPERTS[kind].items()}}
        if "tp" in mesh or {words, head} == {"replicate"}:
            read = meshwright.from_tp_plan(styles, module, batch, **{**options, "mesh": {"tp": 1} | mesh})
            if read.expressible("transformers") == []:
                costs.setdefault(kind, []).append(read.cost)
    every = {kind: min(each) for kind, each in costs.items()}
    assert plan.cost == pytest.approx(min(every.values())) == pytest.approx(every[best]), every


class Shifted(nn.Embedding):
    """A table that computes its indices, as the positions of OPT are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 2)


@pytest.mark.slow
def test_a_table_that_computes_its_indices_stays_replicated() -> None:
    module = nn.Sequential(Shifted(64, 16), nn.Linear(16, 64))
    batch = torch.randint(60, (8, 4)), torch.randint(64, (8, 4))
    options: dict[str, Any] = {"loss": next_token, "mesh": {"tp": 2}, "plan_cache": None}
    plan = meshwright.plan(module, batch, strategies={"0.embedding": [[1, 2], [1, 1]]}, **options)
    assert ("parameter", "0.weight") in {(change.kind, change.name) for change in plan.expressible("transformers")}
    most = meshwright.plan(module, batch, for_target="transformers", **options).memory
    plan = meshwright.plan(module, batch, for_target="transformers", memory_limit=int(0.9 * most), **options)
    sliced = {name: any(one["dims"]) for name, one in plan.content["tensors"].items()}
    assert sliced == {"0.weight": False, "1.weight": True, "1.bias": sliced["1.bias"]}


@pytest.mark.slow
def test_a_limit_leads_to_no_plan_that_the_target_cannot_say() -> None:
    """Half of the heads of T5's attention, to which AutoTP adds the biases of all."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
    module = T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False))
    ids = torch.randint(32, (8, 8))
    batch = {"input_ids": ids, "labels": ids}
    options: dict[str, Any] = {"mesh": {"dp": 2, "tp": 2}, "for_target": "deepspeed", "plan_cache": None}
    most = meshwright.plan(module, batch, **options).memory
    assert meshwright.plan(module, batch, memory_limit=int(0.9 * most), **options).expressible("deepspeed") == []
    with pytest.raises(meshwright.CodedError) as refused:
        meshwright.plan(module, batch, memory_limit=int(0.8 * most), **options)
    assert refused.value.code == "MW501"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["transformers", "parallelize_module", "deepspeed"])
def test_a_plan_by_module_has_a_certificate(target: str) -> None:
    with torch.device("meta"):
        module, batch = Table(), (torch.empty(8, 16, dtype=torch.int64), torch.empty(8, 16, 4096))
    options: dict[str, Any] = {"loss": nn.MSELoss(), "mesh": 8, "cluster": "dgx_h100", "plan_cache": None}
    plan = meshwright.plan(module, batch, for_target=target, **options)
    assert plan.gap is not None and plan.gap < 0.2 and plan.content["search"]["meshes"] == 4
    assert plan.expressible(target) == [] and plan.mesh["tp"] > 1
    for code, changed in {
        "MW410": {"strategies": {"up": [[1, 1, 1], [8, 1]]}},
        "MW412": {"mesh": {"dp": 16}},
    }.items():
        with pytest.raises(meshwright.CodedError) as error:
            meshwright.plan(module, batch, for_target=target, **options | changed)
        assert error.value.code == code


def test_rows_that_torchtitan_has_complete_are_refused() -> None:
    """DTensor has no rule for the gradient of a group norm; over `tp` alone it is computed on complete rows."""
    module, batch = nn.Sequential(nn.GroupNorm(2, 8), nn.Linear(8, 4)), (torch.ones(8, 8), torch.ones(8, 4))
    options: dict[str, Any] = {"loss": nn.MSELoss(), "for_target": "torchtitan", "plan_cache": None}
    with pytest.raises(meshwright.CodedError) as error:
        meshwright.plan(module, batch, mesh={"dp": 2, "tp": 2}, **options)
    assert error.value.code == "MW412" and "group_norm" in str(error.value)
    plan = meshwright.plan(module, batch, mesh=2, **options)
    assert plan.mesh == {"tp": 2} and plan.expressible("torchtitan") == []


def test_a_block_of_gpt2_sends_what_megatrons_does() -> None:
    """Its queries, keys and values are one weight: two all-reduces forward and two backward, and nothing else."""
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=256,
        n_embd=1024,
        n_layer=1,
        n_head=16,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    x = torch.zeros(1, 256, dtype=torch.long)
    options: dict[str, Any] = {"mesh": {"tp": 4}, "cluster": "dgx_h100", "plan_cache": None}
    plan = meshwright.plan(model, {"input_ids": x, "labels": x}, **options)
    sent = {one["name"]: one["redistributions"] for one in plan.content["operators"] if one["redistributions"]}
    block = [one for name, each in sent.items() if ".h.0." in name for one in each]
    steps = [step for one in block for step in (*one["forward"], *one["backward"])]
    assert [step["collective"] for step in steps] == ["all_reduce"] * 4
    assert {step["bytes"] for step in steps} == {2 * 3 * 256 * 1024 * 4 // 4}
    weight = plan.content["parameters"]["transformer.h.0.attn.c_attn.weight"]
    assert (weight["local_shape"], weight["packed"]) == ([1024, 768], {"dim": 1, "sizes": [1024] * 3})


class ShiftedNorm(nn.Module):
    """Norms of heads by 1 + weight, as Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class NormedHeads(nn.Module):
    """(rows, tokens, 8) -> (rows, tokens, 8), with two heads in between."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.norm, self.o = nn.Linear(8, 8), ShiftedNorm(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.q(x).view(*x.shape[:2], -1, 4).transpose(1, 2)
        return self.o(self.norm(heads).transpose(1, 2).flatten(2))


def test_gradients_of_what_slices_share_are_added_up_where_it_is_computed_first(tmp_path: Path) -> None:
    styles = {"q": "colwise", "norm": "replicated_with_grad_allreduce", "o": "rowwise"}
    batch = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    plan = meshwright.from_tp_plan(styles, NormedHeads(), batch, loss=nn.MSELoss(), mesh=2)
    assert plan.expressible("transformers") == []
    plan.export("transformers", tmp_path / "styles.json")
    assert json.loads((tmp_path / "styles.json").read_text(encoding="utf-8"))["tp_plan"] == styles


class Split(nn.Module):
    """Two linear layers, and what splits the columns of the first one."""

    def __init__(self, split: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.q, self.o, self.split = nn.Linear(8, 8), nn.Linear(8, 8), split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.split(self.q(x)).tanh().flatten(2))


@pytest.mark.parametrize(
    ("split", "refused"),
    [
        (lambda x: x.view(2, 3, -1, 4), False),
        (lambda x: x.unflatten(-1, (-1, 4)), False),
        (lambda x: x.view(2, 3, x.shape[-1] // 4, 4), False),
        (lambda x: x.view(2, 3, 2, 4), True),  # GPT-J: torch refuses a slice
        (lambda x: x.view(2, -1, 2, 4), True),  # OPT: of a slice it makes heads of half of the tokens
        (lambda x: x.reshape(-1, 3, 2, 4), True),
    ],
)
def test_dims_whose_slices_a_view_would_hide_are_not_sliced_for_transformers(
    split: Callable[[torch.Tensor], torch.Tensor], refused: bool
) -> None:
    batch = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    styles = {"q": "colwise", "o": "rowwise"}
    plan = meshwright.from_tp_plan(styles, Split(split), batch, loss=nn.MSELoss(), mesh=2)
    assert bool(plan.expressible("transformers")) is refused
    assert plan.expressible("deepspeed") == []  # AutoTP changes such sizes


class Attention(nn.Module):
    """Queries and keys are one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.o = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (one.unflatten(-1, (-1, 4)) for one in self.qk(x).split(8, -1))
        return x + self.o((q * k).flatten(2))


def test_an_attention_that_autotp_would_halve_in_part_is_replicated(tmp_path: Path) -> None:
    """AutoTP gives the module half of the heads, and gathers the queries and keys of all."""
    batch = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    styles = {"0.qk": "colwise_gather_output", "0.o": "rowwise_split_input", "1.q": "colwise", "1.o": "rowwise"}
    module = nn.Sequential(Attention(), Split(lambda x: x.view(2, 3, -1, 4)))
    plan = meshwright.from_tp_plan(styles, module, batch, loss=nn.MSELoss(), mesh=2)
    file = plan.export("deepspeed", tmp_path / "config.json", allow_changes=True)
    specs = json.loads(file.read_text(encoding="utf-8"))["tensor_parallel"]["partition_config"]["layer_specs"]
    rules = {pattern: one["partition_type"] for one in specs for pattern in one["patterns"]}
    assert rules == {
        r"0\.qk\.weight$": "skip",
        r"0\.o\.weight$": "skip",
        r"1\.q\.weight$": "column",
        r"1\.o\.weight$": "row",
    }
    named = {change.name for change in plan.expressible("deepspeed")}
    assert {"0.qk.weight", "0.o.weight"} <= named and "1.q.weight" not in named
