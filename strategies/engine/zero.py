"""Optimizer parallel of stages 1-3: DeepSpeed's ZeRO with a replica group per parameter. The one file that imports deepspeed.

DeepSpeed averages over the world but adds only over the ranks that hold the same slice, which it knows as an expert's
data-parallel group; lowering with `sharded_optimizer` multiplies what flows into each parameter by the factor that this needs.
The program must be a tree of modules: stage 3 gathers parameters module by module. What is used of DeepSpeed beyond its public
face is written once, here, and each convention has a regression test.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.engine.communicator import Communicator
from strategies.engine.program import Program
from strategies.engine.updates import (
    Groups,
    OptimizerFactory,
    Precision,
    UpdateState,
    check_optimizer,
    learning,
    learning_groups,
    local_elements,
    options_of,
    parameters,
    placed,
    set_options,
)
from strategies.errors import StrategyError, closest
from strategies.layout import Layout
from strategies.redistribution import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

LARGEST_BUCKET = 50_000_000
"""Elements; DeepSpeed's own default makes it allocate 2 GB per rank however small the model is."""

REFUSED = {
    "stage": "is given by parallel.zero.stage",
    "compute_grad_norm": "cannot be changed: the norm of the gradient is reported and used for clipping",
    "legacy_stage1": "is not supported by DeepSpeed any more",
    "elastic_checkpoint": "is replaced by this project's own checkpoints",
    "zero_hpz_partition_size": "does not know parameters with different replica groups",
    "zero_quantized_weights": "changes the numbers: training would differ from one device",
    "zero_quantized_nontrainable_weights": "changes the numbers: training would differ from one device",
    "zero_quantized_gradients": "changes the numbers: training would differ from one device",
    "zenflow": "changes the numbers: training would differ from one device",
    "cpu_offload": "is an old name; write offload_optimizer: {device: cpu}",
    "cpu_offload_param": "is an old name; write offload_param: {device: cpu}",
    "cpu_offload_use_pin_memory": "is an old name; write offload_optimizer: {device: cpu, pin_memory: true}",
}
"""Options of DeepSpeed that cannot be passed on, and why."""

MARKER = "_replica_groups"
EVALUATION = "_evaluation"


def predicted(program: Program, stage: int, accumulate: int = 1) -> dict[str, int]:
    """Bytes that one rank sends per optimizer step for gradients and weights, by collective, without padding and norms.

    A replica group of n ranks that hold b bytes of weights sends, per rank: at stages 1 and 2 an all-reduce of the fp32 gradients
    (2 (n-1)/n of their bytes; after every micro-batch at stage 2) and one all-gather of the new weights ((n-1)/n b); at stage 3,
    per micro-batch, a reduce-scatter of the gradients ((n-1)/n) and an all-gather of the weights for forward and for backward.
    """
    totals = {ALL_REDUCE: 0.0, REDUCE_SCATTER: 0.0, ALL_GATHER: 0.0}
    names = set(learning(program))
    for source in parameters(program):
        elements = local_elements(program, source)
        n = program.mesh.product(program.layouts[source.id].replica_axes(program.mesh))
        share, learns = elements * (n - 1) / n, source.name in names
        if stage == 3:
            totals[REDUCE_SCATTER] += accumulate * share * 4 * learns
            totals[ALL_GATHER] += accumulate * share * source.spec.item_bytes * (1 + learns)
        else:
            totals[ALL_REDUCE] += (accumulate if stage == 2 else 1) * 2 * share * 4 * learns
            totals[ALL_GATHER] += share * source.spec.item_bytes * learns
    return {kind: math.ceil(total) for kind, total in totals.items() if total}


