"""Compares DeepSpeed's own placement of parameter elements on real ranks with our arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from sharded_training import MESH, Case, Setup, Task

from strategies.core.mesh import Mesh
from strategies.optimizer.zero.partition import Range

TWO = Mesh((("a", 2),))


def compared(rank: Any, payload: list[tuple[Task, Case]]) -> list[tuple[list[Any], list[Any], bool]]:
    """Per case: (name, first, position, count) by arithmetic and as DeepSpeed stores it, both sorted; and whether the
    pieces of every trainable parameter hold the elements of the weight."""
    found = []
    for task, case in payload:
        setup = Setup(task, case, rank.rank, MESH if rank.world_size == 4 else TWO)
        state = setup.updates._state
        ours = [(name, one) for index in range(len(state.masters())) for name, one in state.ranges(index)]
        flat = sorted((name, one.first, one.position, one.count) for name, one in ours)
        theirs = sorted(_kept(setup, name) for name in sorted(state._found) if _has(setup, name))
        found.append((flat, theirs, _same(setup, dict(ours))))
        setup.updates.close()
    return found


def _has(setup: Setup, name: str) -> bool:
    updates: Any = setup.updates
    parameter = updates._parameters[name]
    if name not in updates._state._learning:
        return False
    if updates._stage < 3:
        return getattr(parameter, "_hp_mapping", None) is not None
    return parameter.ds_zero_partition_rank * parameter.ds_tensor.ds_numel < parameter.ds_numel


def _kept(setup: Setup, name: str) -> tuple[str, int, int, int]:
    updates: Any = setup.updates
    parameter = updates._parameters[name]
    if updates._stage < 3:
        low, high = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
        return name, low.start, high.start, high.numel
    part, zero = parameter.ds_tensor.ds_numel, updates._zero
    first = parameter.ds_zero_partition_rank * part
    position = zero.grad_position[zero.get_param_id(parameter)][1]
    return name, first, position, min(part, parameter.ds_numel - first)


def _same(setup: Setup, ours: dict[str, Range]) -> bool:
    weights = setup.weights()
    pieces_by_key = {key: pieces for batch in setup.updates.pieces(write=True) for key, pieces in batch.items()}
    for name, one in ours.items():
        elements = sum(piece.view.numel() for piece in pieces_by_key[f"model/{name}"])
        flat = weights[name].reshape(-1)[one.first : one.first + one.count].float()
        joined = torch.cat([piece.view.reshape(-1) for piece in pieces_by_key[f"model/{name}"]])
        if elements != one.count or not torch.equal(flat, joined):
            return False
    return True
