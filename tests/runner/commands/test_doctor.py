"""The verb doctor: one line per check; a failing check affects no other line."""

import shutil
from collections import namedtuple

import pytest

from runner.commands import doctor
from strategies.runtime import compiled

Usage = namedtuple("Usage", "total used free")


def lines(text: str) -> dict[str, str]:
    """The status by the name of the check."""
    return {line[8:21].strip(): line.split()[0] for line in text.splitlines()}


@pytest.fixture
def few_libraries(monkeypatch):
    """Only the checks whose imports are fast."""
    monkeypatch.setattr(doctor, "LIBRARIES", ("torch", "hydra", "pydantic"))


def test_this_machine_can_run(few_libraries, command):
    done = command("doctor")
    status = lines(done.out)
    assert done.code == 0, done.out
    assert set(status.values()) == {"ok"}
    assert {"python", "torch", "hydra", "devices", "collectives", "conf", "recipes", "models", "disk"} <= status.keys()
    assert {"strategies", "shared memory", "tensorboard", "transformers", "compiler"} <= status.keys()


def test_what_only_some_runs_need_may_be_absent(few_libraries, monkeypatch, command):
    monkeypatch.setattr(doctor, "OPTIONAL", {"no_such_lib": "that=true"})
    monkeypatch.setattr(compiled, "missing", lambda device: "there is no compiler")
    done = command("doctor")
    assert done.code == 0
    assert "no_such_lib    absent; only that=true needs it" in done.out
    assert "absent; only train.compile=true needs it: there is no compiler" in done.out


def test_library_that_does_not_import_costs_its_line(monkeypatch, command):
    monkeypatch.setattr(doctor, "LIBRARIES", ("hydra", "no_such_lib", "pydantic"))
    done = command("doctor")
    status = lines(done.out)
    assert done.code == 1
    assert (status["hydra"], status["no_such_lib"], status["pydantic"]) == ("ok", "failed", "ok")
    assert "ModuleNotFoundError" in done.out


def test_full_disk(few_libraries, monkeypatch, command):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40, 2**20))
    done = command("doctor")
    assert done.code == 1
    assert lines(done.out)["disk"] == lines(done.out)["shared memory"] == "failed"


def test_another_package_in_the_way(few_libraries, monkeypatch, command):
    monkeypatch.setattr(doctor, "BESIDE_RUNNER", ("conf", "json"))
    done = command("doctor")
    assert done.code == 1
    assert (lines(done.out)["conf"], lines(done.out)["json"]) == ("ok", "failed")
    assert "PYTHONSAFEPATH=1" in done.out
