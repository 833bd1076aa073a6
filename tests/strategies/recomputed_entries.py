"""Entry points that real ranks run for the tests of recomputed modules."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.memory.trace import saved_tensors, trace
from strategies.optimizer.settings import OptimizerSettings
from strategies.runtime import initial_weights as weights
from strategies.runtime.communicator import Communicator
from strategies.runtime.module_tree import build
from strategies.runtime.slices import entries_of


@dataclass(frozen=True)
class Case:
    """A model with one plan per way to recompute, the file with its weights, and one batch by entry name."""

    graph: OperatorGraph
    plans: list[Plan]
    file: Path
    batch: dict[str, Tensor]


@dataclass(frozen=True)
class Ran:
    """One step on one rank: loss and local gradients, bytes stored between forward and backward, bytes sent, and both
    as they were predicted for the first rank."""

    loss: float
    gradients: dict[str, Tensor]
    stored: int
    sent: dict[str, int]
    predicted_stored: int
    predicted_sent: dict[str, int]


def steps(rank: Any, case: Case) -> list[list[Ran]]:
    """The results of every rank, per plan."""
    return [_gather(_step(case, plan, rank.rank)) for plan in case.plans]


def _step(case: Case, plan: Plan, rank: int) -> Ran:
    program = lower(case.graph, plan, LoweringOptions(exact=True, partial_loss=True))
    communicator = Communicator(program.mesh, rank, program.axes)
    tensors = weights.read_slices(case.file, program, rank, "cpu")
    module = build(program, tensors, communicator, "cpu")
    entries = entries_of([case.batch[one.name] for one in program.inputs], program, rank)
    with saved_tensors([*tensors.values(), *entries]) as saved:
        loss = module(*entries, 11)
    stored = sum(saved.values())
    del saved
    loss.backward()
    gradients = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    predicted = trace(program, OptimizerSettings())
    return Ran(loss.item(), gradients, stored, dict(communicator.sent), predicted.activations, predicted.sent)


def _gather(value: Any) -> list[Any]:
    received: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(received, value)
    return received
