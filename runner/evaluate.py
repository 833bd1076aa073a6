"""Evaluation: the loss and a metric over every sample of the evaluation data exactly once.

All ranks run the evaluation program on padded batches; rank 0 drops the padding and computes. A metric is `accuracy` (share of samples
whose largest output is at the target class) or any function (outputs, target) -> number, averaged over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner import targets
from runner.data.loader import Collate, LocalBatches, MapDataset, eval_rows, flatten_batch, padded, whole_batch
from runner.errors import ConfigError
from runner.execution import Eager, Execution, loss_of
from runner.prepare import DTYPES, Prepared, build_loss, cast, evaluation_rows
from runner.worker import RankContext
from strategies.capture import Objective
from strategies.engine.program import Program

Metric = Callable[[Tensor, Tensor], float]


def accuracy(outputs: Tensor, target: Tensor) -> float:
    """Share of rows of `outputs` [n, classes, ...] whose largest class is `target` [n, ...]."""
    if outputs.dim() != target.dim() + 1:
        raise ConfigError(
            f"evaluate.metric = accuracy needs class scores [n, classes] and class indices [n]; the model returns {list(outputs.shape)} for "
            f"targets {list(target.shape)}."
        )
    return float((outputs.argmax(1) == target).double().mean())


@dataclass
class Evaluator:
    """Evaluates one run. Every rank calls `run`; rank 0 gets the results, the others an empty dict."""

    prepared: Prepared
    execution: Execution
    rank: RankContext
    dataset: MapDataset
    collate: Collate | None
    loss: nn.Module | None
    metric: Metric | None

    def run(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        counted = 0
        for rows in eval_rows(len(self.dataset), min(evaluation_rows(self.prepared.config), len(self.dataset))):
            with torch.no_grad():
                outputs = self._outputs(rows)
            if self.rank.rank == 0:
                for name, value in self._results(rows, outputs).items():
                    totals[name] = totals.get(name, 0.0) + value * len(rows)
                counted += len(rows)
        return {name: total / counted for name, total in totals.items()} if counted else {}

    def _outputs(self, rows: list[int]) -> Any:
        """What the model returns for `rows`: one tensor or several, without the rows that only fill the batch."""
        if not self.execution.evaluations:
            return self._eager(rows)
        sizes = self.execution.evaluations
        size = len(rows) if len(rows) in sizes else max(sizes)
        module, program = sizes[size]
        filled, valid = padded(rows, size)
        entries = self._entries(program, filled)
        found = module(*entries)
        tensors = found if isinstance(found, tuple) else (found,)
        return tuple(tensor[:valid] if tensor.dim() and tensor.shape[0] == size else tensor for tensor in tensors)

    def _entries(self, program: Program, rows: Sequence[int]) -> list[Tensor]:
        sources = [source for source in program.sources if source.kind == "input"]
        own = {source.name: program.layouts[source.id].block(source.spec.shape, program.mesh, self.rank.rank) for source in sources}
        # entries that only the loss takes are not needed here: an empty block of rows reads nothing
        blocks = [own.get(name, ((0, 1), *((0, size) for size in shape[1:]))) for name, shape in zip(self.prepared.names, self.prepared.shapes, strict=True)]
        loaded = LocalBatches(self.dataset, self.collate, blocks, names=self.prepared.names, shapes=self.prepared.shapes).load(rows)
        chosen = [tensor for name, tensor in zip(self.prepared.names, loaded, strict=True) if name in own]
        return [tensor.to(self.rank.device) for tensor in cast(chosen, DTYPES[self.prepared.config.train.precision])]

    def _eager(self, rows: list[int]) -> Any:
        module = self.execution.module
        assert isinstance(module, Eager)
        (step,) = module.step
        _, tensors = flatten_batch(whole_batch(self.dataset, self.collate, rows))
        entries = [tensor.to(self.rank.device) for tensor in cast(tensors, DTYPES[self.prepared.config.train.precision])]
        kept = [(n, t) for n, t in zip(step.names, entries, strict=True) if n not in step.targets]
        step.model.eval()
        found = Objective(step.model, None, [n for n, _ in kept], ())(*(t for _, t in kept))
        step.model.train()
        return found if isinstance(found, tuple) else (found,)

    def _results(self, rows: list[int], outputs: Any) -> dict[str, float]:
        if self.loss is None:
            return {"loss": float(loss_of(next(t for t in outputs if t.dim() == 0) if isinstance(outputs, tuple) else outputs))}
        names, tensors = flatten_batch(whole_batch(self.dataset, self.collate, rows))
        batch = dict(zip(names, cast(tensors, DTYPES[self.prepared.config.train.precision]), strict=True))
        wanted = [batch[name].to(self.rank.device) for name in names if name in self.prepared.targets]
        results = {"loss": float(self.loss(outputs[0], *wanted))}
        if self.metric is not None:
            results[self._metric_name()] = float(self.metric(outputs[0], wanted[0]))
        return results

    def _metric_name(self) -> str:
        return str(self.prepared.config.evaluate.metric).rpartition(".")[2]


def evaluator(
    prepared: Prepared, execution: Execution, rank: RankContext, dataset: MapDataset, collate: Collate | None
) -> Evaluator:
    """The evaluator of a run. Raises ConfigError for a metric that cannot be found or does not go with the mode."""
    name = prepared.config.evaluate.metric
    metric: Metric | None = None
    if name is not None:
        metric = accuracy if name == "accuracy" else targets.resolve(name, "evaluate.metric")
    loss = build_loss(prepared.config)
    return Evaluator(prepared, execution, rank, dataset, collate, None if loss is None else loss.to(rank.device), metric)
