"""One architecture of the matrix: how to build a small random model of it, and one batch.

Invariant: a builder draws from torch's generator alone, so the same seed gives the same weights and batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS, HEADS = 8, 16, 256, 64, 2, 4
Batch = dict[str, Tensor]
Example = tuple[nn.Module, Batch]


@dataclass(frozen=True)
class Architecture:
    """`build(dropout)` gives a model that returns its own loss, and a batch by the names of its forward's arguments."""

    name: str
    family: str
    build: Callable[[float], Example]


@dataclass(frozen=True)
class HuggingFace:
    """A builder from names and numbers: classes of transformers by name, what the config is made from, and the batch.

    `fixed` are further arguments of forward that are no tensors.
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    batch: Callable[[], Batch]
    nested: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, dropout: float) -> Example:
        import transformers

        config = getattr(transformers, self.config)(**self.settings, **{k: dict(v) for k, v in self.nested.items()})
        set_dropout(config, dropout)
        chosen = getattr(transformers, self.model)
        if chosen._supports_sdpa:
            config._attn_implementation = "sdpa"
        model = chosen(config)
        return (Fixed(model, self.fixed) if self.fixed else model), self.batch()


class Fixed(nn.Module):
    """A model with arguments of its forward given beforehand."""

    def __init__(self, model: nn.Module, fixed: Mapping[str, Any]) -> None:
        super().__init__()
        self.inner, self.fixed = model, dict(fixed)

    def forward(self, **batch: Tensor) -> Any:
        return self.inner(**batch, **self.fixed)


def set_dropout(config: Any, probability: float) -> None:
    """Give every dropout of a config (and of the configs in it) this probability; complete layers are never dropped,
    because which ones would be baked into the graph."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            set_dropout(value, probability)
        elif isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            continue
        elif "layerdrop" in name or "layer_drop" in name:
            setattr(config, name, 0.0)
        elif any(part in name for part in ("dropout", "pdrop", "drop_path")):
            keeps_none = value is None and name == "classifier_dropout"
            if not keeps_none and not (type(value) is int and probability == 0):
                setattr(config, name, float(probability))
    if hasattr(config, "use_cache"):
        config.use_cache = False


def tokens(length: int = LENGTH, vocabulary: int = VOCABULARY) -> Tensor:
    """Random token ids, none of them special."""
    return torch.randint(3, vocabulary, (BATCH, length))


def pictures(size: int = 32, channels: int = 3) -> Tensor:
    return torch.randn(BATCH, channels, size, size)


def classes(count: int = 10) -> Tensor:
    return torch.randint(0, count, (BATCH,))
