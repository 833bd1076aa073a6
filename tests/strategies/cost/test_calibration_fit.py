"""Constants fitted to times: recovered where times follow the model, and errors that report where they do not."""

from __future__ import annotations

import random

import pytest

from strategies.core.mesh import Mesh
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER
from strategies.cost.calibration_fit import ALONE, SEND, Product, Ran, TimedCollective, TimedCopy, fit, nonnegative
from strategies.cost.cluster import RING, Cluster, Level, Link, Pace
from strategies.cost.collectives import collective_seconds
from strategies.cost.roofline import operator_work
from strategies.cost.sample_operators import FORMS, STACK, sample, stack
from strategies.rules import rule_of

MESH = Mesh((("a", 2), ("b", 2), ("c", 2)))
LINKS = {
    ALL_REDUCE: Link(4e8, 7e-4, 1e-3),
    ALL_GATHER: Link(2e8, 1e-3, 0.0),
    REDUCE_SCATTER: Link(1e8, 0.0, 5e-3),
    ALL_TO_ALL: Link(3e8, 2e-4, 4e-4),
    EXCHANGE: Link(5e8, 1e-4, 3e-4),
}
MACHINE = Cluster("m", (Level("process", 8, Link(1.0, 1.0), LINKS),), {"float32": 1e9}, 1, 1e9, 0.0, algorithms=(RING,))


def calls(noise: float = 0.0) -> list[TimedCollective]:
    draw, found = random.Random(0), []
    for kind in LINKS:
        for axes in (("a",), ("a", "b"), ("a", "b", "c")):
            for size in (10**3, 10**5, 10**7):
                seconds = collective_seconds(kind, size, axes, MESH, MACHINE) * (1 + draw.uniform(-noise, noise))
                found.append(TimedCollective(kind, MESH.product(axes), size, seconds))
    return found


PRODUCTS = [Product("float32", flops, 1e-5 + flops / 5e10) for flops in (1e5, 1e7, 1e9)]
COPIES = [TimedCopy(size, 1e-6 + size / 7e9) for size in (10**4, 10**6, 10**8)]


def test_the_law_of_the_cost_model_is_found_again() -> None:
    found = fit(PRODUCTS, COPIES, calls())
    for kind, link in LINKS.items():
        assert found.links[kind].bandwidth == pytest.approx(link.bandwidth)
        assert found.links[kind].latency == pytest.approx(link.latency, abs=1e-12)
        assert found.links[kind].call == pytest.approx(link.call, abs=1e-12)
    assert found.flops["float32"] == pytest.approx(5e10)
    assert found.memory_bandwidth == pytest.approx(7e9)
    assert max(error.worst for error in found.errors.values()) < 1e-6


@pytest.mark.parametrize("op", FORMS)
def test_the_paces_of_an_operator_are_found_again(op: str) -> None:
    """Seconds by the cost model itself, on a machine that has paces."""
    paces = Pace(2e-4, 1.7), Pace(9e-4, 8.0)
    machine = Cluster("m", (), {"float32": 5e10}, 1, 7e9, 1e-6, operators={op: paces})
    ran = []
    for tokens in (64, 256, 1024):
        graph = sample(op, tokens)
        (operator,) = graph.operators
        work = operator_work(rule_of(operator, graph), {}, operator, graph, ALONE, machine)
        assert work.calls == pytest.approx(1.1e-3)
        ran.append(Ran(op, tokens, work.forward, work.backward))
    (found,) = fit(PRODUCTS, COPIES, [], ran).operators.values()
    for pace, one in zip(paces, found, strict=True):
        assert (one.call, one.factor) == (pytest.approx(pace.call, rel=1e-3), pytest.approx(pace.factor, rel=1e-3))


def test_what_a_step_of_layers_achieves_is_found_again() -> None:
    """Layers that take as long as the cost model says of a machine with 0.8 of the rates."""
    slower = Cluster("m", (), {"float32": 0.8 * 5e10}, 1, 0.8 * 7e9, 1e-6)
    ran = []
    for tokens in (256, 1024):
        graph = stack(tokens)
        works = [operator_work(rule_of(one, graph), {}, one, graph, ALONE, slower) for one in graph.operators]
        ran.append(Ran(STACK, tokens, sum(work.forward for work in works), sum(work.backward for work in works)))
    found = fit(PRODUCTS, COPIES, [], ran, launch=1e-6)
    assert found.achieved == pytest.approx(0.8) and found.errors[STACK].worst < 1e-6 and not found.operators
    assert fit(PRODUCTS, COPIES, []).achieved == 1.0


def test_noise_shows_as_error_and_hardly_in_the_constants() -> None:
    found = fit(PRODUCTS, COPIES, calls(noise=0.2))
    for kind, link in LINKS.items():
        assert 0.02 < found.errors[kind].worst < 0.5
        assert found.links[kind].bandwidth == pytest.approx(link.bandwidth, rel=0.25)


def test_no_constant_is_negative() -> None:
    (call, per_byte), error = nonnegative([[1.0, 1.0], [1.0, 10.0], [1.0, 100.0]], [0.1, 2.0, 30.0])
    assert call == 0
    assert 0.1 < per_byte < 0.3
    assert error.worst > 0.1


def test_too_much_counts_as_much_as_too_little() -> None:
    (constant,), _ = nonnegative([[1.0], [1.0]], [1.0, 2.0])
    assert constant == pytest.approx(2**0.5)


def test_a_time_that_is_far_off_pulls_no_harder() -> None:
    (near,), _ = nonnegative([[1.0]] * 5, [1.0, 1.0, 1.0, 1.0, 10.0])
    (far,), _ = nonnegative([[1.0]] * 5, [1.0, 1.0, 1.0, 1.0, 1e6])
    assert near == pytest.approx(far)


@pytest.mark.parametrize("seconds", [(1.0, 0.1, 0.01), (1.0, 1.0, 1.0), (0.5, 1.0, 0.6), (1e-6, 1.0, 1.001)])
def test_noise_ends_no_fit(seconds: tuple[float, ...]) -> None:
    sizes = (10**3, 10**5, 10**7)
    products = [Product("float32", size, one) for size, one in zip(sizes, seconds, strict=True)]
    copies = [TimedCopy(size, one) for size, one in zip(sizes, seconds, strict=True)]
    found = fit(
        products,
        copies,
        [TimedCollective(kind, 8, size, one) for kind in LINKS for size, one in zip(sizes, seconds, strict=True)],
    )
    highest = max(size / one for size, one in zip(sizes, seconds, strict=True))
    rates = [found.flops["float32"], found.memory_bandwidth, *(link.bandwidth for link in found.links.values())]
    assert found.links.keys() == LINKS.keys()
    assert all(rate is not None and 0 < rate <= 10.001 * highest for rate in rates)


def test_constants_measured_once_or_never() -> None:
    found = fit([Product("float64", 1e9, 0.5)], [], [TimedCollective(SEND, 2, 1000, 0.1)])
    assert found.flops == {"float64": pytest.approx(2e9)}
    assert found.errors["matmul float64"].worst < 1e-9
    assert (found.memory_bandwidth, found.links) == (None, {})  # seconds per call or per byte?
    assert fit([], [], []).flops == {}


def test_a_collective_whose_times_do_not_grow_has_the_bandwidth_of_its_largest_call() -> None:
    flat = [TimedCollective(SEND, 2, size, 1.0 / (1 + size)) for size in (1, 10, 100)]
    found = fit(PRODUCTS, COPIES, flat)
    assert found.links[SEND].bandwidth == pytest.approx(100 * 101)
    assert found.errors[SEND].worst > 0.5  # a large error: the constant is uncertain
