"""One rank's part of a pipeline: it runs its stages as the schedule says, and talks to its peers in the other groups.

Peers are the ranks of the same number in each group's mesh; they hold the same slices. Values go to the next stage and
gradients come back in the order of the schedule, each direction and each link over its own process group, so that none
can block another: sends never wait, and receives take what their neighbour sends in its order. What arrives before the
pass that needs it, for another stage of the rank, is kept until then, as is what one stage of the rank hands to the
next one, which is never sent. A message also shows how far its sender is, so what that has received is released.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from strategies.core.graph import Source
from strategies.core.program import Program
from strategies.lowering.pipeline import Stage
from strategies.lowering.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    Action,
    Schedule,
    owners_of,
    places_of,
    stages_of,
)
from strategies.runtime import flight_recorder
from strategies.runtime.peers import Peers
from strategies.runtime.split_backward import DeferredBackward, backward_to


class Gradients(Protocol):
    """What the optimizer's updates offer to a pipeline."""

    @property
    def loss_scale(self) -> Any:
        """The factor on the loss, as `value`, if there is one."""

    def collect(self) -> None:
        """Accumulate what a finished backward pass, or half of one, added to `grad` of the parameters."""


Load = Callable[[int], tuple[Sequence[Tensor], int]]
"""Number of the micro-batch -> its local entries and its random key."""


@dataclass(frozen=True)
class RankStage:
    """A stage as this rank runs it: `run` takes the batch's entries with the received values, and the random key."""

    stage: Stage
    program: Program
    run: Callable[[Sequence[Tensor], int], Any]
    learning: tuple[Tensor, ...] = ()
    """The parameters that may get a gradient here."""

    @property
    def received(self) -> list[tuple[Source, tuple[int, ...]]]:
        """What earlier stages send, with its local shape."""
        by_id = {source.id: source for source in self.program.sources}
        layouts, mesh = self.program.layouts, self.program.mesh
        return [(by_id[id], layouts[id].local_shape(by_id[id].spec.shape, mesh)) for id in self.stage.receives]

    @property
    def optional(self) -> list[bool]:
        """Which of the received values a step may leave without a gradient."""
        return [id in self.program.optional for id in self.stage.receives]

    def gradients(self, received: Sequence[Tensor]) -> list[Tensor | None]:
        """What goes back for received values after backward. None, where it is optional, and zeros are not the same to
        an optimizer with momentum or weight decay."""
        return [
            torch.zeros_like(value) if value.grad is None and not may else value.grad
            for value, may in zip(received, self.optional, strict=True)
            if value.requires_grad
        ]

    def outputs(self, entries: Sequence[Tensor], received: Sequence[Tensor], key: int) -> list[Tensor]:
        results = self.run([*entries, *received], key)
        return list(results) if isinstance(results, (tuple, list)) else [results]


