"""Evaluation: loss and metric over every sample of the evaluation data exactly once.

All ranks run the evaluation program of the batch's size (or the user's own module) on their parts of it; rank 0
measures.
In a pipeline a batch goes forward through the stages, and the last one brings its results to rank 0. Only the short
last batch of a hybrid module, whose slices need a size that the mesh divides, is filled up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree

from runner.build.modules import DTYPES, build_loss, cast
from runner.build.scores import scores
from runner.data.loader import Block, Collate, LocalBatches, MapDataset, flatten_batch, global_batch
from runner.data.order import eval_rows, padded
from runner.errors import ConfigError
from runner.launch.orders import RankContext
from runner.planning.datasets import evaluation_rows
from runner.planning.prepare import Prepared
from runner.training.eager import hybrid_inputs, loss_of
from runner.training.execution import Execution
from strategies.core.layout import Layout
from strategies.resharding.path import resharding_path
from strategies.rules.random import mix
from strategies.runtime.pipeline_stage import StageRunner


class Evaluator:
    """Evaluates one run. Every rank calls `run`; rank 0 gets the results, the others an empty dict.

    Args:
        weight: this rank's slice of a parameter, by name (collective).

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
    ) -> None:
        config, loss = prepared.config, build_loss(prepared.config)
        self.prepared, self.execution, self.rank = prepared, execution, rank
        self.dataset, self.collate, self.weight = dataset, collate, weight
        self.scores = scores(config.evaluate.every_metric, None if loss is None else loss.to(rank.device).eval())
        self.length = len(dataset)  # one whose length changes keeps that on which the ranks have agreed
        self.size = evaluation_rows(config)  # of one batch
        if config.parallel.mode != "hybrid":  # whose batches are padded to a size that its mesh divides
            self.size = min(self.size, self.length)
        self._seed = config.train.seed
        self._batches: dict[int, LocalBatches] = {}

    @torch.no_grad()
    def run(self, write: Callable[[list[int], Any], None] = lambda rows, output: None) -> dict[str, float]:
        """Evaluate every batch in order, and call `write` with its rows and the model's output, unsharded on rank 0.

        Returns:
            Results over all samples by name: `loss`, and the metrics under their names; on rank 0 alone, and only where
            the samples have the entries of training.
        """
        self._update_loss()
        self.scores.reset()
        labelled = set(self.prepared.names) <= set(self.prepared.evaluated)
        for number, rows in enumerate(eval_rows(self.length, self.size)):
            # training steps count from 1, so no step uses these random numbers
            output = self._output(rows, mix(self._seed, 0, number))
            if labelled and self.rank.rank == 0:
                self.scores.update(len(rows), output, self._target(rows))
            write(rows, output)
        return self.scores.results() if labelled and self.rank.rank == 0 else {}

    def _update_loss(self) -> None:
        """Copy the trained parameters and buffers of the loss into the loss module."""
        if self.scores.loss is None:
            return
        sources = {source.name: source for source in self.execution.program.sources}
        for name, tensor in (*self.scores.loss.named_parameters(), *self.scores.loss.named_buffers()):
            if (source := sources.get(f"loss.{name}")) is not None:
                shard = self.weight(source.name) if source.kind == "parameter" else self.execution.tensors[source.name]
                tensor.copy_(self.execution.full_tensor(source, shard))
            if (runner := self.execution.runner) is not None:
                stages = [stage.number for stage in self.prepared.stages if f"loss.{name}" in stage.plan.tensors]
                for number in stages[:1]:
                    runner.peers.share(tensor.detach(), number % runner.peers.count)

    def _output(self, rows: list[int], key: int) -> Any:
        """The model's output for `rows`."""
        if self.prepared.config.parallel.mode == "stand_alone":
            names = tuple(self.prepared.evaluated)
            return self.execution.module(*self._global_batch(rows), key=key, outputs=names)
        if self.prepared.config.parallel.mode == "hybrid":
            return self._hybrid(rows, key)
        size, runner = len(rows), self.execution.runner
        program = self.execution.evaluations[size][1] if runner is None else runner.evaluations[size][0].program
        wanted = [name for name in self.prepared.evaluated if name not in self.prepared.targets]
        if size not in self._batches:
            rank = self.execution.communicator.rank
            sources = [source for source in program.sources if source.kind == "input" and source.name in wanted]
            blocks = {s.name: program.layouts[s.id].block(s.spec.shape, program.mesh, rank) for s in sources}
            self._batches[size] = self._loader(blocks)
        entries = self._entries(self._batches[size], rows, wanted)
        if runner is not None:
            results = self._through_stages(runner, size, entries, key)
        else:
            module = self.execution.evaluations[size][0]
            made = module(*entries, key) if program.random else module(*entries)
            results = list(made) if isinstance(made, tuple) else [made]
        return self.prepared.evaluations[size].structure.filled(results) if results else None

    def _through_stages(self, runner: StageRunner, size: int, entries: list[Tensor], key: int) -> list[Tensor]:
        """The complete results on rank 0; on other ranks some or none."""
        graph = self.prepared.evaluations[size].graph
        results = runner.evaluate(size, entries, key)
        if self.rank.rank == 0:
            specs = [graph.specs[ref] for ref in graph.outputs]
            results = [torch.empty(s.shape, dtype=getattr(torch, s.dtype), device=self.rank.device) for s in specs]
        runner.peers.to_first(results, results)
        return results

    def _loader(self, blocks: dict[str, Block]) -> LocalBatches:
        """A loader of `blocks`; entries that are not named are read completely, for the rows that are read anyway."""
        span = next(iter(blocks.values()))[0]
        shapes = self.prepared.evaluated
        every = [blocks.get(name, (span, *((0, size) for size in shape))) for name, shape in shapes.items()]
        return LocalBatches(self.dataset, self.collate, every, names=tuple(shapes), seed=self._seed)

    def _entries(self, batches: LocalBatches, rows: Sequence[int], wanted: Sequence[str]) -> list[Tensor]:
        loaded = dict(zip(self.prepared.evaluated, batches.load(rows), strict=True))
        return self._here([loaded[name] for name in wanted])

    def _global_batch(self, rows: Sequence[int]) -> list[Tensor]:
        batch = global_batch(self.dataset, self.collate, rows, self._seed)
        return self._here(flatten_batch(batch, tuple(self.prepared.evaluated))[1])

    def _here(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        precision = DTYPES[self.prepared.config.train.precision]
        return [tensor.to(self.rank.device) for tensor in cast(tensors, precision)]

    def _target(self, rows: list[int]) -> list[Tensor]:
        """Unsharded targets of `rows`."""
        values = dict(zip(self.prepared.evaluated, self._global_batch(rows), strict=True))
        return [values[name] for name in self.prepared.targets]

    def _hybrid(self, rows: list[int], key: int) -> Any:
        """The module computes its loss from local outputs and local targets, so outputs have the layout of the
        first target; a loss that it returns is the mean over the ranks."""
        program, communicator = self.execution.program, self.execution.communicator
        filled, valid = padded(rows, self.size)
        layouts = hybrid_inputs(self.prepared, program.mesh, self.size)
        if self.size not in self._batches:
            global_shapes = {name: (self.size, *sizes) for name, sizes in self.prepared.evaluated.items()}
            blocks = {n: layouts[n].block(shape, program.mesh, self.rank.rank) for n, shape in global_shapes.items()}
            self._batches[self.size] = self._loader(blocks)
        names = tuple(self.prepared.evaluated)
        entries = self._entries(self._batches[self.size], filled, names)
        outputs = self.execution.module(*entries, key=key, outputs=names)
        if self.scores.loss is None:
            if valid < self.size:
                raise ConfigError(
                    "MW327",
                    f"evaluate.batch_size = {self.size} does not divide the {self.length} samples, and a hybrid "
                    "model that returns its loss cannot be given a short batch; choose a divisor.",
                )
            total = loss_of(outputs).double()
            if program.mesh.size > 1:
                dist.all_reduce(total)
            return total / program.mesh.size
        target = layouts[self.prepared.targets[0]]

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
