"""Deep copies of modules, of those too that Python does not copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

M = TypeVar("M", bound=nn.Module)


def duplicate(module: M, *, parameters: bool = True) -> M:
    """A deep copy. Tensors that a module has computed from its parameters, as torch.nn.utils.weight_norm does in its
    constructor, are copied without their history: torch refuses to copy it, and every forward computes them anew.
    Attributes that Python cannot copy, such as a lock, are shared, as are tensors without numbers, and parameters
    unless `parameters`."""
    attributes = _pytree.tree_leaves([vars(part) for part in module.modules()])
    leaves = [leaf for leaf in attributes if isinstance(leaf, Tensor)]
    kept = FakeTensor if parameters else (FakeTensor, nn.Parameter)
    memo: dict[int, Any] = {id(one): one for one in leaves if isinstance(one, kept)}
    memo |= {id(one): one.detach().clone() for one in leaves if not one.is_leaf and id(one) not in memo}
    try:
        return copy.deepcopy(module, {**memo})
    except TypeError:
        for part in module.modules():
            memo |= {id(value): value for name in vars(part) for value in _not_copied(vars(part)[name])}
        return copy.deepcopy(module, memo)


def _not_copied(value: Any) -> Iterator[Any]:
    """What Python cannot copy in an attribute, but for modules and what holds some."""
    if isinstance(value, nn.Module | Tensor) or _is_copied(value):
        return
    if isinstance(value, Mapping):
        inner = [*value.values()]
    else:
        inner = [*value] if isinstance(value, list | tuple | set) else [*getattr(value, "__dict__", {}).values()]
    deeper = [found for one in inner for found in _not_copied(one)]
    yield from deeper
    if not deeper and not any(isinstance(one, nn.Module) for one in inner):
        yield value


def _is_copied(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except TypeError:
        return False
    return True
