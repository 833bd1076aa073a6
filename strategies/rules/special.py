"""Special functions and second names of common ones: pointwise, without padding, because few are finite everywhere."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, TensorSpec
from strategies.rules.pointwise import pointwise
from strategies.rules.registry import rule
from strategies.rules.sharding import Sharding

UNARY = """
absolute arccos arccosh arcsin arcsinh arctan arctanh clip fix i0 isneginf isposinf isreal mvlgamma negative polygamma
special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit
special_expm1 special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p special_log_ndtr special_logit
special_multigammaln special_ndtr special_ndtri special_polygamma special_psi special_round special_sinc
""".split()

BINARY = """
arctan2 bitwise_left_shift bitwise_right_shift gcd greater_equal heaviside igamma igammac isclose lcm ldexp less_equal
special_gammainc special_gammaincc special_xlog1py special_xlogy special_zeta __lshift__ __rshift__
""".split()


@rule(*UNARY, *BINARY)
def special(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Every element by itself, operands aligned from the right."""
    return pointwise(operator, specs)
