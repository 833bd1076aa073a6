"""Runs a recorded case: its network is captured, planned, lowered, and run on simulated ranks where it is small
enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from strategies.capture import Objective, capture
from strategies.core.graph import Operator, OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions, Program
from strategies.core.request import SEARCHES, Request
from strategies.cost.cluster import Cluster
from strategies.cost.step import need_of, step_cost
from strategies.lowering.lowering import lower
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.planner import make_plan
from strategies.planner.step_certificate import StepEvaluation, StepSavings
from strategies.runtime.simulate import Simulation
from tests.conformance.network import Case, devices, name_of
from tests.conformance.numbers import Built, build
from tests.conformance.requested import request_of
from tests.strategies.machines import cluster
from tests.strategies.simulated_model import Model

RUN_RANKS = 16
"""The maximum number of simulated ranks."""
SIMPLE = OptimizerSettings()
"""Adds gradients after backward; no state."""
TOLERANCE = 1e-10
SMALLEST = 1e-6
"""Below this size differences are absolute."""
PROOF = 2**22
"""Elements of the largest tensor of a network that is run to prove that a strategy can be accepted."""


class Differs(Exception):
    """The result differs from the record; the message names the difference."""


class Bench:
    """The captured network of a case; with real values where it is small enough to be run."""

    def __init__(self, case: Case, most: int) -> None:
        self.case = case
        self.built: Built = build(case, real=False)
        self.model: Model | None = None
        if self.built.largest <= most and devices(case) <= RUN_RANKS and "error" not in case["expected"]:
            self.graph: OperatorGraph = self._real().graph
        else:
            names = tuple(str(i) for i in range(len(self.built.batch)))
            objective = Objective(self.built.network, None, names, ())
            self.graph = capture(objective, self.built.batch, training=True).graph
        self.request = request_of(case, self.graph, self.built)
        context = case.get("context") or {}
        self.options = LoweringOptions(sharded_optimizer=bool(context.get("enable_parallel_optimizer")))
        largest = max(spec.elements for spec in self.graph.specs.values())
        limit = max(most, PROOF) if "error" in case["expected"] else most
        self.runs = largest <= limit and self.request.world_size <= RUN_RANKS

    def _real(self) -> Model:
        """The network with real values, its loss and its gradients."""
        if self.model is None:
            real = build(self.case, real=True)
            self.model = Model(real.network, None, real.batch)
        return self.model

    @property
    def no_search(self) -> str:
        """Why the recorded search cannot handle the case."""
        return "starts from configured operators" if self.case["search_mode"] in SEARCHES else "is not there yet"

    def lowered(self, request: Request) -> tuple[Plan, Program]:
        plan = make_plan(self.graph, request, self.machine)
        return plan, lower(self.graph, plan, self.options)

    def run(self, plan: Plan) -> bool:
        """Whether the network was run; raises Differs if a gradient or the loss is not the network's own."""
        if not self.runs:
            return False
        model = self._real()
        simulation = Simulation(lower(model.graph, plan, self.options), model.values)
        (losses,) = simulation.run()
        simulation.backward(losses)
        averaged = plan.mesh.size if self.options.sharded_optimizer else 1
        gaps = {"the loss": max(relative(loss.detach(), model.loss) for loss in losses)}
        for name, found in simulation.gradients().items():
            gaps[f"the gradient of {name}"] = relative(found / averaged, model.gradients[name])
        worst = max(gaps, key=lambda name: gaps[name])
        if not gaps[worst] <= TOLERANCE:
            raise Differs(f"{worst} differs from the network's own by {gaps[worst]:.1e}")
        return True

    def operators(self, node: Mapping[str, Any]) -> tuple[Operator, ...]:
        return tuple(o for o in self.graph.operators if o.module == name_of(node))

    @property
    def machine(self) -> Cluster:
        """Nodes of 8 devices: the cluster for which plans are searched and estimated."""
        return cluster(-(-self.request.world_size // 8), 8)

    def cost(self, plan: Plan) -> float:
        """The estimated microseconds of a step."""
        return 1e6 * self.seconds(plan)

    def seconds(self, plan: Plan) -> float:
        return step_cost(self.graph, plan, lower(self.graph, plan), self.machine, SIMPLE).total

    def cheapest(self) -> Plan:
        """The plan of the exact search, which also chooses strategies for the configured operators."""
        moved = need_of(SIMPLE).moved
        request = replace(
            self.request,
            mode="auto",
            search="dynamic_programming",
            strategies={},
            optimizer_state_factor=0.0,
            optimizer_bytes=moved,
        )
        price = StepEvaluation(self.seconds, StepSavings(overlapped=False, joined=False, optimizer_bytes=moved))
        return make_plan(self.graph, replace(request, overlap_gradients=False), self.machine, price)


def relative(found: Tensor, truth: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((found - truth).abs().max() / truth.abs().max().clamp_min(SMALLEST))
