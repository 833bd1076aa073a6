"""A rank's program through torch.compile, without graph breaks at the collectives.

To the compiler a redistribution is an opaque operator, `meshwright::communicate(tensors, number)`, whose result shapes
are known; inside runs the same carrier as in eager mode. It is registered as effectful: none is left out or moved
before another, although the graphs of ranks differ (the first rank of a running sum uses nothing of others). A random
operator is opaque too, `meshwright::call`: its code hashes the program's key and sets generators, which no compiler
traces. The key, a new number at every step, and the ordinals, by which repeated layers differ, become tensors, because
new numbers would be compiled anew. Invariant: a compiled program computes what the eager one does, and the ranks
communicate in one order (`order` is its hash).
"""

from __future__ import annotations

import importlib.util
import operator as python_operator
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from strategies.core.errors import StrategyError
from strategies.core.mesh import Mesh
from strategies.core.program import KEY
from strategies.core.steps import LOCAL, ReshardingPath
from strategies.rules.recurrent import NETWORKS
from strategies.rules.registry import resolve
from strategies.runtime.communicator import Carrier

LARGEST = 2000
"""The most nodes of a unit that is compiled as one graph; compile time grows faster than the unit."""
REPEATED = 3
"""How often a unit must have the same code for being compiled by itself, once for all."""
AT_ONCE = 1000
"""The most nodes of a program for a GPU (a GPT of 12 layers) that is compiled as one graph although it has repeated
units: a call of each takes longer than some of their kernels."""
SHAPES = 256
"""Of how many shapes the inputs of one code may be; beyond them it would not be compiled."""

OPTIONAL = "optional"
"""Key in `GraphModule.meta` of a unit: whether it makes values that a step may leave without a gradient."""

Function = Callable[[Sequence[Tensor]], list[Tensor]]

CALL, COMMUNICATE = "call", "communicate"
"""Opaque operators: one that the compiler may move, and one whose order it keeps."""

_functions: list[tuple[Function, Function]] = []
"""The meaning of `number` in this process: the function, and one that returns results of the same shapes."""
_order = [0]
"""A hash of the redistributions carried out so far, in their order."""


def _call(tensors: list[Tensor], number: int) -> list[Tensor]:
    return _functions[number][0](tensors)


def _call_shaped(tensors: list[Tensor], number: int) -> list[Tensor]:
    return _functions[number][1](tensors)


_library = torch.library.Library("meshwright", "FRAGMENT")  # type: ignore[no-untyped-call]
for _name in (CALL, COMMUNICATE):
    _library.define(f"{_name}(Tensor[] tensors, int number) -> Tensor[]")  # type: ignore[no-untyped-call]
    _library.impl(_name, _call, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"meshwright::{_name}", _call_shaped, lib=_library)
_register_effectful_op(torch.ops.meshwright.communicate.default, _EffectType.ORDERED)


def opaque(function: Function, shaped: Function, name: str = CALL) -> Function:
    """`function` as an operator into which the compiler does not look; its results share no memory with one another or
    with its arguments. `shaped` returns results of the same shapes."""
    _functions.append((function, shaped))
    number, operation = len(_functions) - 1, getattr(torch.ops.meshwright, name)

    def call(tensors: Sequence[Tensor]) -> list[Tensor]:
        results: list[Tensor] = operation(list(tensors), number)
        return results

    return call


_copied = opaque(lambda tensors: [one.clone() for one in tensors], lambda tensors: [*map(torch.empty_like, tensors)])


def old_value(buffer: Tensor) -> Tensor:
    """The value of a buffer that the end of a forward writes, for operators whose backward needs it: of what they
    compute from it the compiler would keep the buffer itself."""
    return _copied([buffer])[0]


def opaque_carrier(carrier: Carrier, paths: Sequence[ReshardingPath], mesh: Mesh) -> Carrier:
    """`carrier`, which follows `paths`, as the compiler can take it; itself where nothing is sent."""
    if all(step.kind in LOCAL for step in paths[0]):
        return carrier
    ends = [steps[-1] for steps in paths]
    shapes = [end.after.local_shape(end.shape, mesh) for end in ends]
    number = len(_functions)

    def carry(tensors: Sequence[Tensor]) -> list[Tensor]:
        _order[0] = hash((_order[0], number))
        results = carrier(tensors)
        return [result.clone() for result in results] if len(results) > 1 else [results[0].contiguous()]

    def shaped(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.new_empty(shape) for tensor, shape in zip(tensors, shapes, strict=True)]

    return opaque(carry, shaped, COMMUNICATE)


