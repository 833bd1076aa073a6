"""`python -m benchmarks.peers`: both sides train, equal losses are required, the page has every figure."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.peers import page
from benchmarks.peers.cases import Case, Part
from benchmarks.peers.measure import TOLERANCE, Measured, config_of, require_equal
from benchmarks.peers.parts import FAMILIES, PARTS, Size
from benchmarks.peers.sides import BY_NAME, in_parts

ROOT = Path(__file__).parents[1]
SMALL = Size(width=128, layers=2, deep=8, sequence=16, rows=8)


def measured(part: str, family: str, ours: list[float], peer: list[float], loss: float = 2.0) -> Measured:
    seconds = {"ours": ours, "peer": peer}
    return Measured(part, family, seconds, seconds, {"ours": [2.0, loss], "peer": [2.0, 2.0]})


def test_every_part_has_a_peer_and_a_valid_config() -> None:
    assert PARTS.keys() == BY_NAME.keys()
    for name, part in PARTS.items():
        for family in FAMILIES:
            config = config_of(part, family, SMALL, 4, "cpu")
            assert (config.parallel.pipeline.known is not None) is part.pipeline, name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_a_model_are_the_model(family: str) -> None:
    case = Case(family, 64, 4, 16, 2, tied=False)
    model, (x, _) = case.model(), case.batch()
    value = x
    for own in in_parts(case.layers, 4):
        value = Part(model, own)(value)
    assert torch.equal(value, model(x))


@pytest.mark.parametrize("loss", [2.0 + 4 * TOLERANCE, math.nan])
def test_different_losses_are_an_error(loss: float) -> None:
    require_equal(measured("ddp", "gpt", [1.0, 1.0], [1.0, 1.0]))
    with pytest.raises(RuntimeError, match="ddp on gpt: the losses"):
        require_equal(measured("ddp", "gpt", [1.0, 1.0], [1.0, 1.0], loss))


def test_the_page_keeps_what_was_measured_alike(tmp_path: Path) -> None:
    def store(part: str, family: str, ours: list[float], size: Size = SMALL) -> str:
        page.store(tmp_path, part, [measured(part, family, ours, [0.4, 0.5, 0.6])], size, 4, "cpu", 1.5)
        page.write(tmp_path)
        return (tmp_path / "peers.md").read_text(encoding="utf-8")

    store("ddp", "gpt", [0.4, 0.5, 0.6])
    text = store("dtensor", "llama", [0.4, 0.5, 0.6])
    assert "| gpt | 500 | 500 | **1.00** | 1.00 to 1.00 | 1.00 | 1.02 |" in text
    assert "| llama | 500 | 500 | 1.00 | 1.00 to 1.00 | 1.00 | 0.75 |" in text, "its goal is not met"
    assert "1 of 2 goals are met" in text
    text = store("ddp", "vit", [0.2, 0.25, 0.3])
    assert "| gpt | 500 |" in text and "| vit | 250 | 500 | **0.50** |" in text
    plot = (tmp_path / "images" / "peers.svg").read_text(encoding="utf-8")
    assert "<title>vit: 0.500</title>" in plot and "<title>gpt: 1.000</title>" in plot
    text = store("ddp", "vit", [0.2, 0.25, 0.3], Size())
    assert "| gpt | 500 |" not in text, "of another size"


@pytest.mark.slow
@pytest.mark.parametrize("part", ["ddp", "dtensor", "interleaved"])
def test_the_command_measures_a_part(tmp_path: Path, part: str) -> None:
    words = "--width 128 --layers 2 --deep 8 --sequence 16 --rows 16 --rounds 2 --models llama".split()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", "--only", part, *words, "--out", str(tmp_path)],
        cwd=ROOT, capture_output=True, encoding="utf-8", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {PARTS[part].peer} |" in (tmp_path / "peers.md").read_text(encoding="utf-8")
