"""The user's model and loss, built from the config: the module that is captured, run and compared.

A plan needs shapes alone, so the same objective can also be built from shapes (on torch's device `meta`, where nothing
is allocated or random) and captured as if it were on the CPU. Invariant: its graph is that of the real one.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from runner.build import huggingface, optimizers, pretrained, targets
from runner.build.captures import Captures
from runner.config.schema import Config
from runner.errors import ConfigError
from runner.run_folder.plan_file import read_content
from strategies.capture import Captured, LossFunction, Objective, capture, run_once
from strategies.capture.shapes import pretend, shapes_only
from strategies.core.addressing import means_module
from strategies.core.errors import StrategyError, closest
from strategies.core.graph import FusedSections
from strategies.planner.plan_file import packed_in
from strategies.rules.drawing_calls import restored
from strategies.runtime.offload import Offload

M = TypeVar("M", bound=nn.Module)
DTYPES = {
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "bf16_autocast": torch.float32,
}
"""Of parameters and batches."""
AUTOCAST = {"bf16_autocast": torch.bfloat16}
"""In which autocast runs a model."""


def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Floating-point and complex batch entries in the precision of training."""
    return [_in(dtype, tensor) for tensor in tensors]


def cast_named(entries: Mapping[str, Tensor], dtype: torch.dtype, floating: Collection[str]) -> dict[str, Tensor]:
    """As `cast`, with integers, too, in the entries that are `floating` in training."""
    return {
        name: tensor.to(dtype) if name in floating and not tensor.is_complex() else _in(dtype, tensor)
        for name, tensor in entries.items()
    }


