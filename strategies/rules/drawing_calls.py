"""Numbers that a forward draws with the global generators of Python's `random` and of numpy.

A drawing call is the outermost call, within the innermost method of a module that draws such numbers, of a function
that other processes find by its name, with plain values and tensors without gradients. In every drawing call both
generators begin at numbers from (key, ordinal), as torch's do in a random operator: the numbers do not depend on
what ran before, so steps can be resumed, recomputed and run on any rank. Capture and the single-device reference
find the same calls, because both look at the frames of the call when it draws.
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from strategies.rules.registry import PLAIN, function_class

Interval = tuple[float, float]
Notice = Callable[[FrameType, str, Interval | None], Any]
"""A function called before a generator advances, with the frame that draws, the name of the generator's module, and the
interval of a single number. What it returns takes the number's place, but None."""
INSTANCES: dict[Any, Any] = {random: random._inst, np.random: np.random.mtrand._rand}
"""Modules and the global generators whose methods they have as functions."""
SILENT = frozenset(("seed", "getstate", "setstate", "get_state", "set_state"))
"""Methods of generators that draw nothing."""
UNITS = frozenset(("random", "random_sample", "rand"))
"""Functions that draw one number between 0 and 1 where they are given nothing."""
UNBOUND = frozenset(("ranf", "sample"))
"""Functions of numpy.random that draw and are no methods."""


def _drawing(module: Any, instance: Any) -> dict[str, Any]:
    """The public functions of a module that draw from its global generator, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if (getattr(value, "__self__", None) is instance and not name.startswith("_") and name not in SILENT)
        or (module is np.random and name in UNBOUND)
    }


FUNCTIONS = {module: _drawing(module, instance) for module, instance in INSTANCES.items()}
SEED = {module: module.seed for module in INSTANCES}


def _interval(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Interval | None:
    """Between which numbers the single one is that a function draws; None where it draws others."""
    if name in UNITS and not args and not kwargs:
        return 0.0, 1.0
    if name == "uniform" and len(args) == 2 and not kwargs and all(type(one) in (int, float) for one in args):
        return min(args), max(args)
    return None


@contextmanager
def noticing(notice: Notice) -> Iterator[set[str]]:
    """Call `notice` before this thread draws numbers in a forward, unless the forward has seeded the generator itself:
    then they are the same in every step. Yields the names of the modules whose generators it has seeded."""
    thread, seeded = threading.get_ident(), set[str]()

    def drawing(module: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if module.__name__ not in seeded and threading.get_ident() == thread:
                instead = notice(sys._getframe(1), module.__name__, _interval(function.__name__, args, kwargs))
                if instead is not None:
                    return instead
            return function(*args, **kwargs)

        return call

    def seeding(module: Any) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            SEED[module](*args, **kwargs)
            if threading.get_ident() == thread and any(value is not None for value in (*args, *kwargs.values())):
                seeded.add(module.__name__)

        return call

    before = {module: dict(vars(module)) for module in FUNCTIONS}
    try:
        for module, functions in FUNCTIONS.items():
            for name, function in functions.items():
                setattr(module, name, drawing(module, function))
            module.seed = seeding(module)
        yield seeded
    finally:
        for module, functions in FUNCTIONS.items():
            for name in (*functions, "seed"):
                setattr(module, name, before[module][name])


def drawing_call(frame: FrameType | None) -> FrameType | None:
    """The frame of the drawing call around a frame; None if there is none."""
    outermost = None
    while frame is not None and not isinstance(_first(frame), nn.Module):
        if called_name(frame) and fits(_arguments(frame)):
            outermost = frame
        frame = frame.f_back
    return outermost


def _first(frame: FrameType) -> object:
    names = frame.f_code.co_varnames[: min(frame.f_code.co_argcount, 1)]
    return frame.f_locals.get(names[0]) if names else None


def _arguments(frame: FrameType) -> list[Any]:
    found = inspect.getargvalues(frame)
    names = [*found.args, *(name for name in (found.varargs, found.keywords) if name)]
    return [found.locals.get(name) for name in names]


def called_name(frame: FrameType) -> str | None:
    """`module::function`, by which other processes find the function of a frame; None if they do not."""
    module, code = frame.f_globals.get("__name__"), frame.f_code
    path = getattr(code, "co_qualname", code.co_name)  # python 3.10 has no names of static methods
    if not module or module.partition(".")[0] == "torch":
        return None
    try:
        function = inspect.unwrap(function_class(path, module))
    except (ImportError, AttributeError, ValueError):
        return None
    return f"{module}::{path}" if getattr(function, "__code__", None) is code else None


def fits(arguments: Any) -> bool:
    """Whether (nested) arguments are plain values and tensors without gradients."""
    return not any(
        leaf.requires_grad if isinstance(leaf, Tensor) else not isinstance(leaf, (torch.Size, *PLAIN))
        for leaf in tree_leaves(arguments)
    )


def begin_at(number: int) -> None:
    """Set both generators from a key of 63 bits."""
    SEED[random](number)
    SEED[np.random]([number >> 32, number & 0xFFFFFFFF])


def states() -> tuple[Any, ...]:
    """The states of both generators; equal if neither has advanced in between."""
    state: Any = np.random.get_state(legacy=True)
    return random.getstate(), state[1].tobytes(), *state[2:]


@contextmanager
def restored() -> Iterator[None]:
    """The generators are put back afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
