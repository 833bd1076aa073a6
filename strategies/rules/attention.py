"""Scaled dot-product attention: q [*b, h, s, d], k [*b, h, t, d], v [*b, h, t, e] -> [*b, h, s, e].

Batch dims, heads, the query sequence s and the value dim e pass; keys t and the contraction d stay replicated. With
grouped queries a slice of heads keeps all of its groups, so heads are cut as finely as there are heads of keys. A
slice of a causal query sequence sees the keys up to its own end, by a mask with its offset. Without dropout every
slice calls torch's fused operator. With dropout and `random=exact` both sides compute an explicit softmax: only that
defines which probabilities are dropped (the mask is generated for the global [*b, h, s, t] and sliced to the block).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import named
from strategies.rules.random import Rows, drawn_rows, kept, mix, of_rows, seeding
from strategies.rules.registry import local_function, rule
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
    return functional.scaled_dot_product_attention(
        query, key, value, seen, dropout, start == 0, scale=scale, enable_gqa=grouped
    )


@local_function
def seeded_attention(
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
    position: int,
) -> Tensor:
    """Attention of one slice with per-slice dropout numbers, from (key, ordinal, position); causal from `start`."""
    with seeding(program_key, ordinal, position):
        if start is not None:
            return causal_attention(query, key, value, start, dropout, scale, grouped)
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, scale=scale, enable_gqa=grouped
        )


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
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if start is not None:
        seen = causal(query.shape[-2], key.shape[-2], start, query.device)
        scores = scores.masked_fill(~seen, -math.inf)
    elif mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)  # a query that sees no key gets zeros, as from torch's own
    probabilities = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    remains = of_rows(kept(shape, dropout, mix(program_key, ordinal), "cpu"), rows)
    for dim, begin in enumerate(starts):
        remains = remains.narrow(dim, begin, probabilities.shape[dim])
    left = 1 / (1 - dropout) if dropout < 1 else 0.0
    return (probabilities * remains.to(query.device) * left) @ value


def _attention(operator: Operator, local: Local) -> Ref:
    given = named(operator.target, local.args, local.kwargs)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    scale, grouped, dropout = given["scale"], given["enable_gqa"], given["dropout_p"]
    shifted = given["is_causal"] and local.slices("s") > 1
    queries = local.operand_shape(0)[-2]
    start: Any = local.position("s", queries) if given["is_causal"] else None
    if dropout == 0:
        if shifted:
            return local.call("local.causal_attention", query, key, value, start, 0.0, scale, grouped)
        return local.call(operator.target, *local.args, **local.kwargs)
    common = (query, key, value, given["attn_mask"], start, dropout, scale, grouped, local.key, local.ordinal)
    factors = _result_dims(len(operator.results[0].shape))[:-1]  # slices of the value dim share their probabilities
    if not local.exact:
        return local.call("local.seeded_attention", *common, local.position(factors))
    keys = local.operand_shape(1)[-2]
    starts = [local.position(f, n) for f, n in zip(factors, local.result_shape(), strict=False)]
    shape, rows = drawn_rows(operator, (*operator.results[0].shape[:-1], keys))
    return local.call("local.attention_block", *common, shape, (*starts, 0), rows)


def _result_dims(rank: int) -> tuple[str, ...]:
    """Factors of the result [*b, h, s, e]; tensors without heads have their last batch dim in that place."""
    return (*(f"b{i}" for i in range(rank - 3)), *("h", "s", "e")[max(0, 3 - rank) :])


def _leading(shape: Sequence[int], whole: Sequence[int], names: Sequence[str], grouped: bool) -> Dims:
    """Factors of the leading dims of q, k or v, whose common shape is `common`: None where they are broadcast."""
    skip = len(whole) - len(shape)
    return tuple(
        names[skip + i] if size == whole[skip + i] or (grouped and names[skip + i] == "h" and size > 1) else None
        for i, size in enumerate(shape)
    )


@rule("scaled_dot_product_attention")
def attention(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """q [*b, h, s, d], k [*b, h, t, d], v [*b, h, t, e], mask [*b, h, s, t] -> [*b, h, s, e]; leading dims broadcast,
    and the mask's do too."""
    given = named(operator.target, operator.args, operator.keywords)
    query, key, value = (spec.shape for spec in specs[:3])
    shape = operator.results[0].shape
    names, whole = _result_dims(len(shape)), shape[:-2]
    grouped = given["enable_gqa"] and len(shape) > 2
    operands: list[Dims] = [
        (*_leading(query[:-2], whole, names, False), "s", None),
        (*_leading(key[:-2], whole, names, grouped), None, None),
        (*_leading(value[:-2], whole, names, grouped), None, "e"),
    ]
    if len(specs) > 3:
        mask = specs[3].shape
        operands.append((*_leading(mask[:-1], shape[:-1], names, False), None))
    heads = math.gcd(*(s[-3] for s in (query, key, value) if s[-3] > 1)) if grouped else 0
    padded = given["dropout_p"] == 0 and len(specs) == 3 and not grouped
    return sharding(
        operands,
        [names],
        specs,
        operator.results,
        local=_attention,
        flops=2.0 * math.prod(shape[:-1]) * key[-2] * (query[-1] + value[-1]),
        sizes={"h": heads} if grouped else {},
        padded=names[:-2] if padded else (),
    )
