"""Elementwise operators: each with the range in which it is smooth, and operands that broadcast."""

from __future__ import annotations

import math

import torch

from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool, Rejected

ANYWHERE = (-math.inf, math.inf)
RANGES = {
    "acos": (-0.9, 0.9),
    "arccos": (-0.9, 0.9),
    "arccosh": (1.2, 6.0),
    "arcsin": (-0.9, 0.9),
    "arctanh": (-0.9, 0.9),
    "acosh": (1.2, 6.0),
    "asin": (-0.9, 0.9),
    "atanh": (-0.9, 0.9),
    "cosh": (-3.0, 3.0),
    "digamma": (0.5, 6.0),
    "erfinv": (-0.9, 0.9),
    "exp": (-4.0, 3.0),
    "exp2": (-4.0, 4.0),
    "expm1": (-4.0, 3.0),
    "lgamma": (0.5, 6.0),
    "log": (0.2, 8.0),
    "log10": (0.2, 8.0),
    "log1p": (-0.6, 8.0),
    "log2": (0.2, 8.0),
    "logit": (0.1, 0.9),
    "rad2deg": (-1.0, 1.0),
    "reciprocal": (0.3, 8.0),
    "rsqrt": (0.3, 8.0),
    "sinh": (-3.0, 3.0),
    "sqrt": (0.2, 8.0),
    "tan": (-1.2, 1.2),
}
SPECIAL = """
special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit
special_expm1 special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p special_log_ndtr special_logit
special_ndtr special_ndtri special_psi special_sinc i0
""".split()
"""Smooth between 0.1 and 0.9."""
SMOOTH = """
alias arcsinh arctan asinh atan clone contiguous cos deg2rad detach erf erfc gelu log_sigmoid mish neg negative
positive sigmoid silu sin sinc softplus square tanh
""".split()
BENDS = {
    "abs": (0.0,),
    "absolute": (0.0,),
    "celu": (0.0,),
    "elu": (0.0,),
    "hardshrink": (-0.5, 0.5),
    "hardsigmoid": (-3.0, 3.0),
    "hardswish": (-3.0, 3.0),
    "hardtanh": (-1.0, 1.0),
    "leaky_relu": (0.0,),
    "nan_to_num": (),
    "relu": (0.0,),
    "relu6": (0.0, 6.0),
    "selu": (0.0,),
    "sgn": (0.0,),
    "sign": (0.0,),
    "softshrink": (-0.5, 0.5),
}
"""Points where a function has a kink or a jump."""
ROUNDING = {"special_round": 0.5, "fix": 0.0, "ceil": 0.0, "floor": 0.0, "frac": 0.0, "round": 0.5, "trunc": 0.0}
"""Operators that jump at this distance from every integer."""


@draws(*RANGES)
def ranged(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.within(pool.tensor(), *RANGES[op]))


@draws(*SPECIAL)
def special(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.within(pool.tensor(), 0.1, 0.9))


@draws("polygamma", "special_polygamma", "mvlgamma", "special_multigammaln")
def of_an_order(pool: Pool, op: str) -> None:
    x = pool.within(pool.tensor(), 1.5, 6.0)
    pool.emit(f"aten.{op}.default", *((1, x) if "polygamma" in op else (x, 2)))


@draws("igamma", "igammac", "special_gammainc", "special_gammaincc", "special_zeta", "special_xlogy", "special_xlog1py")
def of_two_positive(pool: Pool, op: str) -> None:
    """Some have no derivative with respect to the first argument."""
    x = pool.tensor()
    other = pool.within(pool.like(pool.shape_of(x)), 1.5, 4.0)
    fixed = pool.fixed(pool.shape_of(x), 1.5, 4.0)
    if op == "special_zeta":
        other = pool.emit("aten.detach.default", other)
    pool.emit(f"aten.{op}.default", fixed, other)


@draws("gcd", "lcm", "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__")
def of_integers(pool: Pool, op: str) -> None:
    x = pool.integers(pool.shape(), 9, 1)
    other = pool.integers(pool.broadcasting(pool.shape_of(x)), 4, 1)
    pool.emit(f"aten.{op}.{'default' if op in ('gcd', 'lcm') else 'Tensor'}", x, other)


@draws("heaviside", "ldexp", "isclose", "isneginf", "isposinf", "isreal")
def odd_ones(pool: Pool, op: str) -> None:
    x = pool.tensor()
    pool.away_from(x, 0.0)
    if op == "ldexp":
        pool.emit("aten.ldexp.Tensor", x, pool.integers(pool.broadcasting(pool.shape_of(x)), 3))
    elif op == "isclose":
        pool.emit("aten.isclose.default", x, pool.fixed(pool.shape_of(x), 70.0, 90.0))
    elif op == "heaviside":
        pool.emit("aten.heaviside.default", pool.emit("aten.detach.default", x), pool.fixed((), 0.0, 1.0))
    else:
        pool.emit(f"aten.{op}.default", x)


