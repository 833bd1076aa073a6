"""What one rank saves and restores: its shards of weights, buffers and optimizer states, and non-tensor state.

Invariant: over all ranks every element is stored once (`copies` times where replicas hold it), and nothing is gathered
for that: replicas alternate, and each ZeRO partition is on one rank anyway.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from runner.checkpoint import rng_state
from runner.checkpoint.writing import Companions
from runner.errors import ConfigError
from runner.run_folder.lineage import Lineage
from strategies.core.graph import Source
from strategies.core.layout import Block
from strategies.core.program import Program
from strategies.optimizer.updates import Updates
from strategies.runtime.communicator import Communicator
from strategies.runtime.shards import MODEL, OPTIMIZER, Shard, Shards, of_slice


class Stateful(Protocol):
    """What has a state that is no tensor of the model."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Content:
    """The state to save and restore. `tensors` are this rank's buffers by name (parameters come from `updates`); `plan`
    and `config` are JSON, `fingerprint` is a hash of graph and plan. `published` are the names in the model's state
    dict (None: all), `companions` what a library needs beside merged weights, `samples` is how many rows the training
    data has; `lineage` is that of this run; `callbacks` are those with a state, which is the same on all ranks, and
    `callback_tensors` what they keep of parameters, as CALLBACK/NAME; `random` are RNG states, None: those of now;
    `pending` is whether the evaluation of this step is still to be made; `elsewhere` are the names of model and loss,
    of which other stages may have some."""

    program: Program
    communicator: Communicator
    tensors: Mapping[str, Tensor]
    updates: Updates
    scheduler: LRScheduler | None
    plan: Mapping[str, Any]
    config: Mapping[str, Any]
    fingerprint: str = ""
    published: frozenset[str] | None = None
    companions: Companions = field(default_factory=Companions)
    samples: int | None = None
    lineage: Lineage = field(default_factory=Lineage)
    callbacks: Mapping[str, Stateful] = field(default_factory=dict)
    callback_tensors: Shards = field(default_factory=dict)
    random: Mapping[str, Any] | None = None
    pending: bool = False
    elsewhere: frozenset[str] = frozenset()

    @property
    def rank(self) -> int:
        """This rank's number among all; within its stage of a pipeline it is `communicator.rank`."""
        return self.communicator.world_rank

    @property
    def split(self) -> bool:
        """Whether the optimizer's states are split over the replicas."""
        return bool(self.config.get("parallel", {}).get("zero", {}).get("stage"))

    @property
    def sources(self) -> tuple[Source, ...]:
        """Everything of the model that is saved, in an order that is the same on all ranks of a stage."""
        return tuple(source for source in self.program.sources if source.kind in ("parameter", "buffer"))

    def buffers(self) -> dict[str, list[Shard]]:
        """This rank's slices of the buffers."""
        mesh, rank, layouts = self.program.mesh, self.communicator.rank, self.program.layouts
        return {
            MODEL + one.name: of_slice(
                one.spec.shape, layouts[one.id].blocks(one.spec.shape, mesh, rank), self.tensors[one.name]
            )
            for one in self.sources
            if one.kind == "buffer"
        }


Stored = dict[tuple[str, Block, bool], bool]
"""Whether a rank stores a shard, by its key, its block, and whether it is shared."""


def shards(content: Content, copies: int = 1, known: Stored | None = None) -> dict[str, list[Shard]]:
    """The shards that this rank stores, in memory that lasts. `known` is what earlier calls for the same program and
    copies have found."""
    known = {} if known is None else known
    first = {} if known else first_replicas(content)
    layouts = {source.name: content.program.layouts[source.id] for source in content.sources}
    mesh, rank = content.program.mesh, content.communicator.rank

    def stored(key: str, one: Shard) -> bool:
        nonlocal first
        what = key, one.block, one.shared
        if what not in known:
            first = first or first_replicas(content)
            known[what] = takes(key, one)
        return known[what]

    def takes(key: str, one: Shard) -> bool:
        if 0 not in one.shape and not all(start < stop for start, stop in one.block):
            return False
        name = name_of(key)
        replicas = layouts[name].replica_axes(mesh)
        turn = (mesh.index(rank, replicas) - first[name]) % mesh.product(replicas)
        return not one.shared or turn < copies

    kept: dict[str, list[Shard]] = {}
    for batch in chain(content.updates.pieces(), [content.buffers(), content.callback_tensors]):
        for key, candidates in batch.items():
            if own := [one for one in candidates if stored(key, one)]:
                lasting = [one if one.lasting else replace(one, view=one.view.clone()) for one in own]
                kept.setdefault(key, []).extend(lasting)
    return kept


