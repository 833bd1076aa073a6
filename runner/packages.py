"""Which package a top-level name means, in every process that has imported `runner`.

The packages of this project have common names, and users have folders of the same names. The rule, which is also the
page docs/reference/names.md: `conf`, `recipes`, `runner` and `strategies` are ours wherever a process starts, and a
folder or file of the user's with that name only adds what ours lacks. `models` is the user's where there is one, and
ours adds what that lacks; `meshwright.models` is ours alone, which is what shipped recipes mean. Whatever else is
installed comes before the working directory. A folder without code is no package: libraries that try to import `triton`
or `z3` would take a folder of data with that name for it. Nothing else is imported here.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import (
    BYTECODE_SUFFIXES,
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
    SourcelessFileLoader,
)
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
OURS = ("conf", "meshwright", "recipes", "runner", "strategies")
SHARED = "models"
LOADERS = (
    (ExtensionFileLoader, EXTENSION_SUFFIXES),
    (SourceFileLoader, SOURCE_SUFFIXES),
    (SourcelessFileLoader, BYTECODE_SUFFIXES),
)
"""Of the files that Python imports, in its order."""
LOOKED_AT = 10_000
"""Entries of a folder in which code is looked for, at most."""


class _Finder:
    """A finder before all others on `sys.meta_path`: a folder without `__init__.py` would else hide editable
    installs."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is not None:
            return None
        if name in OURS:
            return PathFinder.find_spec(name, [str(ROOT)])
        return _shared() if name == SHARED else None


class _CodeFinder(FileFinder):
    """Finds modules and packages as Python does, but for folders without code."""

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, target)
        data = spec is not None and spec.loader is None and not any(map(_has_code, _folders(spec)))
        return None if data else spec


def install() -> None:
    """Install the rule in this process; idempotent."""
    if not any(finder is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder)
        sys.path_hooks.insert(0, _code_finder)
        for place in [*sys.path_importer_cache]:
            if not _is_installed(place):
                del sys.path_importer_cache[place]


def _code_finder(place: str) -> _CodeFinder:
    if _is_installed(place) or not os.path.isdir(place):
        raise ImportError(f"{place} is no folder outside of the installation")
    return _CodeFinder(place, *LOADERS)


def _is_installed(place: str) -> bool:
    return place.startswith((sys.prefix, sys.base_prefix))


def _has_code(folder: str) -> bool:
    """Whether a folder has a file that Python imports, at any depth; one with very many entries is taken for code."""
    suffixes = tuple(suffix for _, some in LOADERS for suffix in some)
    seen = 0
    for _, folders, files in os.walk(folder):
        seen += len(folders) + len(files)
        if seen > LOOKED_AT or any(file.endswith(suffixes) for file in files):
            return True
    return False


def installed_first() -> None:
    """Move the working directory behind installed packages, as for the script `run`, if Python put it first, as for
    `python -m runner`: a user's own folder `models` or `recipes` would hide ours."""
    with suppress(FileNotFoundError):  # the working directory was removed, which the command reports
        if sys.path[:1] == [os.getcwd()]:
            sys.path.append(sys.path.pop(0))


def add_theirs() -> None:
    """Add the user's modules under the names of our packages: modules in their folders, and definitions of a file such
    as `strategies.py` or of a folder's `__init__.py`. Nothing of ours is replaced."""
    for name in OURS:
        spec = theirs(name)
        if spec is None:
            continue
        ours = importlib.import_module(name)
        ours.__path__.extend(place for place in _folders(spec) if place not in ours.__path__)
        if spec.origin is not None:
            own = _lazy.setdefault(name, vars(ours).get("__getattr__"))
            vars(ours)["__getattr__"] = partial(_attribute, ours, own, spec)


_lazy: dict[str, Callable[[str], object] | None] = {}
"""The module `__getattr__` of each of our packages that was given another one."""


def _attribute(ours: ModuleType, own: Callable[[str], object] | None, spec: ModuleSpec, name: str) -> object:
    """The lazy attribute `name` of our package, or else the user's module. A submodule is left for Python to import."""
    if own is not None:
        with suppress(AttributeError):
            return own(name)
    if not name.startswith("__") and PathFinder.find_spec(f"{ours.__name__}.{name}", ours.__path__) is None:
        return getattr(_loaded(f"{ours.__name__}.__init__", spec), name)
    raise AttributeError(f"module {ours.__name__!r} has no attribute {name!r}")


def _loaded(name: str, spec: ModuleSpec) -> ModuleType:
    if name not in sys.modules:
        own = spec_from_file_location(name, spec.origin, submodule_search_locations=spec.submodule_search_locations)
        assert own is not None and own.loader is not None
        sys.modules[name] = module = module_from_spec(own)
        try:
            own.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def theirs(name: str) -> ModuleSpec | None:
    """The first package or module `name` in the working directory or on the path that is not ours."""
    for entry in _places():
        spec = PathFinder.find_spec(name, [entry])
        if spec is not None and not _is_ours(spec, name):
            return spec
    return None


def hidden(name: str) -> Path | None:
    """The user's file or folder that is taken where the dotted `name`, such as `models.gpt.GPT`, could mean a module of
    ours, None where ours is taken."""
    top, _, rest = name.partition(".")
    module = rest.partition(".")[0]
    spec = theirs(SHARED) if top == SHARED and module else None
    if spec is None or not any((ROOT / SHARED / one).exists() for one in (f"{module}.py", module)):
        return None
    found = PathFinder.find_spec(f"{SHARED}.{module}", _folders(spec))
    return None if found is None else Path(found.origin or next(iter(_folders(found))))


def ours_alone(name: str) -> str:
    """A dotted name of a shipped recipe that means ours whatever the user has: `meshwright.models.gpt.GPT`."""
    mine = name.startswith(f"{SHARED}.") and (ROOT / SHARED / f"{name.split('.')[1]}.py").exists()
    spec = theirs(SHARED) if mine else None
    # a folder of theirs without code, such as one of weights, hides nothing
    return f"meshwright.{name}" if spec is not None and (spec.origin or hidden(name)) else name


def _shared() -> ModuleSpec | None:
    ours = PathFinder.find_spec(SHARED, [str(ROOT)])
    found = theirs(SHARED)
    if found is None or ours is None:
        return ours
    locations = [*_folders(found), *_folders(ours)]
    if found.origin is None:  # a folder without `__init__.py`
        ours.submodule_search_locations = locations
        return ours
    return spec_from_file_location(SHARED, found.origin, loader=found.loader, submodule_search_locations=locations)


def _places() -> Iterator[str]:
    try:
        yield os.getcwd()
    except FileNotFoundError:
        pass
    yield from sys.path


def _folders(spec: ModuleSpec | None) -> list[str]:
    return [] if spec is None else list(spec.submodule_search_locations or ())


def _is_ours(spec: ModuleSpec, name: str) -> bool:
    return any(Path(folder).resolve() == ROOT / name for folder in _folders(spec))
