"""Rank functions that use DeepSpeed directly: train a few steps and save."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from runner.launch.orders import RankContext
from strategies.optimizer.zero.engine import deepspeed_for


class Tied(nn.Module):
    """Tied weights, a frozen parameter, a buffer, and sizes that two ranks cannot divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.outer = nn.Linear(3, 5, bias=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        inner = self.inner(self.embed(ids))
        hidden = inner * self.scale.to(inner.dtype) @ self.frozen
        logits: torch.Tensor = self.head(self.outer(hidden))
        return functional.cross_entropy(logits, ids)


def save(rank: RankContext, payload: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train two steps at the payload's ZeRO stage and save. Returns the weights that DeepSpeed's own tool reads."""
    deepspeed = deepspeed_for(torch.device("cpu"))
    torch.manual_seed(0)
    model = Tied()
    given: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": payload["stage"]},
        "bf16": {"enabled": payload["stage"] > 0},
        "zero_allow_untested_optimizer": True,
    }
    groups = [
        {"params": [p for n, p in model.named_parameters() if p.requires_grad and "bias" not in n]},
        {"params": [p for n, p in model.named_parameters() if "bias" in n], "lr": 0.2},
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.Adam(groups, lr=0.1), config=given)
        for step in range(2):
            loss = engine(torch.tensor([rank.rank, step + 2]))
            engine.backward(loss)
            engine.step()
        engine.save_checkpoint(payload["folder"])
    if rank.rank or not payload["stage"]:
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(Path(payload["folder"])))
    return found
