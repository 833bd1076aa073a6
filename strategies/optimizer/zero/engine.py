"""DeepSpeed's engine: started with the settings that only its private attributes take, and its collectives counted.
Only this file imports it.

To DeepSpeed a group of ranks of a pipeline is the data-parallel world; it never hears of the others. Invariant: patches
of the package for a start are undone after it; what it computes is untouched by counting, which `stop` ends; the
package is imported when a rank needs it, never before.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.core.errors import StrategyError
from strategies.core.program import Program
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from strategies.optimizer.buckets import all_reduce_elements
from strategies.optimizer.zero.swap_files import SwapFiles
from strategies.runtime.communicator import Communicator, new_group
from strategies.runtime.flight_recorder import GATHER, PLACE, SCATTER, SUM, recorder


def known_options() -> Any:
    """The class whose fields are the options of ZeRO."""
    return importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig


def backend() -> Any:
    """The object through which all its collectives pass."""
    return importlib.import_module("deepspeed.comm.comm").cdb


@contextmanager
def swapping_to(files: SwapFiles | None) -> Iterator[None]:
    """Let DeepSpeed write to `files` where it would compile its own writer."""
    names = ("partitioned_optimizer_swapper", "partitioned_param_swapper") if files is not None else ()
    modules: list[Any] = [importlib.import_module(f"deepspeed.runtime.swap_tensor.{name}") for name in names]
    builders = [module.AsyncIOBuilder for module in modules]
    for module in modules:
        module.AsyncIOBuilder = files and files.builder
    try:
        yield
    finally:
        for module, builder in zip(modules, builders, strict=True):
            module.AsyncIOBuilder = builder


def deepspeed_for(device: torch.device) -> Any:
    """The package, quiet, for the kind of device at hand, with what this rank's launcher may not have set."""
    os.environ["DS_ACCELERATOR"] = device.type
    count = dist.get_world_size()
    ranks = {"RANK": dist.get_rank(), "WORLD_SIZE": count, "LOCAL_RANK": device.index or 0, "LOCAL_SIZE": count}
    for name, value in ranks.items():
        os.environ.setdefault(name, str(value))
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("deepspeed")
        # Else it is compiled, for half a minute, and training never uses it.
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
        with _without_compiler():  # else each rank imports torch's compiler, for seconds
            importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    if device.type == "cpu":
        # It asks whether the processor has fast fp16 products (AVX512-FP16). Without, it refuses fp16, which torch
        # computes on every processor, and stage 3 turns fp32 parameters on a disk into bf16.
        module.accelerator.get_accelerator().is_fp16_supported = lambda: True
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"deepspeed(\.|$)")
    # Its calls of older names of torch, which are then blamed on torch itself.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    return module


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Leave functions that are decorated with torch.compile as they are. They are Muon's, which cannot be used here."""
    compiler = torch.compile
    torch.compile = lambda function=None, **_: function or (lambda one: one)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler


@contextmanager
def left_out(optimizer: Optimizer, flats: Sequence[Tensor]) -> Iterator[None]:
    """Step DeepSpeed within this context: torch's optimizer, which it calls for one flat tensor after the other, sees
    no gradient of `flats`."""
    without, taken = {id(flat) for flat in flats}, list[tuple[Tensor, Tensor | None]]()

    def before(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for flat in group["params"]:
                if id(flat) in without:
                    taken.append((flat, flat.grad))
                    flat.grad = None

    def after(*_: Any) -> None:
        for flat, gradient in taken:
            flat.grad = gradient
        taken.clear()

    hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)] if without else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def replica_groups(
    found: Mapping[str, nn.Parameter], program: Program, communicator: Communicator, stage: int
) -> dict[str, str]:
    """Give DeepSpeed the replica group of each parameter: parameter -> its group, "" for the world.

    In DeepSpeed's terms the slices are experts, and a group's name must begin with ep_size_NUMBER.
    """
    groups = importlib.import_module("deepspeed.utils.groups")
    mesh, names, alone = program.mesh, {}, None
    for source in program.parameters:
        replicas = program.layouts[source.id].replica_axes(mesh)
        slices = mesh.others(replicas)
        if not slices:
            names[source.name] = ""
            continue
        if not replicas and alone is None:
            alone = new_group([communicator.world_rank], True)
        copies = communicator.group(replicas) if replicas else alone
        name = f"ep_size_{mesh.product(slices)}_{'_'.join(slices)}"
        groups._EXPERT_DATA_PARALLEL_GROUP[name] = copies
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = dist.get_process_group_ranks(copies)
        groups._EXPERT_PARALLEL_GROUP[name] = communicator.group(slices)
        groups._EXPERT_PARALLEL_GROUP_RANKS[name] = dist.get_process_group_ranks(communicator.group(slices))
        parameter: Any = found[source.name]
        parameter.allreduce, parameter.group_name = False, name
        if stage == 3:
            parameter.ds_zero_placement_family = "autoep_expert"
            parameter.ds_zero_partition_group_name = name
            parameter.ds_zero_partition_process_group = copies
        names[source.name] = name
    return names


