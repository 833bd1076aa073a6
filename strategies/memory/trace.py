"""What one rank stores between forward and backward, what its program sends, and how its memory goes up and down in a
step: found out by running the step once on tensors that have shapes and no numbers.

Invariant: the rank's real module is run, and at stage 0 its real sum of gradients, so what autograd saves, what
recomputed modules keep, where their second run ends and when gradients come and go are what they will be in training.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from strategies.core.graph import Source
from strategies.core.mesh import Mesh
from strategies.core.program import Program
from strategies.core.steps import Step
from strategies.memory.zero import Group, Sharded, Standing, groups_of
from strategies.memory.zero_gathering import Gathered, gather_late
from strategies.optimizer.bytes_per_element import Need, needed
from strategies.optimizer.replicated import BucketedUpdates
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.updates import BucketLimits
from strategies.runtime.activation_offload import Activations, look_up_parameters, meant
from strategies.runtime.communicator import Communicator
from strategies.runtime.disk import Extent
from strategies.runtime.live_tensors import Live
from strategies.runtime.module_tree import MODULE, build

Result = TypeVar("Result")
NEEDS_NUMBERS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
"""Shapes that depend on numbers, such as how many tokens an expert gets, and operators that no shape is known of."""


@dataclass(frozen=True)
class Traced:
    """Of one micro-batch: `activations`, bytes that autograd has stored when forward is done, and `sent`, bytes that
    the busiest rank sends, by collective. Of a step: what `stands` from step to step, what one forward leaves
    (`kept`), what all backwards leave (`gradients`), by phase the most above what stands (`peaks`), and the most of
    activations and placed operators that is `away`, on the host or on a disk; and what an update needs on the host
    beside what stays there (`host_in_update`)."""

    activations: int
    sent: dict[str, int]
    stands: Standing
    kept: int
    gradients: int
    peaks: dict[str, int]
    away: int
    host_in_update: int = 0


class _Shaped(Communicator):
    """Collectives that leave what they should fill as it is, and count what the busiest rank would send."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh, 0)
        self._within = False

    def _begin(self, step: Step, later: bool) -> Callable[[Tensor], Callable[[], Tensor]]:
        begin = super()._begin(step, later)
        elements = step.busiest(self.mesh)

        def run(tensor: Tensor) -> Callable[[], Tensor]:
            self._within = True
            finish = begin(tensor)
            self._within = False
            self.count(step.kind, elements, tensor)
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
        """As it is."""

    def gather(self, into: Tensor, tensor: Tensor, group: Any, later: bool = False) -> None:
        into.zero_()

    def scatter(self, into: Tensor, tensor: Tensor, group: Any, later: bool = False) -> None:
        if tensor.device.type == "cpu":
            tensor.clone()  # gloo works on a copy
        into.zero_()

    def exchange(self, into: Tensor, tensor: Tensor, get: Any, give: Any, group: Any, later: bool = False) -> None:
        into.zero_()


class _NoDisk:
    """A `Disk` that writes nothing, and holds what would be on its way."""

    def put(self, tensor: Tensor, after: object = None) -> Extent:
        self.writing = tensor
        return Extent(0, tensor.nbytes)

    def wait(self, extent: Extent) -> None:
        del self.writing

    def get(self, extent: Extent, into: Tensor) -> None:
        """As it is."""

    def free(self, extent: Extent) -> None:
        """There is no space to give back."""


