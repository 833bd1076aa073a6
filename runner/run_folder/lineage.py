"""Which run a folder and its checkpoints belong to. Imports no torch.

A run has an id, random, given when it begins. `run.json` in its folder and every checkpoint carry that id and the
run's history: which runs it continues, each up to which step. `train.resume=auto` and restarts continue the run of the
folder under its id; any other start is a new run. Invariant: a checkpoint is on the branch of a run if that run saved
it, or if a run of its history did, at a step that the history includes. Nothing else is ever continued implicitly.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import ConfigError
from runner.run_folder import CONFIG_FILE
from runner.run_folder.atomic import replace_text
from runner.run_folder.lock import Occupant, occupant_of

if TYPE_CHECKING:
    from runner.config.schema import Config

FILE = "run.json"
CHECKPOINTS, METRICS, RESTARTS, FAULTS = "checkpoints", "metrics.jsonl", "restarts.jsonl", "faults"
LOGGED = ("metrics.csv", "loggers.json", "histograms.jsonl")
"""Of loggers: the numbers, and the ids at services; of the callback: histograms."""
TRAINING = ("train", "launch")
"""Verbs after which the folder is that of a training run."""
MARKS = {CONFIG_FILE: "parallel", "plan.json": "operators"}
"""Files that a run replaces, each with a key that those of this program have."""
Ancestry = tuple[tuple[str, int], ...]
"""(run, last step) of every run that is continued, the latest first."""


@dataclass(frozen=True)
class Lineage:
    """The id of a run (empty for checkpoints older than ids), and the runs it continues."""

    run: str = ""
    history: Ancestry = ()

    def includes(self, run: str, step: int) -> bool:
        """Whether a checkpoint that `run` saved after `step` is on the branch of this run."""
        return run == self.run or any(run == other and step <= last for other, last in self.history)


@dataclass(frozen=True)
class RecordedRun:
    """The training run of a folder, as recorded in `run.json`: its id and history, who began it and when, and the
    checkpoint that it began with, if that was given by its path."""

    lineage: Lineage
    began: Occupant
    resumed: str | None


def read(run_dir: Path) -> RecordedRun | None:
    """The training run of `run_dir`; None where there is none, or its file cannot be read."""
    from strategies.core.bounded_files import read_json

    try:
        content = read_json(run_dir / FILE)
        history = tuple((str(run), int(last)) for run, last in content.pop("history"))
        resumed = content.pop("resumed")
        began = Occupant(**content)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return RecordedRun(Lineage(str(began.run), history), began, None if resumed is None else str(resumed))


def of_checkpoints(place: Path) -> Lineage | None:
    """The lineage of the run whose checkpoints are in `place`, if known."""
    run = read(place.parent)
    return None if run is None else run.lineage


def begin(config: Config, run_dir: Path, resume: str | None, ancestry: Sequence[tuple[str, int]]) -> None:
    """Record the run that trains in `run_dir` from now on: the run of the folder if `train.resume` is auto, else a new
    one.

    Args:
        resume: the checkpoint that is continued, None for none.
        ancestry: the run and step of that checkpoint, before those of its history.
    """
    if not leads(config):
        return
    auto = config.train.resume == "auto"
    known = read(run_dir) if auto else None
    mine = occupant_of(run_dir) or occupant(config, run_dir, None)
    if config.run.overwrite and not continues(config, run_dir):
        _remove_traces(run_dir)
    content = asdict(mine) | {"history": [one for one in ancestry if one[0] != mine.run]}
    content["resumed"] = (known and known.resumed) if auto else resume
    if known is not None:
        content["started"] = known.began.started
    replace_text(run_dir / FILE, json.dumps(content, indent=2) + "\n")


def occupant(config: Config, run_dir: Path, recipe: str | None) -> Occupant:
    """The identity of this process while it runs the job of `config` in `run_dir`."""
    known = read(run_dir) if config.job.name in TRAINING and config.train.resume == "auto" else None
    return Occupant.now(config.job.name, recipe, None if known is None else known.lineage.run)


def continues(config: Config, run_dir: Path) -> bool:
    """Whether `train.resume` continues the run in `run_dir` itself."""
    resume = config.train.resume
    return resume == "auto" or (resume is not None and Path(resume).resolve().is_relative_to(run_dir.resolve()))


def leads(config: Config) -> bool:
    """Whether this command starts rank 0, and so owns the run folder; others are started manually beside it."""
    launch = config.launch
    if launch.host is not None:
        return any(host.name == launch.host and 0 in host.ranks for host in launch.hosts)
    return launch.rank in (None, 0)


def check_folder(config: Config, run_dir: Path) -> None:
    """Raise ConfigError where `run_dir` belongs to a training run that the job of `config` would mix with, or holds a
    foreign file that it would overwrite."""
    if config.run.overwrite or not leads(config):
        return
    if (name := _foreign(run_dir)) is not None:
        raise ConfigError(
            "MW601",
            f"{run_dir / name} is not a file of this program, and the command would replace it. Give another folder "
            "with hydra.run.dir=DIR, or run.overwrite=true to replace it.",
        )
    if not _trained(run_dir):
        return
    run = read(run_dir)
    whose = "another training run" if run is None else f"the training run {run.began}"
    if config.job.name not in TRAINING:
        raise ConfigError(
            "MW601",
            f"{run_dir} is the folder of {whose}, and `run {config.job.name}` would replace its files. Give another "
            "folder with hydra.run.dir=DIR (by default each command gets a new one), or run.overwrite=true to replace "
            "what both write, such as config.json and plan.json; checkpoints and metrics stay.",
        )
    if not continues(config, run_dir):
        raise ConfigError(
            "MW601",
            f"{run_dir} is the folder of {whose}, with which a new run would mix. Go on with it by train.resume=auto, "
            "give another folder with hydra.run.dir=DIR, or begin anew with run.overwrite=true, which removes its "
            "checkpoints and metrics.",
        )


def _foreign(run_dir: Path) -> str | None:
    """The name of an output file that exists with JSON not written by a run, or None."""
    from strategies.core.bounded_files import read_json

    if (run_dir / FILE).exists():
        return None
    for name, key in MARKS.items():
        try:
            content = read_json(run_dir / name)
        except (OSError, ValueError):
            continue  # none, or a damaged one
        if not isinstance(content, dict) or key not in content:
            return name
    return None


def _trained(run_dir: Path) -> bool:
    """Whether a training run has left anything in `run_dir` that another one would mix with."""
    metrics = run_dir / METRICS
    measured = (run_dir / FILE).is_file() and metrics.is_file() and metrics.stat().st_size > 0
    return measured or any((run_dir / CHECKPOINTS).glob("step-*"))


def _remove_traces(run_dir: Path) -> None:
    """Remove files of an earlier run that a new one would mix with. Unknown files are kept."""
    place = run_dir / CHECKPOINTS
    for path in filter(Path.is_dir, (*place.glob("step-*"), *place.glob(".step-*"), run_dir / FAULTS)):
        if not path.is_symlink():
            shutil.rmtree(path)
    for name in (METRICS, RESTARTS, *LOGGED):
        (run_dir / name).unlink(missing_ok=True)
