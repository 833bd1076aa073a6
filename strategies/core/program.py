"""What every rank runs: one program, a list of local computations and redistributions.

Rank programs differ only in numbers that depend on the rank (`RankValue`), so one program serves the real engine and
the lockstep simulator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from strategies.core.graph import CONSTANT_TO_AUTOGRAD, Ref, Source, TensorSpec, refs, rewrite, with_refs
from strategies.core.layout import Layout
from strategies.core.memo import Memo
from strategies.core.mesh import Mesh
from strategies.core.plan import Recompute
from strategies.core.steps import LOCAL, ReshardingPath, Step

KEY = Ref("random_key")
"""The program's random key: a python integer that flows in beside the batch."""
WITHOUT_GRADIENT = tuple(f"aten.{op}." for op in CONSTANT_TO_AUTOGRAD)
"""How targets begin through which no gradient passes."""
DECIDING = "local.called_module"
"""The target of modules that decide by values, and so may use an operand in one step and not in another."""


@dataclass(frozen=True)
class RankValue:
    """The index of a rank's slice over `axes`; or where that slice, of length `stride`, begins."""

    axes: tuple[str, ...]
    stride: int | None = None

    def of(self, mesh: Mesh, rank: int) -> int:
        if self.stride is None:
            return mesh.index(rank, self.axes)
        return mesh.start(rank, int(mesh.parts(self.axes) * self.stride), self.axes)


class Ordinal(int):
    """The number of a random operator among those of its graph: what differs between layers with the same random
    operators."""


_PLACED = (Ref, Ordinal)
"""What differs between layers that do the same."""


@dataclass(frozen=True)
class Compute:
    """Call `target` on local tensors. `operator` is the plan name that caused it, `path` its place in the tree of
    modules; with `host` it runs on the CPU beside the device, where its operands are too."""

    id: str
    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    operator: str
    path: tuple[str, ...]
    multiple: bool = False
    host: bool = False

    @cached_property
    def operands(self) -> tuple[Ref, ...]:
        """The values that it takes."""
        return tuple(refs((self.args, tuple(value for _, value in self.kwargs))))

    @cached_property
    def form(self) -> str:
        """The arguments, with the type alone of values and ordinals: equal for calls of the same form."""
        return repr(rewrite((self.args, self.kwargs), lambda leaf: type(leaf) if isinstance(leaf, _PLACED) else leaf))


@dataclass(frozen=True)
class Redistribute:
    """Carry `value` along `forward`; its gradient is multiplied by `scale` and carried along `backward`.

    `operand` is the position at the operator for which it happens (-1: the operator's own result, or an output of the
    graph).
    """

    id: str
    value: Ref
    forward: ReshardingPath
    backward: ReshardingPath
    scale: float
    differentiable: bool
    spec: TensorSpec
    operator: str
    operand: int
    path: tuple[str, ...]

    @property
    def operands(self) -> tuple[Ref, ...]:
        """The values that it takes."""
        return (self.value,)

    @property
    def parts(self) -> tuple[Redistribute, ...]:
        """The redistributions that its collectives carry: itself."""
        return (self,)

    @property
    def collectives(self) -> tuple[Step, ...]:
        """The steps that send something, forward and then backward."""
        steps = (*self.forward, *self.backward) if self.differentiable else self.forward
        return tuple(step for step in steps if step.kind not in LOCAL)


@dataclass(frozen=True)
class Fused:
    """Redistributions that do not depend on one another, with the same collectives over the same axes, forward and
    backward: every collective is called once for all of them. `Ref(id, k)` is the result of `parts[k]`."""

    id: str
    parts: tuple[Redistribute, ...]
    path: tuple[str, ...]

    @property
    def operands(self) -> tuple[Ref, ...]:
        """The values that it takes."""
        return tuple(part.value for part in self.parts)

    @property
    def operator(self) -> str:
        """The operator that needs the first of them."""
        return self.parts[0].operator

    @property
    def differentiable(self) -> bool:
        return self.parts[0].differentiable


