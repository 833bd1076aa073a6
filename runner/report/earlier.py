"""The report of a plan that was made before, in the plan cache: `run plan` need not import, capture and plan again.

The question is the config, the shapes of a batch of the user's data, and the surroundings; the files behind an entry
must be as they were. Invariant: what depends on more than files (the devices of this machine) is not kept.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import home
from runner.build.watched_files import Files, WatchedFiles, surroundings
from runner.config.schema import Config
from runner.report.units import shown_path
from strategies.planner import plan_cache

if TYPE_CHECKING:
    from runner.build.captures import Captures
    from runner.planning.prepare import Prepared

PLAN, PAGE = "plan.json", "report.html"
LOADED = {"loaded_from": "the plan cache"}
PROGRESS = ("searching:", "deciding:", "preparing for ")
"""How notices begin that are not said again."""
OURS = ("runner.data.", "meshwright.")
"""Data sets that are known by their arguments and by the files that they open."""
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
    behind: Files

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
        self.config, self.run_dir, self.folder = config, run_dir, _folder(config, run_dir)
        self.said = list[str]()
        if self.folder is not None:
            ours = (run_dir, self.folder.parent, *filter(None, [home.cache()]))  # named by the digest of their sources
            self.watched = WatchedFiles(ours, _strings(config.model_dump()))
            question = *PlanReport.__annotations__, _question(config)  # other versions keep other entries
            self.key = hashlib.sha256(repr(question).encode()).hexdigest()[:32]

    def find(self) -> PlanReport | None:
        """One whose files are as they were."""
        if self.folder is None:
            return None
        report = plan_cache.load(self.folder, self.key, print, _read)
        return report if report is not None and report.behind.unchanged else None

    @property
    def captures(self) -> Captures | None:
        """The captures of this config."""
        if self.folder is None:
            return None
        from runner.build.captures import Captures

        return Captures(self.config, self.folder.parent / "captures", self.watched, self.say)

    def keep(self, prepared: Prepared, content: dict[str, Any], tables: str) -> None:
        """Store the report of a plan as one that is loaded."""
        if self.folder is None or prepared.plan is None or (behind := self.watched.behind()) is None:
            return
        from runner.report import plan_files, text

        loaded = replace(prepared, plan=replace(prepared.plan, search={**prepared.plan.search, **LOADED}))
        content = content | {"search": content["search"] | LOADED}
        report = PlanReport(
            [line for line in self.said if not line.startswith(PROGRESS)],
            text.headline(loaded, self.run_dir).replace(shown_path(self.run_dir), HERE) + f"\n{tables}",
            plan_files.plan_text(content),
            plan_files.page(content, prepared),
            content["cost"]["total"],
            behind,
        )
        plan_cache.store(self.folder, self.key, vars(report) | {"behind": vars(behind)}, print)

    def say(self, line: str) -> None:
        """Print a notice and keep it for the report."""
        print(line)
        self.said.append(line)


def _folder(config: Config, run_dir: Path) -> Path | None:
    """The folder of reports of this config; None for those that depend on more than files, or on files in the run
    folder."""
    parallel = config.parallel
    described = config.cluster.machine is not None and parallel.plan is None and config.model.weights is None
    if not described or parallel.dump_ir is not False or parallel.mode in ("stand_alone", "hybrid"):
        return None
    if Path.cwd().is_relative_to(run_dir.resolve()):
        return None
    folder = home.plan_cache(parallel.plan_cache, lambda _: None)
    return None if folder is None else folder / "reports"


def _strings(nested: object) -> Iterator[str]:
    """The strings in a config that name files or folders: native code may read them."""
    if isinstance(nested, Mapping):
        nested = list(nested.values())
    if isinstance(nested, list | tuple):
        for one in nested:
            yield from _strings(one)
    elif isinstance(nested, str) and os.path.exists(nested):
        yield nested


def _question(config: Config) -> object:
    data = config.data
    ours = (data.target or "").startswith(OURS) and data.path is None and "path" not in data.args
    batch = None if ours and data.collate is None else _batch(config)
    return config.model_dump_json(), batch, surroundings()


def _read(content: dict[str, Any]) -> PlanReport:
    return PlanReport(**content | {"behind": Files(**content["behind"])})


def _batch(config: Config) -> object:
    """What a plan depends on of data of the user's, which may come from anywhere."""
    from runner.data.loader import flatten_batch, global_batch
    from runner.planning.datasets import datasets, micro_batch_rows, order_of

    training, _, collate = datasets(config)
    rows = order_of(config, training).rows(0)[: micro_batch_rows(config)]
    names, tensors = flatten_batch(global_batch(training, collate, rows, config.train.seed, 0))
    return len(training), [(name, one.dtype, tuple(one.shape)) for name, one in zip(names, tensors, strict=True)]
