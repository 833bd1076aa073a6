"""Evaluation: loss and metric over every sample of the evaluation data exactly once.

All ranks run the evaluation program of the batch's size (or the user's own module) on their parts of it; rank 0, which
reads complete batches where there is something to compare with, measures.
In a pipeline a batch goes forward through the stages, and the last one brings its results to rank 0. Only the short
last batch of a hybrid module, whose slices need a size that the mesh divides, is filled up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from runner.build.divisors import Divisors, EvaluatedMeans, Total
from runner.build.modules import DTYPES, build_loss, cast_named
from runner.build.scores import scores
from runner.data.loader import Block, Collate, LocalBatches, MapDataset, flatten_batch, global_batch
from runner.data.order import eval_rows, padded
from runner.data.reading import BatchReader, Load, RowRequest
from runner.data.row_seeds import EVALUATION
from runner.errors import ConfigError
from runner.launch.orders import RankContext
from runner.planning.counted import Divisor
from runner.planning.datasets import evaluation_rows
from runner.planning.prepare import Prepared
from runner.training.eager import hybrid_inputs, loss_of
from runner.training.execution import Execution
from strategies.capture.mean_weights import WeighedMean
from strategies.core.layout import Layout
from strategies.core.program import Program
from strategies.resharding.path import resharding_path
from strategies.rules.random import mix
from strategies.runtime.pipeline_stage import StageRunner

CONSTANT = 4096
"""Elements of a model's tensors that are followed where its loss divides by their sum."""


