"""The state of a rank's optimizer as a state dict of torch, by the parameters of the user's module.

States of a parameter's elements are DTensors in the layout of its weights, whatever the stage of ZeRO: so a state dict
can be saved by torch.distributed.checkpoint, and loaded under another plan, stage or engine. Parameters are counted as
in torch, group by group, without those that the loss does not use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from runner.errors import ConfigError
from strategies.core.graph import Source
from strategies.core.layout import indices
from strategies.core.program import Program
from strategies.optimizer.state import OptimizerScalars, StoredState, is_scalar
from strategies.optimizer.updates import Updates
from strategies.runtime.communicator import Communicator
from strategies.runtime.dtensors import global_tensor
from strategies.runtime.shards import MODEL, OPTIMIZER, Blocks, Shard, overlaps


class Sharded(Protocol):
    """The module of a rank, which makes DTensors of slices and slices of DTensors."""

    device: str

    @property
    def zero(self) -> int: ...

    def shown(self, name: str, slice_: Tensor) -> Tensor: ...

    def taken(self, name: str, value: Tensor) -> Tensor: ...


def state_dict(module: Sharded, updates: Updates, program: Program, communicator: Communicator) -> dict[str, Any]:
    """The state dict of an optimizer. Collective.

    Raises:
        StrategyError: a state of a sliced parameter that no complete one can be made of.
    """
    plain, mesh = updates.plain(), program.mesh
    own: dict[str, dict[str, list[Shard]]] = {}
    for batch in updates.pieces():
        for key, shards in batch.items():
            if key.startswith(OPTIMIZER):
                state, _, name = key.removeprefix(OPTIMIZER).partition("/")
                own.setdefault(name, {}).setdefault(state, []).extend(_lasting(one) for one in shards)
    names, groups = _named(plain.groups)
    known: list[dict[str, Any]] = [{}] * mesh.size
    found = {
        name: (
            {state: shards[0].view.dtype for state, shards in own.get(name, {}).items() if shards},  # none of padding
            plain.scalars.get(name),
        )
        for name in names
    }
    if mesh.size > 1:  # a rank may have no element of a parameter
        dist.all_gather_object(known, found)
    else:
        known = [found]
    states: dict[int, dict[str, Any]] = {}
    for number, name in enumerate(names):
        dtypes = {state: dtype for rank in known for state, dtype in rank[name][0].items()}
        scalars: dict[str, Any] = next((rank[name][1] for rank in (found, *known) if rank[name][1]), {})
        complete = {
            state: _complete(module, name, own.get(name, {}).get(state, []), dtype, program, communicator)
            for state, dtype in sorted(dtypes.items())
        }
        if complete or scalars:
            # Parameters of one bucket have one state of ZeRO, but torch's optimizers count up the step of each
            own_scalars = {key: value.clone() if isinstance(value, Tensor) else value for key, value in scalars.items()}
            states[number] = {**own_scalars, **complete}
    return {"state": states, "param_groups": groups}


def _lasting(shard: Shard) -> Shard:
    return shard if shard.lasting else Shard(shard.shape, shard.block, shard.view.clone(), shard.shared)


def _named(groups: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """The parameters of all groups in order, and the groups as torch writes them."""
    names, found = list(chain.from_iterable(group["names"] for group in groups)), list[dict[str, Any]]()
    for group in groups:
        first = sum(len(one["params"]) for one in found)
        options = {key: value for key, value in group.items() if key != "names"}
        found.append({**options, "params": list(range(first, first + len(group["names"])))})
    return names, found


def _complete(
    module: Sharded,
    name: str,
    shards: Sequence[Shard],
    dtype: torch.dtype,
    program: Program,
    communicator: Communicator,
) -> Tensor:
    """A state from the shards of all ranks; unchanged where it has another shape than the parameter."""
    source, mesh = program.tensors[name], program.mesh
    shape, layout = source.spec.shape, program.layouts[source.id]
    if shards and shards[0].shape != shape:
        return shards[0].view
    if not module.zero and len(shards) == 1 and shards[0].view.shape == layout.local_shape(shape, mesh):
        return module.shown(name, shards[0].view)
    local = torch.zeros(layout.local_shape(shape, mesh), dtype=dtype, device=module.device)
    for shard, own, place in _places(shards, layout.blocks(shape, mesh, communicator.rank)):
        local[place].copy_(shard.view[own])
    replicas = layout.replica_axes(mesh)
    if module.zero and mesh.product(replicas) > 1:  # of which each has a part
        communicator.sum(local, communicator.group(replicas))
    return module.shown(name, local)


def _places(shards: Sequence[Shard], blocks: Blocks) -> Iterator[tuple[Shard, Any, Any]]:
    """Where a rank's shards are in its slice: (shard, indices in its view, indices in the slice)."""
    for shard in shards:
        for number, inside, own in overlaps(shard.block, [block for block, _ in blocks]):
            corner = [start for start, _ in blocks[number][1]]
            place = tuple((base + a, base + b) for base, (a, b) in zip(corner, inside, strict=True))
            yield shard, indices(own), indices(place)


