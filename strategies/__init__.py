"""Parallel programs from a torch model and a plan, without the runner: for notebooks and other trainers.

Examples:
    >>> import torch
    >>> from strategies import Objective, OperatorStrategy, Request, Simulation
    >>> from strategies import capture_model, lower, make_plan
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> batch = torch.randn(8, 8), torch.randn(8, 4)
    >>> step = Objective(model, torch.nn.MSELoss(), names=("0", "1"), targets=("1",))
    >>> captured = capture_model(step, batch, training=True)  # the operator graph, and the model's tensors by name
    >>> # x [m, k] replicated, w [k, n] in 4 column blocks
    >>> strategy = OperatorStrategy(inputs=((1, 1), (1, 4)), outputs=None)
    >>> plan = make_plan(captured.graph, Request("auto", world_size=4, strategies={"0.matmul": strategy}))
    >>> program = lower(captured.graph, plan)  # the same for all ranks
    >>> ranks = Simulation(program, {**captured.tensors, "0": batch[0], "1": batch[1]})
    >>> losses, = ranks.run()  # all four ranks, in this process
    >>> bool(torch.allclose(losses[3], step(*batch)))
    True

Real ranks:
    With torch.distributed initialised and the same plan everywhere, `build` gives each rank its module:

        # axes over which the program and the optimizer communicate
        communicator = Communicator(plan.mesh, rank, axes)
        # slices: this rank's parameters by name
        module = build(program, slices, communicator, device)
        loss = module(*local_batch)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.capture import Captured, Objective
    from strategies.capture import capture as capture_model
    from strategies.core.errors import StrategyError
    from strategies.core.layout import Layout
    from strategies.core.mesh import Mesh
    from strategies.core.plan import Plan
    from strategies.core.program import LoweringOptions, Program
    from strategies.core.request import NamedDims, NamedMatrix, OperatorStrategy, Request
    from strategies.lowering.lowering import lower
    from strategies.optimizer.stages import make_updates
    from strategies.optimizer.updates import axes_needed
    from strategies.planner.planner import make_plan
    from strategies.rules.declared import sharding_rule
    from strategies.runtime.communicator import Communicator
    from strategies.runtime.module_tree import build
    from strategies.runtime.simulate import Simulation

_MODULES = {
    "Captured": "capture",
    "Objective": "capture",
    "capture_model": "capture:capture",
    "Communicator": "runtime.communicator",
    "build": "runtime.module_tree",
    "LoweringOptions": "core.program",
    "Program": "core.program",
    "lower": "lowering.lowering",
    "Simulation": "runtime.simulate",
    "axes_needed": "optimizer.updates",
    "make_updates": "optimizer.stages",
    "StrategyError": "core.errors",
    "Layout": "core.layout",
    "Mesh": "core.mesh",
    "Plan": "core.plan",
    "make_plan": "planner.planner",
    "NamedDims": "core.request",
    "NamedMatrix": "core.request",
    "Request": "core.request",
    "OperatorStrategy": "core.request",
    "sharding_rule": "rules.declared",
}

__all__ = [
    "Captured",
    "Communicator",
    "Layout",
    "LoweringOptions",
    "Mesh",
    "NamedDims",
    "NamedMatrix",
    "Objective",
    "OperatorStrategy",
    "Plan",
    "Program",
    "Request",
    "Simulation",
    "StrategyError",
    "axes_needed",
    "build",
    "capture_model",
    "lower",
    "make_plan",
    "make_updates",
    "sharding_rule",
]


def __getattr__(name: str) -> Any:
    """Names are imported at their first use, so that importing the package does not import torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'strategies' has no attribute {name!r}")
    module, _, other = _MODULES[name].partition(":")  # the module strategies.capture keeps its own name
    return getattr(importlib.import_module(f"strategies.{module}"), other or name)
