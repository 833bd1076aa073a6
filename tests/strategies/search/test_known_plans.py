"""Well-known manual plans, found by every search that estimates costs, with nothing configured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import torch
from torch import nn

from models.gpt import GPT
from models.llama import Llama
from models.losses import NextTokenLoss
from models.moe import MoE
from models.resnet import resnet_digits
from strategies.core.graph import OperatorGraph
from strategies.core.mesh import Mesh
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.plan_cost import PlanCost
from strategies.cost.problem import Problem
from strategies.memory.estimate import plan_bytes
from strategies.planner.default_strategies import batch_factors
from strategies.rules.sharding import Assignment
from strategies.search.dynamic_programming import search
from strategies.search.recursive_programming import recursive_search
from tests.strategies.search.problems import gpt, llama, node, nodes, problem, propagated, shaped, tokens

Search = Callable[[Problem, Cluster], dict[str, Assignment]]
SEARCHES: dict[str, Search] = {
    "dynamic_programming": lambda made, machine: dict(search(made, machine).assignments),
    "recursive_programming": lambda made, machine: dict(recursive_search(made, machine).assignments),
}
ONE = Mesh((("tp", 8),))


@pytest.fixture(params=SEARCHES)
def found(request: pytest.FixtureRequest) -> Search:
    return SEARCHES[request.param]


def sliced(graph: OperatorGraph, chosen: dict[str, Assignment], pattern: str) -> set[tuple[tuple[str, str], ...]]:
    """The assignments of the matching operators: pairs of factor and axes."""
    named = [operator for operator in graph.operators if fnmatch(operator.name, pattern)]
    assert named, pattern
    return {
        tuple(sorted((factor, "*".join(axes)) for factor, axes in chosen[operator.id].items())) for operator in named
    }


def test_columns_then_rows(found: Search) -> None:
    """One short sequence on one node: Megatron's pairs in attention and feed-forward part, replicated between."""
    graph = llama(2, batch=1, length=512)
    chosen = found(problem(graph, ONE), node(8))
    for columns in ("[qkv]_proj", "gate_proj", "up_proj"):
        assert sliced(graph, chosen, f"layers.*.{columns}") == {(("n", "tp"),)}
    for rows in ("attention.o_proj", "feed_forward.down_proj"):
        assert sliced(graph, chosen, f"layers.*.{rows}") == {(("k", "tp"),)}
    assert sliced(graph, chosen, "layers.*.scaled_dot_product_attention") == {(("h", "tp"),)}
    assert sliced(graph, chosen, "layers.*.silu") == {(("d2", "tp"),)}
    assert sliced(graph, chosen, "layers.*_norm") == {()}


def test_a_vocabulary_is_sliced_from_the_head_to_the_loss(found: Search) -> None:
    graph = llama(2, batch=1, length=512)
    chosen = found(problem(graph, ONE), node(8))
    assert sliced(graph, chosen, "head") == {(("n", "tp"),)}
    assert sliced(graph, chosen, "loss.cross_entropy_loss") == {(("c", "tp"),)}


def test_the_batch_over_nodes_and_the_rest_inside_of_them(found: Search) -> None:
    """Reductions of activations stay on the fast links; only gradients cross nodes, overlapped with backward."""
    graph = llama(2, batch=2, length=4096)
    chosen = found(problem(graph, Mesh((("dp", 2), ("tp", 8)))), nodes(2))
    rows = [(("batch0", "dp"),), (("batch1", "dp"),)]  # the feed-forward part merges batch and sequence
    assert sliced(graph, chosen, "layers.*.gate_proj") <= {(*row, ("n", "tp")) for row in rows}
    assert sliced(graph, chosen, "layers.*.down_proj") <= {tuple(sorted((*row, ("k", "tp")))) for row in rows}
    assert sliced(graph, chosen, "layers.*.scaled_dot_product_attention") == {(("b0", "dp"), ("h", "tp"))}


def test_norms_along_the_sequence(found: Search) -> None:
    """With a long sequence norms and sums are sharded too: reduce-scatter and all-gather replace an all-reduce."""
    graph = llama(2, batch=1, length=8192)
    chosen = found(problem(graph, ONE), node(8))
    assert sliced(graph, chosen, "layers.1.*_norm") == {(("d1", "tp"),)}
    assert sliced(graph, chosen, "layers.1.feed_forward.down_proj") == {(("k", "tp"),)}


