"""Training on one rank: rows of the step -> loss -> gradients -> update, with evaluation, checkpoints and metrics.

Everything that a step does follows from the step number (rows, random keys), so a resumed run repeats what an
uninterrupted one does.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from runner import checkpoint as checkpoints
from runner.build import optimizers
from runner.build.callbacks import callbacks
from runner.build.modules import DTYPES, cast, offload_of
from runner.config.schema import Config
from runner.data.loader import LocalBatches, MapDataset
from runner.data.reading import BatchReader, Load, RowRequest
from runner.data.row_seeds import seed_generators
from runner.errors import ConfigError, InputError
from runner.launch import logs
from runner.launch.orders import RankContext
from runner.launch.startup import Marks, marked, summary
from runner.launch.stopping import stopping_of
from runner.planning import lowering
from runner.planning.counted import AddedRows, Counted, Divisor, mean_weights, shares
from runner.planning.datasets import datasets, evaluation_data, order_of, training_data
from runner.planning.prepare import WEIGHTS, Prepared
from runner.run_folder import lineage
from runner.run_folder.lineage import Lineage
from runner.training.agreement import agree, agree_on_code, agree_on_data, agree_on_program, gather
from runner.training.callbacks.nan_watch import NanWatch
from runner.training.checkpointing import Keeper
from runner.training.evaluate import Evaluator
from runner.training.execution import Axes, Execution, execution, gather_axes
from runner.training.fault_injection import Faults
from runner.training.hooks import Hooks, TrainingState
from runner.training.metering import Meter
from runner.training.metrics import Metrics, metrics_of
from runner.training.offloading import activations, change
from runner.training.offloading import summary as traffic_summary
from strategies.core.graph import Source
from strategies.core.steps import ALL_REDUCE
from strategies.optimizer.stages import make_updates
from strategies.optimizer.updates import Updates, axes_needed
from strategies.rules.random import mix
from strategies.runtime import compiled
from strategies.runtime import initial_weights as weights
from strategies.runtime.flight_recorder import DATA, EVALUATION, FORWARD, PHASES, PLACE, SAVING, recorder
from strategies.runtime.module_tree import COPIED
from strategies.runtime.naming import parameters_by_name
from strategies.runtime.offload import Offload, OffloadTraffic
from strategies.runtime.tensor_files import save

OVERFLOWS = 3
"""Steps in a row that a constant loss scale may lose."""


@dataclass(frozen=True)
class TrainingJob:
    """The job that every rank receives. `folder` holds the initial weights; `resume` is the checkpoint to continue
    from."""

    prepared: Prepared
    folder: Path
    resume: Path | None = None
    record: Path | None = None
    """Where verification wants every step's loss and gradients, and the last weights."""
    follow: Path | None = None
    """Another run's record, whose gradients the optimizer is given in place of the run's own."""
    offload: Path | None = None
    """The folder for tensors offloaded to disk."""
    marks: Marks = ()
    """When the parent's phases ended."""
    attempt: int = 0
    """How often ranks have been started with this folder before."""


def updates_of(prepared: Prepared, execution: Execution, offload: Offload) -> Updates:
    """The optimizer parallel of what a rank executes, as the config sets it. Collective."""
    config, program = prepared.config, execution.program
    evaluation = nn.ModuleDict({str(rows): module for rows, (module, _) in execution.evaluations.items()})
    return make_updates(
        config.parallel.zero.known,
        execution.module,
        program,
        execution.communicator,
        optimizers.optimizer_factory(config.optimizer),
        groups_of(program.sources if prepared.graph is None else prepared.graph.sources, config),
        clip=config.train.clip,
        accumulate=config.parts,
        precision="fp32" if config.train.precision == "bf16_autocast" else config.train.precision,
        evaluation=evaluation if len(evaluation) else None,
        short=None if execution.short is None else execution.short.module,
        zero_options=lowering.deepspeed_options(config),
        engine=config.zero_engine,
        cut=lowering.bucket_cut(config),
        overlap=lowering.overlaps_backward(config) and execution.runner is None,
        offload=offload,
        peers=None if execution.runner is None else execution.runner.peers,
        loss_scale=config.train.loss_scale,
    )


