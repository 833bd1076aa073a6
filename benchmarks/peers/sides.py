"""The two sides of a comparison on one rank: ours, as `run train` runs a plan, and the same step as others write it.

A side is a step: it trains on the global batch once and returns its loss, the same on every rank. Everything that
repeats in training is in it, and nothing else: the batch is on the device already.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.peers.cases import Case, Part
from runner.launch.orders import RankContext
from runner.planning.prepare import WEIGHTS, Prepared
from runner.training.execution import execution
from runner.training.trainer import updates_of
from strategies.core.layout import Block
from strategies.optimizer.updates import axes_needed
from strategies.runtime import initial_weights
from strategies.runtime.offload import NO_OFFLOAD

Step = Callable[[], Tensor]
RATE = 1e-4
"""The learning rate of AdamW on both sides."""
EXPORTED = "exported.py"
"""The file of an exported plan, in the folder of the initial weights."""


@dataclass(frozen=True)
class Comparison:
    """What a rank needs for both sides; `micro_batches` is 1 without a pipeline."""

    case: Case
    prepared: Prepared
    folder: Path
    micro_batches: int


def ours(comparison: Comparison, rank: RankContext) -> Step:
    """The plan of a config, run with the tensors and settings of training. Collective, as all sides are."""
    prepared = comparison.prepared
    built = execution(prepared, rank, comparison.folder, axes_needed)
    updates = updates_of(prepared, built, NO_OFFLOAD)
    micro_batches = [
        [_block(entry, block).to(rank.device) for entry, block in zip(part, built.blocks, strict=True)]
        for part in zip(*(entry.chunk(comparison.micro_batches) for entry in comparison.case.batch()), strict=True)
    ]
    communicator, axes, runner = built.communicator, built.program.loss_axes, built.runner
    group = communicator.group(axes) if axes else None

    def step() -> Tensor:
        if runner is not None:
            total = runner.step(lambda number: (micro_batches[number], 0), updates)
            runner.peers.share_loss(total)
        else:
            loss = built.forward(updates.module, micro_batches[0], 0)
            updates.backward(loss)
            total = loss.detach().double()
        if group is not None:
            communicator.sum(total, group)
        updates.reduce()
        updates.update(measure=False)
        return total / comparison.micro_batches / built.loss_divisor

    return step


def _block(tensor: Tensor, block: Block) -> Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in block)].contiguous()


def model_of(comparison: Comparison) -> nn.Module:
    """The model with the weights that ours begins with."""
    model, known = comparison.case.model(), initial_weights.read_all(comparison.folder / WEIGHTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied one has one name
            parameter.copy_(known[name])
    return model


def local_batch(comparison: Comparison, rank: RankContext) -> tuple[Tensor, ...]:
    """This rank's rows of the global batch."""
    count = dist.get_world_size()
    return tuple(entry.chunk(count)[rank.rank].to(rank.device) for entry in comparison.case.batch())


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE)


