"""Selecting a run's checkpoints in a folder: the newest one, the best one, and those to keep.

A folder may hold more: of another run, or of a branch that was abandoned when a run continued an earlier checkpoint.
Those stay until the run saves the same step, or passes it where `checkpoint.keep` limits how many there are; until then
they are loaded by their own path only. Invariant: nothing here chooses one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from runner.checkpoint.folder import HEADER, complete, named, number, remove
from runner.checkpoint.manifest import read_header
from runner.errors import ConfigError
from runner.run_folder import lineage
from runner.run_folder.lineage import Lineage


def on_branch(path: Path, branch: Lineage | None) -> bool:
    """Whether the checkpoint `path` is on the branch of a run. True if either is unknown: the reader then reports the
    error."""
    if branch is None:
        return True
    try:
        found = read_header(path)
    except ConfigError:
        return True
    return branch.includes(found.run, found.step)


def candidates(place: Path, branch: Lineage | None) -> Iterator[Path]:
    """The checkpoints in `place` that a run could continue, the newest first; including those without a header."""
    return (path for path in reversed(named(place)) if on_branch(path, branch))


def newest(place: Path) -> Path | None:
    """The complete checkpoint with the most steps in `place`, of the run whose checkpoints are there."""
    branch = lineage.of_checkpoints(place)
    return next((path for path in reversed(complete(place)) if on_branch(path, branch)), None)


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
    found = newest(path) or newest(path / "checkpoints")
    if found is None:
        others = [one.name for one in (*complete(path), *complete(path / "checkpoints"))]
        why = "holds no complete checkpoint (step-...)" if path.is_dir() else "does not exist"
        if others:
            why = f"holds no checkpoint of its own run, but of another one: {', '.join(others)}"
        raise ConfigError(
            "MW604", f"{key} = {str(path)!r}: this folder {why}. Give a run folder, its checkpoints, or one of them."
        )
    return found


def drop(
    place: Path, step: int, keep: int | None, better: Callable[[float, float], bool] | None, branch: Lineage
) -> None:
    """Remove all but the last `keep` checkpoints of a run up to `step` from `place`, and those of other runs up to
    there; the best one is kept too if `better` is given."""
    if keep is None:
        return
    found = [one for one in complete(place) if number(one) <= step]
    own = [one for one in found if on_branch(one, branch)]
    best = None if better is None else _best(own, better)
    kept = {*own[-keep:], *([] if best is None else [best[1]])}
    for old in found:
        if old not in kept:
            remove(old)


def best_metric(place: Path, better: Callable[[float, float], bool]) -> float | None:
    """The best metric of the run whose checkpoints are in `place`; None where none has one."""
    branch = lineage.of_checkpoints(place)
    best = _best([one for one in complete(place) if on_branch(one, branch)], better)
    return None if best is None else best[0]


def _best(found: list[Path], better: Callable[[float, float], bool]) -> tuple[float, Path] | None:
    """The best metric and the first checkpoint that has it. Checkpoints with a damaged header are ignored."""
    best: tuple[float, Path] | None = None
    for path in found:
        try:
            metric = read_header(path).metric
        except ConfigError:
            continue
        if metric is not None and (best is None or better(metric, best[0])):
            best = (metric, path)
    return best
