"""Predictions are those of the plain model, in every mode, whatever plan the weights were stored under."""

from __future__ import annotations

import json
from pathlib import Path

import made_checkpoints as made
import networks
import pytest
import torch
from small import HYBRID, MODES, SMALL
from torch import Tensor
from torch.nn import functional

PLACES = {
    **MODES,
    "hybrid": HYBRID,
    "zero": ("parallel=data_parallel", "parallel.zero.stage=3", "parallel.offload.optimizer=host"),
    "recompute": ("parallel=data_parallel", "parallel.recompute=full", "parallel.memory_limit=10MB"),
    "pipeline": ("parallel=data_parallel", "parallel.pipeline={stages: 2, micro_batches: 2, cuts: auto}"),
    "searched": ("parallel=auto", "parallel.search=recursive_programming"),
}
ROWS = "predict.data.args={rows: 50, seed: 1}"


def trained() -> networks.Classifier:
    """A classifier whose weights are not those of any seed of a run."""
    torch.manual_seed(123)
    return networks.Classifier()


def keyed(model: torch.nn.Module) -> dict[str, Tensor]:
    return {f"model/{name}": tensor.detach() for name, tensor in model.state_dict().items()}


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


@pytest.fixture
def stored(tmp_path):
    return made.checkpoint(tmp_path / "trained" / "checkpoints", keyed(trained()), made.halves)


@pytest.mark.parametrize("place", PLACES)
def test_every_mode_gives_what_the_plain_model_gives(start, stored, place):
    ended = start(
        *SMALL, *PLACES[place], ROWS, f"predict.checkpoint={stored}", "evaluate.metric=accuracy", verb="predict"
    )
    data = networks.Points(50, 1)
    with torch.no_grad():
        expected = trained()(data.x)
    found = lines(ended.folder)
    assert [line["row"] for line in found] == list(range(50))
    torch.testing.assert_close(torch.tensor([line["output"] for line in found]), expected, rtol=1e-5, atol=1e-6)
    told = json.loads((ended.folder / "predict.json").read_text())
    assert told["evaluation"]["accuracy"] == (expected.argmax(1) == data.y).double().mean()
    assert told["evaluation"]["loss"] == pytest.approx(functional.cross_entropy(expected, data.y).item(), rel=1e-5)
    assert (told["step"], told["rows"], ended.value) == (7, 50, told["evaluation"]["loss"])
    assert not (ended.folder / "checkpoints").exists()