class ZeroUpdates:
    """See `Updates`. The communicator must have the groups of `axes_needed`; capture and lower before.

    Weights below fp32 (`precision="bf16"`) have fp32 masters; gradients are added in fp32. At stage 3 `module` and `evaluation`
    hold their parameters only while they run, and `evaluation` must be given here to be found by the hooks that gather them.
    """

    def __init__(
        self,
        module: nn.Module,
        program: Program,
        communicator: Communicator,
        optimizer_factory: OptimizerFactory,
        groups: Groups,
        *,
        stage: int,
        clip: float | None = None,
        accumulate: int = 1,
        precision: Precision = "fp32",
        evaluation: nn.Module | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.evaluation = evaluation
        self._root, self._program, self._stage, self._accumulate = module, program, stage, accumulate
        self._parameters = {source.name: module.get_parameter(source.name) for source in parameters(program)}
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._learning, self._waiting = frozenset(learning(program)), 0
        _check_parameters(self._parameters, self._learning, stage, precision)
        torch_groups = learning_groups(program, groups)
        device = next(iter(self._parameters.values())).device
        self._deepspeed = _deepspeed(device)
        config = self._config(clip, precision, _checked(self._deepspeed, stage, options or {}))
        names = _replica_groups(self._deepspeed, self._parameters, program, communicator, stage)
        optimizer = optimizer_factory(
            [group for members, values in torch_groups for group in self._by_replicas(members, values, names)]
        )
        check_optimizer(optimizer, program, stage)
        if stage == 3 and evaluation is not None:
            module.add_module(EVALUATION, evaluation)
        elif stage < 3 and any(names[name] for name in self._learning):
            module.add_module(MARKER, _marker())
        kind = type(optimizer)
        if isinstance(optimizer, torch.optim.Adagrad):
            optimizer.__class__ = _unrecognised(kind)
        self.module = self._engine = _initialize(self._deepspeed, module, optimizer, config)
        self._zero = self._engine.optimizer
        optimizer.__class__ = kind
        if isinstance(optimizer, torch.optim.Adagrad):
            self._begin_adagrad(optimizer)
        if stage == 3 and evaluation is not None:
            evaluation.register_forward_pre_hook(self._start_of_evaluation, prepend=True)

    def _by_replicas(self, members: list[str], options: dict[str, Any], names: dict[str, str]) -> Iterator[dict[str, Any]]:
        """One torch group per replica group: DeepSpeed keeps one flat tensor for each."""
        for group in dict.fromkeys(names[name] for name in members):
            found = [self._parameters[name] for name in members if names[name] == group]
            yield {**options, "params": found, **({"name": group, "moe": True} if group else {"name": "dense"})}

    def _config(self, clip: float | None, precision: Precision, options: Mapping[str, Any]) -> dict[str, Any]:
        elements = sum(parameter.numel() for parameter in self._parameters.values())
        bucket = min(elements + elements % 2, LARGEST_BUCKET)
        zero: dict[str, Any] = {"stage": self._stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
        if self._stage == 3:
            # Gather what a module needs when it runs and let go at once; and leave torch's own functions as they are.
            zero |= {
                "stage3_param_persistence_threshold": 0,
                "stage3_prefetch_bucket_size": 0,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
                "memory_efficient_linear": False,
                "override_module_apply": False,
            }
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,  # only for DeepSpeed's own throughput figures
            "gradient_accumulation_steps": self._accumulate,
            "gradient_clipping": clip or 0.0,  # left out, it would be 1.0
            "zero_optimization": {**zero, **options},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "communication_data_type": "fp32",
            "steps_per_print": 10**9,
        }
        if precision == "bf16":
            config["bf16"] = {"enabled": True}
            if self._stage > 1:  # at stage 1 this would choose another optimizer wrapper, which knows no replica groups
                config["data_types"] = {"grad_accum_dtype": "fp32"}
        return config

    def _begin_adagrad(self, optimizer: torch.optim.Adagrad) -> None:
        """Adagrad makes its states when it is made, for the parameters; make them for the flat tensors instead."""
        optimizer.state.clear()
        for index, flat in enumerate(self._masters()):
            group = optimizer.param_groups[self._group_of(index)]
            initial = torch.full_like(flat, group["initial_accumulator_value"])
            optimizer.state[flat] = {"step": torch.zeros((), dtype=torch.float32), "sum": initial}

    def _masters(self) -> list[Tensor]:
        """The flat fp32 tensors on which the optimizer works: this rank's part of every group."""
        found: list[Tensor] = (
            self._zero.fp32_partitioned_groups_flat if self._stage == 3 else self._zero.single_partition_of_fp32_groups
        )
        return found

    def _group_of(self, index: int) -> int:
        """The torch group of a flat tensor; stage 3 may cut a group into several."""
        return int(self._zero.sub_group_to_group_id[index]) if self._stage == 3 else index

    def _start_of_evaluation(self, *_: Any) -> None:
        """DeepSpeed learns the order of modules from pass to pass; begin a new pass, or it would wait for the training program."""
        self._zero.parameter_offload.get_param_coordinator().reset_step()

    @property
    def optimizer(self) -> Optimizer:
        found: Optimizer = self._zero.optimizer
        return found

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)
        self._waiting += 1
        if self._waiting < self._accumulate:
            self._engine.step()  # only counts the micro-batch

    def reduce(self) -> None:
        """Nothing: DeepSpeed reduces during backward."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._program.reductions:
            parameter = self._parameters[name]
            found = self._deepspeed.utils.safe_get_full_grad(parameter) if name in self._learning else None
            if found is None:
                found = torch.zeros(self._shapes[name], device=parameter.device)
            yield name, found.detach().float()

    def update(self, measure: bool = True) -> float | None:
        self._engine.step()
        self._waiting = 0
        # the norm is at hand anyway; a step whose norm is not a number is left out by DeepSpeed
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else math.nan

    def step(self, measure: bool = True) -> float | None:
        return self.update(measure)

    def weight(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        if self._stage < 3:
            return parameter.detach()
        with self._deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def set_weight(self, name: str, value: Tensor) -> None:
        parameter: Any = self._parameters[name]
        with torch.no_grad():
            if self._stage < 3:
                parameter.copy_(value)
                if getattr(parameter, "_hp_mapping", None) is not None:
                    parameter._hp_mapping.update_hp()
                return
            partition = parameter.ds_tensor
            start = parameter.ds_zero_partition_rank * partition.numel()
            part = torch.zeros(partition.shape, dtype=torch.float32, device=partition.device)
            piece = value.reshape(-1)[start : start + partition.numel()]
            part[: piece.numel()].copy_(piece)
            partition.data.copy_(part)
            if name in self._learning:
                self._deepspeed.utils.safe_set_local_fp32_param(parameter, part)
            if parameter.numel() == value.numel():  # kept gathered, by the user's option
                parameter.data.copy_(value)

    def state(self) -> UpdateState:
        state = UpdateState(plain={"groups": options_of(self.optimizer), "other": {}})
        for index, flat in enumerate(self._masters()):
            state.own[f"master/{index}"] = flat.detach()
            for key, value in self.optimizer.state.get(flat, {}).items():
                if isinstance(value, Tensor):
                    state.own[f"state/{index}/{key}"] = value
                else:
                    state.plain["other"].setdefault(index, {})[key] = value
        return state

    def load(self, state: UpdateState) -> None:
        set_options(self.optimizer, state.plain["groups"])
        for index, flat in enumerate(self._masters()):
            flat.data.copy_(state.own[f"master/{index}"])
            prefix = f"state/{index}/"
            found = {key.removeprefix(prefix): value for key, value in state.own.items() if key.startswith(prefix)}
            found |= state.plain["other"].get(index, {})
            self.optimizer.state[flat] = {key: placed(value, flat) for key, value in found.items()}

    def close(self) -> None:
        self._engine.destroy()
        for name in (MARKER, EVALUATION):
            self._root._modules.pop(name, None)


def _check_parameters(found: Mapping[str, nn.Parameter], learns: frozenset[str], stage: int, precision: Precision) -> None:
    if precision == "fp64" or any(parameter.dtype == torch.float64 for parameter in found.values()):
        raise StrategyError(
            f"ZeRO stage {stage} cannot train in fp64: DeepSpeed keeps the weights that it updates in fp32, so the extra digits would "
            "be lost. Use parallel.zero.stage=0, or train.precision=fp32."
        )
    for name, parameter in found.items():
        if parameter.dim() == 0:
            raise StrategyError(
                f"Parameter {name} has no dims (shape ()), which DeepSpeed cannot hold. Give it shape (1,) in the model, or use "
                "parallel.zero.stage=0."
            )
    dtypes = {str(found[name].dtype).removeprefix("torch."): name for name in sorted(learns)}
    if len(dtypes) > 1:
        shown = " and ".join(f"{name} is {dtype}" for dtype, name in sorted(dtypes.items()))
        raise StrategyError(f"ZeRO stage {stage} needs trainable parameters of one dtype, but {shown}. Use parallel.zero.stage=0.")


def _deepspeed(device: torch.device) -> Any:
    """The package, quiet, for the kind of device at hand, with what this rank's launcher may not have set."""
    os.environ["DS_ACCELERATOR"] = device.type
    count, rank = str(dist.get_world_size()), str(dist.get_rank())
    for name, value in {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": str(device.index or 0), "LOCAL_SIZE": count}.items():
        os.environ.setdefault(name, value)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("deepspeed")
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False  # compiles for half a minute
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"deepspeed(\.|$)")
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)  # by its calls
    return module


