"""The exact memory of a rank: its step run once on tensors that have shapes and no numbers.

Counted are the bytes that autograd saves between forward and backward, the bytes that the program sends, and the peak
of every phase of the step. Invariant: the rank's real module is run, and at stage 0 its real reduction of gradients, so
what autograd saves, what recomputed modules keep, where their second run ends and when gradients come and go are what
they will be in training.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode

from strategies.core.graph import Source
from strategies.core.mesh import Mesh
from strategies.core.program import Program
from strategies.core.steps import ALL_GATHER, Step
from strategies.memory.gathers import CountedGathering, Gather, added, sent
from strategies.memory.sharded import ShardedBytes
from strategies.memory.zero import FP32, GatheredModule, PersistentBytes, ZeroBuffers, gather_late
from strategies.optimizer.bytes_per_element import Need, needed
from strategies.optimizer.replicated import BucketedUpdates
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.sharded import ShardedUpdates
from strategies.optimizer.updates import BucketLimits
from strategies.rules.compared import without_a_batch
from strategies.runtime.activation_offload import Activations, look_up_parameters, matching_modules
from strategies.runtime.communicator import Communicator, Landing, Launcher
from strategies.runtime.disk import Disk, Extent
from strategies.runtime.gathering import GatheredParameters, Gathering
from strategies.runtime.live_tensors import Live
from strategies.runtime.module_tree import build
from strategies.runtime.slices import as_owned
from strategies.runtime.split_backward import DeferredBackward, backward_to

Result = TypeVar("Result")
Events = Sequence[tuple[object, int]]
"""Calls, with the bytes alive after each."""
WORKSPACES = 2 * 2**25
"""Bytes that cuBLAS takes on GPUs since Hopper (on those before a quarter) for products of the thread that runs forward
and of the one that runs backward."""
NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Shapes that depend on numbers, such as the tokens of an expert, and operators without a known shape."""


@dataclass(frozen=True)
class Traced:
    """Bytes of one rank.

    Attributes:
        activations: Saved by autograd at the end of the forward of one micro-batch.
        sent: Sent by the busiest rank for one micro-batch, by collective.
        persistent: Stay from step to step.
        kept: Alive after one forward beside those before.
        gradients: Of the gradients after all backwards.
        peaks: By phase, the most beside the persistent ones.
        offloaded: Of activations and operators placed on the host or a disk, the most there at one moment.
        host_in_update: On the host during an update, beside those that stay there.
        zero: Sent for weights and gradients of one micro-batch by the native engine, by collective.
        between: As `kept`, between the two halves of a backward that is split.
        returned: Of the gradients of inputs, which go back to the stage before.
    """

    activations: int
    sent: dict[str, int]
    persistent: PersistentBytes
    kept: int
    gradients: int
    peaks: dict[str, int]
    offloaded: int
    host_in_update: int = 0
    zero: Mapping[str, int] = field(default_factory=dict)
    between: int = 0
    returned: int = 0


def trace(program: Program, settings: OptimizerSettings) -> Traced:
    """A step of the first rank. A model whose shapes depend on numbers is computed after all, on zeros."""
    return on_shapes(program, settings, lambda program, need: Trace(program, settings, need).run())


def on_shapes(program: Program, settings: OptimizerSettings, work: Callable[[Program, Need], Result]) -> Result:
    """`work` of a program on tensors without numbers if that is possible, whether or not the user has autograd look for
    anomalies, which are numbers."""
    need = optimizer_need(program, settings)
    with torch.autograd.set_detect_anomaly(False):
        for masks in (nullcontext(), UnreadMasks()):
            with suppress(*NEEDS_NUMBERS), FakeTensorMode() as shapes, masks:
                shapes.cache_enabled = settings.offload.activations == "none"  # else it would keep storages alive
                return work(program, need)
        with without_a_batch(), UnreadMasks():
            return work(program, need)


