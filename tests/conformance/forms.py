"""How a recorded strategy reads in torch's operand order.

Invariant: no entry is invented. What the recorded strategy does not say of an operand follows from the shapes, and a
strategy that does not fit its operand is passed on unchanged, for the planner to reject.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from strategies.core.graph import Operator
from strategies.core.request import NamedDims, Operand, OperatorStrategy

Entry = int | tuple[str, ...]
Args = list[Any]
Attrs = Mapping[str, Any]
Compute = Callable[[Args, Attrs], Any]
Shapes = Sequence[tuple[int, ...]]


class NotMapped(Exception):
    """The case needs an operator or a feature that has no counterpart; the text names it."""


@dataclass(frozen=True)
class Form:
    """One recorded operand strategy: an entry per dim, slices or names of axes of `layout`."""

    entries: tuple[Entry, ...]
    layout: str | None = None

    def pick(self, *dims: int | None) -> Form:
        """Entries in another order; None stands for a replicated dim."""
        replicated: Entry = 1 if self.layout is None else ()
        return Form(tuple(replicated if dim is None else self.entries[dim] for dim in dims), self.layout)

    def swapped(self) -> Form:
        """The last two dims the other way round."""
        return Form(self.entries[:-2] + self.entries[:-3:-1], self.layout)

    def operand(self) -> Operand:
        if self.layout is None:
            return tuple(self.entries)  # type: ignore[arg-type]
        return NamedDims(self.layout, self.entries)  # type: ignore[arg-type]


Forms = tuple[Form, ...]


@dataclass(frozen=True)
class Recorded:
    """A recorded node as its strategies see it: the strategies, its arguments with a `Tensor` (of the right shape) in
    place of every tensor, its attributes, and the torch operators that it became, with the shapes of their operands."""

    inputs: Forms
    outputs: Forms | None
    args: Args
    attrs: Attrs
    operators: tuple[Operator, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]
    devices: int


Spread = Callable[[Recorded], dict[str, OperatorStrategy]]
"""The strategies of the torch operators, by plan name."""
Read = Callable[[Sequence[Sequence[tuple[int, ...]]]], list[list[int]]]
"""The recorded form of the chosen slices: for every operator its operands' counts."""


def wanted(inputs: Sequence[Form] | None, outputs: Sequence[Form] | None = None) -> OperatorStrategy:
    return OperatorStrategy(
        None if inputs is None else tuple(form.operand() for form in inputs),
        None if outputs is None else tuple(form.operand() for form in outputs),
    )


def one(record: Recorded) -> dict[str, OperatorStrategy]:
    """A single torch operator with the recorded operands; a number has an empty strategy."""
    forms, kept = list(record.inputs), []
    for argument in record.args:
        for item in argument if isinstance(argument, list) else [argument]:
            if isinstance(item, Tensor) and forms:
                form = forms.pop(0)
                kept.append(Form(()) if not item.dim() and set(form.entries) <= {1} else form)
            elif isinstance(item, (int, float)) and forms and not forms[0].entries:
                forms.pop(0)
    return {record.operators[-1].name: wanted([*kept, *forms], record.outputs)}


def aligned(record: Recorded) -> dict[str, OperatorStrategy]:
    """Several torch operators: every operand follows the first recorded tensor, aligned from the right; a dim of
    another size stays replicated. A second strategy that disagrees with the first goes to the last operator."""
    first = next(a for a in record.args if isinstance(a, Tensor))
    if len(record.inputs[0].entries) != first.dim():
        return {record.operators[0].name: wanted(record.inputs[:1])}
    found = {}
    for operator, shapes in zip(record.operators, record.shapes, strict=True):
        forms = [follow(record.inputs[0], tuple(first.shape), shape) for shape in shapes]
        found[operator.name] = wanted(forms, record.outputs if operator is record.operators[-1] else None)
    return found


def follow(form: Form, operand: tuple[int, ...], shape: tuple[int, ...]) -> Form:
    skip = len(operand) - len(shape)
    return form.pick(
        *(skip + i if skip + i >= 0 and size == operand[skip + i] else None for i, size in enumerate(shape))
    )


def as_chosen(counts: Sequence[Sequence[tuple[int, ...]]]) -> list[list[int]]:
    return [list(operand) for operand in counts[-1]]


@dataclass(frozen=True)
class Counterpart:
    compute: Compute
    spread: Spread = one
    read: Read = as_chosen
    domain: str = ""
    """`positive`: arguments must be positive; the network then gets positive inputs."""
    indices: tuple[int, ...] = ()
    """Arguments that are indices."""
    results: int | None = None
    """How many results represent the operator where no single one is requested; None for all."""


def option(args: Args, attrs: Attrs, position: int, name: str, default: Any) -> Any:
    """An option that is recorded as an argument or as an attribute."""
    if len(args) > position and args[position] is not None:
        return args[position]
    return attrs.get(name, attrs.get(f"arg{position - 1}", default))


def read_first(counts: Sequence[Sequence[tuple[int, ...]]]) -> list[list[int]]:
    return [list(operand) for operand in counts[0]]