def _checked(deepspeed: Any, stage: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options for `zero_optimization`. Raises StrategyError for what is unknown, refused or of the wrong type."""
    model = importlib.import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    known = {name for field, info in model.model_fields.items() for name in (field, info.alias) if name}
    for name, value in options.items():
        where = f"parallel.zero.options.{name}"
        if name in REFUSED:
            raise StrategyError(f"{where} = {value!r}: {name} {REFUSED[name]}.")
        if name not in known:
            raise StrategyError(f"{where} = {value!r}: DeepSpeed has no such option of ZeRO.{closest(name, sorted(known - REFUSED.keys()))}")
        if name == "reduce_scatter" and value is not True:
            raise StrategyError(f"{where} = {value!r}: it must stay true, or gradients of sliced parameters would not be reduced.")
        if name.startswith("offload_") and isinstance(value, Mapping) and value.get("device") == "nvme":
            raise StrategyError(
                f"{where}.device = 'nvme': DeepSpeed 0.19 damages gradients on their way to a disk (training goes silently wrong). "
                "Use device: cpu."
            )
    try:
        model(**{"stage": stage, **options})
    except ValueError as error:
        text = " ".join(str(error).split())
        raise StrategyError(f"parallel.zero.options: DeepSpeed refuses {dict(options)}: {text}") from error
    return dict(options)


def _replica_groups(
    deepspeed: Any, found: Mapping[str, nn.Parameter], program: Program, communicator: Communicator, stage: int
) -> dict[str, str]:
    """Tell DeepSpeed which ranks hold the same slice of each parameter; parameter -> name of its group, "" for the whole world.

    DeepSpeed's words for it: the slices are experts. The name must begin with ep_size_NUMBER.
    """
    groups = importlib.import_module("deepspeed.utils.groups")
    mesh, names, alone = program.mesh, {}, None
    for source in parameters(program):
        layout: Layout = program.layouts[source.id]
        replicas = layout.replica_axes(mesh)
        slices = mesh.others(replicas)
        if not slices:
            names[source.name] = ""
            continue
        if not replicas and alone is None:
            alone = dist.new_group([communicator.rank], use_local_synchronization=True)
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


def _marker() -> nn.Module:
    """A module without parameters by which DeepSpeed sees, at stages 1 and 2, that there are replica groups."""
    mixture: Any = importlib.import_module("deepspeed.moe.layer").MoE

    class Marker(mixture):  # type: ignore[misc]
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.num_experts = 1

        def set_deepspeed_parallelism(self, *_: Any, **__: Any) -> None:
            """The groups exist already."""

    return Marker()


def _unrecognised(kind: type[Optimizer]) -> type[Optimizer]:
    """The same methods under a class that is no Adagrad: DeepSpeed would replace that by a fresh one which has lost the groups."""
    members = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind.__name__, (Optimizer,), members)


def _initialize(deepspeed: Any, module: nn.Module, optimizer: Optimizer, config: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
        except (AssertionError, ValueError, deepspeed.runtime.zero.utils.ZeRORuntimeException) as error:
            text = " ".join(str(error).split())
            raise StrategyError(f"DeepSpeed refuses {config['zero_optimization']}: {text}") from error
    return engine
