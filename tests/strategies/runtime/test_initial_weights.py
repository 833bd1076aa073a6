"""Initial weights: one file of full tensors, of which every rank copies its own slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.core.program import Program
from strategies.lowering.lowering import lower
from strategies.runtime import initial_weights as weights
from strategies.runtime.simulate import assemble
from tests.strategies.simulated_model import Model


class Net(nn.Module):
    """Tied and frozen weights, a parameter and a buffer of no dims, a strided parameter, a constant, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(8, 16), nn.Linear(16, 8)
        self.head.weight = self.emb.weight
        self.head.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.turned = nn.Parameter(torch.randn(16, 4).t())
        self.register_buffer("shift", torch.tensor(0.5))
        self.register_buffer("order", torch.randperm(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x) * self.scale + self.shift + self.turned.sum(0)
        return self.head(h)[:, self.order] + torch.tensor([1.0, 2.0] * 4, dtype=h.dtype)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(Net(), nn.CrossEntropyLoss(), (torch.randint(0, 8, (8,)), torch.randint(0, 8, (8,))))


@pytest.fixture
def file(model: Model, tmp_path: Path) -> Path:
    weights.write(tmp_path / "initial.pt", model.captured.tensors)
    return tmp_path / "initial.pt"


def program_of(model: Model, draw: Any, seed: int) -> Program:
    return lower(model.graph, model.random_plan(draw, seed))


@pytest.mark.parametrize("seed", range(4))
def test_slices_make_up_the_full_tensor(model: Model, file: Path, draw: Any, seed: int) -> None:
    program = program_of(model, draw, seed)
    pieces = [weights.read_slices(file, program, rank, "cpu") for rank in range(program.mesh.size)]
    for source in program.sources:
        if source.kind != "input":
            layout, expected = program.layouts[source.id], model.captured.tensors[source.name]
            found = assemble([rank[source.name].detach() for rank in pieces], layout, expected.shape, program.mesh)
            assert torch.equal(found, expected) and found.dtype == expected.dtype


def test_kinds_are_kept(model: Model, file: Path, draw: Any) -> None:
    found = weights.read_slices(file, program_of(model, draw, 0), 3, "cpu")
    assert {name for name, tensor in found.items() if isinstance(tensor, nn.Parameter)} == {
        "emb.weight",
        "head.bias",
        "scale",
        "turned",
    }
    assert [name for name, tensor in found.items() if tensor.requires_grad] == ["scale", "turned", "emb.weight"]
    assert found["scale"].shape == found["shift"].shape == ()
    assert found["order"].dtype == torch.int64


def test_a_rank_holds_no_more_than_its_slices(model: Model, file: Path, draw: Any) -> None:
    program = program_of(model, draw, 1)
    for source in program.sources:
        if source.kind != "input":
            piece = weights.read_slices(file, program, 2, "cpu")[source.name]
            local = program.layouts[source.id].local_shape(source.spec.shape, program.mesh)
            assert piece.shape == local and piece.is_contiguous()
            assert piece.untyped_storage().nbytes() == piece.numel() * piece.element_size()


def test_a_slice_is_a_copy(model: Model, file: Path, draw: Any) -> None:
    program = program_of(model, draw, 2)
    with torch.no_grad():
        weights.read_slices(file, program, 0, "cpu")["turned"].zero_()
    again = weights.read_slices(file, program, 0, "cpu")["turned"]
    assert again.abs().sum() > 0
    assert torch.equal(weights.read_all(file)["turned"], model.captured.tensors["turned"])


def test_the_model_itself_is_not_copied(model: Model) -> None:
    assert model.captured.tensors["emb.weight"].data_ptr() == model.net.emb.weight.data_ptr()  # type: ignore[union-attr]
    assert not any(tensor.requires_grad for tensor in model.captured.tensors.values())
