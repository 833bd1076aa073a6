"""The program as text, before sharding and after."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.quickstart import Net
from strategies.capture import Objective, capture
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions, Program, Redistribute
from strategies.core.request import OperatorStrategy, Request
from strategies.lowering import ir
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from tests.strategies.simulated_model import Model


@pytest.fixture(scope="module")
def quickstart() -> tuple[Model, Plan, Program]:
    torch.manual_seed(0)
    model = Model(Net(), nn.MSELoss(), (torch.randn(16, 32), torch.randn(16, 16)))
    plan = make_plan(model.graph, Request("auto", 8, strategies={"matmul": OperatorStrategy(((2, 4), (4, 1)), None)}))
    return model, plan, lower(model.graph, plan)


def test_begin(quickstart: tuple[Model, Plan, Program]) -> None:
    model, plan, _ = quickstart
    text = ir.begin(model.graph, plan)
    assert text.startswith("# mesh {'d0': 2, 'd1': 4}, 8 ranks\n")
    assert "= parameter matmul.weight : float64[32,16]  layout (d1, -)\n" in text
    assert "= input 0 : float64[16,32]  layout (d0*d1, -)\n" in text
    assert "%relu = aten.relu.default(%matmul) : float64[16,16]\n" in text
    assert "    name relu  module relu  in_strategy ((2, 4))  out_strategy ((2, 4))\n" in text
    assert "    name matmul2  module matmul2  in_strategy ((2, 4), (4, 1))  out_strategy ((2, 1))\n" in text
    assert re.search(r"name matmul .*\n    chosen configured  source models/matmul.py:\d+\n", text)
    assert re.search(r"name relu .*\n    chosen propagated  source models/quickstart.py:\d+\n", text)
    assert text.endswith("return %mse_loss\n")


def test_end(quickstart: tuple[Model, Plan, Program]) -> None:
    model, plan, program = quickstart
    text = ir.end(model.graph, plan, program, 0)
    assert text.startswith("# rank 0 of 8, mesh {'d0': 2, 'd1': 4}, coordinate (0, 0)\n")
    assert "= parameter matmul.weight : float64[8,16]\n" in text
    assert "    of matmul: (float64[8,8], float64[8,16]) -> float64[8,16] partial\n" in text
    assert "= redistribute(%matmul)  for operand 0 of relu\n" in text
    step = "forward: reduce_scatter dim 1 over d1  float64[8,16] partial -> float64[8,4]"
    assert f"    {step}  group (0, 1, 2, 3), 768 bytes sent\n" in text
    assert (
        "    backward: all_gather dim 1 over d1  float64[8,4] -> float64[8,16]  group (0, 1, 2, 3), 768 bytes sent\n"
        in text
    )
    ran = re.escape("    of matmul2: (float64[8,4], float64[4,16]) -> float64[8,16] partial\n")
    how = re.escape("    in_strategy ((2, 4), (4, 1))  out_strategy ((2, 1))  source ")
    assert re.search(rf"{ran}{how}models/matmul.py:\d+\n", text)
    assert text.count("  source ") == len(re.findall("^    of ", text, re.MULTILINE))
    assert "# gradient of matmul.weight: sum over d0, group (0, 4), after backward\n" in text


def test_every_rank_has_its_own(quickstart: tuple[Model, Plan, Program]) -> None:
    model, plan, program = quickstart
    text = ir.end(model.graph, plan, program, 6)
    assert text.startswith("# rank 6 of 8, mesh {'d0': 2, 'd1': 4}, coordinate (1, 2)\n")
    assert "group (4, 5, 6, 7)" in text and "sum over d0, group (2, 6)" in text
    texts = {ir.end(model.graph, plan, program, rank) for rank in range(8)}
    assert len(texts) == 8


def test_nothing_is_left_out() -> None:
    """Random numbers, several results, result layouts, positions, constants."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            a, b = F.dropout(self.emb(x), 0.5).chunk(2, -1)
            return torch.cat([a * torch.tensor([1.0, 2.0, 3.0, 4.0]), b], -1)

    torch.manual_seed(0)
    batch = (torch.randint(0, 16, (8, 4)), torch.randn(8, 4, 8))
    graph = capture(Objective(Odd(), nn.MSELoss(), ("0", "1"), ("1",)), batch, training=True).graph
    wanted = OperatorStrategy(((4, 1), (2, 1)), ((4, 1, 2),))
    plan = make_plan(graph, Request("semi_auto", 8, strategies={"emb": wanted}))
    program = lower(graph, plan, LoweringOptions(exact=True, partial_loss=True))
    begin, texts = ir.begin(graph, plan), [ir.end(graph, plan, program, rank) for rank in range(8)]
    for operator in graph.operators:
        assert f"    name {operator.name}  " in begin
    for instruction in program.instructions:
        assert all(f"%{instruction.id} = " in text for text in texts)
        if isinstance(instruction, Redistribute):
            for step in (*instruction.forward, *instruction.backward):
                assert f": {step}  " in texts[0]
    lookups = [re.findall(r"local.lookup_slice\((.*)\)", text)[0] for text in texts]
    assert len(set(lookups)) == 4 and lookups[0].startswith(
        "%p_model_emb_weight, "
    )  # a start per slice of the vocabulary
    assert "RankValue" not in "".join(texts) and "Ref(" not in begin + "".join(texts)
    assert "for results of emb" in texts[0]
    assert "local.dropout_block" in texts[0] and "%random_key" in texts[0]
    assert "%chunk.1" in begin
