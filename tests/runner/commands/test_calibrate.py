"""The verb calibrate writes a file that describes this machine, and no file if it is interrupted."""

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
from torch.nn import functional

from runner import launch
from runner.commands import calibrate
from runner.planning import calibration, clusters
from runner.planning.calibration import CALLS, KINDS, VIEWS, Bench, Measured, SampleLayers, Timer
from strategies.capture import Objective, capture
from strategies.core.mesh import Mesh
from strategies.cost.calibration_fit import Error, Fit, Product, fit
from strategies.cost.cluster import Link
from strategies.cost.roofline import operator_work
from strategies.cost.sample_operators import STACK, stack
from strategies.rules import rule_of
from tests.strategies.machines import cluster

SHORT = ("world_size=2", "device=cpu")


@pytest.mark.slow
def test_this_machine_is_measured_and_described_in_time(command, tmp_path):
    line = [sys.executable, "-m", "runner", "calibrate", "mine.yaml", "calibrate.seconds=8", *SHORT]
    start = time.monotonic()
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, encoding="utf-8", timeout=120)
    took = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    assert took < 8 + 4 or "because the machine is busy" in done.stdout
    assert "price plans with cluster.file=mine.yaml" in done.stdout
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
    fitted, left_out = text.count("# fitted within"), text.count("# not measured: as in laptop_gloo")
    assert fitted > 0 and 3 + 1 + len(kinds) <= fitted + left_out <= 3 + 1 + len(kinds) + 3
    assert ("no time to measure" in done.stdout) == (left_out > 0)
    planned = command("plan", "+recipe=quickstart", "cluster.file=mine.yaml")
    assert planned.code == 2
    assert "world_size = 8 needs 8 devices, but cluster = 'mine' has 2" in planned.err


class Clock(Timer):
    """A timer that reports the seconds given by `cost` and never calls the function."""

    def __init__(self, seconds, cost):
        self.left, self.last, self.calls, self.cost = seconds, 0.0, 0, cost

    def time(self, action, count=1):
        before = self.left
        for _ in range(count):
            self.left -= self.cost(self.calls)
            self.calls += 1
        self.last = before - self.left
        return self.last / count

    def worked(self, action, count=1):
        seconds = self.time(action, count)
        return seconds, seconds / 2


NEEDED = [
    *("products of float32", "memory", "all_reduce", "all_gather", "reduce_scatter", "small operators"),
    *(
        "stack of layers",
        "all_to_all",
        "exchange",
        "send",
        "products of float64",
        "products of bfloat16",
        "products beside all-reduces",
    ),
]
CONSTANTS = [
    *("flops.float32", "memory_bandwidth", "kinds.all_reduce", "kinds.all_gather", "kinds.reduce_scatter", "launch"),
    *("kinds.all_to_all", "kinds.exchange", "kinds.send", "flops.float64", "flops.bfloat16", "overlap"),
]


@pytest.fixture
def bench(monkeypatch, capsys):
    """`bench(seconds, cost)`: the measurements with a fake clock, their titles in order, and the clock."""
    monkeypatch.setattr(calibration.dist, "new_group", lambda ranks: None)

    def run(seconds, cost=lambda _: 0.01):
        clock = Clock(seconds, cost)
        measured = Bench(0, 4, torch.device("cpu"), clock).run()
        return measured, [line.removeprefix("calibrate: ") for line in capsys.readouterr().out.splitlines()], clock

    return run


def missing(measured):
    found = fit(measured.products, measured.copies, measured.calls)
    text, names = calibrate.described("box", measured, found, cluster(8, 1))
    assert all(name in text.splitlines()[2] for name in names)
    return names


def test_what_matters_most_is_measured_first(bench):
    measured, titles, clock = bench(1000.0)
    assert titles[: len(NEEDED)] == NEEDED
    assert titles[len(NEEDED) :] == ["operators by name", "products of float32", *KINDS * 3, *KINDS[:-1] * 5]
    assert missing(measured) == ()
    assert {call.ranks for call in measured.calls} == {4, 2}
    assert 0 <= clock.left < 200  # the time limit is used, not only respected


@pytest.mark.parametrize(("size", "operands"), [(2**20, 64), (2**24, 4)])
def test_copies_read_what_is_in_no_cache(monkeypatch, size, operands):
    read = []
    monkeypatch.setattr(torch, "relu", lambda x: read.append(x.data_ptr()))
    clock = Clock(1000.0, lambda _: 0.01)
    monkeypatch.setattr(clock, "time", lambda action, count=1: [action() for _ in range(100)] and 0.01)
    Bench(0, 1, torch.device("cpu"), clock)._copy(size, 1.0)
    assert len(set(read)) == operands and len(set(read[:operands])) == operands


