"""Models that are built from shapes leave no tensors without numbers behind."""

from __future__ import annotations

import sys
from importlib import import_module

import torch

from strategies.capture.shapes import shapes_only

FILE = """
from functools import lru_cache

import torch

torch.set_default_device("cpu")
MEAN = torch.ones(3)
KEPT = {}


@lru_cache
def table(length):
    return torch.arange(length)


class Scaled(torch.nn.Linear):
    scale = torch.ones(3)

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("table", table(3))
        KEPT[3] = torch.ones(3)
"""


def test_the_users_files_hold_numbers(tmp_path, monkeypatch):
    (tmp_path / "tables_of_mine.py").write_text(FILE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for first in (True, False):  # imported inside, and before
        with shapes_only():
            module = import_module("tables_of_mine")
            built = module.Scaled()
            assert module.KEPT[3].is_meta
        assert built.weight.is_meta
        assert built.table.is_meta
        held = module.MEAN, module.Scaled.scale, module.table(3)
        assert [one.sum().item() for one in held] == [3, 3, 3], first
        assert module.KEPT == {}
        module.table.cache_clear()
    del sys.modules["tables_of_mine"]
    torch.set_default_device(None)
    assert not torch.empty(1).is_meta
