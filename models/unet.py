"""U-Net: every pixel of a picture gets scores, from its neighbourhood at several resolutions.

Source: Ronneberger, Fischer, Brox, "U-Net: Convolutional networks for biomedical image segmentation" (2015), with
padded convolutions and batch norm.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class Convolutions(nn.Module):
    """x [batch, inside, h, w] -> [batch, out, h, w] by two 3 x 3 convolutions."""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu2(self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x))))))
        return out


class UNet(nn.Module):
    """picture [batch, channels, h, w] -> scores [batch, classes, h, w].

    Level i of `levels` has width * 2^i channels and h / 2^i rows. On the way down a maximum pooling halves the picture,
    on the way up a transposed convolution doubles it, and what the way down had at this level is joined to it.
    """

    def __init__(self, classes: int, channels: int = 3, width: int = 8, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        pairs = list(pairwise(widths))
        self.first = Convolutions(channels, width)
        self.pools = nn.ModuleList(nn.MaxPool2d(2) for _ in pairs)
        self.down = nn.ModuleList(Convolutions(upper, lower) for upper, lower in pairs)
        self.ups = nn.ModuleList(nn.ConvTranspose2d(lower, upper, 2, 2) for upper, lower in reversed(pairs))
        self.joined = nn.ModuleList(Convolutions(2 * upper, upper) for upper, _ in reversed(pairs))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, picture: Tensor) -> Tensor:
        x = self.first(picture)
        passed = []
        for pool, down in zip(self.pools, self.down, strict=True):
            passed.append(x)
            x = down(pool(x))
        for up, joined in zip(self.ups, self.joined, strict=True):
            x = joined(torch.cat((passed.pop(), up(x)), 1))
        scores: Tensor = self.head(x)
        return scores