class Trainer:
    """One rank's training run, measured by `meter` if there is one."""

    def __init__(self, rank: RankContext, job: TrainingJob, meter: Meter | None = None) -> None:
        self.meter = meter
        self.rank, self.job, self.prepared, self.config = rank, job, job.prepared, job.prepared.config
        run = lineage.read(rank.run_dir)
        self.lineage = Lineage() if run is None else run.lineage
        self.marks = marked(job.marks, "ranks")
        agree_on_program(self.prepared, job.folder)
        torch.set_default_dtype(self.prepared.default_dtype)
        seed_generators(self.config.train.seed)
        with self._aside():
            training, evaluating, self.collate = datasets(self.config, self.prepared.data.training)
            agree_on_data(self.prepared, training, evaluating, self.collate)
            self.order = order_of(self.config, training)
        extra: Axes = gather_axes if job.record is not None else lambda program: []
        self.execution: Execution = execution(self.prepared, rank, job.folder, lambda p: [*axes_needed(p), *extra(p)])
        if (mesh := self.execution.communicator.mesh).size > 1:
            agree_on_code(self.execution.module, self.execution.communicator.group(mesh.names))
        self.overflows = 0  # in a row
        self.load = self._loader(training)
        self.reader: BatchReader | None = None
        self.offload = offload_of(self.config, job.offload)
        self.activations = activations(self.execution.module, self.offload, rank.device)
        self.updates: Updates = self._updates()
        self.evaluator: Evaluator | None = None
        if evaluating is not None:
            self.evaluator = Evaluator(
                self.prepared,
                self.execution,
                rank,
                evaluating,
                self.collate,
                self.updates.weight,
                partial(evaluation_data, self.config, len(evaluating)),
            )
        short = None if self.execution.short is None else self.execution.short.module
        modules = [one for one in (self.execution.module, short) if one is not None]
        self.faults = Faults(self.config, rank, modules, self.execution.communicator)
        self.scheduler = optimizers.scheduler(self.config.optimizer.scheduler, self.updates.optimizer)
        self.writes = bool(self.execution.program.updates) or self.prepared.graph is None  # buffers, in forward
        self.keeper = Keeper(self.config, rank, self.order, self._content, self._saving)
        self.hooks = self._hooks()
        self._read: list[list[Tensor]] = []
        """The entries of this step, if a callback may repeat it."""
        if job.record is not None and self.config.parallel.mode == "hybrid":
            self._publish()

    def _loader(self, training: MapDataset) -> Load:
        """What reads the blocks of this rank from `training`."""
        config, names, shapes, short = self.config, self.prepared.names, self.prepared.shapes, self.execution.short
        size, dtype = self.prepared.rows, DTYPES[config.train.precision]
        full, rest = (
            LocalBatches(
                *(training, self.collate, blocks),
                names=names,
                shapes=shapes,
                seed=config.train.seed,
                together=self.prepared.together,
                floating=self.prepared.floating,
            )
            for blocks in (self.execution.blocks, self.execution.blocks if short is None else short.blocks)
        )

        def load(request: RowRequest) -> list[Tensor]:
            return cast((full if len(request.rows) == size else rest).load(request.rows, request.epoch), dtype)

        return load

    def _requests(self, first: int) -> Iterator[RowRequest]:
        """Every micro-batch from step `first` on, in the order in which this rank computes them."""
        size = self.prepared.rows
        for step in range(first, self.prepared.steps + 1):
            number = self._number(step)
            rows, epoch = self.order.rows(number), self.order.epoch(number)
            for micro in self._loaded(len(rows)):
                yield RowRequest(tuple(rows[micro * size : (micro + 1) * size]), epoch)

    def _loaded(self, rows: int) -> list[int]:
        """The micro-batches of a step of `rows` rows, in the order in which this rank loads them."""
        count, runner = -(-rows // self.prepared.rows), self.execution.runner
        return [*range(count)] if runner is None else runner.loaded(count, equal=rows == self.order.batch_size)

    def _updates(self) -> Updates:
        return updates_of(self.prepared, self.execution, self.offload)

    def _hooks(self) -> Hooks:
        graph, execution = self.prepared.graph, self.execution
        state = TrainingState(
            self.config,
            self.rank.run_dir,
            self.rank.rank,
            self.rank.world_size,
            self.rank.device,
            first=1,
            last=self.prepared.steps,
            module=execution.module,
            program=execution.program,
            updates=self.updates,
            operators={} if graph is None else {operator.name: operator.where for operator in graph.operators},
            repeat=lambda: self._micro_batches(self.hooks.state.step, again=True),
        )
        watched = {"nan_watch": NanWatch()} if self.job.record is not None and not self.config.parallel.elastic else {}
        training = self.config.job.name in ("train", "launch")
        return Hooks(callbacks(self.config) if training else watched, state)

    def _check_frozen(self) -> None:
        """Raises ConfigError where a callback has frozen a parameter that ZeRO updates as a part of a flat tensor."""
        parameters = parameters_by_name(self.execution.module) if self.config.parallel.zero.known else {}
        for name in self.execution.program.trainable_names if parameters else ():
            if not parameters[name].requires_grad:
                raise ConfigError(
                    "MW841",
                    f"train.callbacks: requires_grad of {name} was switched off, but ZeRO updates it together with "
                    "others, by what its optimizer remembers and by weight decay; choose parallel.zero.stage=0, or "
                    "optimizer.freeze for all of a run.",
                )

    def _moved(self) -> dict[str, OffloadTraffic]:
        """The offload traffic since the start, by kind."""
        moved = dict(self.updates.moved)
        if self.activations is not None:
            moved["activations"] = replace(self.activations.moved)
        module = self.execution.module
        parts = (module, *module.children())  # the stages of a pipeline, if it is one
        copied = [part.meta[COPIED] for part in parts if isinstance(part, fx.GraphModule) and COPIED in part.meta]
        if out := sum(traffic.out for traffic in copied):
            moved["place"] = OffloadTraffic(out, sum(traffic.back for traffic in copied))
        return moved

    def run(self) -> dict[str, Any]:
        """Train to the last step. Returns the last loss, the last evaluation and the bytes sent, from rank 0's view."""
        first = self._restore()
        stopping = stopping_of(self.rank, first - 1) if self.config.job.name == "train" else None
        self.marks = marked(self.marks, "program and data")
        loss, results, stopped = float("nan"), {}, None
        record = metrics_of(self.config, self.rank.rank, self.rank.run_dir, first, self.prepared.steps)
        pinned = self.config.data.pin_memory and self.rank.device != "cpu"
        self.reader = BatchReader(
            self.load,
            lambda: self._loader(training_data(self.config, self.prepared.data.training)),
            self._requests(first),
            self.config.data,
            pinned=pinned,
        )
        hooks, seen, last = self.hooks, self.hooks.state, self.prepared.steps
        seen.first, seen.last, seen.step = first, last, first - 1
        with record as metrics, _found_in_training(), self.reader.reading(), hooks.watching(), self.keeper.rescuing():
            if metrics is not None:
                seen.say = metrics.say
            hooks.call("start")
            ended = hooks.stopping()
            if ended:
                last = first - 1
            if self.keeper.pending and self.evaluator is not None:
                results = self._evaluated(self.evaluator, first - 1, metrics)
                if hooks.stopping():
                    last = first - 1
            for step in range(first, self.prepared.steps + 1):
                if step > last:
                    break
                if stopping is not None and not stopping.begin(step):
                    stopped = step - 1
                    break
                recorder.begin(step)
                recorder.at(DATA)
                seen.step, seen.loss, seen.grad_norm = step, math.nan, None
                if hooks:  # a callback may change weights, and has a state of its own
                    self.keeper.intact.changes()
                hooks.call("before_step")
                if hooks:
                    self._check_frozen()
                self.keeper.intact.after(step - 1)
                self.faults.begin(step)
                started, waited, moved = time.perf_counter(), self.reader.waited, self._moved()
                if self.meter is not None:
                    self.meter.begin(self.updates.hosted())
                lr = self.updates.optimizer.param_groups[0].get("lr")
                loss, samples = self._micro_batches(step)
                seen.loss, seen.samples = loss, samples
                if not math.isfinite(loss):
                    raise FloatingPointError(
                        f"The loss of step {step} is {loss}; a smaller learning rate or train.clip may help, but not "
                        "where a mean is over nothing, as in a micro-batch without any label that counts."
                    )
                with self._phase("update"):
                    self.updates.reduce()
                if self.config.train.compile and step == first:  # every graph of training has been compiled
                    self._agree_on_order()
                hooks.call("before_update")
                if self.job.record is not None:
                    self._record(step, loss)
                if self.job.follow is not None:
                    self._follow(step)
                self.faults.at("optimizer")
                self.keeper.before_update()
                measure = hooks.measures_norm or step % self.config.train.log_every == 0 or step == self.prepared.steps
                every = self.config.checkpoint.every
                drawn = _random_state() if step == first and self.rank.world_size > 1 else None
                with self._phase("update"):
                    norm = self.updates.update(measure=measure or (every is not None and step % every == 0))
                if drawn is not None and metrics is not None and drawn != _random_state():
                    metrics.say(
                        f"optimizer: {self.config.optimizer.target} draws random numbers, which are others than on one "
                        "device; those of replicas are equal"
                    )
                self._check_norm(step, loss, norm)
                seen.grad_norm = norm
                self._schedule(step)
                hooks.call("after_step")
                ends = step == self.prepared.steps
                self.keeper.pending = self.evaluator is not None and (ends or self._regular(step))
                self.keeper.intact.after(step)
                if step % self.config.train.log_every == 0 or step == self.prepared.steps:
                    logs.note(f"epoch {self.order.epoch(self._number(step)) + 1}  step {step}  loss {loss:.6g}")
                if metrics is not None:
                    seconds = time.perf_counter() - started
                    if step == first and self.job.marks:
                        metrics.say(summary(marked(self.marks, "step")))
                    metrics.step(
                        step,
                        loss=loss,
                        lr=lr,
                        seconds=seconds,
                        samples=samples,
                        waited=self.reader.waited - waited,
                        grad_norm=norm,
                        offload=change(moved, self._moved()),
                        loss_scale=self.updates.loss_scale,
                        server=self._served(),
                        callbacks=hooks.taken(),
                        memory=self._peak(),
                    )
                if hooks.stopping():  # waits for all ranks, one of which may have died: the step is recorded
                    last = step
                evaluated = self.keeper.pending or (self.evaluator is not None and step == last)
                if self.evaluator is not None and evaluated:
                    if step == last and self.config.job.name == "train":
                        self.keeper.intact.trained(step)
                    results = self._evaluated(self.evaluator, step, metrics)
                    if step < last and hooks.stopping():
                        last = step
                self.keeper.after(step, last, results if evaluated else None)
            if stopped is not None:
                self.keeper.stop(stopped)
            self.keeper.finish()
            self.faults.end()
            hooks.call("end")
            if metrics is not None and (moved := self._moved()):
                metrics.say(traffic_summary(moved, self.offload))
            scale = self.updates.loss_scale
            if metrics is not None and scale is not None and scale.skipped:
                metrics.say(f"fp16: gradients overflowed in {scale.skipped} of {last} steps, which changed no weight")
        if ended and self.config.train.resume not in (None, "auto"):
            raise ConfigError(
                "MW608",
                f"train.resume: a callback has ended this training after step {last}, so nothing is left to train; "
                "give it other options, such as a larger patience of early_stopping, or drop it.",
            )
        if self.job.record is not None:
            self._write(self._weights(), "weights.pt")
        return {
            "loss": loss,
            "evaluation": results,
            "sent": dict(self.execution.communicator.sent),
            "steps": last,
            "stopped": stopped,
            "signal": None if stopping is None else stopping.signal,
            "offload": change({}, self._moved()),
            "memory": None if self.meter is None else self._measured(),
        }

    def _peak(self) -> int | None:
        """The most bytes on this rank's device: on GPUs so far, on a CPU in a step that was counted."""
        if self.meter is not None:
            return self.meter.latest
        return None if self.rank.device == "cpu" else torch.cuda.max_memory_allocated()

    def _measured(self) -> list[dict[str, Any]]:
        """The measurements of every rank (collective)."""
        assert self.meter is not None
        return gather(self.meter.report([*self.execution.module.parameters()], self.updates.optimizer))

    def _agree_on_order(self) -> None:
        """Require that the ranks of a mesh, which compile the same program, communicate in the same order."""
        communicator = self.execution.communicator
        if communicator.mesh.size > 1:
            agree(
                {"the order in which its compiled program communicates": f"{compiled.order():x}"},
                "Set train.compile=false.",
                communicator.group(communicator.mesh.names),
            )

    def _number(self, step: int) -> int:
        """The number, from 0, of the batch of `step` (from 1). Verification ends with the short batch of an epoch."""
        number = step - 1 + self.keeper.ahead
        if self.job.record is not None and self.order.short and step == self.prepared.steps:
            return max(number, self.order.steps_per_epoch - 1)
        return number

    def _evaluated(self, evaluator: Evaluator, step: int, metrics: Metrics | None) -> dict[str, float]:
        """The results of an evaluation after `step` with the current parameters, on rank 0, and on all ranks where they
        decide something (collective). One that a longer run does not make decides nothing for steps that may follow."""
        recorder.at(EVALUATION)
        plateau = self.scheduler if isinstance(self.scheduler, ReduceLROnPlateau) else None
        state, followed = self.hooks.state, bool(self.hooks) or plateau is not None
        if followed:
            self.keeper.before_update()  # a callback may change the weights, and a scheduler follows the results
        if self.hooks:
            self.hooks.call("before_evaluation")
        results = self._scored(evaluator)
        if followed and self.rank.world_size > 1:
            results = gather(results)[0]
        state.evaluation, state.evaluated, state.regular = results, step, self._regular(step)
        if plateau is not None and state.regular:
            plateau.step(results[self.config.optimizer.scheduler.metric or "loss"])
        if metrics is not None:
            metrics.evaluation(step, results)
        if self.hooks:
            self.hooks.call("evaluation")
        self.keeper.pending = False
        self.keeper.intact.after(step)
        return results

    def _scored(self, evaluator: Evaluator) -> dict[str, float]:
        return evaluator.run()

    def _served(self) -> dict[str, float]:
        """What servers and workers have done in this step, where there are any."""
        return {}

    def _micro_batches(self, step: int, again: bool = False) -> tuple[float, int]:
        """Forward and backward of every micro-batch of `step` (from 1), `again` on the entries that were read before.
        Returns the mean loss over the global batch, and the number of its rows."""
        with self._aside():
            rows = len(self.order.rows(self._number(step)))
        short, reader = self.execution.short, self.reader
        assert reader is not None
        if not again:
            self._read.clear()
        ahead: deque[list[Tensor]] = deque()
        shares, weights, means = None, list[list[Tensor]](), self.prepared.means
        if isinstance(self.prepared.counted, AddedRows):
            shares = [1.0] * -(-rows // self.prepared.rows)
        elif means or (self.prepared.counted is not None and rows > self.prepared.rows):
            micro_batches = self._loaded(rows)
            with self._aside():
                if not again:
                    ahead.extend(reader.next() for _ in micro_batches)
                own = dict(zip(micro_batches, self._read if again else ahead, strict=True))
                if means:
                    weights = self._mean_weights(means, own, rows)
                elif self.prepared.counted is not None:
                    shares = self._shares(self.prepared.counted, own, rows)
                del own  # entries go as they are used

        def load(first: int, number: int) -> tuple[list[Tensor], int]:
            recorder.at(DATA)
            self.faults.at("data")
            if again:
                entries = self._read.pop(0)
            else:
                with self._aside():
                    read = ahead.popleft() if ahead else reader.next()
                    entries = [_placed(tensor, self.rank.device) for tensor in read]
                if self.hooks.repeats:
                    self._read.append(entries)
            if weights:
                entries = [*entries, *weights[first + number]]
            recorder.at(FORWARD)
            if self.writes:
                self.keeper.intact.changes(brief=False)
            return entries, mix(self.config.train.seed, step, first + number)

        axes, divisor = self.execution.program.loss_axes, self.execution.loss_divisor
        if rows == self.order.batch_size and shares is None:
            return self._equal(load, over=axes)() / self.config.parts / divisor, rows
        totals = {axes: self._zero(), axes if short is None else short.loss_axes: self._zero()}
        if rows == self.order.batch_size and self.execution.runner is not None:
            return self._equal(load, shares, over=axes)() / divisor, rows
        self._unequal(load, rows, totals, shares)
        return self._over_ranks(totals)() / divisor, rows

    def _shares(
        self, counted: Counted | Divisor, micro_batches: Mapping[int, Sequence[Tensor]], rows: int
    ) -> list[float]:
        """The share that each micro-batch of a step of so many rows has of the tokens that the loss counts
        (collective)."""
        communicator, short, shape = (
            self.execution.communicator,
            self.execution.short,
            self.prepared.shapes[counted.entry],
        )
        counts, elements = torch.zeros(2, len(micro_batches), dtype=torch.float64, device=self.rank.device)
        for micro, entries in micro_batches.items():
            full = (micro + 1) * self.prepared.rows <= rows
            blocks = self.execution.blocks if full or short is None else short.blocks
            counts[micro] = counted.of(entries, blocks[counted.entry])
            elements[micro] = entries[counted.entry].numel()
        if communicator.mesh.size > 1:
            both = torch.stack((counts, elements))
            recorder.cells[PLACE] = recorder.place("the loss")
            communicator.sum(both, communicator.group(communicator.mesh.names))
            left = torch.tensor([min(shape[0], rows - micro * shape[0]) for micro in range(len(counts))])
            counts = both[0] / (both[1] / (left.to(both) * math.prod(shape[1:])))  # by how many ranks hold each element
        return shares(counts.tolist(), counted)

    def _mean_weights(
        self, means: Sequence[Counted | Divisor | None], micro_batches: Mapping[int, Sequence[Tensor]], rows: int
    ) -> list[list[Tensor]]:
        """The weight of each mean over classes in each micro-batch of a step of `rows` rows: the share of what the
        mean counts, relative to that of the rows (collective)."""
        size = self.prepared.rows
        by_rows = [min(size, rows - first) / rows for first in range(0, rows, size)]
        each = [by_rows if one is None else self._shares(one, micro_batches, rows) for one in means]
        return [
            mean_weights([share / part for share in own], self.config.train.precision, self.rank.device)
            for part, own in zip(by_rows, zip(*each, strict=True), strict=True)
        ]

    def _equal(
        self,
        load: Callable[[int, int], tuple[list[Tensor], int]],
        shares: Sequence[float] | None = None,
        *,
        over: tuple[str, ...],
    ) -> Callable[[], float]:
        """All micro-batches of a full batch. Returns what waits for the sum of the losses over these axes, of a
        pipeline times `shares`. A GPU sends it before the last backward, so that the host issues the next step
        meanwhile."""
        total = self._zero()
        runner, parts, last = self.execution.runner, self.config.parallel.pipeline.parts, self.config.train.accumulate
        for turn in range(last):
            if runner is None:
                with self._phase("forward"):
                    loss = self.execution.forward(self.updates.module, *load(turn, 0))
                    total += loss.detach().double()
                early = self._over_ranks({over: total}) if turn == last - 1 and self.rank.device != "cpu" else None
                with self._phase("backward"):
                    self.updates.backward(loss)
                if early is not None:
                    return early
            else:
                with self._phase("backward"):
                    own = None if shares is None else shares[turn * parts : (turn + 1) * parts]
                    total += runner.step(partial(load, turn * parts), self.updates, own)
        return self._over_ranks({over: total})

    def _unequal(
        self,
        load: Callable[[int, int], tuple[list[Tensor], int]],
        rows: int,
        totals: Mapping[tuple[str, ...], Tensor],
        shares: Sequence[float] | None,
    ) -> None:
        """All micro-batches of a batch in which they differ: full ones, and of a short batch one of the rows left.
        Each loss counts by its share, that of its rows if none is given, and is added to the total of the axes over
        which its program leaves it a partial sum."""
        size, runner, short = self.prepared.rows, self.execution.runner, self.execution.short
        for micro in range(-(-rows // size)):
            left = rows - micro * size
            share = min(left, size) / rows if shares is None else shares[micro]
            last = short if left < size else None
            if runner is None:
                forward, module = self.execution.forward, self.updates.module
                if last is not None:
                    forward, module = last.forward, self.updates.short
                with self._phase("forward"):
                    loss = forward(module, *load(micro, 0))
                with self._phase("backward"):
                    self.updates.backward(loss, share, -(-left // size) - 1)
            else:
                with self._phase("backward"):
                    loss = runner.one(partial(load, micro), self.updates, share, short=last is not None)
            axes = self.execution.program.loss_axes if last is None else last.loss_axes
            if share:  # of nothing the mean is not a number
                totals[axes].add_(loss.detach().double(), alpha=share)

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.rank.device)

    def _over_ranks(self, totals: Mapping[tuple[str, ...], Tensor]) -> Callable[[], float]:
        """Begin the sum of the ranks' losses, each total over its axes, from the last stage of a pipeline; what returns
        waits for it."""
        communicator, runner, loss = self.execution.communicator, self.execution.runner, self._zero()
        self.faults.at("collective")  # where the program itself has none
        for axes, total in totals.items():
            if axes:
                recorder.cells[PLACE] = recorder.place("the loss")
                communicator.sum(total, communicator.group(axes))
                ranks = communicator.mesh.product(axes)
                communicator.count(ALL_REDUCE, -(-2 * (ranks - 1) // ranks), total)
            loss += total
        if runner is not None:
            runner.peers.share_loss(loss)
        return _on_host(loss)

    def _phase(self, name: str) -> AbstractContextManager[None]:
        recorder.at(PHASES.index(name))
        return nullcontext() if self.meter is None else self.meter.phase(name)

    def _check_norm(self, step: int, loss: float, norm: float | None) -> None:
        """Raises FloatingPointError for a gradient that is not finite, in fp16 where a constant loss scale overflows in
        one step after the other."""
        if norm is None or math.isfinite(norm):
            self.overflows = 0
            return
        self.overflows, scale = self.overflows + 1, self.updates.loss_scale
        if scale is None:
            raise FloatingPointError(
                f"The loss of step {step} is {loss:.6g}, but its gradient is not finite (norm {norm}), nor are "
                "the weights after it; train.callbacks=[nan_watch] names the operator."
            )
        if not scale.adapts and self.overflows == OVERFLOWS:
            raise FloatingPointError(
                f"Gradients have overflowed in fp16 in {OVERFLOWS} steps in a row, which changed no weight; give a "
                f"smaller constant than train.loss_scale={scale.value:g}, or null, which adapts it."
            )

    def _aside(self) -> AbstractContextManager[None]:
        return nullcontext() if self.meter is None else self.meter.aside()

    def _schedule(self, step: int) -> None:
        if self.scheduler is None or isinstance(self.scheduler, ReduceLROnPlateau):
            return
        if self.config.optimizer.scheduler.per == "step" or self._ends_epoch(step):
            self.scheduler.step()

    def _regular(self, step: int) -> bool:
        """Whether there is an evaluation after `step`, however long the run is."""
        every = self.config.evaluate.every
        return self.config.train.epochs is not None and self._ends_epoch(step) if every is None else step % every == 0

    def _ends_epoch(self, step: int) -> bool:
        return (step + self.keeper.ahead) % self.order.steps_per_epoch == 0

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What checkpoints say of the run, made once."""
        return self.prepared.identity()

    def _content(self) -> checkpoints.Content:
        return checkpoints.Content(
            program=self.execution.program,
            communicator=self.execution.communicator,
            tensors=self.execution.tensors,
            updates=self.updates,
            scheduler=self.scheduler,
            published=self.prepared.published,
            companions=self.prepared.companions,
            lineage=self.lineage,
            callbacks=self.hooks.stateful,
            callback_tensors=self.hooks.tensors(),
            pending=self.keeper.pending,
            elsewhere=frozenset(() if self.prepared.graph is None else self.prepared.graph.parameter_order),
            **self._identity,
        )

    def _restore(self) -> int:
        """The first step to run, after loading the checkpoint that the job names."""
        if self.job.resume is None:
            return 1
        done = self.keeper.restore(self.job.resume)
        if self.config.train.epochs is not None:
            self.prepared = replace(self.prepared, steps=self.prepared.steps - self.keeper.ahead)
        return done + 1

    def _saving(self) -> None:
        recorder.at(SAVING)
        self.hooks.call("checkpoint")
        self.faults.saving()

    def _weights(self) -> dict[str, Tensor]:
        """Every unsharded parameter and buffer of the model (collective)."""
        execution = self.execution
        return self._of_all_stages(
            {
                source.name: execution.full_tensor(
                    source,
                    self.updates.weight(source.name) if source.kind == "parameter" else execution.tensors[source.name],
                ).cpu()
                for source in execution.program.sources
                if source.kind in ("parameter", "buffer")
            }
        )

    def _of_all_stages(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gather unsharded tensors by name from all pipeline stages, on rank 0 (collective)."""
        if self.execution.runner is None:
            return tensors
        own = tensors if self.execution.communicator.rank == 0 else {}
        parts = gather([(name, tensor.shape, str(tensor.dtype).rpartition(".")[2]) for name, tensor in own.items()])
        if self.rank.rank:
            for tensor in own.values():
                dist.send(tensor.to(self.rank.device).contiguous(), 0)
            return {}
        for rank, part in enumerate(parts[1:], 1):
            for name, shape, dtype in part:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.rank.device)
                dist.recv(tensor, rank)
                own[name] = tensor.cpu()
        return own

    def _publish(self) -> None:
        """Write the unsharded initial weights of a hybrid module, from which its reference starts."""
        values = self._weights()
        if self.rank.rank == 0:
            weights.write(self.job.folder / WEIGHTS, values)

    def _record(self, step: int, loss: float) -> None:
        """Record the unsharded gradients of this step, written by rank 0 for the comparison."""
        sources = self.execution.program.tensors
        gradients = {
            name: self.execution.full_tensor(sources[name], shard).cpu() for name, shard in self.updates.gradients()
        }
        self._write({"loss": loss, "gradients": self._of_all_stages(gradients)}, f"step-{step}.pt")

    def _write(self, content: Any, name: str) -> None:
        if self.rank.rank == 0:
            assert self.job.record is not None
            save(content, self.job.record / name)

    def _follow(self, step: int) -> None:
        """Pass the optimizer the gradients of the compared run, so that rounding does not compound."""
        assert self.job.follow is not None
        record = self.job.follow / f"step-{step}.pt"
        if not record.exists():  # the compared run has ended with a loss or gradient that is not finite
            return
        given = torch.load(record, weights_only=True)["gradients"]
        for name, own in self.updates.gradients():
            if name in given and given[name].shape == own.shape:
                own.copy_(given[name])


def groups_of(sources: Sequence[Source], config: Config) -> list[dict[str, Any]]:
    """The parameter groups, by name, of a model with these sources."""
    names = [source.name for source in sources if source.kind == "parameter"]
    trainable = [source.name for source in sources if source.trainable and source.kind == "parameter"]
    return optimizers.parameter_groups(names, trainable, config.optimizer)


@contextmanager
def _found_in_training() -> Iterator[None]:
    """Turn input errors found only during training into a failed run, which keeps its output files."""
    try:
        yield
    except ConfigError as error:
        raise InputError(error.code, str(error)) from error


def _random_state() -> bytes:
    """The state of torch's generator, as no tensor, which would be counted as memory."""
    return torch.get_rng_state().numpy().tobytes()


def _placed(tensor: Tensor, device: str) -> Tensor:
    """A batch entry on the device of the rank. The copy to a GPU is asynchronous from pinned memory."""
    return tensor if device == "cpu" else tensor.to(device, non_blocking=tensor.is_pinned())


def _on_host(value: Tensor) -> Callable[[], float]:
    """Waits for a number of the device, and not for the kernels after it."""
    if value.device.type == "cpu":
        return partial(float, value)
    copy = torch.empty((), dtype=value.dtype, pin_memory=True)
    copy.copy_(value, non_blocking=True)
    there = torch.cuda.Event()  # type: ignore[no-untyped-call]
    there.record()

    def wait() -> float:
        there.synchronize()
        return float(copy)

    return wait


def train(rank: RankContext, job: TrainingJob) -> dict[str, Any]:
    """Train on this rank; the entry of every rank.

    Args:
        rank: the identity of this rank.
        job: the job, the same for all ranks.

    Returns:
        The last loss, the last evaluation, the bytes sent and, where measured, the memory, from rank 0's view.
    """
    if not job.prepared.config.train.measure_memory:
        return Trainer(rank, job).run()
    with Meter(rank.device) as meter:
        return Trainer(rank, job, meter).run()
