"""Which views split a dim by a size that the model fixes, such as `view(b, t, self.heads, d)`, and which by one that
follows from the tensor, such as `view(b, t, x.shape[-1] // d, d)`.

A trainer that slices modules runs their own code on slices, which only the latter take; a graph has the same numbers
for both. So a copy of the model runs on tensors without numbers, in which linear layers return a part of their columns
to such views. A module in which that raises fixes its sizes.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from strategies.capture.duplicate import duplicate
from strategies.core.graph import Operator, OperatorGraph
from strategies.core.heads import layer_before, split_dim


def with_fixed_sizes(graph: OperatorGraph, step: nn.Module, batch: Sequence[Tensor]) -> OperatorGraph:
    """The graph with its `fixed_sizes`.

    Args:
        graph: of `step`, whose model is `step.model`.
        step: takes the batch.
        batch: of the shapes that the graph was captured with.
    """
    views = {operator.id: operator for operator in graph.operators if _size(operator, graph) is not None}
    before = {name: layer_before(view, graph) for name, view in views.items()}
    layers = {name: layer.module for name, layer in before.items() if layer is not None}
    fixed: set[str] = set()
    while left := [name for name in layers if name not in fixed]:
        failed = _fails_in(step, batch, _shares({name: layers[name] for name in left}, views, graph))
        if failed is None or (not fixed and _fails_in(step, batch, {}) is not None):
            break  # or it does not run without numbers at all, so nothing is known
        owners = ({name for name in left if views[name].module in paths} for paths in failed)
        fixed |= next(filter(None, owners), {*left})
    return replace(graph, fixed_sizes=graph.fixed_sizes | fixed) if fixed else graph


def with_unknown_layers(graph: OperatorGraph, step: nn.Module) -> OperatorGraph:
    """The graph whose `fixed_sizes` have the linear layers of modules without `in_features` and `out_features`, such as
    routers that keep a weight of their own: a trainer that slices modules refuses these, or leaves them as they are."""
    modules = {"" if path == "model" else path.removeprefix("model."): module for path, module in step.named_modules()}
    unknown = {
        operator.id
        for operator in graph.operators
        if operator.op == "linear"
        and not all(hasattr(modules.get(operator.module), name) for name in ("in_features", "out_features"))
    }
    return replace(graph, fixed_sizes=graph.fixed_sizes | unknown) if unknown else graph


def _shares(layers: Mapping[str, str], views: Mapping[str, Operator], graph: OperatorGraph) -> dict[str, int]:
    """Into how many parts the columns of each layer are sliced: for all views of a module, of queries as of keys, into
    as many, if one number divides the sizes by which they split."""
    sizes: dict[str, int] = defaultdict(int)
    for name in layers:
        sizes[views[name].module] = math.gcd(sizes[views[name].module], _size(views[name], graph) or 0)
    shares = {layer: _smallest_factor(sizes[views[name].module]) for name, layer in layers.items()}
    return {layer: share for layer, share in shares.items() if share > 1}


def _size(operator: Operator, graph: OperatorGraph) -> int | None:
    """The number by which a view splits a last dim; None for other operators, or has -1 there."""
    dim = split_dim(operator, graph)
    if dim is None or operator.op == "unflatten":
        return None
    size: int = operator.args[1][dim]
    return None if size == -1 else size


def _smallest_factor(size: int) -> int:
    return next((factor for factor in range(2, size + 1) if size % factor == 0), 1)


def _fails_in(step: nn.Module, batch: Sequence[Tensor], shares: Mapping[str, int]) -> list[frozenset[str]] | None:
    """Run a copy of `step` in which each of these layers returns one share of its columns; None where that works, else
    the modules in which it raised, innermost first: for each the paths of all modules of its class."""
    copy = duplicate(step, parameters=False).train()
    paths = {module: path.removeprefix("model.") for path, module in copy.named_modules()}
    entered: list[nn.Module] = []
    for module, path in paths.items():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_as_wide_as_before)
            if path in shares:
                module.register_forward_hook(partial(_first_columns, share=shares[path]))
    with without_numbers(copy, batch) as given, _recorded(entered, paths):
        try:
            copy(*given)
        except Exception:  # of the user's forward: that is the question
            return [
                frozenset(path for module, path in paths.items() if type(module) is type(around))
                for around in reversed(entered)
            ]
    return None


@contextmanager
def _recorded(entered: list[nn.Module], own: Collection[nn.Module]) -> Iterator[None]:
    """Keep in a list which of its `own` modules run their forward, innermost last."""

    def leave(module: nn.Module, *_: Any) -> None:
        if module in own:
            entered.pop()

    before = register_module_forward_pre_hook(lambda module, _: entered.append(module) if module in own else None)
    after = register_module_forward_hook(leave)
    try:
        yield
    finally:
        before.remove()
        after.remove()


@contextmanager
def without_numbers(copy: nn.Module, batch: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The batch as tensors without numbers, among which real ones have none either."""
    tensors = (*copy.parameters(), *copy.buffers(), *batch)
    mode = next((one.fake_mode for one in tensors if isinstance(one, FakeTensor)), None) or FakeTensorMode()
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    with mode, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield [one if isinstance(one, FakeTensor) else mode.from_tensor(one.detach()) for one in batch]
        finally:
            mode.allow_non_fake_inputs = before


def _first_columns(_: nn.Module, __: Any, result: Tensor, share: int) -> Tensor:
    return result.narrow(-1, 0, result.shape[-1] // share)


def _as_wide_as_before(layer: nn.Linear, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a layer of rows takes, which is sliced as they are."""
    first, *others = given
    missing = layer.in_features - first.shape[-1]
    return (nn.functional.pad(first, (0, missing)), *others) if missing > 0 else given
