"""How users write strategies: `[[2, 4], [4, 1]]`, `{in: ..., out: ...}` and `{layout: NAME, dims: [mp, [sp, dp]]}`.

The readers here turn what YAML, the command line or `config.json` holds into frozen values and check everything that
needs no model: that a count is an integer from 1 up, that a layout exists and has the axes used, that an axis slices at
most one dim. What a reader returns, dumped to JSON, reads back as the same value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Annotated, Any, NamedTuple, TypeAlias

from pydantic import AfterValidator, GetJsonSchemaHandler, WithJsonSchema, model_serializer
from pydantic_core import PydanticCustomError

from runner.config.section import REQUIRED, Section, leaves, refusal, removed, setting
from runner.errors import allowed


def _name(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("is not an axis name; use letters, digits and underscores")
    return name


AxisName = Annotated[str, AfterValidator(_name)]

EXAMPLE = "write counts such as [[2, 4], [4, 1]], or {in: [[2, 4], [4, 1]], out: [[2, 4]]}"
FORM_KEYS = frozenset({"in", "out"})
AXES = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]
DIMS = WithJsonSchema({"type": "array", "items": {"anyOf": AXES}})


class LayoutForm(Section):
    """An operand sliced over named axes: `dims[d]` are the axes of dim d, major to minor (empty: replicated)."""

    layout: str = setting(REQUIRED, "Name of a layout in parallel.layouts")
    dims: Annotated[tuple[tuple[str, ...], ...], DIMS] = setting(REQUIRED, "The axes that slice each dim, or null")


OperandForm: TypeAlias = tuple[int, ...] | LayoutForm


def malformed(text: str, key: str) -> PydanticCustomError:
    """A strategy at `key` that is not written in one of the known forms."""
    return refusal(text, key, code="MW400")


class Place(NamedTuple):
    """The position of an operand in the config: the dotted key and, within it, the operand."""

    key: str
    operand: str

    def refuse(self, text: str) -> PydanticCustomError:
        return malformed(f"{self.key}: {self.operand}: {text}", self.key)


class StrategyForm(Section):
    """The strategy of one operator: an operand form per input, per output, or both."""

    inputs: tuple[OperandForm, ...] | None
    outputs: tuple[OperandForm, ...] | None

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """A strategy as users write it: a list of operands, or a mapping with `in` and `out` or below a longer path."""
        return {"anyOf": [{"type": "array", "items": {}, "minItems": 1}, {"type": "object"}, {"type": "null"}]}

    @model_serializer
    def _as_written(self) -> dict[str, Any]:
        sides = {"in": self.inputs, "out": self.outputs}
        return {side: [_plain(form) for form in forms] for side, forms in sides.items() if forms is not None}

    def operands(self, key: str) -> list[tuple[Place, OperandForm]]:
        """Every operand with its place below the dotted `key`."""
        sides = (("input", self.inputs), ("output", self.outputs))
        return [(Place(key, f"{side} {n}"), form) for side, forms in sides for n, form in enumerate(forms or ())]


def read_strategies(value: Any) -> dict[str, StrategyForm]:
    """The strategies by dotted operator path, from a mapping whose dotted keys may be nested.

    `{dense1: {matmul: F}}`, which `parallel.strategies.dense1.matmul=F` builds on the command line, is
    `{"dense1.matmul": F}`. A mapping with no other keys than `in` and `out` is a form, so an operator whose own last
    name is `in` or `out` must be written with a flat key. Where a path occurs twice the later one counts; null removes.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise malformed(
            f"parallel.strategies = {value!r} is not a mapping of operator paths to strategies; {EXAMPLE}.",
            "parallel.strategies",
        )
    found: dict[str, StrategyForm] = {}
    entries = (entry for path, form in value.items() for entry in leaves(str(path), form, FORM_KEYS.issuperset))
    for dotted, leaf in entries:
        if not removed(found, dotted, leaf, "parallel.strategies"):
            found.pop(dotted, None)
            found[dotted] = _strategy(leaf, f"parallel.strategies.{dotted}")
    return found


