"""Optimizer, parameter groups and scheduler as the config describes them.

A parameter belongs to the first group with a glob that matches its full name, else to the group of everything else.
Globs are those of the shell, on the full name: `*.bias` matches `layers.0.dense.bias`. Invariant: any error in a name,
a glob or an argument is one `ConfigError` that starts with the config key, and every group is checked like the
optimizer itself.
"""

from __future__ import annotations

import collections.abc
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer as TorchOptimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from runner.build.targets import call, describe, nested, resolve
from runner.checkpoint.content import serialised
from runner.config.schema import Optimizer, Scheduler
from runner.errors import ConfigError
from strategies.core.errors import closest
from strategies.optimizer.bytes_per_element import Need, needed
from strategies.optimizer.state import groups_of
from strategies.optimizer.updates import OptimizerFactory, check_kind

WORDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string", type(None): "null"}
"""What a user gives for a simple annotation."""


def check_annotations(function: Callable[..., Any], args: Mapping[str, Any], target: str, what: str) -> None:
    """Check the arguments of torch's optimizers and schedulers against their annotations: these validate some arguments
    in the constructor, others in the first step or never.

    Raises:
        ConfigError: One of `args`, in the section `what`, does not match its annotation.
    """
    if not inspect.isclass(function) or not function.__module__.startswith("torch."):
        return  # annotations of other functions are not checked
    try:
        # with names that torch imports for type checkers alone
        hints = typing.get_type_hints(function.__init__, None, {**vars(typing), **vars(collections.abc)})
    except (NameError, TypeError):
        return
    for name, value in args.items():
        if name in hints and not _fits(value, hints[name]):
            wanted = " or ".join(dict.fromkeys(_words(hints[name])))
            raise ConfigError("MW303", f"{what}.args.{name} = {value!r}: {target} takes {wanted} there.")


