"""Stored tensors: every format gives the same blocks, reads no more than a block, and reports damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from strategies.core.errors import StrategyError
from strategies.lowering.lowering import lower
from strategies.runtime import initial_weights as weights
from strategies.runtime import tensor_files as stored
from strategies.runtime.simulate import assemble
from strategies.runtime.tensor_files import StoredTensor, TensorReader, index
from tests.strategies.simulated_model import Model

FORMS = ("one.safetensors", "one.pt", "nested.pt", "pieces", "pieces.bin", "folder")


def tensors() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "enter.weight": torch.randn(6, 10, generator=draw),
        "half": torch.randn(5, generator=draw).bfloat16(),
        "count": torch.tensor(7),
        "order": torch.randperm(4, generator=draw),
        "turned": torch.randn(4, 3, generator=draw).t(),
        "codes": torch.tensor([3, 65535]).to(torch.uint16),
    }


@pytest.mark.parametrize("elements", [10, 100_000])
def test_a_full_disk_is_named(elements: int) -> None:
    with pytest.raises(OSError, match="No space left on device"):
        stored.save({"a": torch.zeros(elements)}, Path("/dev/full"))


@pytest.fixture(params=FORMS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(request.param, tmp_path, tensors())


def write(form: str, folder: Path, content: dict[str, Tensor]) -> Path:
    """The same tensors in one of the forms that are read."""
    dense = {name: tensor.contiguous() for name, tensor in content.items()}
    first = dict(list(dense.items())[:2])
    second = dict(list(dense.items())[2:])
    if form in ("pieces", "pieces.bin"):
        name, save = ("model.safetensors", save_file) if form == "pieces" else ("pytorch_model.bin", torch.save)
        suffix = Path(name).suffix
        save(first, folder / f"a{suffix}")
        save(second, folder / f"b{suffix}")
        named = dict.fromkeys(first, f"a{suffix}") | dict.fromkeys(second, f"b{suffix}")
        (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": named}), encoding="utf-8")
        return folder
    if form == "folder":
        save_file(dense, folder / "mine.safetensors")
        return folder
    if form == "one.safetensors":
        save_file(dense, folder / form)
    else:
        torch.save(content if form == "one.pt" else {"epoch": 3, "state_dict": content}, folder / form)
    return folder / form


def test_every_form_gives_the_same_blocks(path: Path) -> None:
    found, reader = index(path), TensorReader()
    assert found.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert found[name].shape == tensor.shape and found[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert torch.equal(reader.block(found[name]), tensor)
    piece = reader.block(found["enter.weight"], ((2, 4), (5, 10)))
    assert torch.equal(piece, tensors()["enter.weight"][2:4, 5:10])
    assert piece.is_contiguous() and piece.untyped_storage().nbytes() == 2 * 5 * 4
    assert reader.block(found["enter.weight"], ((6, 6), (0, 10))).shape == (0, 10)


def test_stored_parameters_come_without_their_history(tmp_path: Path) -> None:
    torch.save(dict(nn.Linear(2, 3).named_parameters()), tmp_path / "one.pt")
    found = index(tmp_path / "one.pt")
    assert not TensorReader().block(found["weight"]).requires_grad


def test_what_modules_keep_beside_tensors_is_left_out(tmp_path: Path) -> None:
    torch.save({**tensors(), "a._extra_state": {"calls": 3}}, tmp_path / "one.pt")
    assert index(tmp_path / "one.pt").keys() == tensors().keys()
    torch.save({**tensors(), "other": {"calls": 3}}, tmp_path / "two.pt")
    with pytest.raises(StrategyError, match="not a state dict"):
        index(tmp_path / "two.pt")


def test_only_headers_are_read_for_an_index(tmp_path: Path) -> None:
    """Tensor data may be missing: a sparse file with a hole of 64 GiB is indexed, and its blocks are read."""
    header = json.dumps({"big": {"dtype": "F32", "shape": [1 << 17, 1 << 17], "data_offsets": [0, 1 << 36]}}).encode()
    with (tmp_path / "big.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 36))
    entry = index(tmp_path)["big"]
    assert TensorReader().block(entry, ((5, 7), (100, 103))).equal(torch.zeros(2, 3))


class Net(nn.Module):
    """Tied weights, a frozen bias, a buffer; sizes that 2 and 4 do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(8, 16), nn.Linear(16, 8)
        self.head.weight = self.emb.weight
        self.register_buffer("shift", torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.emb(x)) + self.shift


