"""Predicted bytes of ZeRO equal those that DeepSpeed and our own engine send; units are derived without building
them."""

from __future__ import annotations

import pytest

from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.memory.trace import local_tensors
from strategies.runtime.communicator import Communicator
from strategies.runtime.module_tree import MODULE, build, units

SEEDS = (-1, 0, 1, 2, 5, -2)
"""Replicated parameters, random plans, and every parameter sharded over all ranks."""
NORMS = {"deepspeed": range(129), "native": [16]}
"""Bytes of the norms that are reduced: a few numbers by DeepSpeed, one double by our own engine."""


@pytest.fixture(scope="module")
def cases(training):
    _, task = training.task(steps=2)
    cases = [(task, training.Case(seed, stage)) for seed in SEEDS for stage in (1, 2, 3)]
    cases += [(task, training.Case(seed, stage, engine="native")) for seed in SEEDS for stage in (1, 2)]
    cases += [(task, training.Case(-1, 3, options={"param_persistence_threshold": most})) for most in (16, 10**6)]
    _, choosing = training.task(steps=2, chooses=True)
    some = {"reduce_bucket_size": 50, "stage3_model_persistence_threshold": 200}
    for options in ({}, some, some | {"stage3_model_persistence_threshold": 10**9}):
        cases += [(task, training.Case(-1, 3, engine="native", options=options))]
    # DeepSpeed sends nothing for parameters without a gradient
    return cases + [(choosing, training.Case(seed, stage, engine="native")) for seed in (-1, 0) for stage in (1, 2)]


@pytest.fixture(scope="module")
def counted(cases, ranks):
    return ranks("counted", cases, module="counted_training")


@pytest.mark.slow
def test_predicted_bytes_are_sent(cases, counted):
    for (_, case), (sent, predicted) in zip(cases, counted, strict=True):
        for kind in sent.keys() | predicted.keys():
            more = sent.get(kind, 0) - predicted.get(kind, 0)
            assert more in NORMS[case.engine] if kind == "all_reduce" else more == 0, (case, kind, more)
    assert sum("all_gather" in predicted for _, predicted in counted) > len(counted) / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_units_are_those_of_the_module(training, cases, seed, monkeypatch):
    monkeypatch.setattr(Communicator, "group", lambda *_: None)
    task, mesh = cases[0][0], training.MESH
    program = lower(task.graph, training.plan_of(task.graph, seed, mesh), LoweringOptions(sharded_optimizer=True))
    tensors = local_tensors(program, "cpu")
    names = {id(tensor): name for name, tensor in tensors.items()}
    module = build(program, tensors, Communicator(mesh, 0), "cpu")
    built = [
        tuple(sorted(names[id(parameter)] for parameter in unit._parameters.values()))
        for unit in module.modules()
        if unit._parameters and MODULE in getattr(unit, "meta", {})
    ]
    assert sorted(built) == sorted(unit.parameters for unit in units(program))
