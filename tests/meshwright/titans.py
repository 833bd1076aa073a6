"""torchtitan itself with an exported `ShardingConfig`, beside the eager module; as `exports`, an entry of ranks."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from exports import built, imported, loss_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from runner.report.comparison import ROUNDING, TOLERANCE, of_step


def titan(module: nn.Module, tables: Collection[str]) -> nn.Module:
    """The module of torchtitan's classes: its own table for `tables` in slices of the vocabulary, and its protocol for
    all others."""
    import torchtitan
    from torchtitan.protocols.module import Module

    common = ModuleType("torchtitan.models.common")  # whose __init__ imports triton
    common.__path__ = [str(Path(torchtitan.__file__).with_name("models") / "common")]
    sys.modules[common.__name__] = common
    from torchtitan.models.common.embedding import Embedding

    for path, part in module.named_modules():
        part.__class__ = Embedding if path in tables else type(type(part).__name__, (type(part), Module), {})
        if path in tables:
            part.tp_group = None  # as its constructor does
    return module


def sharded(rank: Any, given: tuple[Path, str]) -> dict[str, float]:
    """The largest relative differences of a step: of the loss and of any gradient; and the bytes of parameters and
    buffers."""
    from torchtitan.distributed import parallel_dims

    parallel_dims.device_type = "cpu"  # it takes cuda where there is no GPU
    file, model = given
    program = imported(file)
    eager, (batch, *_) = built(model)
    module = titan(built(model)[0], [path for path, one in program.SHARDINGS.items() if one.local_map is not None])
    tied = module.head.weight is module.tokens.weight
    dims = parallel_dims.ParallelDims(**program.PARALLEL_DIMS, spmd_backend="partial_dtensor")
    program.set_sharding_configs(module)
    module.parallelize(dims)
    if tied:
        module.head.weight = module.tokens.weight
    copies = dims.dp_replicate * dims.dp_shard
    x, y = (one.chunk(copies)[dist.get_rank() // dims.tp] for one in batch)
    with sdpa_kernel(SDPBackend.MATH), implicit_replication():  # what DTensor knows on CPUs
        logits = module(x)
        classes = isinstance(logits, DTensor) and logits.placements == (Shard(2),)
        with loss_parallel() if classes else nullcontext():
            loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / (batch[1] >= 0).sum()
            loss.backward()
    expected = loss_of(eager(batch[0]), batch[1])
    expected.backward()

    def added(value: Tensor) -> Tensor:
        """Over the rows of all ranks, as torchtitan does."""
        value = value.full_tensor() if isinstance(value, DTensor) else value
        dist.all_reduce(value)
        return value / dims.tp

    ours = {"loss": float(added(loss.detach())), "gradients": {n: added(p.grad) for n, p in module.named_parameters()}}
    theirs = {"loss": float(expected.detach()), "gradients": {n: p.grad for n, p in eager.named_parameters()}}
    gap, found = of_step(ours, theirs, TOLERANCE["fp32"], ROUNDING["fp32"])
    states = (*module.parameters(), *module.buffers())
    stored = sum(one.to_local().nbytes for one in states if isinstance(one, DTensor))
    return {"loss": gap, "gradient": max(found.values()), "stored": stored}
