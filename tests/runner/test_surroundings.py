"""The environment of a command: the folder that it writes, its streams, the network of the machine.

An unusable environment gives one paragraph before anything starts; every other one works."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli import run_folders as folders
from runner.errors import ConfigError
from runner.launch import network

QUICK = "+recipe=quickstart"
LONG = "a" * 300


@pytest.mark.few(5)
@pytest.mark.parametrize("folder", ["file", "file/inside", "/dev/null/x", "/proc/none/x", LONG, f"new/{LONG}"])
@pytest.mark.parametrize("swept", [False, True])
def test_a_folder_that_cannot_be_written(command, job, left, tmp_path, folder, swept):
    job(lambda config, run_dir: pytest.fail("it began"))
    (tmp_path / "file").touch()
    key, words = ("hydra.sweep.dir", ["-m", QUICK, "train.seed=1,2"]) if swept else ("hydra.run.dir", [QUICK])
    done = command(*words, f"{key}={folder}")
    assert (done.code, len(done.paragraphs)) == (2, 1), done.err
    assert key in done.paragraphs[0] and "cannot be written" in done.paragraphs[0]
    assert left() == [Path("file")]


def test_a_folder_whose_name_python_cannot_encode():
    """The result of os.fsdecode in the C locale with Python's UTF-8 mode turned off."""
    with pytest.raises(ConfigError, match="PYTHONUTF8=1"):
        folders.require_writable("out/\udcc3\udcbc", "hydra.run.dir")


def test_a_disk_that_is_full_at_the_start(command, job, left, monkeypatch):
    job(lambda config, run_dir: pytest.fail("it began"))

    def full(**options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folders.tempfile, "TemporaryFile", full)
    done = command(QUICK)
    assert (done.code, len(done.paragraphs), left()) == (2, 1, [])
    assert "No space left on device" in done.paragraphs[0]


def test_a_disk_that_is_full_later(command, job):
    def full(config, run_dir):
        with open("/dev/full", "w", encoding="utf-8") as file:
            file.write("x")

    job(full)
    done = command(QUICK)
    assert (done.code, len(done.paragraphs)) == (1, 1)
    assert "No space left on device" in done.paragraphs[0] and "unexpected" not in done.paragraphs[0]


def started(tmp_path, words, shell="", **environment):
    line = [sys.executable, "-m", "runner", *words]
    return subprocess.run(
        ["sh", "-c", f'{shell} "$@" {environment.pop("after", "")}', "sh", *line],
        cwd=tmp_path,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=100,
    )


@pytest.mark.parametrize("words", [["recipes"], [QUICK]])
def test_a_working_directory_that_is_gone(tmp_path, words):
    (tmp_path / "gone").mkdir()
    done = started(tmp_path, words, "cd gone && rmdir ../gone &&")
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1), done.stderr
    assert b"working directory is gone" in done.stderr


def named(text):
    """`text` in UTF-8 as a path of this process, whose locale may be ASCII."""
    return os.fsdecode(text.encode())


ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
UTF8 = {"PYTHONUTF8": "1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "environment"),
    [
        pytest.param("", ASCII, id="ascii"),
        pytest.param(">&-", UTF8, id="no stdout", marks=pytest.mark.slow),
        pytest.param(">&- 2>&-", UTF8, id="no stdout and stderr"),
        pytest.param("| head -1", UTF8, id="head"),
    ],
)
def test_a_run_ends_well_whoever_looks_at_it(tmp_path, after, environment):
    here = tmp_path / ("plain" if environment is ASCII else named("über"))
    here.mkdir()
    mine = ["world_size=2", "parallel.strategies={matmul: [[2,1],[1,1]]}"]
    done = started(here, [QUICK, *mine, "train.steps=3", "hydra.run.dir=out"], after=after, **environment)
    assert (done.returncode in (0, 141), done.stderr) == (True, b"")
    assert (here / "out" / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 3
    assert not (here / "out" / "error.txt").exists()


def test_what_a_terminal_cannot_show_is_escaped(tmp_path):
    done = started(tmp_path, [QUICK, named("train.größe=1")], **ASCII)
    assert done.returncode == 2 and done.stderr.isascii() and done.stderr.count(b"\n") == 1, done.stderr


def test_a_machine_without_loopback(command, left, monkeypatch):
    """As under `unshare -n`, where gloo would wait forever."""

    def unreachable(address):
        raise ConfigError("MW702", f"there is no way from this machine to {address}: Network is unreachable.")

    monkeypatch.setattr(network, "towards", unreachable)
    done = command(QUICK, "parallel.plan_cache=null")
    assert (done.code, len(done.paragraphs), left()) == (2, 1, [])
    assert "127.0.0.1" in done.paragraphs[0] and "loopback" in done.paragraphs[0]


DOUBLES = """
import torch
from torch import nn

{at_import}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.set_default_dtype(torch.float64)
        self.dense = nn.Linear(8, 4)

    def forward(self, x):
        return self.dense(x) {forward}
"""
ROWS = """
import torch

def rows():
    return torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randint(0, 4, (8,)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at_import", "forward", "precision"),
    [
        ("torch.set_default_dtype(torch.float64)", "@ torch.eye(4)", "fp64"),
        ("", "+ torch.ones(4)", "fp64"),
        ("", "@ torch.eye(4)", "fp32"),
    ],
)
def test_a_default_dtype_that_the_model_sets(tmp_path, at_import, forward, precision):
    """Ranks, which do not import the model's file, make their data in the same dtype."""
    (tmp_path / "doubles.py").write_text(DOUBLES.format(at_import=at_import, forward=forward), encoding="utf-8")
    (tmp_path / "some_rows.py").write_text(ROWS, encoding="utf-8")
    words = (
        *("verify", "model.target=doubles.Net", "data.target=some_rows.rows", "data.batch_size=4", "world_size=2"),
        *("loss.target=torch.nn.CrossEntropyLoss", "parallel=data_parallel", f"train.precision={precision}"),
        *("optimizer.target=torch.optim.SGD", "train.steps=2"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "runner", *words], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8"
    )
    assert done.returncode == 0 and "verify passed" in done.stdout, done.stderr
