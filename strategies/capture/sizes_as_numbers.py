"""Modules whose forward computes with their own sizes, such as `x * self.hidden_size ** -0.5`, and not only shapes.

AutoTP of DeepSpeed gives every module in which it slices anything the sizes of a slice, so that views of slices are
right; a number is another one then. So a copy of the model runs on tensors without numbers, with sizes that note what
becomes of them. Modules that keep the number of their heads under another name split slices otherwise, and are found by
a run on slices. Source: deepspeed.module_inject.auto_tp (update_mp_params).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from strategies.capture.duplicate import duplicate
from strategies.capture.fixed_sizes import not_resized, without_numbers
from strategies.capture.nodes import replaced
from strategies.core.graph import OperatorGraph

SIZES = frozenset(
    "n_heads inner_dim num_heads num_kv num_attention_heads num_attn_heads all_head_size embed_dim hidden_size "
    "num_key_value_heads num_kv_heads kv_n_heads d_model num_attention_heads_per_partition "
    "num_multi_query_groups_per_partition hidden_size_per_partition".split()
)
"""Attributes that AutoTP changes."""
SHAPES = frozenset(
    "__getitem__ arange broadcast_to chunk empty expand flatten full layer_norm movedim narrow new_empty new_full "
    "new_ones new_zeros ones pad permute reshape repeat repeat_interleave rms_norm scaled_dot_product_attention split "
    "split_with_sizes swapaxes tensor_split tile transpose unflatten unfold unsqueeze view zeros".split()
)
"""Functions whose integers are sizes, places or dims."""


class _Size(int):
    """The size of a module: of integers it makes sizes; what makes a number of it is noted."""

    module: str
    numbers: set[str]

    @staticmethod
    def of(value: int, module: str, numbers: set[str]) -> _Size:
        size = _Size(value)
        size.module, size.numbers = module, numbers
        return size


def _integer(name: str) -> Callable[[_Size, Any], Any]:
    plain = getattr(int, name)

    def method(size: _Size, other: Any) -> Any:
        if isinstance(other, float):
            size.numbers.add(size.module)
        result = plain(size, other)
        return result if result is NotImplemented else _Size.of(result, size.module, size.numbers)

    return method


def _number(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(size: _Size, *others: Any) -> Any:
        size.numbers.add(size.module)
        return plain(size, *others)

    return method


for _name in ("add", "floordiv", "mul", "sub", "radd", "rfloordiv", "rmul", "rsub"):
    setattr(_Size, f"__{_name}__", _integer(f"__{_name}__"))
for _name in ("float", "pow", "rpow", "rtruediv", "truediv"):
    setattr(_Size, f"__{_name}__", _number(f"__{_name}__"))


def _noting(function: Callable[..., float]) -> Callable[..., float]:
    def logarithm(value: Any, *others: Any) -> float:
        if isinstance(value, _Size):
            value.numbers.add(value.module)
        return function(value, *others)

    return logarithm


class _Calls(TorchFunctionMode):
    """Notes sizes that functions of torch take as numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in SHAPES:
            for leaf in _pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, _Size):
                    leaf.numbers.add(leaf.module)
        return func(*args, **(kwargs or {}))


def with_unsliced_modules(graph: OperatorGraph, step: nn.Module, batch: Sequence[Tensor]) -> OperatorGraph:
    """The graph with its `unsliced_modules`.

    Args:
        graph: of `step`, whose model is `step.model`.
        step: takes the batch.
        batch: of the shapes that the graph was captured with.
    """
    copy, numbers = duplicate(step, parameters=False).train(), set[str]()
    for path, module in copy.named_modules():
        name = path.removeprefix("model.")
        for key, value in [*vars(module).items()]:
            if key in SIZES and type(value) is int and path not in ("", "model"):  # AutoTP leaves the root as it is
                vars(module)[key] = _Size.of(value, name, numbers)
    with without_numbers(copy, batch) as given, ExitStack() as stack, _Calls():
        for name in ("log", "log2", "log10"):  # which read an integer as it is stored
            stack.enter_context(replaced(math, name, _noting(getattr(math, name))))
        try:
            copy(*given)
        except Exception:  # of the user's forward without numbers: nothing is known
            return graph
    numbers |= not_resized(graph, step, batch, SIZES)
    return replace(graph, unsliced_modules=frozenset(numbers)) if numbers else graph
