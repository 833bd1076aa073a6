"""A network whose module and tensor names collide with those of generated code and of nn.Module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.matrix.zoo.architecture import BATCH, Example

CHILDREN = (
    *("self", "forward", "class", "input", "output", "_x", "0", "torch", "device", "train", "parameters", "meta"),
    *(
        "graph",
        "_modules",
        "_own_0",
        "_reached_0",
        "use_linear",
        "it's",
        'say "hi"',
        "a.b",
        "two words",
        "größe",
        "\\",
        "\n",
    ),
)
TENSORS = ("print", "len", "type", "range", "sum", "lambda", "self", "torch", "forward", "it's", "code")
BUFFERS = ("max", "eval", "state_dict", '"""')


class Inner(nn.Module):
    """A linear layer in a child whose name is an attribute of its module."""

    def __init__(self, width: int, name: str) -> None:
        super().__init__()
        self.name, self._modules[name], self.norm = name, nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self._modules[self.name](x)))


class Named(nn.Module):
    """Reaches what its names hide from attributes in torch's own tables. One child is called twice, one from outside of
    its parent before that runs itself."""

    def __init__(self, dropout: float, width: int = 8) -> None:
        super().__init__()
        for name in CHILDREN:
            self._modules[name] = Inner(width, name)
        for name in TENSORS:
            self._parameters[name] = nn.Parameter(1 + 0.1 * torch.randn(width))
        for name in BUFFERS:
            self._buffers[name] = torch.rand(width)
        self.act, self.act_1 = nn.ReLU(), nn.Tanh()
        self.drop, self.loss_of = nn.Dropout(dropout), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self._modules["self"].norm(x)
        for name in CHILDREN:
            x = x + self._modules[name](x)
        for name in TENSORS:
            x = x * self._parameters[name]
        for name in BUFFERS:
            x = x + self._buffers[name]
            self._buffers[name].add_(x.detach().mean(0))
        x = self.act(x) + self.act(x - 1) + self.act_1(x)
        x = self.act_1(self._modules["forward"].norm(self.drop(x)) + self._modules["self"].norm(x))
        return {"loss": self.loss_of(x).square().mean()}


def named(dropout: float) -> Example:
    return Named(dropout), {"x": torch.randn(BATCH, 8)}
