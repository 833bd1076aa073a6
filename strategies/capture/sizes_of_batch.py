"""Numbers that a forward reads from integers of the batch, such as how many graphs it has (`int(index.max()) + 1`),
where a capture fails without them.

The graph has the numbers of the batch that is captured. So that no step has others, an entry that says one goes on
through an operator that compares, and raises where it is another one; no pass drops it where nothing follows.
Invariant: a number is compared where it is read, before what the forward computes with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import track_tensor_tree

from strategies.capture.constants import BATCH, INTEGERS, traced
from strategies.capture.nodes import COMPARED, beneath_tracing, proxy_mode, users_line
from strategies.rules.compared import compared


class SizesOfBatch:
    """The integers of the example `batch` of `root`, whose numbers are known once `widen` was called."""

    def __init__(self, root: Any, batch: Sequence[Tensor]) -> None:
        self._root = root
        self._values = {
            number: one
            for number, one in enumerate(batch)
            if one.dtype in INTEGERS and not one.is_meta and not isinstance(one, FakeTensor)
        }
        self.known = False

    def widen(self) -> bool:
        """Know numbers from now on. Returns whether that changes anything, so the second time False."""
        before, self.known = self.known, bool(self._values)
        return self.known and not before

    @contextmanager
    def read(self) -> Iterator[None]:
        """Export within this context."""
        hook = self._root.register_forward_pre_hook(self._begin) if self.known else None
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def _begin(self, _: nn.Module, given: Sequence[Tensor]) -> None:
        for number, value in self._values.items():
            if (proxy := traced(given[number])[0]) is not None:
                proxy.node.meta[BATCH] = Entry(given[number], value, self._root.inputs[number])


class Entry:
    """A traced entry of the batch, and its values in the example."""

    def __init__(self, tensor: Tensor, value: Tensor, name: str) -> None:
        self.tensor, self.value, self.name = tensor, value, name

    def compare(self, said: Tensor, values: Tensor) -> None:
        """Let the entry go on through an operator that raises where what it said has other values."""
        tracing = proxy_mode().tracer
        known = json.dumps([values.tolist(), self.name, users_line()])
        proxies = [tracing.unwrap_proxy(one) for one in (self.tensor, said)]
        node = tracing.create_proxy("call_function", COMPARED, (known, *proxies), {}, "compared")
        with beneath_tracing():
            made = compared(known, self.tensor, said)
        track_tensor_tree(made, node, constant=None, tracer=tracing)
        track_tensor_tree(self.tensor, node, constant=None, tracer=tracing)
        node.node.meta[BATCH] = self
