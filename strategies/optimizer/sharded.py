"""Optimizer parallel of ZeRO without DeepSpeed: optimizer states, gradients and parameters in equal parts.

A rank owns one part of every bucket (`sharding`). When backward has completed the gradients of a bucket, a
reduce-scatter leaves this rank's part of their sum, while backward still computes others; at stage 1 only that of the
last micro-batch. The optimizer works on the parts, on masters in fp32 where weights have less than 32 bits. At stages 1
and 2 parameters stay complete, and are gathered after an update; at stage 3 forward and backward gather a bucket where
it is used (`runtime.gathering`), unless it stays complete as well. Lowering with `sharded_optimizer` multiplies what
flows into each parameter so that the sum over its replicas, divided by the number of ranks, is the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strategies.core.program import Program
from strategies.core.steps import REDUCE_SCATTER
from strategies.optimizer.kernels import choose_for_device, groups_by_parameter
from strategies.optimizer.loss_scale import LossScale
from strategies.optimizer.own_updates import OwnUpdates
from strategies.optimizer.sharding import FROZEN, Member, ShardedBucket, Unit, gradient_dtype, sharded_buckets
from strategies.optimizer.state import OptimizerScalars, States, check_shape, groups_of, is_scalar, placed, set_groups
from strategies.optimizer.updates import Groups, OptimizerFactory, check_optimizer, mark
from strategies.optimizer.without_gradient import WithoutGradient
from strategies.optimizer.zero.partition import Range
from strategies.runtime.communicator import Communicator
from strategies.runtime.flight_recorder import PLACE, Awaited, recorder
from strategies.runtime.gathering import GatheredParameters, Gathering
from strategies.runtime.shards import MODEL, OPTIMIZER, KnownShards, Shard, Shards, of_range


class _Sums:
    """The gradients of one bucket: as they come from backward, on their way, and this rank's part of their sum."""

    def __init__(self, bucket: ShardedBucket, like: Tensor, communicator: Communicator, group: Any) -> None:
        self.bucket, self._communicator, self._group = bucket, communicator, group
        self._dtype, self._device = getattr(torch, gradient_dtype(bucket)), like.device
        self._place = recorder.place(f"the gradients of {', '.join(member.name for member in bucket.trained)}")
        self.missing = {member.name for member in bucket.trained}
        self._flat: Tensor | None = None
        self._filled: set[str] = set()
        self._running: tuple[Awaited | None, Tensor, Tensor] | None = None
        self.part: Tensor | None = None

    def arrived(self, member: Member, parameter: nn.Parameter) -> None:
        """Backward has completed a gradient of one micro-batch; it moves here, beside or onto those before."""
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        own = self._of(member)
        if member.name in self._filled:
            own.add_(gradient.reshape(-1))
        else:
            own.view(gradient.shape).copy_(gradient)
            self._filled.add(member.name)
        self.missing.discard(member.name)

    def _of(self, member: Member) -> Tensor:
        """The elements of a gradient."""
        if self._flat is None:
            self._flat = torch.zeros(self.bucket.elements, dtype=self._dtype, device=self._device)
        return self._flat[member.first : member.first + member.elements]

    def sum_of(self, member: Member) -> Tensor:
        """What has arrived of a gradient, made of zeros where nothing came back."""
        self._filled.add(member.name)
        return self._of(member)

    @property
    def waits(self) -> bool:
        """Whether something has arrived that no launch has taken."""
        return self._flat is not None

    def pause(self) -> None:
        """The end of a micro-batch after which nothing is added up between ranks."""
        self.missing = {member.name for member in self.bucket.trained}

    def launch(self) -> None:
        """Begin to add up what has arrived; zeros where nothing has, but may have on other ranks."""
        self.pause()
        if any(member.optional for member in self.bucket.members):
            self._of(self.bucket.members[0])
        flat, self._flat = self._flat, None
        self._filled.clear()
        if flat is None:
            return
        if self.bucket.ranks == 1:
            self._running = None, flat, flat
            return
        recorder.cells[PLACE] = self._place
        if flat.device.type == "cpu":  # gloo's own reduce-scatter takes three times as long
            received = torch.empty_like(flat)
            work = self._communicator.exchange(received, flat, None, None, self._group, later=True)
        else:
            received = flat.new_empty(self.bucket.part)
            work = self._communicator.scatter(received, flat, self._group, later=True)
        self._communicator.count(REDUCE_SCATTER, (self.bucket.ranks - 1) * self.bucket.part, flat)
        self._running = work, flat, received

    def finish(self) -> None:
        """Wait for what was launched, and add it to the sum of the micro-batches."""
        if self._running is None:
            return
        work, _, received = self._running
        if work is not None:
            work.wait()
        self._running = None
        part = received if received.numel() == self.bucket.part else received.view(-1, self.bucket.part).sum(0)
        self.part = part if self.part is None else self.part.add_(part)

    def zeros(self) -> Tensor:
        """The sum, made of zeros where nothing came back."""
        if self.part is None:
            self.part = torch.zeros(self.bucket.part, dtype=self._dtype, device=self._device)
        return self.part