class Saved:
    """The distinct storages that autograd has saved, without those of `others`."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        self._others = {tensor.untyped_storage()._cdata: tensor for tensor in others}
        self._found: dict[int, int] = {}

    def add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._others:
            self._found[storage._cdata] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self._found.values())


@contextmanager
def saved_tensors(others: Iterable[Tensor]) -> Iterator[Saved]:
    """Counts what autograd saves inside, as long as the graph lives."""
    saved = Saved(others)
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
        yield saved


def trace(program: Program, settings: OptimizerSettings) -> Traced:
    """A step of the first rank. A model whose shapes depend on numbers is computed after all, on zeros."""
    return on_shapes(program, settings, lambda program, need: Trace(program, settings, need).run())


def stored_in(program: Program, settings: OptimizerSettings, paths: Collection[str]) -> dict[str, int]:
    """Bytes that each of these modules leaves in memory when its forward is done, its results among them."""
    return on_shapes(program, settings, lambda program, need: Trace(program, settings, need).stored_in(paths))


def need_of(program: Program, settings: OptimizerSettings) -> Need:
    """What the optimizer of a program takes."""
    owned = next((source.spec.dtype for source in program.sources if source.kind == "parameter"), "float32")
    dtype: torch.dtype = getattr(torch, owned)
    wide = torch.promote_types(dtype, torch.float32)
    return needed(settings.factory, wide, at_once=settings.device != "cpu")


def on_shapes(program: Program, settings: OptimizerSettings, work: Callable[[Program, Need], Result]) -> Result:
    """What `work` finds of a program without its updates, on tensors without numbers if that can be."""
    program = replace(program, updates=())  # writing stores nothing, and looks at memory that is not there
    need = need_of(program, settings)
    try:
        with FakeTensorMode() as shapes:
            shapes.cache_enabled = settings.offload.activations == "none"  # it would hold storages that are looked at
            return work(program, need)
    except NEEDS_NUMBERS:
        return work(program, need)


def local_tensors(program: Program, device: str) -> dict[str, Tensor]:
    """The rank's slices of parameters, buffers and constants, by name."""
    found: dict[str, Tensor] = {}
    for source in program.sources:
        if source.kind != "input":
            own = _zeros(program, source, device)
            found[source.name] = nn.Parameter(own, source.trainable) if source.kind == "parameter" else own
    return found


def _zeros(program: Program, source: Source, device: str) -> Tensor:
    shape = program.layouts[source.id].local_shape(source.spec.shape, program.mesh)
    return torch.zeros(shape, dtype=getattr(torch, source.spec.dtype), device=device)


def parameters_of(tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}


def standing(program: Program, tensors: Mapping[str, Tensor], need: Need, updates: object) -> Standing:
    """What stays from step to step of a rank's `tensors`."""
    held = parameters_of(tensors)
    if isinstance(updates, Sharded):
        others = sum(tensor.nbytes for name, tensor in tensors.items() if name not in held)
        return replace(updates.standing, parameters=updates.standing.parameters + others)
    owned = [held[name] for name in program.trainable_names]
    states = sum(int(one.numel() * need.kept) for one in owned)
    masters = sum(4 * one.numel() for one in owned if one.element_size() < 4)
    return Standing(sum(tensor.nbytes for tensor in tensors.values()), 0, states + masters, 0)


def sharded(
    program: Program,
    held: Mapping[str, nn.Parameter],
    groups: Sequence[Group],
    need: Need,
    settings: OptimizerSettings,
    make: Callable[..., Sharded] = Sharded,
) -> Sharded:
    """What ZeRO 1-3 has beside the parameters that are `held`."""
    return make(
        program, held, groups, need, torch.device(settings.device),
        stage=settings.stage, accumulate=settings.accumulate, bucket=settings.bucket, offload=settings.offload,
    )  # fmt: skip


