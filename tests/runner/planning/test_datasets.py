"""What draws numbers while it is made is the same in every process: datasets, with their workers, and models."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from composing import compose_config
from small import MODES, SMALL

from runner.build.modules import build_model
from runner.planning.datasets import datasets, training_data

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


@pytest.mark.slow
def test_splits_drawn_while_a_dataset_is_made_are_those_of_workers(start):
    losses = [start(*WORDS, f"data.workers={count}", "run.overwrite=true").value for count in (0, 2)]
    assert losses[0] == losses[1]
