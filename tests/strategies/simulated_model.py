"""An entire model captured, planned and run on simulated ranks, compared with eager: loss and every gradient in
fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from strategies.capture import Captured, Objective, capture, loss_in
from strategies.core.graph import OperatorGraph
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import LoweringOptions, Program
from strategies.lowering.lowering import lower
from strategies.rules import rule_of
from strategies.runtime.simulate import Simulation

MESH = Mesh((("a", 2), ("b", 2)))
TOLERANCE = 1e-10


class Model:
    """A model with its loss and one batch, in double precision; the capture and the eager truth.

    `batch` is a tuple (the last entry is the target if there is a loss) or a dict (`targets` names what only the loss
    takes).
    """

    def __init__(
        self,
        net: nn.Module,
        loss: nn.Module | None,
        batch: Sequence[Tensor] | dict[str, Tensor],
        targets: Sequence[str] = (),
    ) -> None:
        names = tuple(batch) if isinstance(batch, dict) else tuple(map(str, range(len(batch))))
        tensors = batch.values() if isinstance(batch, dict) else batch
        self.batch = tuple(t.double() if t.is_floating_point() else t for t in tensors)
        only_loss = targets if isinstance(batch, dict) or loss is None else (names[-1],)
        self.objective = Objective(net, loss, names, only_loss).double()
        self.net = net
        self.captured: Captured = capture(self.objective, self.batch, training=True)
        # before the eager run, which changes buffers
        self.values = {k: v.clone() for k, v in self.captured.tensors.items()}
        self.values |= {
            f"input.{k}" if k in self.values else k: entry for k, entry in zip(names, self.batch, strict=True)
        }
        self.loss, self.gradients = self._eager()
        parameters = self.net.named_parameters(remove_duplicate=False)  # which forward may write
        self.buffers = {k: v.detach().clone() for k, v in (*_buffers(self.objective), *parameters)}

    @property
    def graph(self) -> OperatorGraph:
        return self.captured.graph

    def simulated(self, program: Program) -> list[Tensor]:
        """The losses of all ranks, and every gradient, of a program on simulated ranks."""
        simulation = Simulation(program, self.values)
        (losses,) = simulation.run()
        simulation.backward(losses)
        return [*losses, *simulation.gradients().values()]

    def _eager(self) -> tuple[Tensor, dict[str, Tensor]]:
        self.objective.train().zero_grad()
        loss: Any = loss_in(self.objective(*(t.clone() for t in self.batch)))
        loss.backward()
        names = {source.name for source in self.graph.sources if source.trainable}
        found = dict(self.net.named_parameters()) | {f"loss.{k}": v for k, v in _parameters(self.objective.loss)}
        assert names == {name for name, p in found.items() if p.requires_grad}
        return loss.detach(), {n: torch.zeros_like(found[n]) if found[n].grad is None else found[n].grad for n in names}

    def difference(self, plan: Plan, options: LoweringOptions | None = None) -> float:
        """The largest difference of the loss on any rank, of any gradient relative to its largest element, and of any
        buffer after the step."""
        simulation = Simulation(lower(self.graph, plan, options or LoweringOptions()), self.values)
        (losses,) = simulation.run()
        simulation.backward(losses)
        size = plan.mesh.size if options and options.sharded_optimizer else 1
        gaps = [abs(loss.item() - self.loss.item()) for loss in losses]
        gaps += [
            (found.double() - self.buffers[name].double()).abs().max().item()
            for name, found in simulation.buffers().items()
            if found.numel()
        ]
        for name, found in simulation.gradients().items():
            truth = self.gradients[name]
            gaps.append(((found / size - truth).abs().max() / truth.abs().max().clamp_min(1e-3)).item())
        return max(gaps)

    def random_plan(self, draw: Callable[[int], Any], seed: int, mesh: Mesh = MESH) -> Plan:
        """A random strategy on every operator (a quarter with random layouts of the results), random layouts of all
        sources."""
        source_of = draw(seed)
        operators = {}
        for operator in self.graph.operators:
            assignment = source_of.assignment(rule_of(operator, self.graph), mesh)
            outputs = tuple(source_of.layout(spec.shape, mesh) for spec in operator.results)
            operators[operator.name] = OperatorPlan(
                assignment, "configured", outputs if source_of.rng.random() < 0.25 else None
            )
        layouts = {source.id: source_of.layout(source.spec.shape, mesh) for source in self.graph.sources}
        inputs = {source.name: layouts[source.id] for source in self.graph.of_kind("input")}
        tensors = {s.name: layouts[s.id] for s in self.graph.sources if s.kind != "input"}
        return Plan(mesh, operators, inputs, tensors)

    def worst(self, draw: Callable[[int], Any], seeds: int = 6) -> float:
        """`difference` over random plans, every second one as for a sharded optimizer."""
        return max(
            self.difference(self.random_plan(draw, seed), LoweringOptions(sharded_optimizer=seed % 2 == 1))
            for seed in range(seeds)
        )


def _buffers(objective: Objective) -> list[tuple[str, Tensor]]:
    own = [] if objective.loss is None else [(f"loss.{name}", b) for name, b in objective.loss.named_buffers()]
    frozen = [(name, p) for name, p in objective.model.named_parameters() if not p.requires_grad]
    return [*objective.model.named_buffers(), *frozen, *own]


def _parameters(module: nn.Module | None) -> list[tuple[str, nn.Parameter]]:
    return [] if module is None else list(module.named_parameters())
