"""The survey separates exact architectures from others, keeps its time limit, and goes on where it was interrupted."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.matrix.zoo.architecture import Architecture, Example
from tests.survey import __main__ as command
from tests.survey import huggingface
from tests.survey.outcomes import outcome, survey


class Net(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.dense, self.body, self.shift = nn.Linear(8, 8), body, nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.body(self, self.dense(x))
        return h.square().mean()


def sleeps(_: Net, h: Tensor) -> Tensor:
    time.sleep(60)
    return h


def ends(_: Net, h: Tensor) -> Tensor:
    os._exit(3)


def rows(_: Net, h: Tensor) -> Tensor:
    """As many as its numbers say."""
    return h[: int(h.detach().abs().sum()) % 3 + 1]


def chaotic(_: Net, h: Tensor) -> Tensor:
    """Sums over the batch, and a map that doubles their rounding in every iteration."""
    h = h.sigmoid() * h.exp().mean(0).sigmoid()
    for _ in range(22):
        h = 4 * h * (1 - h)
    return h


BODIES: dict[str, tuple[str, Any]] = {
    "exact": ("exact", lambda net, h: h.tanh()),
    "another one when exported": ("differs", lambda _, h: h * (2 if torch.compiler.is_exporting() else 1)),
    "nearly so": ("differs", lambda _, h: h * (1 + 1e-9 * torch.compiler.is_exporting())),
    "ill conditioned": (
        "exact",
        chaotic,
    ),
    "gradient that cancels": ("exact", lambda net, h: nn.functional.layer_norm(h + 1e3 * net.shift, (8,))),
    "rows by number": ("refused", rows),
    "dead": ("crash", ends),
    "slow": ("late", sleeps),
    "wrong": ("unbuilt", lambda net, h: h @ h[:3]),
}


def made(name: str) -> Architecture:
    def build(_: float) -> Example:
        return Net(BODIES[name][1]), {"x": torch.randn(8, 8)}

    return Architecture(name, "nets", build)


@pytest.mark.slow
def test_outcomes() -> None:
    quick = [made(name) for name in BODIES if name != "slow"]
    found = {
        one.name: one for some, limit in ((quick, 60.0), ([made("slow")], 1.0)) for one in survey(some, 2, limit, 2)
    }
    assert {name: one.status for name, one in found.items()} == {name: status for name, (status, _) in BODIES.items()}
    assert found["exact"].worst <= 1e-10 and found["exact"].precision == "fp64" and found["exact"].operators > 2
    assert found["rows by number"].cause.startswith("[MW902]") and "by" in found["another one when exported"].cause


@pytest.mark.slow
def test_a_survey_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "architectures", lambda registry, every: [made("exact"), made("wrong")])
    results, page = tmp_path / "results.jsonl", tmp_path / "survey.md"
    words = ["--resume", str(results), "--world", "2"]
    assert command.main([*words, "--only", "exact"]) == 0
    assert command.main([*words, "--write", str(page)]) == 0
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [line["name"] for line in lines] == ["exact", "wrong"]  # each once
    assert "| nets | 2 | 1 | 0 | 0 | 0 | 0 | 1 | 100.0% |" in page.read_text(encoding="utf-8")
    assert "1 of 1 exact; 1 that eager torch does not train" in capsys.readouterr().out


def test_normalised_vectors_have_a_loss_with_gradients() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    huggingface.loss_of((torch.nn.functional.normalize(x),)).backward()
    assert x.grad is not None and x.grad.abs().max() > 1e-3


def test_a_class_of_transformers() -> None:
    assert len(huggingface.names()) > 600 and len(huggingface.names(every=True)) > 1400
    name = "DistilBertForSequenceClassification"
    found = outcome(Architecture(name, "transformers", lambda dropout: huggingface.build(name, dropout)), 2)
    assert (found.status, found.cause) == ("exact", "")
