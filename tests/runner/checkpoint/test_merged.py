"""The merged checkpoint form: loaded by plain torch, by transformers and by a run under any plan."""

import importlib
import json

import networks
import pytest
import torch
from safetensors.torch import load_file
from six_ranks import save
from small import ALONE, MODES, SMALL

from runner import checkpoint as checkpoints
from runner.checkpoint import writing

ADAM = ("optimizer.target=torch.optim.AdamW", "train.random=exact")


def newest(folder):
    return checkpoints.newest(folder / "checkpoints")


def test_the_file_is_the_state_dict(start):
    """Two forms of one state; the library safetensors reads the merged one."""
    words = (
        *SMALL,
        *ADAM,
        "model.args.norm=true",
        *MODES["semi_auto"],
        "parallel.zero.stage=1",
        "checkpoint.form=both",
    )
    path = newest(start(*words, "train.steps=2").folder)
    opened = checkpoints.read(path)
    weights, others = load_file(path / writing.WEIGHTS), load_file(path / writing.STATES)
    assert {"inner.weight", "norm.running_mean", "norm.num_batches_tracked"} <= weights.keys()
    assert {f"model/{name}" for name in weights} | set(others) == set(opened.tensors)
    for key, tensor in (*((f"model/{name}", tensor) for name, tensor in weights.items()), *others.items()):
        assert torch.equal(opened.read(key), tensor), key
    networks.Classifier(norm=True).load_state_dict(weights, strict=True)


@pytest.mark.slow
def test_runs_under_any_plan_go_on_from_it_alone(start):
    words = (*SMALL, *ADAM)
    first = start(*words, *MODES["semi_auto"], "train.steps=2", "checkpoint.form=merged", folder="merged").folder
    names = {file.name for file in newest(first).iterdir()}
    assert not any(name.startswith("rank-") and name.endswith(".safetensors") for name in names)
    truth = start(*words, *MODES["semi_auto"], "train.steps=4", folder="uninterrupted").folder
    theirs = checkpoints.read(newest(truth))
    for number, plan in enumerate((MODES["semi_auto"], (*MODES["data_parallel"], "parallel.zero.stage=3"), ALONE)):
        second = start(*words, *plan, "train.steps=4", f"train.resume={first}", folder=f"under-{number}").folder
        ours = checkpoints.read(newest(second))
        assert ours.tensors.keys() == theirs.tensors.keys()
        for key in theirs.tensors:
            assert torch.allclose(ours.read(key), theirs.read(key), rtol=1e-5, atol=1e-7), (plan, key)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sharded", "merged"])
def test_weights_alone_begin_another_run(start, form):
    """model.weights accepts a checkpoint in any form: with a learning rate of 0 the weights do not change."""
    words = (*SMALL, "train.steps=1", "optimizer.args.lr=0.0")
    first = start(*SMALL, *MODES["semi_auto"], "train.steps=2", f"checkpoint.form={form}", folder="first").folder
    second = start(*words, *MODES["auto"], f"model.weights={first}", "train.seed=5", folder="second").folder
    ours, theirs = checkpoints.read(newest(second)), checkpoints.read(newest(first))
    for name in theirs.names:
        assert torch.equal(ours.read(f"model/{name}"), theirs.read(f"model/{name}")), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf_gpt2", "hf_llama"])
def test_transformers_reads_it(start, name):
    """From the folder alone: no key is missing or unexpected, and logits equal those of a model with copied weights."""
    transformers = importlib.import_module("transformers")
    small = ("train.steps=2", "data.batch_size=8", "train.log_every=1")
    folder = newest(start(f"+recipe={name}", *small, "checkpoint.form=both").folder)
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    model, loading = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    opened = checkpoints.read(folder)
    torch.manual_seed(3)
    other = getattr(transformers, kind)(transformers.AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for key, tensor in (*other.named_parameters(), *other.named_buffers()):
            if f"model/{key}" in opened.tensors:
                tensor.copy_(opened.read(f"model/{key}"))
    entries = torch.randint(0, model.config.vocab_size, (2, 16))
    with torch.no_grad():
        assert torch.equal(model.eval()(entries).logits, other.eval()(entries).logits)


def test_no_more_than_a_chunk_is_in_memory(tmp_path, monkeypatch):
    """With chunks of 40 bytes, a tensor of 8 rows of 20 bytes is read two rows at a time."""
    monkeypatch.setattr(writing, "CHUNK", 40)
    largest, plain = [0], writing.raw

    def noted(tensor):
        largest.append(tensor.nbytes)
        return plain(tensor)

    opened = checkpoints.read(save(tmp_path, 1))
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(writing, "raw", noted)
    writing.merged(opened, tmp_path / "out")
    assert max(largest) == 40
    assert torch.equal(load_file(tmp_path / "out" / writing.WEIGHTS)["sliced"], opened.read("model/sliced"))


def test_the_config_of_transformers_names_the_dtype_of_the_weights(tmp_path):
    """And that of parts within stays."""
    opened = checkpoints.read(save(tmp_path, 1))
    dtype = str(opened.read("model/sliced").dtype).removeprefix("torch.")
    given = json.dumps({"text": {"dtype": "int8"}, "dtype": "bfloat16"}, indent=2)
    (tmp_path / "out").mkdir()
    writing.merged(opened, tmp_path / "out", companions=writing.Companions({"config.json": given}))
    written = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert written["dtype"] == dtype and written["text"] == {"dtype": "int8"}
