"""Loading: every rank reads its shards under the current plan, whatever plan they were stored under.

Nothing is modified until the checkpoint is known to be complete. Invariant: under the checkpoint's plan the run
continues bitwise identically; under another one weights and states have the same values, cast if the precision differs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from runner.checkpoint import folder, rng_state
from runner.checkpoint.branch import candidates, locate
from runner.checkpoint.content import Content, name_of
from runner.checkpoint.continuation import Continuation, compare
from runner.checkpoint.folder import HEADER
from runner.checkpoint.manifest import READING, faults, mark, read_header, unmark
from runner.checkpoint.reading import Checkpoint, is_one, read
from runner.errors import ConfigError
from runner.run_folder.lineage import Run
from strategies.core.errors import StrategyError
from strategies.core.graph import Source
from strategies.optimizer import state as optimizer_state
from strategies.optimizer.state import OptimizerScalars, States
from strategies.runtime.shards import MODEL, OPTIMIZER
from strategies.runtime.tensor_files import StoredTensor, index

PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
"""Entries of the states of torch's schedulers that have one element per group."""


@dataclass(frozen=True)
class Restored:
    """The optimizer step after which the checkpoint was saved, the epoch and row at which the data goes on, what
    differs, the bytes of tensors that this rank read, files that were lost, and whether the program draws
    random numbers, as far as that is known."""

    step: int
    position: tuple[int, int]
    continuation: Continuation
    bytes_read: int
    lost: Mapping[str, str]
    draws: bool

    def lines(self, config: Mapping[str, Any]) -> Iterator[str]:
        """Lines for the user of a run with `config`."""
        yield from self.continuation.lines(config, self.draws)
        yield f"step {self.step}, {self.bytes_read:,} bytes read on rank 0"


def load(path: Path, content: Content) -> Restored:
    """Restore weights, buffers, optimizer, scheduler and RNG states in place (collective).

    Args:
        path: the checkpoint.
        content: the state of this rank, which is overwritten.

    Returns:
        The step and position at which the run continues, and the differences.

    Raises:
        StrategyError: this run cannot continue the one that was saved; names the differences.
        ConfigError: `path` is not a checkpoint, or is damaged.
    """
    continuation = check(
        path, plan=content.plan, config=content.config, fingerprint=content.fingerprint, samples=content.samples
    )
    checkpoint = read(path)
    parts = list(checkpoint.plain())
    check_model(checkpoint, content.sources, content.published)
    state = OptimizerScalars(
        [group for part in parts for group in part["groups"]],
        {name: scalars for part in parts for name, scalars in part["scalars"].items()},
        next((part["loss_scale"] for part in parts if part["loss_scale"] is not None), None),
    )
    own = f"rank-{content.rank:05d}.pt"
    random = None if continuation.moved or own in checkpoint.lost else checkpoint.load(own)["random"]
    content.updates.begin(_states(checkpoint), state)
    for batch in content.updates.pieces(write=True):
        checkpoint.fill({key: pieces for key, pieces in batch.items() if key in checkpoint.tensors})
    checkpoint.fill({key: pieces for key, pieces in content.buffers().items() if key in checkpoint.tensors})
    content.updates.loaded()
    if content.scheduler is not None and parts[0]["scheduler"] is not None:
        content.scheduler.load_state_dict(
            regrouped(parts, [group["names"] for group in content.updates.plain().groups])
        )
    if random is not None:
        rng_state.restore(random)
    elif (seed := content.config["train"].get("seed")) is not None:
        rng_state.begin(seed, checkpoint.step)
    return Restored(
        checkpoint.step,
        checkpoint.header.position,
        continuation,
        checkpoint.bytes_read,
        checkpoint.lost,
        content.program.random or not content.program.instructions,
    )


