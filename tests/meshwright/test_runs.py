"""The command from Python: composed, trained, refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import meshwright
from meshwright.runs import Run


def test_a_recipe_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = meshwright.compose("quickstart", ["train.steps=3", "job=plan"])
    run = meshwright.train(config, tmp_path / "run")
    assert isinstance(run, Run) and (run.folder / "plan.json").exists()
    assert len(run.losses) == 3 and run.loss == pytest.approx(run.losses[-1]) and math.isfinite(run.losses[0])
    with pytest.raises(meshwright.CodedError) as again:  # the folder of another run
        meshwright.train(config, tmp_path / "run")
    assert again.value.code == "MW601" and len(run.records) == len(Run(run.folder, run.config, None).records)


def test_what_is_wrong_is_refused_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for code, words in {
        "MW201": ["+recipe=quickstart", "train.stepz=2"],
        "MW106": ["+recipe=nothing"],
        "MW103": ["+recipe=quickstart", "train.steps=[2"],
        "MW301": ["+recipe=quickstart", "model.target=nowhere.Net"],
    }.items():
        with pytest.raises(meshwright.CodedError) as error:
            meshwright.train(words)
        assert error.value.code == code
    with pytest.raises(meshwright.CodedError, match=r"\['\+recipe=quickstart'\]"):
        meshwright.train("quickstart")
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