@dataclass(frozen=True)
class _Updated:
    """What the optimizer updates as one tensor, `holder`: the `ranges` of a unit in this rank's part of a bucket, its
    `number`, from `start` on."""

    number: int
    unit: Unit
    ranges: Sequence[Range]
    start: int
    holder: nn.Parameter

    @property
    def group(self) -> int:
        """The number of the optimizer's group."""
        return self.unit[0]


class ShardedUpdates(OwnUpdates):
    """Stages 1 to 3; see `Updates` for the `shared` arguments.

    Args:
        optimizer_factory: makes a torch optimizer from torch's parameter groups; it updates slices of flat tensors.
        stage: 1 to 3; in a pipeline 1.
        scale: the loss scale in fp16.
        limit, complete: see `sharded_buckets`.
        overlap: take gradients as they come, and add them up during backward; stage 3 always does.
        gathering: gathers the buckets of stage 3.
    """

    def __init__(
        self,
        module: nn.Module,
        program: Program,
        communicator: Communicator,
        optimizer_factory: OptimizerFactory,
        groups: Groups,
        *,
        stage: int = 3,
        scale: LossScale | None = None,
        limit: int | None = None,
        complete: int = 0,
        overlap: bool = True,
        gathering: Callable[[Iterable[GatheredParameters]], Gathering] = Gathering,
        **shared: Any,
    ) -> None:
        super().__init__(module, program, communicator, groups, scale=scale, **shared)
        mesh, self._stage, self._overlaps = program.mesh, stage, stage == 3 or (overlap and self._peers is None)
        self._members = [names for names, _ in self._groups]
        self._sources = {source.name: source for source in program.parameters}
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        buckets = sharded_buckets(program, self._members, limit, stage, complete)
        axes = dict.fromkeys(bucket.axes for bucket in buckets if bucket.axes)
        own = communicator.own_group if self._overlaps else communicator.group
        gather_groups, reduce_groups = {names: own(names) for names in axes}, {names: own(names) for names in axes}
        self._buckets, self._gathered, self._sums, self._masters = buckets, [], [], []
        self._index = [mesh.index(communicator.rank, bucket.axes) if bucket.axes else 0 for bucket in buckets]
        self._at: dict[str, tuple[int, Member]] = {}
        for number, (bucket, index) in enumerate(zip(buckets, self._index, strict=True)):
            self._at.update({member.name: (number, member) for member in bucket.members})
            flat = self._complete(bucket) if bucket.stay else None
            if flat is None:
                part = self._part_of(bucket, index)
            else:
                part = flat[index * bucket.part : (index + 1) * bucket.part]
            place = recorder.place(f"the parameters {', '.join(member.name for member in bucket.members)}")
            placed_ = [(self._parameters[member.name], member.first) for member in bucket.members]
            group = gather_groups.get(bucket.axes)
            self._gathered.append(GatheredParameters(placed_, part, bucket.ranks, communicator, group, place, flat))
            self._sums.append(_Sums(bucket, part, communicator, reduce_groups.get(bucket.axes)))
            wide = getattr(torch, gradient_dtype(bucket))
            self._masters.append(part if part.dtype == wide else part.to(wide))
        self._updated: list[_Updated] = []
        for number, bucket in enumerate(buckets):
            for unit, ranges in bucket.of_units(self._index[number]).items():
                if unit[0] != FROZEN:
                    start = ranges[0].position if ranges else 0
                    stop = ranges[-1].position + ranges[-1].count if ranges else 0
                    holder = nn.Parameter(self._masters[number][start:stop])
                    self._updated.append(_Updated(number, unit, ranges, start, holder))
        matrices = [{"params": [nn.Parameter(torch.zeros(1, 1))], **options} for _, options in self._groups]
        check_optimizer(optimizer_factory(matrices), program, stage)  # some cannot be made of anything flat
        self._optimizer = optimizer_factory(
            [
                {"params": [one.holder for one in self._updated if one.group == number], **options}
                for number, (_, options) in enumerate(self._groups)
            ]
        )
        choose_for_device(self._optimizer)
        self._without = WithoutGradient(program, communicator, self._masters[0].device)
        self._gathering = gathering(self._gathered)
        evaluation = self.evaluation
        evaluations = list(evaluation.children()) if isinstance(evaluation, nn.ModuleDict) else [evaluation]
        for root in (module, self._short, *evaluations) if stage == 3 else ():
            if root is not None:
                self._gathering.attach(root)
        self._hooks = [
            self._parameters[member.name].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._arrived, number, member)
            )
            for number, bucket in enumerate(buckets)
            for member in (bucket.trained if self._overlaps else ())
        ]
        self._next = len(buckets) - 1
        self._micro_batches, self._last, self._known_shards = 0, stage > 1, KnownShards()

    def _complete(self, bucket: ShardedBucket) -> Tensor:
        """The values that the parameters have now."""
        first = self._parameters[bucket.members[0].name]
        flat = torch.zeros(bucket.elements, dtype=first.dtype, device=first.device)
        for member in bucket.members:
            own = flat[member.first : member.first + member.elements]
            own.copy_(self._parameters[member.name].detach().reshape(-1))
        return flat

    def _part_of(self, bucket: ShardedBucket, index: int) -> Tensor:
        """This rank's part of the values that the parameters have now."""
        first = self._parameters[bucket.members[0].name]
        part = torch.zeros(bucket.part, dtype=first.dtype, device=first.device)
        for one in bucket.ranges(index):
            value = self._parameters[bucket.members[one.member].name].detach().reshape(-1)
            one.of(part).copy_(value[one.first : one.first + one.count])
        return part

    def backward(self, loss: Tensor, share: float | None = None, left: int | None = None) -> None:
        self._micro_batches += 1
        if self._stage == 1 and self._overlaps:
            self._last = self._micro_batches == self._accumulate if left is None else not left
        self._divided(loss, share).backward()  # type: ignore[no-untyped-call]
        self.finish()

    def finish(self) -> None:
        """The end of the backward of one micro-batch: add up the rest, and let go of parameters that were gathered. At
        stage 1 the sums of earlier micro-batches stay here."""
        if not self._overlaps:
            self._take()
        if not self._last:
            for sums in self._sums:
                sums.pause()
            return
        while self._next >= 0:
            self._launch()
        for sums in self._sums:
            sums.finish()
        self._next = len(self._sums) - 1
        self._gathering.finish()

    def _arrived(self, number: int, member: Member, parameter: nn.Parameter) -> None:
        """Buckets leave in one order, the reverse of forward, whatever the order in which they are complete."""
        self._without.came(member.name)
        self._sums[number].arrived(member, parameter)
        while self._last and self._next >= 0 and not self._sums[self._next].missing:
            self._launch()

    def _take(self) -> None:
        """The gradients that backward, or another in its place, has left in the parameters."""
        for sums in self._sums:
            for member in sums.bucket.trained:
                if (parameter := self._parameters[member.name]).grad is not None:
                    self._without.came(member.name)
                    sums.arrived(member, parameter)

    def _launch(self) -> None:
        self._sums[self._next].launch()
        if self._next + 1 < len(self._sums):  # no more than one is on its way
            self._sums[self._next + 1].finish()
        self._next -= 1

    def collect(self) -> None:
        self.finish()

    def reduce(self) -> None:
        if self._peers is not None:
            own = {name: self._at[name] for name in self._peers.copies}
            for name in own:
                self._without.came(name)
            self._peers.add_shared({name: self._sums[number].sum_of(member) for name, (number, member) in own.items()})
        if self._stage == 1 and any(sums.waits for sums in self._sums):
            self._last = True
            self.finish()
        parts = [sums.part for sums in self._sums if sums.part is not None]
        if parts:
            factor = self._program.mesh.size * (1.0 if self._scale is None else self._scale.value)
            torch._foreach_div_(parts, factor)

    def _present(self) -> list[Tensor]:
        return [gradient for one in self._updated if (gradient := one.holder.grad) is not None]

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        complete: tuple[int, Tensor, int] | None = None
        for name in self._program.reductions:
            number, member = self._at[name]
            if complete is None or complete[0] != number:
                self._change(complete)
                flat = self._complete_gradient(number)
                complete = number, flat, flat._version
            yield name, complete[1][member.first : member.first + member.elements].view(self._shapes[name])
        self._change(complete)

    def _complete_gradient(self, number: int) -> Tensor:
        """The gradient of a bucket from the parts of all ranks."""
        bucket, part = self._buckets[number], self._sums[number].part
        if part is None:
            return torch.zeros(bucket.elements, dtype=self._masters[number].dtype, device=self._masters[number].device)
        if bucket.ranks == 1:
            return part
        flat = part.new_empty(bucket.elements)
        self._communicator.gather(flat, part, self._communicator.group(bucket.axes))
        return flat

    def _change(self, complete: tuple[int, Tensor, int] | None) -> None:
        """Take over into this rank's part what a caller has written into the gradient of a bucket."""
        if complete is None:
            return
        number, flat, version = complete
        part, index = self._sums[number].part, self._index[number]
        if flat._version != version and part is not None and flat is not part:
            part.copy_(flat[index * part.numel() : (index + 1) * part.numel()])

    def update(self, measure: bool = True) -> float | None:
        self._micro_batches, self._last = 0, self._stage > 1
        without = self._without.agreed()
        for one in self._updated:
            part = self._sums[one.number].part
            if part is not None and one.unit[1] not in without:
                one.holder.grad = part[one.start : one.start + one.holder.numel()]
        return super().update(measure)

    def skip(self, micro_batches: int) -> None:
        """Count micro-batches as done, with gradients of zero."""
        self._micro_batches += micro_batches
        for sums in self._sums:
            if self._stage > 1 and sums.bucket.trained:
                sums.zeros()
            for member in sums.bucket.trained if self._stage == 1 else ():
                sums.sum_of(member)

    def forget(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._without.forget()
        for sums in self._sums:
            sums.part = None

    def _squares(self) -> Tensor:
        """Each element is on one rank."""
        if not (gradients := self._present() if self._peers is None else self._led()):
            return torch.zeros((), dtype=torch.float64, device=self._masters[0].device)
        return torch.stack(torch._foreach_norm(gradients)).double().square().sum()

    def _led(self) -> list[Tensor]:
        """`_present`, without what an earlier group of a pipeline counts."""
        return [
            gradient[one.position - updated.start :][: one.count]
            for updated in self._updated
            if (gradient := updated.holder.grad) is not None
            for one in updated.ranges
            if self._buckets[updated.number].members[one.member].name not in self._follows
        ]

    def weight(self, name: str) -> Tensor:
        number, _ = self._at[name]
        gathered = self._gathered[number]
        if not gathered.gathers:
            return self._parameters[name].detach()
        gathered.gather()
        value = self._parameters[name].detach().clone()
        gathered.release()
        return value

    def replaced(self, name: str) -> bool:
        """Whether something else has given a parameter other memory."""
        return self._gathered[self._at[name][0]].replaced(self._parameters[name])

    def pieces(self, write: bool = False) -> Iterator[Shards]:
        found: dict[str, list[Shard]] = {}
        for number, (bucket, index) in enumerate(zip(self._buckets, self._index, strict=True)):
            for one in bucket.ranges(index):
                if write or bucket.members[one.member].name not in self._follows:
                    self._add_piece(found, MODEL, bucket.members[one.member].name, one, self._masters[number])
        for updated in self._updated:
            holder = updated.holder
            for state, value in self._optimizer.state.get(holder, {}).items():
                if not is_scalar(value, holder):
                    check_shape(self._optimizer, state, value, "the parameters", value.shape == holder.shape)
                    for one in updated.ranges:
                        name = self._buckets[updated.number].members[one.member].name
                        moved = Range(one.member, one.first, one.position - updated.start, one.count)
                        if write or name not in self._follows:
                            self._add_piece(found, f"{OPTIMIZER}{state}/", name, moved, value)
        yield found

    def _add_piece(self, found: dict[str, list[Shard]], kind: str, name: str, one: Range, flat: Tensor) -> None:
        key = kind + name
        found[key] = self._known_shards.of(key, flat, partial(self._made, name, one, flat))

    def _made(self, name: str, one: Range, flat: Tensor) -> list[Shard]:
        """The shards of a range of a parameter or of one of its states."""
        source, mesh = self._sources[name], self._program.mesh
        shape, layout = source.spec.shape, self._program.layouts[source.id]
        blocks = layout.blocks(shape, mesh, self._communicator.rank)
        return of_range(shape, blocks, layout.local_shape(shape, mesh), one.first, one.of(flat))

    def _names(self, updated: _Updated) -> list[str]:
        """The parameters that are updated with one another, on any rank."""
        return [member.name for member in self._buckets[updated.number].members if member.unit == updated.unit]

    def plain(self) -> OptimizerScalars:
        plain = OptimizerScalars(groups_of(self._optimizer, self._members))
        for one in self._updated:
            state = self._optimizer.state.get(one.holder, {})
            scalars = {key: value for key, value in state.items() if is_scalar(value, one.holder)}
            plain.scalars |= dict.fromkeys(self._names(one), scalars)
        if self._scale is not None:
            plain.loss_scale = asdict(self._scale)
        return plain

    def begin(self, states: States, plain: OptimizerScalars) -> None:
        set_groups(self._optimizer, self._members, plain)
        if self._scale is not None and self._scale.adapts and plain.loss_scale is not None:
            self._scale = LossScale(**plain.loss_scale | {"adapts": True})
        groups = groups_by_parameter(self._optimizer)
        for one in self._updated:
            holder, names = one.holder, self._names(one)
            known = next((plain.scalars[name] for name in names if plain.scalars.get(name)), {})
            found = {key: placed(key, value, holder, groups[holder]) for key, value in known.items()}
            for key, entries in states.items():
                stored = [entries[name] for name in names if name in entries]
                if stored:
                    dtype = holder.dtype if stored[0].like_weights else stored[0].dtype
                    found[key] = torch.zeros_like(holder, dtype=dtype, requires_grad=False)
            self._optimizer.state[holder] = found

    def loaded(self) -> None:
        self._follow(range(len(self._buckets)))

    def updated(self) -> None:
        self._follow([number for number, bucket in enumerate(self._buckets) if bucket.trained])
        if self._peers is not None:  # equal numbers at other places of a flat tensor may be rounded differently
            self._peers.share_weights({name: self._parameters[name].detach() for name in self._peers.copies})

    def _follow(self, numbers: Iterable[int]) -> None:
        """Weights below 32 bits follow from their masters, and those that stay complete from all parts."""
        works = []
        with torch.no_grad():
            for number in numbers:
                gathered, master = self._gathered[number], self._masters[number]
                if gathered.part is not master:
                    gathered.part.copy_(master)
                works.append(gathered.spread())
        for work in works:
            if work is not None:
                work.wait()

    def marks(self) -> list[tuple[int, int]]:
        found = [mark(one.holder) for one in self._updated]
        for bucket, gathered, master in zip(self._buckets, self._gathered, self._masters, strict=True):
            shared = gathered.part is master  # then what all ranks write into complete parameters is the optimizer's
            for member in bucket.members:
                version, memory = mark(self._parameters[member.name])
                found.append((0 if shared else version, memory))
        return found

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self.forget()
