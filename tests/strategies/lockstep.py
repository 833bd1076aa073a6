"""All stages of a pipeline in one process: a simulation per stage, chained as the schedule says.

It runs the stages' programs on the values that real stages would send, so parity here is parity there. Stages of one
group of ranks share the slices of their parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from strategies.core.graph import Ref
from strategies.core.program import DEFAULT_OPTIONS, LoweringOptions
from strategies.lowering.pipeline import Stage, stage_programs
from strategies.lowering.pipeline_schedule import BACKWARD, FORWARD, WEIGHT, Schedule, in_one_process, stages_of
from strategies.runtime.simulate import Simulation, shard
from strategies.runtime.split_backward import DeferredBackward, backward_to

Pieces = list[list[Tensor]]
"""Values, each as one tensor per rank."""


class Lockstep:
    """Runs `stages` on simulated ranks, those of one of `owners` together. `tensors` are parameters, buffers and
    constants by name; `batches` the micro-batches, each its entries by name."""

    def __init__(
        self,
        stages: Sequence[Stage],
        tensors: Mapping[str, Tensor],
        batches: Sequence[Mapping[str, Tensor]],
        options: LoweringOptions = DEFAULT_OPTIONS,
        *,
        owners: Sequence[int] = (),
    ) -> None:
        self.stages, self.batches, self.owners = stages, batches, owners or range(len(stages))
        self.simulations: list[Simulation] = []
        for stage, program in zip(stages, stage_programs(stages, self.owners, options), strict=True):
            empty = {
                source.name: torch.zeros(source.spec.shape, dtype=getattr(torch, source.spec.dtype))
                for source in program.sources
                if source.id in stage.receives
            }
            simulation = Simulation(program, {**tensors, **batches[0], **empty})
            for number in stages_of(self.owners[stage.number], self.owners[: len(self.simulations)]):
                other = self.simulations[number]
                for source in program.sources:
                    if source.kind != "input" and Ref(source.id) in other.slices:
                        simulation.slices[Ref(source.id)] = other.slices[Ref(source.id)]
            self.simulations.append(simulation)

    def step(self, schedule: Schedule, keys: Sequence[int]) -> float:
        """One training step over all micro-batches, with a random key each; returns the mean loss. `gradients` has the
        gradients afterwards."""
        self.received: dict[tuple[int, int], Pieces] = {}
        self.made: dict[tuple[int, int], Pieces] = {}
        later: dict[tuple[int, int], DeferredBackward] = {}
        total, last = 0.0, len(self.stages) - 1
        for action in in_one_process(schedule):
            at = action.stage, action.micro_batch
            if action.computation == FORWARD:
                self._forward(*at, keys[action.micro_batch])
                if action.stage == last:
                    total += self.made[at][0][0].item()
            elif action.computation == WEIGHT:
                later.pop(at)()
            else:
                outputs, gradients = self._returned(*at)
                if action.computation == BACKWARD:
                    torch.autograd.backward(outputs, gradients)
                else:
                    inputs = [piece for pieces in self.received[at] for piece in pieces if piece.requires_grad]
                    later[at] = backward_to(inputs, self._parameters(action.stage), outputs, gradients)
        return total / len(self.batches)

    def _forward(self, number: int, micro_batch: int, key: int) -> None:
        stage, simulation = self.stages[number], self.simulations[number]
        for source in simulation.program.sources:
            if source.kind == "input" and source.id not in stage.receives:
                entry = self.batches[micro_batch][source.name]
                layout = simulation.program.layouts[source.id]
                simulation.slices[Ref(source.id)] = shard(entry, layout, simulation.mesh)
        inputs = [[piece.detach() for piece in pieces] for pieces in self.made.get((number - 1, micro_batch), [])]
        for id, pieces, trains in zip(stage.receives, inputs, stage.trainable, strict=True):
            simulation.slices[Ref(id)] = [piece.requires_grad_(trains) for piece in pieces]
        self.received[number, micro_batch] = inputs
        self.made[number, micro_batch] = simulation.run(key)

    def _returned(self, number: int, micro_batch: int) -> tuple[list[Tensor], list[Tensor]]:
        """The outputs of a stage to which gradients come back, and these."""
        made = self.made[number, micro_batch]
        if number == len(self.stages) - 1:
            return made[0], [torch.full_like(loss, 1 / len(self.batches)) for loss in made[0]]
        pairs = [
            (output, torch.zeros_like(piece) if piece.grad is None else piece.grad)
            for outputs, pieces in zip(made, self.received[number + 1, micro_batch], strict=True)
            for output, piece in zip(outputs, pieces, strict=True)
            if piece.requires_grad
        ]
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]

    def _parameters(self, number: int) -> list[Tensor]:
        simulation = self.simulations[number]
        sources = [s for s in simulation.program.sources if s.trainable and s.kind == "parameter"]
        return [piece for source in sources for piece in simulation.slices[Ref(source.id)]]

    def gradients(self) -> dict[str, Tensor]:
        """Unsharded gradients; those of a parameter that several groups use are summed."""
        found: dict[str, Tensor] = {}
        for group in {*self.owners}:
            own: dict[str, Tensor] = {}
            for number in stages_of(group, self.owners):
                own |= self.simulations[number].gradients()
            for name, gradient in own.items():
                found[name] = found[name] + gradient if name in found else gradient
        return found

    def buffers(self) -> dict[str, Tensor]:
        """Every buffer, unsharded, by name."""
        return {name: value for simulation in self.simulations for name, value in simulation.buffers().items()}
