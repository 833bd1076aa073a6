"""Quickstart data that inject a bug into Meshwright: constructing the dataset corrupts a rule or the captured graph.
So the bug reaches every process that plans or runs the program."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from runner.data.synthetic import Quickstart
from runner.planning import prepare
from strategies.capture import Captured
from strategies.core.graph import Operator, Ref
from strategies.rules.registry import RULES
from strategies.rules.sharding import Local


class Broken(Quickstart):
    """`mistake`: "sum", a matmul whose contraction is not marked as partial; "mean", a loss that is not divided by the
    number of shards; "gradient", a relu whose backward returns half; "slight", one whose backward returns 1e-4 too
    much; "operator", another operator in the graph."""

    def __init__(self, mistake: str, rows: int = 64) -> None:
        super().__init__(rows)
        if mistake == "sum":
            _wrap("matmul", sums=frozenset())
        elif mistake == "mean":
            _wrap("mse_loss", local=None)
        elif mistake == "gradient":
            _wrap("relu", local=partial(_scaled, 0.5))
        elif mistake == "slight":
            _wrap("relu", local=partial(_scaled, 1 + 1e-4))
        else:
            found = prepare.capture

            def capture(*args: Any, **options: Any) -> Captured:
                return _swapped(found(*args, **options), "relu", "aten.silu.default")

            prepare.capture = capture  # type: ignore[assignment]


def _wrap(operator: str, **changes: Any) -> None:
    right = RULES[operator]
    RULES[operator] = lambda *args: replace(right(*args), **changes)  # type: ignore[type-var]


def _scaled(factor: float, operator: Operator, local: Local) -> Ref:
    value = local.call(operator.target, *local.args)
    learning = local.call("aten.mul.Tensor", value, factor)
    return local.call("aten.add.Tensor", learning, local.call("aten.detach.default", value), alpha=1 - factor)


def _swapped(captured: Captured, op: str, target: str) -> Captured:
    operators = tuple(replace(o, target=target) if o.op == op else o for o in captured.graph.operators)
    return replace(captured, graph=replace(captured.graph, operators=operators))
