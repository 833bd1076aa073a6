"""Slicing a torch model over devices, without the runner: for notebooks and other trainers.

>>> import torch
>>> from strategies import Objective, Request, Simulation, Wanted, capture_model, lower, make_plan
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
>>> batch = torch.randn(8, 8), torch.randn(8, 4)
>>> step = Objective(model, torch.nn.MSELoss(), names=("0", "1"), targets=("1",))
>>> captured = capture_model(step, batch, training=True)          # the operator graph, and the model's tensors by name
>>> strategy = Wanted(inputs=((1, 1), (1, 4)), outputs=None)  # x [m, k] whole, w [k, n] in 4 column blocks
>>> plan = make_plan(captured.graph, Request("auto", world_size=4, strategies={"0.matmul": strategy}))
>>> program = lower(captured.graph, plan)                    # the same for all ranks
>>> ranks = Simulation(program, {**captured.tensors, "0": batch[0], "1": batch[1]})
>>> losses, = ranks.run()                                    # all four ranks, in this process
>>> bool(torch.allclose(losses[3], step(*batch)))
True

On real ranks (torch.distributed initialised, the same plan everywhere) `build` gives each one its module:

    communicator = Communicator(plan.mesh, rank, axes)       # axes over which the program and the optimizer talk
    module = build(program, slices, communicator, device)    # slices: this rank's parameters by name
    loss = module(*local_batch)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.capture import Captured, Objective
    from strategies.capture import capture as capture_model
    from strategies.engine.communicator import Communicator
    from strategies.engine.lowering import lower
    from strategies.engine.partition import build
    from strategies.engine.program import Options, Program
    from strategies.engine.simulate import Simulation
    from strategies.engine.updates import axes_needed, make_updates
    from strategies.errors import StrategyError
    from strategies.layout import Layout
    from strategies.mesh import Mesh
    from strategies.plan import Plan
    from strategies.planner import make_plan
    from strategies.request import NamedDims, NamedMatrix, Request, Wanted

_HOME = {
    "Captured": "capture",
    "Objective": "capture",
    "capture_model": "capture:capture",
    "Communicator": "engine.communicator",
    "build": "engine.partition",
    "Options": "engine.program",
    "Program": "engine.program",
    "lower": "engine.lowering",
    "Simulation": "engine.simulate",
    "axes_needed": "engine.updates",
    "make_updates": "engine.updates",
    "StrategyError": "errors",
    "Layout": "layout",
    "Mesh": "mesh",
    "Plan": "plan",
    "make_plan": "planner",
    "NamedDims": "request",
    "NamedMatrix": "request",
    "Request": "request",
    "Wanted": "request",
}

__all__ = [
    "Captured",
    "Communicator",
    "Layout",
    "Mesh",
    "NamedDims",
    "NamedMatrix",
    "Objective",
    "Options",
    "Plan",
    "Program",
    "Request",
    "Simulation",
    "StrategyError",
    "Wanted",
    "axes_needed",
    "build",
    "capture_model",
    "lower",
    "make_plan",
    "make_updates",
]


def __getattr__(name: str) -> Any:
    """Names are imported at their first use, so that importing the package does not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'strategies' has no attribute {name!r}")
    module, _, other = _HOME[name].partition(":")  # the module strategies.capture keeps its own name
    return getattr(importlib.import_module(f"strategies.{module}"), other or name)
