"""Resampling of images: batch and channels pass; the dims that are interpolated stay replicated."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import changed
from strategies.rules.notation import notation
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [n, c, ...], places [n, *out, coordinates] -> [n, c, *out]: the places can be sliced, the image cannot."""
    out = tuple(f"o{i}" for i in range(len(specs[0].shape) - 2))
    picture: Dims = ("n", "c", *(None,) * len(out))
    return sharding([picture, ("n", *out, None)], [("n", "c", *out)], specs, operator.results, padded=("c",))


def _affine_grid(operator: Operator, local: Local) -> Ref:
    size = (local.operand_shape()[0], *operator.args[1][1:])
    args, kwargs = changed(operator.target, local.args, local.kwargs, size=size)
    return local.call(operator.target, *args, **kwargs)


@rule("affine_grid_generator")
def affine_grid(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """theta [n, ...], size of the image (n, c, ...) -> places [n, ..., coordinates]."""
    return notation("n !... -> n !...", operator, specs, padded=True, local=_affine_grid)
