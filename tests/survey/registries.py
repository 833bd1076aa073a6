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
    """A model that returns tensors, with a mean of the squares of their elements as its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **batch: Tensor) -> Tensor:
        return huggingface.loss_of(self.inner(*batch.values()))


def transformers(every: bool) -> list[Architecture]:
    """Model classes of the auto classes of transformers: one of each type of model, or every one."""
    return [Architecture(name, "transformers", partial(huggingface.build, name)) for name in huggingface.names(every)]


def _without_compiled_operators() -> None:
    """Wheels of torchvision for another build of torch lack its compiled operators. Without a schema of the two that
    register fake implementations the package is not imported; no classifier calls them."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]


def torchvision(every: bool) -> list[Architecture]:
    """The models of torchvision that classify and segment pictures and videos. Detectors sort and filter boxes by their
    values with compiled operators, and quantized models are not trained."""
    from torchvision import models

    by_module: dict[str, list[str]] = {}
    for kind in (models, models.segmentation, models.video):
        for name in models.list_models(kind):
            by_module.setdefault(models.get_model_builder(name).__module__, []).append(name)
    names = [name for some in by_module.values() for name in (some if every else _smallest(some))]
    return [Architecture(name, "torchvision", partial(_vision, name)) for name in names]


def _vision(name: str, _: float) -> Example:
    from torchvision import models

    builder = models.get_model_builder(name)
    options: dict[str, Any] = {"weights_backbone": None} if "segmentation" in builder.__module__ else {}
    size = 299 if name == "inception_v3" else 224 if name.startswith(("vit", "maxvit", "mvit")) else PICTURE
    model = models.get_model(name, weights=None, num_classes=10, **options)
    _check_size(model)
    video = (16,) if "video" in builder.__module__ else ()
    return Squares(_without_dropout(model)), {"x": torch.randn(BATCH, 3, *video, size, size)}


def timm(every: bool) -> list[Architecture]:
    """The models of timm: one of each of its modules, or every one."""
    import timm

    modules = ([*timm.list_models(module=module)] for module in timm.list_modules())
    names = [name for some in modules for name in (some if every else _smallest(some))]
    return [Architecture(name, "timm", partial(_timm, name)) for name in names]


def _timm(name: str, _: float) -> Example:
    import timm

    model = timm.create_model(name, pretrained=False, num_classes=10)
    _check_size(model)
    size = model.default_cfg["input_size"] if model.default_cfg.get("fixed_input_size") else (3, PICTURE, PICTURE)
    return Squares(_without_dropout(model)), {"x": torch.randn(BATCH, *size)}


def _check_size(model: nn.Module) -> None:
    if (count := sum(one.numel() for one in model.parameters())) > huggingface.LARGEST:
        raise ValueError(f"{count:,} parameters")


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for rate in ("p", "drop_prob", "attn_drop_p"):  # of nn.Dropout, stochastic depth and attention
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return model


def _smallest(names: list[str]) -> list[str]:
    """The name of the smallest of models of one kind, as far as names say: the first where none does."""
    return sorted(names, key=lambda name: min((i for i, size in enumerate(SMALL) if size in name), default=99))[:1]


SMALL = (
    "atto femto pico nano test_ xxs xxt xs micro mini tiny _t _s small 050 b0 m0 s1 18 400 121 14d 26 34 50 11 64 _b_32"
).split()


REGISTRIES: dict[str, Callable[[bool], list[Architecture]]] = {
    "transformers": transformers,
    "torchvision": torchvision,
    "timm": timm,
}


def architectures(registry: str | None = None, every: bool = False) -> list[Architecture]:
    """The architectures of one registry, or of all whose packages are installed; one of each type, or `every` one."""
    _without_compiled_operators()  # transformers and timm import torchvision where it is installed
    wanted = [registry] if registry else [name for name in REGISTRIES if importlib.util.find_spec(name)]
    return [one for name in wanted for one in REGISTRIES[name](every)]
