"""The torch counterpart of every recorded operator, as data: how it is computed, and how a recorded strategy reads in
torch's operand order.

Invariant: a counterpart computes what the recorded operator computes, in double precision (a cast between floating
types stays an operator, but changes nothing, so that numbers can be compared). An operator missing here is reported
as not mapped, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.conformance.contractions import (
    attention,
    bias_add,
    layer_norm,
    product,
    rms_norm,
    spread_attention,
    spread_bias,
    spread_layer_norm,
    spread_product,
    spread_rms_norm,
    spread_rows,
    table_rows,
)
from tests.conformance.forms import Args, Attrs, Counterpart, NotMapped, aligned, option, read_first
from tests.conformance.selections import (
    arg_max,
    cast,
    convolution,
    cross_entropy,
    element,
    normalised,
    one_hot,
    pool,
    reduction,
    reshape,
    softmax,
    sparse_loss,
    spread_cross_entropy,
    spread_one_hot,
    spread_sparse_loss,
    spread_strided_slice,
    spread_tile,
    strided_slice,
)


def unary(function: Callable[[Tensor], Tensor], domain: str = "") -> Counterpart:
    return Counterpart(lambda args, attrs: function(args[0]), domain=domain)


def binary(function: Callable[[Any, Any], Tensor], domain: str = "") -> Counterpart:
    def compute(args: Args, attrs: Attrs) -> Tensor:
        if any(isinstance(argument, str) for argument in args):
            raise NotMapped("an argument whose value is not recorded")
        return function(args[0], args[1])

    return Counterpart(compute, domain=domain)


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
    "Squeeze": Counterpart(lambda args, attrs: args[0].squeeze(attrs.get("axis", tuple(range(args[0].dim()))))),
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
