"""Histograms of weights and gradients, exact under every slicing.

The edges are fixed, so ranks count their own elements, each element on one rank, and the counts of a parameter are
added up: the histogram is that of the unsharded tensor. Invariant: the counts of a parameter add up to its elements.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from runner.run_folder.atomic import replace_lines
from runner.run_folder.lineage import LOGGED
from runner.run_folder.metrics import record_of
from runner.training.agreement import gather
from runner.training.hooks import Callback, TrainingState
from strategies.optimizer.updates import layout_of
from strategies.runtime.shards import MODEL, of_slice

SMALLEST, GROWTH, EDGES = 1e-12, 1.1, 600
"""The edges are 0 and +-SMALLEST * GROWTH ** n for n below EDGES, up to 6e12, as in TensorBoard."""


class Histograms(Callback):
    """Writes a line per parameter into `histograms.jsonl`: step, kind (`weights` or `gradients`), name, elements, min,
    max, mean, std, and the bins [from, to, elements] that are not empty; `not_finite` counts elements in none.

    Weights are those after the step, gradients those before clipping. With the logger tensorboard they are shown there.

    Args:
        every: steps between two histograms, at least 1.
        gradients: also those of gradients.

    Raises:
        ValueError: an argument out of its range.
    """

    def __init__(self, every: int = 100, gradients: bool = True) -> None:
        if every < 1:
            raise ValueError(f"every = {every} must be at least 1")
        self.every, self.gradients = every, gradients
        above = [SMALLEST * GROWTH**n for n in range(EDGES)]
        self._edges = torch.tensor([*(-edge for edge in reversed(above)), 0.0, *above], dtype=torch.float64)
        self._writer: Any = None

    def start(self, state: TrainingState) -> None:
        if state.rank > 0:
            return
        path = state.run_dir / LOGGED[2]
        if path.is_file():  # of the run that is resumed: drop what will be written again
            lines = [(line, record_of(line)) for line in path.read_bytes().splitlines(keepends=True)]
            replace_lines(path, [line for line, one in lines if one is not None and one["step"] < state.first])
        if "tensorboard" in state.config.report.every_logger:
            from torch.utils.tensorboard import SummaryWriter

            folder = str(state.run_dir / "tensorboard")  # the logger's, which purges what a resumed run writes again
            self._writer = SummaryWriter(folder, filename_suffix=".histograms")

    def before_update(self, state: TrainingState) -> None:
        if self.gradients and state.step % self.every == 0:
            self._record(state, "gradients", self._own_gradients(state))

    def after_step(self, state: TrainingState) -> None:
        if state.step % self.every == 0:
            self._record(state, "weights", self._own_weights(state))

    def end(self, state: TrainingState) -> None:
        if self._writer is not None:
            self._writer.close()

    def exception(self, state: TrainingState, error: Exception) -> None:
        self.end(state)

    def _first(self, state: TrainingState, name: str) -> bool:
        """Whether this rank is the first of those that hold the same slice of a parameter."""
        mesh, rank = state.program.mesh, state.rank % state.program.mesh.size
        return mesh.index(rank, layout_of(state.program, name).replica_axes(mesh)) == 0

    def _own_weights(self, state: TrainingState) -> Iterator[tuple[str, Tensor]]:
        for batch in state.updates.pieces():
            for key, shards in batch.items():
                if key.startswith(MODEL):
                    name = key.removeprefix(MODEL)
                    yield from ((name, one.view) for one in shards if not one.shared or self._first(state, name))

    def _own_gradients(self, state: TrainingState) -> Iterator[tuple[str, Tensor]]:
        mesh, tensors = state.program.mesh, state.program.tensors
        for name, gradient in state.gradients():
            if self._first(state, name):
                layout, shape = layout_of(state.program, name), tensors[name].spec.shape
                blocks = layout.blocks(shape, mesh, state.rank % mesh.size)
                yield from ((name, one.view) for one in of_slice(shape, blocks, gradient))  # without padding

    def _record(self, state: TrainingState, kind: str, own: Iterator[tuple[str, Tensor]]) -> None:
        """Count on all ranks, add up on rank 0, and write (collective)."""
        found: dict[str, list[Any]] = {}
        for name, tensor in own:
            found[name] = _sum(found.get(name), self._counted(tensor))
        stage = state.rank // state.program.mesh.size
        parts: list[Any] = [[stage, found]] if state.world_size == 1 else gather([stage, found])
        if state.rank > 0:
            return
        total: dict[str, list[Any]] = {}
        owner: dict[str, int] = {}
        for number, counts in parts:
            for name, one in counts.items():  # a parameter that several stages of a pipeline have counts in one
                if owner.setdefault(name, number) == number:
                    total[name] = _sum(total.get(name), one)
        with (state.run_dir / LOGGED[2]).open("a", encoding="utf-8") as file:
            for name, one in total.items():
                file.write(json.dumps({"step": state.step, "kind": kind, "name": name} | self._line(one)) + "\n")
        for name, one in total.items() if self._writer is not None else ():
            bins = {int(at): count for at, count in one[5].items()}
            last = len(self._edges)
            limits = [float(self._edges[at]) if at < last else math.inf for at in sorted(bins)]
            self._writer.add_histogram_raw(
                f"{kind}/{name}", one[1], one[2], one[0], one[3], one[4], limits, [bins[at] for at in sorted(bins)],
                state.step,
            )  # fmt: skip

    def _counted(self, tensor: Tensor) -> list[Any]:
        """[finite elements, min, max, sum, sum of squares, {bin: elements}, elements that are not finite]; a complex
        number is two elements."""
        values = tensor.detach()
        values = (torch.view_as_real(values) if values.is_complex() else values).double().flatten().cpu()
        finite = values[values.isfinite()]
        if not len(finite):
            return [0, math.inf, -math.inf, 0.0, 0.0, {}, len(values)]
        counts = torch.bincount(torch.bucketize(finite, self._edges, right=True), minlength=1)
        bins = {str(int(at)): int(counts[at]) for at in counts.nonzero().flatten()}
        ends = [float(finite.min()), float(finite.max())]
        return [len(finite), *ends, float(finite.sum()), float(finite.square().sum()), bins, len(values) - len(finite)]

    def _line(self, total: list[Any]) -> dict[str, Any]:
        count, low, high, summed, squares, bins, others = total
        edges = [-math.inf, *self._edges.tolist(), math.inf]
        mean = summed / count if count else math.nan
        shown = [[edges[at], edges[at + 1], bins[str(at)]] for at in sorted(map(int, bins))]
        line: dict[str, Any] = {"elements": count + others, "not_finite": others}
        if count:
            line |= {"min": low, "max": high, "mean": mean, "std": math.sqrt(max(squares / count - mean**2, 0.0))}
        return line | {"bins": [[*(None if math.isinf(one) else one for one in row[:2]), row[2]] for row in shown]}


def _sum(one: list[Any] | None, two: list[Any]) -> list[Any]:
    """The counts of both."""
    if one is None:
        return two
    bins = {at: one[5].get(at, 0) + two[5].get(at, 0) for at in {**one[5], **two[5]}}
    ends = [min(one[1], two[1]), max(one[2], two[2])]
    return [one[0] + two[0], *ends, one[3] + two[3], one[4] + two[4], bins, one[6] + two[6]]
