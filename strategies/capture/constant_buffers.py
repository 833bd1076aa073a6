"""Buffers by whose values a forward may decide: those that are not saved, so that no checkpoint has others, and that no
forward writes. They are known to what answers questions about values (`constants.py`); one that turns out to be written
is not, and the capture begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from strategies.capture.constants import HAS_DECIDED, LARGEST, VALUES, traced
from strategies.core.graph import OperatorGraph


class ConstantBuffers:
    """The constant buffers of `root`, until one is seen to be written."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        saved = {*map(id, root.state_dict(keep_vars=True).values())}
        self._values = {
            name: buffer
            for name, buffer in root.named_buffers(remove_duplicate=False)
            if id(buffer) not in saved and not buffer.is_meta and not isinstance(buffer, FakeTensor)
            if buffer.numel() <= LARGEST
        }
        self._nodes: dict[str, fx.Node] = {}

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
        for name, buffer in self._root.named_buffers(remove_duplicate=False):
            proxy, _literals = traced(buffer)
            if name in self._values and proxy is not None:
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
