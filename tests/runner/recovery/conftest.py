"""Makes the rank functions of this folder importable: ranks inherit `sys.path` of this process."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from disturbed import stored  # noqa: E402


@pytest.fixture(autouse=True)
def visible(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(HERE), str(HERE.parent)]))
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def trouble(tmp_path, monkeypatch):
    """`trouble(what)` lets `troubles` make trouble of that kind."""

    def call(what):
        monkeypatch.setenv("TROUBLE", what)
        monkeypatch.setenv("TROUBLE_MARK", str(tmp_path / "mark"))

    return call


@pytest.fixture(scope="module")
def remembered():
    return {}


@pytest.fixture
def undisturbed(start, remembered):
    """`undisturbed(*words)` returns the results of that run without a failure."""

    def call(*words):
        if words not in remembered:
            remembered[words] = stored(start(*words, folder="undisturbed").folder)
        return remembered[words]

    return call