def regrouped(parts: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A scheduler's state under another plan, which may have other parameter groups: each continues with the entries of
    its parameters' former group.

    Args:
        parts: of each group of a pipeline, "groups" (each with "names") and "scheduler"; entries that are not per group
            are equal in all of them.
        members: the parameters of every group of this run.
    """
    first: dict[str, Any] = parts[0]["scheduler"]
    groups = [
        (part["scheduler"], number, set(group["names"]))
        for part in parts
        for number, group in enumerate(part["groups"])
    ]
    sources = []
    for names in members:
        source = next(((state, number) for state, number, trained in groups if trained & set(names)), None)
        if source is None:
            return first
        sources.append(source)
    return _scheduler_state(first, sources)


def _scheduler_state(like: Mapping[str, Any], sources: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in like.items():
        if key in PER_GROUP and isinstance(value, list):
            found[key] = [state[key][number] for state, number in sources]
        elif key == "_schedulers":
            found[key] = [
                _scheduler_state(one, [(state[key][place], number) for state, number in sources])
                for place, one in enumerate(value)
            ]
        else:
            found[key] = value
    return found


def check(path: Path, **identity: Any) -> Continuation:
    """The differences, if the run with this `identity` (the keyword arguments of `compare`) may continue the
    checkpoint `path`; nothing but the header is read. Raises as `load`."""
    return compare(path, asdict(read_header(path)), **identity)


def to_continue(resume: str | None, place: Path, run: Run | None = None) -> Path | None:
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
            found = examined(path)
        except ConfigError as error:
            print(f"warning: {error}", flush=True)
            continue
        if not (ranks := _without_random_states(found)):
            _note(path, found)
            return path
        spare = spare or (path, found)
        what = f"({_listed(found)}), and no other file holds the random states of {ranks}"
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
    found = examined(path)
    _note(path, found)
    return found


def examined(path: Path) -> Mapping[str, str]:
    """Like `verify`, but prints and records nothing."""
    with suppress(OSError):  # recorded damage may have been repaired
        unmark(path)
    header = read_header(path)
    found = faults(path, header.files)
    for name in header.files:
        if name.endswith(".pt") and name not in found and (what := _fault_of_plain(path / name, header.run)):
            found[name] = what
    try:
        read(path, found)
    except ConfigError as error:
        if not found:
            raise
        others = str(error).partition("). ")[2]
        raise ConfigError("MW606", f"The checkpoint {path} is damaged: {_listed(found)}. {others}") from error
    return found


def _note(path: Path, found: Mapping[str, str]) -> None:
    """Print what `examined` found, and note it in the checkpoint for all ranks. Raises ConfigError where it cannot be
    noted."""
    if not found:
        return
    try:
        mark(path, found)
    except OSError as error:
        raise ConfigError(
            "MW606",
            f"The checkpoint {path} is damaged: {_listed(found)}. It cannot be noted there which files to do without "
            f"({error.strerror}); copy the checkpoint to a folder that can be written.",
        ) from error
    ranks = _without_random_states(found)
    but = f", except the random states of {ranks}, which begin anew" if ranks else ""
    print(
        f"warning: the checkpoint {path} is damaged ({_listed(found)}), but other files hold the same{but}", flush=True
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
    ranks = sorted(int(found[1]) for name in lost if (found := re.fullmatch(r"rank-(\d+)\.pt", name)))
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


def _listed(found: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {what}" for name, what in found.items())


def check_file(file: Path) -> None:
    """Raise ConfigError where `file` is one of a checkpoint, and not as it was written."""
    if (file.parent / HEADER).exists():
        path = file.parent
        wanted = read_header(path).files.get(file.name)
        if wanted is not None and (what := faults(path, {file.name: wanted}).get(file.name)):
            raise ConfigError("MW606", f"The checkpoint {path} is damaged: {file.name}: {what}.")
    elif folder.NAME.fullmatch(file.parent.name):
        print(f"warning: {file.parent} has no {HEADER}, so the checksum of {file.name} is not known", flush=True)


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
            check_file(Path(file))
        return stored
    place = locate(path.absolute(), "model.weights")
    verify(place)
    opened = read(place)
    found = {}
    for name in opened.names:
        if not name.startswith("loss."):
            entry = opened.tensors[MODEL + name]
            parts = tuple(replace(part, file=str(opened.path / part.file)) for part in entry.parts)
            found[name] = replace(entry, parts=parts, key=name)
    return found


def _states(checkpoint: Checkpoint) -> States:
    found: dict[str, dict[str, optimizer_state.StoredState]] = {}
    for key, entry in checkpoint.tensors.items():
        if key.startswith(OPTIMIZER):
            state, name = key.split("/", 2)[1], name_of(key)
            like = entry.dtype == checkpoint.tensors[MODEL + name].dtype
            dtype = getattr(torch, entry.dtype)
            found.setdefault(state, {})[name] = optimizer_state.StoredState(entry.shape, dtype, like)
    return found


def check_model(checkpoint: Checkpoint, sources: Iterable[Source], published: frozenset[str] | None) -> None:
    """Require that a checkpoint holds every tensor of a model in its shape, and that the model has every trained
    tensor.

    Args:
        checkpoint: the open checkpoint.
        sources: the model's parameters and buffers.
        published: the names in the model's state dict; a buffer that is in none may be missing.

    Raises:
        StrategyError: something is missing or has another shape.
    """
    known = set(published or ())
    for source in sources:
        if source.kind not in ("parameter", "buffer"):
            continue
        known.add(source.name)
        entry = checkpoint.tensors.get(MODEL + source.name)
        made_anew = source.kind == "buffer" and published is not None and source.name not in published
        if entry is None and (0 in source.spec.shape or made_anew):
            continue
        if entry is None or entry.shape != source.spec.shape:
            was = "not there" if entry is None else f"of shape {list(entry.shape)}"
            raise StrategyError(
                "MW607",
                f"The checkpoint {checkpoint.path} cannot be continued by this run: {source.name} is {was} in it, and "
                f"this model has it with shape {list(source.spec.shape)}.",
            )
    strange = sorted({name for names in checkpoint.states.values() for name in names} - known)
    if strange and published is not None:
        raise StrategyError(
            "MW607",
            f"The checkpoint {checkpoint.path} cannot be continued by this run: it has trained {strange[0]}, which "
            "this model does not have.",
        )
