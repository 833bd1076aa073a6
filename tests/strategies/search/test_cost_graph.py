"""Solutions read from arrays, against the tables one by one; costs of options, against one option at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from strategies.core.graph import OperatorGraph
from strategies.cost.resharding_matrix import ReshardingCosts
from strategies.cost.roofline import operator_seconds
from strategies.search.cost_graph import CostGraph
from strategies.search.strategy_space import StrategySpace
from tests.strategies.search.test_factor_graph import NODES, gpt, llama, problem_of, total


def cost_of(graph: CostGraph, indices: Sequence[int]) -> float:
    """The costs of all operators and values, one by one; a target shared by several uses is counted once."""
    total = sum(candidates.seconds[indices[graph.variables[id]]] for id, candidates in graph.candidates.items())
    total += sum(seconds[indices[variable]] for variable, seconds in graph.leaving)
    for value in graph.values:
        row = 0 if value.producer is None else value.given.of_candidate[indices[value.producer]]
        paid = {}
        for user, pair in value.uses:
            target = pair.of_candidate[indices[user]]
            paid[pair.targets[target]] = pair.seconds[row, target]
        total += sum(paid.values())
    for ref, (variable, shared) in graph.parameters.items():
        users = [indices[graph.variables[user.id]] for user, _ in graph.operators.users[ref]]
        total += shared.cost(indices[variable], users)
    return float(total)


@pytest.mark.parametrize(
    ("make", "sizes"), [(llama, (2, 4)), (gpt, (8,)), pytest.param(llama, (2, 2, 2), marks=pytest.mark.slow)]
)
def test_cost_and_memory_of_solutions_are_sums_of_their_parts(make: type, sizes: tuple[int, ...]) -> None:
    problem = problem_of(make(2), *sizes)
    graph = CostGraph(problem, StrategySpace(problem, ReshardingCosts(problem.mesh, NODES)))
    rng = random.Random(0)
    for _ in range(20):
        indices = [rng.randrange(size) for size in graph.factors.sizes]
        total(graph.factors, indices)  # builds all tables
        graph.evaluate(indices)
        assert graph.cost(indices) == pytest.approx(cost_of(graph, indices), rel=1e-12)
        kept = sum(candidates.bytes[indices[graph.variables[id]]] for id, candidates in graph.candidates.items())
        kept += sum(shared.bytes[indices[variable]] for variable, shared in graph.parameters.values())
        assert graph.bytes(indices) == pytest.approx(kept, rel=1e-12)


def test_costs_that_a_solution_uses_are_exact() -> None:
    problem = problem_of(llama(2), 2, 4)
    transfers = ReshardingCosts(problem.mesh, NODES, at_once=0)
    graph = CostGraph(problem, StrategySpace(problem, transfers))
    rng, raised = random.Random(1), 0
    for _ in range(5):
        indices = [rng.randrange(size) for size in graph.factors.sizes]
        raised += graph.evaluate(indices)
        for value in graph.values:
            row = 0 if value.producer is None else int(value.given.of_candidate[indices[value.producer]])
            for user, pair in value.uses:
                come = int(pair.come[pair.of_candidate[indices[user]]])
                assert transfers._matrices[transfers._key(pair.given, pair.wanted, pair.spec)].exact[row, come]
        assert not graph.evaluate(indices)
    assert raised > 1


@pytest.mark.slow
def test_values_of_which_uses_disagree_and_pay_are_underpaid() -> None:
    problem = problem_of(llama(2), 2, 4)
    graph = CostGraph(problem, StrategySpace(problem, ReshardingCosts(problem.mesh, NODES)))
    rng, found = random.Random(2), 0
    for _ in range(5):
        indices = [rng.randrange(size) for size in graph.factors.sizes]
        graph.evaluate(indices)
        wanted = set()
        for value in graph.values:
            row = 0 if value.producer is None else int(value.given.of_candidate[indices[value.producer]])
            targets = {pair.targets[pair.of_candidate[indices[user]]] for user, pair in value.uses}
            pays = any(pair.seconds[row, pair.of_candidate[indices[user]]] for user, pair in value.uses)
            if len(targets) > 1 and pays and graph._can_share(value):
                wanted.add(value.ref)
        assert graph.underpaid(indices) == wanted
        found += len(wanted)
    assert found > 5


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)])
def test_costs_of_all_options_equal_those_of_each_option(sizes: tuple[int, ...]) -> None:
    problem = problem_of(gpt(1), *sizes)
    space = StrategySpace(problem, ReshardingCosts(problem.mesh, NODES))
    checked = 0
    for operator in problem.graph.operators:
        sharding, candidates = problem.shardings[operator.id], space.of(operator)
        if sharding.local is not None or any(ref in space.single_use for ref in operator.operands):
            continue
        trained = operator.id in problem.graph.returning
        each = [
            operator_seconds(sharding, one, operator, problem.graph, problem.mesh, NODES, trained)
            for one in candidates.assignments
        ]
        assert candidates.seconds.tolist() == each
        checked += len(each)
    assert checked > 30


def test_operators_are_equivalent_where_only_names_of_values_differ() -> None:
    graph = llama(3)

    def equivalent(seen: OperatorGraph, first: str, second: str) -> bool:
        return seen.looks[seen.by_name[first].id] == seen.looks[seen.by_name[second].id]

    layer = [one.name for one in graph.operators if one.name.startswith("layers.1")]
    assert len(layer) > 30 and all(equivalent(graph, name, name.replace("layers.1", "layers.2")) for name in layer)
    first, second = "layers.1.attention.transpose@0", "layers.2.attention.transpose@0"
    assert not equivalent(graph, "layers.1.attention.q_proj", "layers.1.attention.k_proj")
    turned = graph.by_name[first]
    for arguments in ((turned.args[0], 1, -2), (turned.args[0], True, 2)):  # True equals 1 but is a different argument
        operators = tuple(replace(one, args=arguments) if one is turned else one for one in graph.operators)
        assert not equivalent(replace(graph, operators=operators), first, second)
    weight = "layers.1.attention.q_proj.weight"
    sources = tuple(replace(one, trainable=one.trainable and not one.name.endswith(weight)) for one in graph.sources)
    assert sources != graph.sources
    frozen = replace(graph, sources=sources)
    assert not equivalent(frozen, "layers.1.attention.q_proj", "layers.2.attention.q_proj")
