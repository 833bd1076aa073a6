"""Recipes that people start from: each plans, agrees with one process, and learns."""

from __future__ import annotations

import json

import pytest
import torch
from composing import compose_config

from runner.build.modules import build_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
LAYER = "base_model.model.model.layers.1.self_attn"
PLANNED = {
    "bert_finetune": {"input_ids": [["dp"], []], "attention_mask": [["dp"], []], "label": [["dp"]]},
    "vit_images": {
        "layers.0.attention.o_proj.weight": [[], ["tp"]],
        "layers.2.feed_forward.up_proj.weight": [["tp"], []],
    },
    "resnet_images": {"0": [["dp"], [], [], []], "layer3.0.conv2.weight": [[], [], [], []]},
    "llama_lora": {
        f"{LAYER}.q_proj.base_layer.weight": [["tp"], []],
        f"{LAYER}.q_proj.lora_A.default.weight": [[], []],
        f"{LAYER}.q_proj.lora_B.default.weight": [["tp"], []],
        f"{LAYER}.o_proj.base_layer.weight": [[], ["tp"]],
        f"{LAYER}.o_proj.lora_A.default.weight": [[], ["tp"]],
    },
    "distillation": {"0": [["dp"], [], [], []], "teacher.head.weight": [[], []]},
}
"""Layouts of parameters and batch entries, which say that a recipe is sliced as its comment has it."""


FAST = ("bert_finetune", "distillation")


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in PLANNED])
def test_it_plans(command, tmp_path, name):
    done = command("plan", f"+recipe={name}", "hydra.run.dir=out", "parallel.plan_cache=null")
    assert done.code == 0, done.err
    plan = json.loads((tmp_path / "out" / "plan.json").read_text(encoding="utf-8"))
    layouts = plan["tensors"] | plan["inputs"]
    assert {name: layouts[name]["dims"] for name in PLANNED[name]} == PLANNED[name]


def falls(losses, by=0.8):
    return sum(losses[-10:]) < by * sum(losses[:10])


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANNED)
def test_it_agrees_with_one_process(start, name):
    assert start(f"+recipe={name}", verb="verify").verdict["passed"]


@pytest.mark.slow
def test_bert_learns_and_its_weights_begin_another_run(start):
    ended = start("+recipe=bert_finetune", "checkpoint.form=merged")
    results = ended.evaluations[max(ended.evaluations)]
    assert falls(ended.losses)
    assert results.keys() == {"loss", "accuracy", "f1"} and min(results["accuracy"], results["f1"]) > 0.7
    weights = f"model.weights={ended.folder / 'checkpoints'}"
    again = start("+recipe=bert_finetune", weights, "model.new=['classifier.*']", "train.steps=30", folder="again")
    assert sum(again.losses[-10:]) < 0.9 * sum(ended.losses[20:30])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accuracy"), [("vit_images", 0.4), ("resnet_images", 0.5)])
def test_images_are_learnt(start, name, accuracy):
    ended = start(f"+recipe={name}")
    assert falls(ended.losses, 0.9) and ended.evaluations[max(ended.evaluations)]["accuracy"] > accuracy


@pytest.mark.slow
def test_an_adapter_is_trained_on_merged_weights_and_loaded_by_peft(start):
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    wide = "+model.config.initializer_range=0.1"  # a head that adapters can steer
    base = start("+recipe=hf_llama", wide, "train.steps=5", "checkpoint.form=merged", folder="base")
    weights = f"model.weights={base.folder / 'checkpoints'}"
    ended = start("+recipe=llama_lora", weights, "checkpoint.form=merged", "train.steps=60")
    assert ended.losses[0] < base.losses[0]  # B is zero, so it begins where the base has ended
    assert falls(ended.losses, 0.9)
    (saved,) = (ended.folder / "checkpoints").glob("step-*")
    (stored,) = (base.folder / "checkpoints").glob("step-*")

    from safetensors.torch import load_file

    plain = LlamaForCausalLM.from_pretrained(stored)
    loaded = PeftModel.from_pretrained(plain, saved)
    ours = load_file(saved / "model.safetensors")
    theirs = loaded.state_dict()
    assert all(torch.equal(ours[name], one) for name, one in theirs.items() if name in ours)
    assert sum("lora_" in name for name in theirs) == sum("lora_" in name for name in ours) == 28
    trained = build_model(compose_config("+recipe=llama_lora")).eval()
    trained.load_state_dict(ours)
    tokens = torch.arange(64)[None]
    with torch.no_grad():
        adapted = loaded(tokens).logits
        assert torch.allclose(adapted, trained(tokens).logits, atol=1e-6)
        with loaded.disable_adapter():
            assert not torch.allclose(adapted, loaded(tokens).logits, atol=1e-2)
        merged = loaded.merge_and_unload()(tokens).logits
    assert torch.allclose(adapted, merged, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stage"), [("llama_lora", 1), ("llama_lora", 3), ("distillation", 3)])
def test_frozen_parameters_stay_as_they_are_under_zero(start, name, stage):
    words = ("parallel=data_parallel", "parallel.mesh=null", "parallel.strategies=null", f"parallel.zero.stage={stage}")
    assert start(f"+recipe={name}", *words, "verify.steps=2", verb="verify").verdict["passed"]


@pytest.mark.slow
def test_a_student_learns_from_a_teacher(start):
    from safetensors.torch import load_file

    def weights(folder):
        (saved,) = (folder / "checkpoints").glob("step-*")
        return load_file(saved / "model.safetensors")

    taught = start("+recipe=vit", "checkpoint.form=merged", "train.steps=100", folder="teacher")
    words = (
        f"model.weights={taught.folder / 'checkpoints'}",
        "model.rename=[['^','teacher.']]",
        "model.new=['student.*']",
    )
    ended = start("+recipe=distillation", *words, "checkpoint.form=merged")
    assert falls(ended.losses) and ended.evaluations[max(ended.evaluations)]["accuracy"] > 0.6
    before, after = weights(taught.folder), weights(ended.folder)
    assert all(torch.equal(one, after[f"teacher.{name}"]) for name, one in before.items())
    stored = load_file(next((ended.folder / "checkpoints").glob("step-*")) / "optimizer.safetensors")
    assert stored and not any("teacher" in name for name in stored)
