"""Rows of several documents: nothing of a neighbour reaches a document, bit for bit, on one device and on slices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.gpt import GPT
from models.llama import Llama
from models.losses import NextTokenLoss
from runner.training.reference import ExactRandom
from strategies.capture.model import Objective, capture
from strategies.core.program import Cooperate, LoweringOptions
from strategies.core.request import OperatorStrategy, Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.runtime.simulate import Simulation

LENGTH, VOCABULARY = 16, 32
NAMES = ("input_ids", "documents", "positions", "labels")
KEY = 7


def gpt() -> nn.Module:
    return GPT(VOCABULARY, LENGTH, 16, 2, 4, dropout=0.1, attention_dropout=0.1)


def llama() -> nn.Module:
    return Llama(VOCABULARY, LENGTH, 16, 2, 4, 2, 32)


def batch(secret: int = 0) -> list[Tensor]:
    """Rows of four documents whose second one, of 5 tokens, is drawn from `secret`; only the others are labelled."""
    torch.manual_seed(3)
    tokens = torch.randint(VOCABULARY, (4, LENGTH))
    documents = torch.tensor([0] * 4 + [1] * 5 + [2] * 6 + [3]).expand(4, -1).contiguous()
    positions = torch.tensor([*range(4), *range(5), *range(6), 0]).expand(4, -1).contiguous()
    labels = torch.randint(VOCABULARY, (4, LENGTH))
    labels[:, [3, 8, 14, 15]] = -100
    labels[0, :9] = -100  # slices with other counts of labels
    hidden = documents == 1
    torch.manual_seed(secret)
    tokens[hidden] = torch.randint(VOCABULARY, (int(hidden.sum()),))
    labels[hidden] = -100
    return [tokens, documents, positions, labels]


def trained(model: nn.Module, entries: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    objective = Objective(model, NextTokenLoss(), NAMES, ("labels",))
    with ExactRandom(KEY):
        loss = objective(*entries)
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


@pytest.mark.parametrize("make", [gpt, llama])
def test_a_secret_in_the_neighbour_document_changes_no_bit(make):
    torch.manual_seed(0)
    model = make()
    (loss, gradients), (other, others) = (trained(model, batch(secret)) for secret in (1, 2))
    assert torch.equal(loss, other)
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
    with torch.no_grad():  # the mask alone keeps the secret: without documents it is seen
        causal, seen = (NextTokenLoss()(model(one[0]), one[3]) for one in (batch(1), batch(2)))
    assert not torch.equal(causal, seen)


@pytest.mark.parametrize("make", [gpt, llama])
def test_a_packed_document_is_the_document_alone(make):
    torch.manual_seed(0)
    model = make().double().eval()
    tokens, documents, positions, _ = batch()
    packed = model(tokens, documents, positions)
    for number in range(4):
        own = documents[0] == number
        torch.testing.assert_close(packed[:, own], model(tokens[:, own]), rtol=1e-12, atol=1e-12)


ALONG = (1, 1, 4, 1)
SLICINGS = {
    "data": ((("dp", 4),), {"layers.*.attention.q_proj.matmul": ((4, 1, 1), (1, 1))}, (4, 1)),
    "tensor": ((("dp", 2), ("tp", 2)), {"layers.*.attention.[qkv]_proj.matmul": ((2, 1, 1), (1, 2))}, (2, 1)),
    "sequence": (
        (("cp", 4),),
        {"layers.*.attention.scaled_dot_product_attention": (ALONG, ALONG, ALONG, ALONG)},
        (1, 4),
    ),
}


FAST = ((gpt, "tensor"), (gpt, "ring"), (llama, "sequence"))
CASES = [
    pytest.param(make, slicing, marks=() if (make, slicing) in FAST else pytest.mark.slow)
    for make in (gpt, llama)
    for slicing in (*SLICINGS, "ring")
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("make", "slicing"), CASES)
def test_slices_equal_one_device_and_keep_the_secret(make, slicing):
    mesh, patterns, rows = SLICINGS["sequence" if slicing == "ring" else slicing]
    torch.manual_seed(0)
    model = make().double()
    if slicing == "ring" and make is llama:  # a ring needs as many keys as queries in a rank's slice
        model = Llama(VOCABULARY, LENGTH, 16, 2, 4, 4, 32).double()
    found = capture(Objective(model, NextTokenLoss(), NAMES, ("labels",)), batch(), training=True)
    strategies = {name: OperatorStrategy(operands, None) for name, operands in patterns.items()}
    request = Request("auto", 4, "sharding_propagation", mesh, strategies, dataset_strategy=(rows,) * 4)
    options = LoweringOptions(exact=True, ring=slicing == "ring")
    program = lower(found.graph, make_plan(found.graph, request), options)
    assert any(isinstance(one, Cooperate) for one in program.instructions) == (slicing == "ring")

    def sliced(secret: int) -> tuple[Tensor, dict[str, Tensor]]:
        simulation = Simulation(program, {**found.tensors, **dict(zip(NAMES, batch(secret), strict=True))})
        (losses,) = simulation.run(KEY)
        simulation.backward(losses)
        return losses[0].detach(), simulation.gradients()

    (loss, gradients), (other, others) = sliced(1), sliced(2)
    wanted, expected = trained(model, batch(1))
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10)
    for name in expected:
        torch.testing.assert_close(gradients[name], expected[name], rtol=1e-10, atol=1e-10)
    assert torch.equal(loss, other)
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)
