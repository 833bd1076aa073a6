"""The lower bound of stored bytes from names and layouts never exceeds the bytes of a trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from composing import compose_config

from runner.planning.joint import JointDecision
from runner.planning.sources import request_of
from strategies.core.graph import OperatorGraph
from strategies.core.program import LoweringOptions
from strategies.core.request import RecomputeRequest
from strategies.lowering.lowering import lower
from strategies.lowering.recompute import recomputed, repeated_layers
from strategies.memory.estimate import stored_lower_bound
from strategies.memory.trace import trace
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.planner import make_plan
from strategies.rules import rule_of

RECIPES = ("ffn_auto", "gpt", "llama", "mae_784", "megatron_sp", "megatron_tp", "moe", "resnet", "vit")


@pytest.fixture(scope="module", params=RECIPES)
def made(request):
    """The graphs of a recipe with its configured plan and with a searched one."""
    found, captures = [], {}
    for words in ((), ("parallel=auto", "parallel.search=dynamic_programming")):
        config = compose_config(f"+recipe={request.param}", *words, "parallel.plan_cache=null")
        one = JointDecision(config, print, captures)
        graph, captures = one.captured(one.rows)[1].graph, one.captures
        found.append((graph, make_plan(graph, replace(request_of(config, one.ranks), recompute=None))))
    return found


def stored(graph: OperatorGraph, plan) -> tuple[int, int]:
    found = trace(lower(graph, plan, LoweringOptions(partial_loss=True)), OptimizerSettings())
    return stored_lower_bound(graph, plan), min(found.activations, found.kept)


@pytest.mark.few(1)
@pytest.mark.parametrize("again", [None, "selective", "full"])
def test_it_is_never_too_much(made, again):
    for graph, plan in made:
        if again is not None and repeated_layers(graph, None):
            rules = {operator.id: rule_of(operator, graph) for operator in graph.operators}
            plan = replace(plan, recompute=recomputed(graph, rules, RecomputeRequest(again)))
        least, true = stored(graph, plan)
        assert 0 <= least <= true


def test_it_is_most_of_what_a_transformer_stores():
    one = JointDecision(compose_config("+recipe=llama"), print)
    graph = one.captured(one.rows)[1].graph
    plan = make_plan(graph, request_of(one.config, one.ranks))
    rules = {operator.id: rule_of(operator, graph) for operator in graph.operators}
    for again in (None, "selective", "full"):
        wanted = None if again is None else recomputed(graph, rules, RecomputeRequest(again))
        least, true = stored(graph, replace(plan, recompute=wanted))
        assert least > (0.5 if again != "full" else 0.25) * true
    sliced = replace(wanted, slices_inputs=True)
    assert stored_lower_bound(graph, replace(plan, recompute=sliced)) < least
