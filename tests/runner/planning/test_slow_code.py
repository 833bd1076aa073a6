"""A preparation that the user's code keeps waiting says at which line."""

from __future__ import annotations

import re
import time

import networks
from composing import compose_config

from runner.planning import slow_code
from runner.planning.joint import prepare_decided


def test_a_forward_that_takes_long_is_named(monkeypatch):
    class Slow(networks.Classifier):
        def forward(self, x):
            time.sleep(1.0)
            return super().forward(x)

    monkeypatch.setattr(networks, "Slow", Slow, raising=False)
    monkeypatch.setattr(slow_code, "PATIENCE", 0.2)
    words = ("model.target=networks.Slow", "loss.target=torch.nn.CrossEntropyLoss", "data.target=networks.Points")
    said = []
    config = compose_config(*words, "job=plan", "parallel=data_parallel", "world_size=2", "train.steps=1")
    prepare_decided(config, None, said.append)
    # a slow machine may also be seen elsewhere in the model
    assert any(re.fullmatch(r"preparing for \d+ s; now at planning/test_slow_code.py:18", line) for line in said)


def test_quick_code_is_not_named(monkeypatch):
    said = []
    with slow_code.noticed(said.append):
        time.sleep(0.01)
    assert said == []
