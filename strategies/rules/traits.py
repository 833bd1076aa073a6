"""What cost, memory, search, lowering and capture ask of an operator's name: one table, a column per question.

The sharding rules say how an operator is sliced; the traits say what torch does with its tensors, sliced or not. A test
checks every column of every operator with a rule against torch: aliasing by storages, what autograd saves by its
hooks, flops by torch's counter. An operator without a row has the defaults, which are the cautious answers: it
allocates its result, and autograd saves every operand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from strategies.core.graph import Operator, OperatorGraph, Ref

Result = Literal["new", "maybe", "identity", "permutation", "reshape", "expansion", "split", "part", "reinterpretation"]
"""The aliasing of a result. "new": it has new memory. "maybe": it is the operand where nothing has to be done. The
others are views of the operand (a reshape copies where strides do not allow a view; it counts as one nevertheless):
"identity" an alias, "permutation" its dims in another order, "split" all chunks of a dim, "part" some of its
elements, "reinterpretation" the same bits as complex or real numbers."""


@dataclass(frozen=True)
class Traits:
    """One row of the table."""

    result: Result = "new"

    saves: str = "*"
    """What autograd saves in some form of the call: "0" is operand 0 (in the order of `Operator.operands`), "0<12" is
    operand 0 where operand 1 or 2 has a gradient, "*" are all operands, "others" each operand where another one has a
    gradient; "r" is the result, "r1" result 1 of several. A tensor that autograd saves in place of an operand or of the
    result (a mask, the logarithms of a softmax) counts as that one where it is as large; smaller ones do not count."""

    certain: bool = False
    """Whether every call saves the operands that `saves` names, sliced or not, so that a lower bound may count them."""

    rereads: bool = True
    """Whether the roofline counts a read of the operands in backward. It does not follow from `saves`: it is also true
    for some operators that save nothing (clone, to, embedding), whose estimates keep their value with it."""

    equal: Literal["", "copied", "left_out"] = ""
    """Operators whose result always equals their operand, and so do the gradients: "left_out" of captured graphs, where
    nothing is written, so that the operand is as good, or perhaps "copied" to other strides."""

    sums: bool = False
    """Whether it adds up products or elements, so that its partial results are worth adding in fp32. Sums of which only
    one summand is not zero (embedding, index) are exact in any precision."""

    backward_products: float | None = None
    """Flops of backward relative to forward, in one call, where they are not a product per factor that has a gradient:
    attention makes five products, the scores once more among them, for two in forward."""

    sized: bool = False
    """Whether sizes of its result are among its arguments, which are others for a slice of the batch."""

    draws_rows: bool = False
    """Random operators that can draw for some rows of the batch what one device draws for them."""

    fills: bool = False
    """Random operators that return numbers in the shape of their operands, whatever these hold (their in-place forms
    write them)."""

    @property
    def view(self) -> bool:
        """Whether it shows elements of its operand and moves nothing."""
        return self.result not in ("new", "maybe")

    def saves_operand(self, position: int, learns: Sequence[bool]) -> bool:
        """Whether backward needs the operand at `position`, where `learns` says which operands have a gradient."""
        if "*" in self._operands:
            return True
        if "others" in self._operands:
            return any(learn for at, learn in enumerate(learns) if at != position)
        if position not in self._needed:
            return False
        needed = self._needed[position]
        return needed is None or any(at < len(learns) and learns[at] for at in needed)

    def saves_result(self, index: int) -> bool:
        """Whether backward needs result `index`."""
        return any(token == "r" or str(index) in token[1:] for token in self._results)

    @cached_property
    def _results(self) -> tuple[str, ...]:
        return tuple(token for token in self.saves.split() if re.fullmatch(r"r\d*", token))

    @cached_property
    def _operands(self) -> tuple[str, ...]:
        return tuple(token for token in self.saves.split() if token not in self._results)

    @cached_property
    def _needed(self) -> dict[int, tuple[int, ...] | None]:
        """Position -> the operands of which one must have a gradient; None for any."""
        pairs = (token.partition("<") for token in self._operands)
        return {int(at): tuple(map(int, others)) if others else None for at, _, others in pairs}


DEFAULT = Traits()

ROWS: tuple[tuple[Traits, str], ...] = (
    # Views
    (
        Traits("permutation", ""),
        "adjoint mH mT matrix_H moveaxis movedim numpy_T permute swapaxes swapdims t transpose",
    ),
    (
        Traits("reshape", ""),
        "_reshape_alias atleast_1d atleast_2d atleast_3d flatten ravel reshape_as squeeze unsqueeze view_as",
    ),
    (Traits("reshape", "", sized=True), "_unsafe_view reshape unflatten view"),
    (Traits("expansion", ""), "broadcast_tensors expand_as meshgrid"),
    (Traits("expansion", "", sized=True), "broadcast_to expand"),
    (Traits("split", ""), "chunk dsplit hsplit tensor_split unsafe_chunk vsplit"),
    (Traits("split", "", sized=True), "split split_with_sizes unsafe_split unsafe_split_with_sizes"),
    (Traits("part", ""), "diagonal imag linalg_diagonal real select unbind unfold"),
    (Traits("part", "", sized=True), "narrow slice"),
    (Traits("reinterpretation", ""), "_conj view_as_complex view_as_real"),
    (Traits("identity", ""), "detach positive"),
    (Traits("identity", "", equal="left_out"), "alias lift_fresh"),
    # Copies that may be left out
    (Traits("maybe", "", equal="copied"), "contiguous"),
    (Traits("maybe", ""), "conj_physical feature_alpha_dropout feature_dropout resolve_conj to type_as"),
    (Traits("maybe", "r"), "alpha_dropout"),
    (Traits("maybe", "r", draws_rows=True), "dropout"),
    # Moving elements, and sums that need nothing
    (
        Traits(saves="", rereads=False),
        """
        add cat column_stack concat concatenate constant_pad_nd dstack hstack neg negative pad roll row_stack rsub
        select_scatter slice_scatter stack sub subtract tile vstack
        """,
    ),
    (Traits(saves="", rereads=False, sized=True), "repeat"),
    (Traits(saves="", rereads=False, sums=True), "mean sum"),
    (Traits(saves="", equal="copied"), "clone"),
    (Traits(saves="", equal="left_out"), "lift_fresh_copy"),
    (
        Traits(saves=""),
        """
        _to_copy _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
        _upsample_nearest_exact3d affine_grid_generator channel_shuffle col2im copy cumsum deg2rad diag_embed
        diagonal_scatter diff fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft
        fft_irfft2 fft_irfftn fill flip fliplr flipud frac im2col pixel_shuffle pixel_unshuffle rad2deg
        repeat_interleave rot90 tril triu upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
        upsample_nearest2d upsample_nearest3d upsample_trilinear3d
        """,
    ),
    # Steps, whose gradient is zero, and numbers without a gradient
    (
        Traits(saves=""),
        """
        __and__ __lshift__ __or__ __rshift__ __xor__ _is_all_true _is_any_true all any arange argmax argmin argsort
        bartlett_window bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor
        blackman_window bucketize ceil count_nonzero empty empty_like eq eye fft_fftfreq fft_rfftfreq fix floor
        floor_divide full full_like gcd ge greater greater_equal gt hamming_window hann_window heaviside histc isclose
        isfinite isin isinf isnan isneginf isposinf isreal kaiser_window lcm le less less_equal linspace logical_and
        logical_not logical_or logical_xor logspace lt multinomial ne new_empty new_full new_ones new_zeros not_equal
        one_hot ones ones_like rand randint randn round scalar_tensor searchsorted sign signbit special_round
        tril_indices triu_indices trunc zeros zeros_like
        """,
    ),
    (
        Traits(saves="", fills=True),
        """
        bernoulli cauchy exponential geometric log_normal normal normal_functional rand_like randint_like randn_like
        random uniform
        """,
    ),
    # Indices: the elements that they read or write are left out
    (
        Traits(saves="1"),
        "embedding index_fill index_put index_select masked_fill masked_scatter max_unpool2d max_unpool3d scatter",
    ),
    (Traits(saves="1<2", rereads=False), "scatter_add"),
    (Traits(saves="1<2 2<2"), "index_add"),
    (Traits(saves="1 2<2"), "index_copy"),
    (Traits(saves="1 2 3"), "index"),
    (Traits(saves="1 2 r123"), "embedding_bag"),
    (Traits(saves="0"), "where"),
    # Products, linear in each factor
    (
        Traits(saves="others", sums=True),
        "chain_matmul dot inner linalg_matmul linalg_multi_dot linalg_vecdot mv tensordot vdot",
    ),
    (Traits(saves="others", certain=True, sums=True), "bmm matmul mm"),
    (Traits("maybe", "others", sums=True), "einsum"),
    (Traits(saves="0<1 1<0", certain=True, sums=True), "linear"),
    (Traits(saves="1<2 2<1", sums=True), "addbmm addmv"),
    (Traits(saves="1<2 2<1", certain=True, sums=True), "addmm baddbmm"),
    (Traits(saves="0<12 1<02 2<01", sums=True), "bilinear"),
    # Convolutions compute all gradients in one node, and keep both factors whichever has one.
    (Traits(saves="0 1", certain=True, sums=True), "conv1d conv2d conv3d"),
    (Traits(saves="0 1", sums=True), "conv_transpose1d conv_transpose2d conv_transpose3d convolution"),
    (Traits(saves="0 1 2", sums=True), "conv_tbc"),
    (Traits(saves="others"), "cross ger kron linalg_cross multiply outer"),
    (Traits(saves="others", certain=True), "mul"),
    (Traits(saves="1<2 2<1"), "addcmul addr"),
    (Traits(saves="0<1 1"), "divide kl_div true_divide"),
    (Traits(saves="0<1 1", certain=True), "div"),
    (Traits(saves="1<2 2"), "addcdiv"),
    (Traits(saves="0<2 1<2 2"), "lerp"),
    (Traits(saves="* r", certain=True, backward_products=2.5, draws_rows=True), "scaled_dot_product_attention"),
    # Functions whose derivative is a function of their result
    (
        Traits(saves="r"),
        """
        cholesky exp exp2 expm1 hinge_embedding_loss inverse l1_loss linalg_cholesky linalg_eigh linalg_eigvalsh
        linalg_inv linalg_qr linalg_svd linalg_svdvals log_softmax margin_ranking_loss msort nanquantile
        pairwise_distance polar quantile reciprocal relu rsqrt sigmoid softmax special_exp2 special_expit special_expm1
        special_ndtr special_ndtri sqrt tan tanh triplet_margin_loss
        """,
    ),
    (Traits(saves="r1"), "kthvalue mode native_dropout nanmedian sort topk"),
    (Traits(saves="1 r"), "ldexp"),
    # ... and of their operands
    (Traits(certain=True), "gelu layer_norm silu"),
    (Traits(sums=True), "nansum"),
    (
        Traits(saves="* r"),
        """
        amax amin aminmax cdist cholesky_solve cumprod det float_power linalg_det linalg_matrix_norm
        linalg_matrix_power linalg_norm linalg_pinv linalg_solve linalg_vector_norm log_sigmoid
        logcumsumexp logdet logsumexp matrix_power max median min multilabel_margin_loss norm pinverse pow prod rrelu
        scatter_reduce sgn special_erfcx special_i0e special_i1 special_i1e special_log_ndtr std
        """,
    ),
    (
        Traits(saves="0 r1"),
        """
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d cummax cummin fractional_max_pool2d
        fractional_max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
        """,
    ),
    (Traits(saves="0 r0"), "linalg_slogdet slogdet std_mean"),
    (Traits(saves="0 r"), "linalg_solve_triangular"),
    (Traits(saves="0 1 r12"), "batch_norm_training"),
    (Traits(saves="0 1 2 3 4"), "batch_norm"),
    (Traits(saves="0"), "instance_norm instance_norm_training"),
    (Traits(saves="0<1 1<1"), "fmod igamma igammac remainder special_gammainc special_gammaincc special_zeta"),
    (Traits(saves="0<0 1<1"), "complex"),
    (Traits(saves="0<0 1<1 r"), "hypot"),
    (Traits(saves="0<0 1<1 r"), "cosine_similarity"),
    (Traits(saves="0<0 r"), "copysign"),
    (Traits(saves="0<0 1<0"), "nextafter"),
    (Traits(saves="0<1 1<0 r"), "poisson_nll_loss stft"),
    (Traits(saves="0 1<0", certain=True), "rms_norm"),
    (Traits(saves="0<2 1<3 2<0 3<1 r"), "rnn_relu_cell rnn_tanh_cell"),
)


def _table(rows: Iterable[tuple[Traits, str]]) -> dict[str, Traits]:
    table: dict[str, Traits] = {}
    for row, names in rows:
        for name in names.split():
            if name in table:
                raise ValueError(f"Operator {name} has two rows of traits.")
            table[name] = row
    return table


TRAITS = _table(ROWS)


def traits(op: str) -> Traits:
    """The traits of a torch operator, by name without overload."""
    return TRAITS.get(op, DEFAULT)


def saved(graph: OperatorGraph) -> dict[str, list[float]]:
    """What autograd saves of the results of operators: by operator the shares of the bytes of its results and operands,
    of views those of the tensor that they show.

    A tensor that several operators save is in memory once where they use it in one layout, and once per layout
    otherwise. So each of them counts an equal share of it, in its own layout.
    """
    shares = {one.id: [0.0] * (len(one.results) + len(one.operands)) for one in graph.operators}

    def saving(ref: Ref) -> Iterator[tuple[Operator, int]]:
        for user, position in graph.users[ref]:
            if traits(user.op).view:
                for index in range(len(user.results)):
                    yield from saving(Ref(user.id, index))
            elif user.id in graph.returning and saves_operand(graph, user, position):
                yield user, position

    for operator in graph.operators:
        for index, spec in enumerate(operator.results if not traits(operator.op).view else ()):
            users = list(saving(Ref(operator.id, index)))
            own = operator.id in graph.returning and traits(operator.op).saves_result(index)
            if own:
                shares[operator.id][index] = 1 / (len(users) + 1)
            for user, position in users:
                shown = max(graph.specs[user.operands[position]].elements, 1)  # of a view, which may be expanded
                shares[user.id][len(user.results) + position] = spec.elements / shown / (len(users) + own)
    return shares


def saves_operand(graph: OperatorGraph, user: Operator, position: int) -> bool:
    """Whether the gradients of an operator need its operand at `position`."""
    return traits(user.op).saves_operand(position, [ref in graph.trained for ref in user.operands])