class Trace:
    """One step, which is run once. Of several micro-batches only the last is: none before it needs more, because what
    they leave, their gradients, is there from the begin."""

    cut: BucketLimits | None = None
    """How gradients are cut into buckets, if not as `settings` says."""

    def __init__(self, program: Program, settings: OptimizerSettings, need: Need) -> None:
        self.program, self.settings, self.need = program, settings, need
        self.communicator = _Shaped(program.mesh)
        self.inputs = [source for source in program.sources if source.kind == "input"]
        self.tensors = local_tensors(program, settings.device)
        self.activations: Activations | None = None
        self.gathered: list[Gathered] = []
        self.module = build(program, self.tensors, self.communicator, settings.device)
        self.held = parameters_of(self.tensors)
        shapes = next((one.fake_mode for one in self.tensors.values() if isinstance(one, FakeTensor)), None)
        self.live = Live(torch.device(settings.device).type, shapes)
        self.away = 0
        self.peaks = {"forward": 0, "backward": 0, "update": 0}

    def run(self) -> Traced:
        with self.live as live:
            self._offload()
            updates = self._updates()
            live.see(self.tensors.values())
            self.base = live.now
            if updates is not None and self.settings.accumulate > 1:
                updates.skip(self.settings.accumulate - 1)
            activations, kept = self._forward(live)
            self._backward(live, updates)
            sent = dict(self.communicator.sent)
            with self._phase(live, "update"):
                if isinstance(updates, BucketedUpdates):
                    updates.reduce()
            gradients = live.now - self.base
        stands = standing(self.program, self.tensors, self.need, updates)
        if isinstance(updates, Sharded):
            update = updates.during_update()
        else:
            sizes = [self.held[name].numel() for name in self.program.trainable_names]
            update = gradients + self.need.during(sizes)
        self.peaks["update"] = max(self.peaks["update"], update)
        disk = self.activations is not None and self.activations.disk is not None
        away = self.away + (self.activations.moved.held if self.activations is not None and disk else 0)
        there = updates.host_in_update() if isinstance(updates, Sharded) else 0
        return Traced(activations, sent, stands, kept, gradients, self.peaks, away, there)

    def stored_in(self, paths: Collection[str]) -> dict[str, int]:
        """By path, of one forward."""
        found = dict.fromkeys(paths, 0)

        def counted(path: str, forward: Callable[..., Any], *inputs: Any) -> Any:
            before = live.now
            results = forward(*inputs)
            found[path] += live.now - before
            return results

        with self.live as live:
            self._offload()
            updates = self._updates()
            live.see(self.tensors.values())
            self.base = live.now
            for unit in self.module.modules():
                path = unit.meta.get(MODULE) if isinstance(unit, fx.GraphModule) else None
                if path in found:
                    vars(unit)["forward"] = partial(counted, path, unit.forward)
            self._forward(live)
            del updates, self.outputs
        return found

    def _offload(self) -> None:
        """What autograd keeps goes to the host or to a disk, as far as it is meant to."""
        wanted = self.settings.offload
        if wanted.activations != "none":
            disk = _NoDisk() if wanted.activations == "disk" else None
            self.activations = Activations(torch.device(self.settings.device), wanted.larger_than, disk, beside=False)
            self.activations.attach(meant(self.module, wanted.modules), [*self.tensors.values()])

    def _updates(self) -> BucketedUpdates | Sharded | None:
        """What takes the gradients, as far as memory asks; None where nothing learns."""
        program, settings = self.program, self.settings
        if not program.trainable_names:
            return None
        groups = settings.groups_for(program)
        if settings.stage:
            found = self._sharded(groups_of(program, groups, settings.stage))
            if settings.stage == 3:
                look_up_parameters(self.module)
                self.gathered = gather_late(self.module)
            return found
        return BucketedUpdates(
            self.module, program, _Shaped(program.mesh), settings.factory, groups,
            accumulate=self.settings.accumulate, cut=self.cut or settings.cut, overlap=settings.overlap,
        )  # fmt: skip

    def _sharded(self, groups: Sequence[Group]) -> Sharded:
        return sharded(self.program, self.held, groups, self.need, self.settings)

    @contextmanager
    def _phase(self, live: Live, name: str) -> Iterator[None]:
        live.restart()
        yield
        self.peaks[name] = max(self.peaks[name], live.peak - self.base)
        self.away = max(self.away, live.host_peak)

    def _entry(self, source: Source) -> Tensor:
        return _zeros(self.program, source, self.settings.device).requires_grad_(source.trainable)

    def _forward(self, live: Live) -> tuple[int, int]:
        """Bytes that autograd has stored, and that are alive more than before."""
        before = live.now
        entries = [self._entry(source) for source in self.inputs]
        with saved_tensors([*self.tensors.values(), *entries]) as saved, self._phase(live, "forward"):
            self.outputs = self.module(*entries, *([0] if self.program.random else []))
            del entries
        kept = live.now - before
        apart = self.settings.stage == 3 or self.settings.offload.activations != "none"
        return kept if apart else saved.bytes, kept  # other hooks see what is saved there

    def _backward(self, live: Live, updates: BucketedUpdates | Sharded | None) -> None:
        """Backward of the loss, or from all that a stage of a pipeline hands on."""
        outputs, self.outputs = self.outputs, None
        found = [one for one in (outputs if isinstance(outputs, tuple) else (outputs,)) if one.requires_grad]
        with self._phase(live, "backward"):
            del outputs
            if isinstance(updates, BucketedUpdates) and len(found) == 1 and not found[0].dim():
                updates.backward(found[0])
            elif isinstance(updates, BucketedUpdates):
                torch.autograd.backward(found, [torch.zeros_like(one) for one in found])
                updates.collect()
            else:
                torch.autograd.backward(found, [torch.zeros_like(one) for one in found])
            if isinstance(updates, Sharded):
                updates.finish()
            for one in self.gathered:  # backward does not pass the modules that the data enters first
                one.release()
