"""Scaled dot-product attention: q [*b, h, s, d], k [*b, h, t, d], v [*b, h, t, e] -> [*b, h, s, e].

Batch dims, heads, the query sequence s and the value dim e pass; the contraction d stays replicated. Where there are as
many keys as queries, keys and values are sliced with the queries (context parallel): every rank has a slice of the
sequence, and gathers keys and values before it computes; the adjoint scatters their gradients. Other keys t stay
replicated. With grouped queries a slice of heads keeps all of its groups, so heads are cut as finely as there are heads
of keys. A slice of a causal query sequence sees the keys up to its own end, by a mask with its offset. Without dropout
every slice calls torch's fused operator. With dropout and `random=exact` both sides compute an explicit softmax: only
that defines which probabilities are dropped (the mask is generated for the global [*b, h, s, t] and sliced to the
block).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from strategies.core.graph import Operator, Ref, TensorSpec, wide
from strategies.core.steps import MIRROR, ROTATE
from strategies.rules import ring_attention  # noqa: F401  registers its local functions
from strategies.rules.random import Rows, kept_block, random_rows, starts_of
from strategies.rules.registry import arguments, changed, local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding


def causal(queries: int, keys: int, start: int, device: torch.device) -> Tensor:
    """Which of the first `keys` keys each query from position `start` sees: bool [queries, keys]."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(start)


@local_function
def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, start: int, dropout: float, scale: float | None, grouped: bool
) -> Tensor:
    """Causal attention of the queries from position `start` on; keys that none of them sees are left out."""
    queries, keys = query.shape[-2], min(key.shape[-2], start + query.shape[-2])
    seen = None if start == 0 else causal(queries, keys, start, query.device)
    key, value = key[..., :keys, :], value[..., :keys, :]
    if grouped:
        return grouped_attention(query, key, value, seen, dropout, start == 0, scale)
    return functional.scaled_dot_product_attention(query, key, value, seen, dropout, start == 0, scale=scale)


@local_function
def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    """Attention of groups of query heads. In fp32 no kernel of a GPU takes groups, so torch would compute all
    probabilities (2.0 times as long, in 4.7 times the memory: 16 heads of 512 tokens on an H200): each query head is
    given its own keys and values."""
    apart = query.device.type == "cuda" and query.dtype == torch.float32 and query.dim() > 2
    if apart:
        key, value = by_query_head(query, key), by_query_head(query, value)
    return functional.scaled_dot_product_attention(
        query, key, value, mask, dropout, causal, scale=scale, enable_gqa=not apart
    )


def by_query_head(query: Tensor, grouped: Tensor) -> Tensor:
    """The keys or values [..., groups, t, d] of every head of `query`: [..., heads, t, d]."""
    return grouped.repeat_interleave(query.shape[-3] // grouped.shape[-3], -3)


@local_function
def attention_block(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    start: int | None,
    dropout: float,
    scale: float | None,
    grouped: bool,
    program_key: int,
    ordinal: int,
    shape: Sequence[int],
    starts: Sequence[int],
    rows: Rows | None = None,
) -> Tensor:
    """Attention whose dropout has the numbers of the global probabilities: those of `rows` among the numbers of global
    `shape` [*b, h, s, t]; the block's own begin at `starts`."""
    if grouped:
        key, value = by_query_head(query, key), by_query_head(query, value)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if start is not None:
        seen = causal(query.shape[-2], key.shape[-2], start, query.device)
        scores = scores.masked_fill(~seen, -math.inf)
    elif mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)  # a query that sees no key gets zeros, as from torch's own
    probabilities = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    kept = kept_block(probabilities, dropout, program_key, ordinal, shape, starts, rows)
    left = 1 / (1 - dropout) if dropout < 1 else 0.0
    return (probabilities * kept.to(query.device) * left) @ value


def _attention(operator: Operator, local: Local, *, together: bool) -> Ref:
    """`together`: keys and values are sliced with the queries."""
    if together and local.ring and local.slices("s") > 1:
        return _ring(operator, local)
    given, keys = local.arguments, local.operand_shape(1)[-2]
    query, key, value = (given[name] for name in ("query", "key", "value"))
    slices = local.slices("s")
    if together and slices > 1:
        keys *= slices
        key, value = (
            local.gather_over(part, "s", shape=local.operand_shape(index), dim=-2)
            for index, part in ((1, key), (2, value))
        )
    causal, dropout, rest = given["is_causal"], given["dropout_p"], (given["scale"], given["enable_gqa"])
    start: Any = local.position("s", local.operand_shape(0)[-2]) if causal else None
    if dropout == 0:
        if causal and slices > 1:
            return local.call("local.causal_attention", query, key, value, start, 0.0, *rest)
        if given["enable_gqa"]:
            return local.call("local.grouped_attention", query, key, value, given["attn_mask"], 0.0, causal, rest[0])
        return local.itself(key=key, value=value)
    factors = _result_dims(len(operator.results[0].shape))[:-1]  # slices of the value dim share their probabilities
    seeds = local.key, local.ordinal
    if not local.exact:
        where = local.position(factors)
        if not causal and given["enable_gqa"]:
            grouped = query, key, value, given["attn_mask"], dropout, False, rest[0]
            return local.call("local.seeded_slice", "local.grouped_attention", *seeds, where, *grouped)
        if not causal:
            args, kwargs = changed(operator.target, local.args, local.kwargs, key=key, value=value)
            return local.call("local.seeded_slice", operator.target, *seeds, where, *args, **kwargs)
        shifted_call = "local.causal_attention", *seeds, where, query, key, value, start, dropout, *rest
        return local.call("local.seeded_slice", *shifted_call)
    starts = starts_of(local, factors, local.result_shape()[:-1])
    shape, rows = random_rows(operator, (*operator.results[0].shape[:-1], keys))
    block = query, key, value, given["attn_mask"], start, dropout, *rest, *seeds, shape, (*starts, 0), rows
    return local.call("local.attention_block", *block)


