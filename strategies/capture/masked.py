"""What a boolean mask selects, `x[mask]`, in a captured graph: the complete tensor and the mask, up to a reduction.

How many elements a mask selects is known in a step alone, so no graph has them. A function of elements or of rows
computes the same of the complete tensor. A sum or a mean over what was selected is one over the complete tensor with
zeros in place of the rest, and a mean divides by what the mask counts, in the global batch. So values and gradients are
eager's, the NaN of an empty mean included. What is not selected takes part in nothing: a constant is in its place
before each function, so that no infinity of it reaches the gradient of an operand that rows share.

Invariant: torch's own result is traced beside it, for all that is not known here; it is dropped if nothing needs it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.capture.constants import behind, traced

NOT_KNOWN = object()
"""Of what a function returns for selected elements."""
LINEAR: dict[Any, Callable[..., Tensor]] = {
    getattr(Tensor, form.format(name)): getattr(torch, name)
    for name in ("add", "sub", "mul")
    for form in ("{}", "{}_", "__{}__", "__i{}__")
} | {getattr(Tensor, name): torch.div for name in ("div", "div_", "__truediv__", "__itruediv__")}
"""What may be done to selected elements with a number, in place too."""
MOVING = frozenset("clone contiguous detach to type float double half bfloat16 long int bool neg negative".split())
"""Functions that no element makes infinite."""
ELEMENTS = MOVING | frozenset(
    """
    abs absolute add and asin atan bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip
    cos cosh div divide elu eq erf exp exp2 expm1 floor ge gelu greater gt hardsigmoid hardswish hardtanh invert
    isfinite isinf isnan le leaky_relu less log log10 log1p log2 log_sigmoid logaddexp logical_and logical_not
    logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish mul multiply nan_to_num ne not_equal or
    pow radd rand rdiv reciprocal relu relu6 rmul ror round rpow rsqrt rsub rtruediv selu sigmoid sign silu sin sinh
    softplus sqrt square sub subtract tan tanh true_divide truediv type_as where xlogy xor
    """.split()
)
"""Functions of elements of operands that broadcast, by name without underscores."""
OVER_DIMS = dict.fromkeys(
    "amax amin argmax argmin flatten gather glu log_softmax logsumexp mean softmax squeeze sum unsqueeze".split(), 1
) | {"norm": 2, "normalize": 2, "cosine_similarity": 2}
"""Functions over the dims that an argument at a position says; of each row by itself if that is not the first."""
PAIRS = {"cosine_similarity": 1, "gather": 2}
"""Where the second operand of these is, which is selected, too."""
ROWS = frozenset("linear one_hot layer_norm rms_norm".split())
"""Functions of each row by itself, and of tensors that rows share."""
LOSSES = frozenset(
    getattr(functional, name)
    for name in """
    binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div l1_loss mse_loss
    poisson_nll_loss smooth_l1_loss soft_margin_loss
    """.split()
)
"""Losses of elements."""
CLASSES = (functional.cross_entropy, functional.nll_loss)
FINDING = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)
SAME_PLACES = frozenset("flatten long ravel reshape squeeze to view".split())
"""Functions whose one-dimensional results have the elements that they are given."""


@dataclass
class Selected:
    """What `dense[mask]` returned, or a function of it, and how often these had been written by then."""

    result: Tensor
    mask: Tensor
    dense: Tensor
    layered: bool = False
    """Whether rows went through a layer with parameters, as of an expert."""
    versions: tuple[int, ...] = ()
    _safe: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = _versions(self.result, self.mask, self.dense)

    @property
    def is_current(self) -> bool:
        return self.versions == _versions(self.result, self.mask, self.dense)

    def filled(self, value: float) -> Tensor:
        """`dense` with a number in place of what is not selected."""
        rest = (1,) * (self.dense.dim() - self.mask.dim())
        if self.dense.dtype is torch.bool:
            return self.dense & self.mask.reshape(*self.mask.shape, *rest)
        return torch.where(self.mask.reshape(*self.mask.shape, *rest), self.dense, value)

    @property
    def safe(self) -> Tensor:
        """`dense` with a number that no usual function makes infinite, nor its derivative, in place of the rest."""
        if not self._safe:
            self._safe.append(self.filled(0.5 if self.dense.is_floating_point() else 0))
        return self._safe[0]

    def rows(self, dense: Tensor) -> Tensor:
        """A tensor like `dense` with one dim in place of those of the mask."""
        return dense.flatten(0, self.mask.dim() - 1) if self.mask.dim() > 1 else dense


@dataclass(frozen=True)
class Places:
    """Where a mask is true: the indices along its dim `dim`, or a column for every dim where that is None."""

    result: Tensor
    mask: Tensor
    dim: int | None
    versions: tuple[int, ...]

    @property
    def is_current(self) -> bool:
        return self.versions == _versions(self.result, self.mask)


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)


class Selections:
    """What masks have selected so far in a forward."""

    def __init__(self) -> None:
        self.known: dict[int, Selected] = {}
        """By the id of the result, which is alive."""
        self.places: dict[int, Places] = {}
        """Likewise."""

    def of(self, value: Any) -> Selected | None:
        known = self.known.get(id(value))
        return known if known is not None and known.is_current else None

    def select(self, function: Any, tensor: Tensor, mask: Tensor) -> Tensor:
        """`function` of a tensor and a mask: `x[mask]`, or torch.masked_select, which takes single elements."""
        if function is not Tensor.__getitem__:
            shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
            tensor, mask = tensor.expand(shape), mask if mask.shape == shape else mask.expand(shape)
        same = (one.mask for one in self.known.values() if one.is_current and _equal(one.mask, mask))
        mask = next(same, mask)  # of which torch knows how many elements it selects
        result: Tensor = function(tensor, mask)
        if isinstance(result.shape[0], torch.SymInt):
            self._note(result, mask, tensor)
        return result

    def find(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What a function returns that finds the elements of a tensor which are not zero."""
        result, tensor = function(*args, **kwargs), args[0] if args else kwargs["input"]
        columns = result if isinstance(result, (tuple, list)) else [result]
        if tensor.dim() and isinstance(columns[0].shape[0], torch.SymInt):
            mask = tensor if tensor.dtype is torch.bool else tensor != 0
            for dim, column in enumerate(columns):
                self._note_places(column, mask, dim if columns is result else None)
        return result

    def mask_of(self, tensor: Tensor, index: Sequence[Any]) -> Tensor | None:
        """The mask that selects what an index of a tensor does, which is its places; None if there is none."""
        known = [one for part in index if (one := self.places.get(id(part))) is not None and one.is_current]
        if not known or len(known) < len(index):
            return None
        mask = known[0].mask
        fits = tensor.shape[: mask.dim()] == mask.shape and [one.dim for one in known] == [*range(mask.dim())]
        return mask if fits and all(_equal(one.mask, mask) for one in known[1:]) else None

    def column(self, known: Places, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What a function of places returns, which may be the places along one dim."""
        result, count = function(*args, **kwargs), known.mask.dim()
        if isinstance(result, Tensor) and result.dim() == 1 and result.dtype is torch.int64:
            if getattr(function, "__name__", "") in SAME_PLACES and (known.dim is not None or count == 1):
                self._note_places(result, known.mask, known.dim or 0)
            elif function is Tensor.__getitem__ and known.dim is None and args[1][0] in (slice(None), ...):
                if len(args[1]) == 2 and type(args[1][1]) is int:
                    self._note_places(result, known.mask, args[1][1] % count)
        return result

    def _note_places(self, result: Tensor, mask: Tensor, dim: int | None) -> None:
        self.places[id(result)] = Places(result, mask, dim, _versions(result, mask))

    def choose(self, tensor: Tensor, mask: Tensor, value: Any) -> None:
        """`tensor[mask] = value`, by a choice where the same mask has selected the value."""
        known = self.of(value)
        same = known is not None and _equal(known.mask, mask) and known.dense.shape == tensor.shape
        if known is None or not same or known.layered or known.dense.dtype != tensor.dtype:
            tensor[mask] = value  # a loop over experts computes the rows of each: no expert is for all rows
        else:
            chosen = mask.reshape(*mask.shape, *(1,) * (tensor.dim() - mask.dim()))
            tensor.copy_(torch.where(chosen, known.dense, tensor))

    def through(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What a function of selected elements returns, or NOT_KNOWN."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [one for tensor in tensors if (one := self.of(tensor)) is not None]
        if not known or any(one.mask is not known[0].mask for one in known) or _writes(function, args, kwargs):
            return NOT_KNOWN
        if function in LINEAR and len(args) == 2 and not kwargs and args[0] is known[0].result:
            if type(args[1]) in (int, float):
                return self._both(function, args, kwargs, known[0], LINEAR[function](known[0].dense, args[1]))
        others = [tensor for tensor in tensors if self.of(tensor) is None]
        if any(isinstance(size, torch.SymInt) for tensor in others for size in tensor.shape):
            return NOT_KNOWN
        name = getattr(function, "__name__", "")
        name = "" if name.endswith("_") and not name.endswith("__") else name.strip("_")
        aligned = len({one.result.dim() for one in known}) == 1
        aligned = aligned and all(tensor.dim() < known[0].result.dim() for tensor in others)
        if name in ELEMENTS and aligned:
            dense = function(*self._dense(args, raw=name in MOVING), **self._dense(kwargs))
            return self._both(function, args, kwargs, known[0], dense, layered=any(one.layered for one in known))
        if function in CLASSES or (function in LOSSES and aligned):
            return self._loss(function, args, kwargs)
        first = bool(args) and self.of(args[0]) is known[0]
        if name in OVER_DIMS and first:
            return self._over_dims(name, function, args, kwargs, known)
        if first and len(known) == 1 and (name in ROWS or _takes_rows(function, args, kwargs)):
            dense = function(*self._dense(args, rows=True), **self._dense(kwargs, rows=True))
            dense = dense.unflatten(0, known[0].mask.shape)
            return self._both(function, args, kwargs, known[0], dense, layered=name == "linear")
        return NOT_KNOWN

    def count(self, number: torch.SymInt) -> Any:
        """What a mask counts, where a number says how many elements it has selected; else the number."""
        counts = (one for one in self.known.values() if one.is_current and _is_size(one.result.shape[0], number))
        return next((one.mask.sum() for one in counts), number)

    def _note(self, result: Tensor, mask: Tensor, dense: Tensor, layered: bool = False) -> None:
        self.known[id(result)] = Selected(result, mask, dense, layered)

    def _both(
        self, function: Any, args: Any, kwargs: Any, like: Selected, dense: Tensor, layered: bool = False
    ) -> Tensor:
        """torch's own result, known to be selected of `dense` if that has its shape."""
        result: Tensor = function(*args, **kwargs)
        if dense.dtype == result.dtype and dense.shape == (*like.mask.shape, *result.shape[1:]):
            self._note(result, like.mask, dense, layered or like.layered)
        return result

    def _dense(self, nested: Any, *, rows: bool = False, raw: bool = False) -> Any:
        """Arguments with complete tensors in place of what is selected of them."""

        def dense(tensor: Tensor) -> Tensor:
            if (one := self.of(tensor)) is None:
                return tensor
            complete = one.dense if raw else one.safe
            return one.rows(complete) if rows else complete

        return tree_map_only(Tensor, dense, nested)

    def _over_dims(self, name: str, function: Any, args: Any, kwargs: Any, known: Sequence[Selected]) -> Any:
        one, position = known[0], OVER_DIMS[name]
        given = kwargs.get("dim", args[position] if len(args) > position else None)
        rank = one.result.dim() + (name == "unsqueeze")
        every = range(rank) if name in ("sum", "mean") and "axis" not in kwargs else []
        dims = [given] if isinstance(given, int) else list(given or every)
        dims = [dim % rank for dim in dims if isinstance(dim, int) and -rank <= dim < rank]
        second = PAIRS.get(name, 0)
        if not dims or len(known) > 2 or len(args) <= second or self.of(args[second]) is not known[-1]:
            return NOT_KNOWN
        if 0 not in dims:
            dense = function(*self._dense(args, rows=True), **self._dense(kwargs, rows=True))
            return self._both(function, args, kwargs, one, dense.unflatten(0, one.mask.shape))
        if name not in ("sum", "mean") or kwargs.keys() - {"dim", "keepdim"} or len(args) > position + 1:
            return NOT_KNOWN
        if name == "mean" and not one.dense.is_floating_point():
            return NOT_KNOWN
        return _reduced(one, name, dims, bool(kwargs.get("keepdim", False)))

    def _loss(self, function: Any, args: Any, kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        one, reduction = self.of(given["input"]), given["reduction"]
        old = given.get("size_average"), given.get("reduce")
        if one is None or self.of(given["target"]) is None or old != (None, None):
            return NOT_KNOWN
        dense = self._dense(given, rows=True)
        target = self.of(given["target"])
        assert target is not None
        if function in CLASSES and target.dense.dtype is torch.int64 and reduction != "none":
            dense["target"] = target.rows(target.filled(given["ignore_index"]))
            return function(**dense)
        losses = function(**dense | {"reduction": "none"})
        result = function(**given | {"reduction": "none"})
        losses = losses.unflatten(0, one.mask.shape)
        if losses.dtype != result.dtype or losses.shape != (*one.mask.shape, *result.shape[1:]):
            return NOT_KNOWN
        selected = Selected(result, one.mask, losses)
        if reduction == "none":
            self.known[id(result)] = selected
            return result
        if reduction == "batchmean":
            return _reduced(selected, "sum", range(result.dim()), False) / one.mask.sum()
        return _reduced(selected, reduction, range(result.dim()), False)


def _reduced(one: Selected, name: str, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The sum or the mean of selected elements over dims, of which the first is one."""
    zeros, over = one.rows(one.filled(0)), list(dims)
    if name == "sum":
        return zeros.sum(over, keepdim)
    count, each = one.mask.sum(), prod(int(zeros.shape[dim]) for dim in over if dim)
    count = count * each if each > 1 else count
    if zeros.dtype in (torch.bfloat16, torch.float16):  # which do not count far
        return (zeros.sum(over, keepdim, dtype=torch.float32) / count).to(zeros.dtype)
    return zeros.sum(over, keepdim) / count


def _takes_rows(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call indexes other dims than the first, or gives these another shape."""
    rank, rest = args[0].dim(), args[1:]
    if function is Tensor.__getitem__ and isinstance(rest[0], tuple):
        plain = all(part is None or part is Ellipsis or type(part) in (int, slice) for part in rest[0])
        taken = sum(type(part) in (int, slice) for part in rest[0])
        return plain and (rest[0][0] == slice(None) or (rest[0][0] is Ellipsis and taken < rank))
    if getattr(function, "__name__", "") in ("view", "reshape") and not kwargs:
        shape = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
        sizes = [*shape[1:], *args[0].shape[1:]]
        whole = all(type(size) is int for size in sizes)
        return bool(shape) and shape[0] == -1 and whole and prod(shape[1:]) == prod(args[0].shape[1:])
    return False


def _writes(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call returns its result in a tensor that it is given."""
    if not isinstance(function, FunctionType) or function.__module__ != functional.__name__:
        return "out" in kwargs
    return bool(inspect.signature(function).bind(*args, **kwargs).arguments.get("inplace"))


def _is_size(size: Any, number: torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr == number.node.expr)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether two masks are the same in every step: one tensor, or computed by the same operators, while none wrote."""
    if one is other:
        return True
    first, second = traced(one)[0], traced(other)[0]
    if first is None or second is None:
        return False
    pairs: list[fx.Node] = []
    if not _same(first.node, second.node, pairs):
        return False
    nodes = list(first.node.graph.nodes)
    places = [nodes.index(node) for node in pairs]
    between = behind(first.node, nodes) & {*nodes[min(places) : max(places)]}
    return not any(isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in between)


def _same(one: Any, other: Any, pairs: list[fx.Node]) -> bool:
    """Whether two arguments are the same, or computed alike by operators, which are added to `pairs`."""
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(partial(_same, pairs=pairs), one, other))
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node) or one is other:
        return type(one) is type(other) and bool(one == other)
    pairs += [one, other]
    drawn = torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ())
    called = one.op == other.op == "call_function" and one.target == other.target and not drawn
    keywords = [sorted(node.kwargs.items()) for node in (one, other)]
    return called and _same([*one.args, *keywords[0]], [*other.args, *keywords[1]], pairs)
