"""Models that draw numbers with numpy in their forward (SpecAugment of models of speech) train on ranks as on one
device, and go on after a restart with the numbers that an uninterrupted run draws."""

from __future__ import annotations

import pytest
from small import ALONE, DOUBLE, MODES, SMALL

FRONT = "conv_dim: [8, 8], conv_stride: [5, 2], conv_kernel: [5, 3], num_feat_extract_layers: 2"
SIZES = (
    "hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 32, classifier_proj_size: 8, "
    "num_conv_pos_embeddings: 4, num_conv_pos_embedding_groups: 2, layerdrop: 0.0"
)
MASKS = "mask_time_prob: 0.4, mask_time_length: 2, mask_feature_prob: 0.3, mask_feature_length: 2"
RUN = (
    *("world_size=4", "loss.target=null", "data.target=speech.Speech", "data.batch_size=8", DOUBLE),
    *("train.random=exact", "train.steps=4", "train.log_every=1"),
)
MORE = {"Wav2Vec2": "", "Hubert": "", "SEW": ", squeeze_factor: 1", "UniSpeech": ", num_codevectors_per_group: 4"}
AUTO = ("parallel=auto", "parallel.search=dynamic_programming")
HOW = {
    "Wav2Vec2": ("parallel=data_parallel", "train.accumulate=2"),
    "Hubert": (*AUTO, "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=2"),
    "SEW": (*AUTO, "parallel.recompute=full"),
    "UniSpeech": AUTO,
}


def speech(kind: str) -> tuple[str, ...]:
    config = f"model.config={{{FRONT}, {SIZES}, {MASKS}{MORE[kind]}}}"
    return *RUN, f"model.target=transformers.{kind}ForSequenceClassification", config


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOW)
def test_verified(start, kind):
    ended = start(*speech(kind), *HOW[kind], "verify.steps=2", verb="verify")
    assert ended.verdict["passed"]


@pytest.mark.slow
def test_ranks_train_as_one_device_and_resume(start):
    alone = start(*speech("Wav2Vec2"), *ALONE, folder="alone").losses
    ranks = start(*speech("Wav2Vec2"), *MODES["data_parallel"], folder="ranks").losses
    assert ranks == pytest.approx(alone, rel=1e-10) and len(set(alone)) == 4
    for how, complete in ((ALONE, alone), (MODES["data_parallel"], ranks)):
        folder, saving = "of_" + str(len(how)), ("checkpoint.every=2",)
        start(*speech("Wav2Vec2"), *how, *saving, "train.steps=2", folder=folder)
        assert start(*speech("Wav2Vec2"), *how, *saving, "train.resume=auto", folder=folder).losses == complete


def test_an_optimizer_that_draws_is_named(start, capfd):
    words = (*SMALL, *MODES["data_parallel"], "world_size=2", "train.steps=2")
    start(*words, "optimizer.target=networks.Langevin", folder="noisy")
    assert "optimizer: networks.Langevin draws random numbers" in capfd.readouterr().out
    start(*words)
    assert "draws random numbers" not in capfd.readouterr().out
