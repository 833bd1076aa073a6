"""Every pointwise operator, by class of arguments: one operand, several, scalars, broadcasting, integers, booleans."""

import pytest
import torch
import torch.nn.functional as F

COVERS = "to type_as"
"""Beside the operators of the table."""
torch.manual_seed(1)
DOUBLE = torch.float64


def near(*shape):
    """Values on both sides of zero, none of them near it."""
    x = torch.rand(shape, dtype=DOUBLE) * 0.8 + 0.1
    return torch.where(torch.rand(shape) < 0.5, x, -x)


def inside(*shape):
    """Values inside (0, 1)."""
    return torch.rand(shape, dtype=DOUBLE) * 0.8 + 0.1


def integers(*shape):
    """Integers of 1 to 8."""
    return torch.randint(1, 9, shape)


def flags(*shape):
    return torch.rand(shape) < 0.5


SIGNED = """
abs alias asinh atan ceil clone contiguous cos cosh deg2rad detach erf erfc exp exp2 expm1 floor frac isfinite
isinf isnan lift_fresh_copy nan_to_num neg ones_like positive rad2deg relu round selu sgn sigmoid sign signbit sin sinc
sinh square tan tanh trunc zeros_like
""".split()
ACTIVATIONS = "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu mish relu6 silu softplus".split()
POSITIVE = "acos asin atanh digamma erfinv lgamma log log10 log1p log2 logit reciprocal rsqrt sqrt".split()
BROADCAST = """
add atan2 copysign div divide float_power fmax fmin fmod hypot logaddexp logaddexp2 maximum minimum mul multiply pow
remainder sub subtract true_divide xlogy
""".split()
COMPARE = "eq ge greater gt le less lt ne not_equal logical_and logical_or logical_xor".split()


def _get(name):
    return getattr(torch.ops.aten, name)


