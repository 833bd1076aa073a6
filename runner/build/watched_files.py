"""The files behind a result that is kept, and whether they are still as they were.

These are modules, what they opened or listed, and the folders of packages. One that has changed since, by its time or
size, makes the result useless, and so does a file or folder of `sys.path` that is new and has a name that was imported
or looked for (no other: run folders are made in the working directory).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHANGING = ("/proc/", "/sys/", "/dev/")
LISTING = ("os.listdir", "os.scandir")
OF_A_PROCESS = frozenset("_ OLDPWD PWD SHLVL TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR".split())
"""Variables of the environment that differ between equal commands, or that torch sets itself."""


@dataclass(frozen=True)
class Files:
    """Time and size of files, and what folders of `sys.path` have under the names of modules."""

    files: Mapping[str, Any]
    names: Sequence[str]
    folders: Mapping[str, Any]

    @property
    def unchanged(self) -> bool:
        return self.files == _state(self.files) and self.folders == _found(self.folders, self.names)


class WatchedFiles:
    """What this process reads from `begin` on, but for what is in the folders `own`."""

    def __init__(self, own: Sequence[Path]) -> None:
        self.own = [f"{folder.resolve()}{os.sep}" for folder in own]
        self.opened, self.listed, self.sought = set[str](), set[str](), set[str]()

    def begin(self) -> None:
        sys.addaudithook(self._note)

    def add(self, other: Files) -> None:
        """Count the files behind a result that this process has taken over."""
        self.opened.update(other.files)
        self.sought.update(other.names)

    def behind(self) -> Files:
        """The files behind what this process has made until now."""
        names = sorted({name.partition(".")[0] for name in (*sys.modules, *self.sought)})
        return Files(_state({*self._lasting(), *_modules()}), names, _found({*map(os.path.abspath, sys.path)}, names))

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            self.opened.add(os.path.abspath(args[0]))
        elif event == "import":
            self.sought.add(args[0])
        elif event in LISTING and isinstance(args[0], str):
            self.listed.add(os.path.abspath(args[0]))

    def _lasting(self) -> list[str]:
        """The opened files and listed folders that the next command meets as this one has left them."""
        changing = *CHANGING, *self.own
        listed = self.listed - {*map(os.path.abspath, sys.path)}  # of which only some names count
        return [file for file in (*self.opened, *listed) if not f"{file}{os.sep}".startswith(changing)]


def surroundings() -> object:
    """What else a result of this process may depend on: the interpreter, its search path, the environment."""
    environment = sorted((name, value) for name, value in os.environ.items() if name not in OF_A_PROCESS)
    return sys.version, sys.path, os.getcwd(), environment


def _modules() -> set[str]:
    """The files and folders of all modules that are loaded."""
    known = [vars(module) for module in list(sys.modules.values())]
    files = [file for module in known if (file := module.get("__file__"))]
    folders = [folder for module in known for folder in module.get("__path__", ())]
    return {*map(os.path.abspath, (*files, *folders))}


def _state(files: Iterable[str]) -> dict[str, Any]:
    """Time and size of the files and folders that exist."""
    state = {}
    for file in sorted(files):
        with suppress(OSError):
            found = os.stat(file)
            state[file] = [found.st_mtime_ns, found.st_size]
    return state


def _found(folders: Iterable[str], names: Iterable[str]) -> dict[str, Any]:
    """What folders of `sys.path` have under these names of modules."""
    known, found = {*names}, {}
    for folder in sorted(folders):
        with suppress(OSError):
            found[folder] = sorted(one for one in os.listdir(folder) if one.partition(".")[0] in known)
    return found