def load_state_dict(
    module: Sharded, updates: Updates, program: Program, communicator: Communicator, given: Mapping[str, Any]
) -> None:
    """Load a state dict whose tensors are DTensors of any layout or complete. Collective.

    Raises:
        ConfigError: before anything is loaded, for a state dict of other parameters or groups.
    """
    own = updates.plain()
    names, groups = _named(own.groups)
    by_name = _checked(given, names, groups)
    scalars: dict[str, dict[str, Any]] = {name: {} for name in names}
    states: dict[str, dict[str, StoredState]] = {}
    slices: dict[str, tuple[Source, Tensor]] = {}
    of_elements = {
        state
        for name, number in by_name.items()
        for state, value in given["state"].get(number, {}).items()
        if not is_scalar(value, torch.empty(program.tensors[name].spec.shape, device="meta"))
    }
    for name, number in by_name.items():
        source = program.tensors[name]
        shape = source.spec.shape
        for state, value in given["state"].get(number, {}).items():
            if state not in of_elements or not isinstance(value, Tensor):
                scalars[name][state] = value
                continue
            states.setdefault(state, {})[name] = StoredState(tuple(value.shape), value.dtype, False)
            slice_ = module.taken(name, value) if value.shape == shape else global_tensor(value)
            slices[f"{OPTIMIZER}{state}/{name}"] = source, slice_
    options = [
        {"names": group["names"]} | {key: value for key, value in new.items() if key != "params"}
        for group, new in zip(own.groups, given["param_groups"], strict=True)
    ]
    updates.begin(states, OptimizerScalars(options, scalars, own.loss_scale))
    _write(updates, program, communicator, slices)


def load_weights(updates: Updates, program: Program, communicator: Communicator, slices: Mapping[str, Tensor]) -> None:
    """Load this rank's slices of parameters, by name, into the weights on which the optimizer works, and into those
    that follow from them. Collective."""
    _write(updates, program, communicator, {MODEL + name: (program.tensors[name], one) for name, one in slices.items()})


def _write(
    updates: Updates, program: Program, communicator: Communicator, slices: Mapping[str, tuple[Source, Tensor]]
) -> None:
    """Write a rank's slices, which have the keys of `Shards`."""
    for batch in updates.pieces(write=True):
        for key, shards in batch.items():
            if key not in slices:  # such as a number of a parameter of one element, which is among the scalars
                continue
            source, value = slices[key]
            shape, layout = source.spec.shape, program.layouts[source.id]
            if shards and shards[0].shape != shape:
                shards[0].view.copy_(value)
                continue
            for shard, inside, place in _places(shards, layout.blocks(shape, program.mesh, communicator.rank)):
                shard.view[inside].copy_(value[place])
    updates.loaded()


def _checked(given: Mapping[str, Any], names: Sequence[str], groups: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The numbers of the parameters in a state dict. Raises ConfigError for a state dict of other parameters."""
    advice = "give what state_dict of an optimizer of this module with the same groups returned"
    if not isinstance(given, Mapping) or {"state", "param_groups"} - given.keys():
        raise ConfigError(
            "MW204", f"optimizer.load_state_dict: {given!r:.60} has not the keys state and param_groups; {advice}."
        )
    found, wanted = ([len(group["params"]) for group in some] for some in (given["param_groups"], groups))
    if found != wanted:
        raise ConfigError(
            "MW204",
            f"optimizer.load_state_dict: the groups have {found} parameters, those of this optimizer {wanted}, which "
            f"has none that the loss does not use; {advice}.",
        )
    return dict(zip(names, chain.from_iterable(group["params"] for group in given["param_groups"]), strict=True))
