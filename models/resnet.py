"""ResNet: convolutions with residual connections, and batch norm statistics over the global batch.

Parameters have the names and shapes of the well-known implementation, so its weights can be loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """x [batch, inside, h, w] -> [batch, planes, h / stride, w / stride] by two 3 x 3 convolutions.

    The residual is the input, or `downsample` of it (1 x 1) where the shape differs.
    """

    expansion = 1

    def __init__(self, inside: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, planes, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = _downsample(inside, planes * self.expansion, stride)
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu2(branch + (x if self.downsample is None else self.downsample(x)))
        return out


class Bottleneck(nn.Module):
    """x [batch, inside, h, w] -> [batch, 4 * planes, h / stride, w / stride] by convolutions 1 x 1, 3 x 3 and 1 x 1."""

    expansion = 4

    def __init__(self, inside: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(planes, planes * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.downsample = _downsample(inside, planes * self.expansion, stride)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        branch = self.relu1(self.bn1(self.conv1(x)))
        branch = self.bn3(self.conv3(self.relu2(self.bn2(self.conv2(branch)))))
        out: Tensor = self.relu3(branch + (x if self.downsample is None else self.downsample(x)))
        return out


def _downsample(inside: int, out: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inside == out:
        return None
    return nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))


class ResNet(nn.Module):
    """image [batch, channels, h, w] -> scores [batch, classes].

    Stage i has `depths[i]` blocks with width * 2^i planes and halves the image, except for the first one. The stem is
    a 7 x 7 convolution of stride 2 and a pooling of stride 2, or with `small` one 3 x 3 convolution, for images of a
    few dozen pixels.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        classes: int,
        channels: int = 3,
        width: int = 64,
        small: bool = False,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small else (7, 2)
        self.conv1 = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, padding=1)
        self.stages = len(depths)
        inside = width
        for number, depth in enumerate(depths):
            planes = width * 2**number
            blocks: list[nn.Module] = []
            for position in range(depth):
                blocks.append(block(inside, planes, 2 if number and not position else 1))
                inside = planes * block.expansion
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inside, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(image))))
        for number in range(1, self.stages + 1):
            x = self.get_submodule(f"layer{number}")(x)
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


def resnet18(classes: int = 1000, channels: int = 3) -> ResNet:
    """18 layers: 11,689,512 parameters for 1000 classes."""
    return ResNet(BasicBlock, [2, 2, 2, 2], classes, channels)


def resnet50(classes: int = 1000, channels: int = 3) -> ResNet:
    """50 layers: 25,557,032 parameters for 1000 classes."""
    return ResNet(Bottleneck, [3, 4, 6, 3], classes, channels)


def resnet_small(classes: int, channels: int = 3, width: int = 16, depth: int = 1, bottleneck: bool = False) -> ResNet:
    """Three stages of `depth` blocks for images [batch, channels, h, w] of a few dozen pixels."""
    return ResNet(Bottleneck if bottleneck else BasicBlock, [depth] * 3, classes, channels, width, small=True)


def resnet_digits(width: int = 8, depth: int = 1, classes: int = 10, bottleneck: bool = False) -> ResNet:
    """`resnet_small` for images [batch, 1, 28, 28]: a toy that trains on one core."""
    return resnet_small(classes, 1, width, depth, bottleneck)