@pytest.mark.parametrize(("cores", "seconds"), [(1, 0.02), (2, 0.01), (4, 0.01), (64, 0.01)])
def test_ranks_that_share_cores_are_measured_by_their_cpu(monkeypatch, cores, seconds):
    """4 ranks; a call takes 0.01 seconds by the clock, half of them on its CPU."""
    monkeypatch.setattr(calibration, "cores", lambda: cores)
    bench = Bench(0, 4, torch.device("cpu"), Clock(1000.0, lambda _: 0.01))
    bench._product("float32", 8, 1.0)
    bench._copy(2**20, 1.0)
    assert (bench.products[0].seconds, bench.copies[0].seconds) == (pytest.approx(seconds), pytest.approx(seconds))


def test_a_sample_of_layers_is_run_as_it_is_priced():
    graph = stack(8)
    run, learning = Bench(0, 1, torch.device("cpu"), Clock(1.0, lambda _: 0.01))._call_of(graph)
    y = run()
    assert tuple(y.shape) == graph.specs[graph.outputs[0]].shape and len(learning) == len(graph.sources)
    assert all(gradient is not None for gradient in torch.autograd.grad(y, learning, torch.ones_like(y)))
    x, *parameters = (one.detach() for one in learning)
    for scale, shift, up, down in zip(*(parameters[start::4] for start in range(4)), strict=True):
        normed = functional.layer_norm(x, x.shape[-1:], scale, shift)
        x = x + functional.gelu(normed @ up.T) @ down.T
    torch.testing.assert_close(y, x)


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 2.0, 40.0])
def test_what_does_not_fit_keeps_its_described_value(bench, seconds):
    measured, titles, clock = bench(seconds)
    assert clock.left >= 0  # it stops in time
    assert titles[: len(NEEDED)] == NEEDED[: len(titles)]
    names = missing(measured)
    known = [name not in names for name in CONSTANTS]
    assert known == sorted(known, reverse=True), names  # nothing is skipped in favour of a less important measurement
    assert any(known) == (seconds > 0) and (names == ()) == (seconds > 20)


def test_ranks_that_start_late_measure_for_a_second_all_the_same():
    timer = Timer(1, torch.device("cpu"), time.monotonic() - 100)
    assert timer.fits(0.9) and not timer.fits(1.1)
    timer.time(lambda: time.sleep(0.01), 5)
    assert 0.05 <= timer.last and timer.left <= 0.95


def test_seconds_are_those_of_one_call(monkeypatch):
    timer, now = Timer(1, torch.device("cpu"), time.monotonic() + 100), [0.0]

    def action():
        now[0] += 0.5

    for clock in ("perf_counter", "process_time"):
        monkeypatch.setattr(calibration.time, clock, lambda: now[0])
    assert (timer.time(action, 4), timer.worked(action, 4)) == (0.5, (0.5, 0.5))


@pytest.mark.parametrize("stretched", [1.0, 8.0])
def test_a_busy_machine_stretches_a_call_and_what_is_before_it(monkeypatch, stretched):
    """The computation takes 0.5 seconds of a CPU that 2 ranks share, and the call behind it half as long by the clock,
    of which its CPU works 0.05 seconds."""
    monkeypatch.setattr(calibration, "cores", lambda: 1)
    clock = Clock(1000.0, lambda _: 0.01)
    bench = Bench(0, 2, torch.device("cpu"), clock)
    compute = SampleLayers(torch.device("cpu"), 1, 16, 8).step
    monkeypatch.setattr(bench, "_between", (compute, 1.0))

    def worked(action, count=1):
        clock.left -= 1.0
        return (stretched, 0.5) if action == compute else (1.5 * stretched, 0.55)

    monkeypatch.setattr(clock, "worked", worked)
    assert bench._added(lambda: None, 900.0) == pytest.approx(0.5)


@pytest.mark.parametrize("busy", [1, 10, 50, 150])
def test_a_machine_that_becomes_busy_stops_at_the_next_repetition(bench, busy):
    _, _, clock = bench(3.0, lambda number: 0.01 if number < busy else 0.2)
    assert clock.left + clock.last >= 0  # only the last measurement may end late


