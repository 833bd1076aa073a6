"""ViT: an image as a sequence of patches, with a learned class token in front, whose output is classified."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .transformer import Block


class ViT(nn.Module):
    """image [batch, channels, size, size] -> scores [batch, classes].

    The image is cut into (size / patch)^2 patches, each a token of `width` columns; `layers` blocks with `heads` heads,
    `dropout` on embeddings and branches. With the arguments of ViT-B/16 (224, 16, 768, 12, 12, 1000) it has its
    86,567,656 parameters. Raises ValueError: a size that the patches do not divide.
    """

    def __init__(
        self,
        size: int,
        patch: int,
        width: int,
        layers: int,
        heads: int,
        classes: int,
        channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if size % patch:
            raise ValueError(f"size = {size} is not a multiple of patch = {patch}; the patches must cover the image")
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width))
        nn.init.normal_(self.positions, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(width, heads, dropout=dropout, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patches(image).flatten(2).transpose(1, 2)
        token = self.class_token.expand(image.shape[0], -1, -1)
        x = self.dropout(torch.cat((token, patches), 1) + self.positions)
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.head(self.norm(x[:, 0]))
        return scores