def marker() -> nn.Module:
    """A module without parameters by which DeepSpeed sees, at stages 1 and 2, that there are replica groups."""
    mixture: Any = importlib.import_module("deepspeed.moe.layer").MoE

    class Marker(mixture):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = 1

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            """The groups exist already."""

    return Marker()


@contextmanager
def unrecognised(optimizer: Optimizer) -> Iterator[None]:
    """Keep Adagrad from being seen as such: DeepSpeed would replace it by a fresh one which has lost the groups."""
    kind: Any = type(optimizer)
    if isinstance(optimizer, torch.optim.Adagrad):
        members = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
        optimizer.__class__ = type(kind.__name__, (Optimizer,), members)
    try:
        yield
    finally:
        optimizer.__class__ = kind


def initialize(
    deepspeed: Any, module: nn.Module, optimizer: Optimizer, config: dict[str, Any], group: SimpleNamespace | None
) -> Any:
    """DeepSpeed's engine. Raises StrategyError, with DeepSpeed's words, where it refuses the config."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            engine, *_ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=config, mpu=group, dist_init_required=False
            )
        except (AssertionError, ValueError, deepspeed.runtime.zero.utils.ZeRORuntimeException) as error:
            text = " ".join(str(error).split())
            raise StrategyError("MW452", f"DeepSpeed refuses {config['zero_optimization']}: {text}") from error
    return engine


def data_parallel_group(communicator: Communicator) -> SimpleNamespace:
    """The model-parallel unit that DeepSpeed asks for the ranks over which it averages. Collective in the group."""
    first, size = communicator.world_rank - communicator.rank, communicator.mesh.size
    ranks = list(range(first, first + size))
    group = communicator.group(communicator.mesh.names) if size > 1 else new_group(ranks, True)
    answers = {
        "data_parallel_group": group,
        "data_parallel_group_ranks": ranks,
        "data_parallel_world_size": size,
        "data_parallel_rank": communicator.rank,
    }
    for kind in ("model", "tensor_model"):  # there is none: slices are known as those of experts
        answers |= {f"{kind}_parallel_group": None, f"{kind}_parallel_world_size": 1, f"{kind}_parallel_rank": 0}
    return SimpleNamespace(
        **{f"get_{name}": partial(lambda answer: answer, answer) for name, answer in answers.items()}
    )


COUNTED = {
    "all_reduce": (ALL_REDUCE, SUM),
    "all_gather_into_tensor": (ALL_GATHER, GATHER),
    "reduce_scatter_tensor": (REDUCE_SCATTER, SCATTER),
}
"""By method of the backend: the collective as plans and as the flight recorder call it."""


def count_on(backend: Any, communicator: Communicator) -> Callable[[], None]:
    """Count the bytes of the collectives of `backend` in `communicator`, as plans predict them, and show the flight
    recorder in which call this rank is, from now on. Returns `stop`."""

    def counted(name: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        kind, noted = COUNTED[name]
        over = args[2] if len(args) > 2 else named.get("group")
        group = dist.group.WORLD if over is None else over
        part = min((one for one in (*args, *named.values()) if isinstance(one, Tensor)), key=Tensor.numel)
        elements, ranks = part.numel(), dist.get_world_size(group)
        sent = all_reduce_elements([elements], ranks) if kind == ALL_REDUCE else elements * (ranks - 1)
        communicator.count(kind, sent, part)
        recorder.know(group, dist.get_process_group_ranks(group), "the ranks of ZeRO")
        recorder.cells[PLACE] = 0
        recorder.enter(group, noted)
        result = call(*args, **named)
        recorder.leave()
        return result

    for name in COUNTED:
        setattr(backend, name, partial(counted, name, getattr(backend, name)))

    def stop() -> None:
        for name in COUNTED:
            delattr(backend, name)

    return stop
