"""Documents in one row: models of transformers compute for each what they compute for it alone; others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.gpt import GPT
from models.losses import NextTokenLoss
from runner.build import huggingface
from runner.config.schema import Model
from runner.data.loader import flatten_batch, global_batch
from runner.data.packing import IGNORED, Packed
from runner.errors import ConfigError
from runner.planning.neighbours import check_neighbours
from strategies.capture import Objective

LENGTHS = (3, 1, 7, 5)
LLAMA = {
    "vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {"vocab_size": 257, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "resid_pdrop": 0.0}
BLOOM = {"vocab_size": 257, "hidden_size": 32, "n_layer": 1, "n_head": 4}  # positions are in its attention alone


def built(name: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return huggingface.build(Model(target=f"transformers.{name}", args={}, config=config, weights=None, rename=()))


def packed(tmp_path: Path, **given: Any) -> Packed:
    text = "\n\n".join("abcdefghijk"[:length] for length in LENGTHS) * 4
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    path = str(tmp_path / "text.txt")
    return Packed(16, path=path, separator="\n\n", train=None, cache=str(tmp_path / "cache"), **given)


def batch_of(data: Packed) -> tuple[tuple[str, ...], list[Tensor]]:
    return flatten_batch(global_batch(data, None, [0, 1]))


@pytest.mark.parametrize(("attention", "close"), [("eager", 1e-6), ("sdpa", 1e-12)])  # eager takes softmax in fp32
@pytest.mark.parametrize(("name", "config"), [("LlamaForCausalLM", LLAMA), ("GPT2LMHeadModel", GPT2)])
def test_a_row_is_its_documents_one_at_a_time(name, config, attention, close):
    model = built(name, config | {"attn_implementation": attention}).double().eval()
    documents = [torch.randint(256, (1, length)) for length in LENGTHS]
    labels = [document.clone().index_fill(1, torch.tensor([0]), IGNORED) for document in documents]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    row = model(input_ids=torch.cat(documents, 1), position_ids=positions, labels=torch.cat(labels, 1))
    row.loss.backward()
    gradients = {key: one.grad.clone() for key, one in model.named_parameters()}
    model.zero_grad()
    alone = [model(input_ids=document, labels=own) for document, own in zip(documents, labels, strict=True)]
    torch.testing.assert_close(torch.cat([one.logits for one in alone], 1), row.logits, rtol=1e-10, atol=close)
    pairs = [(one.loss * (length - 1)) for one, length in zip(alone, LENGTHS, strict=True) if length > 1]
    loss = torch.stack(pairs).sum() / (sum(LENGTHS) - len(LENGTHS))
    torch.testing.assert_close(loss, row.loss)
    loss.backward()
    for key, one in model.named_parameters():
        torch.testing.assert_close(one.grad, gradients[key], rtol=1e-10, atol=close)


def test_models_that_keep_documents_apart(tmp_path):
    rows = packed(tmp_path, shift=False)
    names, tensors = batch_of(rows)
    assert names == ("input_ids", "position_ids", "labels")
    for name, config in (("LlamaForCausalLM", LLAMA), ("GPT2LMHeadModel", GPT2)):
        check_neighbours(Objective(built(name, config), None, names, ()), names, tensors, rows)
    rows = packed(tmp_path)
    names, tensors = batch_of(rows)
    own = GPT(vocabulary=257, length=16, width=16, layers=1, heads=2, dropout=0.5)
    check_neighbours(Objective(own, NextTokenLoss(), names, ("labels",)), names, tensors, rows)
    assert own.training


class Scores(nn.Module):
    """Logits alone, for a loss of its own, of a model that swallows what it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = built("LlamaForCausalLM", LLAMA)

    def forward(self, input_ids: Tensor, documents: Tensor, positions: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=input_ids, documents=documents, positions=positions).logits
        return logits


@pytest.mark.parametrize("leaking", ["unknown entries", "positions that make no mask", "a module around it"])
def test_a_model_that_lets_documents_see_each_other_is_refused(tmp_path, leaking):
    rows = packed(tmp_path, shift=leaking != "positions that make no mask")
    names, tensors = batch_of(rows)
    steps = {
        "unknown entries": lambda: Objective(built("LlamaForCausalLM", LLAMA), None, names, ()),
        "positions that make no mask": lambda: Objective(built("BloomForCausalLM", BLOOM), None, names, ()),
        "a module around it": lambda: Objective(Scores(), NextTokenLoss(), names, ("labels",)),
    }
    with pytest.raises(ConfigError, match=r"lets a document see") as caught:
        check_neighbours(steps[leaking](), names, tensors, rows)
    assert caught.value.code == "MW833"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["hf_llama", "hf_gpt2"])
def test_packed_rows_of_models_of_transformers_are_verified(start, recipe):
    data = "data={target: runner.data.packing.Packed, args: {length: 64, limit: 20000, shift: false}}"
    words = (f"+recipe={recipe}", "model.config.vocab_size=257", data, "verify.steps=1")
    assert start(*words, "parallel.zero.stage=0", verb="verify").verdict["passed"]
