"""`int(tensor)` and `float(tensor)` in a forward, as what `tensor.item()` stands for in a captured graph, and `max` and
`min` of such numbers.

Python takes nothing but a number for the result of both, and compares to find an extreme. So where a traced function
asks for a number that only a step will know, its calls of them by name call others meanwhile, which return symbols as
`item` does. In Python 3.10 an instruction does not say that a name is called: there such a forward is refused.
"""

from __future__ import annotations

import dis
import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import reduce
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from strategies.capture.constants import has_values
from strategies.capture.nodes import in_library, replaced

SYMBOLS = (torch.SymInt, torch.SymFloat)
SYMBOLIC = "_symbolic_{}"


def _int(value: Any = 0, *base: Any) -> Any:
    value = value.item() if isinstance(value, Tensor) else value
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return torch.sym_int(value)  # type: ignore[no-untyped-call]
    return int(value, *base)


def _float(value: Any = 0.0) -> Any:
    value = value.item() if isinstance(value, Tensor) else value
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return torch.sym_float(value)  # type: ignore[no-untyped-call]
    return float(value)


def _extreme(builtin: Callable[..., Any], of_symbols: Callable[..., Any], larger: bool) -> Callable[..., Any]:
    """`max` or `min`, also of symbols and of tensors of one number, of which it takes the first of equal ones."""

    def two(one: Any, other: Any) -> Any:
        if isinstance(one, Tensor) or isinstance(other, Tensor):
            return torch.where(other > one if larger else other < one, other, one)
        return of_symbols(one, other)

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Iterator):
            args = ([*args[0]],)
        given = args if len(args) > 1 else args[0]
        single = isinstance(given, (tuple, list)) and not kwargs
        unknown = single and any(isinstance(one, SYMBOLS) or _is_unknown(one) for one in given)
        plain = single and all(_is_number(one) for one in given)
        return reduce(two, given) if unknown and plain else builtin(*args, **kwargs)

    return call


def _is_unknown(value: Any) -> bool:
    return isinstance(value, Tensor) and not has_values(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, *SYMBOLS)) or (isinstance(value, Tensor) and not value.dim())


def _len(value: Any) -> Any:
    """`len`, also of a tensor with as many elements as values say."""
    known = not isinstance(value, Tensor) or not value.dim() or isinstance(value.shape[0], int)
    return len(value) if known else value.shape[0]


OURS: dict[str, Callable[..., Any]] = {
    "len": _len,
    "int": _int,
    "float": _float,
    "max": _extreme(max, torch.sym_max, larger=True),
    "min": _extreme(min, torch.sym_min, larger=False),
}


class Conversions:
    """The functions whose calls of `int`, `float`, `len`, `max` and `min` return symbols."""

    def __init__(self) -> None:
        self.chosen: dict[CodeType, CodeType] = {}

    def choose(self, error: BaseException) -> bool:
        """Choose the innermost function of the user's that an error came through and that calls one of them."""
        codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        for place, code in reversed([*enumerate(codes)]):
            if in_library(code.co_filename) or (other := _with_ours(code)) is None:
                continue
            for outer in reversed(codes[:place]):  # makes comprehensions and functions within it anew in each call
                if any(one is code for one in outer.co_consts):
                    constants = tuple(other if one is code else one for one in outer.co_consts)
                    code, other = outer, outer.replace(co_consts=constants)
            given = next((given for given, chosen in self.chosen.items() if chosen is code), code)
            if given is code and code in self.chosen:
                continue  # another function has it each time, so the capture would be begun again without end
            if not _functions_of(given):
                gc.unfreeze()
            if _functions_of(given):
                self.chosen[given] = other
                return True
        return False

    @contextmanager
    def as_symbols(self) -> Iterator[None]:
        """Export within this context."""
        with ExitStack() as stack:
            for code, other in self.chosen.items():
                for function in _functions_of(code):
                    stack.enter_context(replaced(function, "__code__", other))
                    stack.enter_context(_defined(function.__globals__))
            yield


def _functions_of(code: CodeType) -> list[FunctionType]:
    """Those that `gc.freeze` has not hidden."""
    functions = (one for one in gc.get_referrers(code) if isinstance(one, FunctionType))
    return [one for one in functions if one.__code__ is code]


def _with_ours(code: CodeType) -> CodeType | None:
    """`code` with its calls of builtins in `OURS` replaced, or None if there are none."""
    names, instructions = [*code.co_names], bytearray(code.co_code)
    for one in dis.get_instructions(code):
        if one.opname == "LOAD_GLOBAL" and one.argval in OURS and _calls(code, one.arg or 0):
            name = SYMBOLIC.format(one.argval)
            if name not in names:
                names.append(name)
            if (place := names.index(name) << 1 | 1) > 255:  # more than an instruction holds
                return None
            instructions[one.offset + 1] = place
    return code.replace(co_names=tuple(names), co_code=bytes(instructions)) if len(names) > len(code.co_names) else None


def _calls(code: CodeType, arg: int) -> bool:
    """Whether the argument of an instruction says that a global is called: its last bit does, since Python 3.11, and
    the others are the place of the name. Larger ones take two instructions."""
    return arg <= 255 and arg & 1 == 1 and code.co_names[arg >> 1] in OURS


@contextmanager
def _defined(table: dict[str, Any]) -> Iterator[None]:
    """Globals with ours, where these names are Python's."""
    names = {SYMBOLIC.format(name): one for name, one in OURS.items()}
    table.update({key: table.get(name, one) for (name, one), key in zip(OURS.items(), names, strict=True)})
    try:
        yield
    finally:
        for key in names:
            table.pop(key, None)