def mean_over_ranks(loss: Tensor) -> Tensor:
    total = loss.detach().double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _step(model: Callable[[Tensor], Tensor], optimizer: Any, loss: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A step of a plain loop on local rows."""
    found: Tensor = loss(model(x), y)
    found.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return found


def ddp(comparison: Comparison, rank: RankContext) -> Step:
    """DistributedDataParallel, with gradients that are views of its buckets."""
    x, y = local_batch(comparison, rank)
    model = nn.parallel.DistributedDataParallel(
        model_of(comparison).to(rank.device), gradient_as_bucket_view=True, static_graph=True
    )
    loss, optimizer = comparison.case.loss(), adamw(model.parameters())
    return lambda: mean_over_ranks(_step(model, optimizer, loss, x, y))


def fsdp2(comparison: Comparison, rank: RankContext) -> Step:
    """`fully_shard` on every layer and on the model."""
    from torch.distributed.fsdp import fully_shard

    x, y = local_batch(comparison, rank)
    mesh = _mesh(rank, (dist.get_world_size(),), ("dp",))
    model = model_of(comparison).to(rank.device)
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss, optimizer = comparison.case.loss(), adamw(model.parameters())
    return lambda: mean_over_ranks(_step(model, optimizer, loss, x, y))


def dtensor(comparison: Comparison, rank: RankContext) -> Step:
    """`parallelize_module` of every layer as Megatron slices it; the rest is replicated."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    count = dist.get_world_size()
    mesh = _mesh(rank, (count,), ("tp",))
    model = model_of(comparison).to(rank.device)
    styles = {f"attention.{name}_proj": ColwiseParallel() for name in "qkv"}
    for layer in model.layers:  # type: ignore[union-attr]
        names = [name for name, _ in layer.feed_forward.named_children() if name.endswith("_proj")]
        inner = {f"feed_forward.{name}": ColwiseParallel() for name in names if name != "down_proj"}
        rows = {name: RowwiseParallel() for name in ("attention.o_proj", "feed_forward.down_proj")}
        if hasattr(layer.attention, "heads"):
            layer.attention.heads //= count
        parallelize_module(layer, mesh, {**styles, **inner, **rows})
    x, y = (entry.to(rank.device) for entry in comparison.case.batch())
    loss, optimizer = comparison.case.loss(), adamw(model.parameters())
    return lambda: _step(model, optimizer, loss, x, y).detach().double()


def _mesh(rank: RankContext, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh(torch.device(rank.device).type, sizes, mesh_dim_names=names)


def deepspeed(stage: int, comparison: Comparison, rank: RankContext) -> Step:
    """DeepSpeed with the defaults of its ZeRO stage and torch's AdamW."""
    from strategies.optimizer.zero.engine import deepspeed_for

    x, y = local_batch(comparison, rank)
    model = model_of(comparison).to(rank.device)
    engine, *_ = deepspeed_for(torch.device(rank.device)).initialize(
        model=model,
        optimizer=adamw(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": len(x),
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        },
        dist_init_required=False,
    )
    loss = comparison.case.loss()

    def step() -> Tensor:
        found = loss(engine(x), y)
        engine.backward(found)
        engine.step()
        return mean_over_ranks(found)

    return step


def pipelining(schedule: str, comparison: Comparison, rank: RankContext) -> Step:
    """A schedule of torch.distributed.pipelining over stages of equally many layers."""
    from torch.distributed import pipelining as torch_pipelining

    model, count = model_of(comparison), dist.get_world_size()
    kind = getattr(torch_pipelining, schedule)
    numbers = [rank.rank]
    if schedule != "Schedule1F1B":
        numbers.append(2 * count - 1 - rank.rank if schedule == "ScheduleZBVZeroBubble" else count + rank.rank)
    stages = count * len(numbers)
    parts = [Part(model, own).to(rank.device) for own in in_parts(comparison.case.layers, stages)]
    mine = [
        torch_pipelining.PipelineStage(parts[number], number, stages, torch.device(rank.device)) for number in numbers
    ]
    runner = kind(
        mine[0] if schedule == "Schedule1F1B" else mine,
        n_microbatches=comparison.micro_batches,
        loss_fn=comparison.case.loss(),
    )
    optimizer = adamw([parameter for number in numbers for parameter in parts[number].parameters()])
    x, y = (entry.to(rank.device) for entry in comparison.case.batch())
    last = 0 if schedule == "ScheduleZBVZeroBubble" else count - 1
    given, targets = [x] if 0 in numbers else [], {"target": y} if stages - 1 in numbers else {}

    def step() -> Tensor:
        losses: list[Tensor] = []
        runner.step(*given, **targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=rank.device)
        if targets:
            total += torch.stack(losses).detach().double().mean()
        dist.broadcast(total, src=last)
        return total

    return step


def in_parts(layers: int, parts: int) -> list[Sequence[int]]:
    """The numbers of the layers of every part, all as many."""
    size = layers // parts
    return [range(size * number, size * (number + 1)) for number in range(parts)]


def imported(file: Path) -> Any:
    """The module in an exported file."""
    spec = importlib.util.spec_from_file_location("exported", file)
    assert spec is not None and spec.loader is not None
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    return plain


def exported(comparison: Comparison, rank: RankContext) -> Step:
    """What `plan.export("torch")` writes for the plan of ours."""
    plain = imported(comparison.folder / EXPORTED)
    mesh = plain.make_mesh(torch.device(rank.device).type)
    model = model_of(comparison).to(rank.device)
    plain.parallelize(model, mesh)
    x, y = (entry.to(rank.device) for entry in comparison.case.batch())
    loss, optimizer = comparison.case.loss(), adamw(model.parameters())

    def step() -> Tensor:
        with plain.running(mesh):
            found = loss(model(*plain.sliced([x], mesh)), *plain.sliced([y], mesh, first=1))
            found.backward()
        optimizer.step()
        optimizer.zero_grad()
        total: Tensor = found.detach().full_tensor().double()
        return total

    return step


Side = Callable[[Comparison, RankContext], Step]
BY_NAME: Mapping[str, Side] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "dtensor": dtensor,
    **{f"zero{stage}": lambda *given, stage=stage: deepspeed(stage, *given) for stage in (1, 2, 3)},
    "zero3_native": lambda *given: deepspeed(3, *given),
    "1f1b": lambda *given: pipelining("Schedule1F1B", *given),
    "interleaved": lambda *given: pipelining("ScheduleInterleaved1F1B", *given),
    "zbv": lambda *given: pipelining("ScheduleZBVZeroBubble", *given),
    "export": exported,
}
