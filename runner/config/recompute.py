"""The section `parallel.recompute`: activation checkpointing, recomputing in backward instead of storing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, field_validator

from runner.config.section import Glob, Section, refusal, setting
from runner.errors import allowed

RECOMPUTED = ("none", "full", "selective", "auto")


class Recompute(Section):
    """What backward recomputes instead of storing: none, full, selective (operators that are cheap to compute)
    or a list of kinds of operators, inside `modules` (null: every repeated layer); with auto each of the modules is
    treated in one of the first three ways, so that parallel.memory_limit is kept. Repeating collectives is up to
    `communication` (null: with full they are repeated, else kept)."""

    operators: Literal["none", "full", "selective", "auto"] | Annotated[tuple[Glob, ...], Field(min_length=1)] = (
        setting(
            "none",
            "none, full, selective (cheap operators), a list of kinds such as [gelu], or auto: to fit the memory limit",
        )
    )
    modules: Annotated[tuple[Glob, ...], Field(min_length=1)] | None = setting(
        None, "Globs of modules; null: every repeated layer"
    )
    communication: Literal["recompute", "keep"] | None = setting(
        None, "Repeat collectives in backward or keep their results; null: recompute with full, else keep"
    )
    slice_inputs: StrictBool = setting(
        False, "Each rank stores a shard of a module's inputs and gathers the others in backward"
    )

    @field_validator("operators", mode="before")
    @classmethod
    def _operators_known(cls, operators: Any) -> Any:
        if isinstance(operators, str) and operators not in RECOMPUTED:
            raise refusal(
                f"parallel.recompute.operators = {operators!r} is not allowed.{allowed(operators, RECOMPUTED)} Or a "
                "list of kinds of operators such as [gelu, layer_norm].",
                "parallel.recompute.operators",
            )
        return operators
