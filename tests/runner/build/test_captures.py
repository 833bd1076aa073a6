"""`run plan` for a described cluster finds the graph that was captured for another plan of the same model."""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import zlib
from itertools import count

import pytest
from composing import compose_config

from runner.build import modules, watched_files
from runner.commands import plan as planning
from runner.planning import prepare
from runner.planning.joint import prepare_decided
from strategies.capture import capture
from strategies.planner import plan_cache

NET = """
from pathlib import Path
import torch
from torch import nn
WIDTH = int(Path(__file__).with_name("width.txt").read_text())
class Net(nn.Module):
    def __init__(self, sizes, classes=10):
        super().__init__()
        self.hidden, self.out = nn.Linear(784, WIDTH), nn.Linear(WIDTH, classes)
        self.register_buffer("scale", torch.ones(WIDTH))
    def forward(self, x):
        return self.out(torch.relu(self.hidden(x.flatten(1)) * self.scale + torch.arange(WIDTH)))
"""
DESCRIBED = ("cluster=dgx_h100", "world_size=4", "data.batch_size=64")


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Plans a model of the user's: the content of plan.json, and how many graphs were captured for it."""
    (tmp_path / "own_net.py").write_text(NET, encoding="utf-8")
    (tmp_path / "width.txt").write_text("16", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(watched_files, "BEGUN", 2**63)  # the files of a test are older than a command
    monkeypatch.setattr(watched_files, "_seen", watched_files._Seen())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    searched, capture, made, number = [*sys.path], modules.capture, [], count()
    monkeypatch.setattr(modules, "capture", lambda *args, **words: made.append(1) or capture(*args, **words))

    def plan(*words: str, cache: str = f"{tmp_path / 'cache'}"):
        sys.modules.pop("own_net", None)
        folder = tmp_path / f"run_{next(number)}"
        folder.mkdir()
        given = ("+recipe=data_parallel", "job=plan", "model.target=own_net.Net", f"parallel.plan_cache={cache}")
        monkeypatch.setattr(sys, "path", [*searched])  # as in a new process: a command adds its working directory
        before = len(made)
        planning.run(compose_config(*given, *DESCRIBED, *words), folder)
        content = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        return content, len(made) - before

    yield plan
    sys.modules.pop("own_net", None)


def test_another_plan_takes_the_graph_of_the_first(planned):
    sliced = ("parallel.mode=semi_auto", "parallel.mesh={dp: 2, tp: 2}", "parallel.strategies={out: [[2, 1], [2, 1]]}")
    assert planned()[1] == 1
    content, captured = planned(*sliced)
    assert captured == 0
    anew, captured = planned(*sliced, cache="null")
    assert captured == 1
    for one in (content, anew):
        del one["search"]
    assert content == anew
    assert planned("cluster=h200", "world_size=8")[1] == 0


CHANGES = {
    "a file that its module reads": ("", lambda here: (here / "width.txt").write_text("32", encoding="utf-8")),
    "a file that was not there": (
        "\ntry: open('deeper').close()\nexcept OSError: pass",
        lambda here: (here / "deeper").touch(),
    ),
    "a folder that it lists": ("\nimport glob; glob.glob('layers/*')", lambda here: (here / "layers").mkdir()),
    "a database": (
        "\nimport sqlite3; sqlite3.connect('layers.db').close()",
        lambda here: (here / "layers.db").write_bytes(b"."),
    ),
    "a module that it looks for": (
        "\nimport importlib.util; importlib.util.find_spec('own_fast_layers')",
        lambda here: (here / "own_fast_layers.py").touch(),
    ),
    "a package in place of the module": ("", lambda here: (here / "own_net").mkdir()),
    "its module": ("", lambda here: (here / "own_net.py").write_text(f"{NET}\n", encoding="utf-8")),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_a_graph_is_captured_anew_where_a_file_behind_it_changes(planned, tmp_path, changed):
    read, change = CHANGES[changed]
    (tmp_path / "own_net.py").write_text(NET + read, encoding="utf-8")
    assert planned()[1] == 1
    change(tmp_path)
    assert planned("parallel.zero.stage=1")[1] == 1
    assert planned("parallel.zero.stage=2")[1] == 0


@pytest.mark.parametrize("meanwhile", ["a file changes", "a process starts"])
def test_nothing_is_kept_where_it_may_depend_on_more(planned, tmp_path, monkeypatch, meanwhile):
    if meanwhile == "a file changes":
        monkeypatch.setattr(watched_files, "BEGUN", (tmp_path / "width.txt").stat().st_mtime_ns)
    else:
        (tmp_path / "own_net.py").write_text(f"{NET}\nimport os; os.system('true')", encoding="utf-8")
    assert planned()[1] == 1
    assert planned("parallel.zero.stage=1")[1] == 1


@pytest.mark.parametrize("word", ["model.args.sizes=[784]", "train.precision=bf16", "data.batch_size=32", "seed"])
def test_other_questions_have_other_graphs(planned, monkeypatch, word):
    assert planned()[1] == 1
    if word == "seed":
        monkeypatch.setenv("OWN_NET_SEED", "1")
    assert planned(*([] if word == "seed" else [word]))[1] == 1


def test_an_entry_runs_no_code(planned, tmp_path, capsys):
    planned()
    (file,) = (tmp_path / "cache" / "captures").iterdir()
    content = json.loads(file.read_text(encoding="utf-8"))["plan"]
    bad = pickle.dumps(os.getcwd)
    content["graph"] = base64.b64encode(zlib.compress(bad)).decode()
    plan_cache.store(file.parent, file.stem, content, print)
    capsys.readouterr()
    assert planned("parallel.zero.stage=1")[1] == 1
    assert "which no graph does" in capsys.readouterr().out


def test_training_captures_its_own_graph(planned, tmp_path, monkeypatch):
    assert planned()[1] == 1
    made: list[bool] = []
    monkeypatch.setattr(
        prepare, "capture", lambda *args, **words: made.append(words["training"]) or capture(*args, **words)
    )
    words = ("+recipe=data_parallel", "model.target=own_net.Net", f"parallel.plan_cache={tmp_path / 'cache'}")
    prepare_decided(compose_config(*words, *DESCRIBED, "evaluate.metric=null"), None)
    assert True in made
