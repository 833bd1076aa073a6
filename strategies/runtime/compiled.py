"""A rank's program through torch.compile, without graph breaks at the collectives.

To the compiler a redistribution is one opaque operator, `meshwright::carry(tensor, number)` (`carry_all` for several
that are fused), whose result shape is known; inside runs the same carrier as in eager mode. Invariant: a compiled
program computes what the eager one does, and the ranks communicate in one order (`order` is its hash). Two equal
redistributions of one value are merged by the compiler. Random operators are opaque too (see `opaque_random`).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, fx

from strategies.core.errors import StrategyError
from strategies.core.mesh import Mesh
from strategies.core.steps import LOCAL, ReshardingPath
from strategies.runtime.communicator import Carrier, CarrierOfAll

LARGEST = 2000
"""The most nodes of a unit that is compiled as one graph; compile time grows faster than the unit."""
REPEATED = 3
"""How often a unit must have the same code for being compiled by itself, once for all."""
SHAPES = 256
"""Of how many shapes the inputs of one code may be; beyond them it would not be compiled."""

_library = torch.library.Library("meshwright", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("carry(Tensor tensor, int number) -> Tensor")  # type: ignore[no-untyped-call]
_library.define("carry_all(Tensor[] tensors, int number) -> Tensor[]")  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Edge:
    carrier: Carrier
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Edges:
    carrier: CarrierOfAll
    shapes: tuple[tuple[int, ...], ...]


_edges: list[_Edge] = []
_fused: list[_Edges] = []
"""The meaning of `number` in this process."""
_order = [0]
"""A hash of the edges carried out so far, in their order."""


def _carry(tensor: Tensor, number: int) -> Tensor:
    _order[0] = hash((_order[0], number))
    return _edges[number].carrier(tensor).contiguous()


def _shaped(tensor: Tensor, number: int) -> Tensor:
    return tensor.new_empty(_edges[number].shape)


_library.impl("carry", _carry, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("meshwright::carry", _shaped, lib=_library)


def _carry_all(tensors: list[Tensor], number: int) -> list[Tensor]:
    _order[0] = hash((_order[0], -1 - number))
    return [result.clone() for result in _fused[number].carrier(tensors)]  # an operator's results share no memory


def _all_shaped(tensors: list[Tensor], number: int) -> list[Tensor]:
    return [tensor.new_empty(shape) for tensor, shape in zip(tensors, _fused[number].shapes, strict=True)]


_library.impl("carry_all", _carry_all, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("meshwright::carry_all", _all_shaped, lib=_library)


def opaque(carrier: Carrier, steps: ReshardingPath, mesh: Mesh) -> Carrier:
    """`carrier`, which carries out `steps`, as the compiler can take it; itself where nothing is sent."""
    if all(step.kind in LOCAL for step in steps):
        return carrier
    _edges.append(_Edge(carrier, steps[-1].after.local_shape(steps[-1].shape, mesh)))
    number = len(_edges) - 1

    def carry(tensor: Tensor) -> Tensor:
        result: Tensor = torch.ops.meshwright.carry(tensor, number)
        return result

    return carry


def opaque_all(carrier: CarrierOfAll, chains: Sequence[ReshardingPath], mesh: Mesh) -> CarrierOfAll:
    """`opaque` for several tensors at once."""
    if all(step.kind in LOCAL for step in chains[0]):
        return carrier
    ends = [steps[-1] for steps in chains]
    _fused.append(_Edges(carrier, tuple(end.after.local_shape(end.shape, mesh) for end in ends)))
    number = len(_fused) - 1

    def carry(tensors: Sequence[Tensor]) -> list[Tensor]:
        results: list[Tensor] = torch.ops.meshwright.carry_all(list(tensors), number)
        return results

    return carry


def order() -> int:
    """A number below 2**62 that is equal on ranks that have carried out the same redistributions in the same order."""
    return _order[0] % 2**62


def compile_units(module: fx.GraphModule, device: str, *, leaves: bool = False, backend: Any = "inductor") -> None:
    """Compile `module`, which `module_tree.build` made for compiling, at its first call: as one graph; in parts where
    it is large or has repeated layers; or with `leaves` by leaf units, because ZeRO-3 gathers parameters between units.
    Units that share their code are compiled once."""
    from torch._inductor import utils

    # Its templates, which every backend reads, are not ASCII as PYTHONUTF8=0 and LC_ALL=C expect.
    utils.open = partial(open, encoding="utf-8")  # type: ignore[attr-defined]
    options: dict[str, str | int | bool | Callable[..., Any]] = {}
    if backend == "inductor":
        options["reorder_for_locality"] = False  # it moves collectives
    if device == "cpu":
        from torch._inductor import config

        config.compile_threads = 1  # the ranks share the cores; a pool of processes each is too much
    # A program's shapes never change, but one code may serve units of several shapes.
    torch._dynamo.config.recompile_limit = SHAPES
    shared: dict[type, Callable[..., Any]] = {}
    for unit in list(_parts(module, 0) if leaves else _chosen(module)):
        kind = type(unit)
        if kind not in shared:
            shared[kind] = torch.compile(kind.forward, dynamic=False, backend=backend, options=options or None)
        vars(unit)["forward"] = MethodType(shared[kind], unit)


def _units(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    return (inner for inner in module.modules() if isinstance(inner, fx.GraphModule))


def _chosen(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The parts that are compiled: each of the repeated layers, and the units beside them."""
    count = Counter(type(unit) for unit in _units(module) if len(unit.graph.nodes) > 1 and _inner(unit))
    repeated = {kind for kind, number in count.items() if number >= REPEATED}
    return _parts(module, LARGEST, repeated)


def _inner(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [unit for unit in _units(module) if unit is not module]


def _parts(module: fx.GraphModule, largest: int, repeated: Container[type] = ()) -> Iterator[fx.GraphModule]:
    """The outermost units of at most `largest` operators and without `repeated` units inside, or without units inside.
    What stands between them is not compiled."""
    inner = _inner(module)
    small = sum(len(unit.graph.nodes) for unit in _units(module)) <= largest
    if not inner or type(module) in repeated or (small and not any(type(unit) in repeated for unit in inner)):
        yield module
        return
    within = {below for unit in inner for below in _units(unit) if below is not unit}
    for unit in inner:
        if unit not in within:
            yield from _parts(unit, largest, repeated)


def check(device: str) -> None:
    """Raises StrategyError, which names the missing tool, where programs for `device` cannot be compiled."""
    if (lacking := missing(device)) is not None:
        raise StrategyError(
            "MW802", f"train.compile = true cannot be done here: {lacking}; install it, or leave compiling out."
        )


def missing(device: str) -> str | None:
    """What torch.compile needs for `device` ("cpu" or "cuda") and does not find here."""
    if device == "cpu":
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            return "there is no C++ compiler (g++, clang++, or what the environment variable CXX names)"
        return None
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "there is no C compiler (gcc, clang, or what the environment variable CC names), which triton needs"
    return None
