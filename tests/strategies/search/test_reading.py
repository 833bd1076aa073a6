"""Solutions read back from arrays, against the tables one by one; what options take, against one option at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from strategies.core.graph import OperatorGraph
from strategies.cost.roofline import operator_seconds
from strategies.search.network import Building
from strategies.search.options import Menu
from strategies.search.transfers import Transfers
from tests.strategies.search.test_network import NODES, gpt, llama, problem_of


def cost_of(building: Building, picks: Sequence[int]) -> float:
    """What every operator and every value takes, one after the other; a target that uses share is paid once."""
    total = sum(choices.own[picks[building.variables[id]]] for id, choices in building.choices.items())
    total += sum(seconds[picks[variable]] for variable, seconds in building.leaving)
    for _, producer, given, uses in building.used:
        row = 0 if producer is None else given.of_option[picks[producer]]
        paid = {}
        for user, pair in uses:
            target = pair.of_option[picks[user]]
            paid[pair.targets[target]] = pair.seconds[row, target]
        total += sum(paid.values())
    for ref, (variable, shared) in building.parameters.items():
        users = [picks[building.variables[user.id]] for user, _ in building.graph.users[ref]]
        total += shared.cost(picks[variable], users)
    return float(total)


@pytest.mark.parametrize(("make", "sizes"), [(llama, (2, 4)), (gpt, (8,)), (llama, (2, 2, 2))])
def test_solutions_cost_and_keep_what_their_parts_do(make: type, sizes: tuple[int, ...]) -> None:
    problem = problem_of(make(2), *sizes)
    building = Building(problem, Menu(problem, Transfers(problem.mesh, NODES)))
    rng = random.Random(0)
    for _ in range(20):
        picks = [rng.randrange(size) for size in building.network.sizes]
        building.network.cost(picks)  # which makes all tables
        building.settle(picks)
        assert building.cost(picks) == pytest.approx(cost_of(building, picks), rel=1e-12)
        kept = sum(choices.bytes[picks[building.variables[id]]] for id, choices in building.choices.items())
        kept += sum(shared.bytes[picks[variable]] for variable, shared in building.parameters.values())
        assert building.bytes(picks) == pytest.approx(kept, rel=1e-12)


def test_what_a_solution_uses_is_settled() -> None:
    problem = problem_of(llama(2), 2, 4)
    transfers = Transfers(problem.mesh, NODES, few=0)
    building = Building(problem, Menu(problem, transfers))
    rng, raised = random.Random(1), 0
    for _ in range(5):
        picks = [rng.randrange(size) for size in building.network.sizes]
        raised += building.settle(picks)
        for _, producer, given, uses in building.used:
            row = 0 if producer is None else int(given.of_option[picks[producer]])
            for user, pair in uses:
                come = int(pair.come[pair.of_option[picks[user]]])
                assert transfers.asked[transfers._key(pair.given, pair.wanted, pair.spec)].settled[row, come]
        assert not building.settle(picks)
    assert raised > 1


def test_values_of_which_uses_disagree_and_pay_are_underpaid() -> None:
    problem = problem_of(llama(2), 2, 4)
    building = Building(problem, Menu(problem, Transfers(problem.mesh, NODES)))
    rng, found = random.Random(2), 0
    for _ in range(5):
        picks = [rng.randrange(size) for size in building.network.sizes]
        building.settle(picks)
        wanted = set()
        for ref, producer, given, uses in building.used:
            row = 0 if producer is None else int(given.of_option[picks[producer]])
            targets = {pair.targets[pair.of_option[picks[user]]] for user, pair in uses}
            pays = any(pair.seconds[row, pair.of_option[picks[user]]] for user, pair in uses)
            if len(targets) > 1 and pays and building._splits(ref, uses):
                wanted.add(ref)
        assert building.underpaid(picks) == wanted
        found += len(wanted)
    assert found > 5


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)])
def test_all_options_of_an_operator_take_what_each_takes_alone(sizes: tuple[int, ...]) -> None:
    problem = problem_of(gpt(1), *sizes)
    menu = Menu(problem, Transfers(problem.mesh, NODES))
    checked = 0
    for operator in problem.graph.operators:
        sharding, choices = problem.shardings[operator.id], menu.of(operator)
        if sharding.local is not None or any(ref in menu.lone for ref in operator.operands):
            continue
        trained = operator.id in problem.graph.returning
        each = [
            operator_seconds(sharding, one, operator, problem.graph, problem.mesh, NODES, trained)
            for one in choices.assignments
        ]
        assert choices.own.tolist() == each
        checked += len(each)
    assert checked > 30


def test_operators_look_alike_where_only_names_of_values_differ() -> None:
    graph = llama(3)

    def alike(seen: OperatorGraph, first: str, second: str) -> bool:
        return seen.looks[seen.by_name[first].id] == seen.looks[seen.by_name[second].id]

    layer = [one.name for one in graph.operators if one.name.startswith("layers.1")]
    assert len(layer) > 30 and all(alike(graph, name, name.replace("layers.1", "layers.2")) for name in layer)
    first, second = "layers.1.attention.transpose@0", "layers.2.attention.transpose@0"
    assert not alike(graph, "layers.1.attention.q_proj", "layers.1.attention.k_proj")
    turned = graph.by_name[first]
    for arguments in ((turned.args[0], 1, -2), (turned.args[0], True, 2)):  # True is equal to 1, and something else
        operators = tuple(replace(one, args=arguments) if one is turned else one for one in graph.operators)
        assert not alike(replace(graph, operators=operators), first, second)
    weight = "layers.1.attention.q_proj.weight"
    sources = tuple(replace(one, trainable=one.trainable and not one.name.endswith(weight)) for one in graph.sources)
    assert sources != graph.sources
    frozen = replace(graph, sources=sources)
    assert not alike(frozen, "layers.1.attention.q_proj", "layers.2.attention.q_proj")