def test_the_file_says_what_was_fitted(tmp_path):
    error = {"memory": Error(0.1, 0.2), "matmul float32": Error(0.0, 0.0), "all_gather": Error(0.25, 0.5)}
    fitted = Fit({"float32": 5e9}, 7e9, {"all_gather": Link(2e8, 1e-4, 1e-3)}, error)
    measured = Measured(4, "cpu", 1e9, 1e-5, 2e-6, 0.25, (Product("float32", 1.0, 1.0),), (), ())
    text, names = calibrate.described("box", measured, fitted, cluster(8, 1))
    assert names == (*(f"kinds.{kind}" for kind in KINDS if kind != "all_gather"), "flops.float64", "flops.bfloat16")
    assert "all_gather:  # fitted within 25%, at worst 50%" in text
    (tmp_path / "box.yaml").write_text(text, encoding="utf-8")
    found = clusters.from_description(tmp_path / "box.yaml")
    assert (found.flops["float32"], found.memory_bandwidth, found.memory, found.overlap) == (5e9, 7e9, 10**9, 0.25)
    assert (found.launch, found.view, found.devices) == (1e-5, 2e-6, 4)
    assert found.levels[0].of("all_gather") == Link(2e8, 1e-4, 1e-3)
    assert found.levels[0].of("send") == found.levels[0].link == cluster(8, 1).levels[-1].link


def test_the_file_says_what_a_step_achieves(tmp_path):
    fitted = Fit({"float32": 5e9}, 7e9, {}, {STACK: Error(0.01, 0.02)}, {}, 0.8)
    measured = Measured(1, "cpu", 1e9, 1e-5, 2e-6, 0.0, (), (), ())
    text, _ = calibrate.described("box", measured, fitted, cluster(8, 1))
    assert "achieved: {flops: 0.800, memory: 0.800, links: 1.0}" in text and "fitted within 1%, at worst 2%" in text
    (tmp_path / "box.yaml").write_text(text, encoding="utf-8")
    found = clusters.from_description(tmp_path / "box.yaml")
    assert (found.flops["float32"], found.memory_bandwidth) == (pytest.approx(4e9), pytest.approx(5.6e9))


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

    def launched(launch, view):
        machine = replace(cluster(1, 1), launch=launch, view=view)
        return sum(operator_work(rule_of(one, graph), {}, one, graph, alone, machine).calls for one in inside)

    assert (launched(1.0, 0.0), launched(0.0, 1.0)) == (3 * CALLS, 3 * VIEWS)


def test_one_rank_has_nobody_to_talk_to(tmp_path):
    fitted = Fit({"float32": 5e9}, 7e9, {}, {"memory": Error(0.1, 0.2), "matmul float32": Error(0.0, 0.0)})
    measured = Measured(1, "cpu", 1e9, 1e-5, 2e-6, 0.0, (), (), ())
    text, _ = calibrate.described("box", measured, fitted, cluster(8, 1))
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
    """A fake measurement that takes no time and returns a string."""
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
    assert command("calibrate", "net.py").code == 0  # now the file is marked as generated
    assert calibrate.MARK in file.read_text(encoding="utf-8")
    assert not list(tmp_path.glob(".*part"))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"x" * 10000, b"machine: {levels: {}}\n"])
def test_other_files_are_kept_whatever_they_hold(command, measured, tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    assert command("calibrate", "file").code == 2
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.slow
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


@pytest.mark.parametrize("seconds", ["1", "7.9", "inf", "nan", "-5"])
def test_too_little_time_is_refused_before_anything_starts(command, tmp_path, seconds):
    done = command("calibrate", "mine.yaml", f"calibrate.seconds={seconds}")
    assert done.code == 2 and len(done.paragraphs) == 1
    assert "calibrate.seconds" in done.err and ("at least 8" in done.err or seconds in ("inf", "nan"))
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there_leaves_nothing(command, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "warm", lambda _: None)  # the fork server is shared with tests that need more preloads
    done = command("calibrate", "mine.yaml", "world_size=4096", "device=cuda")
    assert (done.code, len(done.paragraphs)) == (2, 1) and "needs 4096 GPUs" in done.err
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_start_too_late_say_so(command, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "warm", lambda _: None)
    found = {"runner.commands.calibrate:place": ("cpu", 2), "runner.commands.calibrate:describe": ("", None)}
    monkeypatch.setattr(launch, "run_ranks", lambda entry, *_, **__: found[entry])
    done = command("calibrate", "mine.yaml", *SHORT)
    assert done.code == 1
    assert "too slow to measure anything" in done.err and "calibrate.seconds" in done.err
    assert not list(tmp_path.glob("*.yaml")) and not list(tmp_path.glob(".*part"))


def test_force_is_an_option_of_calibrate_alone(command):
    assert "--force" in command("plan", "+recipe=quickstart", "--force").err


def test_two_files_are_one_too_many(command):
    done = command("calibrate", "a.yaml", "b.yaml", *SHORT)
    assert done.code == 2
    assert "'b.yaml' is neither a verb nor KEY=VALUE" in done.err


@pytest.mark.slow
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
