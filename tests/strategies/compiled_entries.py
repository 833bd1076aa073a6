"""Entry points that real ranks run for the tests of compiled programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions
from strategies.lowering.fusion import fuse
from strategies.lowering.lowering import lower
from strategies.runtime import compiled
from strategies.runtime import initial_weights as weights
from strategies.runtime.communicator import Communicator
from strategies.runtime.compiled import as_key
from strategies.runtime.module_tree import build
from strategies.runtime.slices import entries_of

KEYS = (11, 2**62 + 1)


@dataclass(frozen=True)
class Case:
    """A planned model, the file with its weights, one batch by entry name, and what may be joined (see `fuse`)."""

    graph: OperatorGraph
    plan: Plan
    file: Path
    batch: dict[str, Tensor]
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """The results on one rank: losses and gradients by key, graph breaks and graphs, bytes sent."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    breaks: list[str]
    graphs: int
    sent: dict[str, int]


def compare(rank: Any, payload: tuple[list[Case], list[str]]) -> list[dict[str, Any]]:
    """Every case in every mode: eager, compiled as one module, compiled by leaves; and the order of its collectives."""
    cases, modes = payload
    found = []
    for case in cases:
        ran = {way: _run(case, rank.rank, way) for way in modes}
        found.append({**ran, "order": compiled.order()})
    return _gather(found)


def _run(case: Case, rank: int, way: str) -> Ran:
    return _ran(case, rank, way)[0]


def _ran(case: Case, rank: int, way: str) -> tuple[Ran, Communicator]:
    program = fuse(lower(case.graph, case.plan, LoweringOptions(partial_loss=True)), case.sizes)
    communicator = Communicator(program.mesh, rank, program.axes)
    tensors = weights.read_slices(case.file, program, rank, "cpu")
    module = build(program, tensors, communicator, "cpu", compiled=way != "plain")
    if way != "plain":
        compiled.compile_units(module, "cpu", leaves=way == "leaves", backend="aot_eager")
    entries = entries_of([case.batch[one.name] for one in program.inputs], program, rank)
    counters.clear()
    losses, gradients = [], []
    for key in KEYS:
        keys = [key if way == "plain" else as_key(key)] if program.random else []
        loss = module(*entries, *keys)
        loss.backward()
        learning = [(name, one) for name, one in module.named_parameters() if one.grad is not None]
        losses.append(loss.item())
        gradients.append({name: one.grad.clone() for name, one in learning})
        for _, one in learning:
            one.grad = None
    breaks, graphs = list(counters["graph_break"]), counters["stats"]["unique_graphs"]
    return Ran(losses, gradients, breaks, graphs, dict(communicator.sent)), communicator


def _gather(value: Any) -> list[Any]:
    received: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(received, value)
    return received


def depths(rank: Any, cases: list[Case]) -> list[dict[str, int]]:
    """How many graphs are compiled for one step of every case, and how many process groups it has."""
    return [_depth(case, rank.rank) for case in cases]


def _depth(case: Case, rank: int) -> dict[str, int]:
    torch._dynamo.reset()
    ran, communicator = _ran(case, rank, "units")
    return {"graphs": ran.graphs, "breaks": len(ran.breaks), "groups": len(communicator._groups)}
