"""What the parent does once per run: build data and model, capture, plan, write the initial weights. The ranks get the result.

Everything that can be wrong with the user's model, loss, data or strategies is found here, before any rank starts, and ends as one
paragraph (exit code 2).
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner import optimizers, targets
from runner.data.loader import Collate, MapDataset, Order, build_dataset, flatten_batch, whole_batch
from runner.errors import ConfigError
from runner.schema import Config
from strategies.capture import Captured, LossFunction, Objective, capture
from strategies.engine import weights
from strategies.engine.program import Options
from strategies.graph import OperatorGraph
from strategies.plan import Plan
from strategies.planner import follow, make_plan
from strategies.request import NamedDims, NamedMatrix, Operand, Request, Wanted

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
WEIGHTS = "initial.pt"


@dataclass(frozen=True)
class Evaluation:
    """The evaluation graph of one batch size, its plan, and the batch entries that flow into it."""

    graph: OperatorGraph
    plan: Plan


@dataclass(frozen=True)
class Prepared:
    """What a rank needs beside its number; plain data. `graph` and `plan` are None for modes that run the user's module itself.

    `names` and `shapes` describe the global micro-batch, `targets` the entries that only the loss takes; `evaluations` by rows.
    """

    config: Config
    world_size: int
    device: str
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    targets: tuple[str, ...]
    rows: int
    graph: OperatorGraph | None
    plan: Plan | None
    evaluations: dict[int, Evaluation]
    digest: str


def datasets(config: Config) -> tuple[MapDataset, MapDataset | None, Collate | None]:
    """Training data, evaluation data (None without a reason to evaluate), and the user's collate."""
    collate = targets.resolve(config.data.collate, "data.collate") if config.data.collate else None
    training = build_dataset(config.data.target, config.data.args, config.data.path, what="data")
    if config.evaluate.metric is None and not config.evaluate.args:
        return training, None, collate
    args = config.data.args | config.evaluate.args
    return training, build_dataset(config.data.target, args, config.data.path, what="data"), collate


def micro_rows(config: Config) -> int:
    """Rows of one micro-batch over all ranks."""
    return config.data.batch_size // config.train.accumulate


def evaluation_rows(config: Config) -> int:
    return config.evaluate.batch_size or micro_rows(config)


def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Floating-point batch entries in the precision of training."""
    return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]


def build_model(config: Config, target: str | None = None, args: dict[str, Any] | None = None, what: str = "model") -> nn.Module:
    """The user's model (or another one that takes its place), from the seed, in the precision of training."""
    torch.manual_seed(config.train.seed)
    model = targets.build(target or config.model.target, config.model.args if args is None else args, what)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{what}.target = {target or config.model.target!r} makes a {type(model).__name__}; a torch.nn.Module is needed.")
    for name in optimizers.frozen([name for name, _ in model.named_parameters()], config.optimizer):
        model.get_parameter(name).requires_grad_(False)
    return model.to(DTYPES[config.train.precision])


def build_loss(config: Config) -> nn.Module | None:
    """The loss as a module: an instance of a class, or a plain function with its keyword arguments bound."""
    if config.loss.target is None:
        return None
    function = targets.resolve(config.loss.target, "loss.target")
    if not inspect.isclass(function):
        return LossFunction(function, dict(config.loss.args))
    loss = targets.call(function, config.loss.args, config.loss.target, "loss")
    module = loss if isinstance(loss, nn.Module) else LossFunction(loss, {})
    return module.to(DTYPES[config.train.precision])


