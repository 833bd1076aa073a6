"""Models that have shapes and no numbers, to be captured without memory for their parameters.

A model is built on torch's device `meta`, where nothing is allocated or initialized. Its tensors then become fake
tensors of the CPU, so that what forward makes by itself (positions, masks) meets them on one device and the graph is
that of the real model. Invariant: nothing of the size of a parameter or of an activation is ever allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import _pop_mode, _push_mode

from strategies.capture.nodes import replaced
from strategies.capture.python_state import PythonState, users_files


@contextmanager
def shapes_only() -> Iterator[None]:
    """Tensors that are made inside, without a device of their own, have shapes and no numbers, but for those that a
    file makes when it is imported. What else is put into globals and caches of the user's files is taken out again."""
    states, execute = [PythonState(None, users_files([*sys.modules]))], SourceFileLoader.exec_module
    outside = _len_torch_function_stack()

    def imported(loader: SourceFileLoader, file: ModuleType) -> None:
        modes = [_pop_mode() for _ in range(_len_torch_function_stack() - outside)]  # type: ignore[no-untyped-call]
        try:
            execute(loader, file)  # which may set a default device, a mode of its own below these
        finally:
            for mode in reversed(modes):
                _push_mode(mode)  # type: ignore[no-untyped-call]
        if mine := users_files([file.__name__]):
            states.append(PythonState(None, mine))

    with torch.device("meta"), replaced(SourceFileLoader, "exec_module", imported):
        try:
            yield
        finally:
            for state in states:
                state.restore()


def pretend(module: nn.Module, batch: Sequence[Tensor]) -> list[Tensor]:
    """Turn the tensors of a module that was built with `shapes_only` into fake ones of the CPU, in place; returns the
    like of `batch` for them. Tied tensors stay tied."""
    mode = FakeTensorMode()
    known: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            own = FakeTensor(mode, tensor.detach().to("meta"), torch.device("cpu"))
            known[id(tensor)] = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
        return known[id(tensor)]

    tensors: list[Tensor] = []  # alive until the end, so that ids stay theirs
    for child in module.modules():
        stores: tuple[dict[str, Any], ...] = (child._parameters, child._buffers, vars(child))
        for store in stores:
            for name, tensor in list(store.items()):
                if isinstance(tensor, Tensor):
                    tensors.append(tensor)
                    store[name] = fake(tensor)
    return [fake(tensor) for tensor in batch]
