"""Counterparts of products, tables, norms and attention: what they compute, and who gets the strategy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from strategies.core.request import OperatorStrategy
from tests.conformance.forms import (
    Args,
    Attrs,
    Form,
    NotMapped,
    Recorded,
    aligned,
    one,
    option,
    wanted,
)

# products


def product(args: Args, attrs: Attrs) -> Tensor:
    """Transposed operands stay transposed: a linear layer, or einsum subscripts."""
    (x, y), turned = args[:2], [bool(attrs.get(name)) for name in ("transpose_a", "transpose_b")]
    if turned == [False, False]:
        return torch.matmul(x, y)
    if turned == [False, True] and y.dim() == 2:
        return F.linear(x, y)
    return torch.einsum(f"...{'ki' if turned[0] else 'ik'},...{'jk' if turned[1] else 'kj'}->...ij", x, y)


def spread_product(record: Recorded) -> dict[str, OperatorStrategy]:
    if record.attrs.get("enable_nd_tp"):
        forms = shared_loops(list(record.inputs), bool(record.attrs.get("transpose_b")))
        return {record.operators[-1].name: wanted(forms, record.outputs)}
    return one(record)


def shared_loops(forms: list[Form], transposed: bool) -> list[Form]:
    """A product in more dimensions: both operands have finer shards than the product uses, and are gathered before it.
    What both agree on slices the contraction, the other axes of x its rows, those of the weight its columns."""
    x, weight = forms[0], forms[1].swapped() if transposed else forms[1]
    inner, outer = [dim if isinstance(dim, tuple) else () for dim in (x.entries[-1], weight.entries[-2])]
    columns = weight.entries[-1] if isinstance(weight.entries[-1], tuple) else ()
    shared = tuple(axis for axis in inner if axis in outer)
    rows = x.entries[-2] if isinstance(x.entries[-2], tuple) else ()
    rows = tuple(axis for axis in rows if axis not in (*shared, *columns))
    columns = tuple(axis for axis in columns if axis not in rows)
    product = Form((*x.entries[:-2], rows, shared), x.layout)
    weight = Form((*weight.entries[:-2], shared, columns), weight.layout)
    return [product, weight.swapped() if transposed else weight]


def bias_add(args: Args, attrs: Attrs) -> Tensor:
    """x [n, c, ...] and one number per channel."""
    x, bias = args[:2]
    return x + (bias if x.dim() == 2 else bias.reshape(-1, *(1,) * (x.dim() - 2)))


def spread_bias(record: Recorded) -> dict[str, OperatorStrategy]:
    forms, rank = list(record.inputs), record.args[0].dim()
    if rank == 2 or len(forms) != 2 or len(forms[1].entries) != 1:
        return {record.operators[-1].name: wanted(forms, record.outputs)}
    turned = forms[1].pick(0, *(None,) * (rank - 2))
    return {
        record.operators[0].name: wanted(forms[1:]),
        record.operators[-1].name: wanted((forms[0], turned), record.outputs),
    }


# tables


def table_rows(args: Args, attrs: Attrs) -> Tensor:
    table, indices = args[:2]
    axis = option(args, attrs, 2, "axis", 0) % table.dim()
    if axis == 0 and table.dim() == 2:
        return F.embedding(indices, table)
    return table[(slice(None),) * axis + (indices,)]


def spread_rows(record: Recorded) -> dict[str, OperatorStrategy]:
    if any(key.startswith("manual_split") and accepted_split(record, value) for key, value in record.attrs.items()):
        raise NotMapped("manual_split: a table whose slices have explicit row counts")
    return one(record)


def accepted_split(record: Recorded, rows: Sequence[Any]) -> bool:
    """Explicit rows that slice the table as often as the indices, over all devices, on the same ranks."""
    table, indices = record.inputs
    sizes = [row[0] if isinstance(row, list) else row for row in rows]
    fits = table.entries[0] == len(sizes) == indices.entries[-1] and sum(sizes) == record.args[0].shape[0]
    axis = option(record.args, record.attrs, 2, "axis", 0)
    return fits and axis == 0 and math.prod(map(int, table.entries)) == record.devices


# normalisation


def layer_norm(args: Args, attrs: Attrs) -> tuple[Tensor, Tensor, Tensor]:
    x, gamma, beta = args[:3]
    begin = attrs.get("begin_norm_axis", attrs.get("arg0", -1)) % x.dim()
    dims = tuple(range(begin, x.dim()))
    mean = x.mean(dims, keepdim=True)
    variance = (x - mean).square().mean(dims, keepdim=True)
    if gamma.shape == x.shape[begin:]:
        return F.layer_norm(x, gamma.shape, gamma, beta), mean, variance
    return F.layer_norm(x, x.shape[begin:]) * gamma + beta, mean, variance


def spread_layer_norm(record: Recorded) -> dict[str, OperatorStrategy]:
    """The norm proper gets the recorded strategy of x, so that its own rule checks it; other operators follow x."""
    found = {}
    for operator, shapes in zip(record.operators, record.shapes, strict=True):
        if operator.op == "layer_norm" and len(shapes) == 3:
            found[operator.name] = wanted(record.inputs, record.outputs)
        elif operator.op == "layer_norm":
            found[operator.name] = wanted(record.inputs[:1])
        elif operator.op in ("mul", "add") and len(record.inputs) == 3:
            affine = record.inputs[1 if operator.op == "mul" else 2]
            found[operator.name] = wanted((record.inputs[0], affine), record.outputs if operator.op == "add" else None)
    return found


def rms_norm(args: Args, attrs: Attrs) -> Tensor:
    """As transformers writes it: a mean of squares, and two products."""
    x, gamma = args[:2]
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    return x * torch.rsqrt(x.square().mean(dims, keepdim=True) + 1e-6) * gamma


def spread_rms_norm(record: Recorded) -> dict[str, OperatorStrategy]:
    last = record.operators[-1].name
    if len(record.inputs) != 2:
        return {last: wanted(record.inputs)}
    return aligned(record) | {last: wanted(record.inputs, record.outputs)}


def attention(args: Args, attrs: Attrs) -> Tensor:
    q, k, v = args[:3]
    kind, heads = attrs.get("input_layout", "BNSD"), attrs["head_num"]
    if any(isinstance(argument, Tensor) for argument in args[3:]) and kind != "TND":
        raise NotMapped("FlashAttentionScore with a mask or an offset")
    if kind == "BNSD":
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    if kind == "BSH":
        size = q.shape[-1] // heads
        q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(2)
    if kind == "TND":
        return F.scaled_dot_product_attention(q, k, v)
    raise NotMapped(f"FlashAttentionScore in the layout {kind}")


def spread_attention(record: Recorded) -> dict[str, OperatorStrategy]:
    kind = record.attrs.get("input_layout", "BNSD")
    rows = [form.entries[0] for form in record.inputs[:2]]
    if kind == "TND" and (rows[0] == rows[1] or not isinstance(rows[0], int)):
        raise NotMapped("attention over packed sequences (FlashAttentionScore in the layout TND)")
    if kind == "TND":
        return {record.operators[-1].name: wanted(record.inputs)}
    if kind == "BNSD":
        return one(record)
    found = {}
    for operator, shapes in zip(record.operators, record.shapes, strict=True):
        if operator.op == "scaled_dot_product_attention":
            found[operator.name] = wanted([form.pick(0, 2, 1, None) for form in record.inputs[: len(shapes)]])
    return found