@dataclass(frozen=True)
class Cooperate(Compute):
    """A Compute whose target, a cooperative local function, communicates itself.

    `channels` say what it sends: the steps of each part's `forward` and `backward` are equal, as many as it sends in
    that direction, all parts of a channel at once.
    """

    channels: tuple[Fused, ...] = ()


@dataclass(frozen=True)
class Copy:
    """Copy `value` to the host, or else to the device, for `operator` (empty: an output); its gradient comes back."""

    id: str
    value: Ref
    host: bool
    operator: str
    path: tuple[str, ...]

    @property
    def operands(self) -> tuple[Ref, ...]:
        """The values that it takes."""
        return (self.value,)


@dataclass(frozen=True)
class Start:
    """Begin to carry out `of`; what it sends is under way until its `Wait`."""

    id: str
    of: Redistribute | Fused
    path: tuple[str, ...]

    @property
    def operands(self) -> tuple[Ref, ...]:
        """The values that it takes."""
        return self.of.operands

    @property
    def operator(self) -> str:
        """The operator that needs it."""
        return self.of.operator


@dataclass(frozen=True)
class Wait:
    """The results of `of`, which the Start `start` launched, under the id of `of`. Every Start has one Wait."""

    id: str
    start: str
    of: Redistribute | Fused
    path: tuple[str, ...]

    @property
    def operands(self) -> tuple[Ref, ...]:
        """The values that it takes."""
        return (Ref(self.start),)

    @property
    def operator(self) -> str:
        """The operator that needs it."""
        return self.of.operator


Instruction = Compute | Redistribute | Fused | Copy | Start | Wait


def rewired(instruction: Compute | Redistribute | Copy, change: Callable[[Ref], Ref]) -> Instruction:
    """An instruction with `change` applied to every value that it takes."""
    if isinstance(instruction, Compute):
        return with_refs(instruction, change)
    return replace(instruction, value=change(instruction.value))


CARRYING = (Redistribute, Fused, Start, Wait, Cooperate)
"""Instructions that communicate."""


