"""Finds the operator that first computes something that is not finite.

Nothing is watched while loss and gradients are finite. Once they are not, all ranks compute the step again from the
same weights, rows and random keys, and every result is checked: in forward that of every call, whose line of generated
code names the operator; in backward that of every operator, whose node of autograd has a sequence number, which says in
which call of forward it was made. An infinite number counts where none was given: masks have infinite entries.
"""

from __future__ import annotations

import bisect
import linecache
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runner.training.agreement import gather
from runner.training.hooks import Callback, TrainingState
from strategies.core.errors import CodedError
from strategies.runtime.module_tree import OPERATORS

OWN = sys.stdlib_module_names | {"torch", "deepspeed", "meshwright", "runner", "strategies"}
"""Packages whose lines do not help the user, and whose buffers may hold anything."""


GIVEN = "given"


class NotFinite(CodedError, FloatingPointError):
    """A loss or gradient that is not finite; `operator` is the first operator whose result is not."""

    operator: str


class NanWatch(Callback):
    """Ends the run when loss or gradients are not finite, and names the first operator whose result is not.

    Args:
        gradients: look at the gradients of every step, too; else a gradient is found by the loss of the next step,
            when the weights are not finite any more. In fp16 steps with such gradients are left out, so they are not
            looked at.
    """

    repeats = True

    def __init__(self, gradients: bool = True) -> None:
        self.gradients = gradients

    def before_update(self, state: TrainingState) -> None:
        if not self.gradients or state.updates.loss_scale is not None:
            return
        found = [name for name, gradient in state.gradients() if not bool(gradient.isfinite().all())]
        if any(found if state.world_size == 1 else gather(found)):
            first = found if state.world_size == 1 else next(names for names in gather(found) if names)
            raise self._named(state, f"The gradient of {first[0]} in step {state.step} is not finite")

    def exception(self, state: TrainingState, error: Exception) -> None:
        if isinstance(error, FloatingPointError) and not math.isfinite(state.loss):
            raise self._named(state, f"The loss of step {state.step} is {state.loss}") from error

    def _named(self, state: TrainingState, what: str) -> NotFinite:
        """The error, with what computing the step again finds (collective)."""
        eager = torch.compiler.set_stance("force_eager") if state.config.train.compile else nullcontext()
        with eager:
            found = first_not_finite(state.repeat)
        order = {name: number for number, name in enumerate(state.operators)}
        mine: list[Any] | None = None
        if found is not None:
            name, way, _ = found
            number = order.get(name, len(order))
            mine = [way == "backward", -number if way == "backward" else number, state.rank, *found]
        all_found = [one for one in ([mine] if state.world_size == 1 else gather(mine)) if one is not None]
        if not all_found:
            return NotFinite("MW719", f"{what}; recomputed, it is finite.")
        made = [one for one in all_found if one[4] != GIVEN]
        _, _, rank, name, way, value = min(made or all_found)
        kind = "gradient" if way == "backward" else "result"
        text = f"the first {kind} that is not finite ({value}) is made in {way} on rank {rank}"
        if not made:
            text = f"an entry of the batch, a weight or a buffer holds {value} on rank {rank}, where it is first used"
        error = NotFinite("MW719", f"{what}: {text}")
        error.operator = state.operators.get(name, name)
        return error


def first_not_finite(step: Callable[[], Any]) -> tuple[str, str, str] | None:
    """What the forward and backward of `step` make first that is not finite: the operator or the line of code,
    `forward` or `backward`, and `nan` or `inf`; where nothing does, what is `given` nan first; None if nothing is."""
    forward = _Forward()
    backward = _BackwardWatch(forward)
    with backward, forward:
        step()
    return forward.found or backward.found or forward.given


def _bad(results: Any, given: Any) -> str | None:
    """`nan` or `inf` where results have what the given values lack."""
    tensors = [one for one in tree_leaves(results) if isinstance(one, Tensor) and _floats(one)]
    if all(bool(one.isfinite().all()) for one in tensors):
        return None
    values = tree_leaves(given)
    before = [one for one in values if isinstance(one, Tensor) and _floats(one)]
    if any(bool(one.isnan().any()) for one in tensors):
        return None if any(bool(one.isnan().any()) for one in before) else "nan"
    infinite = any(isinstance(one, float) and not math.isfinite(one) for one in values)
    return None if infinite or any(bool(one.isinf().any()) for one in before) else "inf"


def _floats(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout == torch.strided


class _Forward(TorchFunctionMode):
    """Checks the result of every call in forward, and remembers in which one each node of autograd was made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: tuple[str, str, str] | None = None
        self.given: tuple[str, str, str] | None = None
        self.starts: list[int] = []
        self.names: list[str] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._current_autograd_node() is not None:  # a hook in backward
            return func(*args, **(kwargs or {}))
        start = _get_sequence_nr()
        given = [one.detach().clone() if isinstance(one, Tensor) else one for one in tree_leaves((args, kwargs))]
        result = func(*args, **(kwargs or {}))
        made = _get_sequence_nr() > start
        value = None if self.found is not None else _bad(result, given)
        known = [one for one in given if self.given is None and isinstance(one, Tensor) and _floats(one)]
        if any(bool(one.isnan().any()) for one in known) and (place := _here()):
            self.given = place, GIVEN, "nan"
        if made or value is not None:
            name = _here()
            if made:
                self.starts.append(start)
                self.names.append(name)
            if value is not None and name:
                self.found = name, "forward", value
        return result


class _BackwardWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks the result of every operator of backward."""

    def __init__(self, forward: _Forward) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forward = forward
        self.found: tuple[str, str, str] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        if node is None or self.found is not None or self._forward.found is not None:
            return func(*args, **(kwargs or {}))
        given = [one.clone() if isinstance(one, Tensor) else one for one in tree_leaves((args, kwargs))]
        result = func(*args, **(kwargs or {}))
        new = "empty" in func.__name__  # memory that holds any numbers until it is written
        if not new and (value := _bad(result, given)) is not None:
            place = bisect.bisect_right(self._forward.starts, node._sequence_nr()) - 1
            if 0 <= place and self._forward.names[place]:
                self.found = self._forward.names[place], "backward", value
        return result


def _here() -> str:
    """The running operator: that of the line of generated code, or else the innermost line of the user's;
    empty where there is none."""
    place = ""
    for frame in _frames():
        file, unit = frame.f_code.co_filename, frame.f_locals.get("self")
        if file.startswith("<eval_with_key>") and isinstance(unit, GraphModule) and OPERATORS in unit.meta:
            values, operators = unit.meta[OPERATORS]
            line = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
            value = line.partition(" = ")[0]
            if value in values:
                return str(operators[values.index(value)])
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if not place and package not in OWN and not file.startswith("<"):
            place = f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"
    return place


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
