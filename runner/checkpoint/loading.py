"""Loading: every rank reads its shards under the current plan, whatever plan they were stored under.

Nothing is modified until the checkpoint is known to be complete. Invariant: under the checkpoint's plan the run
continues bitwise identically; under another one weights and states have the same values, cast if the precision differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.checkpoint import rng_state
from runner.checkpoint.content import Content, name_of
from runner.checkpoint.continuation import Continuation, compare
from runner.checkpoint.manifest import read_header
from runner.checkpoint.reading import Checkpoint, read
from strategies.core.errors import StrategyError
from strategies.core.graph import Source
from strategies.optimizer.state import OptimizerScalars, States, StoredState, is_of_element
from strategies.runtime.shards import MODEL, OPTIMIZER

PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
"""Entries of the states of torch's schedulers that have one element per group."""


@dataclass(frozen=True)
class Restored:
    """The optimizer step after which the checkpoint was saved, the epoch and row at which the data goes on, what
    differs, the bytes of tensors that this rank read, whether the program draws random numbers, as far as that is
    known, and whether the evaluation after the step is still to be made."""

    step: int
    position: tuple[int, int]
    continuation: Continuation
    bytes_read: int
    draws: bool
    pending: bool

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
    check_model(checkpoint, content.sources, content.published, content.elsewhere)
    scalars = {name: scalars for part in parts for name, scalars in part["scalars"].items()}
    numbers = _numbers(checkpoint, scalars)
    state = OptimizerScalars(
        [group for part in parts for group in part["groups"]],
        {name: _without(numbers, name, states) for name, states in scalars.items()},
        next((part["loss_scale"] for part in parts if part["loss_scale"] is not None), None),
    )
    own = f"rank-{content.rank:05d}.pt"
    random = None if continuation.moved or own in checkpoint.lost else checkpoint.load(own)["random"]
    content.updates.begin(_states(checkpoint, numbers), state)
    for batch in content.updates.pieces(write=True):
        checkpoint.fill({key: shards for key, shards in batch.items() if key in checkpoint.tensors})
        for key in numbers.keys() & batch.keys():
            for shard in batch[key]:
                shard.view.copy_(numbers[key])
    checkpoint.fill({key: shards for key, shards in content.buffers().items() if key in checkpoint.tensors})
    content.updates.loaded()
    if content.scheduler is not None and parts[0]["scheduler"] is not None:
        content.scheduler.load_state_dict(
            regrouped(parts, [group["names"] for group in content.updates.plain().groups])
        )
    for name, callback in content.callbacks.items():
        tensors = {key: shards for key, shards in content.callback_tensors.items() if key.partition("/")[0] == name}
        if name in (saved := parts[0].get("callbacks", {})) and tensors.keys() <= checkpoint.tensors.keys():
            checkpoint.fill(tensors)
            callback.load_state_dict(saved[name])
    if random is not None:
        rng_state.restore(random)
    elif (seed := content.config["train"].get("seed")) is not None:
        rng_state.begin(seed, checkpoint.step)
    draws = content.program.random or not content.program.instructions
    header = checkpoint.header
    return Restored(checkpoint.step, header.position, continuation, checkpoint.bytes_read, draws, header.pending)


def regrouped(parts: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]]) -> dict[str, Any]:
    """A scheduler's state under another plan, which may have other parameter groups: each continues with the entries of
    its parameters' former group; one without parameters, of which a stage has none, with those of any.

    Args:
        parts: of each group of a pipeline, "groups" (each with "names") and "scheduler"; entries that are not per group
            are equal in all of them.
        members: the parameters of every group of this run.
    """
    first: dict[str, Any] = parts[0]["scheduler"]
    sources = []
    for names in members:
        former = (
            (part["scheduler"], number)
            for part in parts
            for number, group in enumerate(part["groups"])
            if not names or not set(names).isdisjoint(group["names"])
        )
        if (source := next(former, None)) is None:
            return first
        sources.append(source)
    return _scheduler_state(first, sources)


def _scheduler_state(like: Mapping[str, Any], sources: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Any]:
    def entry(key: str, value: Any) -> Any:
        if key in PER_GROUP and isinstance(value, list):
            return [state[key][number] for state, number in sources]
        if key == "_schedulers":
            return [
                _scheduler_state(one, [(state[key][place], number) for state, number in sources])
                for place, one in enumerate(value)
            ]
        return value

    return {key: entry(key, value) for key, value in like.items()}


def check(path: Path, **identity: Any) -> Continuation:
    """The differences, if the run with this `identity` (the keyword arguments of `compare`) may continue the
    checkpoint `path`; nothing but the header is read. Raises as `load`."""
    return compare(path, asdict(read_header(path)), **identity)


def _numbers(checkpoint: Checkpoint, scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """The states of parameters of shape (), by key, which plans without ZeRO store as scalars: those that other
    parameters have tensors of, or, where none has, all but counters."""
    known = {key.split("/", 2)[1] for key in checkpoint.tensors if key.startswith(OPTIMIZER)}
    single = {key.removeprefix(MODEL) for key, entry in checkpoint.tensors.items() if entry.shape == ()}
    return {
        f"{OPTIMIZER}{state}/{name}": value
        for name in scalars.keys() & single
        for state, value in scalars[name].items()
        if is_of_element(state, value) and (state in known or not known)
    }


def _without(numbers: Mapping[str, Tensor], name: str, states: Mapping[str, Any]) -> dict[str, Any]:
    return {state: value for state, value in states.items() if f"{OPTIMIZER}{state}/{name}" not in numbers}


def _states(checkpoint: Checkpoint, numbers: Mapping[str, Tensor]) -> States:
    dtypes = {key: getattr(torch, entry.dtype) for key, entry in checkpoint.tensors.items()}
    stored = {key: (checkpoint.tensors[key].shape, dtype) for key, dtype in dtypes.items() if key.startswith(OPTIMIZER)}
    stored |= {key: ((), value.dtype) for key, value in numbers.items()}
    states: dict[str, dict[str, StoredState]] = {}
    for key, (shape, dtype) in stored.items():
        state, name = key.split("/", 2)[1], name_of(key)
        states.setdefault(state, {})[name] = StoredState(shape, dtype, dtype == dtypes[MODEL + name])
    return states


def check_model(
    checkpoint: Checkpoint,
    sources: Iterable[Source],
    published: frozenset[str] | None,
    elsewhere: frozenset[str] = frozenset(),
) -> None:
    """Require that a checkpoint holds every tensor of a model in its shape, and that the model has every trained
    tensor.

    Args:
        checkpoint: the open checkpoint.
        sources: the model's parameters and buffers.
        published: the names in the model's state dict; a buffer that is in none may be missing.
        elsewhere: further names, of tensors that other ranks have.

    Raises:
        StrategyError: something is missing or has another shape.
    """
    refused = f"The checkpoint {checkpoint.path} cannot be continued by this run: "
    known = {*(published or ()), *elsewhere}
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
                f"{refused}{source.name} is {was} in it, and this model has it with shape {list(source.spec.shape)}.",
            )
    unknown = sorted({name_of(key) for key in checkpoint.tensors if key.startswith(OPTIMIZER)} - known)
    if unknown and published is not None:
        raise StrategyError("MW607", f"{refused}it has trained {unknown[0]}, which this model does not have.")