def first_replicas(content: Content) -> dict[str, int]:
    """Which of its replicas stores the slice of a parameter or buffer first: the one that has the smallest number of
    elements so far, the largest slices coming first, so that files of replicas are about equally large."""
    mesh, layouts = content.program.mesh, content.program.layouts
    elements: dict[tuple[str, ...], list[int]] = {}
    first: dict[str, int] = {}
    size = {one.name: math.prod(layouts[one.id].local_shape(one.spec.shape, mesh)) for one in content.sources}
    for source in sorted(content.sources, key=lambda source: -size[source.name]):
        replicas = layouts[source.id].replica_axes(mesh)
        stored = elements.setdefault(replicas, [0] * mesh.product(replicas))
        first[source.name] = stored.index(min(stored))
        stored[first[source.name]] += size[source.name]
    return first


def name_of(key: str) -> str:
    """The parameter or buffer to which a key belongs."""
    return key.removeprefix(MODEL) if key.startswith(MODEL) else key.removeprefix(OPTIMIZER).partition("/")[2]


def _once(scalars: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Copies, in which equal tensors, such as the steps of all parameters, are one object, which a file then holds
    once: a file of 1,000 tensors of one element takes 0.25 s to write and check."""
    first: dict[tuple[Any, ...], Tensor] = {}

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.numel() != 1:
            return copy.deepcopy(value)
        key = value.dtype, value.device, value.shape, value.item()
        if key not in first:
            first[key] = value.clone()
        return first[key]

    return {name: {key: one(value) for key, value in states.items()} for name, states in scalars.items()}


def plain(content: Content, copies: int = 1) -> dict[str, Any]:
    """Non-tensor state at this moment: RNG states, and on the first `copies` ranks of a stage everything else. Raises
    ConfigError for a state that cannot be stored."""
    state: dict[str, Any] = {"random": content.random or rng_state.states(), "run": content.lineage.run}
    if content.communicator.rank < copies:
        optimizer = content.updates.plain()
        scheduler = None if content.scheduler is None else content.scheduler.state_dict()
        own: dict[str, Any] = {"groups": optimizer.groups, "loss_scale": optimizer.loss_scale, "scheduler": scheduler}
        own |= {"callbacks": {name: one.state_dict() for name, one in content.callbacks.items()}}
        with _storable():
            state |= copy.deepcopy(own) | {"scalars": _once(optimizer.scalars)}
    return state


def serialised(state: Mapping[str, Any]) -> bytes:
    """Non-tensor state as bytes that can be read without running code from the file. Raises ConfigError for a state
    that cannot be stored so."""
    buffer = io.BytesIO()
    with _storable():
        torch.save(state, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    return buffer.getvalue()


@contextmanager
def _storable() -> Iterator[None]:
    """Raises ConfigError for a state that is more than numbers, strings, lists, dicts and tensors."""
    try:
        yield
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))  # as torch names what it refuses to load
        what = f"a {found[1]}" if found else str(error).partition("\n")[0][:200]
        raise ConfigError(
            "MW609",
            "The optimizer, its scheduler or a callback keeps something in its state that a checkpoint cannot hold; "
            f"it can hold numbers, strings, lists, dicts and tensors ({what}). A run without checkpoints trains: "
            "checkpoint.every=null and checkpoint.at_end=false.",
        ) from error
