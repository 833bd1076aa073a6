"""Selecting a run's checkpoints in a folder: the newest one, the best one, and those to keep.

A folder may hold more: of another run, or of a branch that was abandoned when a run continued an earlier checkpoint.
Those stay until the run saves the same step, or passes it where `checkpoint.keep` limits how many there are; until then
they are loaded by their own path only. Invariant: nothing here chooses one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from runner.checkpoint.folder import HEADER, complete, named, number, remove
from runner.checkpoint.manifest import read_header
from runner.errors import ConfigError
from runner.run_folder import lineage
from runner.run_folder.lineage import Lineage

Better = Callable[[float, float | None], bool]
"""Whether a value of a metric is better than the best so far, if there is one."""


def on_branch(path: Path, branch: Lineage | None) -> bool:
    """Whether the checkpoint `path` is on the branch of a run. True if either is unknown: the reader then reports the
    error."""
    if branch is None:
        return True
    try:
        header = read_header(path)
    except ConfigError:
        return True
    return branch.includes(header.run, header.step)


def candidates(place: Path, branch: Lineage | None) -> Iterator[Path]:
    """The checkpoints in `place` that a run could continue, the newest first; including those without a header."""
    return (path for path in reversed(named(place)) if on_branch(path, branch))


def newest(place: Path) -> Path | None:
    """The complete checkpoint with the most steps in `place`, of the run whose checkpoints are there."""
    branch = lineage.of_checkpoints(place)
    return next((path for path in reversed(complete(place)) if on_branch(path, branch)), None)


def is_one(path: Path) -> bool:
    """Whether `path` means a checkpoint: itself, or the newest of a run."""
    return (path / HEADER).is_file() or any(newest(place) for place in (path, path / "checkpoints"))


def locate(path: Path, key: str = "train.resume") -> Path:
    """The checkpoint that `path` means: itself, or the newest in it or in its `checkpoints`.

    Args:
        path: a checkpoint, a run folder or its folder of checkpoints.
        key: the config key that gave it, for the message.

    Raises:
        ConfigError: there is none.
    """
    if (path / HEADER).is_file():
        return path
    if (latest := newest(path) or newest(path / "checkpoints")) is not None:
        return latest
    why = "holds no complete checkpoint (step-...)" if path.is_dir() else "does not exist"
    if others := [other.name for other in (*complete(path), *complete(path / "checkpoints"))]:
        why = f"holds no checkpoint of its own run, but of another one: {', '.join(others)}"
    raise ConfigError(
        "MW604", f"{key} = {str(path)!r}: this folder {why}. Give a run folder, its checkpoints, or one of them."
    )


def drop(place: Path, step: int, keep: int | None, better: Better | None, branch: Lineage) -> None:
    """Remove all but the last `keep` checkpoints of a run up to `step` from `place`, and those of other runs up to
    there; the best one is kept too if `better` is given."""
    if keep is None:
        return
    passed = [path for path in complete(place) if number(path) <= step]
    own = [path for path in passed if on_branch(path, branch)]
    best = None if better is None else _best(own, better)
    for path in {*passed} - {*own[-keep:]} - ({best[1]} if best else set()):
        remove(path)


def best_metric(place: Path, better: Better) -> float | None:
    """The best metric of the run whose checkpoints are in `place`; None where none has one."""
    branch = lineage.of_checkpoints(place)
    best = _best((path for path in complete(place) if on_branch(path, branch)), better)
    return best and best[0]


def _best(paths: Iterable[Path], better: Better) -> tuple[float, Path] | None:
    """The best metric and the first checkpoint that has it. Checkpoints with a damaged header are ignored."""
    best: tuple[float, Path] | None = None
    for path in paths:
        try:
            metric = read_header(path).metric
        except ConfigError:
            continue
        if metric is not None and better(metric, best and best[0]):
            best = (metric, path)
    return best
