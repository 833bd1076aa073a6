"""What a forward may carry from one call to the next outside of parameters and buffers: numbers, flags and tensors in
attributes of modules and of their classes, in globals of the files that define them, and in what functions enclose.

Invariant: nothing of it is changed or copied by looking at it, and `restore` leaves it as it was.
"""

from __future__ import annotations

import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import _lru_cache_wrapper, partial
from itertools import count
from os.path import isabs
from types import FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from strategies.capture.nodes import file_of, in_library

INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())), type(iter("")), type(iter(range(0))))
"""Of Python, which say how much is left of them."""
CONTAINERS = frozenset({dict, list, set, deque, Counter, OrderedDict, defaultdict})
"""Classes derived from these may make any attribute."""
PACKAGES = "-packages"
"""In the paths of installed packages, by which the user's own files are distinguished."""
LARGEST = 256
"""Of containers with more entries only the number of these is looked at; arrays with more elements are left out."""
DEEPEST = 5
"""Levels of containers and objects below an attribute or a global."""

ENTRIES = " entries"
"""Ends the place of how many entries a container has."""

Place = tuple[str, str, str]
"""The path of a module, or "" outside of modules; the name of an attribute or global; where in it."""
State = dict[Place, Any]
"""A plain value, or a tensor that is no parameter, by place."""


class PythonState:
    """What the modules of `root` and what they are made of, and the user's `files`, hold when this is made.

    Args:
        root: None: no modules.
        files: Names of imported files.
    """

    def __init__(self, root: nn.Module | None, files: Iterable[str] = ()) -> None:
        self.values: State = {}
        self._functions: list[FunctionType] = []
        self._restores: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {
            id(vars(one)): one for one in list(sys.modules.values()) if type(one) is ModuleType
        }
        """Objects not looked at again, nor the namespaces of modules, such as that of `builtins`, by id."""
        modules = {} if root is None else {module: path for path, module in root.named_modules()}
        for module, path in modules.items():
            for name, value in vars(module).items():
                if name not in INTERNAL:
                    self._look(value, path, name)
        for owner, title, name, value in _around(modules, files, self._functions):
            self._look(value, "", f"{title}.{name}")
            if type(value) in PLAIN or isinstance(value, Tensor):
                self._restores.append(partial(_assign, owner, name, value))

    def restore(self) -> None:
        """Put all back that is outside of modules' own attributes, or in containers of these."""
        for restore in self._restores:
            restore()

    def _look(self, value: Any, path: str, name: str, place: str = "", depth: int = 0) -> None:
        """Note the content of `value`, at a place of an attribute or global."""
        if type(value) in PLAIN or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter)):
            self.values[path, name, place] = value
        elif isinstance(value, count):
            self.values[path, name, place] = repr(value)
        elif isinstance(value, ITERATORS):
            self.values[path, name, place] = operator.length_hint(value)
        elif isinstance(value, np.ndarray | np.generic):
            if value.size <= LARGEST:
                self.values[path, name, place] = repr(value.tolist())
        elif depth <= DEEPEST and id(value) not in self._seen:
            self._seen[id(value)] = value  # alive, so that its id stays its own
            if type(value) in CONTAINERS:
                self.values[path, name, place + ENTRIES] = len(value)
            if isinstance(value, FunctionType):
                self._functions.append(value)
            if (restore := _restoring(value)) is not None:
                self._restores.append(restore)
            for step, inner in _inside(value):
                self._look(inner, path, name, f"{place}{step}", depth + 1)


def changed(before: State, now: State) -> State:
    """Attributes with another tensor or value than before, and the new one."""
    return {place: value for place, value in now.items() if not _same(before.get(place), value)}