def _ring(operator: Operator, local: Local) -> Ref:
    """Keys and values travel from rank to rank; each block is computed while the next one is under way."""
    given, slices, dtype = local.arguments, local.slices("s"), operator.results[0].dtype
    causal, dropout, factors = given["is_causal"], given["dropout_p"], _result_dims(len(operator.results[0].shape))[:-1]
    result = operator.results[0].shape
    shape, rows = random_rows(operator, (*result[:-1], result[-2]))
    seeds, starts = None, None
    if dropout != 0:
        seeds = local.key, local.ordinal, local.position(factors)
        starts = starts_of(local, factors, local.result_shape()[:-1])[:-1] if local.exact else None
    query, *pair = (local.operand_shape(index) for index in range(3))
    halves = [(*size[:-2], size[-2] // 2, size[-1]) for size in (query, *pair, local.result_shape())]
    swaps = int(causal and query[-2] > 1)
    channels = (
        local.channel(ROTATE, "s", pair, dtype, slices - 1, slices - 1),
        local.channel(ROTATE, "s", pair, wide(dtype), 0, slices - 1),
        local.channel(MIRROR, "s", halves[:3], dtype, swaps, swaps),
        local.channel(MIRROR, "s", halves[3:], dtype, swaps, 0),
        local.channel(MIRROR, "s", halves[3:] * 2, dtype, 0, swaps),
    )
    settings = local.position("s"), slices, causal, dropout, given["scale"], given["enable_gqa"]
    tensors = (given[name] for name in ("query", "key", "value", "attn_mask"))
    return local.cooperate("local.ring_attention", channels, *tensors, *settings, seeds, shape, starts, rows)


def _result_dims(rank: int) -> tuple[str, ...]:
    """Factors of the result [*b, h, s, e]; tensors without heads have their last batch dim in that place."""
    return (*(f"b{i}" for i in range(rank - 3)), *("h", "s", "e")[max(0, 3 - rank) :])


def _leading(shape: Sequence[int], common: Sequence[int], names: Sequence[str], grouped: bool = False) -> Dims:
    """Factors of the leading dims of q, k or v, whose broadcast shape is `common`: None where they are broadcast."""
    skip = len(common) - len(shape)
    return tuple(
        name if size == other or (grouped and name == "h" and size > 1) else None
        for size, other, name in zip(shape, common[skip:], names[skip:], strict=False)
    )


@rule("scaled_dot_product_attention")
def attention(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """q [*b, h, s, d], k [*b, h, t, d], v [*b, h, t, e], mask [*b, h, s, t] -> [*b, h, s, e]; leading dims broadcast,
    and the mask's do too."""
    given = arguments(operator)
    query, key, value = (spec.shape for spec in specs[:3])
    shape = operator.results[0].shape
    names, lead = _result_dims(len(shape)), shape[:-2]
    grouped = given["enable_gqa"] and len(shape) > 2
    together = query[-2] == key[-2]
    of_keys = "s" if together else None
    operands: list[Dims] = [
        (*_leading(query[:-2], lead, names), "s", None),
        (*_leading(key[:-2], lead, names, grouped), of_keys, None),
        (*_leading(value[:-2], lead, names, grouped), of_keys, "e"),
    ]
    operands += [(*_leading(mask.shape[:-1], shape[:-1], names), None) for mask in specs[3:]]
    heads = math.gcd(*(s[-3] for s in (query, key, value) if s[-3] > 1)) if grouped else 0
    padded = given["dropout_p"] == 0 and len(specs) == 3 and not grouped
    return sharding(
        operator,
        specs,
        operands,
        [names],
        local=partial(_attention, together=together),
        flops=2.0 * math.prod(shape[:-1]) * key[-2] * (query[-1] + value[-1]),
        sizes={"h": heads} if grouped else {},
        padded=names[:-2] if padded else (),
        gathered="s" if together else (),
    )