CASES = [
    *((name, _get(name), near(6, 12)) for name in SIGNED),
    *((name, getattr(F, name), near(6, 12) * 4) for name in ACTIVATIONS),
    *((name, _get(name), inside(6, 12)) for name in POSITIVE),
    ("acosh", torch.acosh, inside(6, 12) + 1),
    ("log_sigmoid", F.logsigmoid, near(6, 12)),
    ("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), near(6, 12)),
    ("softplus beta", lambda x: F.softplus(x, 2, 1), near(6, 12)),
    ("hardshrink", lambda x: F.hardshrink(x, 0.3), near(6, 12)),
    ("softshrink", lambda x: F.softshrink(x, 0.3), near(6, 12)),
    ("tanhshrink", F.tanhshrink, near(6, 12)),
    ("threshold", lambda x: F.threshold(x, 0.2, 0.5), near(6, 12)),
    ("clamp", lambda x: x.clamp(-0.5, 0.5), near(6, 12)),
    ("clamp tensors", torch.clamp, near(6, 12), near(12) - 1, near(6, 1) + 1),
    ("clamp_min", lambda x: torch.clamp_min(x, 0.1), near(6, 12)),
    ("clamp_max", lambda x: torch.clamp_max(x, 0.1), near(6, 12)),
    ("round decimals", lambda x: torch.round(x, decimals=1), near(6, 12)),
    ("logit eps", lambda x: torch.logit(x, eps=0.2), inside(6, 12)),
    ("fill", lambda x: torch.fill(torch.empty_like(x), 2.0) * x, near(6, 12)),
    ("fill tensor", torch.fill, near(6, 12), near().reshape(())),
    ("full_like", lambda x: torch.full_like(x, 3.0) * x, near(6, 12)),
    # not to float32: parts of a gradient would be rounded before they are added
    ("to", lambda x: x.to(torch.complex128).real, near(6, 12)),
    ("to other", lambda x, y: x.to(y), integers(6, 12), near(2)),
    ("to int", lambda x: (x * 10).to(torch.int64), near(6, 12)),
    ("_to_copy", lambda x: torch.ops.aten._to_copy.default(x, dtype=torch.complex128).real, near(6, 12)),
    ("type_as", lambda x, y: x.type_as(y), integers(6, 12), near(6, 12)),
    ("type_as larger", lambda x, y: x.type_as(y), integers(12), near(6, 12)),
    ("type_as wider", lambda x, y: x.type_as(y), near(6, 2), near(6, 12)),
    ("to wider", lambda x, y: x.to(y), near(6, 2), near(4, 12)),
    ("bitwise_not", torch.bitwise_not, integers(6, 12)),
    ("logical_not", torch.logical_not, flags(6, 12)),
    ("scalar", lambda x: x, near().reshape(())),
    ("size one", torch.exp, near(1, 6, 1)),
    ("empty", torch.exp, near(0, 6)),
    ("four dims", torch.relu, near(2, 6, 1, 4)),
    *((name, _get(name), inside(6, 12), inside(6, 12)) for name in BROADCAST),
    *((f"{name} rows", _get(name), inside(6, 12), inside(12)) for name in BROADCAST),
    *((f"{name} columns", _get(name), inside(6, 1), inside(2, 1, 12)) for name in ("add", "mul", "div", "sub", "pow")),
    *((name, _get(name), integers(6, 12), integers(12)) for name in COMPARE),
    ("floor_divide", lambda x, y: torch.floor_divide(x.detach(), y.detach()), near(6, 12), inside(12)),
    ("nextafter", lambda x, y: torch.nextafter(x.detach(), y.detach()), near(6, 12), near(12)),
    ("add alpha", lambda x, y: torch.add(x, y, alpha=3), near(6, 12), near(1, 12)),
    ("add scalar", lambda x: x + 2, near(6, 12)),
    ("sub alpha", lambda x, y: torch.sub(x, y, alpha=3), near(6, 12), near(6, 1)),
    ("rsub", lambda x, y: torch.rsub(x, y, alpha=2), near(6, 12), near(6, 1)),
    ("rsub scalar", lambda x: 1 - x, near(6, 12)),
    ("mul by a scalar tensor", torch.mul, near(6, 12), near().reshape(())),
    ("div rounding", lambda x, y: torch.div(x, y, rounding_mode="floor"), near(6, 12), near(12)),
    ("pow scalar", lambda x: x**3, near(6, 12)),
    ("scalar pow", lambda x: 2**x, near(6, 12)),
    ("integers", torch.add, integers(6, 12), integers(6, 1)),
    ("integer division", torch.floor_divide, integers(6, 12), integers(6, 1)),
    ("compare scalar", lambda x: x > 0.5, near(6, 12)),
    ("bitwise_and", torch.bitwise_and, integers(6, 12), integers(12)),
    ("bitwise_or", torch.bitwise_or, integers(6, 12), integers(12)),
    ("bitwise_xor", torch.bitwise_xor, integers(6, 12), integers(12)),
    ("__and__", torch.ops.aten.__and__, flags(6, 12), flags(12)),
    ("__or__", torch.ops.aten.__or__, flags(6, 12), flags(12)),
    ("__xor__", torch.ops.aten.__xor__, flags(6, 12), flags(12)),
    ("masked_fill", lambda x, m: x.masked_fill(m, -1.0), near(6, 12), flags(12)),
    ("masked_fill tensor", lambda x, m, v: x.masked_fill(m, v), near(6, 12), flags(6, 1), near().reshape(())),
    ("where", torch.where, flags(6, 12), near(12), near(6, 1)),
    ("where scalar", lambda m, x: torch.where(m, x, 0.0), flags(6, 12), near(6, 12)),
    ("where scalars", lambda m: torch.where(m, 1.0, 0.0), flags(6, 12)),
    ("lerp", torch.lerp, near(6, 12), near(6, 12), near(12)),
    ("lerp scalar", lambda x, y: torch.lerp(x, y, 0.3), near(6, 12), near(12)),
    ("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=2), near(6, 12), near(12), near(6, 1)),
    ("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=2), near(6, 12), near(12), inside(6, 1)),
    ("copy", torch.ops.aten.copy, integers(6, 12), integers(12)),
    ("broadcast_tensors", torch.broadcast_tensors, near(6, 1), near(12), near(2, 1, 1)),
    ("prelu", F.prelu, near(6, 12, 2), near(12)),
    ("prelu one slope", F.prelu, near(6, 12), near(1)),
    ("prelu vector", F.prelu, near(6), near(1)),
]


@pytest.mark.few(1)
def test_pointwise(cases, check, known, mesh):
    check(cases, mesh, samples=2)
    assert known(cases, "type_as") == [True, True, True]  # a companion of another shape gives its dtype alone
