"""Every case in which propagation reaches an operator: no legal strategy with less redistribution is missed.

The cases follow the published algorithm: successors, predecessors, visited operators, joins, forwarded results,
reshapes, shared parameters, values with several users.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import nn

from strategies.core.graph import Operator, OperatorGraph, Ref, Source
from strategies.core.layout import Layout
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.request import OperatorStrategy
from strategies.resharding.path import resharding_path
from strategies.rules import rule_of
from strategies.search.sharding_propagation import Propagation
from tests.strategies.search.test_sharding_propagation import Body, model_of, plan_of, wanted
from tests.strategies.simulated_model import TOLERANCE, Model


def tied() -> Model:
    """b and c have one weight."""
    net = Body(lambda net, x: net.c(net.b(net.a(x))))
    net.c.weight = net.b.weight
    return Model(net, nn.MSELoss(), (torch.randn(16, 16), torch.randn(16, 16)))


ROWS, COLUMNS, SUMS, BOTH = ((8, 1), (1, 1)), ((1, 1), (8, 1)), ((1, 8), (1, 8)), ((2, 4), (1, 4))
SETTINGS: dict[str, tuple[Callable[[], Model], dict[str, OperatorStrategy]]] = {
    "successors": (lambda: model_of(lambda n, x: n.b(torch.relu(n.a(x)))), {"a": wanted(*BOTH)}),
    "predecessors": (lambda: model_of(lambda n, x: n.c(torch.tanh(n.b(n.a(x))))), {"c": wanted(*SUMS)}),
    "both sides": (lambda: model_of(lambda n, x: n.c(torch.relu(n.b(torch.tanh(n.a(x)))))), {"b": wanted(*COLUMNS)}),
    "visited once": (
        lambda: model_of(lambda n, x: n.b(n.c(torch.relu(n.a(x))))),
        {"a": wanted(*COLUMNS), "c": wanted(*ROWS)},
    ),
    "a join waits": (
        lambda: model_of(lambda n, x: n.b(n.a(x)) + n.c(x)),
        {"a": wanted(*COLUMNS), "c": wanted(*COLUMNS)},
    ),
    "a join waits in vain": (lambda: model_of(lambda n, x: n.a(x) * n.b(x)), {"a": wanted((2, 1), (4, 1))}),
    "a join of three": (
        lambda: model_of(lambda n, x: torch.cat([n.a(x), n.b(x), n.c(x)], 0).relu()),
        {"a": wanted(*ROWS), "b": wanted(*COLUMNS), "c": wanted(*COLUMNS)},
    ),
    "a result handed on": (
        lambda: model_of(lambda n, x: torch.relu(n.a(x))),
        {"a": wanted((2, 4), (1, 4), out=((1, 8),))},
    ),
    "a reshape": (
        lambda: model_of(lambda n, x: torch.relu(n.a(x).reshape(16, 4, 4)).flatten(1)),
        {"a": wanted(*COLUMNS)},
    ),
    "a transpose": (lambda: model_of(lambda n, x: torch.relu(n.a(x).t()).t()), {"a": wanted((2, 1), (4, 1))}),
    "a shared parameter": (tied, {"a": wanted((2, 1), (1, 1)), "c": wanted((2, 1), (4, 1))}),
    "one value for many": (lambda: model_of(lambda n, x: sum(f(n.a(x)) for f in (n.b, n.c))), {"a": wanted(*COLUMNS)}),
}


def placements(graph: OperatorGraph, plan: Plan, name: str) -> list[dict[str, tuple[str, ...]]]:
    """Every legal assignment of an operator in mesh order that uses the most devices."""
    sharding = rule_of(graph.by_name[name], graph)
    found = []
    for placed in product((*sharding.factors, None), repeat=len(plan.mesh.names)):
        pairs = list(zip(placed, plan.mesh.names, strict=True))
        one = {factor: tuple(axis for at, axis in pairs if at == factor) for factor in sharding.factors}
        found.append({factor: axes for factor, axes in one.items() if axes})
    legal = [one for one in found if sharding.legal(one, plan.mesh)]
    used = [plan.mesh.product(sharding.used(one)) for one in legal]
    return [one for one, count in zip(legal, used, strict=True) if count == max(used)]


def carried(graph: OperatorGraph, plan: Plan, decided: dict[str, OperatorPlan], name: str, one: OperatorPlan) -> int:
    """Elements sent forward between an operator and those decided before it."""
    now = {graph.by_name[other].id: found for other, found in decided.items() if other != name}
    operator = graph.by_name[name]

    def wanted_by(user: Operator, position: int, chosen: OperatorPlan) -> Layout:
        return rule_of(user, graph).operand_layouts(chosen.assignment)[position]

    def given_by(ref: Ref, chosen: OperatorPlan) -> Layout:
        outputs = chosen.outputs or rule_of(graph.by_id[ref.id], graph).result_layouts(chosen.assignment)
        return outputs[ref.index]

    pairs = []
    for position, ref in enumerate(operator.operands):
        source = graph.by_id[ref.id]
        others = [wanted_by(user, at, now[user.id]) for user, at in graph.users[ref] if user.id in now]
        if ref.id in now:
            have = given_by(ref, now[ref.id])
        elif isinstance(source, Source) and source.kind == "input":
            have = plan.inputs[source.name]
        elif isinstance(source, Source) and others:
            have = others[0]
        else:
            continue
        pairs.append((have, wanted_by(operator, position, one), ref))
    for index in range(len(operator.results)):
        ref = Ref(operator.id, index)
        pairs += [
            (given_by(ref, one), wanted_by(user, at, now[user.id]), ref)
            for user, at in graph.users[ref]
            if user.id in now
        ]
    chains = [resharding_path(have, want, graph.specs[ref].shape, plan.mesh) for have, want, ref in pairs]
    return sum(step.busiest(plan.mesh) for steps in chains for step in steps)


@pytest.mark.few(3)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_legal_neighbour_with_less_redistribution_is_left_unused(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By enumeration of the placements of axes of an operator when it is reached: none sends fewer elements to it or
    from it."""
    make, strategies = SETTINGS[setting]
    model, order = make(), []
    decide = Propagation._decide

    def noted(self: Propagation, operator: Operator) -> None:
        order.append((operator.name, frozenset(self.chosen)))
        decide(self, operator)

    monkeypatch.setattr(Propagation, "_decide", noted)
    plan = plan_of(model, strategies=strategies, dataset_strategy="full_batch")
    assert model.difference(plan) < TOLERANCE
    graph, checked = model.graph, 0
    assert {name for name, _ in order} == {n for n, one in plan.operators.items() if one.origin == "propagated"}
    for name, before in order:
        decided = {graph.by_id[id].name: plan.operators[graph.by_id[id].name] for id in before}
        chosen = carried(graph, plan, decided, name, plan.operators[name])
        for other in placements(graph, plan, name):
            assert chosen <= carried(graph, plan, decided, name, OperatorPlan(other, "propagated"))
            checked += 1
    assert checked > 1
