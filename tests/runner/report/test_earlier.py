"""`run plan` finds the report that it made before, as long as the files behind it are as they were."""

from __future__ import annotations

import json
import os
import sys

import pytest
from composing import compose_config

from runner.build import watched_files
from runner.commands import plan as planning
from runner.data.text import cached
from runner.planning import joint
from runner.report.earlier import PlanReport, Reports

NET = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, sizes):
        super().__init__(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
"""


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """Plans a model of the user's: the content of plan.json, the printed text, and whether it was planned anew."""
    (tmp_path / "own_net.py").write_text(NET, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watched_files, "BEGUN", 2**63)  # the files of a test are older than a command
    monkeypatch.setattr(watched_files, "_seen", watched_files._Seen())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    searched = [*sys.path]
    prepare, made = joint.prepare_decided, []
    monkeypatch.setattr(joint, "prepare_decided", lambda *args, **words: made.append(1) or prepare(*args, **words))

    def plan(name: str, *words: str):
        folder = tmp_path / f"run_{name}"
        folder.mkdir()
        cache = f"parallel.plan_cache={tmp_path / 'cache'}"
        config = compose_config("+recipe=data_parallel", "job=plan", "model.target=own_net.Net", cache, *words)
        monkeypatch.setattr(sys, "path", [*searched])  # as in a new process: a command adds its working directory
        before = len(made)
        seconds = planning.run(config, folder)
        content = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        assert content["cost"]["total"] == seconds
        assert (folder / "report.html").stat().st_size > 1000
        return content, capsys.readouterr().out, len(made) > before

    yield plan
    sys.modules.pop("own_net", None)


def test_texts_that_the_first_run_joins_hinder_no_report(tmp_path, monkeypatch):
    """Nor do other files of the user's cache: their names have the digest of what they are made of."""
    monkeypatch.setattr(watched_files, "_seen", watched_files._Seen())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    config = compose_config("+recipe=gpt", "job=plan", "cluster=dgx_h100", f"parallel.plan_cache={tmp_path / 'cache'}")
    watched = Reports(config, tmp_path / "run").watched
    joined, other = cached("text-0.bytes", lambda: iter([b""])), tmp_path / "text-0.bytes"
    other.touch()
    assert {*watched._state(map(str, (joined, other)))} == {str(other)}


def test_report_is_found_until_a_file_changes(planned, tmp_path):
    described = ("cluster=dgx_h100", "world_size=4", "data.batch_size=64")
    content, printed, _ = planned("a", *described)
    again, text, anew = planned("b", *described)
    assert not anew
    assert again["search"].pop("loaded_from") == "the plan cache"
    assert again == content
    assert text.splitlines()[-1] == printed.splitlines()[-1].replace("run_a", "run_b")
    assert [line for line in printed.splitlines() if "found in" not in line and "run_" not in line] == [
        line for line in text.splitlines() if "loaded from the plan cache" not in line and "run_" not in line
    ]
    assert planned("c", *described, "optimizer.args.lr=0.5")[2]
    file = tmp_path / "own_net.py"
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))
    assert planned("d", *described)[2]
    assert not planned("e", *described)[2]
    (tmp_path / "own_net").mkdir()
    assert planned("f", *described)[2]


def test_the_cache_may_be_behind_a_link(planned, tmp_path):
    described = ("cluster=dgx_h100", "world_size=4", "data.batch_size=64")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")
    assert planned("a", *described)[2]
    assert not planned("b", *described)[2]


def test_reports_of_another_version_are_not_looked_at(planned, monkeypatch):
    described = ("cluster=dgx_h100", "world_size=4", "data.batch_size=64")
    with monkeypatch.context() as before:
        before.setattr(PlanReport, "__annotations__", {"text": "str"})
        planned("a", *described)
    _, text, anew = planned("b", *described)
    assert anew and "cannot be used" not in text


def test_what_a_model_asks_its_surroundings_for_is_asked_for(planned, tmp_path, monkeypatch):
    described = ("cluster=dgx_h100", "world_size=4", "data.batch_size=64")
    (tmp_path / "parts").mkdir()
    listing = NET.replace("from torch", f"import os\nPARTS = os.listdir({str(tmp_path / 'parts')!r})\nfrom torch")
    (tmp_path / "own_net.py").write_text(listing, encoding="utf-8")
    assert planned("a", *described)[2]
    assert not planned("b", *described)[2]
    (tmp_path / "parts" / "one").touch()
    sys.modules.pop("own_net")
    assert planned("c", *described)[2]
    assert not planned("d", *described)[2]
    monkeypatch.setenv("USE_FAST_PATH", "1")
    assert planned("e", *described)[2]


@pytest.mark.slow
def test_plan_for_this_machine_is_made_anew(planned):
    assert planned("a")[2] and planned("b")[2]
