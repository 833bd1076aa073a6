"""The source of a run's plan: a file, the cache, or the search."""

from __future__ import annotations

import json

import pytest
from small import HYBRID, MODES, SMALL

from runner.errors import ConfigError
from runner.home import plan_cache
from strategies.core.errors import StrategyError


@pytest.mark.slow
def test_a_saved_plan_is_trained_and_verified(start, tmp_path):
    saved = start(*SMALL, *MODES["auto"], verb="plan", folder="saved")
    loaded = f"parallel.plan={saved.folder / 'plan.json'}"
    trained = start(*SMALL, "parallel=semi_auto", loaded, folder="trained")
    parts = "mesh", "assignments", "operators", "parameters", "inputs", "tensors", "communication"
    assert {part: trained.plan[part] for part in parts} == {part: saved.plan[part] for part in parts}
    assert trained.plan["search"]["loaded_from"] == str(saved.folder / "plan.json")
    searched = start(*SMALL, *MODES["auto"], folder="searched")
    assert trained.losses == searched.losses
    assert start(*SMALL, "parallel=semi_auto", f"parallel.plan={saved.folder}", verb="verify").verdict["passed"]


@pytest.mark.slow
def test_recompute_comes_on_top_of_a_saved_plan(start):
    saved = start(*SMALL, *MODES["auto"], verb="plan", folder="saved")
    assert saved.plan["recompute"] is None
    options = (f"parallel.plan={saved.folder}", "parallel.recompute.operators=full")
    options += ("parallel.recompute.modules=[inner]",)
    ended = start(*SMALL, *MODES["auto"], *options, verb="plan")
    assert ended.plan["recompute"]["modules"] == ["inner"]
    kept = start(*SMALL, *MODES["auto"], f"parallel.plan={ended.folder}", verb="explain", folder="kept")
    assert kept.plan["recompute"] == ended.plan["recompute"]


@pytest.mark.slow
def test_a_pipeline_takes_a_saved_plan(start):
    options = ("+recipe=gpt_pipeline", "train.steps=2")
    saved = start(*options, verb="plan", folder="saved")
    loaded = start(*options, f"parallel.plan={saved.folder}", verb="plan")
    assert loaded.plan | {"search": None} == saved.plan | {"search": None}


def test_a_plan_that_does_not_fit_is_refused_before_launch(command, start, tmp_path):
    saved = start(*SMALL, *MODES["auto"], verb="plan", folder="saved")
    done = command(*SMALL, *MODES["auto"], f"parallel.plan={saved.folder}", "model.args.hidden=32")
    assert done.code == 2
    (paragraph,) = done.paragraphs
    assert f"parallel.plan = '{saved.folder}': operator inner (linear" in paragraph
    assert not (tmp_path / "runs").exists()
    with pytest.raises(StrategyError, match=r"is for a mesh of 4 ranks .* but this one has 8"):
        start(*SMALL, *MODES["auto"], f"parallel.plan={saved.folder}", "world_size=8", verb="plan")


def test_a_file_that_cannot_be_read(start, tmp_path):
    with pytest.raises(ConfigError, match=r"the plan 'nowhere\.json' cannot be read: No such file"):
        start(*SMALL, *MODES["auto"], "parallel.plan=nowhere.json", verb="plan")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the plan '.*broken\.json' is not JSON"):
        start(*SMALL, *MODES["auto"], f"parallel.plan={tmp_path / 'broken.json'}", verb="plan")


@pytest.mark.parametrize("mode", ["stand_alone", "hybrid"])
def test_modes_without_a_plan_cannot_load_one(command, mode):
    given = {"stand_alone": ("parallel=stand_alone", "world_size=1"), "hybrid": HYBRID}[mode]
    done = command(*SMALL, *given, "parallel.plan=plan.json")
    assert done.code == 2
    assert f"does not go with parallel.mode = '{mode}'" in done.err


def test_the_second_plan_comes_from_the_cache(start, tmp_path, capfd):
    cache = f"parallel.plan_cache={tmp_path / 'cache'}"
    first = start(*SMALL, *MODES["auto"], cache, verb="plan", folder="first")
    assert "found in" in capfd.readouterr().out
    (entry,) = (tmp_path / "cache").iterdir()
    second = start(*SMALL, *MODES["auto"], cache, "train.steps=2", folder="second")  # train, in another process
    assert "loaded from the plan cache" in capfd.readouterr().out
    assert second.plan["assignments"] == first.plan["assignments"]
    assert second.plan["search"]["loaded_from"] == "the plan cache"
    start(*SMALL, *MODES["auto"], cache, "model.args.hidden=32", verb="plan", folder="third")
    assert "found in" in capfd.readouterr().out
    entry.write_text("{}", encoding="utf-8")
    start(*SMALL, *MODES["auto"], cache, verb="plan", folder="fourth")
    out = capfd.readouterr().out
    assert f"plan cache: {entry} cannot be used" in out and "found in" in out
    assert json.loads(entry.read_text(encoding="utf-8"))["plan"]["assignments"] == first.plan["assignments"]


def test_the_folder_of_the_cache(monkeypatch, tmp_path):
    assert plan_cache(None, print) is None
    assert str(plan_cache("plans", print)) == "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan_cache("auto", print) == tmp_path / "meshwright" / "plans"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plan_cache("auto", print) == tmp_path / ".cache" / "meshwright" / "plans"


@pytest.mark.parametrize("verb", ["plan", "explain"])
def test_a_mode_without_a_plan_says_so(start, capsys, verb):
    start("+recipe=hybrid_matmul", verb=verb)
    assert "parallel.mode=hybrid has no plan: the model runs as it is written." in capsys.readouterr().out


def test_rows_that_a_plan_slices_unevenly_are_filled_up(start):
    """Labels in 2, 2, 2 and 1 rows, which are gathered for the loss."""
    words = (*SMALL, "parallel=semi_auto", "parallel.mesh={dp: 4}", "data.batch_size=7", "train.precision=fp64")
    saved = start(*words, verb="plan", folder="saved")
    plan = saved.plan | {"inputs": {**saved.plan["inputs"], "1": {"dims": [["dp"]], "partial": []}}}
    (saved.folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    ended = start(*words, f"parallel.plan={saved.folder}", "verify.steps=2", verb="verify")
    assert ended.verdict["passed"] and ended.value <= 1e-10