@dataclass(frozen=True)
class Program(Memo):
    """What every rank runs. `layouts` gives each source's layout by id; `reductions` the axes over which a trainable
    parameter's gradient must still be added after backward, by name; `loss_axes` those over which the returned loss
    must still be added; `updates` the slice that is written into each written buffer, by the buffer's id, when all
    instructions are done. `recompute` says which modules are run again in backward; `replicas` over which axes ranks
    hold the same of a value, for the values whose stored copies are to be sliced; `batch_splits` gives, for operators
    that run once per slice of the batch, the operator's name in the model and the index of the slice, by name.
    `without_gradient` are trainable parameters to which no gradient comes back, such as a threshold;
    `optional_outputs` those outputs of a pipeline's stage for which a step may send back none."""

    mesh: Mesh
    sources: tuple[Source, ...]
    layouts: dict[str, Layout]
    instructions: tuple[Instruction, ...]
    outputs: tuple[Ref, ...]
    reductions: dict[str, tuple[str, ...]]
    parameter_order: tuple[str, ...]
    random: bool
    loss_axes: tuple[str, ...] = ()
    updates: tuple[tuple[str, Ref], ...] = ()
    recompute: Recompute | None = None
    replicas: Mapping[Ref, tuple[str, ...]] = field(default_factory=dict)
    batch_splits: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    without_gradient: frozenset[str] = frozenset()
    optional_outputs: frozenset[Ref] = frozenset()

    def with_instructions(self, instructions: Sequence[Instruction], change: Callable[[Ref], Ref]) -> Program:
        """The same with other instructions, and with `change` applied to the values that leave the program."""
        updates = tuple((buffer, change(value)) for buffer, value in self.updates)
        outputs = tuple(map(change, self.outputs))
        optional = frozenset(map(change, self.optional_outputs))
        return replace(
            self, instructions=tuple(instructions), outputs=outputs, updates=updates, optional_outputs=optional
        )

    @cached_property
    def inputs(self) -> tuple[Source, ...]:
        """The entries of a batch, in their order."""
        return tuple(source for source in self.sources if source.kind == "input")

    @cached_property
    def parameters(self) -> tuple[Source, ...]:
        """The sources that are parameters."""
        return tuple(source for source in self.sources if source.kind == "parameter")

    @cached_property
    def tensors(self) -> dict[str, Source]:
        """Parameters, buffers and constants by name, which may be that of a batch entry, too."""
        return {source.name: source for source in self.sources if source.kind != "input"}

    @cached_property
    def redistributions(self) -> tuple[Redistribute, ...]:
        """All of them, also those that are parts of a `Fused` or of a channel, or have a `Start` and a `Wait`."""
        return tuple(part for carried in self._carried for part in carried.parts)

    @cached_property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """The sets of mesh axes over which ranks communicate, each once; for `Communicator`."""
        steps = [step.axes for one in self.redistributions for step in one.collectives]
        return tuple(dict.fromkeys([*steps, *self.replicas.values(), self.loss_axes]))

    @property
    def _carried(self) -> Iterator[Redistribute | Fused]:
        for step in self.instructions:
            if isinstance(step, Redistribute | Fused):
                yield step
            elif isinstance(step, Wait):
                yield step.of
            elif isinstance(step, Cooperate):
                yield from step.channels

    @cached_property
    def trainable_names(self) -> tuple[str, ...]:
        """The trainable parameters on which the loss depends, in the model's order. The others have no gradient, and so
        no optimizer touches them, whatever its weight decay (as in eager torch)."""
        trainable = self._names(self._reached(*WITHOUT_GRADIENT))
        return tuple(name for name in dict.fromkeys([*self.parameter_order, *self.reductions]) if name in trainable)

    @cached_property
    def optional(self) -> frozenset[str]:
        """The ids of values that a step may leave without a gradient: all that uses them goes through modules that
        decide by values, such as experts that no token chooses. All ranks of the mesh make the same
        decisions."""
        deciding = any(isinstance(one, Compute) and one.target.startswith(DECIDING) for one in self.instructions)
        if not deciding and not self.optional_outputs:
            return frozenset()
        return self._reached(*WITHOUT_GRADIENT) - self._reached(*WITHOUT_GRADIENT, DECIDING)

    @cached_property
    def optional_names(self) -> frozenset[str]:
        """The trainable parameters among the `optional` values. In a step without their gradient no optimizer touches
        them, as in eager torch."""
        return self._names(self.optional)

    def _names(self, values: frozenset[str]) -> frozenset[str]:
        """The trainable parameters among the values of these ids."""
        parameters = (source for source in self.sources if source.kind == "parameter" and source.trainable)
        return frozenset(one.name for one in parameters if one.id in values) - self.without_gradient

    def _reached(self, *without: str) -> frozenset[str]:
        """The ids of the values from which the outputs are made, but for what targets that begin so take."""
        later: Collection[Ref] = self.optional_outputs if DECIDING in without else ()
        reached = {ref.id for ref in self.outputs if ref not in later}
        for step in reversed(self.instructions):
            if step.id in reached and not (isinstance(step, Compute) and step.target.startswith(without)):
                reached.update(ref.id for ref in step.operands)
        return frozenset(reached)

    @cached_property
    def calls(self) -> Counter[str]:
        """The number of calls of each collective by a rank in one forward and backward."""
        return Counter(step.kind for carried in self._carried for step in carried.parts[0].collectives)


@dataclass(frozen=True)
class LoweringOptions:
    """How to lower.

    Attributes:
        exact: repeat the random numbers of one device.
        sharded_optimizer: leave the gradient reduction of complete replica groups to ZeRO, with the factor (world size
            / complete replicas) that its averaging over the world undoes.
        partial_loss: return the loss as a partial sum, so that backward need not wait for its reduction.
        wide_sums: ranks reduce results below fp32 in fp32.
        ring: keys and values that are sliced with the queries travel around a ring instead of being gathered.
    """

    exact: bool = False
    sharded_optimizer: bool = False
    partial_loss: bool = False
    wide_sums: bool = True
    ring: bool = False


DEFAULT_OPTIONS = LoweringOptions()