def order() -> int:
    """A number below 2**62 that is equal on ranks that have carried out the same redistributions in the same order."""
    return _order[0] % 2**62


class _Random(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        # `given` is one argument: the compiler leaves `ctx` out where it counts one too many
        draw, ctx.gradient, ctx.first, *tensors = given
        ctx.save_for_backward(*tensors)
        results = draw(tensors)
        ctx.floating = [result.is_floating_point() for result in results]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        floating = [gradient for gradient, is_floating in zip(gradients, ctx.floating, strict=True) if is_floating]
        found = iter(ctx.gradient([*ctx.saved_tensors, *floating]))
        values = ctx.saved_tensors[ctx.first :]
        returned = (next(found) if value.is_floating_point() else None for value in values)
        return *[None] * (3 + ctx.first), *returned


def as_key(key: int) -> Tensor:
    """The random key of a step (63 bits) as a compiled program takes it."""
    return torch.tensor(key)


def make_random_opaque(graph: fx.Graph, ordinals: Collection[str]) -> None:
    """Make every operator of `graph` that takes the program's random key opaque; the key is a tensor from then on, and
    so are the attributes `ordinals` of the module."""
    for node in graph.nodes:
        if node.op == "call_function" and any(one.target == KEY.id for one in node.all_input_nodes):
            (key,) = (one for one in node.all_input_nodes if one.target == KEY.id)
            others = [one for one in node.all_input_nodes if one is not key]
            numbers = [one for one in others if one.op == "get_attr" and one.target in ordinals]
            tensors = [one for one in others if one not in numbers]
            node.target = _opaque_draw(node, key, numbers, tensors)
            node.args, node.kwargs = (key, *numbers, *tensors), {}


def _opaque_draw(node: fx.Node, key: fx.Node, ordinals: list[fx.Node], tensors: list[fx.Node]) -> Callable[..., Any]:
    """The function of (key, *ordinals, *tensors) that stands for a random operator in generated code. Its gradient is
    that of the same computation with the same numbers, which backward repeats."""
    function: Any = node.target
    args, kwargs = node.args, node.kwargs
    several = bool(node.users) and all(user.target is python_operator.getitem for user in node.users)
    first, end = 1 + len(ordinals), 1 + len(ordinals) + len(tensors)

    def computed(values: Sequence[Any]) -> list[Tensor]:
        given = dict(zip((key, *ordinals, *tensors), values, strict=True))
        result = function(*fx.map_arg(args, given.__getitem__), **fx.map_arg(kwargs, given.__getitem__))
        return list(result) if several else [result]

    @torch.no_grad()
    def draw(given: Sequence[Tensor]) -> list[Tensor]:
        return [one.contiguous() for one in computed([*map(int, given[:first]), *given[first:]])]

    @torch.no_grad()
    def shaped(given: Sequence[Tensor]) -> list[Tensor]:
        return [one.contiguous() for one in computed([0] * first + [*given[first:]])]

    def gradient(given: Sequence[Tensor]) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in given[first:end]]
        with torch.enable_grad():
            results = [one for one in computed([*map(int, given[:first]), *leaves]) if one.is_floating_point()]
        pairs = [(one, back) for one, back in zip(results, given[end:], strict=True) if one.requires_grad]
        found = torch.autograd.grad(
            [one for one, _ in pairs],
            [leaf for leaf in leaves if leaf.requires_grad],
            [back for _, back in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        return [gradient.contiguous() for gradient in found]

    def gradient_shaped(given: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.new_empty(tensor.shape) for tensor in given[first:end] if tensor.is_floating_point()]

    forward, backward = opaque(draw, shaped), opaque(gradient, gradient_shaped)

    def call(*given: Tensor) -> Any:
        results = _Random.apply(forward, backward, first, *given)  # type: ignore[no-untyped-call]
        return results if several else results[0]

    call.__name__ = call.__qualname__ = function.__name__
    call.__module__ = "opaque_random"
    return call


def is_unrolled(target: str) -> bool:
    """Whether the compiler unrolls an operator over time, which takes minutes for a hundred steps."""
    return target.split(".")[0] == "aten" and target.split(".")[1] in NETWORKS


def is_scaled(target: str, arguments: Container[str]) -> bool:
    """Whether an operator adds a multiple of its second operand."""
    return target.startswith(("aten.add.", "aten.sub.")) and "alpha" in arguments


def scaling(target: str) -> Callable[..., Any]:
    """Such an operator as two: where that operand is a product of matrices, inductor (torch 2.13) adds it once, without
    the multiple."""
    function = resolve(target)

    def call(one: Any, other: Any, *, alpha: Any) -> Any:
        return function(one, other * alpha)

    call.__name__ = call.__qualname__ = f"scaled_{target.split('.')[1]}"
    call.__module__ = "scaled"
    return call


def in_eager(target: str) -> Callable[..., Any]:
    """What `target` names, called between two graphs, as torch.compile itself does with `nn.LSTM` by default."""
    function = resolve(target)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def between(*args: Any, **kwargs: Any) -> Any:  # generated code would call torch's operator by its own name
        return function(*args, **kwargs)

    return cast(Callable[..., Any], between)


def compile_units(module: fx.GraphModule, device: str, *, leaves: bool = False, backend: Any = "inductor") -> None:
    """Compile `module`, which `module_tree.build` made for compiling, at its first call: as one graph; in parts where
    it is large or has repeated layers; or with `leaves` by leaf units, because ZeRO-3 gathers parameters between units.
    Units that share their code are compiled once."""
    from torch._inductor import utils

    # Its templates, which every backend reads, are not ASCII as PYTHONUTF8=0 and LC_ALL=C expect.
    utils.open = partial(open, encoding="utf-8")
    options: dict[str, str | int | bool | Callable[..., Any]] = {}
    if backend == "inductor":
        # passes that move effectful operators, too
        options |= {"reorder_for_locality": False, "reorder_for_peak_memory": False}
    if device == "cpu":
        from torch._inductor import config

        config.compile_threads = 1  # the ranks share the cores; a pool of processes each is too much
    # A program's shapes never change, but one code may serve units of several shapes.
    torch._dynamo.config.recompile_limit = SHAPES
    shared: dict[type, Callable[..., Any]] = {}
    for unit in list(_parts(module, 0) if leaves else _chosen(module, 0 if device == "cpu" else AT_ONCE)):
        kind = type(unit)
        if kind not in shared:
            shared[kind] = torch.compile(kind.forward, dynamic=False, backend=backend, options=options or None)
        vars(unit)["forward"] = MethodType(shared[kind], unit)


def _units(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    return (inner for inner in module.modules() if isinstance(inner, fx.GraphModule))


def _chosen(module: fx.GraphModule, at_once: int) -> Iterator[fx.GraphModule]:
    """The parts that are compiled: all as one where there are at most `at_once` nodes, else each of the repeated
    layers, and the units beside them."""
    if sum(len(unit.graph.nodes) for unit in _units(module)) <= at_once:
        return _parts(module, at_once)
    count = Counter(type(unit) for unit in _units(module) if len(unit.graph.nodes) > 1 and _inner(unit))
    repeated = {kind for kind, number in count.items() if number >= REPEATED}
    return _parts(module, LARGEST, repeated)


def _inner(module: fx.GraphModule) -> list[fx.GraphModule]:
    return [unit for unit in _units(module) if unit is not module]


def _parts(module: fx.GraphModule, largest: int, repeated: Container[type] = ()) -> Iterator[fx.GraphModule]:
    """The outermost units of at most `largest` operators and without `repeated` units inside, or without units inside.
    What stands between them is not compiled, nor what may be left without a gradient: compiled code makes one of
    zeros."""
    inner = _inner(module)
    small = sum(len(unit.graph.nodes) for unit in _units(module)) <= largest
    if not any(unit.meta.get(OPTIONAL) for unit in (module, *inner)) and (
        not inner or type(module) in repeated or (small and not any(type(unit) in repeated for unit in inner))
    ):
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
