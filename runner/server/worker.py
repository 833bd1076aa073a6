"""A worker: computes the gradient of one slice of a batch after the other, with parameters from the servers.

A slice is what one rank of a data-parallel plan computes, so the sum of all slices is the gradient of one device. Any
worker can compute any slice. In half precision workers compute with weights of 16 bits that follow from the masters of
servers, and push gradients in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from runner.build.modules import DTYPES, cast
from runner.build.optimizers import optimizer_factory
from runner.data.loader import Block, LocalBatches
from runner.data.row_seeds import seed_generators
from runner.launch.orders import RankContext
from runner.planning.counted import AddedRows, mean_weights, shares
from runner.planning.datasets import datasets, order_of
from runner.planning.prepare import WEIGHTS
from runner.planning.slices import sliced
from runner.server.flat_parameters import FlatParameters
from runner.server.gradients import Gradient
from runner.server.inbox import Inbox
from runner.server.links import BROKEN, Address, ServerLink, connect
from runner.server.partition import kept_by_workers, partition
from runner.server.shard import ServedShard
from runner.server.tables import PulledTable
from runner.training.execution import naming_operator
from runner.training.fault_injection import Faults
from runner.training.trainer import TrainingJob, groups_of
from strategies.core.mesh import Mesh
from strategies.rules.random import mix
from strategies.runtime import initial_weights as weights
from strategies.runtime.communicator import Communicator
from strategies.runtime.flight_recorder import DATA, FORWARD, recorder
from strategies.runtime.module_tree import build


class Worker:
    """The program of all slices on one set of parameters.

    Args:
        coordinator: leads to the coordinator, which has said nothing yet.
        secret: of connections.
    """

    def __init__(self, rank: RankContext, job: TrainingJob, coordinator: ServerLink, secret: bytes) -> None:
        self._rank, self._prepared, self._config = rank, job.prepared, job.prepared.config
        self._coordinator, self._secret = coordinator, secret
        self._inbox = Inbox(coordinator, secret, self._config.launch.timeout, rank.address)
        self._faults = Faults(self._config, rank, (), Communicator(Mesh((("world", 1),)), 0))
        assert job.prepared.step is not None
        self._sliced = sliced(self._config, *job.prepared.step)
        self._program, self._slices = self._sliced.program, self._sliced.slices
        section = self._config.parallel.server
        self._tensors = weights.read_slices(job.folder / WEIGHTS, self._sliced.stored, 0, rank.device)
        shards = partition(self._sliced.elements, self._sliced.widths, section.servers)
        sizes = {name: size for name, size in self._sliced.elements.items() if name not in self._sliced.widths}
        dtype = self._tensors[next(iter(self._sliced.elements))].dtype
        self._dense = FlatParameters(self._tensors, sizes, dtype)
        assert job.prepared.graph is not None
        self._graph = job.prepared.graph
        groups, factory = groups_of(self._graph.sources, self._config), optimizer_factory(self._config.optimizer)
        self._kept = ServedShard(kept_by_workers(self._sliced.kept), groups, factory, dtype)
        self._own = FlatParameters(self._tensors, self._sliced.kept, dtype, self._kept.values)
        """What the program computes with of what workers keep; `_kept` updates it."""
        self._kept_slices: dict[int, Tensor] = {}
        """The gradient of what workers keep, by slice of this step."""
        parts = [shard.size for shard in shards]
        self._pulled, self._pushed = torch.split(self._dense.values, parts), torch.split(self._dense.gradients, parts)
        bounds = [[piece.rows for piece in shard.tables] for shard in shards]
        self._tables = [
            PulledTable(table, self._tensors[table.name], [own[number] for own in bounds], section.cache_rows)
            for number, table in enumerate(self._sliced.tables)
        ]
        self._servers: list[ServerLink] = []
        self._layout: list[list[Any]] = []
        torch.set_default_dtype(job.prepared.default_dtype)
        training, _, self._collate = datasets(self._config)
        seed_generators(self._config.train.seed)
        self._training, self._order = training, order_of(self._config, training)
        self._slice = cache(self._build)
        counts = [one for one in (job.prepared.counted, *job.prepared.means) if one is not None]
        weighed = [position for one in counts for position in one.entries]
        self._facts = self._batches(
            [
                _full(shape) if position in (*self._sliced.counted, *weighed) else ((0, 1), *_full(shape[1:]))
                for position, shape in enumerate(job.prepared.shapes)
            ]
        )

    def _build(self, number: int) -> tuple[torch.nn.Module, LocalBatches, Faults]:
        """What computes slice `number`."""
        program = self._program
        communicator = Communicator(program.mesh, number)
        module = build(program, self._tensors, communicator, self._rank.device)
        entries = self._sliced.entries[: len(self._prepared.names)]  # behind them are the weights of means
        blocks = [program.layouts[one.id].block(one.spec.shape, program.mesh, number) for one in entries]
        return module, self._batches(blocks), Faults(self._config, self._rank, (module,), communicator)

    def _batches(self, blocks: Sequence[Block]) -> LocalBatches:
        prepared = self._prepared
        return LocalBatches(
            *(self._training, self._collate, blocks),
            names=prepared.names,
            shapes=prepared.shapes,
            seed=self._config.train.seed,
            together=prepared.together,
            floating=prepared.floating,
        )

    @property
    def address(self) -> Address:
        """The address by which other workers reach this one."""
        return self._inbox.address

    def run(self) -> None:
        """Compute slices until the connection to the coordinator is closed, which raises EOFError or OSError."""
        _, tensors = self._inbox.order()
        for name, tensor in zip(self._sliced.constants, tensors, strict=True):
            with torch.no_grad():
                self._tensors[name].copy_(tensor)
        while True:
            order, tensors = self._inbox.order()
            if order["op"] == "unit":
                self._coordinator.send("done", **self._unit(order))
            elif order["op"] == "load":
                self._kept.load(order, tensors)
                self._own.values.copy_(self._kept.values)
            elif order["op"] == "reduce":
                self._reduce(order)
            elif order["op"] == "apply":
                self._kept.apply(order["step"], order["scale"], order["options"])
                self._own.values.copy_(self._kept.values)
                self._kept_slices.clear()
            elif order["op"] == "state":
                fields, found = self._kept.state()
                self._coordinator.send("state", found, **fields)
            else:
                self._coordinator.send("gradient", self._kept.gradient())

    def _unit(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Compute a slice; the report of it."""
        self._connect(order["servers"])
        step, number = order["unit"]
        recorder.begin(step)
        while True:
            try:
                return self._compute(order, step, number)
            except BROKEN:
                self._coordinator.send("lost", servers=sorted({server for server, *_ in self._layout}))
                answer, _ = self._inbox.order()
                self._layout = []
                self._connect(answer["servers"])

    def _reduce(self, order: Mapping[str, Any]) -> None:
        """Add up the gradients of what workers keep, of all slices of a step."""
        total = torch.zeros_like(self._own.gradients)
        for number in order["slices"]:
            total += self._kept_slices[number]
        try:
            ring = self._inbox.ring(order)
            if ring is None:
                return  # a worker was killed: an order for another ring has come
            self._faults.begin(order["step"])
            self._faults.at("optimizer")
            sent = ring.add(total)
        except BROKEN:
            self._coordinator.send("broken", generation=order["generation"])
            return
        self._kept.total = Gradient(total)
        square = self._kept.total.square()
        self._coordinator.send("reduced", generation=order["generation"], square=square, sent=sent)

    def _connect(self, layout: list[list[Any]]) -> None:
        """Connect to the primary of every shard."""
        if layout == self._layout:
            return
        for link in self._servers:
            link.close()
        self._servers, self._layout = [], layout
        for _, address, port in layout:
            try:
                link = connect((address, port), self._secret, self._config.launch.timeout)
                link.send("worker")
            except OSError:
                link = _Unreachable()  # it was killed since; the next request says so
            self._servers.append(link)

    def _compute(self, order: Mapping[str, Any], step: int, number: int) -> dict[str, Any]:
        """Pull, compute slice `number` of `step`, and push. Raises OSError or EOFError where a server is down."""
        module, batches, faults = self._slice(number)
        faults.begin(step)
        sent, received = ([getattr(link, way) for link in self._servers] for way in ("sent", "received"))
        micro_batches, shares = self._load(batches, faults, step - 1 + order["ahead"])
        self._pull()
        loss = self._gradient(module, micro_batches, shares, step, order["loss_scale"])
        self._kept_slices[number] = self._own.gradients.clone()
        self._clip(order["clip"])
        faults.at("collective")
        answers = []
        for shard, (link, part) in enumerate(zip(self._servers, self._pushed, strict=True)):
            rows = [table.gradient(shard) for table in self._tables]
            gradient = Gradient(part, tuple(rows)).tensors()
            if order["sync"]:
                link.send("push", gradient, shard=shard, step=step, slice=number)
            else:
                unit = (step * self._slices) + number
                floor = order["floor"][0] * self._slices + order["floor"][1]
                pulled = self._versions[shard]
                link.send("arrive", gradient, shard=shard, step=step, unit=unit, floor=floor, pulled=pulled)
        for link in self._servers:
            answers.append(link.receive()[0])
        return {
            "loss": loss,
            "staleness": max(answer.get("staleness", 0) for answer in answers),
            "alone": [(shard, one["alone"]) for shard, one in enumerate(answers) if one.get("alone") is not None],
            "pushed": sum(link.sent for link in self._servers) - sum(sent),
            "pulled": sum(link.received for link in self._servers) - sum(received),
        }

    def _load(self, batches: LocalBatches, faults: Faults, batch: int) -> tuple[list[list[Tensor]], list[float]]:
        """The inputs of the program in every micro-batch of global batch `batch`, where ids of rows are positions;
        and the share that each one has of what the loss counts, or of the rows where its means have weights."""
        rows, epoch = self._order.rows(batch), self._order.epoch(batch)
        size, dtype = self._prepared.rows, DTYPES[self._config.train.precision]
        loaded: list[list[Tensor]] = []
        facts: list[list[Tensor]] = []
        count, means = self._config.train.accumulate, self._prepared.means
        alone = self._prepared.counted
        weighing = means or (None if isinstance(alone, AddedRows) else alone,)
        counts = [[0.0] * count for _ in weighing]
        for micro in range(count):
            recorder.at(DATA)
            faults.at("data")
            part = rows[micro * size : (micro + 1) * size]
            loaded.append(cast(batches.load(part, epoch), dtype))
            facts.append([])
            if (counted := self._sliced.counted) or any(weighing):
                batch_entries = cast(self._facts.load(part, epoch), dtype)
            if counted:
                facts[-1] = self._sliced.facts_of([batch_entries[one] for one in counted], self._tensors)
            for own, one in zip(counts, weighing, strict=True):
                own[micro] = 1.0 if one is None else one.of(batch_entries, _full(self._prepared.shapes[one.entry]))
        positions = [table.need(loaded) for table in self._tables]
        each = [
            [1 / count] * count if one is None else shares(own, one) for own, one in zip(counts, weighing, strict=True)
        ]
        weights = [
            mean_weights([own[micro] * count for own in each] if means else [], self._config.train.precision)
            for micro in range(count)
        ]
        return [
            [*entries, *weights[micro], *(one for own in positions for one in own[micro]), *facts[micro]]
            for micro, entries in enumerate(loaded)
        ], [1.0] * count if isinstance(alone, AddedRows) else [1 / count] * count if means else each[0]

    def _pull(self) -> None:
        """Read the dense parameters and the rows that are needed from all servers, at the same time."""
        for shard, link in enumerate(self._servers):
            link.send("pull", [tensor for table in self._tables for tensor in table.request(shard)], shard=shard)
        self._versions = []
        for shard, (link, part) in enumerate(zip(self._servers, self._pulled, strict=True)):
            fields, (_, *rows) = link.receive([part])
            self._versions.append(fields["version"])
            for table, positions, values in zip(self._tables, rows[::2], rows[1::2], strict=True):
                table.receive(shard, fields["version"], positions, values)
        for table in self._tables:
            table.begin()

    def _gradient(
        self,
        module: torch.nn.Module,
        micro_batches: list[list[Tensor]],
        shares: list[float],
        step: int,
        scale: float | None,
    ) -> float:
        """Forward and backward of the slice in all micro-batches, of a loss times `scale`, if it is given. Returns its
        part of the loss."""
        for flat in (self._dense, self._own):
            flat.begin()
        total = 0.0
        for micro, entries in enumerate(micro_batches):
            recorder.at(FORWARD)
            key = (mix(self._config.train.seed, step, micro),) if self._program.random else ()
            with naming_operator(self._graph):
                loss = module(*entries, *key)
            scaled = loss if scale is None else loss.float() * scale  # fp16 has no larger numbers
            (scaled if len(shares) == 1 else scaled * shares[micro]).backward()
            for flat in (self._dense, self._own):
                flat.collect()
            for table in self._tables:
                table.collect()
            if shares[micro]:  # of nothing the mean is not a number
                total += float(loss.detach().double()) * shares[micro]
        return total

    def _clip(self, limit: float | None) -> None:
        """Scale the gradient of a slice that updates alone: `limit` is for the gradient of its mean loss."""
        if limit is None:
            return
        parts = [self._dense.gradients, *(table.gradients for table in self._tables)]
        norm = math.sqrt(sum(float(part.double().square().sum()) for part in parts)) * self._slices
        if not (scale := limit / (norm + 1e-6)) >= 1.0:
            for part in parts:
                part.mul_(scale)


def _full(shape: Sequence[int]) -> Block:
    return tuple((0, size) for size in shape)


class _Unreachable(ServerLink):
    """A connection that nobody answered."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def send(self, op: str, tensors: Any = (), **fields: Any) -> None:
        raise ConnectionError("the server is down")

    def close(self) -> None:
        pass
