"""Layers of a transformer, to be timed: what a step computes between two collectives, or, where they are small, how
long it takes to begin operators of many kinds."""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional

VIEWS, CALLS = 16, 35
"""Of a layer, forward and backward together, as `strategies.cost.roofline` counts them."""
HEADS = 4


class SampleLayers:
    """So many layers of a width, each with weights of its own, for two sequences of `tokens`."""

    def __init__(self, device: torch.device, layers: int, width: int, tokens: int) -> None:
        def values(*shape: int) -> Tensor:
            return torch.full(shape, 1 / width, device=device, requires_grad=True)

        self.x = values(2, tokens, width)
        self.layers = [[values(width, width) for _ in range(7)] for _ in range(layers)]

    def step(self) -> None:
        """Forward and backward."""
        y = self._run()
        torch.autograd.backward(y, torch.ones_like(y))
        for one in (self.x, *chain.from_iterable(self.layers)):
            one.grad = None

    @torch.no_grad()
    def forward(self) -> None:
        self._run()

    def _run(self) -> Tensor:
        y = self.x
        shape = y.shape[-1:]
        for query, key, value, out, gate, up, down in self.layers:
            normed = functional.layer_norm(y, shape)
            q, k, v = (self._heads(normed @ one) for one in (query, key, value))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            y = y + mixed.transpose(1, 2).reshape(y.shape) @ out
            normed = functional.layer_norm(y, shape)
            y = y + (functional.silu(normed @ gate) * (normed @ up)) @ down
        return y

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], HEADS, x.shape[-1] // HEADS).transpose(1, 2)
