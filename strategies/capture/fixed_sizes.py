"""Which views split a dim by a size that the model fixes, such as `view(b, t, self.heads, d)`, and which by one that
follows from the tensor, such as `view(b, t, x.shape[-1] // d, d)` or `view(b, t, -1, d)`. A view of a module that fixes
another size, such as that of biases for all heads, counts as one of the former.

A trainer that slices modules runs their own code on slices, which only the latter take; a graph has the same numbers
for both. So a copy of the model runs on tensors without numbers, in which linear layers return a part of their columns
to such views. A module in which that raises fixes its sizes, and so does one that splits the part otherwise:
`view(b, t, self.heads, x.shape[-1] // self.heads)` makes as many heads of it, with fewer columns.
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
from torch.overrides import TorchFunctionMode

from strategies.capture.duplicate import duplicate
from strategies.capture.tracing import in_few_words
from strategies.core.graph import Operator, OperatorGraph
from strategies.core.heads import layer_before, split_dim

Splits = dict[str, list[tuple[int, ...]]]
"""The shapes that views make, by the path of a module, in their order."""


def with_fixed_sizes(graph: OperatorGraph, step: nn.Module, batch: Sequence[Tensor]) -> OperatorGraph:
    """The graph with its `fixed_sizes`.

    Args:
        graph: of `step`, whose model is `step.model`.
        step: takes the batch.
        batch: of the shapes that the graph was captured with.
    """
    views, layers = _layers_of_views(graph)
    fixed: set[str] = set()
    complete = _run(step, batch, {}) if layers else ()
    while isinstance(complete, dict) and (left := [name for name in layers if name not in fixed]):
        shares = _shares({name: layers[name] for name in left}, views, graph)
        sliced = _run(step, batch, shares)
        if isinstance(sliced, dict):
            shared = {name: shares.get(layers[name], 1) for name in left}
            now = {name for name in left if _splits_otherwise(views[name], graph, shared[name], complete, sliced)}
        else:
            owners = ({name for name in left if views[name].module in paths} for paths in sliced)
            now = next(filter(None, owners), {*left})
        if not now:
            break
        fixed |= now
    return replace(graph, fixed_sizes=graph.fixed_sizes | fixed) if fixed else graph


def not_resized(graph: OperatorGraph, step: nn.Module, batch: Sequence[Tensor], sizes: Collection[str]) -> set[str]:
    """The modules that split a share of the columns of their layers into other parts than that share of them, where
    they have that share of all attributes called like one of `sizes`; none where that does not run."""
    views, layers = _layers_of_views(graph)
    shares = _shares(layers, views, graph)
    complete, sliced = (_run(step, batch, some, sizes) for some in ({}, shares))
    if not isinstance(complete, dict) or not isinstance(sliced, dict):
        return set()
    shared = {name: shares.get(layer, 1) for name, layer in layers.items()}
    return {
        views[name].module for name in layers if _splits_otherwise(views[name], graph, shared[name], complete, sliced)
    }


def _layers_of_views(graph: OperatorGraph) -> tuple[dict[str, Operator], dict[str, str]]:
    """The views that split columns by a size, by id, and the modules of the layers behind them, where there are any."""
    views = {operator.id: operator for operator in graph.operators if _size(operator, graph) is not None}
    before = {name: layer_before(view, graph) for name, view in views.items()}
    return views, {name: layer.module for name, layer in before.items() if layer is not None}


def _splits_otherwise(view: Operator, graph: OperatorGraph, share: int, complete: Splits, sliced: Splits) -> bool:
    """Whether a module makes another shape of a share of columns than that with a share of the parts."""
    shape, dim = view.results[0].shape, split_dim(view, graph)
    assert dim is not None
    expected = (*shape[:dim], shape[dim] // share, *shape[dim + 1 :])
    before, after = complete.get(view.module, []), sliced.get(view.module, [])
    if len(before) != len(after):
        return True
    return any(one == shape and other not in (shape, expected) for one, other in zip(before, after, strict=True))


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
    """The number of parts into which a view splits a last dim; None for other operators."""
    dim = split_dim(operator, graph)
    return None if dim is None or operator.op == "unflatten" else operator.results[0].shape[dim]


def _smallest_factor(size: int) -> int:
    return next((factor for factor in range(2, size + 1) if size % factor == 0), 1)


def _run(
    step: nn.Module, batch: Sequence[Tensor], shares: Mapping[str, int], sizes: Collection[str] = ()
) -> Splits | list[frozenset[str]]:
    """Run a copy of `step` in which each of these layers returns one share of its columns, and the modules around it
    but for the model have that share of their `sizes`.

    Returns the shapes that views make in each module; where it raised an error the modules in which that was, innermost
    first: for each the paths of all modules of its class.
    """
    copy = duplicate(step, parameters=False).train()
    paths = {module: path.removeprefix("model.") for path, module in copy.named_modules()}
    entered: list[nn.Module] = []
    for module, path in paths.items():
        inside = [share for layer, share in shares.items() if layer.startswith(f"{path}.")]
        for name in {*sizes} & vars(module).keys() if inside and path not in ("", "model") else ():
            if type(value := vars(module)[name]) is int:
                vars(module)[name] = value // inside[0]
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(_as_wide_as_before)
            if path in shares:
                module.register_forward_hook(partial(_first_columns, share=shares[path]))
    views = _Views(entered, paths)
    with without_numbers(copy, batch) as given, _recorded(entered, paths), views, in_few_words():
        try:
            copy(*given)
        except Exception:  # of the user's forward: that is the question
            return [
                frozenset(path for module, path in paths.items() if type(module) is type(around))
                for around in reversed(entered)
            ]
    return views.made


class _Views(TorchFunctionMode):
    """Notes the shapes that views make, by the path of the module that runs."""

    def __init__(self, entered: Sequence[nn.Module], paths: Mapping[nn.Module, str]) -> None:
        super().__init__()
        self.entered, self.paths = entered, paths
        self.made: Splits = {}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in ("reshape", "unflatten", "view") and isinstance(result, Tensor):
            path = self.paths[self.entered[-1]] if self.entered else ""
            self.made.setdefault(path, []).append(tuple(result.shape))
        return result


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