def _same(first: Any, second: Any) -> bool:
    return first is second or (type(first) in PLAIN and type(first) is type(second) and bool(first == second))


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """What stands in a container, an object, a class or a function of the user's, with its place."""
    if isinstance(value, tuple):
        value = tuple.__getitem__(value, slice(None))  # without what its class makes of len and iter
    if type(value) in CONTAINERS or isinstance(value, tuple):
        if len(value) <= LARGEST:
            entries = list(value.items()) if isinstance(value, dict) else enumerate(tuple(value))
            yield from ((f"[{key!r}]", inner) for key, inner in entries)
    elif isinstance(value, FunctionType):
        if _of_user(value.__module__):
            yield from ((f".{name}", inner) for name, inner in vars(value).items())
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                try:
                    yield f".{name}", cell.cell_contents
                except ValueError:  # nothing has been assigned yet
                    continue
    elif isinstance(value, GeneratorType):
        frame = value.gi_frame  # None at its end
        yield from () if frame is None else ((f".{name}", inner) for name, inner in frame.f_locals.items())
    elif isinstance(value, MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, partial):
        yield from (("", value.func), ("", value.args), ("", value.keywords))
    elif _is_object(value):
        yield from ((f".{name}", inner) for name, inner in _members(value))


def _is_object(value: Any) -> bool:
    """Whether `value` is a class, or an object of a class, of the user's, and no module of torch or Python."""
    if isinstance(value, nn.Module | ModuleType) or not hasattr(value, "__dict__"):
        return False
    if isinstance(value, SimpleNamespace):
        return True
    return _of_user(value.__module__ if isinstance(value, type) else type(value).__module__)


def _restoring(value: Any) -> Callable[[], None] | None:
    """What gives a container or object its present entries back, and a cache of results none that are newer."""
    if isinstance(value, _lru_cache_wrapper):
        return partial(_forget, value, value.cache_info().misses)
    if type(value) in CONTAINERS:
        return partial(_refill, value, value.copy()) if len(value) <= LARGEST else None
    if isinstance(value, FunctionType) and value.__closure__:
        cells = [(cell, cell.cell_contents) for cell in value.__closure__ if _is_full(cell)]
        return partial(_reset, cells)
    if not isinstance(value, type) and _is_object(value):
        return partial(_refill, vars(value), dict(vars(value)))
    return None


def _refill(container: Any, entries: Any) -> None:
    if len(container) == len(entries) and all(map(operator.is_, _flat(container), _flat(entries))):
        return
    container.clear()
    if isinstance(container, dict | set):
        container.update(entries)
    else:
        container.extend(entries)


def _flat(container: Any) -> list[Any]:
    return [*container.keys(), *container.values()] if isinstance(container, dict) else [*container]


def _forget(cache: Any, misses: int) -> None:
    if cache.cache_info().misses != misses:
        cache.cache_clear()


def _is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _reset(cells: list[tuple[Any, Any]]) -> None:
    for cell, content in cells:
        if cell.cell_contents is not content:
            cell.cell_contents = content


def _assign(owner: Any, name: str, value: Any) -> None:
    if vars(owner).get(name) is not value:
        setattr(owner, name, value)


def users_files(imported: Iterable[str]) -> list[str]:
    """Which of the imported files, by name, are the user's and not installed."""
    return [name for name in imported if isabs(file := file_of(name)) and PACKAGES not in file and not in_library(file)]


def _around(
    modules: Iterable[nn.Module], more: Iterable[str], functions: list[FunctionType]
) -> Iterator[tuple[Any, str, str, Any]]:
    """Attributes of the classes of modules, and globals of the files of these classes, of `functions` and of `more`,
    and of what the user's files among them import from others of the user's: (owner, its name, name, value)."""
    classes = {one: None for module in modules for one in type(module).__mro__ if _of_user(one.__module__)}
    for one in classes:
        yield from ((one, one.__name__, name, value) for name, value in _members(one))
    files = dict.fromkeys([*(one.__module__ for one in (*classes, *functions)), *more])
    waiting = [name for name in files if _of_user(name)]
    while waiting:
        file = waiting.pop()
        for name, value in _members(sys.modules[file]):
            if not isinstance(value, ModuleType | FunctionType | type):
                yield sys.modules[file], file, name, value
                continue
            whose = value.__name__ if isinstance(value, ModuleType) else value.__module__
            if whose == file:
                yield sys.modules[file], file, name, value
            elif whose not in files and _of_user(whose) and PACKAGES not in file_of(whose):
                files[whose] = None
                waiting.append(whose)


def _members(owner: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(owner).items() if not name.startswith("__")]


def _of_user(name: Any) -> bool:
    """Whether a module of this name, of functions and classes, is none of torch, of Python or of this project."""
    file = file_of(name) if isinstance(name, str) else ""
    return name == "__main__" or (file != "" and not in_library(file))
