"""Random operators of a program as the compiler can take them: one opaque operator for each.

The generated code of such an operator hashes the program's key and sets generators, which no compiler traces; and the
key, a new number at every step, would be compiled anew each time. So the key becomes a tensor, and the operator
`meshwright::draw(key, tensors, number)`. The invariant: its gradient is that of the same computation with the same
numbers, which the key alone determines; they are drawn a second time for it.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from strategies.engine.program import KEY

Draw = Callable[[int, Sequence[Tensor]], list[Tensor]]

_library = torch.library.Library("meshwright", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("draw(Tensor key, Tensor[] tensors, int number) -> Tensor[]")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "draw_gradient(Tensor key, Tensor[] tensors, Tensor[] gradients, int number) -> Tensor[]"
)

_draws: list[Draw] = []
"""What `number` means, in this process."""


def _draw(key: Tensor, tensors: list[Tensor], number: int) -> list[Tensor]:
    with torch.no_grad():
        return _draws[number](int(key), tensors)


def _draw_shaped(key: Tensor, tensors: list[Tensor], number: int) -> list[Tensor]:
    with torch.no_grad():
        return _draws[number](0, tensors)


def _draw_gradient(key: Tensor, tensors: list[Tensor], gradients: list[Tensor], number: int) -> list[Tensor]:
    """The gradient of every floating-point tensor, given those of the floating-point results."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in tensors]
        results = [one for one in _draws[number](int(key), leaves) if one.is_floating_point()]
    pairs = [(one, given) for one, given in zip(results, gradients, strict=True) if one.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = torch.autograd.grad(
        [one for one, _ in pairs], wanted, [given for _, given in pairs], allow_unused=True, materialize_grads=True
    )
    return [gradient.contiguous() for gradient in found]


def _gradient_shaped(key: Tensor, tensors: list[Tensor], gradients: list[Tensor], number: int) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in tensors if tensor.is_floating_point()]


_library.impl("draw", _draw, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("draw_gradient", _draw_gradient, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("meshwright::draw", _draw_shaped, lib=_library)
torch.library.register_fake("meshwright::draw_gradient", _gradient_shaped, lib=_library)


class _Drawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, key: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.number = number
        ctx.save_for_backward(key, *tensors)
        results: list[Tensor] = torch.ops.meshwright.draw(key, list(tensors), number)
        ctx.floating = [result.is_floating_point() for result in results]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        key, *tensors = ctx.saved_tensors
        floating = [gradient for gradient, is_floating in zip(gradients, ctx.floating, strict=True) if is_floating]
        found = iter(torch.ops.meshwright.draw_gradient(key, tensors, floating, ctx.number))
        return None, None, *(next(found) if tensor.is_floating_point() else None for tensor in tensors)


def as_key(key: int) -> Tensor:
    """The random key of a step (63 bits) as a compiled program takes it."""
    return torch.tensor(key)


def draw_opaquely(unit: fx.GraphModule) -> None:
    """Make every operator of `unit` that takes the program's random key opaque; the key is a tensor from then on."""
    drawing = [
        node
        for node in unit.graph.nodes
        if node.op == "call_function" and any(one.target == KEY.id for one in node.all_input_nodes)
    ]
    for node in drawing:
        tensors = [one for one in node.all_input_nodes if one.target != KEY.id]
        (key,) = (one for one in node.all_input_nodes if one.target == KEY.id)
        node.target = _drawing(node, key, tensors)
        node.args, node.kwargs = (key, *tensors), {}
    if drawing:
        unit.recompile()


def _drawing(node: fx.Node, key: fx.Node, tensors: list[fx.Node]) -> Callable[..., Any]:
    """The function of (key, *tensors) that stands for a random operator in generated code."""
    function: Any = node.target
    args, kwargs = node.args, node.kwargs
    several = bool(node.users) and all(user.target is python_operator.getitem for user in node.users)

    def draw(number: int, values: Sequence[Tensor]) -> list[Tensor]:
        given: dict[fx.Node, Any] = dict(zip(tensors, values, strict=True)) | {key: number}
        result = function(*fx.map_arg(args, given.__getitem__), **fx.map_arg(kwargs, given.__getitem__))
        return list(result) if several else [result]

    _draws.append(draw)
    number = len(_draws) - 1

    def drawn(key: Tensor, *values: Tensor) -> Any:
        results = _Drawn.apply(number, key, *values)  # type: ignore[no-untyped-call]
        return results if several else results[0]

    drawn.__name__ = drawn.__qualname__ = function.__name__
    drawn.__module__ = "drawn"
    return drawn