def _fits(value: Any, hint: Any) -> bool:
    """Whether `value`, as YAML has it, can be meant by `hint`; true for annotations of other kinds."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is tuple and Ellipsis not in inner:
        return isinstance(value, list | tuple) and len(value) == len(inner) and all(map(_fits, value, inner))
    if origin is not None and inspect.isclass(origin) and issubclass(origin, Iterable):
        return isinstance(value, list | tuple) and all(_fits(one, inner[0]) for one in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in WORDS:
        return isinstance(value, hint)
    return getattr(hint, "__name__", "") != "Tensor"  # not expressible in YAML


def _words(hint: Any) -> list[str]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [word for one in inner for word in _words(one)]
    if origin is tuple and Ellipsis not in inner:
        return [f"a list of {len(inner)}: {', '.join(_words(one)[0] for one in inner)}"]
    if origin is not None:
        return ["a list"]
    return [WORDS[hint]] if hint in WORDS else []


def frozen(names: Iterable[str], config: Optimizer) -> frozenset[str]:
    """The parameters that `optimizer.freeze` names; set `requires_grad` to False before the model is captured.

    Raises ConfigError for a glob that matches none of `names`.
    """
    known, globs = list(names), enumerate(config.freeze)
    return frozenset(name for n, glob in globs for name in _matches(glob, known, f"optimizer.freeze[{n}]"))


def parameter_groups(names: Sequence[str], trainable: Iterable[str], config: Optimizer) -> list[dict[str, Any]]:
    """Groups {"names": [...], option: value, ...} that hold every trainable parameter once, in the order of `names`.

    `names` are all parameters of the model: a glob may match frozen ones only. Raises ConfigError for a glob that
    matches none.
    """
    left = [name for name in names if name in set(trainable)]
    groups = []
    for number, group in enumerate(config.groups):
        matched = {
            name
            for position, glob in enumerate(group.match)
            for name in _matches(glob, names, f"optimizer.groups[{number}].match[{position}]")
        }
        options = nested(group.args, f"optimizer.groups[{number}].args")
        groups.append({"names": [name for name in left if name in matched], **options})
        left = [name for name in left if name not in matched]
    return [group for group in [{"names": left}, *groups] if group["names"]]


def _matches(glob: str, names: Sequence[str], where: str) -> list[str]:
    found = [name for name in names if fnmatchcase(name, glob)]
    if not found:
        raise ConfigError("MW211", f"{where} = {glob!r} matches no parameter of the model.{closest(glob, names)}")
    return found


@dataclass(frozen=True)
class _Factory:
    """Makes an optimizer from torch's parameter groups. Equal for equal arguments: what was tried with one is known of
    the other."""

    function: Callable[..., Any]
    target: str
    written: str
    args: Mapping[str, Any] = field(compare=False)

    @classmethod
    def of(cls, config: Optimizer) -> _Factory:
        return cls(resolve(config.target, "optimizer.target"), config.target, repr(config.args), config.args)

    def __call__(self, groups: list[dict[str, Any]]) -> TorchOptimizer:
        return self.with_args(groups, {}, "optimizer")

    def with_args(self, groups: list[dict[str, Any]], more: Mapping[str, Any], what: str) -> TorchOptimizer:
        """Make the optimizer of `groups` with `more` arguments; messages name the section `what`."""
        args = {**self.args, **more}
        check_annotations(self.function, args, self.target, what)
        made = call(partial(self.function, groups), args, self.target, what)
        if not isinstance(made, TorchOptimizer):
            raise ConfigError(
                "MW305",
                f"optimizer.target = {self.target!r} made a {type(made).__name__}; a torch.optim.Optimizer is needed.",
            )
        return made


def optimizer_factory(config: Optimizer) -> OptimizerFactory:
    """The function that makes the optimizer from torch's parameter groups.

    Raises ConfigError, here and not later, for an unknown target or for arguments that the optimizer does not take,
    also those of the groups.
    """
    factory = _Factory.of(config)
    factory(_probe())
    for number, group in enumerate(config.groups):
        factory.with_args(_probe(), group.args, f"optimizer.groups[{number}]")
    return factory


def _probe() -> list[dict[str, Any]]:
    """Parameter groups of one element, on which nothing depends."""
    return [{"params": [torch.nn.Parameter(torch.zeros(1, 1))]}]


def need_of(config: Optimizer) -> Need:
    """The optimizer's state per parameter element, measured with a step on a small matrix. Raises ConfigError
    as `optimizer_factory` does and where a step fails, and StrategyError for one that no plan can use."""
    make = optimizer_factory(config)
    check_kind(make(_probe()))
    try:
        return needed(make, torch.float32)
    except Exception as error:  # whatever a step raises
        raise ConfigError("MW323", f"optimizer: {config.target} fails in a step: {describe(error)}.") from error


def check_storable(make: OptimizerFactory) -> None:
    """Raises ConfigError where a checkpoint cannot hold the state that an optimizer has after a step."""
    groups = _probe()
    optimizer = make(groups)
    if type(optimizer).__module__.startswith("torch."):
        return
    (parameter,) = groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except Exception:  # it may refuse a parameter of one element, and take those of the model
        return
    states = [*optimizer.state.values()]
    serialised({"groups": groups_of(optimizer, [["parameter"]]), "states": states})


def check_scheduler(config: Scheduler, optimizer: TorchOptimizer, evaluates: bool = True, steps: int = 1) -> None:
    """Make the scheduler on an `optimizer` that nothing else uses, and step it; torch's own also at the milestones of
    SequentialLR and at the end of a run that steps it `steps` times, which OneCycleLR counts. Raises ConfigError as
    `scheduler` does, where a step fails, and for one that follows evaluations of a run that has none."""
    made = scheduler(config, optimizer)
    if made is None:
        return
    if isinstance(made, ReduceLROnPlateau) and not evaluates:
        raise ConfigError(
            "MW842",
            f"optimizer.scheduler.target = {config.target!r} follows the evaluations, but nothing is evaluated before "
            "the end; set evaluate.every (steps).",
        )
    where = "a step"
    try:
        optimizer.step()
        if isinstance(made, ReduceLROnPlateau):
            made.step(0.0)
            return
        made.step()
        for sequence in _sequences(made):
            for milestone in [one for one in sequence._milestones if one <= steps]:
                where, sequence.last_epoch = f"step {milestone}, a milestone", milestone - 1
                sequence.step()
        if steps > 1 and type(made).__module__.startswith("torch."):
            where, made.last_epoch = f"step {steps}, the last of this run", steps - 1
            made.step()
    except Exception as error:
        raise ConfigError(
            "MW323", f"optimizer.scheduler: {config.target} fails in {where}: {describe(error)}."
        ) from error


def _sequences(made: Any) -> Iterator[SequentialLR]:
    """A scheduler and those in it that follow one another."""
    if isinstance(made, SequentialLR):
        yield made
    for inner in getattr(made, "_schedulers", ()):
        yield from _sequences(inner)


def scheduler(config: Scheduler, optimizer: TorchOptimizer) -> LRScheduler | None:
    """The scheduler on `optimizer`, or None if none is configured; call its `step` per step or epoch, as `config.per`
    says, and that of ReduceLROnPlateau with the result `config.metric` of every evaluation.

    Raises ConfigError for an unknown target or unfit arguments.
    """
    if config.target is None:
        return None
    function = resolve(config.target, "optimizer.scheduler.target")
    check_annotations(function, config.args, config.target, "optimizer.scheduler")

    def with_optimizer(function: Callable[..., Any]) -> Callable[..., Any]:
        """Schedulers in the args of a scheduler, such as those of SequentialLR, are on the same optimizer."""
        return on_optimizer(function) if isinstance(function, type) and issubclass(function, LRScheduler) else function

    def on_optimizer(function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of its other arguments: ChainedScheduler has the optimizer behind its schedulers."""
        behind = "optimizer" in [*inspect.signature(function).parameters][1:]
        return partial(function, optimizer=optimizer) if behind else partial(function, optimizer)

    args = (config.args, config.target, "optimizer.scheduler", with_optimizer)
    made = call(on_optimizer(function), *args)
    if config.metric is not None and not isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            "MW323",
            f"optimizer.scheduler.metric = {config.metric!r}, but {config.target} follows the steps alone; drop it, or "
            "choose torch.optim.lr_scheduler.ReduceLROnPlateau.",
        )
    if not isinstance(made, LRScheduler):
        raise ConfigError(
            "MW305",
            f"optimizer.scheduler.target = {config.target!r} made a {type(made).__name__}; "
            "a torch.optim.lr_scheduler.LRScheduler is needed.",
        )
    return made
