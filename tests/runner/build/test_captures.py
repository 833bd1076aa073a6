"""A capture that is found again equals one made anew, and is found only while nothing that decides it has changed."""

from __future__ import annotations

import base64
import importlib
import json
import os
import pickle
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from composing import compose_config
from torch import nn

from runner.build import captures
from runner.build.modules import objective
from runner.data.loader import flatten_batch, global_batch
from runner.planning.datasets import datasets
from strategies.capture import Objective, capture
from tests.matrix.zoo import ARCHITECTURES

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, scale=1.0):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 1), scale
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        print("forward runs")
        return (self.layer(x - self.centre) * self.scale + torch.tensor([[0.5]])).square().mean()
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """`made(net, *batch)`: the captured net, and whether it was captured anew."""
    (tmp_path / "captured_net.py").write_text(NET, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(captures, "BEGUN", 2**63)
    config = compose_config("+recipe=quickstart", f"parallel.plan_cache={tmp_path / 'cache'}")
    exports, said = [], []
    monkeypatch.setattr(captures, "capture", lambda *args, **kwargs: exports.append(1) or capture(*args, **kwargs))

    def get(net, *batch, names=("x",), config=config):
        before = len(exports)
        found = captures.captured(config, Objective(net, None, names, ()), batch, said.append)
        return found, len(exports) > before

    get.said, get.config = said, config
    yield get
    sys.modules.pop("captured_net", None)


def own_net(**changes):
    return importlib.import_module("captured_net").Net(**changes)


def test_a_capture_is_found_for_other_weights_of_the_same_model(made):
    batch = torch.randn(3, 4)
    first, anew = made(own_net(), batch)
    net = own_net()
    again, repeated = made(net, batch.clone())
    assert (anew, repeated, made.said) == (True, False, [])
    assert again.graph == first.graph
    assert list(again.tensors) == list(first.tensors)
    assert again.tensors["layer.weight"].data_ptr() == net.layer.weight.data_ptr()
    constant = next(source.name for source in again.graph.of_kind("constant"))
    assert again.tensors[constant].tolist() == [[0.5]]


def with_centre(net):
    net.centre += 1
    return net


def frozen(net):
    net.layer.bias.requires_grad_(False)
    return net


def tied(net):
    net.other = net.layer
    return net


CHANGES = {
    "attribute": lambda: own_net(scale=2.0),
    "buffer": lambda: with_centre(own_net()),
    "frozen": lambda: frozen(own_net()),
    "evaluated": lambda: own_net().eval(),
    "another name": lambda: tied(own_net()),
    "double": lambda: own_net().double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_the_graph_is_asked_for(made, change):
    batch = torch.randn(3, 4)
    made(own_net(), batch)
    net = CHANGES[change]()
    batch = batch.to(net.layer.weight.dtype)
    found, anew = made(net, batch)
    assert anew
    assert found.graph == capture(Objective(net, None, ("x",), ()), (batch,), training=True).graph
    assert not made(net, batch)[1]


def test_batch_config_environment_and_files_are_asked_for(made, tmp_path, monkeypatch):
    batch = torch.randn(3, 4)
    made(own_net(), batch)
    assert not made(own_net(), batch)[1]
    assert made(own_net(), torch.randn(5, 4))[1]
    assert made(own_net(), batch + 1)[1]
    assert made(own_net(), batch, config=made.config.model_copy(update={"device": "meta"}))[1]
    with monkeypatch.context() as patch:
        patch.setenv("USE_FAST_PATH", "1")
        assert made(own_net(), batch)[1]
    os.utime(tmp_path / "captured_net.py")
    assert made(own_net(), batch)[1]


def test_what_was_imported_later_is_asked_for(made, tmp_path):
    (tmp_path / "imported_later.py").write_text("SCALE = 2.0", encoding="utf-8")
    file = tmp_path / "captured_net.py"
    text = NET.replace("* self.scale", "* __import__('imported_later').SCALE")
    file.write_text(text, encoding="utf-8")
    batch = torch.randn(3, 4)
    assert made(own_net(), batch)[1]
    assert not made(own_net(), batch)[1]
    os.utime(tmp_path / "imported_later.py")
    assert made(own_net(), batch)[1]
    sys.modules.pop("imported_later")


class Doubled(nn.Module):
    def forward(self, x):
        return x * 2


@pytest.mark.parametrize("kind", ["lambda", "local", "main", "replaced", "sparse", "newer"])
def test_what_a_pickle_does_not_tell_is_captured_anew(made, monkeypatch, kind):
    net = own_net()
    match kind:
        case "lambda":
            net.function = lambda x: x
        case "local":
            net.function = type("Local", (), {})
        case "main":
            monkeypatch.setattr(Doubled, "__module__", "__main__")
            net.child = Doubled()
        case "replaced":
            net.function = Doubled.forward
            monkeypatch.setattr(Doubled, "forward", lambda self, x: x * 3)
        case "sparse":
            net.table = torch.eye(2).to_sparse()
        case "newer":
            monkeypatch.setattr(captures, "BEGUN", 0)
    batch = torch.randn(3, 4)
    assert [made(net, batch)[1] for _ in range(2)] == [True, True]


class Repeating(nn.Module):
    """Repeats its layer as often as a frozen parameter says, whose value is no part of the question."""

    def __init__(self, times):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.times = nn.Parameter(torch.tensor(times), requires_grad=False)

    def forward(self, x):
        for _ in range(int(self.times)):
            x = self.layer(x)
        return x.mean()


def test_values_that_decided_are_compared(made):
    batch = torch.randn(3, 4)
    first, anew = made(Repeating(2.0), batch)
    again, repeated = made(Repeating(2.0), batch)
    assert (anew, repeated) == (True, False)
    assert {name: value.item() for name, value in again.decided.items()} == {"times": 2.0}
    other, decided_anew = made(Repeating(3.0), batch)
    assert decided_anew
    assert other.graph != first.graph


class Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize("data", [b"", pickle.dumps(Harmful()), pickle.dumps((1, 2))])
def test_an_entry_that_is_none_is_said_and_runs_nothing(made, tmp_path, monkeypatch, data):
    monkeypatch.chdir(tmp_path)
    batch = torch.randn(3, 4)
    made(own_net(), batch)
    (entry,) = (tmp_path / "cache" / "captures").iterdir()
    content = base64.b64encode(zlib.compress(data)).decode()
    hashed = captures.plan_cache._hash(content)
    entry.write_text(json.dumps({"sha256": hashed, "plan": content}), encoding="utf-8")
    assert made(own_net(), batch)[1]
    assert len(made.said) == 1
    assert str(entry) in made.said[0]
    assert not (tmp_path / "harmed").exists()
    assert not made(own_net(), batch)[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.name for one in ARCHITECTURES[::5]])
def test_architectures_are_found_as_they_were_captured(made, name):
    (architecture,) = (one for one in ARCHITECTURES if one.name == name)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        net, batch = architecture.build(0.1)
        found.append(made(net, *batch.values(), names=tuple(batch)))
    (first, anew), (again, repeated) = found
    assert (anew, repeated, made.said) == (True, False, [])
    assert again.graph == first.graph
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in first.tensors.items())


