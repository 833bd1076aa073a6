"""Small random models of transformers from the default configs of their classes, and batches for them.

The first small config and batch with which eager torch trains a class is what the survey takes; a class that trains
with none is counted apart, with the error of the first attempt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import cache
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.matrix.zoo.architecture import Batch, Example, set_dropout
from tests.survey.batches import batches, literals
from tests.survey.particular import particular
from tests.survey.shrinking import SCALES, Scale, shrunk

TASKS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "AUDIO_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_TEXT_TO_TEXT",
    "TIME_SERIES_PREDICTION",
)
"""The task of a type of model that is tried by default: the first of these that it has; else its base model."""
LARGEST = 60_000_000
"""Parameters: what the rules do not make smaller is not surveyed."""

PATIENCE = 8.0
"""Seconds of attempts."""


@cache
def names(every: bool = False) -> tuple[str, ...]:
    """The model classes of all auto classes: one of each type of model, or `every` one (these first)."""
    from transformers.models.auto import modeling_auto

    tables = {
        key: getattr(modeling_auto, key)
        for key in sorted(dir(modeling_auto))
        if key.startswith("MODEL_") and key.endswith("MAPPING_NAMES")
    }
    first = [*(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in TASKS), "MODEL_MAPPING_NAMES"]
    by_type: dict[str, list[str]] = {}
    for task in dict.fromkeys([*first, *tables]):
        for kind, classes in tables[task].items():
            by_type.setdefault(kind, []).extend((classes,) if isinstance(classes, str) else classes)
    first_of_type = (classes[0] for classes in by_type.values())
    return tuple(dict.fromkeys([*first_of_type, *(chain(*by_type.values()) if every else ())]))


def build(name: str, dropout: float) -> Example:
    """The model of this class with its loss, and a batch."""
    scale, index = _attempt(name)
    model = _model(name, scale, dropout)
    return _trained(model), next(islice(batches(model, model.config), index, None))


def _model(name: str, scale: Scale, dropout: float) -> Any:
    import transformers

    chosen = getattr(transformers, name)
    config = shrunk(chosen.config_class, scale, particular(name).config)
    set_dropout(config, dropout)
    if name.endswith(("ForCausalLM", "LMHeadModel", "WithLMHead")) and hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(one.numel() for one in chosen(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters")
    return chosen(config)


@cache
def _attempt(name: str) -> tuple[Scale, int]:
    """The first scale and the number of the batch with which eager torch trains the class. Raises the error of the
    first attempt."""
    first: Exception | None = None
    end = time.process_time() + PATIENCE
    for scale in SCALES:
        if time.process_time() > end:
            break
        torch.manual_seed(0)
        try:
            model = _model(name, scale, 0.0)
        except Exception as error:
            first = first or error
            continue
        for index, batch in enumerate(batches(model, model.config)):
            try:
                train(_trained(model), batch)
            except Exception as error:
                first = first or error
            else:
                return scale, index
    raise first or ValueError("no batch is known for its inputs")


def train(model: nn.Module, batch: Batch) -> None:
    """One step of eager torch. Raises whatever the model raises, and ValueError for a loss without gradients."""
    loss = model.train()(**batch)
    loss.backward()
    if not math.isfinite(loss.item()) or all(one.grad is None for one in model.parameters()):
        raise ValueError(f"the loss is {loss.item()}, or no parameter has a gradient")


def _trained(model: Any) -> Trained:
    return Trained(model, literals(model, model.config))


class Trained(nn.Module):
    """A model with its own loss, or else a mean of the squares of what it returns first. `literals` are tensors of
    integers, as lists, that forward takes besides the batch."""

    def __init__(self, model: nn.Module, literals: Mapping[str, Any]) -> None:
        super().__init__()
        self.inner, self.literals = model, literals

    def forward(self, **batch: Tensor) -> Tensor:
        return loss_of(self.inner(**batch, **{name: torch.tensor(value) for name, value in self.literals.items()}))


def loss_of(output: Any) -> Tensor:
    """The loss that a model returns, or a mean of squares of the floating-point tensor that it returns first, weighted
    along the last dim, as that of normalised vectors has no gradients."""
    if isinstance(output, Mapping) and isinstance(loss := output.get("loss"), Tensor):
        return loss.mean()
    values = [output] if isinstance(output, Tensor) else output.values() if isinstance(output, Mapping) else output
    for value in tree_leaves(list(values)):
        if isinstance(value, Tensor) and value.is_floating_point():
            rising = torch.linspace(0.5, 1.5, value.shape[-1] if value.dim() else 1, dtype=value.dtype)
            return (value.square() * rising).mean()
    raise TypeError(f"{type(output).__name__} holds no tensor to train")
