"""Deep copies of modules, of those too that Python does not copy."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree

M = TypeVar("M", bound=nn.Module)


def duplicate(module: M, *, parameters: bool = True) -> M:
    """A deep copy. Tensors that a module has computed from its parameters, as torch.nn.utils.weight_norm does in its
    constructor, are copied without their history: torch refuses to copy it, and every forward computes them anew.
    Attributes that Python cannot copy, such as a lock, are shared, as are tensors without numbers, and parameters
    unless `parameters`. Functions that an attribute holds and that close over a part of the module, as a head with the
    weights of an embedding may, close over that of the copy."""
    attributes = leaves_of([vars(part) for part in module.modules()])
    functions = dict(_closures(attributes))
    leaves = [leaf for leaf in attributes if isinstance(leaf, Tensor)]
    kept = FakeTensor if parameters else (FakeTensor, nn.Parameter)
    memo: dict[int, Any] = {id(one): one for one in leaves if isinstance(one, kept)}
    memo |= {id(one): one.detach().clone() for one in leaves if not one.is_leaf and id(one) not in memo}
    memo |= {id(one): made for one, made in functions.items()}
    try:
        copied, known = _deeply(module, memo)
    except TypeError:
        for part in module.modules():
            memo |= {id(value): value for name in vars(part) for value in _not_copied(vars(part)[name])}
        copied, known = _deeply(module, memo)
    for one, made in functions.items():
        for cell, new in zip(one.__closure__ or (), made.__closure__ or (), strict=True):
            new.cell_contents = known.get(id(cell.cell_contents), cell.cell_contents)
    return copied


def leaves_of(values: Any) -> list[Any]:
    """The leaves of nested containers, and those of what objects in them have as attributes, such as a criterion that
    is no module; those of modules are not looked for."""
    waiting, found, seen = [values], list[Any](), set[int]()
    while waiting:
        for leaf in _pytree.tree_leaves(waiting.pop()):
            if id(leaf) in seen:
                continue
            seen.add(id(leaf))
            found.append(leaf)
            if not isinstance(leaf, nn.Module | Tensor | type | FunctionType | ModuleType):
                waiting.append(list(getattr(leaf, "__dict__", {}).values()))
    return found


def _deeply(module: M, memo: Mapping[int, Any]) -> tuple[M, dict[int, Any]]:
    """A deep copy, and what was copied, by the ids of the originals."""
    known = {**memo}
    return copy.deepcopy(module, known), known


def _closures(values: Iterable[Any]) -> Iterator[tuple[FunctionType, FunctionType]]:
    """The functions among `values`, and among what they close over, each with one whose cells are empty."""
    waiting, seen = [*values], set[int]()
    while waiting:
        one = waiting.pop()
        if not isinstance(one, FunctionType) or not one.__closure__ or id(one) in seen:
            continue
        seen.add(id(one))
        try:
            waiting += [cell.cell_contents for cell in one.__closure__]
        except ValueError:  # an empty cell: the function was never complete
            continue
        cells = tuple(CellType() for _ in one.__closure__)
        made = FunctionType(one.__code__, one.__globals__, one.__name__, one.__defaults__, cells)
        made.__kwdefaults__, made.__qualname__ = one.__kwdefaults__, one.__qualname__
        vars(made).update(vars(one))
        yield one, made


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
