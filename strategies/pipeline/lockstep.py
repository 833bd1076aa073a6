"""All stages of a pipeline in one process: a simulation per stage, chained as the schedule says.

It runs the stages' programs on the values that real stages would send, so parity here is parity there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from strategies.engine.lowering import lower
from strategies.engine.program import PLAIN, Options
from strategies.engine.simulate import Simulation, shard
from strategies.graph import Ref
from strategies.pipeline.cutting import Stage
from strategies.pipeline.schedule import FORWARD, Schedule, in_one_process


class Lockstep:
    """Runs `stages` on simulated ranks. `tensors` are parameters, buffers and constants by name; `batches` the
    micro-batches, each its entries by name."""

    def __init__(
        self,
        stages: Sequence[Stage],
        tensors: Mapping[str, Tensor],
        batches: Sequence[Mapping[str, Tensor]],
        options: Options = PLAIN,
    ) -> None:
        self.stages, self.batches = stages, batches
        self.simulations = []
        for stage in stages:
            program = lower(stage.graph, stage.plan, options, outputs=stage.sends, ordinals=stage.ordinals)
            empty = {
                source.name: torch.zeros(source.spec.shape, dtype=getattr(torch, source.spec.dtype))
                for source in program.sources
                if source.id in stage.receives
            }
            self.simulations.append(Simulation(program, {**tensors, **batches[0], **empty}))

    def step(self, schedule: Schedule, keys: Sequence[int]) -> float:
        """One training step over all micro-batches, with a random key each; returns the mean loss. `gradients` has the
        gradients afterwards."""
        received: dict[tuple[int, int], list[list[Tensor]]] = {}
        made: dict[tuple[int, int], list[list[Tensor]]] = {}
        total, last = 0.0, len(self.stages) - 1
        for number, action in in_one_process(schedule):
            stage, simulation, at = self.stages[number], self.simulations[number], (number, action.micro_batch)
            if action.way == FORWARD:
                for source in simulation.program.sources:
                    if source.kind == "input" and source.id not in stage.receives:
                        whole = self.batches[action.micro_batch][source.name]
                        layout = simulation.program.layouts[source.id]
                        simulation.slices[Ref(source.id)] = shard(whole, layout, simulation.mesh)
                inputs = [[piece.detach() for piece in pieces] for pieces in made.get((number - 1, at[1]), [])]
                for id, pieces, trains in zip(stage.receives, inputs, stage.trainable, strict=True):
                    simulation.slices[Ref(id)] = [piece.requires_grad_(trains) for piece in pieces]
                received[at], made[at] = inputs, simulation.run(keys[action.micro_batch])
                if number == last:
                    total += made[at][0][0].item()
            elif number == last:
                simulation.backward([loss / len(self.batches) for loss in made[at][0]])
            else:
                pairs = [
                    (output, torch.zeros_like(piece) if piece.grad is None else piece.grad)
                    for outputs, pieces in zip(made[at], received[number + 1, at[1]], strict=True)
                    for output, piece in zip(outputs, pieces, strict=True)
                    if piece.requires_grad
                ]
                torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        return total / len(self.batches)

    def gradients(self) -> dict[str, Tensor]:
        """Whole gradients; those of a parameter that several stages use are added."""
        found: dict[str, Tensor] = {}
        for simulation in self.simulations:
            for name, gradient in simulation.gradients().items():
                found[name] = found[name] + gradient if name in found else gradient
        return found

    def buffers(self) -> dict[str, Tensor]:
        """Every buffer, whole, by name."""
        return {name: value for simulation in self.simulations for name, value in simulation.buffers().items()}
