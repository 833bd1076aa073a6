"""Buffers by whose values a forward may decide: those that are not saved, so that no checkpoint has others, and that no
forward writes. They are known to what answers questions about values (`constants.py`); one that turns out to be written
is not, and the capture begins anew.

Where a capture fails without them, saved buffers and parameters that are not trained count, too, such as a flag that
says whether a codebook is initialised. The graph then says by which it has decided, and holds for their values
alone, so `check_decided` compares them with what is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from strategies.capture.constants import HAS_DECIDED, LARGEST, VALUES, traced
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph

KINDS = "buffers", "parameters"


class ConstantBuffers:
    """The constant buffers of `root`, until one is seen to be written; those that another graph of the model writes, by
    names as in a state dict, are `written`."""

    def __init__(self, root: nn.Module, written: Set[str] = frozenset()) -> None:
        self._root = root
        named = root.named_buffers(remove_duplicate=False)
        self._written = {id(one) for name, one in named if name.removeprefix("model.") in written}
        self._saved = {*map(id, root.state_dict(keep_vars=True).values())}
        self._values = {name: one for name, one in self._constant() if id(one) not in self._saved}
        self._nodes: dict[str, fx.Node] = {}
        self._wide = False

    def _constant(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers, and the parameters that are not trained, of which there are values."""
        parameters = self._root.named_parameters(remove_duplicate=False)
        frozen = ((name, one) for name, one in parameters if not one.requires_grad)
        for name, one in (*self._root.named_buffers(remove_duplicate=False), *frozen):
            known = not one.is_meta and not isinstance(one, FakeTensor) and id(one) not in self._written
            if known and one.numel() <= LARGEST:
                yield name, one

    def widen(self) -> bool:
        """Count saved ones, too, from now on. Returns whether that adds any, so the second time False."""
        known, self._values = self._values, dict(self._constant())
        first, self._wide = not self._wide, True
        return first and self._values.keys() != known.keys()

    @property
    def decided(self) -> dict[str, Tensor]:
        """The values by which the forward has decided, by names as in a state dict."""
        return {
            name.removeprefix("model."): self._values[name].detach().cpu().clone()
            for name, node in self._nodes.items()
            if HAS_DECIDED in node.meta
        }

    @contextmanager
    def known(self) -> Iterator[None]:
        """Export within this context."""
        hook = self._root.register_forward_pre_hook(self._begin)
        try:
            yield
        finally:
            hook.remove()

    def _begin(self, *_: Any) -> None:
        self._nodes.clear()
        for name, one in chain(*(getattr(self._root, f"named_{kind}")(remove_duplicate=False) for kind in KINDS)):
            proxy = traced(one)[0] if name in self._values else None
            if proxy is not None:
                proxy.node.meta[VALUES] = self._values[name]
                self._nodes[name] = proxy.node

    def are_written(self, graph: OperatorGraph, tensors: Mapping[str, Tensor], replaced: Set[str]) -> bool:
        """Whether the forward has decided by buffers that it writes, or replaces; these are no longer known."""
        written = {_memory(tensors[graph.by_id[buffer].name]) for buffer, _ in graph.updates}
        wrong = [
            name
            for name, node in self._nodes.items()
            if HAS_DECIDED in node.meta and (_memory(self._values[name]) in written or name in replaced)
        ]
        for name in wrong:
            del self._values[name]
        return bool(wrong)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def check_decided(decided: Mapping[str, Tensor], loaded: Mapping[str, Tensor], what: str) -> None:
    """Raises StrategyError where `loaded` tensors have other values than those by which a graph has `decided`; `what`
    is said to have them."""
    for name, value in decided.items():
        if name in loaded and not torch.equal(value, loaded[name].detach().cpu().to(value.dtype)):
            raise StrategyError(
                "MW909",
                f"{what} has other values of {name} than the model begins with, and the model's forward takes a branch "
                "or a size by them; make the model with the same values (model.args), or load weights without them.",
            )


def check_kept(decided: Mapping[str, Tensor], other: OperatorGraph) -> None:
    """Raises StrategyError where another graph of the model writes a buffer by which training has `decided`."""
    for buffer, _ in other.updates:
        if (name := other.by_id[buffer].name) in decided:
            raise StrategyError(
                "MW901",
                f"The model's forward takes a branch or a size by the buffer {name} in training, and writes it in "
                "evaluation, so training is not one graph; write it in training, too, or decide by a Python value.",
            )
