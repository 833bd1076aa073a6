"""The sections of the verbs `calibrate` and `explain`."""

from __future__ import annotations

from pydantic import StrictBool

from runner.config.section import Glob, Section, setting


class Calibrate(Section):
    file: str = setting(
        "cluster.yaml", "File for the description of this machine; cluster.file=FILE reads it", min_length=1
    )
    seconds: float = setting(
        60.0, "Time limit of the command; what is not measured stays as in cluster", unit="seconds", ge=8,
        allow_inf_nan=False,
    )  # fmt: skip
    force: StrictBool = setting(False, "Overwrite a file that calibrate has not written; also --force")


class Explain(Section):
    operator: Glob | None = setting(None, "Operators to explain, as in parallel.strategies; null: a table of all")
    slices: Glob | None = setting(
        None, "Parameters, buffers, batch entries or operators whose slices on every rank to show; also --slices NAME"
    )
