"""Operators that compute each element by itself: every dim passes, operands are aligned from the right, broadcast dims stay whole."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.graph import Operator, Ref, TensorSpec
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding

UNARY = """
abs acos acosh alias asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min clone contiguous cos cosh deg2rad detach digamma
elu erf erfc erfinv exp exp2 expm1 fill floor frac gelu hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma
lift_fresh lift_fresh_copy log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num neg positive rad2deg reciprocal relu relu6 round
rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink sqrt square tan tanh tanhshrink threshold to _to_copy trunc
zeros_like ones_like empty_like full_like type_as conj _conj real imag hardshrink float_power pow
""".split()

BINARY = """
add atan2 bitwise_and bitwise_or bitwise_xor copysign div divide eq floor_divide fmax fmin fmod ge greater gt hypot le less logaddexp
logaddexp2 logical_and logical_or logical_xor lt maximum minimum mul multiply ne nextafter not_equal __and__ __or__ __xor__ prelu
remainder rsub sub subtract true_divide xlogy max min masked_fill where lerp addcmul addcdiv clamp_tensor copy
""".split()

CLASHES = {"max": 2, "min": 2, "prelu": 0}
"""Names that are pointwise only with this many tensor operands (max over a dim is a reduction; prelu aligns its weight from the left)."""


def broadcast_dims(specs: Sequence[TensorSpec], shape: Sequence[int]) -> list[Dims]:
    """Per operand: the result's dim that each of its dims is, None where it is broadcast."""
    aligned = []
    for spec in specs:
        skip = len(shape) - len(spec.shape)
        aligned.append(tuple(f"d{skip + i}" if size == shape[skip + i] else None for i, size in enumerate(spec.shape)))
    return aligned


def _local(operator: Operator, local: Local) -> Ref:
    return local.call(operator.target, *local.args, **local.kwargs)


@rule(*(name for name in (*UNARY, *BINARY) if name not in CLASHES))
def pointwise(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    (result,) = operator.results
    operands = broadcast_dims(specs, result.shape)
    results: list[Dims] = [tuple(f"d{i}" for i in range(len(result.shape)))]
    return sharding(operands, results, specs, operator.results, local=_local)
