"""The files behind a result that is kept, and whether they are still as they were.

These are modules, what they opened or listed, what the config names, and the folders of packages. One that has changed
since, by its time or size, or has appeared, makes the result useless, and so does a file or folder of `sys.path` that
is new and has a name that was imported or looked for (no other: run folders are made in the working directory). A
result is not kept where a file was written while it was made, or where a process was started or a connection opened.
Files that native code opens by paths that the config does not name are not seen, nor is `os.stat`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGUN = time.time_ns()
CHANGING = ("/proc/", "/sys/", "/dev/")
OPENING = ("open", "sqlite3.connect")
LISTING = ("os.listdir", "os.scandir")
OUTSIDE = frozenset("subprocess.Popen os.system os.posix_spawn os.exec os.fork os.forkpty socket.connect".split())
"""Events, as audit hooks name them, after which a result may depend on more than files."""
FINDING = ("<frozen importlib", "importlib/metadata/__init__.py", "pkgutil.py", "pkg_resources/__init__.py", __file__)
"""Files of code that lists a folder to find modules in it, of which only some names count."""
OF_A_PROCESS = frozenset("_ OLDPWD PWD SHLVL TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR".split())
"""Variables of the environment that differ between equal commands, or that torch sets itself."""


@dataclass(frozen=True)
class Files:
    """Time and size of files, None for those that do not exist, and what folders of `sys.path` have under the names of
    modules."""

    files: Mapping[str, Any]
    names: Sequence[str]
    folders: Mapping[str, Any]

    @property
    def unchanged(self) -> bool:
        return self.files == _state(self.files) and self.folders == _found(self.folders, self.names)


class _Seen:
    """What this process has read since it was first watched. What an earlier job of a sweep has read counts, too:
    modules remember it."""

    def __init__(self) -> None:
        self.watching = self.outside = False
        self.opened, self.listed, self.sought = set[str](), set[str](), set[str]()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """As a finder of `sys.meta_path`: called first for every module that is imported or looked for."""
        self.sought.add(name)

    def note(self, event: str, args: tuple[Any, ...]) -> None:
        if event in OPENING and isinstance(args[0], str | bytes | os.PathLike):
            if not (event == "open" and (args[2] or 0) & (os.O_WRONLY | os.O_RDWR)):
                self.opened.add(os.path.abspath(os.fsdecode(args[0])))
        elif event in LISTING and isinstance(args[0], str | bytes | os.PathLike):
            lister = sys._getframe(1).f_code.co_filename
            if not any(code in lister for code in FINDING):
                self.listed.add(os.path.abspath(os.fsdecode(args[0])))
        elif event in OUTSIDE:
            self.outside = True


_seen = _Seen()


class WatchedFiles:
    """What this process reads from now on.

    Args:
        own: folders whose files do not count.
        named: files and folders that count.
    """

    def __init__(self, own: Sequence[Path], named: Iterable[str] = ()) -> None:
        forms = [
            form for folder in own for form in (folder.resolve(), os.path.abspath(folder))
        ]  # beyond links, and not
        self.own = [f"{form}{os.sep}" for form in forms]
        _seen.opened.update(os.path.abspath(one) for one in named)
        if not _seen.watching:
            _seen.watching = True
            sys.addaudithook(_seen.note)
            sys.meta_path.insert(0, _seen)

    def add(self, other: Files) -> None:
        """Count the files behind a result that this process has taken over."""
        _seen.opened.update(other.files)
        _seen.sought.update(other.names)

    def behind(self) -> Files | None:
        """The files behind what this process has made until now; None where it may depend on more than their present
        state."""
        modules, packages = _modules()
        files, folders = (self._state(some) for some in (_seen.opened | modules, _seen.listed | packages))
        if _seen.outside or any(state and state[0] >= BEGUN for state in files.values()):
            return None
        names = sorted({name.partition(".")[0] for name in (*sys.modules, *_seen.sought)})
        return Files(folders | files, names, _found({*map(os.path.abspath, sys.path)}, names))

    def _state(self, files: Iterable[str]) -> dict[str, Any]:
        own = *CHANGING, *self.own
        return _state(file for file in files if not f"{file}{os.sep}".startswith(own))


def surroundings() -> object:
    """What else a result of this process may depend on: the interpreter, its search path, the environment."""
    environment = sorted((name, value) for name, value in os.environ.items() if name not in OF_A_PROCESS)
    return sys.version, sys.path, os.getcwd(), environment


def _modules() -> tuple[set[str], set[str]]:
    """The files of all modules that are loaded, and the folders of packages."""
    known = [vars(module) for module in list(sys.modules.values())]
    files = [file for module in known if (file := module.get("__file__"))]
    folders = [folder for module in known for folder in module.get("__path__", ())]
    return {*map(os.path.abspath, files)}, {*map(os.path.abspath, folders)}


def _state(files: Iterable[str]) -> dict[str, Any]:
    """Time and size of files and folders, None for those that do not exist."""
    state: dict[str, Any] = dict.fromkeys(sorted(files))
    for file in state:
        with suppress(OSError, ValueError):  # a null character in a name
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
