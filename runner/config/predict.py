"""`predict`: which weights, on what, and how the predictions are written."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from runner.config.arguments import Arguments
from runner.config.section import Count, Dotted, Section, refusal

LINES = ".jsonl"


class PredictedRows(Section):
    """The rows to predict: of the run's own dataset, with other `args` or another `path`; of a JSONL file `path`; or
    of another dataset."""

    target: Dotted | None
    args: Arguments
    path: str | None
    collate: Dotted | None
    collate_args: Arguments

    @property
    def lines(self) -> bool:
        """Whether the rows are the lines of a file."""
        return self.target is None and self.path is not None and self.path.endswith(LINES)

    @model_validator(mode="after")
    def _all_is_used(self) -> PredictedRows:
        if self.lines and self.args:
            raise refusal(
                f"predict.data.args = {self.args} is for a dataset, but predict.data.path = {self.path!r} is a file of "
                "rows; drop one of them, or name the dataset in predict.data.target.",
                "predict.data.args",
                "predict.data.path",
            )
        if self.collate_args and self.collate is None:
            raise refusal(
                f"predict.data.collate_args = {self.collate_args} is given but predict.data.collate = null would "
                "ignore it; name the function in predict.data.collate, or drop the arguments.",
                "predict.data.collate_args",
                "predict.data.collate",
            )
        return self


class Predict(Section):
    checkpoint: Annotated[
        str | None,
        Field(min_length=1, description="A checkpoint, or a run folder; null: the weights of model.weights."),
    ]
    data: PredictedRows
    rows: Annotated[Count | None, Field(description="How many rows, from the first; null: all.")]
    batch_size: Count | None
    format: Literal["jsonl", "safetensors"]
