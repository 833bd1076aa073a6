"""User code that fails where training calls it: datasets, streams, metrics and callbacks. Ranks import it by name."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from typing import Any

import torch
from networks import Points
from torch import Tensor, nn
from torch.utils.data import IterableDataset


class Rows(Points):
    """Points of which every row from `first` on is wrong in the way that `way` names."""

    def __init__(self, way: str, first: int = 7, rows: int = 64) -> None:
        super().__init__(rows)
        self.way, self.first = way, first

    def __len__(self) -> int:
        return {"length": 640, "negative": -5, "float": 2.5}.get(self.way, len(self.x))  # type: ignore[return-value]

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        if index < self.first:
            return x, y
        if self.way == "exits":
            os._exit(3)
        if self.way == "leaves":
            raise SystemExit("enough")
        if self.way == "memory":
            resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
            return torch.zeros(2**40), y
        if self.way == "raises":
            return 1 / 0, y
        wrong = {
            "floats": (x, y.float()),
            "dims": (x[None], y),
            "keys": {"x": x, "other": y},
            "none": None,
            "text": ("words", y),
            "more": (x, y, y),
            "fewer": (x,),
            "meta": (x.to("meta"), y),
            "sparse": (x.to_sparse(), y),
            "not_a_number": (x * float("nan"), y),
        }
        return wrong.get(self.way, (x, y))


def stacked(samples: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    return [torch.stack(values) for values in zip(*samples, strict=True)]


class Numbers(IterableDataset[Any]):
    """A stream of points that is wrong in the way that `way` names."""

    def __init__(self, way: str, rows: int = 20) -> None:
        self.way, self.rows, self.passes = way, rows, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        if self.way == "raises_at_once":
            raise PermissionError("no access")
        points, rows = Points(), 0 if self.way == "nothing" else self.rows
        for row in range(rows - 7 * (self.way == "shorter" and self.passes > 1)):
            if self.way == "raises" and row == 7:
                raise OSError("connection reset")
            yield "words" if self.way == "texts" else points[row]


class NotIterated(IterableDataset[Any]):
    """Has no __iter__."""


def no_number(output: Tensor, target: Tensor) -> Tensor:
    return output


def no_value(output: Tensor, target: Tensor) -> None:
    return None


def raises(output: Tensor, target: Tensor) -> float:
    raise ValueError("no such class")


def three(output: Tensor, target: Tensor, weight: Tensor) -> float:
    return 0.0


class TwoTargets:
    """Samples with two entries that only the loss takes."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.ones(12), "label": torch.tensor(index % 4), "weight": torch.tensor(1.0)}


def weighted(output: Tensor, label: Tensor, weight: Tensor) -> Tensor:
    return (nn.functional.cross_entropy(output, label, reduction="none") * weight).mean()


def late(output: Tensor, target: Tensor) -> float:
    """Raises for the second batch of a process."""
    calls = vars(late)
    calls["number"] = calls.get("number", 0) + 1
    if calls["number"] > 1:
        raise RuntimeError("second batch")
    return 0.0


class NoCompute:
    def update(self, output: Tensor, target: Tensor) -> None: ...

    def reset(self) -> None: ...


class Lacking(NoCompute):
    """As MeanAveragePrecision of torchmetrics without pycocotools."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("it needs cocotools")


class ComputeRaises(NoCompute):
    def compute(self) -> float:
        raise ZeroDivisionError("no samples")


class ComputesText(NoCompute):
    def compute(self) -> dict[str, str]:
        return {"quality": "good"}


class ComputesTensors(NoCompute):
    def compute(self) -> dict[str, Tensor]:
        return {"matrix": torch.zeros(2, 2)}


class ComputesLoss(NoCompute):
    def compute(self) -> dict[str, float]:
        return {"loss": 3.0}


class At:
    """Raises in the hook `hook` of rank `rank`."""

    def __init__(self, hook: str, rank: int = 0) -> None:
        self._rank = rank
        setattr(self, hook, self._raise)

    def _raise(self, state: Any, error: Any = None) -> None:
        if state.rank == self._rank:
            raise LookupError("mine")


class WritesWeights:
    def after_step(self, state: Any) -> None:
        for parameter in state.module.parameters():
            parameter.data = torch.zeros(3)


class WritesConfig:
    def after_step(self, state: Any) -> None:
        state.config.train.steps = 100


class LogsText:
    def after_step(self, state: Any) -> None:
        state.log(words="many")


class FewArguments:
    def after_step(self) -> None: ...


class BadState:
    def after_step(self, state: Any) -> None: ...

    def state_dict(self) -> Any:
        return {"function": lambda: None}

    def load_state_dict(self, state: Any) -> None: ...


class BadRanks:
    ranks = "some"

    def start(self, state: Any) -> None: ...


class Leaves:
    def after_step(self, state: Any) -> None:
        raise SystemExit(0)


class NotMade:
    def __init__(self) -> None:
        raise RuntimeError("no licence")

    def start(self, state: Any) -> None: ...