@draws(*SMOOTH)
def smooth(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.tensor())


@draws(*BENDS)
def bent(pool: Pool, op: str) -> None:
    x = pool.tensor()
    pool.away_from(x, *BENDS[op])
    pool.emit(f"aten.{op}.default", x)


@draws(*ROUNDING)
def rounding(pool: Pool, op: str) -> None:
    x = pool.tensor()
    pool.away_from(x, *(number + ROUNDING[op] for number in range(-70, 70)))
    pool.emit(f"aten.{op}.default", x)


@draws("bitwise_not", "logical_not")
def negated(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.booleans(pool.shape()))


@draws("isfinite", "isinf", "isnan", "signbit")
def tests_of_floats(pool: Pool, op: str) -> None:
    x = pool.tensor()
    pool.away_from(x, 0.0)
    pool.emit(f"aten.{op}.default", x)


@draws("clamp", "clip", "clamp_max", "clamp_min", "threshold")
def clamped(pool: Pool, op: str) -> None:
    x = pool.tensor()
    pool.away_from(x, -0.7, 0.6)
    bounds = {
        "clamp": (-0.7, 0.6),
        "clip": (-0.7, 0.6),
        "clamp_max": (0.6,),
        "clamp_min": (-0.7,),
        "threshold": (0.6, 0.25),
    }[op]
    pool.emit(f"aten.{op}.default", x, *bounds)


@draws("pow", "float_power")
def power(pool: Pool, op: str) -> None:
    x = pool.tensor()
    form = pool.rng.choice(("Tensor_Scalar", "Tensor_Tensor", "Scalar"))
    if form == "Scalar":
        pool.emit(f"aten.{op}.Scalar", 1.7, pool.within(x, -3.0, 3.0))
    elif form == "Tensor_Scalar" and pool.rng.random() < 0.5:
        pool.emit(f"aten.{op}.Tensor_Scalar", x, 2)
    elif form == "Tensor_Scalar":
        pool.emit(f"aten.{op}.Tensor_Scalar", pool.within(x, 0.3, 4.0), pool.rng.choice((0.5, 1.5, -0.5, 3)))
    else:
        left = pool.within(x, 0.3, 3.0)
        pool.emit(f"aten.{op}.Tensor_Tensor", left, pool.like(pool.broadcasting(pool.shape_of(left))))


@draws("to", "_to_copy", "type_as")
def converted(pool: Pool, op: str) -> None:
    """Kept in double precision: rounding to less would let the last bits decide."""

    x = pool.tensor()
    if op == "type_as":
        pool.emit("aten.type_as.default", x, pool.like(pool.shape_of(x)))
    elif op == "to":
        pool.emit("aten.to.dtype", x, torch.float64)
    else:
        pool.emit("aten._to_copy.default", x, dtype=torch.float64)


@draws("zeros_like", "ones_like", "full_like", "fill", "lift_fresh_copy")
def filled(pool: Pool, op: str) -> None:
    x = pool.tensor()
    if op == "fill":
        pool.emit("aten.fill.Scalar", x, 0.75)
    else:
        pool.emit(f"aten.{op}.default", x, *((0.75,) if op == "full_like" else ()))


SMOOTH_PAIRS = "arctan2 add sub subtract mul multiply atan2 hypot logaddexp logaddexp2 rsub".split()
DIVIDING = ("div", "divide", "true_divide")


@draws(*SMOOTH_PAIRS, *DIVIDING)
def pair(pool: Pool, op: str) -> None:
    left = pool.tensor()
    right = pool.like(pool.broadcasting(pool.shape_of(left)))
    if op in DIVIDING:
        right = pool.within(right, 0.4, 5.0)
    if op in ("hypot", "atan2", "arctan2"):  # a pole where both vanish
        right = pool.within(right, 0.4, 5.0)
    elif pool.rng.random() < 0.4 and op not in DIVIDING:
        left, right = right, left
    if op in ("add", "sub", "mul") and pool.rng.random() < 0.25:
        pool.emit(f"aten.{op}.Tensor", left, pool.rng.choice((2, 0.5, -1.25)))
    elif op == "add" and pool.rng.random() < 0.2:
        pool.emit("aten.add.Tensor", left, right, alpha=0.5)
    else:
        plain = op in ("atan2", "arctan2", "hypot", "logaddexp", "logaddexp2")
        pool.emit(f"aten.{op}.{'default' if plain else 'Tensor'}", left, right)


