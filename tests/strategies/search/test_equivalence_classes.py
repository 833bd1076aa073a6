"""Equivalent operators: repeated layers share classes, and nothing else does."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from strategies.core.graph import Ref
from strategies.search.equivalence_classes import equivalence_classes
from tests.strategies.search.problems import gpt, llama, prime_mesh, problem, shaped

MESH = prime_mesh(8)


def test_more_layers_are_no_more_classes() -> None:
    few, many = (equivalence_classes(problem(llama(layers), MESH)) for layers in (5, 8))
    assert len(few.members) == len(many.members)
    assert len(few.edges) == len(many.edges)
    inner = [members for members in many.members if len(members) >= 5]
    assert len(inner) > 0.6 * len(many.members)


def test_members_and_edges_are_those_of_the_graph() -> None:
    graph = gpt(4)
    found = equivalence_classes(problem(graph, MESH))
    assert Counter(o.id for members in found.members for o in members) == Counter(o.id for o in graph.operators)
    uses = sum(len(graph.users[Ref(o.id, i)]) for o in graph.operators for i in range(len(o.results)))
    assert sum(found.edges.values()) == uses
    for edge, times in found.edges.items():
        pairs = [
            (operator, user)
            for operator in found.members[edge.producer]
            for user, position in graph.users[Ref(operator.id, edge.index)]
            if found.of[user.id] == edge.user and position == edge.position
        ]
        assert len(pairs) >= times
    values = [ref for ref, users in graph.users.items() if users and ref.id in found.of]
    assert sum(times for edge, times in found.edges.items() if edge.after is None) == len(values)


def test_only_operators_with_the_same_rule_and_shapes_are_equivalent() -> None:
    graph = llama(4)
    made = problem(graph, MESH)
    for members in equivalence_classes(made).members:
        rules = [made.shardings[operator.id] for operator in members]
        assert len({(r.operands, r.results, tuple(r.sizes.items()), r.flops) for r in rules}) == 1
        assert len({(operator.op, operator.results) for operator in members}) == 1


def test_a_configured_operator_is_like_no_other_and_so_are_its_neighbours() -> None:
    graph = llama(6)
    name = "layers.3.feed_forward.down_proj"
    found = equivalence_classes(problem(graph, MESH, {name: {"k": MESH.names}}))
    assert found.members[found.of[graph.by_name[name].id]] == (graph.by_name[name],)
    near = graph.by_name["layers.3.feed_forward"]
    assert len(found.members[found.of[near.id]]) == 1


def test_users_of_a_tied_weight_are_not_merged_with_others() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(16, 16, bias=False) for _ in range(3))
            self.c.weight = self.a.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.c(self.b(self.a(x)))
            return out

    with torch.device("meta"):
        graph = shaped(Twice(), nn.MSELoss(), torch.zeros(16, 16), torch.zeros(16, 16))
    found = equivalence_classes(problem(graph, MESH))
    assert len({found.of[graph.by_name[name].id] for name in "abc"}) == 3
