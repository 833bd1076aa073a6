"""Models of the library transformers from a config alone: built, refused in one paragraph, verified, and trained from
pretrained weights in the library's format."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from runner import checkpoint as checkpoints
from runner.build import huggingface, pretrained, targets
from runner.config.schema import Model
from runner.errors import ConfigError
from strategies.runtime.tensor_files import TensorReader

TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
LLAMA = TINY | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}


def built(name, config, weights=None, **args):
    torch.manual_seed(0)
    return huggingface.build(description(name, config, weights, **args))


def description(name, config, weights=None, **args):
    return Model(target=f"transformers.{name}", args=args, config=config, weights=weights, rename=())


def test_a_config_makes_a_model_without_a_cache():
    model = built("LlamaForCausalLM", LLAMA | {"rope_theta": 500.0, "attn_implementation": "eager"})
    assert type(model).__name__ == "LlamaForCausalLM" and model.lm_head.weight.shape == (64, 32)
    assert model.config.use_cache is False and model.config.rope_parameters["rope_theta"] == 500.0
    assert model.config._attn_implementation == "eager"
    assert built("LlamaForCausalLM", LLAMA | {"use_cache": True}).config.use_cache is True
    assert built("GPT2LMHeadModel", TINY | {"n_positions": 16}).transformer.wte.weight.shape == (64, 32)
    inner = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    clip = built("CLIPTextModelWithProjection", inner | {"projection_dim": 8, "vocab_size": 64})
    assert clip.text_projection.weight.shape == (8, 32)


def test_an_automatic_class_goes_by_the_type():
    model = built("AutoModelForCausalLM", LLAMA | {"model_type": "llama"})
    assert type(model).__name__ == "LlamaForCausalLM" and model.config.use_cache is False
    equal = built("LlamaForCausalLM", LLAMA | {"model_type": "llama"}).state_dict()
    assert all(torch.equal(equal[name], one) for name, one in model.state_dict().items())


ENCODER = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def test_a_key_that_models_read_needs_no_declaration():
    small = {"vocab_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    model = built("T5ForConditionalGeneration", small | {"decoder_start_token_id": 0})
    assert model.config.decoder_start_token_id == 0
    model = built("DebertaV2Model", ENCODER | {"vocab_size": 32} | {"position_buckets": 4, "relative_attention": True})
    assert model.encoder.position_buckets == 4


def test_a_type_within_chooses_a_config():
    text = ENCODER | {"model_type": "qwen2", "vocab_size": 32, "num_key_value_heads": 2}
    vision = ENCODER | {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4}
    model = built("LlavaForConditionalGeneration", {"text_config": text, "vision_config": vision})
    assert type(model.config.text_config).__name__ == "Qwen2Config"


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("LlamaForCausalLM", None, "is made from a config; set model.config, e.g. model.config={hidden_size: 64, "),
        ("AutoModelForCausalLM", None, "model.config={model_type: llama, hidden_size: 64, "),
        ("LlamaForCausalLM", LLAMA | {"hiden_size": 3}, "LlamaConfig has no 'hiden_size'. Known: "),
        ("LlamaForCausalLM", LLAMA | {"hiden_size": 3}, "Did you mean 'hidden_size'?"),
        ("LlamaForCausalLM", {"hidden_size": "x"}, "Field 'hidden_size' expected int, got str (value: 'x')."),
        ("LlamaForCausalLM", {"model_type": "gpt2"}, "'gpt2', but transformers.LlamaForCausalLM is of type 'llama'"),
        ("LlamaForCausalLM", LLAMA | {"attn_implementation": "egaer"}, 'attn_implementation="egaer"` is not supported'),
        ("LlamaForCausalM", LLAMA, "Did you mean 'LlamaForCausalLM'?"),
        ("AutoModelForCausalLM", LLAMA, "model.config.model_type is not set; transformers.AutoModelForCausalLM"),
        ("AutoModelForCausalLM", {"model_type": "lama"}, "= 'lama' is not a type of model"),
        ("AutoModelForCausalLM", {"model_type": "lama"}, "Did you mean 'llama'?"),
        ("AutoModelForCausalLM", {"model_type": "vit"}, "has no model of model.config.model_type = 'vit'"),
        ("CLIPModel", {"text_config": {"hidden_siz": 32}}, "model.config.text_config: CLIPTextConfig has no"),
    ],
)
def test_a_model_that_cannot_be_built_is_reported(name, config, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        built(name, config)
    assert str(caught.value).startswith("model") and "\n" not in str(caught.value)


def test_arguments_go_beside_the_config():
    with pytest.raises(ConfigError, match="takes no argument 'width'"):
        built("LlamaForCausalLM", LLAMA, width=3)


def test_a_missing_library_is_named_with_its_extra(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "absent" else found(name, *rest)
    )
    monkeypatch.setattr(targets, "EXTRAS", {"absent": "hf"})
    with pytest.raises(ConfigError, match=re.escape('It is an optional part: pip install "meshwright[hf]".')) as caught:
        targets.resolve("absent.LlamaForCausalLM", "model.target")
    assert str(caught.value).startswith("model.target = 'absent.LlamaForCausalLM': there is no module 'absent'")


def test_weights_in_the_layout_of_the_library_are_taken_over(tmp_path):
    """Experts are stored one by one and stacked in memory; the body of GPT-2 is stored without its prefix."""
    mixture = LLAMA | {"num_local_experts": 3}
    stored = built("MixtralForCausalLM", mixture)
    with torch.no_grad():
        for parameter in stored.parameters():
            parameter.normal_()
    stored.save_pretrained(tmp_path / "mixture")
    names = set(checkpoints.weights(tmp_path / "mixture"))
    assert not any(name.endswith("experts.gate_up_proj") for name in names)
    ours = built("MixtralForCausalLM", mixture)
    assert pretrained.locate(description("MixtralForCausalLM", mixture, str(tmp_path / "mixture")), ours) == {}
    assert all(torch.equal(ours.state_dict()[name], one) for name, one in stored.state_dict().items())

    body = built("GPT2LMHeadModel", TINY).transformer
    with torch.no_grad():
        body.wte.weight.normal_()
    body.save_pretrained(tmp_path / "body")
    complete = built("GPT2LMHeadModel", TINY)
    assert pretrained.locate(description("GPT2LMHeadModel", TINY, str(tmp_path / "body")), complete) == {}
    assert torch.equal(complete.lm_head.weight, body.wte.weight)
    before = {name: one.clone() for name, one in ours.state_dict().items()}
    with pytest.raises(ConfigError, match="the files do not have"):
        pretrained.locate(description("MixtralForCausalLM", mixture, str(tmp_path / "body")), ours)
    assert all(torch.equal(before[name], one) for name, one in ours.state_dict().items())


def test_a_new_head_keeps_its_values_where_the_library_loads_the_body(tmp_path):
    """GPT-2's body is stored without its prefix, so the library's own loader has to find it."""
    complete = built("GPT2LMHeadModel", TINY)
    with torch.no_grad():
        complete.transformer.wte.weight.normal_()
    complete.transformer.save_pretrained(tmp_path)
    head = built("GPT2ForSequenceClassification", TINY)
    initial = head.score.weight.detach().clone()
    given = description("GPT2ForSequenceClassification", TINY, str(tmp_path))
    with pytest.raises(ConfigError, match=r"score\.weight.* model\.new names what the files need not have"):
        pretrained.locate(given, head)
    torch.manual_seed(7)
    assert pretrained.locate(given.model_copy(update={"new": ("score.*",)}), head) == {}
    assert torch.equal(head.score.weight, initial)
    assert torch.equal(head.transformer.wte.weight, complete.transformer.wte.weight)


def test_saved_weights_are_read_in_place(tmp_path):
    for name, config in (("LlamaForCausalLM", LLAMA), ("GPT2LMHeadModel", TINY)):
        model = built(name, config)
        model.save_pretrained(tmp_path / name, max_shard_size="10KB")
        assert (tmp_path / name / "model.safetensors.index.json").exists()
        found = pretrained.locate(description(name, config, str(tmp_path / name)), model)
        assert found.keys() == {one for one, _ in model.named_parameters()}
        reader = TensorReader()
        assert all(torch.equal(reader.block(found[one]), value) for one, value in model.named_parameters())


def test_verified_from_a_saved_model(start, tmp_path):
    """On ranks, from weights that no seed produces; the reference loads them too. The model shifts the labels."""
    config = LLAMA | {"vocab_size": 256}
    stored = built("LlamaForCausalLM", config)
    with torch.no_grad():
        stored.lm_head.weight.mul_(30)  # a loss that no freshly initialized model has
    stored.save_pretrained(tmp_path / "saved")
    ended = start(
        "model.target=transformers.LlamaForCausalLM",
        f"model.config={{{', '.join(f'{key}: {value}' for key, value in config.items())}}}",
        f"model.weights={tmp_path / 'saved'}",
        "data={target: runner.data.text.Windows, args: {length: 8, shift: false, limit: 4000}, batch_size: 4}",
        "world_size=2",
        "parallel=auto",
        "parallel.strategies={model.layers.0.mlp.up_proj: [[1,1,1],[2,1]]}",
        "verify.steps=1",
        verb="verify",
    )
    assert ended.verdict["passed"]
    log = (ended.folder / "ranks" / "0.log").read_text(encoding="utf-8")
    assert float(re.search(r"step 1/1  loss (\S+)", log).group(1)) > 5.6


def test_a_wrong_config_ends_the_command_in_one_paragraph(tmp_path):
    """In a separate process, where the library is imported for the first time and must print nothing."""
    words = ["+recipe=hf_llama", "model.config.hiden_size=3", "hydra.run.dir=out"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-m", "runner", "plan", *words],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(Path(targets.__file__).parents[1])},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert [line for line in done.stderr.splitlines() if line] == [done.stderr.strip()]
    assert "LlamaConfig has no 'hiden_size'" in done.stderr
