"""The torch counterpart of every recorded operator, as data: how it is computed, and how a recorded strategy reads in
torch's operand order.

Invariant: a counterpart computes what the recorded operator computes, in double precision (a cast between floating
types stays an operator, but changes nothing, so that numbers can be compared). What is missing here is reported as not
mapped, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from strategies.graph import Operator
from strategies.request import NamedDims, Operand, Wanted

Entry = int | tuple[str, ...]
Args = list[Any]
Attrs = Mapping[str, Any]
Compute = Callable[[Args, Attrs], Any]
Shapes = Sequence[tuple[int, ...]]


class NotMapped(Exception):
    """The case needs an operator or a feature that has no counterpart; the text names it."""


@dataclass(frozen=True)
class Form:
    """One recorded operand strategy: an entry per dim, slices or names of axes of `layout`."""

    entries: tuple[Entry, ...]
    layout: str | None = None

    def pick(self, *dims: int | None) -> Form:
        """Entries in another order; None stands for a whole dim."""
        whole: Entry = 1 if self.layout is None else ()
        return Form(tuple(whole if dim is None else self.entries[dim] for dim in dims), self.layout)

    def swapped(self) -> Form:
        """The last two dims the other way round."""
        return Form(self.entries[:-2] + self.entries[:-3:-1], self.layout)

    def operand(self) -> Operand:
        if self.layout is None:
            return tuple(self.entries)  # type: ignore[arg-type]
        return NamedDims(self.layout, self.entries)  # type: ignore[arg-type]


Forms = tuple[Form, ...]


@dataclass(frozen=True)
class Recorded:
    """A recorded node as its strategies see it: the strategies, its arguments with a `Tensor` (of the right shape) in
    place of every tensor, its attributes, and the torch operators that it became, with the shapes of their operands."""

    inputs: Forms
    outputs: Forms | None
    args: Args
    attrs: Attrs
    operators: tuple[Operator, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    devices: int


Spread = Callable[[Recorded], dict[str, Wanted]]
"""Which strategies the torch operators get, by plan name."""
Read = Callable[[Sequence[Sequence[tuple[int, ...]]]], list[list[int]]]
"""The recorded form of the chosen slices: for every operator its operands' counts."""


def wanted(inputs: Sequence[Form] | None, outputs: Sequence[Form] | None = None) -> Wanted:
    return Wanted(
        None if inputs is None else tuple(form.operand() for form in inputs),
        None if outputs is None else tuple(form.operand() for form in outputs),
    )


def one(record: Recorded) -> dict[str, Wanted]:
    """A single torch operator with the recorded operands; a number takes an empty strategy with it."""
    forms, kept = list(record.inputs), []
    for argument in record.args:
        for item in argument if isinstance(argument, list) else [argument]:
            if isinstance(item, Tensor) and forms:
                form = forms.pop(0)
                kept.append(Form(()) if not item.dim() and set(form.entries) <= {1} else form)
            elif isinstance(item, (int, float)) and forms and not forms[0].entries:
                forms.pop(0)
    return {record.operators[-1].name: wanted([*kept, *forms], record.outputs)}


def aligned(record: Recorded) -> dict[str, Wanted]:
    """Several torch operators: every operand follows the first recorded tensor, aligned from the right; a dim of
    another size stays whole. A second strategy that disagrees with the first is told to the last operator."""
    first = next(a for a in record.args if isinstance(a, Tensor))
    if len(record.inputs[0].entries) != first.dim():
        return {record.operators[0].name: wanted(record.inputs[:1])}
    found = {}
    for operator, shapes in zip(record.operators, record.shapes, strict=True):
        forms = [follow(record.inputs[0], tuple(first.shape), shape) for shape in shapes]
        found[operator.name] = wanted(forms, record.outputs if operator is record.operators[-1] else None)
    return found


def follow(form: Form, whole: tuple[int, ...], shape: tuple[int, ...]) -> Form:
    skip = len(whole) - len(shape)
    return form.pick(
        *(skip + i if skip + i >= 0 and size == whole[skip + i] else None for i, size in enumerate(shape))
    )


def as_chosen(counts: Sequence[Sequence[tuple[int, ...]]]) -> list[list[int]]:
    return [list(operand) for operand in counts[-1]]


@dataclass(frozen=True)
class Counterpart:
    compute: Compute
    spread: Spread = one
    read: Read = as_chosen
    domain: str = ""
    """`positive`: arguments must be; the network is then fed with positive numbers."""
    indices: tuple[int, ...] = ()
    """Arguments that are indices."""
    results: int | None = None
    """How many results stand for the operator where nobody asks for one of them; None for all."""