def _in(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64
    return tensor.to(dtype if tensor.is_floating_point() else wide if tensor.is_complex() else tensor.dtype)


def check_half(config: Config, step: Objective, tensors: Sequence[Tensor], device: str) -> None:
    """Raises ConfigError where an operator of the model has no fp16 on this device."""
    if config.train.precision != "fp16" or device != "cpu":
        return
    try:
        run_once(step, tensors, backward=True)
    except StrategyError as error:
        if "Half" not in str(error):  # torch's name for it, in any message
            raise
        raise ConfigError(
            "MW324",
            f"train.precision = fp16 cannot be used with this model on a CPU, where torch lacks an operator in fp16: "
            f"{error} Use train.precision=bf16 or bf16_autocast.",
        ) from error


LARGEST_REBUILT = 1 << 30
"""Bytes of parameters up to which a model that cannot be captured from shapes alone is built after all."""


def _silent(_: str) -> None:
    """Say nothing."""


def build_model(config: Config, say: Callable[[str], None] = _silent) -> nn.Module:
    """The user's model, from the seed, in the precision of training, which changes tensors that the model makes in a
    dtype of their own; `say` names these."""
    torch.manual_seed(config.train.seed)
    with _seeded(config):
        model = huggingface.build(config.model)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ConfigError(
            "MW305", f"model.target = {config.model.target!r} makes a {kind}; a torch.nn.Module is needed."
        )
    check_complete(model, f"model.target = {config.model.target!r}")
    dtype, default = DTYPES[config.train.precision], torch.get_default_dtype()
    tensors = (*model.named_parameters(), *model.named_buffers())
    own = [(name, one.dtype) for name, one in tensors if one.is_floating_point() and one.dtype not in (default, dtype)]
    if own:
        kinds = " and ".join(sorted({str(kind).removeprefix("torch.") for _, kind in own}))
        names = pretrained.listed([name for name, _ in own])
        say(f"model: {names} cast from {kinds} to {config.train.precision} (train.precision).")
    return in_precision(model, dtype)


@contextmanager
def _seeded(config: Config) -> Iterator[None]:
    """Objects made inside draw the same numbers with numpy and Python's `random` in every process."""
    with restored():
        random.seed(config.train.seed)
        numpy.random.seed(config.train.seed % 2**32)
        yield


def check_complete(model: nn.Module, what: str) -> None:
    """Raises ConfigError for modules whose forward is no Python, and for parameters that have no shape yet."""
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ConfigError(
                "MW305",
                f"{what} has a module compiled by torch.jit ({path or 'itself'}), whose operators cannot be seen; give "
                "the module of Python that was compiled.",
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ConfigError(
                "MW305",
                f"{what} has a lazy parameter without a shape ({name}); give the sizes, or call the model on a batch "
                "of zeros in its constructor.",
            )


def in_precision(module: M, dtype: torch.dtype) -> M:
    """`module` with parameters and buffers of floating point in `dtype`, and complex ones in the complex dtype of that
    precision, at least complex64. (`Module.to` would drop their imaginary parts.)"""
    module._apply(partial(_in, dtype))  # type: ignore[no-untyped-call]
    return module


def build_loss(config: Config) -> nn.Module | None:
    """The loss as a module: an instance of a class, or a plain function with its keyword arguments bound."""
    if config.loss.target is None:
        return None
    function = targets.resolve(config.loss.target, "loss.target")
    with _seeded(config):
        if not inspect.isclass(function):
            return LossFunction(function, targets.nested(config.loss.args, "loss.args"))
        loss = targets.call(function, config.loss.args, config.loss.target, "loss")
    module = loss if isinstance(loss, nn.Module) else LossFunction(loss, {})
    return in_precision(module, DTYPES[config.train.precision])


def build(config: Config, say: Callable[[str], None] = _silent) -> tuple[nn.Module, nn.Module | None]:
    """The user's model and loss, `say` as for `build_model`; the parameters of both that optimizer.freeze names do not
    require gradients."""
    model, loss = build_model(config, say), build_loss(config)
    named = dict(model.named_parameters())
    if loss is not None:
        named |= {f"loss.{name}": parameter for name, parameter in loss.named_parameters()}
    for name in optimizers.frozen(named, config.optimizer):
        named[name].requires_grad_(False)
    return model, loss


def target_names(config: Config, model: nn.Module, loss: nn.Module | None, names: Sequence[str]) -> tuple[str, ...]:
    """The batch entries that only the loss takes: the last of a tuple, or the names that `forward` does not take; none
    where the model takes all and the loss its output alone."""
    if config.loss.target is None:
        return ()
    alone = loss is not None and _takes_output_alone(loss)
    if all(name.isdigit() for name in names):
        if len(names) < 2:
            if alone:
                return ()
            raise ConfigError(
                "MW313",
                f"data: a sample of {config.data.target} has one entry, but loss.target = {config.loss.target!r} needs "
                "a target beside the model's input; return (input, target), set loss.target=null if the model "
                "returns its loss, or give a loss that takes the output alone.",
            )
        return (names[-1],)
    left = tuple(name for name in names if not targets.accepts(model.forward, name))
    if not left:  # by **kwargs, as models of transformers pass on, an entry is taken only if the loss needs none
        left = tuple(name for name in names if not targets.names(model.forward, name))
    within = getattr(model, "get_base_model", None)
    if len(left) == len(names) and callable(within):  # a wrapper of peft passes on what it is given
        forward = within().forward
        left = tuple(name for name in names if not targets.names(forward, name))
    if len(left) == len(names):
        taken = ", ".join(inspect.signature(model.forward).parameters) or "nothing"
        raise ConfigError(
            "MW313",
            f"data: {config.model.target}.forward takes none of the entries of a sample ({', '.join(names)}) by name, "
            f"but {taken}; give the entries the names of its arguments, in the dataset or by data.collate.",
        )
    if not left and not alone:
        raise ConfigError(
            "MW313",
            f"data: {config.model.target}.forward takes every entry of a sample ({', '.join(names)}), so none is left "
            f"for loss.target = {config.loss.target!r}; set loss.target=null if the model returns its loss, or give a "
            "loss that takes the output alone.",
        )
    return left


def _takes_output_alone(loss: nn.Module) -> bool:
    """Whether a loss has one argument beside those that are given by name."""
    called, given = (loss.function, loss.keywords) if isinstance(loss, LossFunction) else (loss.forward, {})
    try:
        parameters = inspect.signature(called).parameters
    except (TypeError, ValueError):  # of a builtin
        return False
    left = [one for name, one in parameters.items() if name not in given and one.kind is not one.KEYWORD_ONLY]
    return len(left) == 1 and left[0].kind in (left[0].POSITIONAL_ONLY, left[0].POSITIONAL_OR_KEYWORD)


def objective(config: Config, names: Sequence[str], say: Callable[[str], None] = _silent) -> Objective:
    """The user's model and loss as one module, eager and untouched; `say` as for `build_model`."""
    model, loss = build(config, say)
    targeted = target_names(config, model, loss, names)
    autocast = AUTOCAST.get(config.train.precision)
    return Objective(
        *(model, loss, names, targeted, autocast), sections=sections_of(config), target=export_target(config)
    )


def sections_of(config: Config) -> dict[str, FusedSections] | None:
    """The fused weights that are sliced section by section: those of a given plan, and none where a target has no such
    layout; else None, which stands for all."""
    if config.parallel.plan is not None:
        with suppress(ConfigError, StrategyError):  # raised where the plan is read
            return packed_in(read_content(Path(config.parallel.plan)), config.parallel.plan)
    target, stage = config.parallel.for_target, config.parallel.zero.stage
    unsaid = target in ("deepspeed", "parallelize_module", "torchtitan") or (
        target in ("autoparallel", "torch") and stage in (3, "auto")
    )
    return {} if unsaid else None


def export_target(config: Config) -> str | None:
    """The target of an export for which a plan is made."""
    return config.export.target if config.job.name == "export" else config.parallel.for_target


def captured_from_shapes(
    config: Config,
    names: Sequence[str],
    tensors: list[Tensor],
    say: Callable[[str], None],
    earlier: Captures | None = None,
) -> tuple[Objective, Captured, list[Tensor]]:
    """The objective, its training graph and a matching batch, without memory for parameters. A model whose constructor
    or forward reads values is built with real tensors instead, unless it is known to be large. Graphs are looked for
    in `earlier`, and kept there.

    Raises ConfigError and StrategyError as `objective` and `capture` do.
    """
    try:
        with shapes_only():
            step = objective(config, names, say)
        size = sum(parameter.numel() * parameter.element_size() for parameter in step.parameters())
    except ConfigError:
        step = objective(config, names, say)  # the same error, if it has nothing to do with numbers
        say(f"plan: {config.model.target} reads numbers while it is built, so it was built in full.")
        return step, capture(step, tensors, training=True), tensors
    try:
        shapes = pretend(step, tensors)
        if (found := None if earlier is None else earlier.find(step, shapes)) is None:
            found = capture(step, shapes, training=True)
            if earlier is not None:
                earlier.keep(step, shapes, found)
        return step, found, shapes
    except StrategyError:
        if size > LARGEST_REBUILT:
            raise
    step = objective(config, names)
    return step, capture(step, tensors, training=True), tensors


def offload_of(config: Config, folder: Path | None) -> Offload:
    """What the config asks for, in the engine's terms; `folder` is that of `runner.launch.temporary_folder`."""
    wanted = config.parallel.offload
    larger_than = int(wanted.activations.larger_than * 1e6)
    return Offload(
        wanted.optimizer, wanted.parameters, wanted.activations.to, wanted.activations.modules, larger_than, folder
    )


def check_modules(config: Config, model: nn.Module) -> None:
    """Raises ConfigError for a glob that matches no module."""
    names = [name for name, _ in model.named_modules() if name]
    for glob in config.parallel.offload.activations.modules:
        if not any(means_module(glob, name) for name in names):
            raise ConfigError(
                "MW211",
                f"parallel.offload.activations.modules: {glob!r} matches no module of the model.{closest(glob, names)}",
            )
