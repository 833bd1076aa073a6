"""Attributes of modules, no buffers, from which a forward computes and which it changes: a count of steps, a running
average in a plain tensor.

A graph is the same in every step, so it would have what the attribute is in the first one. The exporter restores all
attributes after it has traced a forward. So where that has changed numbers, a copy of the module is called twice: what
a forward sets once, such as the length of a cached table, is the same in the second call. Of tensors, one that the
graph still needs and that the forward has replaced is such an attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from strategies.capture.repeated_modules import reading
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph, Ref

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
Numbers = dict[tuple[str, str, str], int | float]
"""By the path of a module, the name of an attribute, and the place in it."""


class ChangingAttributes:
    """What the forward of `root` changes. `duplicate` copies it, to be called."""

    def __init__(self, root: nn.Module, duplicate: Callable[[nn.Module], nn.Module]) -> None:
        self._root, self._duplicate = root, duplicate
        self._numbers: Numbers = {}
        self._tensors: dict[tuple[str, str], Tensor] = {}
        self._counts = False
        self._replaced: dict[tuple[str, str], Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around an export."""
        hooks = [self._root.register_forward_pre_hook(self._begin), self._root.register_forward_hook(self._end)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, *_: Any) -> None:
        self._numbers, self._tensors = _numbers(self._root), _tensors(self._root)

    def _end(self, *_: Any) -> None:
        self._counts = self._counts or _numbers(self._root) != self._numbers
        now = _tensors(self._root)
        self._replaced |= {key: one for key, one in self._tensors.items() if now.get(key) is not one}

    def check(
        self, graph: OperatorGraph, tensors: Mapping[str, Tensor], batch: Sequence[Tensor], training: bool
    ) -> None:
        """After the export. Raises StrategyError for a tensor that the forward replaces and the graph needs, and for a
        number that it reads, and changes in every call."""
        places = {_memory(one): key for key, one in self._replaced.items()}
        for source in graph.of_kind("constant"):
            key = places.get(_memory(tensors[source.name]))
            if key is not None and graph.users[Ref(source.id)]:
                raise StrategyError(
                    "MW906",
                    f"The model's forward replaces the tensor {_shown(*key)}, which is no buffer, and computes with "
                    "it: a graph would have its first values in every step. Register it as a buffer "
                    "(register_buffer).",
                )
        if not self._counts or any(one.is_meta for one in self._root.parameters()):
            return
        module, read = self._duplicate(self._root).train(training), dict[int, set[str]]()
        found = [_numbers(module)]
        with torch.random.fork_rng([]), torch.no_grad():
            for _ in range(2):
                with reading(read):
                    module(*(tensor.detach().clone() for tensor in batch))
                found.append(_numbers(module))
        names = {path: read.get(id(vars(one)), set()) for path, one in module.named_modules()}
        for (path, name, place), last in found[-1].items():
            values = [numbers.get((path, name, place)) for numbers in found]
            if name in names[path] and last not in values[:-1]:
                raise StrategyError(
                    "MW906",
                    f"The model's forward counts in {_shown(path, name)}{place}, a number of Python "
                    f"({', '.join(map(str, values))} after so many calls), of which a graph would have the first value "
                    "in every step. Count in a buffer (register_buffer), or leave it out.",
                )


def _shown(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix("model.")


def _numbers(root: nn.Module) -> Numbers:
    return {
        (path, name, keystr(place)): leaf
        for path, module in root.named_modules()
        for name, value in vars(module).items()
        if name not in INTERNAL
        for place, leaf in _leaves(value)
    }


def _leaves(value: Any) -> list[tuple[Any, Any]]:
    """The numbers that an attribute is, or has in dicts or lists, with their places."""
    if isinstance(value, dict | list):
        return [(place, leaf) for place, leaf in tree_flatten_with_path(value)[0] if type(leaf) in (int, float)]
    return [((), value)] if type(value) in (int, float) else []


def _tensors(root: nn.Module) -> dict[tuple[str, str], Tensor]:
    return {
        (path, name): value
        for path, module in root.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
