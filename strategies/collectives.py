"""Differentiable collectives for modules that do their own communication (`parallel.mode=hybrid`).

Every collective has its true adjoint, so the gradient of J = mean over ranks of the ranks' losses is exact for any
composition: (1 / world size) times the sum, over a parameter's replica group, of what the ranks compute. The runner
takes that sum and factor. `axes` name mesh axes (`parallel.mesh`; without one all ranks form the axis `world`). Calls
are collective: every rank makes the same calls in the same order. Outside a hybrid run there is one rank, and every
collective returns its input.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from strategies.core.errors import StrategyError, closest
from strategies.core.layout import Layout, indices
from strategies.core.mesh import Mesh
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PAD, REDUCE_SCATTER, SLICE, Step
from strategies.runtime.communicator import Communicator
from strategies.runtime.redistributions import Redistribution

Axes = str | tuple[str, ...]

_ALONE = Communicator(Mesh((("world", 1),)), 0)
_current = _ALONE


def use(communicator: Communicator | None) -> None:
    """Make `communicator` the one that collectives of this process go through; None for one rank again."""
    global _current
    _current = communicator or _ALONE


def shard_parameter(parameter: nn.Parameter, dim: int, axes: Axes) -> nn.Parameter:
    """The rank's slice of a global parameter along `dim`, as a parameter that declares how it is sliced.

    From the declaration follow the gradient reduction, checkpoints and the comparison with a reference. Raises
    StrategyError if the dim is not there or does not divide.
    """
    names, sliced = _known(axes), _dim(parameter, dim)
    layout = Layout(tuple(names if d == sliced else () for d in range(parameter.dim())))
    layout.check_even(parameter.shape, _current.mesh)
    block = layout.block(parameter.shape, _current.mesh, _current.rank)
    piece = nn.Parameter(parameter.detach()[indices(block)].clone(), parameter.requires_grad)
    piece.declared_layout, piece.global_shape = layout, tuple(parameter.shape)  # type: ignore[attr-defined]
    return piece


def declared(parameter: nn.Parameter) -> tuple[Layout, tuple[int, ...]]:
    """Layout and global shape of a parameter of a hybrid module; replicated unless declared otherwise."""
    layout = getattr(parameter, "declared_layout", Layout.replicated(parameter.dim()))
    return layout, getattr(parameter, "global_shape", tuple(parameter.shape))


def all_reduce(x: Tensor, axes: Axes) -> Tensor:
    """The sum over the ranks along `axes`, on each of them. Adjoint: all_reduce."""
    step = _step(ALL_REDUCE, axes)
    return _run(x, step, step)


def all_gather(x: Tensor, axes: Axes, dim: int = 0) -> Tensor:
    """The ranks' tensors joined along `dim`, on each of them. Adjoint: reduce_scatter."""
    dim = _dim(x, dim)
    return _run(x, _step(ALL_GATHER, axes, dim), _step(REDUCE_SCATTER, axes, dim))


def reduce_scatter(x: Tensor, axes: Axes, dim: int = 0) -> Tensor:
    """This rank's slice along `dim` of the sum over the ranks. Adjoint: all_gather."""
    dim = _divided(x, axes, dim)
    return _run(x, _step(REDUCE_SCATTER, axes, dim), _step(ALL_GATHER, axes, dim))


def all_to_all(x: Tensor, axes: Axes, split: int, join: int) -> Tensor:
    """Slices along dim `split` go to the ranks along `axes`; what arrives is joined along dim `join`. Adjoint: the
    way back."""
    split, join = _divided(x, axes, split), _dim(x, join)
    return _run(x, _step(ALL_TO_ALL, axes, split, join), _step(ALL_TO_ALL, axes, join, split))


def split(x: Tensor, axes: Axes, dim: int = 0) -> Tensor:
    """This rank's slice of a replicated tensor. Adjoint: zeros around the slice's gradient."""
    dim = _divided(x, axes, dim)
    return _run(x, _step(SLICE, axes, dim), _step(PAD, axes, dim))


def broadcast(x: Tensor, axes: Axes, source: int = 0) -> Tensor:
    """The tensor of rank `source` (its index along `axes`), on each of them. Adjoint: the sum of the gradients at
    the source."""
    mine = _current.mesh.index(_current.rank, _known(axes)) == source
    # zeros that still depend on x, so that every rank takes part in backward (x * 0 would let infinities through)
    return all_reduce(x if mine else x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0), axes)


def _run(x: Tensor, forward: Step, backward: Step) -> Tensor:
    if _current.mesh.product(forward.axes) == 1:
        return x
    _current.prepare([forward.axes])
    carriers = (_current.carrier([(step,)]) for step in (forward, backward))
    (result,) = Redistribution.apply(*carriers, (1.0,), False, x)  # type: ignore[no-untyped-call]
    return cast(Tensor, result)


def _step(kind: str, axes: Axes, dim: int = 0, source: int = 0) -> Step:
    # shapes and layouts only matter to predictions, which a hybrid module does without
    return Step(kind, _known(axes), dim, source, Layout(()), Layout(()), ())


def _known(axes: Axes) -> tuple[str, ...]:
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    if _current is _ALONE:
        return ("world",)
    for name in names:
        if name not in _current.mesh.sizes:
            raise StrategyError(
                "MW450",
                f"A hybrid module names mesh axis {name!r}.{closest(name, _current.mesh.names)} Set parallel.mesh to "
                "name axes.",
            )
    return names


def _divided(x: Tensor, axes: Axes, dim: int) -> int:
    """The dim from the front. Raises StrategyError if it does not divide."""
    dim, count = _dim(x, dim), _current.mesh.product(_known(axes))
    if x.shape[dim] % count:
        raise StrategyError(
            "MW450",
            f"Dim {dim} of a tensor of shape {tuple(x.shape)} cannot be cut into {count} equal slices (axes {axes}).",
        )
    return dim


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise StrategyError(
            "MW450",
            f"A tensor of shape {tuple(x.shape)} has {x.dim()} dims, so there is no dim {dim} to slice or join.",
        )
    return dim % x.dim()
