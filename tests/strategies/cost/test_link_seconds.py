"""Seconds on the links: on many axes the closed form of a resharding path."""

from __future__ import annotations

import pytest

from strategies.core.graph import TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.cost import link_seconds
from strategies.cost.link_seconds import LinkSeconds
from tests.strategies.search.problems import all_layouts, node


def test_closed_form_paths_of_many_axes_send_no_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over one kind of link: a search, used on few axes, never sends more than the closed form, and mostly as much."""
    spec, machine = TensorSpec((64, 64), "float32"), node(16)
    mesh = Mesh((("a", 2), ("b", 2), ("c", 4)))
    searched, written = LinkSeconds(mesh, machine), LinkSeconds(mesh, machine)
    assert searched.searched
    written.searched = False
    same = 0
    for before in all_layouts(2, "abc", True):
        for after in all_layouts(2, "abc", False):
            least, found = (wire.seconds(before, after, spec) for wire in (searched, written))
            assert least <= found * (1 + 1e-9)
            same += found <= least * (1 + 1e-9)
    assert same > 0.6 * len(all_layouts(2, "abc", True)) * len(all_layouts(2, "abc", False))
    many = LinkSeconds(Mesh(tuple((f"x{i}", 2) for i in range(9))), node(512))
    monkeypatch.setattr(link_seconds, "resharding_path", None)
    assert many.seconds(Layout((("x0",), ())), Layout(((), ("x0",))), spec) > 0
    assert many.seconds(Layout((("x0",), ())), Layout((("x0", "x1"), ())), spec) == 0
