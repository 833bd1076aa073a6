"""Entries of this folder are found by the ranks, which get the path of this process."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def visible(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(HERE), str(HERE.parent)]))
    monkeypatch.syspath_prepend(str(HERE))
