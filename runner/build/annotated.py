"""Check arguments against type annotations, for torch's optimizers and schedulers: these validate some arguments in the
constructor, others in the first step or never."""

from __future__ import annotations

import collections.abc
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from runner.errors import ConfigError

WORDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string", type(None): "null"}
"""What a user gives for a simple annotation."""


def check(function: Callable[..., Any], args: Mapping[str, Any], target: str, what: str) -> None:
    """Raises ConfigError for the first of `args` that does not match the annotation of `function`, a torch class with
    the config name `target`. `what` is the section of `args`."""
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
