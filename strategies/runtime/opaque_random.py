"""Random operators of a program as the compiler can take them: one opaque operator for each.

The generated code of such an operator hashes the program's key and sets generators, which no compiler traces; and the
key, a new number at every step, would be compiled anew each time. So the key becomes a tensor, and the operator
`meshwright::draw(key, ordinals, tensors, number)`; the ordinals, by which repeated layers differ, are tensors too. The
invariant: its gradient is that of the same computation with the same numbers, which key and ordinals alone determine;
backward recomputes them.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from strategies.core.program import KEY

Draw = Callable[[int, Sequence[int], Sequence[Tensor]], list[Tensor]]
"""(key, ordinals, tensors) -> results."""

_library = torch.library.Library("meshwright", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("draw(Tensor key, Tensor[] ordinals, Tensor[] tensors, int number) -> Tensor[]")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "draw_gradient(Tensor key, Tensor[] ordinals, Tensor[] tensors, Tensor[] gradients, int number) -> Tensor[]"
)

_draws: list[Draw] = []
"""The meaning of `number` in this process."""


def _draw(key: Tensor, ordinals: list[Tensor], tensors: list[Tensor], number: int) -> list[Tensor]:
    with torch.no_grad():
        return _draws[number](int(key), list(map(int, ordinals)), tensors)


def _draw_shaped(key: Tensor, ordinals: list[Tensor], tensors: list[Tensor], number: int) -> list[Tensor]:
    with torch.no_grad():
        return _draws[number](0, [0] * len(ordinals), tensors)


def _draw_gradient(
    key: Tensor, ordinals: list[Tensor], tensors: list[Tensor], gradients: list[Tensor], number: int
) -> list[Tensor]:
    """The gradient of every floating-point tensor, given those of the floating-point results."""
    with torch.enable_grad():
        numbers = list(map(int, ordinals))
        leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
        results = [one for one in _draws[number](int(key), numbers, leaves) if one.is_floating_point()]
    pairs = [(one, given) for one, given in zip(results, gradients, strict=True) if one.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(
        [one for one, _ in pairs], wanted, [given for _, given in pairs], allow_unused=True, materialize_grads=True
    )
    return [gradient.contiguous() for gradient in found]


def _gradient_shaped(
    key: Tensor, ordinals: list[Tensor], tensors: list[Tensor], gradients: list[Tensor], number: int
) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in tensors if tensor.is_floating_point()]


_library.impl("draw", _draw, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("draw_gradient", _draw_gradient, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("meshwright::draw", _draw_shaped, lib=_library)
torch.library.register_fake("meshwright::draw_gradient", _gradient_shaped, lib=_library)


class _Drawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        number, count, key, *values = given  # the compiler leaves `ctx` out where it counts one argument too many
        ctx.number, ctx.ordinals = number, count
        ctx.save_for_backward(key, *values)
        results: list[Tensor] = torch.ops.meshwright.draw(key, values[:count], values[count:], number)
        ctx.floating = [result.is_floating_point() for result in results]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        key, *values = ctx.saved_tensors
        ordinals, tensors = values[: ctx.ordinals], values[ctx.ordinals :]
        floating = [gradient for gradient, is_floating in zip(gradients, ctx.floating, strict=True) if is_floating]
        found = iter(torch.ops.meshwright.draw_gradient(key, ordinals, tensors, floating, ctx.number))
        returned = (next(found) if tensor.is_floating_point() else None for tensor in tensors)
        return None, None, None, *(None for _ in ordinals), *returned


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
            node.target = _drawing(node, key, numbers, tensors)
            node.args, node.kwargs = (key, *numbers, *tensors), {}


def _drawing(node: fx.Node, key: fx.Node, ordinals: list[fx.Node], tensors: list[fx.Node]) -> Callable[..., Any]:
    """The function of (key, *ordinals, *tensors) that stands for a random operator in generated code."""
    function: Any = node.target
    args, kwargs = node.args, node.kwargs
    several = bool(node.users) and all(user.target is python_operator.getitem for user in node.users)

    def draw(number: int, numbers: Sequence[int], values: Sequence[Tensor]) -> list[Tensor]:
        given: dict[fx.Node, Any] = {key: number}
        given |= dict(zip(ordinals, numbers, strict=True)) | dict(zip(tensors, values, strict=True))
        result = function(*fx.map_arg(args, given.__getitem__), **fx.map_arg(kwargs, given.__getitem__))
        return list(result) if several else [result]

    _draws.append(draw)
    number, count = len(_draws) - 1, len(ordinals)

    def call(key: Tensor, *values: Tensor) -> Any:
        results = _Drawn.apply(number, count, key, *values)  # type: ignore[no-untyped-call]
        return results if several else results[0]

    call.__name__ = call.__qualname__ = function.__name__
    call.__module__ = "opaque_random"
    return call
