"""Bags of embeddings, written out, are torch's, and are sliced by batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag as torchs

from strategies.capture.bags import embedding_bag
from tests.strategies.simulated_model import TOLERANCE, Model


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("padding", [None, 3, -2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_and_gradients_are_those_of_torch(mode: str, padding: int | None, weighted: bool) -> None:
    torch.manual_seed(0)
    indices = torch.randint(0, 9, (12, 4))
    indices[0], indices[1] = 3, 7
    table = torch.randn(9, 5, dtype=torch.float64)
    options: dict[str, Any] = {"mode": mode, "padding_idx": padding}
    inputs = [table.requires_grad_()]
    if weighted and mode == "sum":
        inputs.append(torch.randn(12, 4, dtype=torch.float64).requires_grad_())
    found, expected = (
        make(indices, table, **options, per_sample_weights=inputs[1] if len(inputs) > 1 else None)
        for make in (embedding_bag, torchs)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    upstream = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-14)


def test_what_depends_on_all_indices_is_left_to_torch() -> None:
    indices, table = torch.tensor([0, 1, 1, 2]), torch.randn(3, 2, requires_grad=True)
    found = embedding_bag(indices, table, torch.tensor([0, 1]), mode="sum")
    assert torch.equal(found, torchs(indices, table, torch.tensor([0, 1]), mode="sum"))
    gradients = [
        torch.autograd.grad(make(indices[None], table, mode="sum", scale_grad_by_freq=True).sum(), table)[0]
        for make in (embedding_bag, torchs)
    ]
    assert torch.equal(*gradients)


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 6, mode="mean", padding_idx=2)
        self.head = nn.Linear(6, 3)

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.bag(indices))


def test_a_captured_bag_is_a_lookup(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Bags(), nn.CrossEntropyLoss(), (torch.randint(0, 12, (8, 5)), torch.randint(0, 3, (8,))))
    assert {"embedding", "sum"} <= {one.op for one in model.graph.operators}
    assert "embedding_bag" not in {one.op for one in model.graph.operators}
    assert model.worst(draw, 3) < TOLERANCE