def unary(function: Callable[[Tensor], Tensor], domain: str = "") -> Counterpart:
    return Counterpart(lambda args, attrs: function(args[0]), domain=domain)


def binary(function: Callable[[Any, Any], Tensor], domain: str = "") -> Counterpart:
    def compute(args: Args, attrs: Attrs) -> Tensor:
        if any(isinstance(argument, str) for argument in args):
            raise NotMapped("an argument whose value is not recorded")
        return function(args[0], args[1])

    return Counterpart(compute, domain=domain)


def option(args: Args, attrs: Attrs, position: int, name: str, default: Any) -> Any:
    """An option that is recorded as an argument or as an attribute."""
    if len(args) > position and args[position] is not None:
        return args[position]
    return attrs.get(name, attrs.get(f"arg{position - 1}", default))


# products


def product(args: Args, attrs: Attrs) -> Tensor:
    """Transposed operands stay as they are: a linear layer, or letters that say so."""
    (x, y), turned = args[:2], [bool(attrs.get(name)) for name in ("transpose_a", "transpose_b")]
    if turned == [False, False]:
        return torch.matmul(x, y)
    if turned == [False, True] and y.dim() == 2:
        return F.linear(x, y)
    return torch.einsum(f"...{'ki' if turned[0] else 'ik'},...{'jk' if turned[1] else 'kj'}->...ij", x, y)


def spread_product(record: Recorded) -> dict[str, Wanted]:
    if record.attrs.get("enable_nd_tp"):
        forms = shared_loops(list(record.inputs), bool(record.attrs.get("transpose_b")))
        return {record.operators[-1].name: wanted(forms, record.outputs)}
    return one(record)


