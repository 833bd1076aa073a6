"""The bytes of the tensors that are alive, counted while a program runs.

Every storage that an operator of torch takes or returns is counted once, from when it is first seen until it is
really freed, whoever holds it. So what is counted is what an allocator would hand out, without its rounding and
without what kernels use inside. It works the same on tensors without numbers, whose storages have sizes too: a
prediction and a measurement that use it differ only where what they run differs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`now` are alive on devices of type `device`, `peak` is the most since the last `restart`. While `counting` is
    false, what is new is counted only when it is seen again."""

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.bytes = self.peak = 0
        self.counting = True
        self.elsewhere: Callable[[], int] = int
        """Bytes that are counted although they stand for memory of another kind."""
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch asks this; else the whole compiler would be imported."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.see(_tensors((args, kwargs)))
        results = func(*args, **kwargs)
        if not func.is_view:
            self.see(_tensors(results))
        return results

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of these tensors, if they are not counted yet."""
        for tensor in tensors if self.counting else ():
            if tensor.device.type == self.device:
                self._add(tensor.untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is not None and known[1] == size:
            return
        if known is not None:  # it was given another size
            self.bytes -= known[1]
        self._known[key] = weakref.ref(storage, partial(self._gone, key)), size
        self.bytes += size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        if key in self._known and self._known[key][0] is reference:
            self.bytes -= self._known.pop(key)[1]

    @property
    def now(self) -> int:
        return self.bytes - self.elsewhere()

    def restart(self) -> None:
        """Count the peak anew, from now."""
        self.peak = self.now


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of the distinct storages of `tensors`."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in the arguments or results of an operator."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