class UnreadMasks(TorchFunctionMode):
    """Writes what masks select (`x[mask] = value`) as if it were all: how many elements that are, only numbers say."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.index_put.default:
            given = dict(zip(("self", "indices", "values"), args, strict=False)) | (kwargs or {})
            if any(isinstance(one, Tensor) and one.dtype is torch.bool for one in given["indices"]):
                return _Written.apply(given["self"], given["values"], *given["indices"])  # type: ignore[no-untyped-call]
        return function(*args, **(kwargs or {}))


class _Written(torch.autograd.Function):
    """The tensor that `x[masks] = value` makes of x; backward needs the masks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor, *masks: Tensor | None) -> Tensor:
        ctx.save_for_backward(*masks)
        ctx.shape = value.shape
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return gradient.clone(), gradient.new_zeros(ctx.shape), *(None for _ in ctx.saved_tensors)


def optimizer_need(program: Program, settings: OptimizerSettings) -> Need:
    """What the optimizer needs for the parameters of a program, with what callbacks keep of them."""
    owned = next((source.spec.dtype for source in program.parameters), "float32")
    wide = torch.promote_types(getattr(torch, owned), torch.float32)
    need = needed(settings.factory, wide, settings.kernels)
    return replace(need, kept=need.kept + settings.copies * need.item)


class _ShapeCommunicator(Communicator):
    """Collectives that leave their results as they are, and count what the busiest rank would send."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh, 0)
        self._within = False

    def _begin(self, steps: Sequence[Step], later: bool) -> Launcher:
        begin = super()._begin(steps, later)
        elements = sum(step.busiest(self.mesh) for step in steps)

        def run(tensors: Sequence[Tensor]) -> Landing:
            self._within = True
            finish = begin(tensors)
            self._within = False
            self.count(steps[0].kind, elements, tensors[0])
            return finish

        return run

    def count(self, kind: str, elements: int, tensor: Tensor) -> None:
        if not self._within:
            super().count(kind, elements, tensor)

    def group(self, axes: Iterable[str]) -> Any:
        return None

    def own_group(self, axes: Iterable[str]) -> Any:
        return None

    def sum(self, tensor: Tensor, group: Any, later: bool = False) -> None:
        """Leaves it unchanged."""

    def gather(self, into: Tensor, tensor: Tensor, group: Any, later: bool = False) -> None:
        into.zero_()

    def gather_later(self, into: Tensor, tensor: Tensor, group: Any) -> None:
        into.zero_()

    def scatter(self, into: Tensor, tensor: Tensor, group: Any, later: bool = False) -> None:
        if tensor.device.type == "cpu":
            tensor.clone()  # gloo works on a copy
        into.zero_()

    def exchange(self, into: Tensor, tensor: Tensor, get: Any, give: Any, group: Any, later: bool = False) -> None:
        into.zero_()


class _NoDisk(Disk):
    """Writes nothing, and keeps the tensor that would be on its way."""

    def __init__(self) -> None:
        """Opens no file."""

    def put(self, tensor: Tensor, after: object = None) -> Extent:
        self.writing = tensor
        return Extent(0, tensor.nbytes)

    def wait(self, extent: Extent) -> None:
        del self.writing

    def get(self, extent: Extent, into: Tensor) -> None:
        """Leaves it unchanged."""

    def free(self, extent: Extent) -> None:
        """There is no space to free."""


@contextmanager
def saved_tensors(others: Iterable[Tensor]) -> Iterator[dict[int, int]]:
    """Yields the bytes of the distinct storages that autograd saves inside, without those of `others`, by storage."""
    known = {tensor.untyped_storage()._cdata: tensor for tensor in others}
    sizes: dict[int, int] = {}

    def add(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(add, lambda tensor: tensor):
        yield sizes
    known.clear()  # autograd keeps the hooks, and with them what they refer to, until backward


def local_tensors(program: Program, device: str) -> dict[str, Tensor]:
    """The rank's slices of parameters, buffers and constants, by name."""
    return {name: as_owned(source, _zeros(program, source, device)) for name, source in program.tensors.items()}