class StageRunner:
    """Runs one group's part of a `schedule` on real ranks. `units` are its stages in training, `evaluations` by rows
    those of evaluation, `short` those of a short last micro-batch of an epoch; `parts` is the number of micro-batches
    of an optimizer step."""

    def __init__(
        self,
        peers: Peers,
        units: Sequence[RankStage],
        schedule: Schedule,
        parts: int,
        device: torch.device | str,
        evaluations: dict[int, list[RankStage]],
        short: Sequence[RankStage] = (),
    ) -> None:
        self.peers, self.schedule, self.parts, self.device = peers, schedule, parts, device
        self.units = {unit.stage.number: unit for unit in units}
        self.evaluations = evaluations
        self.short = {unit.stage.number: unit for unit in short}

    def loaded(self, micro_batches: int, *, equal: bool) -> list[int]:
        """The micro-batches of an optimizer step in the order in which `step`, or with unequal ones `one`, loads
        them."""
        if not equal:
            return [number for number in range(micro_batches) for _ in self.units]
        order = [action.micro_batch for action in self.schedule[self.peers.number] if action.computation == FORWARD]
        return [first + number for first in range(0, micro_batches, len({*order})) for number in order]

    def step(self, load: Load, updates: Gradients, shares: Sequence[float] | None = None) -> Tensor:
        """Run all micro-batches, which have these `shares` of the step's gradient, by default all the same. Returns the
        sum of this rank's losses as a double, each times its share if they are given; zero without the last stage."""
        return self._run(self.schedule, self.units, load, updates, shares, 1 / self.parts)

    def one(self, load: Load, updates: Gradients, share: float, *, short: bool) -> Tensor:
        """A step with one micro-batch alone, which has this share of the step's rows."""
        units = self.short if short else self.units
        alone = tuple(
            (
                *(Action(FORWARD, 0, stage) for stage in stages_of(group, self.peers.owners)),
                *(Action(BACKWARD, 0, stage) for stage in reversed(stages_of(group, self.peers.owners))),
            )
            for group in range(self.peers.count)
        )
        return self._run(alone, units, load, updates, None, share)

    def _run(
        self,
        schedule: Schedule,
        units: Mapping[int, RankStage],
        load: Load,
        updates: Gradients,
        shares: Sequence[float] | None,
        share: float,
    ) -> Tensor:
        arriving = {
            (ahead, group): deque(arrivals(schedule, group, self.peers.number, ahead=ahead))
            for ahead in (True, False)
            for group in range(self.peers.count)
        }
        early: dict[tuple[bool, tuple[int, int]], list[Any]] = {}
        places = places_of(schedule)

        def receive(at: tuple[int, int], ahead: bool) -> list[Any]:
            """The values or gradients of a pass; those that its neighbour has sent before are kept."""
            source = self.peers.owners[at[0] + (-1 if ahead else 1)]
            while (ahead, at) not in early:
                first = arriving[ahead, source].popleft()
                own = units[first[0]]
                early[ahead, first] = self._values(own, source) if ahead else self._gradients(own, made[first], source)
                self.peers.release(source, places[first[0] + (-1 if ahead else 1), first[1], ahead])
            return early.pop((ahead, at))

        received: dict[tuple[int, int], list[Tensor]] = {}
        made: dict[tuple[int, int], list[Tensor]] = {}
        later: dict[tuple[int, int], DeferredBackward] = {}
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        scale = updates.loss_scale
        factor = 1.0 if scale is None else scale.value

        def backward(action: Action, unit: RankStage) -> None:
            """A backward pass, or its first half. Nothing of it is alive behind it but what `later` needs."""
            at = action.stage, action.micro_batch
            inputs = received.pop(at)
            outputs = [output for output in made[at] if output.requires_grad]
            if self._last(unit):
                part = share if shares is None else shares[action.micro_batch]
                gradients: Sequence[Tensor | None] = [torch.full_like(one, factor * part) for one in outputs]
            else:
                gradients = receive(at, False)
            del made[at]
            pairs = [(output, one) for output, one in zip(outputs, gradients, strict=True) if one is not None]
            roots, present = [output for output, _ in pairs], [one for _, one in pairs]
            if action.computation == INPUT:
                learning = [value for value in inputs if value.requires_grad]
                later[at] = backward_to(learning, unit.learning, roots, present) if roots else _nothing
            elif roots:
                torch.autograd.backward(roots, present)
            updates.collect()
            if action.stage:
                back = unit.gradients(inputs)
                if action.stage - 1 in units:
                    early[False, (action.stage - 1, action.micro_batch)] = back
                else:
                    place = places[action.stage - 1, action.micro_batch, False]
                    self._send_back(back, unit, self.peers.owners[action.stage - 1], place)

        for action in schedule[self.peers.number]:
            at, unit = (action.stage, action.micro_batch), units[action.stage]
            if action.computation == FORWARD:
                received[at] = receive(at, True) if action.stage else []
                entries, key = load(action.micro_batch)
                made[at] = unit.outputs(entries, received[at], key)
                del entries  # what is not saved for backward is gone
                if not self._last(unit):
                    following = action.stage + 1
                    if following in units:
                        early[True, (following, action.micro_batch)] = self._handed(made[at], units[following])
                    else:
                        self._send_on(made[at], action.stage, places[following, action.micro_batch, True])
                elif shares is None:
                    total += made[at][0].detach().double()
                elif part := shares[action.micro_batch]:  # of nothing the mean is not a number
                    total += part * made[at][0].detach().double()
                continue
            flight_recorder.recorder.at(flight_recorder.BACKWARD)  # to load a micro-batch is forward
            if action.computation in (BACKWARD, INPUT):
                backward(action, unit)
            else:
                later.pop(at)()
                updates.collect()
        self.peers.finish()
        return total

    @torch.no_grad()
    def evaluate(self, rows: int, entries: Sequence[Tensor], key: int) -> list[Tensor]:
        """The results of the evaluation graph for a batch of `rows`, where the last stage is; elsewhere nothing."""
        results: list[Tensor] = []
        units = {unit.stage.number: unit for unit in self.evaluations[rows]}
        for number, unit in units.items():
            if number - 1 in units:
                received = self._handed(results, unit)
            else:
                received = self._values(unit, self.peers.owners[number - 1])
            results = unit.outputs(entries, received, key)
            if not self._last(unit) and number + 1 not in units:
                self._send_on(results, number)
        self.peers.finish()
        return results if self.peers.owners[-1] == self.peers.number else []

    def _last(self, unit: RankStage) -> bool:
        return not unit.stage.sends

    def _handed(self, values: Sequence[Tensor], unit: RankStage) -> list[Tensor]:
        """The results of a stage as the next one of this rank receives them."""
        pairs = zip(values, unit.received, strict=True)
        return [
            value.detach().contiguous().requires_grad_(source.trainable and torch.is_grad_enabled())
            for value, (source, _) in pairs
        ]

    def _send_on(self, values: Sequence[Tensor], number: int, taken: float = math.inf) -> None:
        for value in values:
            self.peers.send(value, self.peers.owners[number + 1], ahead=True, taken=taken)

    def _values(self, unit: RankStage, group: int) -> list[Tensor]:
        values = []
        for source, shape in unit.received:
            empty = torch.empty(shape, dtype=getattr(torch, source.spec.dtype), device=self.device)
            value = self.peers.receive(empty, group, ahead=True)
            values.append(value.requires_grad_(source.trainable and torch.is_grad_enabled()))
        return values

    def _send_back(self, gradients: Sequence[Tensor | None], unit: RankStage, group: int, taken: int) -> None:
        """Send the gradients of received values; where some may be missing, first a flag for each."""
        if any(unit.optional):
            flags = torch.tensor([one is not None for one in gradients], dtype=torch.uint8, device=self.device)
            self.peers.send(flags, group, ahead=False, taken=taken)
        for gradient in gradients:
            if gradient is not None:
                self.peers.send(gradient, group, ahead=False, taken=taken)

    def _gradients(self, unit: RankStage, made: Sequence[Tensor], group: int) -> list[Tensor | None]:
        """What the next stage sends for the results of a forward pass."""
        outputs = [output for output in made if output.requires_grad]
        present = [True] * len(outputs)
        if unit.program.optional_outputs:
            flags = torch.empty(len(outputs), dtype=torch.uint8, device=self.device)
            present = [flag == 1 for flag in self.peers.receive(flags, group, ahead=False).tolist()]
        like = [torch.empty_like(output, memory_format=torch.contiguous_format) for output in outputs]
        return [
            self.peers.receive(gradient, group, ahead=False) if sent else None
            for gradient, sent in zip(like, present, strict=True)
        ]


def _nothing() -> None:
    """The second half of a backward to which no gradient came."""


def arrivals(schedule: Schedule, source: int, target: int, *, ahead: bool) -> list[tuple[int, int]]:
    """What a group sends to another one, in its order: the stages and micro-batches of the passes that need it."""
    owners, found = owners_of(schedule), []
    computations, step = ((FORWARD,), 1) if ahead else ((BACKWARD, INPUT), -1)
    for action in schedule[source] if source != target else ():
        stage = action.stage + step
        if action.computation in computations and 0 <= stage < len(owners) and owners[stage] == target:
            found.append((stage, action.micro_batch))
    return found