def test_the_command_captures_once(tmp_path):
    model = tmp_path / "own_model.py"
    model.write_text(NET.replace("    def forward(self, x):\n", "    def forward(self, x, y):\n"), encoding="utf-8")
    (tmp_path / "own_data.py").write_text(
        "import torch\ndef rows(): return [{'x': torch.ones(4) * n, 'y': torch.ones(1)} for n in range(8)]\n",
        encoding="utf-8",
    )
    root = str(Path(captures.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((root, str(tmp_path))), "OMP_NUM_THREADS": "1"}
    words = "model.target=own_model.Net loss.target=null data.target=own_data.rows data.batch_size=8 world_size=2"

    def run(number, *more):
        given = "plan", *words.split(), f"hydra.run.dir=run{number}", f"parallel.plan_cache={tmp_path / 'cache'}", *more
        arguments = [sys.executable, "-m", "meshwright", *given]
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.count("forward runs")

    assert run(1, "parallel.mode=data_parallel") > 0
    assert run(2, "parallel.mode=semi_auto") == 0


def test_objectives_of_recipes_tell_what_they_compute():
    for recipe in ("quickstart", "gpt", "vit", "hf_gpt2"):
        config = compose_config(f"+recipe={recipe}")
        training, _, collate = datasets(config)
        names, tensors = flatten_batch(global_batch(training, collate, range(2)))
        keys = {captures._key(config, objective(config, names), tensors, True, None) for _ in range(2)}
        assert len(keys) == 1
        assert None not in keys
