"""200 random graphs in every test run; and the fuzzer itself: it generates every operator, catches a broken rule and
shrinks the failing case."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence

import pytest

from strategies.core.graph import Operator, TensorSpec
from strategies.rules import RULES
from strategies.rules.sharding import Sharding
from tests.fuzz.__main__ import main
from tests.fuzz.cases import Case, Refused, failure, random_case, sensitive
from tests.fuzz.generators import GENERATORS, WITHOUT
from tests.fuzz.listing import listing
from tests.fuzz.pool import Pool
from tests.fuzz.shrink import shrink

SHARDS, QUICK, GRAPHS = 8, 4, 25
"""Blocks of seeds, so that the tests can run side by side; how many of them are not slow; seeds of a block."""
FIRST = 500_000_000


@pytest.fixture(autouse=True)
def _no_warnings() -> object:
    """Some operators are deprecated in torch; their results are compared nevertheless."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "shard", [*range(QUICK), *(pytest.param(shard, marks=pytest.mark.slow) for shard in range(QUICK, SHARDS))]
)
def test_random_graphs(shard: int) -> None:
    wrong, unsure = {}, 0
    for seed in range(FIRST + shard * GRAPHS, FIRST + (shard + 1) * GRAPHS):
        case = random_case(seed)
        try:
            found = failure(case)
        except Refused:  # torch's own views and backwards do not support every stride
            unsure += 1
            continue
        if found is not None and sensitive(case):
            unsure += 1
        elif found is not None:
            wrong[seed] = found
    assert not wrong
    assert unsure <= 1


def test_every_rule_is_generated() -> None:
    own = {name for name in RULES if "::" not in name or name in WITHOUT}  # other tests register operators of libraries
    assert sorted(own - GENERATORS.keys()) == sorted(WITHOUT)


@pytest.mark.few(60)
@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_every_generator_draws_its_operator(name: str) -> None:
    generated = 0
    for seed in range(12):
        pool = Pool(random.Random(seed))
        for _ in range(4):
            pool.floats(pool.shape())
        if pool.attempt(lambda pool: GENERATORS[name](pool, name)):
            generated += 1
            assert name in {operator.op for operator in pool.operators}
    assert generated >= 2


def test_a_seed_repeats_its_case() -> None:
    first, second = random_case(7), random_case(7)
    assert first.graph == second.graph
    assert first.plan == second.plan
    assert all(first.values[name].equal(second.values[name]) for name in first.values)


@pytest.mark.slow
def test_cases_vary() -> None:
    cases = [random_case(seed) for seed in range(30)]
    sizes = {tuple(size for _, size in case.plan.mesh.axes) for case in cases}
    assert len(sizes) >= 5
    assert all(len(case.graph.operators) >= 5 for case in cases)
    assert {case.sharded_optimizer for case in cases} == {True, False}
    sliced = sum(bool(plan.assignment) for case in cases for plan in case.plan.operators.values())
    assert sliced > 0.4 * sum(len(case.graph.operators) for case in cases)


@pytest.mark.slow
def test_plans_slice_pictures() -> None:
    """Rows of convolutions, of pooling and of interpolation."""
    plans = [plan for seed in range(60) for plan in random_case(seed).plan.operators.values()]
    factors = {factor for plan in plans for factor in plan.assignment}
    assert {"s0", "s1", "w0", "w1"} <= factors


def broken(rule: object) -> object:
    """A wrong softmax rule that allows its reduction dim to be sharded."""

    def wrong(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
        dims = tuple(f"d{i}" for i in range(len(specs[0].shape)))
        sizes = dict(zip(dims, specs[0].shape, strict=True))
        return Sharding((dims,), (dims,), sizes)

    return wrong


def failing_case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setitem(RULES, "softmax", broken(RULES["softmax"]))
    monkeypatch.setattr(
        "tests.fuzz.cases.GENERATORS", {name: GENERATORS[name] for name in ("softmax", "mul", "linear")}
    )
    for seed in range(40):
        case = random_case(seed, (6, 9))
        if failure(case) is not None:
            return case
    raise AssertionError("No case found the broken rule.")


def test_a_broken_rule_is_caught_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    case = failing_case(monkeypatch)
    small, found = shrink(case, seconds=30)
    assert [operator.op for operator in small.graph.operators] == ["softmax"]
    assert len([axis for axis, size in small.plan.mesh.axes if size > 1]) == 1
    assert small.seed == case.seed
    text = listing(small, found)
    assert "aten.softmax.int(" in text
    assert "sliced d" in text
    assert f"--only {case.seed}" in text


def test_a_crash_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(3)

    def refuse(*_: object) -> None:
        raise ValueError("no such chain")

    monkeypatch.setattr("tests.fuzz.cases.lower", refuse)
    assert (failure(case) or "").startswith("ValueError: no such chain")


def test_command_reports_the_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seed = failing_case(monkeypatch).seed
    monkeypatch.setattr("tests.fuzz.__main__.random_case", lambda seed: random_case(seed, (6, 9)))
    assert main(["--only", str(seed)]) == 1
    said = capsys.readouterr().out
    assert f"seed {seed} fails" in said
    assert "aten.softmax.int(" in said


def test_command_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--graphs", "3", "--seed", "4"]) == 0
    assert "3 graphs with" in capsys.readouterr().out
