"""Which package a top-level name means, in every process that has imported `runner`.

The packages of this project have common names, and users have folders of the same names. The rule: `conf`, `recipes`,
`runner` and `strategies` are ours wherever a process starts, and a folder of the user's of that name only adds modules
that ours lacks. `models` is the user's where there is one, and ours adds what that lacks; `meshwright.models` is ours
alone, which is what shipped recipes mean. Nothing else is imported here.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
OURS = ("conf", "recipes", "runner", "strategies")
SHARED = "models"
PROJECT = "meshwright"


class _Finder:
    """Before all other finders on `sys.meta_path`: a folder without `__init__.py` would else hide editable installs."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is not None:
            return None
        if name == PROJECT:
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(ROOT)]
            return spec
        if name in OURS:
            return PathFinder.find_spec(name, [str(ROOT)])
        return _shared() if name == SHARED else None


def install() -> None:
    """Make the rule hold in this process; calling again does no harm."""
    if not any(finder is _Finder for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder)


def add_theirs(name: str) -> None:
    """Let modules of the user's folder `name` be found in our package of that name, where ours has none."""
    if name in OURS:
        ours = importlib.import_module(name)
        ours.__path__.extend(place for place in _folders(theirs(name)) if place not in ours.__path__)


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
    return f"{PROJECT}.{name}" if spec is not None and (spec.origin or hidden(name)) else name


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
