"""The shown part of a plan.json: its costs, bytes and predictions.

Plans are followed without these (`strategies.planner.plan_file`), so that files of earlier versions still train.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from strategies.planner.plan_file import (
    ChoiceForm,
    Count,
    DecidedForm,
    Form,
    OperatorForm,
    PlanForm,
    PlanRecomputeForm,
    SearchForm,
    Size,
    check_form,
)

Bytes = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=-1e-9)]
"""Differences of sums may be less than nothing by their rounding."""
Amounts = dict[str, float]
Actions = Annotated[str, Field(pattern=r"^\d+[FBIW]\d+( \d+[FBIW]\d+)*$")]


def check_shown(content: Any, name: str) -> None:
    """Raises StrategyError, with the place in the file, where `content` is no plan.json that can be shown."""
    check_form(content, name, ShownPlan)


def _require(form: Form, *keys: str) -> None:
    """Raises for keys that are missing or null."""
    if missing := [key for key in keys if getattr(form, key) is None]:
        raise PydanticCustomError("missing", "it has no {key}", {"key": missing[0]})


class _Cost(Form):
    cluster: str
    forward: Seconds
    backward: Seconds
    recomputed: Seconds
    compute: Seconds
    redistributions: dict[str, Seconds]
    gradients_exposed: Seconds
    zero: dict[str, Seconds]
    optimizer: Seconds
    total: Seconds
    send: Seconds = 0.0
    waiting: Seconds = 0.0


class _Memory(Form):
    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    activations: Bytes
    buffers: Bytes
    peak: Bytes
    peak_in: str


class _Step(Form):
    step: str
    collective: str
    bytes: Bytes


class _Redistribution(Form):
    operand: int
    forward: list[_Step]
    backward: list[_Step]


class _Predicted(Form):
    forward: Seconds
    backward: Seconds
    communication: Seconds
    gradients: Seconds
    sent: Bytes
    parameters: Bytes
    results: Bytes


class _Operator(OperatorForm):
    module: str
    source: str
    origin: str
    stage: Count | None = None
    in_strategy: list[list[Size]]
    out_strategy: list[list[Size]]
    inputs: list[str]
    in_layouts: list[str]
    out_layouts: list[str]
    redistributions: list[_Redistribution]
    predicted: _Predicted


class _Copies(Form):
    count: Size
    rows: Count | None = None
    operators: Count | None = None
    once: list[str] | None = None

    @model_validator(mode="after")
    def _of_several(self) -> _Copies:
        if self.count > 1:
            _require(self, "rows", "operators", "once")
        return self


class _Training(Form):
    steps: Count
    seconds: float
    device_hours: float
    price: float | None


class _Prediction(Form):
    cluster: str
    devices: Size
    ranks: Size
    axes: dict[str, str | None]
    seconds: float
    samples_per_second: float | None
    tokens_per_second: float | None
    mfu: float | None
    memory: Bytes
    memory_limit: Bytes
    shares: Amounts
    binding: str
    speedups: Amounts
    shrunk: dict[str, Bytes]
    training: _Training | None = None

    @model_validator(mode="after")
    def _of_seconds(self) -> _Prediction:
        if self.seconds:
            _require(self, "mfu")
        return self


class _Mesh(Form):
    mesh: list[Size]
    seconds: float


class _Propagation(Form):
    followed: float
    cheapest: float
    by_price: bool


class _Choice(ChoiceForm):
    modules: list[str] | None
    fits: bool = True


class _Decided(DecidedForm):
    modules: list[str] | None
    runner_up: _Choice | None


class _Search(SearchForm):
    loaded_from: str | None = None
    mesh: _Mesh | None = None
    runner_up: _Mesh | None = None
    meshes: Count | None = None
    left_out: Count | None = None
    propagation: _Propagation | None = None
    decided: _Decided | None = None

    @model_validator(mode="after")
    def _of_meshes(self) -> _Search:
        if self.mesh is not None:
            _require(self, "meshes", "left_out")
            if "runner_up" not in self.model_fields_set:
                raise PydanticCustomError("missing", "it has no runner_up")
        return self


class _Recompute(PlanRecomputeForm):
    stored_bytes: Bytes
    stored_bytes_without: Bytes
    sent_again_bytes: int


class _Kind(Form):
    ranks: list[Count]
    rows: Count
    cluster: str
    cost: _Cost
    memory: _Memory
    memory_limit: Bytes


class _Passes(Form):
    forward: Seconds
    input: Seconds
    weight: Seconds


class _Pipeline(Form):
    stages: Size
    virtual_stages: Size = 1
    groups: list[Count] | None = None
    bubble: Annotated[float, Field(ge=-1e-9, le=1)]
    held: list[Count]
    memory: list[_Memory]
    seconds: list[_Passes]
    operators: list[Count]
    schedule: str | None = None
    clusters: list[str] | None = None
    memory_limits: list[Bytes] | None = None
    actions: list[Actions] | None = None

    @model_validator(mode="after")
    def _of_all_stages(self) -> _Pipeline:
        given = self.model_fields_set & {"actions", "clusters", "groups", "memory_limits"}
        needs = {"actions": ("schedule",), "clusters": ("memory_limits",)}
        _require(self, *sorted(given), *(key for one in sorted(given) for key in needs.get(one, ())))
        every = self.stages * self.virtual_stages
        wanted = dict.fromkeys(("groups", "operators", "seconds"), every)
        wanted |= dict.fromkeys(("actions", "clusters", "held", "memory", "memory_limits"), self.stages)
        for key, count in wanted.items():
            if (entries := getattr(self, key)) is not None and len(entries) != count:
                raise PydanticCustomError("missing", "{key} needs {count} entries", {"key": key, "count": count})
        return self


class ShownPlan(PlanForm):
    title: str = "plan"
    search: _Search
    recompute: _Recompute | None
    operators: list[_Operator]  # type: ignore[assignment]  # never written
    cost: _Cost
    communication: dict[str, Bytes]
    memory: _Memory
    copies: _Copies
    prediction: _Prediction
    kinds: list[_Kind] = Field(default_factory=list)
    pipeline: _Pipeline | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> ShownPlan:
        if "pipeline" in self.model_fields_set:
            _require(self, "pipeline")
        if missing := [axis for axis in self.mesh if axis not in self.prediction.axes]:
            raise PydanticCustomError("missing", "prediction.axes has no {axis}", {"axis": missing[0]})
        layouts = [*self.inputs.values(), *self.tensors.values()]
        used = [axis for one in self.assignments.values() for axes in one.assignment.values() for axis in axes]
        used += [axis for one in layouts for axes in one.dims for axis in axes]
        if unknown := [axis for axis in used if axis not in self.mesh]:
            raise PydanticCustomError("missing", "mesh has no {axis}", {"axis": unknown[0]})
        if strange := [one.name for one in self.operators if one.name not in self.assignments]:
            raise PydanticCustomError("missing", "assignments has no {name}", {"name": strange[0]})
        return self