@draws("addcdiv", "addcmul", "lerp")
def triple(pool: Pool, op: str) -> None:
    x = pool.tensor()
    a, b = (pool.like(pool.broadcasting(pool.shape_of(x))) for _ in range(2))
    if op == "addcdiv":
        pool.emit("aten.addcdiv.default", x, a, pool.within(b, 0.4, 5.0), value=0.5)
    elif op == "addcmul":
        pool.emit("aten.addcmul.default", x, a, b, value=-0.5)
    elif pool.rng.random() < 0.5:
        pool.emit("aten.lerp.Tensor", x, a, b)
    else:
        pool.emit("aten.lerp.Scalar", x, a, 0.3)


@draws("maximum", "minimum", "fmax", "fmin", "copysign", "fmod", "remainder", "floor_divide", "xlogy", "nextafter")
def jumping_pair(pool: Pool, op: str) -> None:
    x = pool.tensor()
    other = pool.like(pool.broadcasting(pool.shape_of(x)))
    if op in ("maximum", "minimum", "fmax", "fmin"):
        pool.different(x, other)
    elif op == "copysign":
        pool.away_from(x, 0.0)
        pool.away_from(other, 0.0)
    elif op == "xlogy":
        other = pool.within(other, 0.3, 4.0)
    elif op == "nextafter":
        x, other = pool.fixed(pool.shape(), 0.0, 1.0), pool.fixed((), 2.0, 3.0)
    else:  # quotients must not be near integers
        other = pool.within(other, 0.5, 3.0)
        quotient = pool.values[x] / pool.values[other]
        if float((quotient - quotient.round()).abs().min()) < 1e-6:
            raise Rejected
    if op == "floor_divide":  # it has no derivative
        x, other = (pool.emit("aten.detach.default", ref) for ref in (x, other))
    overload = "Tensor" if op in ("fmod", "remainder", "copysign", "xlogy") else "default"
    pool.emit(f"aten.{op}.{overload}", x, other)


COMPARISONS = "greater_equal less_equal eq ne not_equal ge gt greater lt less le".split()


@draws(*COMPARISONS)
def compared(pool: Pool, op: str) -> None:
    x = pool.tensor()
    if pool.rng.random() < 0.4:
        pool.away_from(x, 0.1)
        pool.emit(f"aten.{op}.Scalar", x, 0.1)
        return
    other = pool.like(pool.broadcasting(pool.shape_of(x)))
    pool.different(x, other)
    pool.emit(f"aten.{op}.Tensor", x, other)


LOGICAL = "logical_and logical_or logical_xor".split()
BITWISE = "bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__".split()


@draws(*LOGICAL, *BITWISE)
def logical(pool: Pool, op: str) -> None:
    x = pool.booleans(pool.shape())
    other = pool.booleans(pool.broadcasting(pool.shape_of(x)))
    pool.emit(f"aten.{op}.{'default' if op in LOGICAL else 'Tensor'}", x, other)


@draws("where", "masked_fill")
def chosen(pool: Pool, op: str) -> None:
    x = pool.tensor()
    mask = pool.booleans(pool.broadcasting(pool.shape_of(x)))
    if op == "masked_fill":
        pool.emit("aten.masked_fill.Scalar", x, mask, pool.rng.choice((0.0, -1.5)))
    elif pool.rng.random() < 0.5:
        pool.emit("aten.where.ScalarOther", mask, x, 0.5)
    else:
        pool.emit("aten.where.self", mask, x, pool.like(pool.broadcasting(pool.shape_of(x))))


@draws("prelu")
def prelu(pool: Pool, op: str) -> None:
    x = pool.tensor(least=2)
    pool.away_from(x, 0.0)
    pool.emit("aten.prelu.default", x, pool.floats((pool.rng.choice((1, pool.shape_of(x)[1])),)))


@draws("broadcast_tensors")
def broadcast_tensors(pool: Pool, op: str) -> None:
    x = pool.tensor()
    pool.call("aten.broadcast_tensors.default", (x, pool.like(pool.broadcasting(pool.shape_of(x)))))


@draws("copy")
def copy(pool: Pool, op: str) -> None:
    """Into a value without gradient: torch gives `copy` no derivative, so models have it in no_grad regions alone."""
    x = pool.fixed(pool.shape(), -1.0, 1.0)
    pool.emit("aten.copy.default", x, pool.fixed(pool.broadcasting(pool.shape_of(x)), -1.0, 1.0))