def _zeros(program: Program, source: Source, device: str) -> Tensor:
    shape = program.layouts[source.id].local_shape(source.spec.shape, program.mesh)
    return torch.zeros(shape, dtype=getattr(torch, source.spec.dtype), device=device)


def parameters_of(tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The tensors that are parameters, by name."""
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}


def persistent_bytes(
    program: Program, tensors: Mapping[str, Tensor], need: Need, zero: ZeroBuffers | ShardedBytes | None, device: str
) -> PersistentBytes:
    """What stays from step to step of a rank's `tensors`, with the optimizer's states."""
    parameters, workspaces = parameters_of(tensors), 0 if device == "cpu" else WORKSPACES
    if zero is not None:
        persistent = zero.persistent
        others = sum(tensor.nbytes for name, tensor in tensors.items() if name not in parameters)
        return replace(persistent, parameters=persistent.parameters + others, buffers=persistent.buffers + workspaces)
    trained = [parameters[name] for name in program.trainable_names]
    states = sum(int(need.elements(one.numel(), one.dtype) * need.kept) for one in trained)
    masters = sum(FP32 * one.numel() for one in trained if one.element_size() < FP32)
    return PersistentBytes(sum(tensor.nbytes for tensor in tensors.values()), 0, states + masters, workspaces)


@dataclass(frozen=True)
class TracedStep:
    """A step of our own stage 3 that was traced with every bucket gathered.

    Attributes:
        traced: what was counted.
        phases: the name of each, the number of its first event, and the bytes beside those between steps after every
            event, without parameters gathered ahead.
        gathers: in their order.
        events: their number.
        behind: the number of the first event behind forward.
    """

    program: Program
    need: Need
    traced: Traced
    phases: Sequence[tuple[str, int, Sequence[int]]]
    gathers: Sequence[Gather]
    events: int
    behind: int

    def with_complete(self, settings: OptimizerSettings) -> Traced:
        """The trace with these settings, which differ in what stays complete."""
        none = ShardedBytes(self.program, self.need, replace(settings, complete=0)).persistent
        zero = ShardedBytes(self.program, self.need, settings)
        staying = {number for number, bucket in enumerate(zero.buckets) if bucket.stay}
        extra, others = added(self.gathers, self.events, staying), self.traced.persistent.parameters - none.parameters
        peaks = {"forward": 0, "backward": 0, "update": zero.during_update()}
        for name, first, sizes in self.phases:
            peaks[name] = max(peaks[name], *map(operator.add, sizes, extra[first:]))
        kept = self.traced.kept + extra[self.behind] - added(self.gathers, self.events)[self.behind]
        reduced = {kind: size for kind, size in self.traced.zero.items() if kind != ALL_GATHER}
        return replace(
            self.traced,
            persistent=replace(
                zero.persistent,
                parameters=zero.persistent.parameters + others,
                buffers=self.traced.persistent.buffers,
            ),
            activations=kept,
            kept=kept,
            peaks=peaks,
            zero=reduced | sent(self.gathers, staying),
        )


def trace_step(program: Program, settings: OptimizerSettings) -> TracedStep:
    """Trace, as `trace`, a step of our own stage 3, for any number of elements that stay complete."""

    def work(program: Program, need: Need) -> TracedStep:
        trace = Trace(program, replace(settings, complete=0), need)
        traced, gathering = trace.run(), trace.gathering
        assert gathering is not None
        phases = [(name, trace.first(some), [now - trace.base for _, now in some]) for name, some in trace.phases]
        return TracedStep(program, need, traced, phases, gathering.gathers, trace.live.position, trace.behind)

    return on_shapes(program, settings, work)


class Trace:
    """One step, which is run once. Of several micro-batches only the last is: none before it needs more, because what
    they leave, their gradients, is there from the begin."""

    cut: BucketLimits | None = None
    """How gradients are cut into buckets, if not as `settings` says."""
    limit: int | None = None
    """Bytes of a bucket of the native engine, if not as `settings` says."""

    def __init__(self, program: Program, settings: OptimizerSettings, need: Need) -> None:
        self.program, self.settings, self.need = program, settings, need
        self.communicator, self.exchanging = _ShapeCommunicator(program.mesh), _ShapeCommunicator(program.mesh)
        self.tensors = local_tensors(program, settings.device)
        self.parameters = parameters_of(self.tensors)
        self.activations: Activations | None = None
        self.gathered: list[GatheredModule] = []
        self.module = build(program, self.tensors, self.communicator, settings.device)
        shapes = next((one.fake_mode for one in self.tensors.values() if isinstance(one, FakeTensor)), None)
        self.live = Live(torch.device(settings.device).type, shapes)
        self.offloaded = self.base = 0
        self.phases: list[tuple[str, Events]] = []
        """The events of each, or its peak."""
        self.gathering: CountedGathering | None = None
        self.behind = 0
        """The number of the first event behind forward."""
        self.before = self.between = self.returned = 0
        """Bytes before forward, beside those between the halves of backward, and of the gradients of inputs."""
        self.entering: list[Tensor] = []
        """What comes from the stage before, where backward is split."""

    def run(self) -> Traced:
        """The step."""
        program, live = self.program, self.live
        with live:
            updates = self._begin()
            if updates is not None and self.settings.accumulate > 1:
                updates.skip(self.settings.accumulate - 1)
            activations, kept = self._forward()
            self.behind = live.position
            self._backward(updates)
            sent, gradients = dict(self.communicator.sent), live.now - self.base
            with self._phase("update"):
                if isinstance(updates, BucketedUpdates | ShardedUpdates):
                    updates.reduce()
            gradients = max(gradients, live.now - self.base)
        if self.gathering is not None:
            kept += self._ahead[self.behind]
            activations = kept
        zero = updates if isinstance(updates, ZeroBuffers) else None if updates is None else self._sharded()
        if zero is not None:
            update = zero.during_update()
        else:
            trained = [self.parameters[name] for name in program.trainable_names]
            update = gradients + self.need.during([self.need.elements(one.numel(), one.dtype) for one in trained])
        peaks = {"forward": 0, "backward": 0, "update": update}
        for name, events in self.phases:
            peaks[name] = max(peaks[name], *(now for _, now in self.with_ahead(events)))
        if self.activations is not None and self.activations.disk is not None:
            self.offloaded += self.activations.moved.stored
        return Traced(
            activations,
            sent,
            persistent_bytes(program, self.tensors, self.need, zero, self.settings.device),
            kept,
            gradients,
            peaks,
            self.offloaded,
            0 if zero is None else zero.host_in_update(),
            dict(self.exchanging.sent),
            self.between,
            self.returned,
        )

    @cached_property
    def _ahead(self) -> list[int]:
        """Bytes that are gathered ahead, at every event."""
        return [] if self.gathering is None else added(self.gathering.gathers, self.live.position)

    def with_ahead(self, events: Events) -> Events:
        """Recorded events with the bytes beside those between steps, and with parameters gathered ahead."""
        ahead = self._ahead[self.first(events) :] if self._ahead else [0] * len(events)
        return [(call, now - self.base + more) for (call, now), more in zip(events, ahead, strict=False)]

    def first(self, events: Events) -> int:
        """The number of the first of recorded events."""
        return sum(len(before) for before in takewhile(lambda some: some is not events, self.live.recorded))

    def _begin(self) -> BucketedUpdates | ShardedUpdates | ZeroBuffers | None:
        """Attaches offload and what takes the gradients; then all that stays from step to step is alive."""
        offload = self.settings.offload
        if offload.activations != "none":
            disk = _NoDisk() if offload.activations == "disk" else None
            self.activations = Activations(torch.device(self.settings.device), offload.larger_than, disk, beside=False)
            self.activations.attach(matching_modules(self.module, offload.modules), [*self.tensors.values()])
        updates = self._updates()
        self.live.see(self.tensors.values())
        self.base = self.live.now
        if self.gathering is not None:
            self.live.record()
        return updates

    def _updates(self) -> BucketedUpdates | ShardedUpdates | ZeroBuffers | None:
        """What takes the gradients; None where nothing is trainable."""
        program, settings = self.program, self.settings
        if not program.trainable_names:
            return None
        if settings.native:
            return ShardedUpdates(
                self.module, program, self.exchanging, settings.factory, settings.groups_for(program),
                stage=settings.stage, accumulate=settings.accumulate, limit=self.limit or settings.limit,
                complete=settings.complete, overlap=settings.overlap, gathering=self._gathering,
            )  # fmt: skip
        if settings.stage:
            zero = self._zero()
            if settings.stage == 3:
                look_up_parameters(self.module)
                self.gathered = gather_late(self.module, [self.parameters[name] for name in zero.staying])
            return zero
        return BucketedUpdates(
            self.module, program, _ShapeCommunicator(program.mesh), settings.factory, settings.groups_for(program),
            accumulate=settings.accumulate, cut=self.cut or settings.cut, overlap=settings.overlap,
        )  # fmt: skip

    def _gathering(self, buckets: Iterable[GatheredParameters]) -> Gathering:
        if self.settings.stage < 3:
            return Gathering(buckets)
        self.gathering = CountedGathering(self.live, buckets)
        return self.gathering

    def _sharded(self) -> ShardedBytes | None:
        return ShardedBytes(self.program, self.need, self.settings) if self.settings.native else None

    def _zero(self) -> ZeroBuffers:
        return ZeroBuffers(self.program, self.parameters, self.need, self.settings)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.live.restart()
        yield
        self.phases.append((name, self.live.events or [(None, self.live.peak)]))
        self.offloaded = max(self.offloaded, self.live.host_peak)

    def _forward(self) -> tuple[int, int]:
        """Bytes that autograd has saved, and that are alive beside those before."""
        before = self.before = self.live.now
        inputs = [
            _zeros(self.program, source, self.settings.device).requires_grad_(source.trainable)
            for source in self.program.inputs
        ]
        with saved_tensors([*self.tensors.values(), *inputs]) as saved, self._phase("forward"):
            self.outputs = self.module(*inputs, *([0] if self.program.random else []))
            self.returned = sum(one.nbytes for one in inputs if one.requires_grad)
            self.entering = [one for one in inputs if one.requires_grad and self.settings.split]
            del inputs
        kept = self.live.now - before
        hooked = self.settings.stage == 3 or self.settings.offload.activations != "none"
        return kept if hooked else sum(saved.values()), kept  # other hooks see the tensors saved there

    def _backward(self, updates: BucketedUpdates | ShardedUpdates | ZeroBuffers | None) -> None:
        """Backward of the loss, or of all outputs of a pipeline stage."""
        outputs, self.outputs = self.outputs, None
        roots = [one for one in (outputs if isinstance(outputs, tuple) else (outputs,)) if one.requires_grad]
        later: DeferredBackward | None = None
        if self.entering:
            del outputs
            with self._phase("backward"):
                trained = [self.parameters[name] for name in self.program.trainable_names]
                later = backward_to(self.entering, trained, roots, [torch.zeros_like(one) for one in roots])
                roots, self.entering = [], []
                self._take(updates)
            self.between = self.live.now - self.before
        with self._phase("backward"):
            outputs = None
            if later is not None:
                later()
                self._take(updates)
            elif isinstance(updates, BucketedUpdates | ShardedUpdates) and len(roots) == 1 and not roots[0].dim():
                updates.backward(roots[0])
            else:
                torch.autograd.backward(roots, [torch.zeros_like(one) for one in roots])
                self._take(updates)
            if isinstance(updates, ZeroBuffers):
                updates.finish()
            for holder in self.gathered:  # backward does not pass the modules that the data enters first
                holder.release()

    def _take(self, updates: BucketedUpdates | ShardedUpdates | ZeroBuffers | None) -> None:
        """Take the gradients of a backward that another than the optimizer has run."""
        if isinstance(updates, BucketedUpdates):
            updates.collect()
        elif isinstance(updates, ShardedUpdates):
            updates.finish()
