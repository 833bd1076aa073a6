"""The verb calibrate: a file that describes this machine, and nothing where it is interrupted."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import chain

import pytest
import torch
from torch import nn

from runner import launch
from runner.jobs import calibrate
from runner.planning import clusters
from runner.planning.calibration import Measured
from runner.planning.sample_layers import CALLS, VIEWS, SampleLayers
from strategies.capture import Objective, capture
from strategies.cost.cluster import Link
from strategies.cost.laws import Error, Fit, Product
from strategies.cost.operators import operator_work
from strategies.mesh import Mesh
from strategies.rules import rule_of
from tests.strategies.machines import cluster

SHORT = ("world_size=2", "calibrate.seconds=0.5", "device=cpu")


def test_this_machine_is_measured_and_described(command, tmp_path):
    done = command("calibrate", "mine.yaml", *SHORT)
    assert done.code == 0, done.err
    (log,) = tmp_path.glob("runs/*/*/ranks/0.log")
    assert "calibrate: all_to_all" in log.read_text(encoding="utf-8")
    assert "price plans with cluster.file=mine.yaml" in done.out
    found = clusters.from_description(tmp_path / "mine.yaml")
    assert (found.name, found.devices, found.algorithms) == ("mine", 2, ("ring",))
    assert {"float32", "float64", "bfloat16"} == found.flops.keys()
    assert min(found.flops.values()) > 1e7
    assert 1e6 < found.memory_bandwidth < 1e13
    assert 0 < found.launch < 0.1
    kinds = found.levels[0].kinds
    assert {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange", "send"} == kinds.keys()
    assert all(1e4 < link.bandwidth < 1e13 and 0 <= link.latency < 1 for link in kinds.values())
    text = (tmp_path / "mine.yaml").read_text(encoding="utf-8")
    assert text.count("fitted within") == 3 + 1 + len(kinds)
    planned = command("plan", "+recipe=quickstart", "cluster.file=mine.yaml")
    assert planned.code == 2
    assert "world_size = 8 needs 8 devices, but cluster = 'mine' has 2" in planned.err


def test_the_file_says_what_was_fitted(tmp_path):
    error = {"memory": Error(0.1, 0.2), "matmul float32": Error(0.0, 0.0), "all_gather": Error(0.25, 0.5)}
    fit = Fit({"float32": 5e9}, 7e9, {"all_gather": Link(2e8, 1e-4, 1e-3)}, error)
    measured = Measured(4, "cpu", 1e9, 1e-5, 2e-6, 0.25, (Product("float32", 1.0, 1.0),), (), ())
    text = calibrate.described("box", measured, fit)
    assert "all_gather:  # fitted within 25%, at worst 50%" in text
    (tmp_path / "box.yaml").write_text(text, encoding="utf-8")
    found = clusters.from_description(tmp_path / "box.yaml")
    assert (found.flops["float32"], found.memory_bandwidth, found.memory, found.overlap) == (5e9, 7e9, 10**9, 0.25)
    assert (found.launch, found.view, found.devices) == (1e-5, 2e-6, 4)
    assert found.levels[0].of("all_gather") == Link(2e8, 1e-4, 1e-3)


def test_operators_of_a_sample_layer_are_counted_as_they_are_priced():
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.sample = SampleLayers(torch.device("cpu"), 3, 16, 8)
            self.x = nn.Parameter(self.sample.x)
            self.own = nn.ParameterList(nn.Parameter(one) for one in chain.from_iterable(self.sample.layers))

        def forward(self, x):
            own = list(self.own)
            self.sample.x, self.sample.layers = self.x, [own[start : start + 7] for start in (0, 7, 14)]
            return self.sample._run()

    x = torch.ones(2, 8, 16)
    graph = capture(Objective(Layers(), nn.MSELoss(), ("0", "1"), ("1",)), (x, x), training=True).graph
    inside = [one for one in graph.operators if one.path[:1] != ("loss",)]
    alone = Mesh((("alone", 1),))

    def begun(launch, view):
        machine = replace(cluster(1, 1), launch=launch, view=view)
        return sum(operator_work(rule_of(one, graph), {}, one, graph, alone, machine).calls for one in inside)

    assert (begun(1.0, 0.0), begun(0.0, 1.0)) == (3 * CALLS, 3 * VIEWS)


def test_one_rank_has_nobody_to_talk_to(tmp_path):
    fit = Fit({"float32": 5e9}, 7e9, {}, {"memory": Error(0.1, 0.2), "matmul float32": Error(0.0, 0.0)})
    text = calibrate.described("box", Measured(1, "cpu", 1e9, 1e-5, 2e-6, 0.0, (), (), ()), fit)
    (tmp_path / "box.yaml").write_text(text, encoding="utf-8")
    assert clusters.from_description(tmp_path / "box.yaml").devices == 1


@pytest.mark.parametrize("name", ["nowhere/x.yaml", "."])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(command, name, monkeypatch):
    monkeypatch.setattr(launch, "run_ranks", None)
    done = command("calibrate", *SHORT, f"calibrate.file={name}")
    assert done.code == 2
    assert f"calibrate.file = '{name}' cannot be written there" in done.err


@pytest.fixture
def measured(monkeypatch):
    """Measuring takes no time and finds a text."""
    monkeypatch.setattr(calibrate, "_measured", lambda *_: (f"# 1 rank, {calibrate.MARK}\n", 0.5))


NOT_OURS = "import torch\n# measured by hand\n"


def test_only_what_calibrate_has_written_is_overwritten(command, measured, tmp_path):
    file = tmp_path / "net.py"
    file.write_text(NOT_OURS, encoding="utf-8")
    for words in (("calibrate", "net.py"), ("calibrate", "calibrate.file=net.py")):
        done = command(*words)
        assert done.code == 2 and "--force" in done.err and "net.py" in done.err
    assert file.read_text(encoding="utf-8") == NOT_OURS and [path.name for path in tmp_path.iterdir()] == ["net.py"]
    assert command("calibrate", "net.py", "--force").code == 0
    assert command("calibrate", "net.py").code == 0  # now it is ours
    assert calibrate.MARK in file.read_text(encoding="utf-8")
    assert not list(tmp_path.glob(".*part"))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"x" * 10000, b"machine: {levels: {}}\n"])
def test_other_files_are_kept_whatever_they_hold(command, measured, tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    assert command("calibrate", "file").code == 2
    assert (tmp_path / "file").read_bytes() == content


def test_links_are_followed_and_devices_never_replaced(command, measured, tmp_path):
    (tmp_path / "real.py").write_text(NOT_OURS, encoding="utf-8")
    (tmp_path / "link.yaml").symlink_to("real.py")
    (tmp_path / "dangling.yaml").symlink_to("nowhere.yaml")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("link.yaml", "dangling.yaml", "fifo", "folder"):
        assert command("calibrate", name).code == 2
    for name in ("fifo", "folder", "/dev/null"):
        assert command("calibrate", name, "--force").code == 2
    assert (tmp_path / "real.py").read_text(encoding="utf-8") == NOT_OURS and not (tmp_path / "nowhere.yaml").exists()
    assert command("calibrate", "link.yaml", "--force").code == 0
    assert (tmp_path / "link.yaml").is_symlink() and calibrate.MARK in (tmp_path / "real.py").read_text(
        encoding="utf-8"
    )


def test_a_file_that_appears_while_measuring_is_kept(command, tmp_path, monkeypatch):
    def slowly(*_):
        (tmp_path / "new.yaml").write_text(NOT_OURS, encoding="utf-8")
        return "text", 0.5

    monkeypatch.setattr(calibrate, "_measured", slowly)
    assert command("calibrate", "new.yaml").code == 2
    assert (tmp_path / "new.yaml").read_text(encoding="utf-8") == NOT_OURS and not list(tmp_path.glob(".*part"))


def test_a_name_that_no_file_can_have_is_refused_before_measuring(command, monkeypatch):
    monkeypatch.setattr(launch, "run_ranks", None)
    done = command("calibrate", f"{'x' * 250}.yaml", *SHORT)
    assert done.code == 2 and "cannot be written there" in done.err


def test_force_is_an_option_of_calibrate_alone(command):
    assert "--force" in command("plan", "+recipe=quickstart", "--force").err


def test_two_files_are_one_too_many(command):
    done = command("calibrate", "a.yaml", "b.yaml", *SHORT)
    assert done.code == 2
    assert "'b.yaml' is neither a verb nor KEY=VALUE" in done.err


def test_interrupting_leaves_nothing(tmp_path):
    words = ["calibrate", "mine.yaml", "world_size=2", "device=cpu", "calibrate.seconds=500"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "runner", *words]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes)
    assert process.stdout is not None
    for line in process.stdout:
        if "products" in line:
            break
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "run: interrupted.\n")
    assert list(tmp_path.iterdir()) == []
