"""torchmetrics' mean average precision of boxes (pycocotools), as user code for tests.

Of torchvision, whose wheels fit one build of torch alone, the metric takes `box_convert` and nothing else.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torchmetrics.detection import mean_ap

mean_ap._TORCHVISION_AVAILABLE = True  # type: ignore[attr-defined]
OPS = ModuleType("torchvision.ops")


def box_convert(boxes: Tensor, in_fmt: str, out_fmt: str) -> Tensor:
    """Corners [boxes, 4] -> corner and extent [boxes, 4]."""
    assert (in_fmt, out_fmt) == ("xyxy", "xywh")
    return torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)


OPS.box_convert = box_convert  # type: ignore[attr-defined]


class MeanAveragePrecision(mean_ap.MeanAveragePrecision):
    """That of torchmetrics, without torchvision."""

    def update(self, *given: Any) -> None:
        with mock.patch.dict(sys.modules, {"torchvision": ModuleType("torchvision"), "torchvision.ops": OPS}):
            super().update(*given)


def boxes(output: Tensor, target: Tensor) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Scores [rows, classes] and classes [rows] as boxes: one true box a row, and a predicted one for each class whose
    score is positive, the wider the surer."""
    found, true = [], []
    for scores, label in zip(output, target, strict=True):
        kept = (scores > 0).nonzero()[:, 0]
        sides = 10 + 10 * scores[kept].sigmoid()
        boxes = torch.stack([torch.zeros_like(sides), torch.zeros_like(sides), sides, sides], 1)
        found.append({"boxes": boxes, "scores": scores[kept].sigmoid(), "labels": kept})
        true.append({"boxes": output.new_tensor([[0, 0, 18, 18]]), "labels": label[None]})
    return found, true