def test_norms_along_the_sequence_where_memory_asks(found: Search) -> None:
    """With a short sequence it is slower, but the activations of norms exceed the limit; the pairs stay."""
    graph = llama(2, batch=1, length=512)
    made = problem(graph, ONE)
    free = plan_bytes(made, found(made, node(8)))
    chosen = found(replace(made, memory=0.995 * free), node(8))
    assert plan_bytes(made, chosen) <= 0.995 * free
    assert (("d1", "tp"),) in sliced(graph, chosen, "layers.*_norm")
    assert sliced(graph, chosen, "layers.*.gate_proj") == {(("n", "tp"),)}
    assert sliced(graph, chosen, "layers.*.down_proj") == {(("k", "tp"),)}


def test_experts_by_expert(found: Search) -> None:
    with torch.device("meta"):
        net = MoE(32000, 512, 1024, 2, 16, 4096, 8, 2).bfloat16()
    graph = shaped(net, NextTokenLoss(), *tokens(8, 512))
    chosen = found(problem(graph, Mesh((("ep", 8),))), node(8))
    assert sliced(graph, chosen, "layers.*.experts.*_proj") == {(("e", "ep"),)}
    assert sliced(graph, chosen, "layers.*.dispatch") == {(("g", "ep"),)}
    assert sliced(graph, chosen, "layers.*.[qkv]_proj") == {(("batch0", "ep"),)}


def test_small_models_on_fast_links_are_data_parallel(found: Search) -> None:
    graph = gpt(2)
    made = problem(graph, Mesh((("dp", 8),)))
    chosen = found(made, node(8))
    for operator in graph.operators:
        factor = batch_factors(made).get(operator.id)
        if factor is not None and made.shardings[operator.id].sizes[factor] % 8 == 0:
            assert chosen[operator.id] == {factor: ("dp",)}, operator.name


def test_one_device_has_nothing_to_slice(found: Search) -> None:
    graph = gpt(2)
    assert not any(found(problem(graph, Mesh((("only", 1),))), node(1)).values())


TINY: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "gpt": lambda: (GPT(256, 64, 64, 2, 4), NextTokenLoss()),
    "llama": lambda: (Llama(256, 64, 64, 2, 8, 4, 128), NextTokenLoss()),
    "resnet": lambda: (resnet_digits(), nn.CrossEntropyLoss()),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TINY)
def test_optimality_gap_where_latency_dominates(name: str) -> None:
    """Losses and batch statistics are replicated on every rank, which takes collectives."""
    slow = Cluster("slow", (Level("rank", 4, Link(3e8, 1e-3)),), {"float32": 2e10}, 2**31, 6e9, 3e-5, overlap=0.25)
    with torch.device("meta"):
        net, loss = TINY[name]()
        images = torch.zeros(32, 1, 28, 28), torch.zeros(32, dtype=torch.int64)
    graph = shaped(net, loss, *(images if name == "resnet" else tokens(16, 64)))
    made = problem(graph, Mesh((("a", 2), ("b", 2))))
    assert PlanCost(made, slow).total(recursive_search(made, slow).assignments) <= 1.02 * search(made, slow).cost


LAYERS = {"gpt": ("*.q_proj", "*.up_proj"), "llama": ("*.q_proj", "*.gate_proj")}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", LAYERS)
def test_optimality_gap(name: str) -> None:
    """Recursive programming within 5 % of exact; propagation, with two operators per layer configured, within 3 %."""
    graph, mesh, machine = {"gpt": gpt, "llama": llama}[name](2), Mesh((("a", 2), ("b", 2))), node(4)
    made = problem(graph, mesh)
    cost = PlanCost(made, machine)

    def above(chosen: dict[str, Assignment], exact: dict[str, Assignment]) -> float:
        return cost.total(chosen) / cost.total(exact)

    assert above(dict(recursive_search(made, machine).assignments), dict(search(made, machine).assignments)) <= 1.05
    for configured in ({"batch0": ("a", "b")}, {"batch0": ("a",), "n": ("b",)}, {"n": ("a", "b")}):
        named = [o.name for o in graph.operators if any(fnmatch(o.name, pattern) for pattern in LAYERS[name])]
        given = problem(graph, mesh, dict.fromkeys(named, configured))
        found = propagated(given, machine).assignments
        chosen = {id: assignment for id, assignment in found.items()}
        assert all(chosen[graph.by_name[one].id] == configured for one in named)
        assert above(chosen, dict(search(given, machine).assignments)) <= 1.03
