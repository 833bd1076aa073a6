"""A plan of Meshwright in styles of torch: this file needs nothing else.

    mesh = make_mesh("cpu")  # or "cuda", under torchrun
    parallelize(module, mesh)  # in place; every rank has the same weights
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    loss = loss_function(module(*own_rows(inputs, mesh)), *own_rows(targets, mesh))
    loss.backward()
    optimizer.step()

`parallelize_module` slices modules over the axis tp as PLAN says. Ranks along dp compute rows of their own; the loss is
to be a mean over these, and gradients are the mean over dp. A `*` in a name stands for the number of a layer. Where
`fully_shard` slices nothing, parameters that PLAN leaves out are no DTensors, which `foreach` does not mix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

# The plan
MESH: dict[str, int] = {}
PLAN: dict[str, ParallelStyle] = {"": ColwiseParallel(output_layouts=Replicate()), "*": RowwiseParallel()}
SUMMED: tuple[str, ...] = ()
SHARDED = False
# The end of the plan


def make_mesh(device_type: str = "cuda") -> DeviceMesh:
    """The ranks of the default process group, which is made if there is none."""
    return init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))


def own_rows(batch: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """This rank's rows of entries of the global batch."""
    return [entry.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for entry in batch]


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Slice the modules of PLAN over tp, and the parameters of all over dp if SHARDED (ZeRO 3), layer by layer; in
    place."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    parallelize_module(module, mesh["tp"], PLAN)
    for first, *tied in names.values():
        for name in tied:
            path, _, own = name.rpartition(".")
            module.get_submodule(path).register_parameter(own, module.get_parameter(first))
    if SHARDED:
        layers = [layer for part in module.modules() if isinstance(part, nn.ModuleList) for layer in part]
        for part in (*reversed(layers), module):
            fully_shard(part, mesh=mesh["dp"])
        return module
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            summed = any(fnmatchcase(name, one) for one in SUMMED)
            parameter.register_hook(partial(_added_up, mesh, summed))  # type: ignore[no-untyped-call]
    return module


def _added_up(mesh: DeviceMesh, summed: bool, gradient: Any) -> Any:
    """The mean of a gradient over dp; `summed` also its sum over tp, whose ranks use a parameter for slices."""
    own = (gradient.to_local() if isinstance(gradient, DTensor) else gradient).clone()
    if summed:
        dist.all_reduce(own, group=mesh["tp"].get_group())
    dist.all_reduce(own, group=mesh["dp"].get_group())
    own /= mesh["dp"].size()
    if not isinstance(gradient, DTensor):
        return own
    options: dict[str, Any] = {"shape": gradient.shape, "stride": gradient.stride(), "run_check": False}
    return DTensor.from_local(own, gradient.device_mesh, gradient.placements, **options)
