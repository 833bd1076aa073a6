"""Well-known manual plans, on models for which no search was tuned: other widths, groups of heads,
vocabularies, numbers of experts and meshes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from models.gpt import GPT
from models.llama import Llama
from models.losses import NextTokenLoss
from models.moe import MoE
from strategies.core.graph import OperatorGraph
from strategies.core.mesh import Mesh
from tests.strategies.search.problems import node, nodes, problem, shaped, tokens
from tests.strategies.search.test_known_plans import SEARCHES, sliced

Make = Callable[[], OperatorGraph]


def llama(width: int, heads: int, groups: int, hidden: int, batch: int, length: int) -> Make:
    def made() -> OperatorGraph:
        with torch.device("meta"):
            net = Llama(32000, length, width, 2, heads, groups, hidden).bfloat16()
        return shaped(net, NextTokenLoss(), *tokens(batch, length))

    return made


def gpt(width: int, heads: int, batch: int, length: int) -> Make:
    def made() -> OperatorGraph:
        with torch.device("meta"):
            net = GPT(50304, length, width, 2, heads).bfloat16()
        return shaped(net, NextTokenLoss(), *tokens(batch, length))

    return made


def moe(width: int, hidden: int, experts: int, best: int, batch: int, length: int) -> Make:
    def made() -> OperatorGraph:
        with torch.device("meta"):
            net = MoE(32000, length, width, 2, 16, hidden, experts, best).bfloat16()
        return shaped(net, NextTokenLoss(), *tokens(batch, length))

    return made


PAIRS = {
    "llama, a head per group": (llama(2048, 16, 16, 5504, 1, 512), 8, ()),
    "llama, groups of four heads": (llama(4096, 32, 8, 14336, 1, 1024), 8, ()),
    "llama on 4": (llama(5120, 40, 40, 13824, 1, 512), 4, ()),
    "llama of 70B's width": (llama(8192, 64, 8, 28672, 1, 2048), 8, (("d1", "tp"),)),
    "gpt": (gpt(4096, 32, 1, 512), 8, ()),
    "gpt on 4, no power of two": (gpt(1600, 20, 1, 512), 4, ()),
    "gpt of 175B's width": (gpt(12288, 96, 1, 2048), 8, (("d1", "tp"),)),
}
"""One sequence on one node: a model, its devices, and how norms are sliced."""


@pytest.mark.few(2)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", PAIRS)
def test_columns_then_rows(name: str, search: str) -> None:
    make, devices, norms = PAIRS[name]
    graph = make()
    chosen = SEARCHES[search](problem(graph, Mesh((("tp", devices),))), node(devices))
    inner = ("gate_proj", "up_proj") if name.startswith("llama") else ("up_proj",)
    for columns in ("attention.[qkv]_proj", *inner):
        assert sliced(graph, chosen, f"layers.*.{columns}") == {(("n", "tp"),)}
    for rows in ("attention.o_proj", "feed_forward.down_proj"):
        assert sliced(graph, chosen, f"layers.*.{rows}") == {(("k", "tp"),)}
    assert sliced(graph, chosen, "layers.*.scaled_dot_product_attention") == {(("h", "tp"),)}
    assert sliced(graph, chosen, "layers.1.*_norm") == {norms}
    assert sliced(graph, chosen, "head") == {(("n", "tp"),)}
    assert sliced(graph, chosen, "loss.cross_entropy_loss") == {(("c", "tp"),)}


@pytest.mark.few(2)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    ("make", "count"), [(gpt(4096, 32, 4, 2048), 4), (llama(4096, 32, 8, 14336, 2, 2048), 2)], ids=["gpt", "llama"]
)
def test_the_batch_over_nodes_and_the_rest_inside_of_them(make: Make, count: int, search: str) -> None:
    graph = make()
    chosen = SEARCHES[search](problem(graph, Mesh((("dp", count), ("tp", 8)))), nodes(count))
    assert sliced(graph, chosen, "layers.*.up_proj") == {(("batch0", "dp"), ("n", "tp"))}
    assert sliced(graph, chosen, "layers.*.down_proj") == {(("batch0", "dp"), ("k", "tp"))}
    assert sliced(graph, chosen, "layers.*.scaled_dot_product_attention") == {(("b0", "dp"), ("h", "tp"))}
    assert sliced(graph, chosen, "layers.1.*_norm") == {(("d0", "dp"), ("d1", "tp"))}
    assert sliced(graph, chosen, "head") == {(("batch0", "dp"), ("n", "tp"))}


@pytest.mark.few(1)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        (moe(1024, 4096, 8, 1, 8, 512), (8,)),
        (moe(2048, 8192, 8, 2, 8, 512), (8,)),
        (moe(1024, 4096, 16, 2, 8, 1024), (8,)),
        (moe(1024, 4096, 4, 1, 4, 512), (4,)),
        pytest.param(moe(1024, 4096, 8, 2, 8, 512), (2, 4), marks=pytest.mark.slow),
    ],
    ids=["one of 8", "two of 8", "two of 16", "one of 4", "two of 8 on two axes"],
)
def test_experts_by_expert(make: Make, sizes: tuple[int, ...], search: str) -> None:
    graph, mesh = make(), Mesh(tuple(zip("ab", sizes, strict=False)))
    chosen = SEARCHES[search](problem(graph, mesh), node(mesh.size))
    axes = "*".join(mesh.names)
    assert sliced(graph, chosen, "layers.*.experts.*_proj") == {(("e", axes),)}
    assert sliced(graph, chosen, "layers.*.dispatch") == {(("g", axes),)}
    assert sliced(graph, chosen, "layers.*.[qkv]_proj") == {(("batch0", axes),)}