def _strategy(value: Any, key: str) -> StrategyForm:
    if isinstance(value, StrategyForm):
        return value
    if value == {}:
        raise malformed(f"{key} is empty; {EXAMPLE}.", key)
    sides = value if isinstance(value, Mapping) else {"in": value}
    inputs, outputs = sides.get("in"), sides.get("out")
    if inputs is None and outputs is None:
        raise malformed(f"{key} gives neither inputs nor outputs; {EXAMPLE}.", key)
    return StrategyForm(
        inputs=None if inputs is None else read_operands(inputs, key, "input"),
        outputs=None if outputs is None else read_operands(outputs, key, "output"),
    )


def read_operands(value: Any, key: str, side: str) -> tuple[OperandForm, ...]:
    """The operand forms of one side of an operator, or of the inputs of the model."""
    if not isinstance(value, (list, tuple)) or not value:
        raise malformed(f"{key} = {value!r}: expected one entry per {side}; {EXAMPLE}{_brackets(value)}.", key)
    return tuple(_operand(form, Place(key, f"{side} {number}")) for number, form in enumerate(value))


def check_counts(forms: list[tuple[Place, OperandForm]], devices: int, key: str) -> None:
    """Refuse counts that no mesh of `devices`, the value of `key`, can give one operand."""
    for place, form in forms:
        if isinstance(form, tuple) and devices % prod(form):
            raise place.refuse(f"{list(form)} makes {prod(form)} slices, which do not divide {key} = {devices}.")


def check_layouts(forms: list[tuple[Place, OperandForm]], layouts: Mapping[str, Sequence[str]]) -> None:
    """Refuse layouts that are not among `layouts` (name to axes) or use axes that the layout does not have."""
    for place, form in forms:
        if isinstance(form, tuple):
            continue
        if form.layout not in layouts:
            known = allowed(form.layout, layouts) or " There are none."
            raise place.refuse(f"{form.layout!r} is not in parallel.layouts.{known}")
        for axis in (axis for dim in form.dims for axis in dim):
            if axis not in layouts[form.layout]:
                choice = allowed(axis, layouts[form.layout])
                none = " A dim that no axis slices is null." if axis.lower() == "none" else ""
                raise place.refuse(f"{axis!r} is not an axis of layout {form.layout!r}.{choice}{none}")


def _operand(value: Any, place: Place) -> OperandForm:
    if isinstance(value, Mapping | LayoutForm):
        return value if isinstance(value, LayoutForm) else _layout(value, place)
    if not isinstance(value, (list, tuple)):
        raise place.refuse(
            f"{value!r} is not a list of counts, one per dim, nor {{layout: NAME, dims: [...]}}{_brackets(value)}."
        )
    for dim, count in enumerate(value):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise place.refuse(f"dim {dim}: {count!r} is not a number of slices; counts are integers from 1 up.")
    return tuple(value)


def _brackets(value: Any) -> str:
    return "; lists have square brackets" if isinstance(value, str) and "(" in value else ""


def _layout(value: Mapping[Any, Any], place: Place) -> LayoutForm:
    if value.keys() != {"layout", "dims"} or not isinstance(value["layout"], str):
        raise place.refuse(f"{dict(value)!r} is not a layout; write {{layout: NAME, dims: [mp, [sp, dp], null]}}.")
    if not isinstance(value["dims"], (list, tuple)):
        raise place.refuse(f"dims = {value['dims']!r}: expected one entry per dim, e.g. [mp, [sp, dp], null].")
    dims = tuple(_axes(dim, place) for dim in value["dims"])
    axes = [axis for dim in dims for axis in dim]
    if twice := sorted({axis for axis in axes if axes.count(axis) > 1}):
        raise place.refuse(f"axis {twice[0]!r} is used twice; an axis slices at most one dim of a tensor.")
    return LayoutForm(layout=value["layout"], dims=dims)


def _axes(value: Any, place: Place) -> tuple[str, ...]:
    """The axes that slice one dim: null, a name, or several names from major to minor."""
    names = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise place.refuse(f"{value!r} does not say which axes slice a dim; write a name, a list of names, or null.")
    return tuple(names)


def _plain(form: OperandForm) -> list[int] | dict[str, Any]:
    return list(form) if isinstance(form, tuple) else form.model_dump(mode="json")
