"""Rank 0 of mode parameter_server: training as on one process, with gradients and updates that happen elsewhere.

It holds a mirror of the model, which is filled where evaluation, checkpoints and verification need it, and written back
after a checkpoint was loaded. So all of these are those of one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from runner.build import optimizers
from runner.checkpoint import Content
from runner.launch.orders import RankContext
from runner.planning.slices import sliced
from runner.server.fleet import Fleet, State
from runner.server.partition import ServerShard, kept_by_workers, partition
from runner.server.shard import plain
from runner.training.evaluate import Evaluator
from runner.training.trainer import Trainer, TrainingJob, groups_of
from strategies.optimizer.loss_scale import scale_of
from strategies.optimizer.replicated import BucketedUpdates
from strategies.optimizer.state import OptimizerScalars, States, is_of_element, is_scalar
from strategies.optimizer.updates import Updates
from strategies.runtime.shards import Shards


class ServedUpdates(BucketedUpdates):
    """The optimizer on the servers of `fleet`; this process has a mirror of it.

    Args:
        fleet: servers and workers.
        shards: the pieces of every server.
        kept: the pieces that every worker has.
        slices: of a step.
        sync: whether a step is one update.
    """

    takes_changes = False

    def __init__(
        self,
        *given: Any,
        fleet: Fleet,
        shards: Sequence[ServerShard],
        kept: ServerShard,
        slices: int,
        sync: bool,
        **shared: Any,
    ) -> None:
        super().__init__(*given, **shared)
        self.fleet, self._shards, self._slices, self._sync = fleet, shards, slices, sync
        self._kept = kept
        self._kept_state: State | None = None
        """What workers keep, where it is known."""
        self.bytes_reduced = 0
        """By all workers in the last step."""
        self.step_number = 1
        self._mirrored = True
        """Whether the mirror has what the servers have."""

    @property
    def options(self) -> list[dict[str, Any]]:
        """The options of the parameter groups, as they are now."""
        return [plain(group) for group in self._optimizer.param_groups]

    def reduce(self) -> None:
        """Synchronous: let every server add up the gradients of the step; slices that a server has taken with it are
        recomputed."""
        self._mirrored = False
        if not self._sync:
            return
        step = self.step_number
        while True:
            answers = [
                self.fleet.request_primary(shard, "prepare", step=step, slices=self._slices)[0]
                for shard in self.fleet.shards
            ]
            missing = sorted({number for answer in answers for number in answer["missing"]})
            if not missing:
                break
            self.fleet.compute_again([(step, number) for number in missing])
        square = sum(answer["square"] for answer in answers)
        if self._kept.pieces:
            kept, self.bytes_reduced = self.fleet.reduce(step, self._slices)
            square += kept
        self._norm_before = math.sqrt(square) / self._multiplied

    def _read(self, op: str) -> Iterator[tuple[ServerShard, State]]:
        """What servers and workers answer, by shard."""
        for number, shard in enumerate(self._shards):
            yield shard, self.fleet.request_primary(number, op)
        if self._kept.pieces:
            yield self._kept, self.fleet.request_worker(op)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for shard, (_, total) in self._read("gradient"):
            for piece, part in zip(shard.pieces, total, strict=True):
                self._gradient(piece.name).view(-1)[piece.start : piece.stop] = part / self._multiplied
        yield from super().gradients()
        self._optimizer.zero_grad(set_to_none=True)

    def update(self, measure: bool = True) -> float | None:
        step, self.step_number = self.step_number, self.step_number + 1
        if not self._sync:
            return None
        norm, scale = self._norm_before, self._factor(self._norm_before)
        self.fleet.send_to_holders("apply", step=step, scale=scale, options=self.options)
        if self._kept.pieces:
            self._kept_state = None
            self.fleet.update_kept(step=step, scale=scale, options=self.options)
        return norm

    def _factor(self, norm: float) -> float | None:
        """What the prepared gradients are multiplied by; None where they overflow in fp16, so that the step is left
        out."""
        factor = 1 / self._multiplied
        if self._scale is not None:
            self._scale.note(finite=math.isfinite(norm))
            if not math.isfinite(norm):
                return None
        clip = 1.0 if self._clip is None else self._clip / (norm + 1e-6)
        return factor if clip >= 1.0 else factor * clip

    @property
    def _multiplied(self) -> float:
        """What the loss of the step at hand was multiplied by."""
        return 1.0 if self._scale is None else self._scale.value

    def weight(self, name: str) -> Tensor:
        self.mirror()
        return super().weight(name)

    def pieces(self, write: bool = False) -> Iterator[Shards]:
        if not write:
            self.mirror()
        return super().pieces(write)

    def plain(self) -> OptimizerScalars:
        self.mirror()
        return super().plain()

    def begin(self, states: States, plain: OptimizerScalars) -> None:
        super().begin(states, plain)
        self._mirrored = True

    def mirror(self) -> None:
        """Read parameters and optimizer states of all servers."""
        if self._mirrored:
            return
        self._mirrored = True
        for shard, (fields, tensors) in self._read("state"):
            for piece, part in zip(shard.pieces, tensors, strict=False):
                parameter = self._owned[piece.name]
                parameter.data.view(-1)[piece.start : piece.stop] = part
                mirror = self._optimizer.state[parameter]
                for key, stored in fields["states"].get(piece.name, {}).items():
                    value = tensors[stored["tensor"]] if "tensor" in stored else stored["value"]
                    if is_scalar(value, part):
                        mirror[key] = value
                    else:
                        mirror.setdefault(key, torch.zeros_like(parameter, dtype=value.dtype))
                        mirror[key].view(-1)[piece.start : piece.stop] = value
        self.loaded()

    def serve(self, done: int) -> None:
        """Give the servers what the mirror has, after step `done`."""
        self.step_number = done + 1
        self.fleet.place([self._state_of(shard, done) for shard in self._shards])
        self._kept_state = self._state_of(self._kept, done)

    def _state_of(self, shard: ServerShard, done: int) -> State:
        """What a server or a worker needs to go on with `shard` as the mirror has it."""
        found: dict[str, dict[str, Any]] = {}
        tensors = [self._owned[one.name].detach().view(-1)[one.start : one.stop].clone() for one in shard.pieces]
        for piece in shard.pieces:
            parameter = self._owned[piece.name]
            found[piece.name] = {}
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[piece.name][key] = {"tensor": len(tensors)}
                    of_element = not parameter.dim() and is_of_element(key, value)
                    scalar = is_scalar(value, parameter) and not of_element
                    tensors.append((value if scalar else value.view(-1)[piece.start : piece.stop]).clone())
                else:
                    found[piece.name][key] = {"value": value}
        fields = {"version": done if self._sync else 0, "states": found, "options": self.options, "arrived": []}
        return fields | {"prepared": 0}, tensors

    def kept_state(self) -> State:
        """What workers keep, as it is after the last step."""
        if self._kept_state is None:
            self._kept_state = self.fleet.request_worker("state")
        return self._kept_state


class Coordinator(Trainer):
    """Training whose slices workers compute."""

    updates: ServedUpdates

    def __init__(self, rank: RankContext, job: TrainingJob) -> None:
        prepared = job.prepared
        assert prepared.step is not None
        self._identity = prepared.identity()
        self._sliced = sliced(prepared.config, *prepared.step)
        self._server = prepared.config.parallel.server
        self._slices, self._sync = self._sliced.slices, self._server.consistency == "sync"
        self._handed_out = 0
        """The last step whose slices were handed out."""
        self._before: dict[str, int] = {}
        timeout = prepared.config.launch.timeout
        keeping = bool(self._sliced.kept)
        place = job.folder, rank.address, prepared.config.launch.host_of(rank.rank)
        self.fleet = Fleet(
            *place, self._server.servers, self._server.replicas, timeout, self._welcome, keeping, job.attempt
        )
        parallel = prepared.config.parallel.model_copy(update={"mode": "stand_alone"})
        alone = replace(
            prepared,
            config=prepared.config.model_copy(update={"parallel": parallel}),
            graph=None, plan=None, step=None, evaluations={}, digest=prepared.digest,
        )  # fmt: skip
        super().__init__(replace(rank, world_size=1), replace(job, prepared=alone))

    def _welcome(self) -> list[Tensor]:
        """The tensors of the model that no server holds."""
        return [self.execution.tensors[name].detach() for name in self._sliced.constants]

    def _updates(self) -> Updates:
        config, execution = self.config, self.execution
        return ServedUpdates(
            execution.module,
            execution.program,
            execution.communicator,
            optimizers.optimizer_factory(config.optimizer),
            groups_of(execution.program.sources, config),
            clip=config.train.clip,
            fleet=self.fleet,
            shards=partition(self._sliced.elements, self._sliced.widths, self._server.servers),
            kept=kept_by_workers(self._sliced.kept),
            slices=self._slices,
            sync=self._sync,
            scale=scale_of(config.train.loss_scale) if config.train.precision == "fp16" else None,
        )

    def _content(self) -> Content:
        return replace(super()._content(), config=self._identity["config"])

    def _restore(self) -> int:
        first = super()._restore()
        self._handed_out = first - 1
        self.updates.serve(first - 1)
        return first

    def run(self) -> dict[str, Any]:
        done = False
        try:
            result = super().run()
            done = True
            return result
        finally:
            self.fleet.close(done)

    def _micro_batches(self, step: int, again: bool = False) -> tuple[float, int]:
        """Let workers compute the slices of `step`, and hand out those of later steps where they may run ahead.
        Returns the mean loss over the global batch, and the number of its rows."""
        if self._sliced.kept:
            self.fleet.admit(self.updates.kept_state, self._slices)
        last = self._last_ahead(step)
        fresh = [(later, number) for later in range(self._handed_out + 1, last + 1) for number in range(self._slices)]
        self._handed_out = max(self._handed_out, last)
        if not self._sync and self.updates.options != self._options:
            self._options = self.updates.options
            self.fleet.send_to_holders("configure", options=self._options)
        clip = None if self._sync else self.config.train.clip
        scale = self.updates.loss_scale
        given = {"ahead": self.keeper.ahead, "sync": self._sync, "clip": clip}
        self.fleet.hand_out(fresh, given | {"loss_scale": None if scale is None else scale.value})
        units = [(step, number) for number in range(self._slices)]
        self.fleet.wait_for(units)
        self._reports = [self.fleet.results.pop(unit) for unit in units]
        return sum(report["loss"] for report in self._reports), self.order.batch_size

    def _last_ahead(self, step: int) -> int:
        """The last step whose slices may be handed out: none beyond the next evaluation or save, which see the
        parameters after their step."""
        ahead = self._server.ahead
        last = self.prepared.steps if ahead is None else min(step + ahead, self.prepared.steps)
        every = self.config.checkpoint.every
        for later in range(step, last + 1):
            if (every is not None and later % every == 0) or (self.evaluator is not None and self._regular(later)):
                return later
        return last

    def _scored(self, evaluator: Evaluator) -> dict[str, float]:
        self.updates.mirror()
        return super()._scored(evaluator)

    def _served(self) -> dict[str, float]:
        staleness = [report["staleness"] for report in self._reports]
        counts = dict(self.fleet.counts)
        changed = {key: count - self._before.get(key, 0) for key, count in counts.items()}
        self._before = counts
        return {
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            **{f"bytes_{way}": sum(report[way] for report in self._reports) for way in ("pulled", "pushed")},
            **({"bytes_reduced": self.updates.bytes_reduced} if self._sliced.kept else {}),
            **{key: count for key, count in changed.items() if count},
        }

    _options: Sequence[Mapping[str, Any]] = ()
    _reports: Sequence[Mapping[str, Any]] = ()
