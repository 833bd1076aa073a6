"""What both sides of a comparison train: a model of `models/`, its loss and a global batch, the same from any process.

Invariant: everything follows from the case, so a process that receives one has the batch and the architecture of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.gpt import GPT
from models.llama import Llama
from models.losses import NextTokenLoss
from models.vit import ViT

VOCABULARY, CLASSES, PATCH = 512, 10, 4
HEAD = 32
"""Columns of a head of attention."""


class UntiedGPT(GPT):
    """A GPT whose output layer has a weight of its own: stages of torch.distributed.pipelining cannot share one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head.weight = nn.Parameter(self.tokens.weight.detach().clone())


@dataclass(frozen=True)
class Case:
    """A model and a global batch.

    Attributes:
        family: gpt, llama or vit.
        width: columns of a token.
        layers: their number.
        sequence: tokens of a row; of an image the smallest square of patches with as many.
        rows: of the global batch.
        tied: whether the output layer of a GPT is its token embedding.
    """

    family: str
    width: int
    layers: int
    sequence: int
    rows: int
    tied: bool = True

    @property
    def model_section(self) -> dict[str, Any]:
        """Section `model` of a config."""
        heads, shared = self.width // HEAD, {"width": self.width, "layers": self.layers}
        if self.family == "vit":
            args = {"size": self._side * PATCH, "patch": PATCH, "heads": heads, "classes": CLASSES}
            return {"target": "models.vit.ViT", "args": shared | args}
        text = shared | {"vocabulary": VOCABULARY, "length": self.sequence, "heads": heads}
        if self.family == "llama":
            return {"target": "models.llama.Llama", "args": text | {"kv_heads": heads, "hidden": 3 * self.width}}
        return {"target": "models.gpt.GPT" if self.tied else "benchmarks.peers.cases.UntiedGPT", "args": text}

    @property
    def loss_section(self) -> dict[str, Any]:
        """Section `loss` of a config."""
        return {"target": "torch.nn.CrossEntropyLoss" if self.family == "vit" else "models.losses.NextTokenLoss"}

    @property
    def _side(self) -> int:
        """Patches along a side of an image."""
        side = 1
        while side * side < self.sequence:
            side += 1
        return side

    def model(self) -> nn.Module:
        """The model, with weights of its own."""
        args = self.model_section["args"]
        if self.family == "vit":
            return ViT(**args)
        if self.family == "llama":
            return Llama(**args)
        return GPT(**args) if self.tied else UntiedGPT(**args)

    def loss(self) -> nn.Module:
        """The loss of output and target."""
        return nn.CrossEntropyLoss() if self.family == "vit" else NextTokenLoss()

    def batch(self) -> tuple[Tensor, Tensor]:
        """Input and target of the global batch."""
        draw = torch.Generator().manual_seed(0)
        if self.family == "vit":
            size = self._side * PATCH
            labels = torch.randint(CLASSES, (self.rows,), generator=draw)
            return torch.randn(self.rows, 3, size, size, generator=draw), labels
        tokens, labels = (torch.randint(VOCABULARY, (self.rows, self.sequence), generator=draw) for _ in range(2))
        return tokens, labels


class Rows:
    """The rows of a case's batch as a dataset; the arguments are those of `Case`."""

    def __init__(self, **case: Any) -> None:
        self._entries = Case(**case).batch()

    def __len__(self) -> int:
        return len(self._entries[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first, second = self._entries
        return first[index], second[index]


class Part(nn.Module):
    """Consecutive layers of a model, with what comes before the first and behind the last one.

    Args:
        model: whose modules it takes.
        layers: the numbers of its layers.
    """

    def __init__(self, model: nn.Module, layers: Sequence[int]) -> None:
        super().__init__()
        every = [*model.layers]  # type: ignore[misc]
        self.layers = nn.ModuleList(every[number] for number in layers)
        self.first, self.last = layers[0] == 0, layers[-1] == len(every) - 1
        if self.first and isinstance(model, ViT):
            self.patches, self.class_token, self.positions = model.patches, model.class_token, model.positions
        elif self.first:
            self.tokens = model.tokens
            if isinstance(model, GPT):
                self.positions = model.positions
        if self.last:
            self.norm, self.head, self.pooled = model.norm, model.head, isinstance(model, ViT)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self._embedded(x)
        for layer in self.layers:
            x = layer(x)
        if self.last:
            x = self.head(self.norm(x[:, 0] if self.pooled else x))  # type: ignore[operator]
        return x

    def _embedded(self, x: Tensor) -> Tensor:
        if hasattr(self, "patches"):
            patches = self.patches(x).flatten(2).transpose(1, 2)  # type: ignore[operator]
            token = self.class_token.expand(x.shape[0], -1, -1)  # type: ignore[operator]
            return torch.cat((token, patches), 1) + self.positions  # type: ignore[operator]
        embedded: Tensor = self.tokens(x)  # type: ignore[operator]
        if hasattr(self, "positions"):
            embedded = embedded + self.positions(torch.arange(x.shape[1], device=x.device))
        return embedded
