"""`predict`: which weights, on what, and how the predictions are written."""

from __future__ import annotations

from typing import Literal

from runner.config.arguments import Arguments
from runner.config.section import Count, Dotted, Section, setting

LINES = ".jsonl"


class PredictedRows(Section):
    """The rows to predict: of the run's own dataset, with other `args` or another `path`; of a JSONL file `path`; or
    of another dataset."""

    target: Dotted | None = setting(None, "Another dataset; null: data.target")
    args: Arguments = setting({}, "Arguments that differ from data.args and evaluate.args; all arguments of target")
    path: str | None = setting(
        None, "Another path for the dataset, or a .jsonl file with a sample per line; null: data.path"
    )
    collate: Dotted | None = setting(
        None, "Function from samples to a batch; null: data.collate with data.target, else stack"
    )
    collate_args: Arguments = setting({}, "Further keyword arguments of collate")

    @property
    def lines(self) -> bool:
        """Whether the rows are the lines of a file."""
        return self.target is None and self.path is not None and self.path.endswith(LINES)


class Predict(Section):
    checkpoint: str | None = setting(
        None, "A checkpoint or run folder, written under any plan; null: model.weights", min_length=1
    )
    data: PredictedRows = setting(PredictedRows(), "The rows to predict")
    rows: Count | None = setting(None, "Number of rows, from the first; null: all")
    batch_size: Count | None = setting(None, "Samples of one batch over all ranks; null: as in evaluation")
    format: Literal["jsonl", "safetensors"] = setting("jsonl", "Format of the predictions")
