"""Operators that compute each element by itself: every dim passes, operands are aligned from the right.

A dim of size 1 that is broadcast stays whole; the gradient rule then adds its gradient over the slices of the result.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, TensorSpec
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Sharding, sharding

UNARY = """
abs acos acosh alias asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min clone contiguous cos cosh
deg2rad detach digamma elu empty_like erf erfc erfinv exp exp2 expm1 fill float_power floor frac full_like gelu
hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma lift_fresh_copy log log10 log1p log2
log_sigmoid logical_not logit mish nan_to_num neg ones_like positive pow rad2deg reciprocal relu relu6 round rsqrt selu
sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold to _to_copy trunc type_as
zeros_like
""".split()

SEVERAL = """
add addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor copy copysign div divide eq floor_divide fmax fmin fmod ge
greater gt hypot le lerp less logaddexp logaddexp2 logical_and logical_or logical_xor lt masked_fill maximum minimum mul
multiply ne nextafter not_equal remainder rsub sub subtract true_divide where xlogy __and__ __or__ __xor__
""".split()


BOUNDED = frozenset(
    """
abs add alias bitwise_and bitwise_not bitwise_or bitwise_xor clamp clamp_max clamp_min clone contiguous copy cos detach
elu empty_like eq erf ge gelu greater gt hardsigmoid hardswish hardtanh le leaky_relu less lift_fresh_copy
log_sigmoid logical_and logical_not logical_or logical_xor lt maximum minimum mish mul multiply ne neg
not_equal ones_like positive relu relu6 rsub selu sgn sigmoid sign silu sin softplus square sub subtract tanh to
type_as where zeros_like _to_copy __and__ __or__ __xor__
""".split()
)
"""Operators that are finite with a finite slope at every finite argument: what padding holds does no harm to them."""


def broadcast_dims(specs: Sequence[TensorSpec], shape: Sequence[int]) -> list[Dims]:
    """Per operand: the result's dim that each of its dims is, None where it is broadcast."""
    aligned = []
    for spec in specs:
        skip = len(shape) - len(spec.shape)
        aligned.append(tuple(f"d{skip + i}" if size == shape[skip + i] else None for i, size in enumerate(spec.shape)))
    return aligned


@rule(*UNARY, *SEVERAL)
def pointwise(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    shape = operator.results[0].shape
    if operator.multiple or any(len(spec.shape) > len(shape) for spec in specs):
        return None  # where(condition) alone lists indices; type_as may be given a tensor with more dims
    result = tuple(f"d{i}" for i in range(len(shape)))
    padded = result if operator.op in BOUNDED else ()
    return sharding(broadcast_dims(specs, shape), [result], specs, operator.results, uneven=padded)


@rule("broadcast_tensors")
def broadcast_tensors(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Every result has the common shape; each of its dims is sliced in whichever operands have it."""
    shape = operator.results[0].shape
    result: Dims = tuple(f"d{i}" for i in range(len(shape)))
    return sharding(broadcast_dims(specs, shape), [result] * len(specs), specs, operator.results)


@rule("prelu")
def prelu(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [n, c, ...] and one slope, or one per channel (dim 1)."""
    dims: Dims = tuple(f"d{i}" for i in range(len(specs[0].shape)))
    slopes: Dims = tuple("d1" if size > 1 else None for size in specs[1].shape)
    return sharding([dims, slopes], [dims], specs, operator.results)
