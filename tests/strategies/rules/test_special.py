"""Special functions, each on arguments where it and its slope are finite."""

import pytest
import torch

from strategies.core.mesh import Mesh
from strategies.rules.special import BINARY, UNARY

torch.manual_seed(1)
aten = torch.ops.aten
FURTHER = {"clip": (0.3, 0.6), "mvlgamma": (1,), "special_multigammaln": (1,)}
"""Arguments after the tensor."""
ORDERS = {"polygamma", "special_polygamma"}
WHOLE = {"bitwise_left_shift", "bitwise_right_shift", "gcd", "lcm", "__lshift__", "__rshift__"}
SLOPELESS = {"heaviside", "igamma", "igammac", "special_gammainc", "special_gammaincc", "special_zeta"}
"""Functions that torch does not differentiate by their first or second argument."""


def inside(*shape):
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def unary(name):
    if name in ORDERS:
        return name, lambda a: getattr(aten, name)(1, a), inside(6, 4)
    shift = 1.0 if name in ("arccosh", "mvlgamma", "special_multigammaln") else 0.0
    return name, lambda a: getattr(aten, name)(a + shift, *FURTHER.get(name, ())), inside(6, 4)


def binary(name):
    function = getattr(aten, name)
    if name in WHOLE:
        return name, function, torch.randint(1, 9, (6, 4)), torch.randint(1, 4, (4,))
    if name in SLOPELESS:
        return name, lambda a, b: function(a.detach() + 1, b.detach()), inside(6, 4), inside(6, 1)
    return name, function, inside(6, 4), inside(6, 1)


CASES = [*map(unary, UNARY), *map(binary, BINARY)]


def test_special(cases, check):
    check(cases, Mesh((("a", 2),)), samples=2)


@pytest.mark.slow
def test_special_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases, "special")
