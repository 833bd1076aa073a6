"""The collectives of an exported program of plain torch, counted without ranks: a step on tensors without numbers, in a
fork whose process group sends nothing.

DTensor redistributes in places of its own, above all in backward, so what it sends is known only from running it.
"""

from __future__ import annotations

import math
import multiprocessing
import pickle
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, placement_types
from torch.distributed.tensor._collective_utils import shard_dim_alltoall
from torch.utils._python_dispatch import TorchDispatchMode

from runner.errors import RunFailed
from runner.export.changes import Change
from strategies.capture import loss_in
from strategies.core.mesh import Mesh
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds

KINDS = {
    "all_reduce": ALL_REDUCE,
    "all_gather_into_tensor": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "all_to_all_single": ALL_TO_ALL,
}
NO_FORK = "Autograd-and-Fork"
"""In the error of a backward in a fork of a process that has autograd's threads for GPUs."""
OWN_PROCESS = (
    "after a backward on a GPU it runs in a new process, which imports the module: define its class in a file, and "
    "begin a script with `if __name__ == '__main__':`, or ask before the first backward"
)
OF_FULLY_SHARD = {"_allgather_base_": ALL_GATHER, "_reduce_scatter_base_": REDUCE_SCATTER}
"""Operands of these are (result, operand, group, ...)."""


@dataclass(frozen=True)
class CountedCollective:
    """One collective of a step.

    Attributes:
        kind: as in a plan.
        axes: of the mesh.
        bytes: that rank 0 sends, by the formulas of rings.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: float


def sent(kind: str, size: int, ranks: int) -> float:
    """The bytes that a rank sends in a collective whose operand has `size` bytes there."""
    if kind == ALL_GATHER:
        return float(size * (ranks - 1))
    return size * (ranks - 1) / ranks * (2 if kind == ALL_REDUCE else 1)


class Counting(TorchDispatchMode):
    """Collects the collectives of this rank, whose groups are along axes of `mesh`, or along several at once."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[CountedCollective] = []
        self.mesh = mesh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # what it does with its local tensors comes back here
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0].dtype == torch.bool:
                return False  # whether a check of numbers fails, as of variances
        called = func.__name__.partition(".")[0]
        if func.namespace == "_c10d_functional" and (kind := KINDS.get(called)):
            name = args[-1] if isinstance(args[-1], str) else args[-1].group_name
            self.add(kind, args[0], dist.distributed_c10d._resolve_process_group(name))  # type: ignore[attr-defined, arg-type]
        elif func.namespace == "c10d" and (kind := OF_FULLY_SHARD.get(called)):
            self.add(kind, args[1], dist.ProcessGroup.unbox(args[2]))
        return func(*args, **(kwargs or {}))

    def add(self, kind: str, operand: Tensor, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        places = torch.isin(self.mesh.mesh, torch.tensor(ranks)).nonzero()
        names = self.mesh.mesh_dim_names or ()
        axes = tuple(name for name, along in zip(names, places.unbind(-1), strict=True) if len({*along.tolist()}) > 1)
        size = operand.numel() * operand.element_size()
        self.calls.append(CountedCollective(kind, axes, sent(kind, size, len(ranks))))


def collectives(
    content: Mapping[str, Any], calls: Sequence[CountedCollective], mesh: Mesh, cluster: Cluster
) -> list[Change]:
    """The kinds of collectives of which an exported program sends other bytes than its plan. The bytes of the plan and
    these are all that it sends.

    Args:
        content: of plan.json.
        calls: of the program.
        mesh, cluster: of the plan.
    """
    planned = Counter(content["communication"])
    seconds = Counter(content["cost"]["redistributions"])
    seconds[ALL_REDUCE] += content["cost"]["gradients"]
    found = []
    for kind in sorted({*planned, *(call.kind for call in calls)}):
        own = [call for call in calls if call.kind == kind]
        size = round(sum(call.bytes for call in own))
        if size != planned[kind]:
            more = sum(collective_seconds(kind, call.bytes, call.axes, mesh, cluster) for call in own) - seconds[kind]
            shown = f"{size:,} bytes in {len(own)} calls"
            found.append(Change("collectives", kind, f"{planned[kind]:,} bytes", shown, size - planned[kind], more))
    return found


def calls_of(code: str, step: nn.Module, batch: Sequence[Tensor], device: str) -> list[CountedCollective]:
    """The collectives of one step of training.

    Args:
        code: of the program.
        step: takes a batch and returns the loss; its attribute `model` is what the program is for. It is not changed.
        batch: the global one; only shapes and dtypes count.
        device: type for which it is counted; on CPUs DTensor gathers where it exchanges slices elsewhere.

    Raises:
        RunFailed: the program does not run.
    """
    found = _in_process("fork", code, step, batch, device)  # of classes of a notebook too
    if isinstance(found, str) and NO_FORK in found:
        found = _in_process("spawn", code, step, batch, device)
    if isinstance(found, str):
        raise RunFailed("MW883", f"The exported program does not run on tensors without numbers: {found}")
    return [CountedCollective(*one) for one in found]


def _in_process(start: str, *given: Any) -> list[tuple[Any, ...]] | str:
    """What `_child` sends from a process that is started so, of which nothing changes this one, above all not its
    groups; or what went wrong."""
    context: Any = multiprocessing.get_context(start)
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, *given))
    try:
        child.start()
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        return f"{error}; {OWN_PROCESS}"
    theirs.close()
    try:
        found: list[tuple[Any, ...]] | str = ours.recv()
        child.join()
    except EOFError:
        child.join()
        found = f"its process ended with exit code {child.exitcode}"
        found += f"; {OWN_PROCESS}" if start == "spawn" else ""
    return found


