"""The comparison with DTensor: it agrees on what both know, and notices a rule of ours that is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch.distributed as dist

from strategies.rules import rule_of
from tests.dtensor import __main__ as command
from tests.dtensor import compare
from tests.dtensor.compare import Answer


@pytest.fixture(autouse=True)
def own_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("op", ["mm", pytest.param("softmax", marks=pytest.mark.slow)])
def test_both_take_the_same_placements(op: str) -> None:
    counts = command.compare(op, 1, 0).counts
    assert counts["same"] > 3
    assert not counts.keys() & {"ours is wrong", "other results", "DTensor only"}


@pytest.mark.slow
def test_a_rule_that_is_wrong_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A softmax whose slices are normalised on their own."""

    def wrong(operator: object, graph: object) -> object:
        sharding = rule_of(operator, graph)  # type: ignore[arg-type]
        named = tuple(f"e{dim}" for dim in range(len(sharding.operands[0])))
        sizes = dict(zip(named, operator.results[0].shape, strict=True))  # type: ignore[attr-defined]
        return replace(sharding, operands=(named,), results=(named,), sizes=sizes)

    monkeypatch.setattr(compare, "rule_of", wrong)
    monkeypatch.setattr("strategies.lowering.lowering.rule_of", wrong)
    assert command.compare("softmax", 1, 0).counts["ours is wrong"] > 0


@pytest.mark.parametrize(
    ("answer", "mine", "partial", "expected"),
    [
        (Answer("exact", (("S0",),)), (("S0",),), False, "same"),
        (Answer("exact", (("S0",),)), (("S1",),), False, "other results"),
        (Answer("exact", (("S0",),)), None, False, "DTensor only"),
        (Answer("exact", (("P",),)), None, True, "partial sums, DTensor only"),
        (Answer("wrong", (("S0",),)), (("S0",),), False, "DTensor is wrong, ours exact"),
        (Answer("redistributed"), (("S0",),), False, "ours only"),
        (Answer("redistributed"), None, False, "neither"),
        (Answer("no backward", (("S0",),)), (("S0",),), False, "DTensor has no backward"),
    ],
)
def test_outcomes(answer: Answer, mine: compare.Taken | None, partial: bool, expected: str) -> None:
    assert command.outcome(answer, mine, (("P" if partial else "S0",),)) == expected
