"""Load checkpoint weights into the shards of a rank, whatever plan they were stored under.

Invariant: a rank reads the parts that it holds and nothing else, and no weight keeps its initial value.
"""

from __future__ import annotations

from collections.abc import Iterable

from runner import home
from runner.checkpoint import Checkpoint, locate, read
from runner.errors import ConfigError
from runner.training.execution import Execution
from strategies.core.graph import Source
from strategies.runtime.shards import Shard, of_slice

KEY = "predict.checkpoint"
KINDS = ("parameter", "buffer")
SHOWN = 3


def open_checkpoint(path: str) -> Checkpoint:
    """The checkpoint that `predict.checkpoint` means. Raises ConfigError if there is none."""
    place = home.expanded(path)
    if place.is_file():
        raise ConfigError(
            "MW613",
            f"{KEY} = {path!r} is a file, not a checkpoint, which is a folder; weights in a file are read with "
            f"model.weights={path} and {KEY}=null.",
        )
    return read(locate(place, KEY))


def check(checkpoint: Checkpoint, sources: Iterable[Source]) -> None:
    """Raise ConfigError unless `checkpoint` holds the parameters and buffers of this model, in their shapes."""
    expected = {one.name: one.spec.shape for one in sources if one.kind in KINDS and 0 not in one.spec.shape}
    stored = {name: checkpoint.tensors[f"model/{name}"].shape for name in checkpoint.names}
    for names, what in (
        ([name for name in expected if name not in stored], "does not have {}, which the model needs"),
        ([name for name in stored if name not in expected], "has {}, which the model does not know"),
    ):
        if names:
            more = f" ({len(names) - SHOWN} more)" if len(names) > SHOWN else ""
            raise ConfigError("MW613", f"{KEY}: {checkpoint.path} {what.format(', '.join(names[:SHOWN]) + more)}.")
    for name, shape in expected.items():
        if tuple(shape) != stored[name]:
            raise ConfigError(
                "MW613",
                f"{KEY}: {name} has shape {list(stored[name])} in {checkpoint.path}, but the model has {list(shape)}; "
                "model.args or model.config describe another model.",
            )


def fill(checkpoint: Checkpoint, execution: Execution) -> None:
    """Load the stored values into this rank's shards. Calls no collective. Raises ConfigError as `check`."""
    runner, program = execution.runner, execution.program
    programs = [program, *(one for _, one in execution.evaluations.values())]
    if runner is not None:
        programs += [unit.program for units in runner.evaluations.values() for unit in units]
    expected: dict[str, list[Shard]] = {}
    rank = execution.communicator.rank
    for one in programs:
        for source in one.sources:
            key = f"model/{source.name}"
            if source.kind in KINDS and key in checkpoint.tensors:
                shape = source.spec.shape
                block = one.layouts[source.id].block(shape, one.mesh, rank)
                expected[key] = [of_slice(shape, block, execution.tensors[source.name])]
    checkpoint.fill(expected)
