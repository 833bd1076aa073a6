"""What a boolean mask selects, `x[mask]`, in a captured graph: the complete tensor and the mask, up to a reduction.

How many elements a mask selects is known in a step alone, so no graph has them. A function of elements or of rows
computes the same of the complete tensor. A sum or a mean over what was selected is one over the complete tensor with
zeros in place of the rest, and a mean divides by what the mask counts, in the global batch. So values and gradients are
eager's, the NaN of an empty mean included. Unselected elements take part in nothing: a constant is in its place
before each function, so that no infinity of it reaches the gradient of an operand that rows share. An extreme is one
with infinities in place of the rest, which torch refuses of no elements. Rows that are put one behind the other are
what the mask of all their elements selects. What Python computes from how many are selected (`len(x[mask]) > 0`,
`loss / max(len(x[mask]), 1)`) is computed from what the mask counts.

Invariant: torch's own result is traced beside it, for all that is not known here; it is dropped if nothing needs it.
Where torch refuses to trace it without knowing how many are selected, it is what the mask selects of the complete one.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.capture.constants import behind, traced
from strategies.capture.nodes import op_of

SELECTIONS: list[Selections] = []
"""Of the forwards that are traced now, the innermost last."""
STOPS = "stops"
"""What a node that goes on with selected elements says of itself, where it is none of a known function: its name."""
NOT_KNOWN = object()
"""Of what a function returns for selected elements."""
LINEAR: dict[Any, Callable[..., Tensor]] = {
    getattr(Tensor, form.format(name)): getattr(torch, name)
    for name in ("add", "sub", "mul")
    for form in ("{}", "{}_", "__{}__", "__i{}__")
} | {getattr(Tensor, name): torch.div for name in ("div", "div_", "__truediv__", "__itruediv__")}
"""What may be done to selected elements with a number, and in place with a selected or shared tensor."""
MOVING = frozenset("clone contiguous detach to type float double half bfloat16 long int bool neg negative".split())
"""Functions that no element makes infinite."""
ELEMENTS = MOVING | frozenset(
    """
    abs absolute acos add addcdiv addcmul and arccos arcsin arctan arctan2 asin asinh atan atan2 bitwise_and
    bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clip copysign cos cosh deg2rad div divide
    elu eq erf erfc exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac full_like ge gelu greater
    greater_equal gt hardshrink hardsigmoid hardswish hardtanh hypot invert isclose isfinite isinf isnan le leaky_relu
    lerp less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not
    logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish mod mul multiply nan_to_num ne
    not_equal ones_like or pow rad2deg radd rand rdiv reciprocal relu relu6 remainder rmul ror round rpow rsqrt rsub
    rtruediv selu sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh
    tanhshrink threshold true_divide truediv trunc type_as where xlogy xor zeros_like
    """.split()
)
"""Functions of elements of operands that broadcast, by name without underscores."""
DIVIDING = frozenset("floor_divide fmod mod remainder".split())
"""Those that fail on integers where the second operand is 0, as unselected elements are."""
OVER_DIMS = dict.fromkeys(
    """
    all amax amin any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum flatten flip gather glu
    log_softmax logcumsumexp logsumexp max mean median min nanmean nansum prod softmax softmin sort squeeze std sum
    unflatten unsqueeze var
    """.split(),
    1,
) | dict.fromkeys(
    "cosine_similarity cross kthvalue linalg_cross linalg_norm linalg_vector_norm norm normalize topk".split(), 2
)
"""Functions over the dims that an argument at a position says; of each row by itself if that is not the first."""
DEFAULT_DIMS = {
    "cosine_similarity": 1,
    "normalize": 1,
    **dict.fromkeys(("argsort", "glu", "linalg_cross", "sort", "topk"), -1),
}
"""The dim that these take where none is said."""
OVER_ALL = frozenset({"count_nonzero", "linalg_norm", "linalg_vector_norm", "mean", "norm", "prod", "sum"})
"""Those that take all dims then."""
PAIRS = {"cosine_similarity": 1, "cross": 1, "gather": 2, "linalg_cross": 1}
"""Where the second operand of these is, which is selected, too."""
JOINING = {"cat": 0, "concat": 0, "concatenate": 0, "stack": 1}
"""Functions that join a list of tensors along a dim, and how many dims the result has more."""
MAKING = frozenset("new_empty new_full new_ones new_tensor new_zeros".split())
"""Functions that take no more of a tensor than its dtype and device."""
FACTORIES = frozenset({torch.full, torch.ones, torch.zeros})
EXPANDING = frozenset("broadcast_to expand expand_as repeat".split())
PARTS = {"chunk": 2, "split": 2, "tensor_split": 2, "unbind": 1}
"""Functions that return parts along the dim that an argument at a position says."""
ROWS = frozenset("cdist linear one_hot layer_norm rms_norm".split())
"""Functions of each row by itself, and of tensors that rows share."""
PRODUCTS = frozenset({"matmul", "mm"})
"""Likewise, where the second operand is a matrix or a vector."""
FILLS = {
    **dict.fromkeys(("log_softmax", "logsumexp", "softmax"), -torch.inf),
    **dict.fromkeys(("count_nonzero", "linalg_norm", "linalg_vector_norm", "norm", "normalize"), 0),
    "prod": 1,
}
"""What may stand for the rest where these take all that is selected, in any order: that of packed sequences is not that
of the mask."""
LOSSES = frozenset(
    getattr(functional, name)
    for name in """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss gaussian_nll_loss hinge_embedding_loss
    huber_loss kl_div l1_loss margin_ranking_loss mse_loss multilabel_soft_margin_loss poisson_nll_loss smooth_l1_loss
    soft_margin_loss triplet_margin_loss
    """.split()
)
"""Losses of elements or rows, of which they take the sum or the mean."""
CLASSES = (functional.cross_entropy, functional.nll_loss)
EXTREMES = {"max": -torch.inf, "amax": -torch.inf, "topk": -torch.inf, "min": torch.inf, "amin": torch.inf}
"""Functions that take the largest or the smallest elements, and a number that is none of these."""
DEVIATIONS = frozenset({"std", "var"})
COMBINED: dict[str, Callable[..., Any]] = {
    "Add": lambda *terms: reduce(operator.add, terms),
    "Mul": lambda *terms: reduce(operator.mul, terms),
    "Max": lambda *terms: reduce(_larger, terms),
    "Min": lambda *terms: -reduce(_larger, [-one for one in terms]),
    "ToFloat": lambda one: one.double() if isinstance(one, Tensor) else float(one),
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
}
"""Expressions of sizes, by sympy's names, as operators."""
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
    viewed: tuple[Tensor, Any] | None = None
    """The result of which this one is a view, and the index of all rows that made it."""
    joined: tuple[Tensor, ...] = ()
    """The masks that `mask` concatenates, in order."""
    pieces: tuple[Tensor, ...] = ()
    """Right after a concatenation, the complete tensor of each part."""
    versions: tuple[int, ...] = ()
    _safe: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = _versions(self.result, self.mask, self.dense)

    @property
    def is_current(self) -> bool:
        return self.versions == _versions(self.result, self.mask, self.dense)

    def filled(self, value: float) -> Tensor:
        """`dense` with a number in place of unselected elements."""
        if self.dense.dtype is torch.bool:
            return self.dense & self.spread
        return torch.where(self.spread, self.dense, value)

    @property
    def count(self) -> Tensor:
        """How many rows are selected. Concatenated masks of the same rows of a batch are added row by row, so that
        each micro-batch can count its own."""
        if len({len(mask) for mask in self.joined}) != 1:
            return self.mask.sum()
        return _of_rows(self.joined).sum()

    @property
    def spread(self) -> Tensor:
        """The mask, with as many dims as `dense`."""
        return self.mask.reshape(*self.mask.shape, *(1,) * (self.dense.dim() - self.mask.dim()))

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


