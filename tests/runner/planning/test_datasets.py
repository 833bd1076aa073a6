"""What draws numbers while it is made is the same in every process: datasets, with their workers, and models."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from composing import compose_config
from small import MODES, SMALL

from runner.build.modules import build_model
from runner.planning.datasets import datasets, prediction_data, training_data

WORDS = (*SMALL, *MODES["data_parallel"], "data.target=networks.Part", "model.target=networks.Permuted")


def test_a_dataset_and_a_model_that_draw_while_they_are_made():
    config = compose_config(*WORDS, "evaluate.every=1")
    made = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        training, evaluating, _ = datasets(config)
        model = build_model(config)
        torch.manual_seed(seed)
        made.append((training.x, evaluating.x, training_data(config).x, torch.tensor(model.order)))
        assert (random.random(), np.random.rand()) == (random.Random(seed).random(), np.random.RandomState(seed).rand())
    for first, second in zip(*made, strict=True):
        assert torch.equal(first, second)
    assert torch.equal(made[0][0], made[0][2])


def test_evaluation_and_prediction_have_files_of_their_own(tmp_path):
    """An argument `path` takes the place of `data.path`, and `predict.data.path` that of both."""
    for count, name in enumerate("abc", 1):
        (tmp_path / name).write_text("[1]\n" * count, encoding="utf-8")
    lines = "data.target=runner.data.lines.Lines", f"data.path={tmp_path / 'a'}"
    measured = *SMALL, *MODES["data_parallel"], *lines, f"evaluate.args={{path: {tmp_path / 'b'}}}"
    training, evaluating, _ = datasets(compose_config(*measured))
    predicted = [
        prediction_data(compose_config(*measured, *words))[0]
        for words in ((), (f"predict.data.args={{path: {tmp_path / 'c'}}}",), (f"predict.data.path={tmp_path / 'c'}",))
    ]
    assert [len(one) for one in (training, evaluating, *predicted)] == [1, 2, 2, 3, 3]


@pytest.mark.slow
def test_splits_drawn_while_a_dataset_is_made_are_those_of_workers(start):
    losses = [start(*WORDS, f"data.workers={count}", "run.overwrite=true").value for count in (0, 2)]
    assert losses[0] == losses[1]
