"""Parallel plans as a library: plan a module, prove the plan, and train with it in a loop of your own.

Examples:
    >>> import torch, meshwright
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> batch = torch.randn(8, 8), torch.randn(8, 4)
    >>> plan = meshwright.plan(model, batch, loss=torch.nn.MSELoss(), mesh=4)
    >>> meshwright.verify(model, batch, plan).passed  # four simulated ranks, in this process
    True

This is also the name under which the project is installed: `meshwright.models.gpt` is the module that ships with it. A
user's folder or file may be called `runner`, `strategies` or `models`; this name belongs to the project alone, so the
installed command starts here. Importing it imports our `runner` first, which resolves the shared names, and nothing
else: what the names below stand for is imported at their first use.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

_ROOT = str(Path(__file__).resolve().parents[1])
__path__.append(_ROOT)
if "runner" not in sys.modules:
    sys.path.insert(0, _ROOT)
    import runner  # noqa: F401

    sys.path.remove(_ROOT)

if TYPE_CHECKING:
    from meshwright.exchange import Excess, best, compare, from_autoparallel, from_dtensor, from_tp_plan
    from meshwright.plans import Plan, load, plan
    from meshwright.proof import verify
    from meshwright.runs import Run, compose, train
    from runner.export.changes import Change
    from runner.report.comparison import Comparison
    from strategies.core.errors import CodedError

_MODULES = {
    "Change": "runner.export.changes",
    "CodedError": "strategies.core.errors",
    "Comparison": "runner.report.comparison",
    "Excess": "meshwright.exchange",
    "Plan": "meshwright.plans",
    "Run": "meshwright.runs",
    "best": "meshwright.exchange",
    "compare": "meshwright.exchange",
    "compose": "meshwright.runs",
    "from_autoparallel": "meshwright.exchange",
    "from_dtensor": "meshwright.exchange",
    "from_tp_plan": "meshwright.exchange",
    "load": "meshwright.plans",
    "plan": "meshwright.plans",
    "train": "meshwright.runs",
    "verify": "meshwright.proof",
}

__all__ = [
    "Change",
    "CodedError",
    "Comparison",
    "Excess",
    "Plan",
    "Run",
    "best",
    "compare",
    "compose",
    "from_autoparallel",
    "from_dtensor",
    "from_tp_plan",
    "load",
    "plan",
    "train",
    "verify",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