def target_names(config: Config, model: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """The batch entries that only the loss takes: the last of a tuple, or what `forward` does not take by name."""
    if config.loss.target is None:
        return ()
    if all(name.isdigit() for name in names):
        if len(names) < 2:
            raise ConfigError(
                f"data: a sample of {config.data.target} has one entry, but loss.target = {config.loss.target!r} needs a target beside the "
                "model's input; return (input, target), or set loss.target=null if the model returns its loss."
            )
        return (names[-1],)
    taken = [name for name in names if targets.accepts(model.forward, name)]
    left = tuple(name for name in names if name not in taken)
    if not left:
        raise ConfigError(
            f"data: {config.model.target}.forward takes every entry of a sample ({', '.join(names)}), so none is left for loss.target = "
            f"{config.loss.target!r}; set loss.target=null if the model returns its loss."
        )
    return left


def objective(config: Config, names: Sequence[str], model: nn.Module | None = None) -> Objective:
    """The user's model and loss as one module, eager and untouched."""
    model = model or build_model(config)
    return Objective(model, build_loss(config), names, target_names(config, model, names))


def device_of(config: Config) -> tuple[str, int]:
    """The device to run on, and how many ranks. Raises ConfigError for too few GPUs."""
    gpus = torch.cuda.device_count() if config.device != "cpu" and torch.cuda.is_available() else 0
    alone = config.parallel.mode == "stand_alone"
    wanted = 1 if alone else config.world_size
    if config.device == "cuda" or (config.device == "auto" and gpus >= (wanted or 1)):
        if gpus < (wanted or 1):
            raise ConfigError(
                f"device = cuda needs {wanted or 1} GPUs (world_size), but this machine has {gpus}; set world_size={max(gpus, 1)} "
                "or device=cpu."
            )
        return "cuda", wanted or gpus
    return "cpu", wanted or 8


def request_of(config: Config, world_size: int) -> Request:
    """The planner's request, from the config."""
    parallel = config.parallel

    def operand(form: Any) -> Operand:
        return tuple(form) if isinstance(form, tuple) else NamedDims(form.layout, form.dims)

    def side(forms: Any) -> tuple[Operand, ...] | None:
        return None if forms is None else tuple(operand(form) for form in forms)

    dataset = parallel.dataset_strategy
    return Request(
        parallel.mode,
        world_size,
        parallel.search,
        tuple(parallel.mesh.items()) if parallel.mesh else None,
        {path: Wanted(side(form.inputs), side(form.outputs)) for path, form in parallel.strategies.items()},
        {name: NamedMatrix(matrix.device_matrix, matrix.axes) for name, matrix in parallel.layouts.items()},
        parallel.set_data_parallel,
        dataset if isinstance(dataset, str) else side(dataset) or (),
    )


def prepare(config: Config, folder: Path | None, say: Callable[[str], None] = print) -> Prepared:
    """Build, capture and plan; with a folder, also write the initial weights there for the ranks.

    Raises ConfigError and StrategyError for anything wrong with model, loss, data, strategies or devices.
    """
    device, world_size = device_of(config)
    training, evaluating, collate = datasets(config)
    order = Order(len(training), config.data.batch_size, config.train.seed)
    rows = micro_rows(config)
    names, tensors = flatten_batch(whole_batch(training, collate, order.rows(0)[:rows]))
    tensors = cast(tensors, DTYPES[config.train.precision])
    if order.dropped and (config.train.epochs or (config.train.steps or 0) > order.steps_per_epoch):
        say(f"data: {order.dropped} of {len(training)} samples fill no whole batch of {config.data.batch_size}; every epoch drops as many.")
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    prepared = Prepared(config, world_size, device, names, shapes, (), rows, None, None, {}, "")
    if config.parallel.mode == "hybrid":
        return replace(prepared, digest=digest(config.model, config.loss, shapes))
    step = objective(config, names)
    prepared = replace(prepared, targets=tuple(name for name in names if name in step.targets))
    if config.parallel.mode == "stand_alone":
        capture(step, tensors, training=True)  # for its checks: forward runs, the loss is a scalar
        if folder is not None:
            weights.write(folder / WEIGHTS, dict(step.model.state_dict()))
        return replace(prepared, digest=digest(config.model, config.loss, shapes))
    captured = capture(step, tensors, training=True)
    plan = make_plan(captured.graph, request_of(config, world_size))
    evaluations: dict[int, Evaluation] = {}
    if evaluating is not None:
        captured, evaluations = _evaluations(config, step, captured, plan, evaluating, collate)
    if folder is not None:
        weights.write(folder / WEIGHTS, captured.tensors)
    told = digest(captured.graph.signature(), json.dumps({**plan.to_json(), "search": None}))
    return replace(
        prepared, graph=captured.graph, plan=plan, evaluations=evaluations, digest=told
    )


def _evaluations(
    config: Config, step: Objective, captured: Captured, plan: Plan, dataset: MapDataset, collate: Collate | None
) -> tuple[Captured, dict[int, Evaluation]]:
    """Evaluation graphs by rows: one for whole batches (the last one is padded); a model that returns its own loss cannot be padded,
    so its short last batch gets a graph of its own."""
    rows = min(evaluation_rows(config), len(dataset))
    sizes = {rows} if step.loss is not None else {rows, len(dataset) % rows} - {0}
    wanted = [name for name in step.names if name not in step.targets]
    model = Objective(step.model, None, wanted, ())
    tensors, found = dict(captured.tensors), {}
    for size in sorted(sizes):
        names, batch = flatten_batch(whole_batch(dataset, collate, range(size)))
        chosen = [tensor for name, tensor in zip(names, cast(batch, DTYPES[config.train.precision]), strict=True) if name in wanted]
        seen = capture(model, chosen, training=False)
        found[size] = Evaluation(seen.graph, follow(plan, seen.graph))
        tensors |= {name: tensor for name, tensor in seen.tensors.items() if name not in tensors}
    return replace(captured, tensors=tensors), found


def options_of(config: Config) -> Options:
    """How the training graph is lowered."""
    return Options(config.train.random == "exact", config.parallel.zero.stage > 0, partial_loss=True)


def digest(*parts: object) -> str:
    """A short hash of what all ranks must agree on."""
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()[:16]
