"""Every sharding rule that is one line of factor notation, as `strategies.rules.notation` explains it.

An operator without a local program is added by its name behind its line. An operator may stand behind several lines:
the first that fits the shapes of a call is taken, and a call that fits none runs replicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from strategies.core.graph import Operator, TensorSpec
from strategies.rules.notation import notation
from strategies.rules.registry import RULES, Rule
from strategies.rules.sharding import LocalProgram, Sharding

PRODUCTS = (
    ("m k, k n -> m n", "mm"),
    ("m k, k -> m", "mv"),
    ("k, k ->", "dot linalg_matmul matmul vdot"),
    ("m, n -> m n", "ger outer"),
    ("b m k, b k n -> b m n", "bmm"),
    ("b... m k, b... k n -> b... m n", "linalg_matmul matmul"),
    ("b... m k, k -> b... m", "linalg_matmul matmul"),
    ("k, b... k n -> b... n", "linalg_matmul matmul"),
    ("x... k, y... k -> x... y...", "inner"),
    ("batch... k, n k, +n -> batch... n", "linear"),
    ("batch... k, k -> batch...", "linear"),
    ("+m n, m k, k n -> m n", "addmm"),
    ("+b m n, b m k, b k n -> b m n", "baddbmm"),
    ("+m n, b m k, b k n -> m n", "addbmm"),
    ("+m, m k, k -> m", "addmv"),
    ("+m n, m, n -> m n", "addr"),
    ("b... i, b... j, o i j, +o -> b... o", "bilinear"),
)
"""Sums of products: two flops for every combination of the factors. Factors that are not summed over may be padded."""

PADDED = (
    # Every element by itself, finite with a finite slope whatever finite numbers padding holds
    (
        "...* -> ...",
        """
        __and__ __or__ __xor__ _to_copy abs add alias bitwise_and bitwise_not bitwise_or bitwise_xor clamp clamp_max
        clamp_min clone contiguous copy cos detach elu empty_like eq erf ge gelu greater gt hardsigmoid hardswish
        hardtanh le leaky_relu less lift_fresh_copy log_sigmoid logical_and logical_not logical_or logical_xor lt
        maximum minimum mish mul multiply ne neg not_equal ones_like positive relu relu6 rsub selu sgn sigmoid sign
        silu sin softplus square sub subtract tanh where zeros_like
        """,
    ),
    ("... -> ... !2", "view_as_real"),
    ("... !2 -> ...", "view_as_complex"),
    # Parts of dims, which stay replicated
    (
        "... -> ...* ; !dim",
        """
        chunk narrow select split split_with_sizes tensor_split unbind unsafe_chunk unsafe_split
        unsafe_split_with_sizes
        """,
    ),
    ("... -> ...* ; !0", "vsplit"),
    ("... -> ...* ; !1", "hsplit"),
    ("... -> ...* ; !2", "dsplit"),
    ("... -> ... !window ; !dimension", "unfold"),
    ("... -> ... !n ; !dim1 !dim2", "diagonal linalg_diagonal"),
    ("...* -> ... ; !dim", "cat concat concatenate diff"),
    # Another order along dims
    ("... -> ... ; !0", "flipud msort"),
    ("... -> ... ; !1", "fliplr"),
    ("... -> ... ; !dims", "flip roll rot90"),
    ("d0 !c ... -> d0 !c ...", "channel_shuffle"),
    ("... -> ...* ; !dim", "argsort cummax cummin sort topk"),
    # Fourier transforms and normalisations along dims
    (
        "... -> ... ; !dim",
        """
        fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_irfft
        fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn glu log_softmax softmax
        """,
    ),
    ("d0 !t, !...* -> d0 !frequencies !frames", "stft"),
    ("d0 !t, !...* -> d0 !frequencies !frames !2", "stft"),
    # Reductions
    ("... -> ... ; +dim", "count_nonzero nansum sum"),
    ("... -> ... ; /dim", "mean"),
    ("..., ... -> ... ; +dim", "linalg_vecdot"),
    (
        "... -> ...* ; !dim",
        """
        _is_all_true _is_any_true aminmax kthvalue median mode nanmean nanmedian
        """,
    ),
    # Windows and lookups
    ("..., !... -> ...", "isin"),
    ("..., !bounds -> ...", "bucketize"),
    ("!sorted, ... -> ...", "searchsorted"),
)
"""Rules whose factors may have padded slices, except those that are summed over."""

EVEN = (
    # Every element by itself, with poles, or slopes that are infinite somewhere
    (
        "...* -> ...",
        """
        __lshift__ __rshift__ _conj absolute acos acosh addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan
        arctan2 arctanh asin asinh atan atan2 atanh bitwise_left_shift bitwise_right_shift ceil celu clip complex
        conj_physical copysign cosh deg2rad digamma div divide erfc erfinv exp exp2 expm1 fill fix float_power floor
        floor_divide fmax fmin fmod frac full_like gcd greater_equal hardshrink heaviside hypot i0 igamma igammac imag
        isclose isfinite isinf isnan isneginf isposinf isreal lcm ldexp lerp less_equal lgamma log log10 log1p log2
        logaddexp logaddexp2 logit masked_fill mvlgamma nan_to_num negative nextafter polar polygamma pow rad2deg real
        reciprocal remainder resolve_conj round rsqrt signbit sinc sinh softshrink special_digamma special_entr
        special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1 special_gammainc
        special_gammaincc special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p special_log_ndtr
        special_logit special_multigammaln special_ndtr special_ndtri special_polygamma special_psi special_round
        special_sinc special_xlog1py special_xlogy special_zeta sqrt tan threshold true_divide trunc xlogy
        """,
    ),
    ("...* -> ...*", "broadcast_tensors"),
    ("d0 d1 ..., d1 -> d0 d1 ...", "prelu"),
    ("d0, !slope -> d0", "prelu"),
    # The order along a dim, or vectors
    ("... -> ... ; !dim", "cumprod logcumsumexp"),
    ("..., ... -> ... ; !dim", "cosine_similarity cross linalg_cross"),
    ("..., ... -> ... ; !-1", "pairwise_distance"),
    # Reductions whose gradient may be infinite
    (
        "... -> ...* ; !dim",
        """
        linalg_matrix_norm linalg_norm norm
        """,
    ),
    # Matrices; what padding holds may be singular
    (
        "b... !n !m -> b... !...*",
        """
        cholesky det inverse linalg_cholesky linalg_det linalg_eigh linalg_eigvalsh linalg_inv linalg_matrix_exp
        linalg_matrix_power linalg_pinv linalg_qr linalg_slogdet linalg_svd linalg_svdvals logdet matrix_exp
        matrix_power pinverse slogdet
        """,
    ),
    ("b... !n !m, b... !... -> b... !...*", "cholesky_solve linalg_solve linalg_solve_triangular"),
    ("!..., i... -> i...", "take"),
    ("..., !... -> ...", "compared"),
)
"""Rules whose factors are cut into equal slices alone."""


Line = tuple[str, bool, bool, LocalProgram | None]
"""Notation, whether it is a product, whether factors may be padded, and the local program."""
_lines: dict[str, tuple[Line, ...]] = {}


def line(
    text: str, names: str, *, padded: bool = False, product: bool = False, local: LocalProgram | None = None
) -> None:
    """Give operators a line of notation, behind those that they have.

    Args:
        text: the line, as `strategies.rules.notation` explains it.
        names: torch's names of the operators, without overload; `library::name` for those of other libraries.
        padded: whether factors that are not summed over may have padded slices: what padding holds reaches nothing but
            padding, and is no reason for infinite gradients.
        product: whether every combination of the factors is multiplied and added.
        local: the local program, if a slice is computed by something else than the operator.

    Raises:
        ValueError: if an operator has a rule that is not a line.
    """
    for name in names.split():
        if name in RULES and name not in _lines:
            raise ValueError(f"Operator {name} has two rules.")
        _lines[name] = (*_lines.get(name, ()), (text, product, padded, local))
        RULES[name] = _rule(_lines[name])


@cache
def _rule(lines: tuple[Line, ...]) -> Rule:
    def first_that_fits(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
        read = (notation(t, operator, specs, product=product, padded=pad, local=own) for t, product, pad, own in lines)
        return next((sharding for sharding in read if sharding is not None), None)

    return first_that_fits


for _line, _names in PRODUCTS:
    line(_line, _names, padded=True, product=True)
for _line, _names in PADDED:
    line(_line, _names, padded=True)
for _line, _names in EVEN:
    line(_line, _names)
