"""Attention over one block of keys at a time, for keys and values that travel around a ring of ranks.

A block returns its own softmax's output and the logarithm of its sum of exponentials; two blocks merge exactly:
the sums add up, and each output counts by its share of them (Liu, Zaharia, Abbeel, "Ring Attention with Blockwise
Transformers", 2023). Backward computes a block's probabilities again from that logarithm (Dao et al., "FlashAttention",
2022), so no rank ever stores scores; queries are taken in rows of at most `SCORES` scores. Gradients of keys and values
travel back around the ring as the adjoint of the rotations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.rules.random import Rows, kept_block, mix, uniform
from strategies.rules.registry import local_function

SCORES = 2**26
"""Scores that are computed at once, as far as rows of queries allow."""
NOTHING = -1e30
"""The logarithm of the sum of no exponentials: finite, so that blocks without a visible key merge without NaN."""

Keep = Callable[[int, int], Tensor]
"""Which probabilities of the given rows (first, number) a dropout keeps."""


class _Block(torch.autograd.Function):
    """query [..., s, d], key [..., t, d], value [..., t, e], bias [..., s or 1, t or 1] or boolean mask; leading dims
    broadcast. `start`: the position of the first query relative to the first key of the block, if it is causal.
    Returns the output [..., s, e] and the logarithms [..., s, 1], float32 or wider."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        start: int | None,
        scale: float,
        left: float,
        keep: Keep | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.start, ctx.scale, ctx.left, ctx.keep = start, scale, left, keep
        outputs, logarithms = [], []
        for first, rows in _rows(query, key):
            scores = _scores(query, key, bias, start, scale, first, rows)
            logarithm = scores.logsumexp(-1, keepdim=True).clamp_min(NOTHING)
            probabilities = (scores - logarithm).exp()
            if keep is not None:
                probabilities = probabilities * keep(first, rows) * left
            outputs.append(probabilities.to(value.dtype) @ value)
            logarithms.append(logarithm)
        logarithm = torch.cat(logarithms, -2)
        ctx.save_for_backward(query, key, value, bias, logarithm)
        return torch.cat(outputs, -2).to(logarithm.dtype), logarithm

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        query, key, value, bias, logarithms = ctx.saved_tensors
        of_output, of_logarithm = gradients
        of_queries, of_key, of_value = [], torch.zeros_like(key), torch.zeros_like(value)
        learned = bias is not None and bias.is_floating_point() and ctx.needs_input_grad[3]
        of_bias = torch.zeros_like(bias) if learned else None
        for first, rows in _rows(query, key):
            scores = _scores(query, key, bias, ctx.start, ctx.scale, first, rows)
            probabilities = (scores - logarithms.narrow(-2, first, rows)).exp()
            above = of_output.narrow(-2, first, rows)
            of_dropped = above.to(value.dtype) @ value.mT
            dropped = probabilities
            if ctx.keep is not None:
                kept = ctx.keep(first, rows)
                dropped, of_dropped = probabilities * kept * ctx.left, of_dropped * kept * ctx.left
            of_value += (dropped.to(value.dtype).mT @ above.to(value.dtype)).sum_to_size(value.shape)
            mean = (of_dropped * probabilities).sum(-1, keepdim=True) - of_logarithm.narrow(-2, first, rows)
            of_scores = probabilities * (of_dropped - mean)
            if of_bias is not None:
                part = of_bias if bias.shape[-2] == 1 else of_bias.narrow(-2, first, rows)
                part += of_scores.sum_to_size(part.shape)
            of_scores = (of_scores * ctx.scale).to(key.dtype)
            of_queries.append((of_scores @ key).sum_to_size((*query.shape[:-2], rows, query.shape[-1])))
            of_key += (of_scores.mT @ query.narrow(-2, first, rows)).sum_to_size(key.shape)
        return torch.cat(of_queries, -2), of_key, of_value, of_bias, None, None, None, None