class Evaluator:
    """Evaluates one run. Every rank calls `run`; rank 0 gets the results, the others an empty dict.

    Args:
        weight: this rank's slice of a parameter, by name (collective).
        again: makes another dataset with the same rows, for a process that reads ahead.

    Raises:
        ConfigError: the metric cannot be found.
    """

    def __init__(
        self,
        prepared: Prepared,
        execution: Execution,
        rank: RankContext,
        dataset: MapDataset,
        collate: Collate | None,
        weight: Callable[[str], Tensor],
        again: Callable[[], MapDataset],
    ) -> None:
        config, loss = prepared.config, build_loss(prepared.config)
        self.prepared, self.execution, self.rank = prepared, execution, rank
        self.dataset, self.collate, self.weight, self.again = dataset, collate, weight, again
        self.scores = scores(config.evaluate.every_metric, None if loss is None else loss.to(rank.device).eval())
        self.length = len(dataset)  # one whose length changes keeps that on which the ranks have agreed
        self.size = evaluation_rows(config)  # of one batch
        if config.parallel.mode != "hybrid":  # whose batches are padded to a size that its mesh divides
            self.size = min(self.size, self.length)
        self._seed = config.train.seed
        self._hybrid = config.parallel.mode == "hybrid"
        self._labelled = set(prepared.names) <= set(prepared.evaluated)
        self._complete = config.parallel.mode == "stand_alone" or (self._labelled and rank.rank == 0)
        self._divisor: Total | None = None
        """What the loss of the user's own module has divided by in its last batch."""

    @torch.no_grad()
    def run(self, write: Callable[[list[int], Any], None] = lambda rows, output: None) -> dict[str, float]:
        """Evaluate every batch in order, and call `write` with its rows and the model's output, unsharded on rank 0.

        Returns:
            Results over all samples by name: `loss`, and the metrics under their names; on rank 0 alone, and only where
            the samples have the entries of training.
        """
        self._update_loss()
        self.scores.reset()
        measures, batches = self._labelled and self.rank.rank == 0, eval_rows(self.length, self.size)
        requests = (RowRequest(tuple(self._read_rows(rows)), EVALUATION) for rows in batches)
        section, on_cpu = self.prepared.config.data, self.rank.device == "cpu"
        reader = BatchReader(
            self._loader(self.dataset),
            lambda: self._loader(self.again()),
            requests,
            section,
            pinned=section.pin_memory and not on_cpu,
        )
        with reader.reading():
            for number, rows in enumerate(batches):
                entries = self._here(dict(zip(self.prepared.evaluated, reader.next(), strict=True)))
                # training steps count from 1, so no step uses these random numbers
                output = self._output(rows, entries, mix(self._seed, 0, number))
                if measures:
                    valid = {name: _first(one, len(rows), self.size) for name, one in entries.items()}
                    target = [valid[name] for name in self.prepared.targets]
                    self.scores.update(len(rows), output, target, self._tokens(valid, len(rows)))
                write(rows, output)
        return self.scores.results() if measures else {}

    def _update_loss(self) -> None:
        """Copy the trained parameters and buffers of the loss into the loss module."""
        if self.scores.loss is None:
            return
        sources = self.execution.program.tensors
        for name, tensor in (*self.scores.loss.named_parameters(), *self.scores.loss.named_buffers()):
            if (source := sources.get(f"loss.{name}")) is not None:
                shard = self.weight(source.name) if source.kind == "parameter" else self.execution.tensors[source.name]
                tensor.copy_(self.execution.full_tensor(source, shard))
            if (runner := self.execution.runner) is not None:
                stages = [stage.number for stage in self.prepared.stages if f"loss.{name}" in stage.plan.tensors]
                for number in stages[:1]:
                    runner.peers.share(tensor.detach(), runner.peers.owners[number])

    def _read_rows(self, rows: list[int]) -> list[int]:
        """The rows to read for a batch."""
        return padded(rows, self.size)[0] if self._hybrid else rows

    def _loader(self, dataset: MapDataset) -> Load:
        """What reads a batch from `dataset`: all of it, or what this rank needs."""
        batches: dict[int, LocalBatches] = {}
        names = tuple(self.prepared.evaluated)

        def load(request: RowRequest) -> list[Tensor]:
            rows, size = request.rows, len(request.rows)
            if self._complete:
                return flatten_batch(global_batch(dataset, self.collate, rows, self._seed), names)[1]
            if size not in batches:
                blocks = self._blocks(size)
                batches[size] = LocalBatches(
                    *(dataset, self.collate, blocks),
                    names=names,
                    seed=self._seed,
                    together=self.prepared.together,
                    floating=self.prepared.floating,
                )
            return batches[size].load(rows)

        return load

    def _blocks(self, size: int) -> list[Block]:
        """What this rank needs of each entry of a batch; of entries that the program does not take all of the rows that
        are read anyway."""
        shapes, rank = self.prepared.evaluated, self.execution.communicator.rank
        if self._hybrid:
            mesh, layouts = self.execution.program.mesh, self._inputs()
            return [layouts[name].block((size, *sizes), mesh, rank) for name, sizes in shapes.items()]
        program = self._program(size)
        sources = [one for one in program.inputs if one.name not in self.prepared.targets]
        blocks = {one.name: program.layouts[one.id].block(one.spec.shape, program.mesh, rank) for one in sources}
        span = next(iter(blocks.values()))[0]
        return [blocks.get(name, (span, *((0, size) for size in sizes))) for name, sizes in shapes.items()]

    def _program(self, size: int) -> Program:
        runner = self.execution.runner
        return self.execution.evaluations[size][1] if runner is None else runner.evaluations[size][0].program

    def _inputs(self) -> dict[str, Layout]:
        """How a hybrid module takes a batch."""
        return hybrid_inputs(self.prepared, self.execution.program.mesh, self.size)

    def _output(self, rows: list[int], entries: dict[str, Tensor], key: int) -> Any:
        """The model's output for `rows`, of which this rank has read `entries`."""
        if self.prepared.config.parallel.mode == "stand_alone":
            return self._of_module([*entries.values()], key)
        size, runner = len(rows), self.execution.runner
        if self._complete:
            blocks = dict(zip(entries, self._blocks(self.size if self._hybrid else size), strict=True))
            cuts = {name: tuple(slice(*span) for span in block) for name, block in blocks.items()}
            entries = {name: one[cuts[name]].contiguous() for name, one in entries.items()}
        if self._hybrid:
            return self._of_hybrid([*entries.values()], len(rows), key)
        program = self._program(size)
        taken = [one for name, one in entries.items() if name not in self.prepared.targets]
        if runner is not None:
            results = self._through_stages(runner, size, taken, key)
        else:
            module = self.execution.evaluations[size][0]
            made = module(*taken, key) if program.random else module(*taken)
            results = list(made) if isinstance(made, tuple) else [made]
        return self.prepared.evaluations[size].structure.filled(results) if results else None

    def _through_stages(self, runner: StageRunner, size: int, entries: list[Tensor], key: int) -> list[Tensor]:
        """The complete results on rank 0; on other ranks some or none."""
        graph = self.prepared.evaluations[size].graph
        results = into = runner.evaluate(size, entries, key)
        if self.rank.rank == 0:
            specs = [graph.specs[ref] for ref in graph.outputs]
            into = [torch.empty(s.shape, dtype=getattr(torch, s.dtype), device=self.rank.device) for s in specs]
        runner.peers.to_first(results, into)
        return into

    def _here(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        precision = DTYPES[self.prepared.config.train.precision]
        cast_entries = cast_named(entries, precision, self.prepared.floating)
        return {name: tensor.to(self.rank.device) for name, tensor in cast_entries.items()}

    def _tokens(self, valid: Mapping[str, Tensor], rows: int) -> Total | None:
        """What the loss has divided by, for a batch of these entries: that of its graph, or of the module that has
        just run. None where that is unknown or the loss is a module that shows it itself."""
        evaluation, counted, names = self.prepared.evaluations.get(rows), self.prepared.counted, self.prepared.names
        if self.scores.loss is None and evaluation is not None:
            counted, names = evaluation.counted, tuple(one.name for one in evaluation.graph.of_kind("input"))
        elif not isinstance(counted, Divisor):
            counted = None
        if counted is None or evaluation is None:
            return self._divisor
        entries = [valid[name] for name in names]
        found = counted.of(entries, tuple((0, size) for size in entries[counted.entry].shape))
        return Total(found, (lambda sum: torch.tensor(counted.value(float(sum)), dtype=torch.float64),))

    def _of_module(self, entries: Sequence[Tensor], key: int) -> Any:
        """The output of the user's own module, which shows what a loss in it divides by."""
        module = self.execution.module
        small = [one for one in (*module.parameters(), *module.buffers()) if one.numel() <= CONSTANT]
        with Divisors() as divisors, EvaluatedMeans(WeighedMean(), constants=small) as seen:
            output = module(*entries, key=key, outputs=tuple(self.prepared.evaluated))
        self._divisor = None
        if self.scores.loss is None and self._labelled:
            alone = len(seen.means) == 1 and seen.written and float(loss_of(output)) == float(seen.means[0][0])
            only = None if divisors.only is None else Total(divisors.only)
            self._divisor = seen.written[0] if alone else only
        return output

    def _mean(self, loss: Tensor) -> Tensor:
        """The mean of the losses of all ranks of a hybrid module: by what each has divided by, if all know that
        (collective). Elements on several ranks count several times, equally many in each batch."""
        known = self._divisor is not None and not self._divisor.functions
        tokens = self._divisor.sum if self._divisor is not None and known else 0.0
        weighed = loss * tokens if tokens else torch.zeros_like(loss)
        facts = torch.tensor([float(loss), 1.0, float(weighed), tokens, float(known)], dtype=torch.float64)
        facts = facts.to(loss.device)
        if self.execution.program.mesh.size > 1:
            dist.all_reduce(facts)
        total, ranks, weighed_total, all_tokens, all_known = facts.tolist()
        self._divisor = Total(all_tokens) if all_known == ranks else None
        return loss.new_tensor(weighed_total / all_tokens if all_known == ranks and all_tokens else total / ranks)

    def _of_hybrid(self, entries: Sequence[Tensor], valid: int, key: int) -> Any:
        """The module computes its loss from local outputs and local targets, so outputs have the layout of the
        first target; a loss that it returns is that of its rank's part."""
        program, communicator = self.execution.program, self.execution.communicator
        outputs = self._of_module(entries, key)
        if self.scores.loss is None:
            if valid < self.size:
                raise ConfigError(
                    "MW327",
                    f"evaluate.batch_size = {self.size} does not divide the {self.length} samples, and a hybrid "
                    "model that returns its loss cannot be given a short batch; choose a divisor.",
                )
            return self._mean(loss_of(outputs).double())
        target = self._inputs()[(self.prepared.targets or self.prepared.names)[0]]

        def joined(piece: Any) -> Any:
            if not isinstance(piece, Tensor):
                return piece
            dims = (*target.dims, *((),) * piece.dim())[: piece.dim()]
            counts = [program.mesh.product(axes) for axes in dims]
            shape = tuple(size * count for size, count in zip(piece.shape, counts, strict=True))
            steps = resharding_path(Layout(dims), Layout.replicated(len(shape)), shape, program.mesh)
            communicator.prepare(step.axes for step in steps)
            return _first(communicator.carried(steps, piece), valid, self.size)

        return _pytree.tree_map(joined, outputs)


def _first(tensor: Tensor, valid: int, size: int) -> Tensor:
    """The first `valid` rows of a tensor of `size` rows; other tensors have no batch dim and are unchanged."""
    return tensor[:valid] if tensor.dim() and tensor.shape[0] == size else tensor
