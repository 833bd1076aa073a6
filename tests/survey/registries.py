"""Which architectures the installed packages have, each as an `Architecture` of the matrix: a builder of a small random
model that returns its loss, and of one batch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tests.matrix.zoo.architecture import Architecture, Example
from tests.survey import huggingface

BATCH = 4
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
    """The models of torchvision that classify and segment pictures and videos, those that are made to be quantized (as
    they are trained, before that) and optical flow. Detectors sort and filter boxes by their values with compiled
    operators."""
    from torchvision import models

    by_module: dict[str, list[str]] = {}
    for kind in (models, models.segmentation, models.video, models.quantization, models.optical_flow):
        for name in models.list_models(kind):
            by_module.setdefault(models.get_model_builder(name).__module__, []).append(name)
    names = [name for some in by_module.values() for name in (some if every else _smallest(some))]
    return [Architecture(name, "torchvision", partial(_build, _vision, name)) for name in names]


SMALLER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("quantized_inception", {"quantize": False, "aux_logits": False}),
    ("quantized_googlenet", {"quantize": False, "aux_logits": False}),
    ("quantized", {"quantize": False}),
    ("inception", {"aux_logits": False}),  # whose pictures have 299 x 299 pixels
    ("vit", {"image_size": 64}),
)
"""Options of builders of torchvision by the beginning of their names."""
MAXVIT: dict[str, Any] = {
    "input_size": (64, 64),
    "stem_channels": 16,
    "partition_size": 4,
    "block_channels": [16, 32],
    "block_layers": [2, 2],
    "head_dim": 8,
    "stochastic_depth_prob": 0.0,
}
MVIT: dict[str, Any] = {
    "spatial_size": (32, 32),
    "temporal_size": 8,
    "residual_pool": True,
    "residual_with_cls_embed": False,
    "rel_pos_embed": True,
    "proj_after_attn": True,
}
MVIT_BLOCKS = (
    (1, 8, 8, (3, 3, 3), (3, 3, 3), (1, 1, 1), (1, 4, 4)),
    (2, 8, 16, (3, 3, 3), (3, 3, 3), (1, 2, 2), (1, 2, 2)),
    (2, 16, 16, (3, 3, 3), (3, 3, 3), (1, 1, 1), (1, 2, 2)),
)
"""Heads, channels in and out, kernels and strides of queries and of keys."""


def _vision(name: str, attempt: Attempt) -> Example:
    from torchvision import models

    module = models.get_model_builder(name).__module__
    options = next((some for prefix, some in SMALLER if name.startswith(prefix)), {})
    options |= {"weights_backbone": None} if "segmentation" in module else {}
    if name.startswith("maxvit"):
        model: nn.Module = models.MaxVit(**MAXVIT, num_classes=10)
    elif name.startswith("mvit"):
        block = import_module(module).MSBlockConfig
        model = models.video.MViT(block_setting=[block(*one) for one in MVIT_BLOCKS], **MVIT, num_classes=10)
    elif "optical_flow" in module:
        model = models.get_model(name, weights=None)
    else:
        model = models.get_model(name, weights=None, num_classes=10, **options)
    video = (8,) if "video" in module else ()
    pictures = ("x", "y") if "optical_flow" in module else ("x",)
    size = (attempt.size or 224) // (2 if video and attempt.size else 1)
    batch = {key: torch.randn(BATCH, 3, *video, size, size) for key in pictures}
    return Squares(_small(model, attempt)), batch


def timm(every: bool) -> list[Architecture]:
    """The models of timm: one of each of its modules, or every one."""
    import timm

    modules = ([*timm.list_models(module=module)] for module in timm.list_modules())
    names = [name for some in modules for name in (some if every else _smallest(some))]
    return [Architecture(name, "timm", partial(_build, _timm, name)) for name in names]


def _timm(name: str, attempt: Attempt) -> Example:
    import timm

    options = {key: attempt.size for key in attempt.sizes} | {key: 2 for key in attempt.depths}
    model = timm.create_model(name, pretrained=False, num_classes=10, **options)
    size = (3, attempt.size, attempt.size) if attempt.size else model.default_cfg["input_size"]
    return Squares(_small(model, attempt)), {"x": torch.randn(BATCH, *size)}


@dataclass(frozen=True)
class Attempt:
    """Pictures of `size` pixels a side (None: as many as the package says), the options of a builder that say so and
    how many blocks there are, and whether few of equal blocks remain."""

    size: int | None
    sizes: tuple[str, ...] = ()
    depths: tuple[str, ...] = ()
    few: bool = True


ATTEMPTS = (
    Attempt(64, ("img_size",), ("depth",)),
    Attempt(64, ("img_size",)),
    Attempt(64),
    Attempt(128, ("img_size",)),
    Attempt(128),
    Attempt(None),
    Attempt(None, few=False),
)


def _build(make: Callable[[str, Attempt], Example], name: str, _: float) -> Example:
    return make(name, _attempt(make, name))


@cache
def _attempt(make: Callable[[str, Attempt], Example], name: str) -> Attempt:
    """The first attempt with which eager torch trains the model. Raises the error of the last."""
    *others, last = ATTEMPTS
    for attempt in others:
        torch.manual_seed(0)
        try:
            huggingface.train(*make(name, attempt))
        except Exception:  # its package says for itself which sizes a model takes
            continue
        return attempt
    huggingface.train(*make(name, last))
    return last


def _small(model: nn.Module, attempt: Attempt) -> nn.Module:
    """The model without dropout and, of consecutive equal blocks and of wide hidden layers, with few."""
    for module in model.modules():
        for rate in ("p", "drop_prob", "attn_drop_p"):  # of nn.Dropout, stochastic depth and attention
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    if attempt.few:
        for module in list(model.modules()):
            if isinstance(module, nn.Sequential):
                _narrow(module)
            if isinstance(module, (nn.Sequential, nn.ModuleList)):
                _shorten(module)
    if (count := sum(one.numel() for one in model.parameters())) > huggingface.LARGEST:
        raise ValueError(f"{count:,} parameters")
    return model


def _shorten(blocks: nn.Sequential | nn.ModuleList) -> None:
    """Leave two of consecutive blocks whose structure and shapes are equal."""
    kinds: list[object] = []
    kept: dict[str, nn.Module | None] = {}
    for name, block in blocks._modules.items():
        kinds.append((repr(block), [one.shape for one in block.parameters()] if block is not None else ()))
        if kinds[-3:].count(kinds[-1]) < 3:
            kept[name] = block
    numbered = {str(number): block for number, block in enumerate(kept.values())}
    blocks._modules.clear()
    blocks._modules.update(numbered if all(map(str.isdigit, kept)) else kept)


def _narrow(classifier: nn.Sequential) -> None:
    """Let the hidden layers of a perceptron have at most `HIDDEN` features."""
    dense = [(place, one) for place, one in enumerate(classifier) if type(one) is nn.Linear]
    for (first, before), (second, after) in pairwise(dense):
        if (width := before.out_features) > HIDDEN and width == after.in_features:
            classifier[first] = nn.Linear(classifier[first].in_features, HIDDEN, before.bias is not None)
            classifier[second] = nn.Linear(HIDDEN, after.out_features, after.bias is not None)


HIDDEN = 256


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
