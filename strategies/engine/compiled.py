"""A rank's program through torch.compile, without graph breaks at the collectives.

To the compiler a redistribution is one opaque operator, `meshwright::carry(tensor, number)`, whose result shape is
known; inside runs the same carrier as without compiling. The invariant: what is compiled computes what it did before,
and the operators that communicate stay in the order in which every rank has them. Operators that draw random numbers
from the program's key stay as they are: the key is a new number at every step.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from strategies.engine.communicator import Carrier
from strategies.engine.program import KEY
from strategies.errors import StrategyError
from strategies.mesh import Mesh
from strategies.redistribution import LOCAL, Chain

_library = torch.library.Library("meshwright", "FRAGMENT")
_library.define("carry(Tensor tensor, int number) -> Tensor")


@dataclass(frozen=True)
class _Edge:
    carrier: Carrier
    shape: tuple[int, ...]


_edges: list[_Edge] = []
"""What `number` means, in this process."""


def _carry(tensor: Tensor, number: int) -> Tensor:
    return _edges[number].carrier(tensor).contiguous()


def _shaped(tensor: Tensor, number: int) -> Tensor:
    return tensor.new_empty(_edges[number].shape)


_library.impl("carry", _carry, "CompositeExplicitAutograd")
torch.library.register_fake("meshwright::carry", _shaped, lib=_library)


def opaque(carrier: Carrier, steps: Chain, mesh: Mesh) -> Carrier:
    """`carrier`, which carries out `steps`, as the compiler can take it; itself where nothing is sent."""
    if all(step.kind in LOCAL for step in steps):
        return carrier
    _edges.append(_Edge(carrier, steps[-1].after.local_shape(steps[-1].shape, mesh)))
    number = len(_edges) - 1

    def carry(tensor: Tensor) -> Tensor:
        result: Tensor = torch.ops.meshwright.carry(tensor, number)
        return result

    return carry


def compile_units(module: fx.GraphModule, *, leaves: bool, backend: Any = "inductor") -> None:
    """Let `module`, which `partition.build` made for compiling, be compiled when it is first called: as a whole, or with
    `leaves` unit by unit, which leaves room for hooks around units (ZeRO-3 gathers a unit's parameters there)."""
    options = {"reorder_for_locality": False} if backend == "inductor" else None
    for unit in list(units(module)):
        _leave_random(unit)
        if (unit is module) if not leaves else not any(inner is not unit for inner in units(unit)):
            unit.forward = torch.compile(unit.forward, backend=backend, options=options)  # type: ignore[method-assign]


def units(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    return (inner for inner in module.modules() if isinstance(inner, fx.GraphModule))


def _leave_random(unit: fx.GraphModule) -> None:
    """Put operators that take the random key where the compiler does not look."""
    drawing = [
        node
        for node in unit.graph.nodes
        if node.op == "call_function" and any(one.target == KEY.id for one in node.all_input_nodes)
    ]
    for node in drawing:
        node.target = torch.compiler.disable(node.target)
    if drawing:
        unit.recompile()
