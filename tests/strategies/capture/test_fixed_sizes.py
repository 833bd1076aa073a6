"""What does not run on slices: views by sizes of the model, and numbers that are sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from strategies.capture import Objective, capture
from strategies.capture.shapes import pretend


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(12, 12), nn.Linear(12, 4), nn.Linear(12, 12)
        self.heads = 6

    def split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:2], heads, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.split(self.q(x), self.heads), self.split(self.k(x), 2)
        return x + self.o((q * k.repeat_interleave(q.shape[2] // k.shape[2], 2)).flatten(2))


class Following(Fixed):
    def split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:2], x.shape[-1] // 2, 2)


class Unknown(Fixed):
    """Lets the tensor decide how many heads it has."""

    def split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, 2)


class Biased(Unknown):
    """Adds numbers for as many heads as it has, as T5 does."""

    def split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return super().split(x, heads) + torch.zeros(heads, 1)


class Unset(Following):
    """Does not say how many heads of keys it has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kv_heads: int | None = None


class Counting(Fixed):
    """Splits a slice into as many heads, with fewer columns."""

    def split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:2], heads, x.shape[-1] // heads)


class Reading(Following):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check(bool(x.isfinite().all()))
        return super().forward(x)


def fixed(*parts: nn.Module, on: str = "cpu") -> list[str]:
    """The names of the views that a model of these parts splits by sizes of its own."""
    step = Objective(nn.Sequential(*parts), nn.MSELoss(), ("0", "1"), ("1",), target="transformers")
    batch: Any = [torch.randn(2, 3, 12), torch.randn(2, 3, 12)]
    if on == "meta":
        batch = pretend(step.to(on), batch)
    graph = capture(step, batch, training=True).graph
    return sorted(graph.by_id[one].name for one in graph.fixed_sizes)


@pytest.mark.parametrize("on", ["cpu", "meta"])
def test_views_by_sizes_of_the_model_are_found(on: str) -> None:
    found = fixed(Following(), Fixed(), Following(), Fixed(), on=on)
    assert found == ["1.view@0", "1.view@1", "3.view@0", "3.view@1"]
    assert fixed(Following(), on=on) == []


def test_views_of_modules_that_fix_another_size_are_found() -> None:
    assert fixed(Unknown(), Biased()) == ["1.view@0", "1.view@1"]


def test_views_that_split_a_slice_into_as_many_parts_are_found() -> None:
    assert fixed(Following(), Counting()) == ["1.view@0", "1.view@1"]


@pytest.mark.parametrize(("part", "unsliced"), [(Counting, {"1"}), (Unset, set())])
def test_modules_that_count_their_heads_under_another_name_are_unsliced(part: Any, unsliced: set[str]) -> None:
    step = Objective(nn.Sequential(Following(), part()), nn.MSELoss(), ("0", "1"), ("1",), target="deepspeed")
    batch = [torch.randn(2, 3, 12), torch.randn(2, 3, 12)]
    assert capture(step, batch, training=True).graph.unsliced_modules == unsliced


def test_a_model_that_reads_numbers_is_not_judged() -> None:
    assert fixed(Reading()) == []


def test_the_model_is_left_as_it_is() -> None:
    norm, part = nn.BatchNorm1d(3), Fixed().eval()
    before = [*part.parameters()]
    assert fixed(norm, part) == ["1.view@0", "1.view@1"]
    assert norm.num_batches_tracked == 0 and not norm.running_mean.any() and not part.training
    assert all(one is other for one, other in zip(part.parameters(), before, strict=True))
    assert not part.q._forward_hooks and not part.q._forward_pre_hooks


class Scaled(Fixed):
    """Computes with sizes of its own, in one of several forms."""

    def __init__(self, scale: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.hidden_size, self.num_heads, self.scale = 12, 6, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self, super().forward(x.view(-1, 3, self.num_heads * 2)))


@pytest.mark.parametrize(
    ("scale", "unsliced"),
    [
        (lambda own, x: x * own.hidden_size**-0.5, True),
        (lambda own, x: x * (own.hidden_size / 40), True),
        (lambda own, x: x / own.num_heads, True),
        (lambda own, x: own.num_heads * x, True),
        (lambda own, x: x * math.sqrt(2 * own.hidden_size), True),
        (lambda own, x: x * 2 ** math.floor(math.log2(own.num_heads)), True),
        (lambda own, x: x * (own.hidden_size * 1.5), True),
        (lambda own, x: x.view(-1, 3, own.hidden_size // own.num_heads * 6), False),
        (lambda own, x: x + torch.zeros(own.hidden_size, dtype=x.dtype), False),
        (lambda own, x: x.split(own.hidden_size // 2, -1)[0].repeat(1, 1, 2), False),
    ],
)
def test_modules_that_compute_with_their_sizes_are_unsliced(scale: Any, unsliced: bool) -> None:
    """DeepSpeed gives them the sizes of a slice."""
    step = Objective(nn.Sequential(Following(), Scaled(scale)), nn.MSELoss(), ("0", "1"), ("1",), target="deepspeed")
    batch = [torch.randn(2, 3, 12), torch.randn(2, 3, 12)]
    assert capture(step, batch, training=True).graph.unsliced_modules == ({"1"} if unsliced else set())
