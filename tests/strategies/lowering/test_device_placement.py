"""Operators on the host: copies are instructions, one per value and direction, and results are unchanged."""

import pytest
import torch

from strategies.core.errors import StrategyError
from strategies.core.program import Compute, Copy, LoweringOptions, Redistribute
from strategies.lowering import ir
from strategies.lowering.device_placement import on_host, place_on_host
from strategies.lowering.lowering import lower
from strategies.runtime.offload import OffloadTraffic, copier
from strategies.runtime.simulate import Simulation


@pytest.fixture(scope="module")
def task(training):
    return training.task()[1]


def values(task):
    x, y = task.batches[0][0]
    return {**task.tensors, "0": x, "1": y}


@pytest.mark.parametrize("globs", [["emb"], ["dense?"], ["ln", "head", "relu"], ["*"]])
@pytest.mark.parametrize("seed", [-1, 0, 1, 2, 3])
def test_same_numbers(training, task, globs, seed):
    plan = training.plan_of(task.graph, seed)
    plain = lower(task.graph, plan, LoweringOptions(exact=True))
    found = []
    for program in (plain, place_on_host(plain, on_host(task.graph, globs))):
        simulation = Simulation(program, values(task))
        (losses,) = simulation.run(1)
        simulation.backward(losses[:1])
        found.append((losses, simulation.gradients()))
    (losses, gradients), (same, grads) = found
    assert all(torch.equal(one, other) for one, other in zip(losses, same, strict=True))
    assert all(torch.equal(gradient, grads[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("globs", [["dense1", "head", "add"], ["*"]])
@pytest.mark.parametrize("seed", [-1, 0, 1, 2, 3])
def test_every_operand_is_on_its_side(training, task, seed, globs):
    hosted = on_host(task.graph, globs)
    program = place_on_host(
        lower(task.graph, training.plan_of(task.graph, seed), LoweringOptions(partial_loss=True)), hosted
    )
    host, copies = {source.id: False for source in program.sources}, []
    for instruction in program.instructions:
        if isinstance(instruction, Copy):
            assert host[instruction.value.id] != instruction.host
            copies.append((instruction.value, instruction.host))
            host[instruction.id] = instruction.host
        elif isinstance(instruction, Redistribute):
            assert not host[instruction.value.id]
            host[instruction.id] = False
        else:
            assert isinstance(instruction, Compute) and instruction.host == (instruction.operator in hosted)
            host[instruction.id] = instruction.host
            used = [ref for ref in training.refs_of(instruction) if ref.id in host]
            assert used == [ref for ref in used if host[ref.id] == instruction.host]
    assert len(copies) == len(set(copies)) > 0
    assert not any(host[ref.id] for ref in program.outputs)


@pytest.mark.parametrize("host", [True, False])
def test_the_gradient_takes_the_way_back(host):
    moved, value = OffloadTraffic(), torch.ones(3, dtype=torch.float64, requires_grad=True)
    copy = copier(host, torch.device("cpu"), moved)(value)
    copied = 24
    assert copy.data_ptr() != value.data_ptr()
    assert (moved.out, moved.back) == ((copied, 0) if host else (0, copied))
    copy.sum().backward()
    assert (moved.out, moved.back) == (copied, copied)


def test_the_dump_shows_the_copies(training, task):
    plan = training.plan_of(task.graph, training.DATA_PARALLEL)
    program = place_on_host(lower(task.graph, plan), on_host(task.graph, ["dense1"]))
    lines = ir.end(task.graph, plan, program, 0).splitlines()
    copies = [line for line in lines if "copy_to_" in line]
    assert [line.split("copy_to_")[1].split("(")[0] for line in copies] == ["host"] * 3 + ["device"]
    assert all("for dense1" in line for line in copies[:3])
    assert sum(line.endswith("  on the host") for line in lines) == 1


def test_a_glob_without_operators_is_refused(task):
    with pytest.raises(StrategyError, match=r"parallel\.place: 'dense9' matches .* Did you mean 'dense"):
        on_host(task.graph, ["dense9"])


@pytest.mark.slow
def test_on_real_ranks(training, ranks, task):
    """Generated code, with ZeRO-3's hooks, gives the same results."""
    cases = [training.Case(2, stage, clip=0.3, place=globs) for stage in (0, 3) for globs in ((), ("emb", "dense2"))]
    done = ranks("train", [(task, case) for case in cases])
    for plain, found in (done[:2], done[2:]):
        assert found.losses == plain.losses and found.norms == plain.norms
        for name, weight in plain.weights.items():
            assert torch.equal(found.weights[name], weight), name
        assert plain.moved == {} and found.copied.out > 0 and found.copied.back > 0
