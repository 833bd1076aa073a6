"""Users' callbacks for tests, and models whose results are not finite. Ranks import them by dotted name."""

from __future__ import annotations

import json
from typing import Any

import torch
from networks import CLASSES, FEATURES, Points
from torch import Tensor, nn

from runner.build.callbacks import HOOKS


class Calls:
    """Appends every call of a hook, with what it sees, to `calls-RANK.jsonl` in the run folder."""

    def __getattr__(self, name: str) -> Any:
        if name not in HOOKS:
            raise AttributeError(name)

        def note(state: Any, error: Exception | None = None) -> None:
            with (state.run_dir / f"calls-{state.rank}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps([name, state.step, state.loss, dict(state.evaluation), repr(error)]) + "\n")

        return note


class Halves:
    """Halves the learning rate after every step, on all ranks."""

    def after_step(self, state: Any) -> None:
        for group in state.optimizer.param_groups:
            group["lr"] /= 2


class Fails:
    """Raises an error after step 3 on rank 1."""

    def after_step(self, state: Any) -> None:
        if state.rank == 1 and state.step == 3:
            raise KeyError("mine")


class NoHooks:
    def before_stp(self) -> None: ...


class Holed(Points):
    """Every row lacks a number."""

    def __init__(self) -> None:
        super().__init__()
        self.x[:, 3] = torch.nan


class Logarithm(nn.Module):
    """x [rows, 12] -> [rows, 4], with the logarithm of a negative number in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        masked = self.inner(x).masked_fill(x[:, :1] > 1e9, -torch.inf)
        return self.outer((-masked.square().sum(-1, keepdim=True)).log() + masked)


class Root(Logarithm):
    """The root of 0, whose gradient is infinite; forward is finite."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        return self.outer(hidden + (hidden * 0).sqrt())


class Clamped:
    """Clips gradients by value."""

    def before_update(self, state):
        for _, gradient in state.gradients():
            gradient.clamp_(-0.01, 0.01)


class ClippedWeights:
    """Clips weights: those that the optimizer holds, those of the module, or those in the optimizer's groups."""

    def __init__(self, of: str = "optimizer") -> None:
        self.of = of

    @torch.no_grad()
    def after_step(self, state: Any) -> None:
        weights = {
            "optimizer": state.weights,
            "module": state.module.named_parameters,
            "groups": lambda: enumerate(one for group in state.optimizer.param_groups for one in group["params"]),
        }[self.of]
        for _, weight in weights():
            weight.clamp_(-0.05, 0.05)
