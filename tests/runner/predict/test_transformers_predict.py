"""Predictions of models of transformers equal the library's results from the merged weights."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from runner.commands.convert import run

PLACES = {
    "hf_llama": ("parallel=data_parallel", "parallel.mesh=null", "parallel.strategies=null", "world_size=2"),
    "hf_gpt2": ("parallel.zero.stage=0", "parallel.pipeline={stages: 2, micro_batches: 2, cuts: auto}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", PLACES)
def test_logits_are_those_of_the_library(start, tmp_path, recipe):
    from transformers import AutoModelForCausalLM

    saved = start(f"+recipe={recipe}", "train.steps=2", "checkpoint.form=both", folder="trained").folder
    ids = torch.randint(256, (6, 64), generator=torch.Generator().manual_seed(0))
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in ids), encoding="utf-8"
    )
    ended = start(
        f"+recipe={recipe}",
        *PLACES[recipe],
        f"predict.checkpoint={saved}",
        f"predict.data.path={tmp_path / 'rows.jsonl'}",
        "predict.batch_size=4",
        "predict.format=safetensors",
        verb="predict",
    )
    logits = load_file(ended.folder / "predictions.safetensors")["logits"]
    assert run([str(saved), str(tmp_path / "merged")]) == 0
    for folder in (saved / "checkpoints" / "step-00000002", tmp_path / "merged"):
        model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(loading.values())
        with torch.no_grad():
            expected = model.eval()(input_ids=ids).logits
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