def shared_loops(forms: list[Form], transposed: bool) -> list[Form]:
    """A product in more dimensions: both operands lie finer than the product uses them, and are gathered before it.
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


def spread_bias(record: Recorded) -> dict[str, Wanted]:
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


def spread_rows(record: Recorded) -> dict[str, Wanted]:
    if any(key.startswith("manual_split") and accepted_split(record, value) for key, value in record.attrs.items()):
        raise NotMapped("manual_split: a table whose slices have rows counted by hand")
    return one(record)


def accepted_split(record: Recorded, rows: Sequence[Any]) -> bool:
    """Rows given by hand that slice the table as often as the indices, over all devices, on the same ranks."""
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


def spread_layer_norm(record: Recorded) -> dict[str, Wanted]:
    """The norm proper gets the recorded strategy of x, so that its own rule judges it; all else follows x."""
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


def spread_rms_norm(record: Recorded) -> dict[str, Wanted]:
    last = record.operators[-1].name
    if len(record.inputs) != 2:
        return {last: wanted(record.inputs)}
    return aligned(record) | {last: wanted(record.inputs, record.outputs)}


# selections


def strided_slice(args: Args, attrs: Attrs) -> Tensor:
    """Bit i of a mask speaks of entry i of begin, end and strides: `...`, a new dim, a dropped one, or an end that is
    left open, in this order."""
    x, begin, end, strides = args[:4]
    mask = {name: attrs.get(f"{name}_mask", 0) for name in ("ellipsis", "new_axis", "shrink_axis", "begin", "end")}
    covered = sum(not (mask["ellipsis"] | mask["new_axis"]) >> i & 1 for i in range(len(begin)))
    passed, dim = args[0].dim() - covered, 0
    for i, (start, stop, step) in enumerate(zip(begin, end, strides, strict=True)):
        if mask["ellipsis"] >> i & 1:
            dim += passed
            continue
        if mask["new_axis"] >> i & 1:
            x = x.unsqueeze(dim)
        elif mask["shrink_axis"] >> i & 1:
            x = x.select(dim, start)
            continue
        else:
            part = slice(None if mask["begin"] >> i & 1 else start, None if mask["end"] >> i & 1 else stop, step)
            if len(range(x.shape[dim])[part]) != x.shape[dim]:
                x = x[(slice(None),) * dim + (part,)]
        dim += 1
    return x.clone() if x is args[0] else x


def spread_strided_slice(record: Recorded) -> dict[str, Wanted]:
    """Every torch operator gets the strategy of the dims that are left when it is its turn."""
    (form,), found = record.inputs, {}
    for operator, shapes in zip(record.operators, record.shapes, strict=True):
        outputs = record.outputs if operator is record.operators[-1] else None
        found[operator.name] = wanted((form,), outputs)
        if len(form.entries) != len(shapes[0]):
            return {operator.name: wanted((form,))}
        dims: list[int | None] = list(range(len(form.entries)))
        if operator.op == "unsqueeze":
            dims.insert(operator.args[1], None)
        elif operator.op == "select":
            del dims[operator.args[1] if len(operator.args) > 2 else 0]
        form = form.pick(*dims)
    return found


def read_first(counts: Sequence[Sequence[tuple[int, ...]]]) -> list[list[int]]:
    return [list(operand) for operand in counts[0]]


def spread_tile(record: Recorded) -> dict[str, Wanted]:
    """Counts slice the dim where it is repeated once, else the repetitions; a layout speaks of the tensor itself."""
    form, name = record.inputs[0], record.operators[-1].name
    repeats, rank = record.args[1], record.args[0].dim()
    if form.layout is not None or record.outputs is not None:
        return {name: wanted(record.inputs, record.outputs)}
    if len(form.entries) == rank < len(repeats):
        form = form.pick(*(None,) * (len(repeats) - rank), *range(rank))
    if len(form.entries) != len(repeats):
        return {name: wanted(record.inputs)}
    lead = len(repeats) - rank
    own = form.pick(*(lead + i if repeats[lead + i] == 1 else None for i in range(rank)))
    return {name: wanted((own,), (form,))}


def one_hot(args: Args, attrs: Attrs) -> Tensor:
    """`axis` is where the classes go; on and off are the values."""
    indices, depth, on, off = args[:4]
    axis = attrs.get("axis", -1)
    classes = torch.arange(depth, device=indices.device)
    hit = indices.unsqueeze(axis) == (classes.unsqueeze(-1) if axis == 0 else classes)
    return torch.where(hit, on, off)


def spread_one_hot(record: Recorded) -> dict[str, Wanted]:
    """The recorded strategy speaks of the result; with one entry, of the indices alone."""
    form = record.inputs[0]
    if len(form.entries) == record.args[0].dim():
        form = form.pick(*range(len(form.entries)), None)
    flipped = record.attrs.get("axis", -1) == 0
    found = {}
    for operator, shapes in zip(record.operators, record.shapes, strict=True):
        if operator.op in ("eq", "where"):
            whole, turned = operator.results[0].shape, form.swapped() if flipped else form
            found[operator.name] = wanted([follow(turned, whole, shape) for shape in shapes])
    return found


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


def spread_attention(record: Recorded) -> dict[str, Wanted]:
    if record.attrs.get("enable_ring_attention"):
        raise NotMapped("ring attention: keys and values that stay sliced along the sequence")
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


# images


def convolution(args: Args, attrs: Attrs) -> Tensor:
    x, weight = args[:2]
    stride, dilation = pair(attrs.get("stride", 1)), pair(attrs.get("dilation", 1))
    mode, groups = attrs.get("pad_mode", "valid"), attrs.get("group", 1)
    if mode == "same" and stride == (1, 1):
        return F.conv2d(x, weight, padding="same", dilation=dilation, groups=groups)
    if mode == "same":
        raise NotMapped("Conv2D with pad_mode same and a stride")
    padding = pair(attrs.get("pad", 0)) if mode == "pad" else (0, 0)
    return F.conv2d(x, weight, None, stride, padding, dilation, groups)


def pair(value: Any) -> tuple[int, int]:
    numbers = value if isinstance(value, list) else [value]
    return (numbers[-1], numbers[-1]) if len(numbers) != 2 else (numbers[0], numbers[1])


def pool(function: Callable[..., Tensor]) -> Counterpart:
    """Without padding, as `valid` is the default."""

    def compute(args: Args, attrs: Attrs) -> Tensor:
        if attrs.get("pad_mode", "valid").lower() != "valid":
            raise NotMapped("a pool with pad_mode same")
        return function(args[0], pair(attrs.get("kernel_size", 1)), pair(attrs.get("strides", 1)))

    return Counterpart(compute)


# reductions and losses


def reduction(function: Callable[..., Any]) -> Counterpart:
    """Over the recorded dims; none, or an empty list, means all of them."""

    def compute(args: Args, attrs: Attrs) -> Any:
        dims, keep = option(args, attrs, 1, "axis", None), option(args, attrs, 2, "keep_dims", False)
        dims = list(range(args[0].dim())) if dims is None or dims == [] else dims
        return function(args[0], dims, keepdim=bool(keep))

    return Counterpart(compute)


def arg_max(args: Args, attrs: Attrs) -> tuple[Tensor, Tensor]:
    values, indices = args[0].max(attrs.get("axis", 0), keepdim=attrs.get("keep_dims", False))
    return indices, values


def cross_entropy(args: Args, attrs: Attrs) -> tuple[Tensor, Tensor]:
    """The loss per row, and its gradient with regard to the scores."""
    scores, target = args[:2]
    return F.cross_entropy(scores, target, reduction="none"), scores.softmax(-1) - target


def spread_cross_entropy(record: Recorded) -> dict[str, Wanted]:
    return {o.name: wanted(record.inputs) for o in record.operators if o.op == "cross_entropy_loss"}


def sparse_loss(args: Args, attrs: Attrs) -> Tensor:
    scores, target = args[:2]
    if attrs.get("sparse"):
        target = torch.where(target.unsqueeze(-1) == torch.arange(scores.shape[-1], device=scores.device), 1.0, 0.0)
        target = target.to(scores.dtype)
    return F.cross_entropy(scores, target, reduction=attrs.get("reduction", "none"))


def spread_sparse_loss(record: Recorded) -> dict[str, Wanted]:
    """Strategies of its two parts stand in attributes."""
    found = {}
    for operator, shapes in zip(record.operators, record.shapes, strict=True):
        loss, hot = (record.attrs.get(f"shard.{part}") for part in ("softmax_cross_entropy", "one_hot"))
        if operator.op == "cross_entropy_loss" and loss:
            found[operator.name] = wanted([Form(tuple(entry)) for entry in loss])
        elif operator.op in ("eq", "where") and hot:
            whole = tuple(record.args[0].shape)
            found[operator.name] = wanted([follow(Form(tuple(hot[0])), whole, shape) for shape in shapes])
    return found


def cast(args: Args, attrs: Attrs) -> Tensor:
    """To another kind of numbers; among floating types a copy, for precision is not what is compared."""
    name = str(option(args, attrs, 1, "dtype", "float32")).removeprefix("dtype.")
    dtype = getattr(torch, {"bool_": "bool"}.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise NotMapped(f"Cast to {name}")
    return args[0].to(args[0].dtype if dtype.is_floating_point and args[0].is_floating_point() else dtype, copy=True)


def element(args: Args, attrs: Attrs) -> Tensor:
    """One of several results, or one row."""
    chosen: Tensor = args[0][attrs.get("index", 0)]
    return chosen


def normalised(args: Args, attrs: Attrs) -> Tensor:
    return F.normalize(args[0], dim=attrs.get("axis", 0))


def softmax(args: Args, attrs: Attrs) -> Tensor:
    axis = attrs.get("axis", attrs.get("arg0", -1))
    return F.softmax(args[0], axis[0] if isinstance(axis, list) else axis)


def reshape(args: Args, attrs: Attrs) -> Tensor:
    if 0 < math.prod(args[1]) != args[0].numel() and -1 not in args[1]:
        raise NotMapped(f"Reshape of {tuple(args[0].shape)} to {args[1]}, which has another number of elements")
    return args[0].reshape(args[1])


ADD, SUB, MUL = binary(torch.add), binary(torch.sub), binary(torch.mul)
DIVIDE = binary(torch.div, "positive")
MATMUL = Counterpart(product, spread_product)
ROWS = Counterpart(table_rows, spread_rows, indices=(1,))
SUM = reduction(torch.sum)
STACK = Counterpart(lambda args, attrs: torch.stack(args[0], attrs.get("axis", attrs.get("arg0", 0))))

TABLE: Mapping[str, Counterpart] = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "MatMulExt", "BatchMatMulExt"), MATMUL),
    **dict.fromkeys(("Gather", "GatherV2", "EmbeddingLookup"), ROWS),
    **dict.fromkeys(("Add", "TensorAdd", "AddExt"), ADD),
    **dict.fromkeys(("Sub", "SubExt"), SUB),
    **dict.fromkeys(("Div", "RealDiv"), DIVIDE),
    **dict.fromkeys(("ReLU", "nn.ReLU"), unary(F.relu)),
    **dict.fromkeys(("GeLU", "nn.GELU"), unary(F.gelu)),
    **dict.fromkeys(("ReduceSum", "SumExt"), SUM),
    **dict.fromkeys(("ReduceMean", "MeanExt"), reduction(torch.mean)),
    **dict.fromkeys(("Stack", "Pack"), STACK),
    "Mul": MUL,
    "Maximum": binary(torch.maximum),
    "Minimum": binary(torch.minimum),
    "FloorDiv": binary(lambda x, y: torch.div(x, y, rounding_mode="floor"), "positive"),
    "Pow": binary(torch.pow, "positive"),
    "Less": binary(torch.lt),
    "LessEqual": binary(torch.le),
    "Greater": binary(torch.gt),
    "GreaterEqual": binary(torch.ge),
    "Equal": binary(torch.eq),
    "NotEqual": binary(torch.ne),
    "LogicalAnd": binary(torch.logical_and),
    "LogicalOr": binary(torch.logical_or),
    "LogicalNot": unary(torch.logical_not),
    "Abs": unary(torch.abs),
    "Ceil": unary(torch.ceil),
    "Cos": unary(torch.cos),
    "Erf": unary(torch.erf),
    "Exp": unary(torch.exp),
    "Floor": unary(torch.floor),
    "Log": unary(torch.log, "positive"),
    "Neg": unary(torch.neg),
    "OnesLike": unary(torch.ones_like),
    "Reciprocal": unary(torch.reciprocal, "positive"),
    "Round": unary(torch.round),
    "Rsqrt": unary(torch.rsqrt, "positive"),
    "Sigmoid": unary(torch.sigmoid),
    "Sign": unary(torch.sign),
    "SiLU": unary(F.silu),
    "Sin": unary(torch.sin),
    "Sqrt": unary(torch.sqrt, "positive"),
    "Square": unary(torch.square),
    "Tanh": unary(torch.tanh),
    "ZerosLike": unary(torch.zeros_like),
    "Select": Counterpart(lambda args, attrs: torch.where(args[0], args[1], args[2])),
    "BiasAdd": Counterpart(bias_add, spread_bias),
    "Cast": Counterpart(cast),
    "getitem": Counterpart(element),
    "Reshape": Counterpart(reshape),
    "nn.Flatten": Counterpart(lambda args, attrs: args[0].flatten(1)),
    "Transpose": Counterpart(lambda args, attrs: args[0].permute(args[1])),
    "ExpandDims": Counterpart(lambda args, attrs: args[0].unsqueeze(args[1])),
    "Squeeze": Counterpart(lambda args, attrs: args[0].squeeze(attrs["axis"]) if "axis" in attrs else args[0].squeeze()),
    "BroadcastTo": Counterpart(lambda args, attrs: args[0].expand(option(args, attrs, 1, "shape", None))),
    "Concat": Counterpart(lambda args, attrs: torch.cat(args[0], attrs.get("axis", attrs.get("arg0", 0)))),
    "Split": Counterpart(lambda args, attrs: args[0].chunk(attrs["output_num"], attrs.get("axis", 0))),
    "Tile": Counterpart(lambda args, attrs: args[0].repeat(args[1]), spread_tile),
    "StridedSlice": Counterpart(strided_slice, spread_strided_slice, read_first),
    "CumsumExt": Counterpart(lambda args, attrs: args[0].cumsum(args[1])),
    "CumSum": Counterpart(lambda args, attrs: args[0].cumsum(args[1])),
    "TopK": Counterpart(lambda args, attrs: tuple(args[0].topk(args[1]))),
    "ArgMaxWithValue": Counterpart(arg_max),
    "ReduceMax": reduction(torch.amax),
    "ReduceMin": reduction(torch.amin),
    "OneHot": Counterpart(one_hot, spread_one_hot, indices=(0,)),
    "Softmax": Counterpart(softmax),
    "LayerNorm": Counterpart(layer_norm, spread_layer_norm, results=1),
    "RmsNorm": Counterpart(rms_norm, spread_rms_norm),
    "L2Normalize": Counterpart(normalised, aligned, read_first),
    "Conv2D": Counterpart(convolution),
    "MaxPool": pool(F.max_pool2d),
    "AvgPool": pool(F.avg_pool2d),
    "FlashAttentionScore": Counterpart(attention, spread_attention),
    "SoftmaxCrossEntropyWithLogits": Counterpart(cross_entropy, spread_cross_entropy, results=1),
    "nn.SoftmaxCrossEntropyWithLogits": Counterpart(sparse_loss, spread_sparse_loss, indices=(1,)),
    "VirtualLoss": Counterpart(lambda args, attrs: args[0].sum()),
}
