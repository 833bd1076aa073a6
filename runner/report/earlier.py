"""The report of a plan that was made before, in the plan cache: `run plan` need not import, capture and plan again.

The question is the config, the shapes of a batch of the user's data, python's paths and the environment. An entry also
names every file that was read to answer it: modules, what they opened or listed, and the folders of packages. One that
has changed since, by its time or size, makes the entry useless, and so does a file or folder of `sys.path` that is new
and has a name that was imported or looked for (no other: run folders are made in the working directory). Invariant:
what depends on more than files (the devices of this machine) is not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import home
from runner.config.schema import Config
from runner.report.units import shown_path
from strategies.planner import plan_cache

if TYPE_CHECKING:
    from runner.planning.prepare import Prepared

PLAN, PAGE = "plan.json", "report.html"
LOADED = {"loaded_from": "the plan cache"}
PROGRESS = ("searching:", "deciding:", "preparing for ")
"""How notices begin that are not said again."""
OURS = ("runner.data.", "meshwright.")
"""Data sets that are known by their arguments and by the files that they open."""
CHANGING = ("/proc/", "/sys/", "/dev/")
LISTING = ("os.listdir", "os.scandir")
OF_A_PROCESS = frozenset("_ OLDPWD PWD SHLVL TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR".split())
"""Variables of the environment that differ between equal commands, or that torch sets itself."""
HERE = "\0"
"""Stands for the run folder."""


@dataclass(frozen=True)
class PlanReport:
    """What `run plan` prints and writes, its predicted seconds of a step, and the state of the files behind it."""

    notices: Sequence[str]
    text: str
    plan: str
    page: str
    seconds: float
    files: dict[str, Any]
    names: Sequence[str]
    folders: dict[str, Any]

    def give(self, run_dir: Path) -> float:
        """Print it and write it to a run folder. Returns the seconds."""
        print(*self.notices, self.text.replace(HERE, shown_path(run_dir)), sep="\n")
        for name, content in ((PLAN, self.plan), (PAGE, self.page)):
            (run_dir / name).write_text(content, encoding="utf-8")
        print(f"report: {shown_path(run_dir / PAGE)}")
        return self.seconds


class Reports:
    """The reports of one config, for a run folder."""

    def __init__(self, config: Config, run_dir: Path) -> None:
        self.run_dir, self.folder = run_dir, _folder(config)
        self.opened, self.listed, self.sought, self.said = set[str](), set[str](), set[str](), list[str]()
        if self.folder is not None:
            question = *PlanReport.__annotations__, _question(config)  # other versions keep other entries
            self.key = hashlib.sha256(repr(question).encode()).hexdigest()[:32]

    def find(self) -> PlanReport | None:
        """One whose files are as they were."""
        if self.folder is None:
            return None
        report = plan_cache.load(self.folder, self.key, print, lambda content: PlanReport(**content))
        if report is None or report.files != _state(report.files):
            return None
        return report if report.folders == _found(report.folders, report.names) else None

    def watch(self) -> Callable[[str], None]:
        """Note from now on which files are opened and which modules imported.

        Returns:
            What prints a notice and keeps it for the report.
        """
        if self.folder is not None:
            sys.addaudithook(self._note)
        return self._say

    def keep(self, prepared: Prepared, content: dict[str, Any], tables: str) -> None:
        """Store the report of a plan as one that is loaded."""
        if self.folder is None or prepared.plan is None:
            return
        from runner.report import plan_files, text

        loaded = replace(prepared, plan=replace(prepared.plan, search={**prepared.plan.search, **LOADED}))
        search = content["search"] | LOADED
        plan = (self.run_dir / PLAN).read_text(encoding="utf-8")
        before, after = (json.dumps(some, indent=2).replace("\n", "\n  ") for some in (content["search"], search))
        names = sorted({name.partition(".")[0] for name in (*sys.modules, *self.sought)})
        report = PlanReport(
            [line for line in self.said if not line.startswith(PROGRESS)],
            text.headline(loaded, self.run_dir).replace(shown_path(self.run_dir), HERE) + f"\n{tables}",
            plan.replace(f'"search": {before}', f'"search": {after}', 1),
            plan_files.page(content | {"search": search}, prepared),
            content["cost"]["total"],
            _state({*self._lasting(), *_modules()}),
            names,
            _found({*map(os.path.abspath, sys.path)}, names),
        )
        plan_cache.store(self.folder, self.key, vars(report), print)

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            self.opened.add(os.path.abspath(args[0]))
        elif event == "import":
            self.sought.add(args[0])
        elif event in LISTING and isinstance(args[0], str):
            self.listed.add(os.path.abspath(args[0]))

    def _lasting(self) -> list[str]:
        """The opened files and listed folders that the next command meets as this one has left them."""
        assert self.folder is not None
        changing = *CHANGING, *(f"{one.resolve()}{os.sep}" for one in (self.run_dir, self.folder.parent))
        listed = self.listed - {*map(os.path.abspath, sys.path)}  # of which only some names count
        return [file for file in (*self.opened, *listed) if not f"{file}{os.sep}".startswith(changing)]

    def _say(self, line: str) -> None:
        print(line)
        self.said.append(line)


def _folder(config: Config) -> Path | None:
    """The folder of reports of this config; None for those that depend on more than files."""
    parallel = config.parallel
    described = config.cluster.machine is not None and parallel.plan is None and config.model.weights is None
    if not described or parallel.dump_ir is not False or parallel.mode in ("stand_alone", "hybrid"):
        return None
    folder = home.plan_cache(parallel.plan_cache, lambda _: None)
    return None if folder is None else folder / "reports"


def _question(config: Config) -> object:
    data = config.data
    ours = (data.target or "").startswith(OURS) and data.path is None and "path" not in data.args
    batch = None if ours and data.collate is None else _batch(config)
    environment = sorted((name, value) for name, value in os.environ.items() if name not in OF_A_PROCESS)
    return config.model_dump_json(), batch, sys.version, sys.path, os.getcwd(), environment


def _batch(config: Config) -> object:
    """What a plan depends on of data of the user's, which may come from anywhere."""
    from runner.data.loader import flatten_batch, global_batch
    from runner.planning.datasets import datasets, micro_batch_rows, order_of

    training, _, collate = datasets(config)
    rows = order_of(config, training).rows(0)[: micro_batch_rows(config)]
    names, tensors = flatten_batch(global_batch(training, collate, rows, config.train.seed, 0))
    return len(training), [(name, one.dtype, tuple(one.shape)) for name, one in zip(names, tensors, strict=True)]


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