@pytest.mark.parametrize("form", ["one.safetensors", "one.pt"])
def test_initial_weights_that_are_stored_elsewhere(form: str, tmp_path: Path, draw: object) -> None:
    torch.manual_seed(0)
    model = Model(Net(), nn.CrossEntropyLoss(), (torch.randint(0, 8, (8,)), torch.randint(0, 8, (8,))))
    own = model.captured.tensors
    other = {name: torch.randn(own[name].shape).half() for name in ("emb.weight", "shift")}
    elsewhere = index(write(form, tmp_path, other))
    file = tmp_path / "initial"
    weights.write(file, own, elsewhere)
    for seed in range(3):
        program = lower(model.graph, model.random_plan(draw, seed))
        pieces = [weights.read_slices(file, program, rank, "cpu") for rank in range(program.mesh.size)]
        for source in program.sources:
            if source.kind != "input":
                layout, expected = program.layouts[source.id], other.get(source.name, own[source.name]).float()
                found = assemble([rank[source.name].detach() for rank in pieces], layout, expected.shape, program.mesh)
                assert torch.equal(found, expected) and found.dtype == own[source.name].dtype
        only = weights.read_slices(file, program, 1, "cpu", pretrained=True)
        assert only.keys() == other.keys()
    full_weights = weights.read_all(file)
    assert torch.equal(full_weights["emb.weight"], other["emb.weight"]) and torch.equal(
        full_weights["head.bias"], own["head.bias"]
    )


def message(path: Path) -> str:
    with pytest.raises(StrategyError) as caught:
        found = index(path)
        TensorReader().block(next(iter(found.values())))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_errors_in_a_file_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no such file or folder" in message(tmp_path / "nowhere")
    assert "this folder holds no file of weights" in message(tmp_path)
    (tmp_path / "weights.txt").write_text("", encoding="utf-8")
    assert "weights are read from .safetensors, .pt" in message(tmp_path / "weights.txt")
    (tmp_path / "bad.safetensors").write_bytes(b"12345678abcdefgh")
    assert "it does not begin with the length of a header" in message(tmp_path / "bad.safetensors")
    save_file({"a": torch.ones(9)}, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-1])
    assert "it is cut off, or a is not where its header says" in message(tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").unlink()
    (tmp_path / "bad.pt").write_bytes(b"12345678abcdefgh")
    assert "bad.pt: cannot be read as weights" in message(tmp_path / "bad.pt")
    assert "several of them (bad.pt, bad.safetensors)" in message(tmp_path)
    torch.save({"epoch": 3, "net": 1}, tmp_path / "odd.pt")
    assert "holds epoch, net, not a state dict" in message(tmp_path / "odd.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "code.pt")
    assert "that could run code from it" in message(tmp_path / "code.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert "store it anew with a current torch.save" in message(tmp_path / "old.pt")
    save_file({"a": torch.zeros(2, dtype=torch.float8_e4m3fn)}, tmp_path / "f8.safetensors")
    assert "a is stored as F8_E4M3; quantised weights are not read" in message(tmp_path / "f8.safetensors")


def test_errors_in_an_index_are_reported(tmp_path: Path) -> None:
    place = tmp_path / "model.safetensors.index.json"
    place.write_text("[]", encoding="utf-8")
    assert "cannot be read as weights (TypeError" in message(place)
    place.write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}), encoding="utf-8")
    assert "one.safetensors that it names is not beside it" in message(tmp_path)
    save_file({"b": torch.zeros(2)}, tmp_path / "one.safetensors")
    assert "a is not in one.safetensors, although the index says so" in message(tmp_path)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    for form in ("one.safetensors", "one.pt"):
        entry: StoredTensor = index(write(form, tmp_path, tensors()))["half"]
        Path(entry.parts[0].file).unlink()
        with pytest.raises(StrategyError, match="cannot be read as weights"):
            TensorReader().block(entry)
    assert set(stored.DTYPES.values()) >= {"float32", "bfloat16", "int64", "bool"}