def _child(pipe: Connection, *given: Any) -> None:
    try:
        pipe.send([(one.kind, one.axes, one.bytes) for one in _counted(*given)])
    except Exception as error:  # whatever it is, the parent reports it
        pipe.send(f"{type(error).__name__}: {error} ({traceback.extract_tb(error.__traceback__)[-1].name})")


def _counted(code: str, step: nn.Module, batch: Sequence[Tensor], device: str) -> list[CountedCollective]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    if dist.is_initialized():
        dist.distributed_c10d._world = dist.distributed_c10d._World()
        torch._C._distributed_c10d._unregister_all_process_groups()
    program: dict[str, Any] = {"__name__": "exported"}
    exec(compile(code, "exported", "exec"), program)
    store: Any = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=math.prod(program["MESH"].values()))
    mesh = program["make_mesh"]("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        _without_numbers(step)
        tensors = [torch.empty(one.shape, dtype=one.dtype) for one in batch]
    # not within the mode: DTensor reads numbers of tensors of its own
    model: Any = step.model
    program["parallelize"](model, mesh)
    program["_products"] = lambda _, rows, matrices, *bounds: rows @ matrices.sum(0)  # nobody knows an expert's rows
    counting = Counting(mesh)
    with program["running"](mesh), counting:
        if device != "cpu":
            _exchange(counting)
        loss: Any = loss_in(step(*program["sliced"](tensors, mesh)))
        loss.backward()
    return counting.calls


def _without_numbers(step: nn.Module) -> None:
    """Replace all tensors of a module by ones without numbers."""
    known: dict[int, Tensor] = {}
    for part in step.modules():
        for own in (part._parameters, part._buffers):
            for name, tensor in own.items():
                if tensor is None:
                    continue
                if id(tensor) not in known:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    known[id(tensor)] = empty
                    if isinstance(tensor, nn.Parameter):
                        known[id(tensor)] = nn.Parameter(empty, tensor.requires_grad)
                own[name] = known[id(tensor)]  # type: ignore[assignment]


def _exchange(counting: Counting) -> None:
    """Count an all-to-all where DTensor has one on GPUs."""

    def counted(operand: Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int) -> Tensor:
        before = len(counting.calls)
        result: Tensor = shard_dim_alltoall(operand, gather_dim, shard_dim, mesh, mesh_dim)  # type: ignore[no-untyped-call]
        del counting.calls[before:]
        counting.add(ALL_TO_ALL, operand, mesh.get_group(mesh_dim))
        return result

    placement_types.shard_dim_alltoall = counted  # type: ignore[attr-defined]
