"""Which checkpoint a run continues: every file is read and its checksum compared before anything is loaded.

Invariant: loaded values are the written ones; damage that files with the same content make good costs a warning.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from runner.checkpoint import folder
from runner.checkpoint.branch import candidates, is_one, locate
from runner.checkpoint.folder import HEADER
from runner.checkpoint.manifest import READING, faults, mark, others_beside, read_header, unmark
from runner.checkpoint.reading import Checkpoint, read
from runner.errors import ConfigError
from runner.run_folder.lineage import RecordedRun
from strategies.runtime.shards import MODEL
from strategies.runtime.tensor_files import StoredTensor, index


def to_continue(resume: str | None, place: Path, run: RecordedRun | None = None) -> Path | None:
    """The checkpoint that `train.resume` means for a run whose checkpoints are in `place`, which is cleaned; None to
    start afresh. auto is the newest one on the branch of `run`, or else what that began with; where the run is not
    known, the newest one there is. All of its files are read: with auto, a damaged one is passed over with a warning,
    and one that has lost RNG states is used only if no older one is intact.

    Raises ConfigError for a path that leads to none or to a damaged one, and where all of `place` are damaged.
    """
    folder.clean(place)
    if resume is None:
        return None
    if resume != "auto":
        path = locate(Path(resume))
        verify(path)
        return path
    passed, spare = [], None
    for path in candidates(place, None if run is None else run.lineage):
        passed.append(path.name)
        try:
            lost = examined(path)
        except ConfigError as error:
            print(f"warning: {str(error).removesuffix(others_beside(path)).rstrip()} It is passed over.", flush=True)
            continue
        if not (ranks := _without_random_states(lost)):
            _note(path, lost)
            return path
        spare = spare or (path, lost)
        what = f"({_listed(lost)}), and no other file holds the random states of {ranks}"
        print(f"warning: the checkpoint {path} is damaged {what}; an older one is preferred", flush=True)
    if spare is not None:
        _note(*spare)
        return spare[0]
    if run is not None and run.resumed is not None and Path(run.resumed).exists():
        verify(Path(run.resumed))
        return Path(run.resumed)
    if passed:
        raise ConfigError(
            "MW606",
            f"train.resume = 'auto': every checkpoint in {place} is damaged ({', '.join(passed)}). "
            "Remove them to start from the beginning, or give another with train.resume=PATH.",
        )
    return None


def verify(path: Path) -> Mapping[str, str]:
    """Read every file of the checkpoint `path` and compare checksums.

    Returns:
        The errors of damaged files that are not required, by file; printed, and recorded in the checkpoint.

    Raises:
        ConfigError: it is damaged beyond that.
    """
    lost = examined(path)
    _note(path, lost)
    return lost


def examined(path: Path) -> Mapping[str, str]:
    """Verify as `verify` does, but print and record nothing."""
    with suppress(OSError):  # recorded damage may have been repaired
        unmark(path)
    header = read_header(path)
    lost = faults(path, header.files)
    for name in header.files:
        if name.endswith(".pt") and name not in lost and (what := _fault_of_plain(path / name, header.run)):
            lost[name] = what
    try:
        read(path, lost)
    except ConfigError as error:
        if not lost:
            raise
        others = str(error).partition("). ")[2]
        raise ConfigError("MW606", f"The checkpoint {path} is damaged: {_listed(lost)}. {others}") from error
    return lost


def _note(path: Path, lost: Mapping[str, str]) -> None:
    """Print what `examined` returned, and note it in the checkpoint for all ranks. Raises ConfigError where it cannot
    be noted."""
    if not lost:
        return
    try:
        mark(path, lost)
    except OSError as error:
        raise ConfigError(
            "MW606",
            f"The checkpoint {path} is damaged: {_listed(lost)}. It cannot be noted there which files to do without "
            f"({error.strerror}); copy the checkpoint to a folder that can be written.",
        ) from error
    ranks = _without_random_states(lost)
    but = f", except the random states of {ranks}, which begin anew" if ranks else ""
    print(
        f"warning: the checkpoint {path} is damaged ({_listed(lost)}), but other files hold the same{but}", flush=True
    )


def _fault_of_plain(file: Path, run: str) -> str | None:
    """The error in the content of a torch file of `run` whose checksum is correct, or None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about foreign files
            content = torch.load(file, weights_only=True, map_location="cpu")
    except READING as error:
        return f"it holds more than plain data ({type(error).__name__})"
    if not isinstance(content, dict) or "random" not in content:
        return "it does not hold the states of a rank"
    return None if content.get("run", run) == run else "it is of another run"


def _without_random_states(lost: Collection[str]) -> str:
    """The ranks whose RNG states are in one of the `lost` files, as text."""
    ranks = sorted(int(match[1]) for name in lost if (match := re.fullmatch(r"rank-(\d+)\.pt", name)))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


def _listed(lost: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {what}" for name, what in lost.items())


def weights(path: Path) -> dict[str, StoredTensor]:
    """The tensors in files of weights, or in a checkpoint those of the model without its loss, by name.

    Args:
        path: weights as in `tensor_files.index`, a checkpoint, or a run whose newest one is meant. The checksums of a
            checkpoint's files are compared.

    Raises:
        ConfigError: a checkpoint is damaged.
        StrategyError: there is nothing that can be read.
    """
    if not is_one(path):
        stored = index(path)
        for file in {part.file for one in stored.values() for part in one.parts}:
            _check_file(Path(file))
        return stored
    place = locate(path.absolute(), "model.weights")
    verify(place)
    return {name: one for name, one in weights_in(read(place)).items() if not name.startswith("loss.")}


def weights_in(opened: Checkpoint) -> dict[str, StoredTensor]:
    """The tensors of model and loss in a checkpoint, by name, with absolute paths of their files."""
    tensors = {}
    for key, entry in opened.tensors.items():
        if key.startswith(MODEL):
            parts = tuple(replace(part, file=str(opened.path.absolute() / part.file)) for part in entry.parts)
            tensors[key.removeprefix(MODEL)] = replace(entry, parts=parts, key=key.removeprefix(MODEL))
    return tensors


def _check_file(file: Path) -> None:
    """Raise ConfigError where `file` is one of a checkpoint, and not as it was written."""
    path = file.parent
    if (path / HEADER).exists():
        stamp = read_header(path).files.get(file.name)
        if stamp is not None and (what := faults(path, {file.name: stamp}).get(file.name)):
            raise ConfigError("MW606", f"The checkpoint {path} is damaged: {file.name}: {what}.")
    elif folder.NAME.fullmatch(path.name):
        print(f"warning: {path} has no {HEADER}, so the checksum of {file.name} is not known", flush=True)