@dataclass
class Selections:
    """What masks have selected so far in a forward."""

    known: dict[int, Selected] = field(default_factory=dict)
    """By the id of the result, which is alive."""
    places: dict[int, Places] = field(default_factory=dict)
    """Likewise."""
    packed: list[Any] = field(default_factory=list)
    """What was packed (`packed_sequences`)."""
    layers: bool = False
    """Whether rows are written back that went through a layer, which then computes all rows: of a loop over experts no
    expert is for all rows, so only where nothing else captures the forward."""
    left: bool = False
    """Whether such rows were not followed."""
    tried: bool = False
    """Whether `layers` has been true."""

    def widen(self) -> bool:
        """Follow rows that went through a layer from now on; False where there are none, or that was tried in vain."""
        self.layers = self.left and not self.tried
        self.tried |= self.layers
        return self.layers

    def now(self) -> Selections:
        return Selections(dict(self.known), dict(self.places), [*self.packed])

    def restore(self, before: Selections) -> None:
        self.known, self.places, self.packed = dict(before.known), dict(before.places), [*before.packed]

    def of(self, value: Any) -> Selected | None:
        known = self.known.get(id(value))
        return known if known is not None and known.is_current else None

    def select(self, function: Any, tensor: Tensor, mask: Tensor) -> Tensor:
        """`function` of a tensor and a mask: `x[mask]`, or torch.masked_select, which takes single elements."""
        if function is not Tensor.__getitem__:
            shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
            tensor, mask = tensor.expand(shape), mask if mask.shape == shape else mask.expand(shape)
        mask = self._known(mask)
        result: Tensor = function(tensor, mask)
        if isinstance(result.shape[0], torch.SymInt):
            self._note(result, mask, tensor)
        return result

    def _known(self, mask: Tensor) -> Tensor:
        """An equal mask that was used before, of which torch knows how many elements it selects; else this one."""
        same = (one.mask for one in self.known.values() if one.is_current and equal_masks(one.mask, mask))
        return next(same, mask)

    def shorten(self, mask: Tensor, shorter: Tensor) -> None:
        """Let `shorter` select what `mask` does, of which it is the beginning."""
        for name, one in self.known.items():
            if one.is_current and equal_masks(one.mask, mask):
                self.known[name] = Selected(one.result, shorter, one.dense[: len(shorter)], one.layered)

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
        return mask if fits and all(equal_masks(one.mask, mask) for one in known[1:]) else None

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
        same = known is not None and equal_masks(known.mask, mask) and known.dense.shape == tensor.shape
        self.left |= known is not None and known.layered
        if known is None or not same or known.dense.dtype != tensor.dtype or (known.layered and not self.layers):
            tensor[mask] = value
        else:
            chosen = mask.reshape(*mask.shape, *(1,) * (tensor.dim() - mask.dim()))
            tensor.copy_(torch.where(chosen, known.dense, tensor))

    def through(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What a function of selected elements returns, or NOT_KNOWN."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = [one for tensor in tensors if (one := self.of(tensor)) is not None]
        if function in FACTORIES or getattr(function, "__name__", "") in MAKING:
            return self._made(function, args, kwargs)
        if known and joins_rows(getattr(function, "__name__", ""), args, kwargs):
            return self._concatenated(function, args, kwargs)
        if not known or any(one.mask is not known[0].mask for one in known) or _writes(function, args, kwargs):
            return NOT_KNOWN
        if function in LINEAR and len(args) == 2 and not kwargs and args[0] is known[0].result:
            other, in_place = args[1], re.fullmatch(r"\w*[a-z]_|__i\w+", function.__name__) is not None
            if type(other) in (int, float) or (in_place and self._is_along(other, known[0])):
                viewed = known[0].viewed
                base = None if viewed is None else self.of(viewed[0])
                dense = known[0].safe if isinstance(other, Tensor) else known[0].dense
                result = self._both(function, args, kwargs, known[0], LINEAR[function](dense, self._dense(other)))
                if viewed is not None and base is not None and result is known[0].result:  # written in place
                    self._note_written(base, viewed[1], self._dense(result, rows=True, raw=True), known[0].layered)
                return result
        others = [tensor for tensor in tensors if self.of(tensor) is None]
        if function is Tensor.__getitem__ and (looked_up := self._looked_up(args[0], args[1], known)) is not NOT_KNOWN:
            return looked_up
        if any(isinstance(size, torch.SymInt) for tensor in others for size in tensor.shape):
            return NOT_KNOWN
        name = getattr(function, "__name__", "")
        name = "" if name.endswith("_") and not name.endswith("__") else name.strip("_")
        aligned = len({one.result.dim() for one in known}) == 1
        aligned = aligned and all(_is_shared(tensor, known[0].result) for tensor in others)
        if name in ELEMENTS and not aligned and not self.packed and (placed := self._placed(known[0], others)):
            return self.through(function, *tree_map_only(Tensor, lambda one: placed.get(id(one), one), (args, kwargs)))
        larger = name in ("max", "min") and len(args) == 2 and isinstance(args[1], Tensor)
        by_zero = name in DIVIDING and any(not one.dense.is_floating_point() for one in known)
        if (name in ELEMENTS or larger) and aligned and not by_zero:
            dense = function(*self._dense(args, raw=name in MOVING), **self._dense(kwargs))
            return self._both(function, args, kwargs, known[0], dense, layered=any(one.layered for one in known))
        plain, shared = inspect.unwrap(function), all(_is_shared(tensor, known[0].result) for tensor in others)
        if plain in CLASSES or (plain in LOSSES and shared):
            return self._loss(function, args, kwargs)
        first = bool(args) and self.of(args[0]) is known[0]
        if name == "einsum" and not kwargs:
            return self._einsum(function, *args)
        if first and len(known) == 1 and (merged := merged_dims(name, args, kwargs)) > 1:
            one, result = known[0], function(*args, **kwargs)
            if all(size == 1 for size in one.result.shape[1:merged]):  # as squeeze does
                last = one.mask.dim() - 1
                self._note(result, one.mask, one.dense.flatten(last, last + merged - 1), one.layered)
                return result
            shape = (*one.mask.shape, *one.result.shape[1:merged])
            mask = one.mask.reshape(*one.mask.shape, *(1,) * (merged - 1)).expand(shape)
            self._note(result, self._known(mask), one.dense, one.layered)
            return result
        if name in ("bmm", "matmul", "pairwise_distance") and aligned and not others and len(known) == 2:
            if known[0].result.dim() == (2 if name == "pairwise_distance" else 3):
                return self._each(function, args, kwargs, known[0])
        if name in EXPANDING and first:
            return self._expanded(name, function, args, kwargs, known)
        if name == "broadcast_tensors" and aligned:
            return self._each(function, args, kwargs, known[0])
        if (name in JOINING and aligned and not others) or (name in PARTS and first):
            return self._along(name, function, args, kwargs, known)
        if first and len(known) == 1 and name in ("any", "all") and len(args) == 1 and not kwargs:
            return function(known[0].filled(0) if name == "any" else known[0].dense | ~known[0].spread)
        if first and len(known) == 1 and name in EXTREMES:
            extreme = self._extreme(name, function, args, kwargs, known[0])
            if extreme is not NOT_KNOWN:
                return extreme
        if first and len(known) == 1 and name in DEVIATIONS:
            deviation = _deviation(known[0], name, args[1:], kwargs)
            if deviation is not NOT_KNOWN:
                return deviation
        if first and len(known) == 1 and function is functional.embedding and _looks_up(args, kwargs):
            dense = function(known[0].safe, *args[1:], **kwargs)
            return self._both(function, args, kwargs, known[0], dense)
        if function is Tensor.__setitem__ and first and _keeps_rows(args[1], args[0].dim()):
            return self._write(args[0], args[1], args[2])
        if name in OVER_DIMS and first:
            return self._over_dims(name, function, args, kwargs, known)
        of_rows = name in ROWS or _multiplies_rows(name, args) or _takes_rows(function, args, kwargs)
        if first and len(known) == 1 and of_rows:
            dense = function(*self._dense(args, rows=True), **self._dense(kwargs, rows=True))
            dense = dense.unflatten(0, known[0].mask.shape)
            result = self._both(function, args, kwargs, known[0], dense, layered=name in ("linear", *PRODUCTS))
            if function is Tensor.__getitem__ and (one := self.of(result)) is not None:
                one.viewed = args[0], args[1]
            return result
        return NOT_KNOWN

    def stopped(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """What a function returns that is not known for selected elements; its nodes say so."""
        result = function(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and self.of(leaf) is not None for leaf in tree_leaves((args, kwargs))):
            getter = getattr(function, "__name__", "") == "__get__"  # of a property, such as x.T
            name = getattr(function.__self__ if getter else function, "__name__", "a function")
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and (proxy := traced(leaf)[0]) is not None:
                    proxy.node.meta[STOPS] = name.strip("_")
        return result

    def count(self, number: Any) -> Any:
        """A tensor in place of a symbol that is computed from how many elements masks select; else the symbol."""
        expression = number.node.expr
        if not expression.free_symbols:
            return number
        counts = {symbol: self._counted(symbol) for symbol in expression.free_symbols}
        if any(one is None for one in counts.values()):
            return number
        counted = _combined(expression, counts)
        return number if counted is None else counted

    def _counted(self, symbol: Any) -> Tensor | None:
        every: list[Selected | Places] = [*self.known.values(), *self.places.values()]
        selected = (one for one in every if one.is_current)
        return next((one.mask.sum() for one in selected if _is_size(one.result.shape[0], symbol)), None)

    def _note(
        self, result: Tensor, mask: Tensor, dense: Tensor, layered: bool = False, joined: tuple[Tensor, ...] = ()
    ) -> None:
        self.known[id(result)] = Selected(result, mask, dense, layered, joined=joined)

    def _both(
        self, function: Any, args: Any, kwargs: Any, like: Selected, dense: Tensor, layered: bool = False
    ) -> Tensor:
        """torch's own result, known to be selected of `dense` if that has its shape."""
        result: Tensor = _own(function, args, kwargs, dense, like.mask)
        self._note_like(result, like, dense, layered)
        return result

    def _note_like(self, result: Tensor, like: Selected, dense: Tensor, layered: bool = False) -> None:
        if dense.dtype == result.dtype and dense.shape == (*like.mask.shape, *result.shape[1:]):
            self._note(result, like.mask, dense, layered or like.layered, like.joined)

    def _each(self, function: Any, args: Any, kwargs: Any, like: Selected) -> Any:
        """torch's own results of a function of each row, as `_both`."""
        rows = function(*self._dense(args, rows=True), **self._dense(kwargs, rows=True))
        several = isinstance(rows, (tuple, list))
        dense = [one.unflatten(0, like.mask.shape) for one in (rows if several else [rows])]
        found = _own(function, args, kwargs, dense if several else dense[0], like.mask)
        for result, complete in zip(found if several else [found], dense, strict=True):
            self._note_like(result, like, complete)
        return found

    def _dense(self, nested: Any, *, rows: bool = False, raw: bool = False) -> Any:
        """Arguments with complete tensors in place of selections of them."""

        def dense(tensor: Tensor) -> Tensor:
            if (one := self.of(tensor)) is None:
                return tensor
            complete = one.dense if raw else one.safe
            return one.rows(complete) if rows else complete

        return tree_map_only(Tensor, dense, nested)

    def _is_along(self, other: Any, one: Selected) -> bool:
        """Whether something is a selection of as many dims, or a tensor that all rows share."""
        if not isinstance(other, Tensor) or any(isinstance(size, torch.SymInt) for size in other.shape[1:]):
            return False
        return other.dim() == one.result.dim() if self.of(other) is not None else _is_shared(other, one.result)

    def _looked_up(self, tensor: Any, index: Any, known: Sequence[Selected]) -> Any:
        """Rows of a table that selected numbers name (`table[y[mask]]`), or of each selected row the element that its
        number names (`x[mask][torch.arange(n), y[mask]]`)."""
        one, selected = known[0], self.of(tensor)
        names = self.of(index) if isinstance(index, Tensor) else None
        if names is not None and selected is None and names.dense.dtype in (torch.int64, torch.int32):
            if type(tensor.shape[0]) is int:
                return self._both(Tensor.__getitem__, (tensor, index), {}, one, tensor[names.safe])
        if selected is not None and isinstance(index, tuple) and len(index) == 2:
            every, names = index[0], self.of(index[1]) if isinstance(index[1], Tensor) else None
            if names is not None and names.result.dim() == 1 and names.dense.dtype is torch.int64:
                if _is_range(every, selected.result.shape[0]):
                    rows, numbers = selected.rows(selected.dense), names.rows(names.safe)
                    taken = rows[torch.arange(len(rows), device=rows.device), numbers].reshape(one.mask.shape)
                    return self._both(Tensor.__getitem__, (tensor, index), {}, one, taken)
        return NOT_KNOWN

    def _placed(self, one: Selected, others: Sequence[Tensor]) -> dict[int, Tensor]:
        """Tensors with as many rows as are selected, {id: the same as a selection}: row n belongs to the n-th selected
        row (`h[mask] * 0 + patches`). torch refuses other numbers of rows in each step, as it would eagerly."""
        placed = dict[int, Tensor]()
        for tensor in others:
            if not _is_shared(tensor, one.result):
                if tensor.dim() != one.result.dim():
                    return {}
                dense = tensor.new_zeros(*one.mask.shape, *tensor.shape[1:])
                dense[one.mask] = tensor
                self._note(result := dense[one.mask], one.mask, dense)
                placed[id(tensor)] = result
        return placed

    def _expanded(self, name: str, function: Any, args: Any, kwargs: Any, known: Sequence[Selected]) -> Any:
        """Selected rows, expanded or repeated along their other dims."""
        one, rest = known[0], args[1:]
        sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
        rows = (1,) if name == "repeat" else (-1, one.result.shape[0])
        if name == "expand_as" and len(known) == 2:
            sizes = rest[0].shape
        elif len(known) > 1 or kwargs:
            return NOT_KNOWN
        if len(sizes) != one.result.dim() or not any(_is_same_size(sizes[0], size) for size in rows):
            return NOT_KNOWN
        if not all(type(size) is int for size in sizes[1:]):
            return NOT_KNOWN
        dims = one.mask.dim()
        dense = (
            one.dense.repeat(*(1,) * dims, *sizes[1:]) if rows == (1,) else one.dense.expand(*(-1,) * dims, *sizes[1:])
        )
        return self._both(function, args, kwargs, one, dense)

    def _write(self, result: Tensor, index: Any, value: Any) -> None:
        """`result[index] = value`, for all selected rows."""
        one, other, dense = self.known[id(result)], self.of(value), self._dense(value, rows=True, raw=True)
        result[index] = value
        self._note_written(one, index, dense, other is not None and other.layered)

    def _note_written(self, one: Selected, index: Any, value: Any, layered: bool) -> None:
        """Note that complete rows, or what they share, have been written to an index of all rows."""
        rows = one.rows(one.dense).clone()
        rows[index] = value
        dense: Tensor = rows.unflatten(0, one.mask.shape)  # type: ignore[no-untyped-call]
        self._note(one.result, one.mask, dense, one.layered or layered, one.joined)

    def _over_dims(self, name: str, function: Any, args: Any, kwargs: Any, known: Sequence[Selected]) -> Any:
        one, position = known[0], OVER_DIMS[name]
        given = kwargs.get("dim", args[position] if len(args) > position else DEFAULT_DIMS.get(name))
        several = name == "flip" and len(args) > 2
        if isinstance(given, (bool, Tensor)) or several:  # whether a deviation is unbiased; the other operand of max
            return NOT_KNOWN
        rank = one.result.dim() + (name == "unsqueeze")
        every = range(rank) if name in OVER_ALL and "axis" not in kwargs else []
        dims = [given] if isinstance(given, int) else list(given or every)
        dims = [dim % rank for dim in dims if isinstance(dim, int) and -rank <= dim < rank]
        second = PAIRS.get(name, 0)
        if not dims or len(known) > 2 or len(args) <= second or self.of(args[second]) is not known[-1]:
            return NOT_KNOWN
        if 0 not in dims:
            return self._each(function, args, kwargs, one)
        if name in FILLS and len(known) == 1:
            return self._filled(name, function, args, kwargs, one)
        if name not in ("sum", "mean") or kwargs.keys() - {"dim", "keepdim"} or len(args) > position + 1:
            return NOT_KNOWN
        if name == "mean" and not one.dense.is_floating_point():
            return NOT_KNOWN
        return _reduced(one, name, dims, bool(kwargs.get("keepdim", False)))

    def _filled(self, name: str, function: Any, args: Any, kwargs: Any, one: Selected) -> Any:
        """What a function of all that is selected returns, of one number in place of the rest."""
        if not one.dense.is_floating_point() or ("norm" in name and not _is_sum_of_powers(args, kwargs)):
            return NOT_KNOWN
        rows = function(one.rows(one.filled(FILLS[name])), *args[1:], **kwargs)
        if name not in ("log_softmax", "normalize", "softmax"):
            return rows
        return self._both(function, args, kwargs, one, rows.unflatten(0, one.mask.shape))

    def _einsum(self, function: Any, equation: Any, *operands: Any) -> Any:
        """Sums of products of selected rows, over these or of each, and of what rows share."""
        if not isinstance(equation, str):
            return NOT_KNOWN
        operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
        taken, arrow, made = equation.replace(" ", "").partition("->")
        letters, known = taken.split(","), [self.of(one) for one in operands]
        rows = {own[:1] for own, one in zip(letters, known, strict=False) if one is not None}
        row = next(iter(rows))
        shared = [own for own, one in zip(letters, known, strict=False) if one is None]
        once = all(own.count(row) == 1 for own, one in zip(letters, known, strict=False) if one is not None)
        if not arrow or "." in equation or len(rows) != 1 or not once or any(row in own for own in shared):
            return NOT_KNOWN
        if row not in made:
            filled = [one if own is None else own.rows(own.filled(0)) for one, own in zip(operands, known, strict=True)]
            return function(equation, *filled)
        like = next(one for one in known if one is not None)
        if made[0] != row:
            return NOT_KNOWN
        dense = function(equation, *self._dense(operands, rows=True)).unflatten(0, like.mask.shape)
        return self._both(function, (equation, *operands), {}, like, dense, layered=True)

    def _made(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A tensor of one number, which has as many rows as are selected where its size says so."""
        of = () if function in FACTORIES else args[:1]
        given = args[len(of) :]
        several = bool(given) and isinstance(given[0], (tuple, list))
        sizes, rest = (given[0], given[1:]) if several else (given, ())
        like = of and self.of(of[0])
        if not any(isinstance(leaf, torch.SymInt) for leaf in tree_leaves((given, kwargs))):
            return NOT_KNOWN if not like else function(like.dense, *given, **kwargs)
        rows = (one for one in self.known.values() if one.is_current and _is_same_size(one.result.shape[0], sizes[0]))
        like = next(rows, None) if sizes and all(type(size) is int for size in sizes[1:]) else None
        if like is None:
            return NOT_KNOWN
        dense = function(*(self._dense(one) for one in of), (*like.mask.shape, *sizes[1:]), *rest, **kwargs)
        return self._both(function, args, kwargs, like, dense)

    def _concatenated(self, function: Any, args: Any, kwargs: Any) -> Any:
        """A concatenation of selections of any masks: what the concatenated masks select of the concatenated complete
        tensors. Of a tensor that is no selection, all rows are selected."""
        tensors = args[0]
        known = [self.of(tensor) for tensor in tensors]
        like = next(one for one in known if one is not None)
        shape, dtype = like.result.shape[1:], like.dense.dtype
        if any(tensor.shape[1:] != shape or tensor.dtype is not dtype for tensor in tensors):
            return NOT_KNOWN
        if any(one is None and type(tensor.shape[0]) is not int for tensor, one in zip(tensors, known, strict=True)):
            return NOT_KNOWN
        dense = [tensor if one is None else one.rows(one.dense) for tensor, one in zip(tensors, known, strict=True)]
        masks = [
            torch.ones(len(tensor), dtype=torch.bool, device=tensor.device) if one is None else one.rows(one.mask)
            for tensor, one in zip(tensors, known, strict=True)
        ]
        result = function(*args, **kwargs)
        selections = [one for one in known if one is not None]
        layered, mask = any(one.layered for one in selections), self._known(torch.cat(masks))
        made = Selected(result, mask, torch.cat(dense), layered)
        if len(selections) == len(tensors) and not any(one.joined for one in selections):
            made.joined, made.pieces = tuple(one.mask for one in selections), tuple(one.dense for one in selections)
        self.known[id(result)] = made
        return result

    def _along(
        self, name: str, function: Any, args: Sequence[Any], kwargs: dict[str, Any], known: Sequence[Selected]
    ) -> Any:
        """What joins tensors, or takes one apart, along another dim than the first."""
        position, rank = PARTS.get(name, 1), known[0].result.dim() + JOINING.get(name, 0)
        dim = kwargs.get("dim", args[position] if len(args) > position else 0)
        if type(dim) is not int or dim % rank == 0:
            return NOT_KNOWN
        if name in JOINING:
            dense = function(*self._dense(args, rows=True), **self._dense(kwargs, rows=True))
            layered = any(one.layered for one in known)
            return self._both(function, args, kwargs, known[0], dense.unflatten(0, known[0].mask.shape), layered)
        return self._each(function, args, kwargs, known[0])

    def _extreme(self, name: str, function: Any, args: Any, kwargs: dict[str, Any], one: Selected) -> Any:
        """The largest or smallest of all that is selected, along its first dim or over all; with their places, if any,
        among the selected elements."""
        names = ("k", "dim", "largest", "sorted") if name == "topk" else ("dim", "keepdim")
        given = dict(zip(names, args[1:], strict=False)) | kwargs
        dim, rank = given.get("dim"), one.result.dim()
        dim = -1 if name == "topk" and dim is None else dim
        over_all = dim is None or (isinstance(dim, (tuple, list)) and not dim)
        first = isinstance(dim, int) and dim % rank == 0
        if not one.dense.is_floating_point() or not (over_all or first):
            return NOT_KNOWN
        rest = EXTREMES[name] if given.get("largest", True) else torch.inf
        rows = one.rows(one.filled(rest))
        if over_all:
            return function(rows)
        found = function(rows, *args[1:], **kwargs)
        if isinstance(found, Tensor):
            return found
        if self.packed:  # which may have another order than the mask
            return NOT_KNOWN
        places = one.rows(one.mask).cumsum(0) - 1
        return type(found)((found[0], places[found[1]]))

    def _loss(self, function: Any, args: Any, kwargs: Any) -> Any:
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        first, *_ = given.values()
        one, target, reduction = self.of(first), self.of(given.get("target")), given["reduction"]
        old = given.get("size_average"), given.get("reduce")
        if one is None or (function in CLASSES and target is None) or old != (None, None):
            return NOT_KNOWN
        dense = self._dense(given, rows=True)
        if function in CLASSES and target is not None and target.dense.dtype is torch.int64 and reduction != "none":
            dense["target"] = target.rows(target.filled(given["ignore_index"]))
            if not one.joined or reduction != "mean" or given["weight"] is not None:
                return function(**dense)
            pieces = target.pieces if target.joined else ()
            kept = [(part != given["ignore_index"]) & mask for part, mask in zip(pieces, target.joined, strict=False)]
            known_rows = bool(kept) and len({len(part) for part in kept}) == 1
            count = _of_rows(kept).sum() if known_rows else (dense["target"] != given["ignore_index"]).sum()
            return function(**dense | {"reduction": "sum"}) / count
        losses = function(**dense | {"reduction": "none"}).unflatten(0, one.mask.shape)
        result = _own(function, (), given | {"reduction": "none"}, losses, one.mask)
        if losses.dtype != result.dtype or losses.shape != (*one.mask.shape, *result.shape[1:]):
            return NOT_KNOWN
        selected = Selected(result, one.mask, losses, joined=one.joined)
        if reduction == "none":
            self.known[id(result)] = selected
            return result
        if reduction == "batchmean":
            return _reduced(selected, "sum", range(result.dim()), False) / one.count
        return _reduced(selected, reduction, range(result.dim()), False)


def _own(function: Any, args: Any, kwargs: Any, dense: Any, mask: Tensor) -> Any:
    """torch's own result, or where it does not trace that, what the mask selects of the complete one."""
    proxy, _ = traced(mask)
    last = None if proxy is None else next(iter(reversed(proxy.node.graph.nodes)))  # of torch 2.11 no iterator
    try:
        return function(*args, **kwargs)
    except GuardOnDataDependentSymNode:
        while last is not None and (added := last.next).op != "root":  # of which one has no value
            while added.next.op != "root":
                added = added.next
            added.graph.erase_node(added)
        return tree_map_only(Tensor, lambda one: one[mask], dense)


def _reduced(one: Selected, name: str, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The sum or the mean of selected elements over dims, of which the first is one."""
    zeros, over = one.rows(one.filled(0)), list(dims)
    if name == "sum":
        return zeros.sum(over, keepdim)
    count, each = one.count, prod(int(zeros.shape[dim]) for dim in over if dim)
    count = count * each if each > 1 else count
    if zeros.dtype in (torch.bfloat16, torch.float16):  # which do not count far
        return (zeros.sum(over, keepdim, dtype=torch.float32) / count).to(zeros.dtype)
    return zeros.sum(over, keepdim) / count


def _of_rows(masks: Sequence[Tensor]) -> Tensor:
    """How many elements of each row several masks select together."""
    return reduce(
        operator.add, (mask.long() if mask.dim() == 1 else mask.sum([*range(1, mask.dim())]) for mask in masks)
    )


def _deviation(one: Selected, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The variance of all that is selected, along its first dim or over all, or the root of it."""
    options = dict(kwargs)
    if args and type(args[0]) is bool:
        options |= {"unbiased": args[0]}
    elif args:
        options |= {"dim": args[0]} | ({"unbiased": args[1]} if len(args) > 1 else {})
    dim, correction = options.pop("dim", None), options.pop("correction", 1)
    correction, keepdim = int(options.pop("unbiased", correction)), bool(options.pop("keepdim", False))
    rank = one.result.dim()
    dims = [dim % rank] if isinstance(dim, int) else [*range(rank)] if dim is None else None
    if options or dims is None or 0 not in dims or not one.dense.is_floating_point() or len(args) > 2:
        return NOT_KNOWN
    count = one.count * prod(int(size) for size in one.result.shape[1:]) if len(dims) > 1 else one.count
    centred = one.rows(one.dense) - _reduced(one, "mean", dims, True)
    squares = torch.where(one.rows(one.spread), centred, 0).square().sum(dims, keepdim)
    variance = squares / (count - correction).clamp(min=0)
    if name == "var":
        return variance
    constant = variance == 0  # of which torch's deviation has no gradient
    return torch.where(constant, 0, torch.where(constant, 1, variance).sqrt())


def _is_shared(tensor: Tensor, selected: Tensor) -> bool:
    """Whether all rows that are selected take the same of a tensor."""
    shape = tuple(tensor.shape)
    return len(shape) < selected.dim() or (len(shape) == selected.dim() and type(shape[0]) is int and shape[0] == 1)


def _is_sum_of_powers(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether zeros change nothing of a norm."""
    order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else 2))
    return order in ("fro", None) or (type(order) in (int, float) and order >= 1)


def joins_rows(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call concatenates tensors along their first dim."""
    joins = JOINING.get(name) == 0 and bool(args) and isinstance(args[0], (tuple, list)) and not kwargs.keys() - {"dim"}
    return joins and (args[1:] or (kwargs.get("dim", 0),)) == (0,)


def merged_dims(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    """How many dims a call makes one, from the first on."""
    shape, rest = args[0].shape, args[1:]
    rank = len(shape)
    if name == "ravel" or (name == "flatten" and not rest and not kwargs):
        return rank
    if name == "flatten":
        start, end = rest[0] if rest else kwargs.get("start_dim", 0), rest[1] if rest[1:] else kwargs.get("end_dim", -1)
        return int(end % rank + 1) if start % rank == 0 else 1
    sizes = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
    kept = len(sizes) - 1
    if name not in ("reshape", "view") or kwargs or kept not in range(rank) or sizes[0] != -1:
        return 1
    return rank - kept if tuple(sizes[1:]) == tuple(shape[rank - kept :]) else 1


def _multiplies_rows(name: str, args: Sequence[Any]) -> bool:
    """Whether a call is a product of rows with a matrix or vector that they share."""
    pair = args if len(args) == 2 and all(isinstance(one, Tensor) for one in args) else ()
    return name in PRODUCTS and bool(pair) and args[0].dim() > 1 and args[1].dim() < 3


def _looks_up(args: Any, kwargs: Any) -> bool:
    """Whether an embedding does nothing but to look up rows."""
    given = inspect.signature(functional.embedding).bind(*args, **kwargs).arguments
    return not any(given.get(name) for name in ("max_norm", "scale_grad_by_freq", "sparse"))


def _takes_rows(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call indexes other dims than the first, or gives these another shape."""
    rank, rest = args[0].dim(), args[1:]
    if function is Tensor.__getitem__:
        return _keeps_rows(rest[0], rank)
    if function is functional.pad:
        given = kwargs.get("pad", rest[0] if rest else ())
        return bool(len(given) // 2 < rank)
    if getattr(function, "__name__", "") in ("view", "reshape") and not kwargs:
        shape = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
        sizes = [*shape[1:], *args[0].shape[1:]]
        whole = all(type(size) is int for size in sizes)
        return bool(shape) and shape[0] == -1 and whole and prod(shape[1:]) == prod(args[0].shape[1:])
    return False


def _keeps_rows(index: Any, rank: int) -> bool:
    """Whether an index takes all along the first dim of a tensor with `rank` dims."""
    if not isinstance(index, tuple) or not all(one is None or one is ... or type(one) in (int, slice) for one in index):
        return False
    taken = sum(type(one) in (int, slice) for one in index)
    return bool(index[0] == slice(None) or (index[0] is ... and taken < rank))


def _writes(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call returns its result in a tensor that it is given."""
    if not isinstance(function, FunctionType) or function.__module__ != functional.__name__:
        return "out" in kwargs
    return bool(inspect.signature(function).bind(*args, **kwargs).arguments.get("inplace"))


def _is_range(tensor: Any, size: Any) -> bool:
    """Whether a tensor is `torch.arange(size)`."""
    node = proxy.node if isinstance(tensor, Tensor) and (proxy := traced(tensor)[0]) is not None else None
    if node is None or op_of(node) != "arange" or not _is_same_size(tensor.shape[0], size):
        return False
    given = node.args if len(node.args) > 1 else (0, *node.args)
    return tensor.dtype is torch.int64 and given[:1] == (0,) and given[2:] in ((), (1,))


def _is_same_size(one: Any, other: Any) -> bool:
    if isinstance(one, torch.SymInt) and isinstance(other, torch.SymInt):
        return bool(one.node.expr == other.node.expr)
    return type(one) is type(other) is int and one == other


def _is_size(size: Any, symbol: Any) -> bool:
    return isinstance(size, torch.SymInt) and bool(size.node.expr == symbol)


def _larger(one: Any, other: Any) -> Any:
    for number, tensor in ((one, other), (other, one)):
        if type(number) is int and isinstance(tensor, Tensor):
            return tensor.clamp(min=number)  # which is known of the divisors of means
    return torch.where(other > one, other, one)


def _combined(expression: Any, counts: dict[Any, Any]) -> Any:
    """A number that is computed from counts, which are tensors; None where it is computed by an unknown function."""
    if expression in counts:
        return counts[expression]
    if expression.is_number:
        return int(expression) if expression.is_integer else float(expression)
    operands = [_combined(one, counts) for one in expression.args]
    known = COMBINED.get(type(expression).__name__)
    return None if known is None or any(one is None for one in operands) else known(*operands)


def equal_masks(one: Tensor, other: Tensor) -> bool:
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


def _converted(node: Any) -> Any:
    """What a node converts (`lengths.cpu()`), where it changes nothing."""
    while isinstance(node, fx.Node) and op_of(node) == "to":
        given, value = node.all_input_nodes[0].meta["val"], node.meta["val"]
        if (given.dtype, given.device) != (value.dtype, value.device):
            break
        node = node.all_input_nodes[0]
    return node


def _same(one: Any, other: Any, pairs: list[fx.Node]) -> bool:
    """Whether two arguments are the same, or computed alike by operators, which are added to `pairs`."""
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(partial(_same, pairs=pairs), one, other))
    one, other = _converted(one), _converted(other)
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node) or one is other:
        return type(one) is type(other) and bool(one == other)
    pairs += [one, other]
    drawn = torch.Tag.nondeterministic_seeded in getattr(one.target, "tags", ())
    called = one.op == other.op == "call_function" and one.target == other.target and not drawn
    keywords = [sorted(node.kwargs.items()) for node in (one, other)]
    return called and _same([*one.args, *keywords[0]], [*other.args, *keywords[1]], pairs)
