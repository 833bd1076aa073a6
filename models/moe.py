"""A mixture of experts as dense products: a sequence is a group of tokens, an expert takes a fixed number of them.

A token goes to the `choices` experts that its router scores highest. An expert has `capacity` slots per group; they are
assigned in token order, and a token without a slot is dropped by that expert. No token takes a slot from one before it,
so a causal model stays causal. Because the numbers are fixed, dispatch and combination are products with a 0/1 tensor
[group, token, expert, slot] and no shape depends on data: slicing the groups before and the experts after the dispatch
is one all-to-all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .transformer import SelfAttention


class Router(nn.Module):
    """x [group, token, width] -> dispatch and combination [group, token, expert, capacity], load (a scalar).

    dispatch is 1 where the token takes that slot of the expert; combination is the same times the score of the expert
    among the chosen (they add up to 1 if all have a slot). The load is experts * sum over experts of (mean score) *
    (share of tokens whose first choice it is), averaged over the groups: 1 if the experts are used equally.
    """

    def __init__(self, width: int, experts: int, choices: int, capacity: int) -> None:
        super().__init__()
        self.experts, self.choices, self.capacity = experts, choices, capacity
        self.scores = nn.Linear(width, experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        group, token, _ = x.shape
        scores = self.scores(x).softmax(-1)
        best, chosen = scores.topk(self.choices, dim=-1)
        # [group, token, choice, expert]: one expert per choice, counted in integers (bfloat16 ends at 256)
        taken = chosen.unsqueeze(-1) == torch.arange(self.experts, device=x.device)
        # slots are given in the order of the tokens: how many of the expert's were taken until then
        until = taken.flatten(1, 2).cumsum(1).view(group, token, self.choices, self.experts)
        place = (until * taken).sum(-1) - 1
        # [group, token, choice, slot]: beyond the capacity no slot has the number of the place
        slot = (place.unsqueeze(-1) == torch.arange(self.capacity, device=x.device)).to(x.dtype)
        weight = (best / best.sum(-1, keepdim=True)).unsqueeze(-1)
        mask = taken.to(x.dtype)
        dispatch = torch.einsum("gtke,gtkc->gtec", mask, slot)
        combination = torch.einsum("gtke,gtkc->gtec", mask * weight, slot)
        load = self.experts * (scores.mean(1) * mask.select(2, 0).mean(1)).sum(-1).mean()
        return dispatch, combination, load


class ExpertLinear(nn.Module):
    """x [group, expert, slot, in] -> [group, expert, slot, out], with a separate weight [in, out] per expert."""

    def __init__(self, experts: int, features: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, features, out))
        nn.init.normal_(self.weight, std=features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("gecd,edf->gecf", x, self.weight)


class Experts(nn.Module):
    """x [group, expert, slot, width] -> up_proj -> gelu -> down_proj -> the same shape, each expert independently."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = ExpertLinear(experts, width, hidden)
        self.gelu = nn.GELU()
        self.down_proj = ExpertLinear(experts, hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gelu(self.up_proj(x)))
        return out


class Dispatch(nn.Module):
    """x [group, token, width] -> the experts' slots [group, expert, slot, width]; unused slots are zero."""

    def forward(self, routes: Tensor, x: Tensor) -> Tensor:
        return torch.einsum("gtec,gtd->gecd", routes, x)


class Combine(nn.Module):
    """slots [group, expert, slot, width] -> [group, token, width], weighted; a token without a slot gets zeros."""

    def forward(self, routes: Tensor, slots: Tensor) -> Tensor:
        return torch.einsum("gtec,gecd->gtd", routes, slots)


class MixtureOfExperts(nn.Module):
    """x [group, token, width] -> (the same shape, load): a mixture-of-experts feed-forward layer with `experts`
    experts.

    `spare` is the capacity factor: an expert has
    ceil(spare * choices * tokens / experts) slots in a group of `tokens` tokens.
    Raises ValueError: more choices than experts, or an x with another number of tokens.
    """

    def __init__(
        self, width: int, hidden: int, tokens: int, experts: int, choices: int = 2, spare: float = 1.25
    ) -> None:
        super().__init__()
        if not 1 <= choices <= experts:
            raise ValueError(f"choices = {choices} must be between 1 and experts = {experts}")
        self.tokens = tokens
        self.router = Router(width, experts, choices, math.ceil(spare * choices * tokens / experts))
        self.dispatch = Dispatch()
        self.experts = Experts(experts, width, hidden)
        self.combine = Combine()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[1] != self.tokens:
            raise ValueError(f"a group of {x.shape[1]} tokens, but the slots are counted for tokens = {self.tokens}")
        dispatch, combination, load = self.router(x)
        return self.combine(combination, self.experts(self.dispatch(dispatch, x))), load


class MoELayer(nn.Module):
    """One pre-norm layer with a mixture of experts: x [batch, sequence, width] -> (the same shape, load)."""

    def __init__(
        self, width: int, heads: int, hidden: int, length: int, experts: int, choices: int, spare: float
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = MixtureOfExperts(width, hidden, length, experts, choices, spare)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x))
        fed, load = self.feed_forward(self.feed_forward_norm(x))
        return x + fed, load


class MoE(nn.Module):
    """input_ids [batch, length] int64 -> (logits [batch, length, vocabulary], load): causal attention and experts.

    Every sequence has exactly `length` tokens and is one group. The load is the mean over the layers; give it to
    `models.losses.NextTokenLoss`. The other arguments are those of `MixtureOfExperts` and `SelfAttention`.
    """

    def __init__(
        self,
        vocabulary: int,
        length: int,
        width: int,
        layers: int,
        heads: int,
        hidden: int,
        experts: int,
        choices: int = 2,
        spare: float = 1.25,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(length, width))
        self.layers = nn.ModuleList(
            MoELayer(width, heads, hidden, length, experts, choices, spare) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for table in (self.tokens.weight, self.positions):
            nn.init.normal_(table, std=0.02)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(input_ids) + self.positions
        loads = []
        for layer in self.layers:
            x, load = layer(x)
            loads.append(load)
        return self.head(self.norm(x)), torch.stack(loads).mean()
