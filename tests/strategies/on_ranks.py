"""Entry points that real ranks run for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies import collectives
from strategies.core.graph import OperatorGraph
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions, Program
from strategies.lowering.fusion import fuse
from strategies.lowering.lowering import lower
from strategies.lowering.overlap import overlap
from strategies.optimizer.stages import make_updates
from strategies.optimizer.updates import axes_needed
from strategies.runtime import initial_weights as weights
from strategies.runtime.communicator import Communicator
from strategies.runtime.module_tree import build
from strategies.runtime.simulate import assemble
from strategies.runtime.slices import entries_of


@dataclass(frozen=True)
class Case:
    """A planned model, the file with its weights, one batch by entry name, which collectives may be fused (see `fuse`),
    and whether redistributions are started early (see `overlap`)."""

    graph: OperatorGraph
    plan: Plan
    file: Path
    batch: dict[str, Tensor]
    sizes: dict[str, int] = field(default_factory=dict)
    early: bool = False


@dataclass(frozen=True)
class Result:
    """The loss, full gradients, names of the parameters in order, bytes by rank and collective, predicted and sent,
    and the calls that rank 0 made."""

    loss: float
    gradients: dict[str, Tensor]
    names: list[str]
    predicted: list[dict[str, int]]
    sent: list[dict[str, int]]
    calls: dict[str, int] = field(default_factory=dict)


def steps(rank: Any, cases: list[Case]) -> list[Result]:
    """One training step (SGD) per case, on the modules that `build` makes."""
    return [_step(case, rank.rank) for case in cases]


def chains_of(program: Program) -> list[tuple[Any, int]]:
    """Every resharding step of a training step, with its bytes per element."""
    return [(step, one.spec.item_bytes) for one in program.redistributions for step in one.collectives]


def _step(case: Case, rank: int) -> Result:
    program = fuse(lower(case.graph, case.plan, LoweringOptions(partial_loss=True)), case.sizes)
    program = overlap(program) if case.early else program
    mesh = program.mesh
    communicator = Communicator(mesh, rank, [*program.axes, *axes_needed(program)])
    tensors = weights.read_slices(case.file, program, rank, "cpu")
    module = build(program, tensors, communicator, "cpu")
    groups = [{"names": list(program.reductions)}]
    updates = make_updates(0, module, program, communicator, lambda found: torch.optim.SGD(found, lr=0.1), groups)
    loss = module(*entries_of([case.batch[source.name] for source in program.inputs], program, rank))
    updates.backward(loss)
    total = loss.detach().clone()
    if program.loss_axes:
        dist.all_reduce(total, group=communicator.group(program.loss_axes))
    sent_by_model, calls = dict(communicator.sent), dict(communicator.calls)
    updates.reduce()
    predicted: dict[str, int] = {}
    for step, item_bytes in chains_of(program):
        predicted[step.kind] = predicted.get(step.kind, 0) + step.elements(mesh, rank) * item_bytes
    gathered = _gather((predicted, sent_by_model, {name: g.clone() for name, g in updates.gradients()}))
    if rank:
        return Result(0.0, {}, [], [], [])
    sources = {source.name: source for source in program.sources}
    full_gradients = {
        name: assemble(
            [one[2][name] for one in gathered], program.layouts[sources[name].id], sources[name].spec.shape, mesh
        )
        for name in gathered[0][2]
    }
    names = [name for name, _ in module.named_parameters()]
    return Result(
        total.item(), full_gradients, names, [one[0] for one in gathered], [one[1] for one in gathered], calls
    )


def _gather(value: Any) -> list[Any]:
    received: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(received, value)
    return received


def adjoints(rank: Any, _: None) -> dict[str, Any]:
    """<y, A x> = <A' y, x> for every collective A, the inner products being over all ranks; and what each returns."""
    mesh = Mesh((("a", 2), ("b", 2)))
    collectives.use(Communicator(mesh, rank.rank))
    calls = {
        "all_reduce": lambda x: collectives.all_reduce(x, "a"),
        "all_reduce over both": lambda x: collectives.all_reduce(x, ("b", "a")),
        "all_gather": lambda x: collectives.all_gather(x, "b", dim=1),
        "all_gather over both": lambda x: collectives.all_gather(x, ("b", "a")),
        "reduce_scatter": lambda x: collectives.reduce_scatter(x, ("a", "b"), dim=-1),
        "all_to_all": lambda x: collectives.all_to_all(x, "b", split=1, join=0),
        "split": lambda x: collectives.split(x, ("b", "a"), dim=1),
        "broadcast": lambda x: collectives.broadcast(x, "b", source=1),
        "composed": lambda x: collectives.all_reduce(collectives.split(x, "a", dim=1).exp(), "b"),
    }
    generator = torch.Generator().manual_seed(rank.rank)
    found: dict[str, Any] = {}
    for name, call in calls.items():
        x = torch.randn(4, 8, dtype=torch.float64, generator=generator, requires_grad=True)
        y = call(x)
        weight = torch.randn(y.shape, dtype=torch.float64, generator=generator)
        (gradient,) = torch.autograd.grad((y * weight).sum(), x)
        direction = torch.randn(x.shape, dtype=torch.float64, generator=generator)
        with torch.no_grad():  # a central difference: exact for linear collectives
            change = (call(x + 1e-5 * direction) - call(x - 1e-5 * direction)) / 2e-5
        both = _gather(((weight * change).sum().item(), (gradient * direction).sum().item(), x.detach(), y.detach()))
        found[name] = {
            "outwards": sum(one[0] for one in both),
            "back": sum(one[1] for one in both),
            "x": [one[2] for one in both],
            "y": [one[3] for one in both],
        }
    parameter = nn.Parameter(torch.arange(32.0).view(4, 8))
    piece = collectives.shard_parameter(parameter, dim=-1, axes=("b", "a"))
    found["shard_parameter"] = {"pieces": _gather(piece.detach()), "declared": collectives.declared(piece)}
    mine = torch.full((2,), float("inf") if rank.rank % 2 == 0 else 1.0)
    found["broadcast past infinity"] = _gather(collectives.broadcast(mine, "b", source=1))
    found["errors"] = [_error(call) for call in (
        lambda: collectives.all_reduce(parameter, "c"),
        lambda: collectives.split(parameter[:, :3], "a", dim=1),
        lambda: collectives.shard_parameter(parameter, dim=0, axes=("a", "b", "a")),
        lambda: collectives.shard_parameter(nn.Parameter(torch.zeros(3)), dim=0, axes="a"),
    )]  # fmt: skip
    collectives.use(None)
    return found


def _error(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
