"""Which architectures the installed packages have, each as an `Architecture` of the matrix: a builder of a small random
model that returns its loss, and of one batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.zoo.architecture import Architecture, Example
from tests.survey import huggingface

BATCH, PICTURE = 4, 64
_library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]


class Squares(nn.Module):
    """A model that returns tensors, with the mean of the squares of their elements as its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **batch: Tensor) -> Tensor:
        return huggingface.loss_of(self.inner(*batch.values()))


def transformers(every: bool) -> list[Architecture]:
    """Model classes of the auto classes of transformers: one of each type of model, or every one."""
    return [Architecture(name, "transformers", partial(huggingface.build, name)) for name in huggingface.names(every)]


def torchvision(_: bool) -> list[Architecture]:
    """The models for pictures of torchvision: classification and segmentation. Detectors sort and filter boxes by
    their values, and quantized models are not trained."""
    # wheels for another build of torch lack their compiled operators, without which the package is not imported
    if not hasattr(torch.ops.torchvision, "nms"):
        _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    from torchvision import models

    kinds = (models, models.segmentation)
    return [
        Architecture(name, "torchvision", partial(_vision, name)) for kind in kinds for name in models.list_models(kind)
    ]


def _vision(name: str, _: float) -> Example:
    from torchvision import models

    builder = models.get_model_builder(name)
    segments = "segmentation" in builder.__module__
    options: dict[str, Any] = {"weights_backbone": None} if segments else {}
    size = 299 if name == "inception_v3" else 224 if name.startswith(("vit", "maxvit")) else PICTURE
    model = models.get_model(name, weights=None, num_classes=10, **options)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return Squares(model), {"x": torch.randn(BATCH, 3, size, size)}


REGISTRIES: dict[str, Callable[[bool], list[Architecture]]] = {"transformers": transformers, "torchvision": torchvision}


def architectures(registry: str | None = None, every: bool = False) -> list[Architecture]:
    """The architectures of one registry, or of all whose packages are installed; one of each type, or `every` one."""
    wanted = [registry] if registry else [name for name in REGISTRIES if importlib.util.find_spec(name)]
    return [one for name in wanted for one in REGISTRIES[name](every)]