def _rows(query: Tensor, key: Tensor) -> Iterator[tuple[int, int]]:
    lead = math.prod(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]))  # type: ignore[no-untyped-call]
    most = max(1, SCORES // (lead * key.shape[-2]))
    for first in range(0, query.shape[-2], most):
        yield first, min(most, query.shape[-2] - first)


def _scores(
    query: Tensor, key: Tensor, bias: Tensor | None, start: int | None, scale: float, first: int, rows: int
) -> Tensor:
    """Scores of some rows of queries, -inf where a query does not see a key; float32 or wider."""
    scores = query.narrow(-2, first, rows) @ key.mT
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if start is not None:
        seen = torch.ones(rows, key.shape[-2], dtype=torch.bool, device=query.device).tril(start + first)
        scores = scores.masked_fill(~seen, -math.inf)
    if bias is not None:
        part = bias if bias.dim() < 2 or bias.shape[-2] == 1 else bias.narrow(-2, first, rows)
        scores = scores.masked_fill(~part, -math.inf) if part.dtype == torch.bool else scores + part
    return scores


class _Hidden(torch.autograd.Function):
    """A block of which no query sees a key: nothing is computed, and every gradient is zero."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(query, key, value)
        lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])  # type: ignore[no-untyped-call]
        dtype = torch.promote_types(query.dtype, torch.float32)
        shape = (*lead, query.shape[-2])
        output = query.new_zeros((*shape, value.shape[-1]), dtype=dtype)
        return output, query.new_full((*shape, 1), NOTHING, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


@local_function
def ring_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position: int,
    step: int,
    slices: int,
    causal: bool,
    dropout: float,
    scale: float | None,
    grouped: bool,
    seeds: tuple[int, int, int] | None,
    shape: Sequence[int],
    starts: Sequence[int] | None,
    rows: Rows | None,
) -> tuple[Tensor, Tensor]:
    """Attention of a rank's queries to the keys that it has after `step` rotations, and the logarithms of the sums.

    Args:
        position: the rank's place among the `slices` ranks of the ring.
        seeds: the program's key, the operator's ordinal and the position of the rank's slice; None without dropout.
        shape: of the random tensor over all ranks.
        starts: where the rank's queries begin in it, for `exact` dropout; None: numbers of this block alone.
        rows: those of a batch split.
    """
    block, keys, queries = (position - step) % slices, key.shape[-2], query.shape[-2]
    heads = key.shape[-3] if grouped else 0

    def in_groups(tensor: Tensor) -> Tensor:
        """Heads [..., h, s, t] as groups of those that share keys."""
        if not heads or tensor.dim() < 3:
            return tensor
        return tensor.unsqueeze(-3) if tensor.shape[-3] == 1 else tensor.unflatten(-3, (heads, -1))  # type: ignore[no-untyped-call]

    ahead = 3 if heads else 2
    lead = torch.broadcast_shapes(query.shape[:-ahead], key.shape[:-ahead]) + query.shape[-ahead:-2]  # type: ignore[no-untyped-call]

    def keep(first: int, number: int) -> Tensor:
        assert seeds is not None
        program_key, ordinal, where = seeds
        if starts is None:
            numbers = uniform((*lead, number, keys), mix(program_key, ordinal, where, step, first), value.device)
            return in_groups(numbers >= dropout)
        part = value.new_empty(()).expand(*lead, number, keys)
        begin = (*starts[:-2], starts[-2] + first, block * keys)
        kept = kept_block(part, dropout, program_key, ordinal, shape, begin, rows)
        return in_groups(kept.to(value.device))

    if heads:
        query, key, value = query.unflatten(-3, (heads, -1)), key.unsqueeze(-3), value.unsqueeze(-3)  # type: ignore[no-untyped-call]
    if causal and block > position:
        results = _Hidden.apply(query, key, value)  # type: ignore[no-untyped-call]
    else:
        bias = mask
        if mask is not None and mask.shape[-1] > 1:
            bias = mask.narrow(-1, block * keys, keys)
        results = _Block.apply(  # type: ignore[no-untyped-call]
            query,
            key,
            value,
            None if bias is None else in_groups(bias),
            (position - block) * queries if causal else None,
            1 / math.sqrt(query.shape[-1]) if scale is None else scale,
            1 / (1 - dropout) if dropout < 1 else 0.0,
            None if seeds is None else keep,
        )
    output, logarithm = results
    return (output.flatten(-4, -3), logarithm.flatten(-4, -3)) if heads else (output, logarithm)


@local_function
def merged_blocks(output: Tensor, logarithm: Tensor, more: Tensor, of_more: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to the keys of two blocks, from that to each."""
    both = torch.logaddexp(logarithm, of_more)
    return output * (logarithm - both).exp() + more * (of_more - both).exp(), both
