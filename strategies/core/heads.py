"""Modules that split the columns of their linear layers, as an attention does into heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strategies.core.graph import Operator, OperatorGraph

VIEWS = ("_unsafe_view", "reshape", "unflatten", "view")
SECTIONS = ("chunk", "slice", "split", "split_with_sizes")
"""Operators that take sections of what a fused layer returns."""


@dataclass(frozen=True)
class Split:
    """The linear layers in a module.

    Attributes:
        split: those whose columns the module splits.
        others: such as the one that joins heads.
    """

    split: tuple[Operator, ...]
    others: tuple[Operator, ...]


def split_dim(operator: Operator, graph: OperatorGraph) -> int | None:
    """The last dim of the operand of a view that splits it; None for other operators."""
    if operator.op not in VIEWS:
        return None
    taken, made = graph.operand_specs(operator)[0].shape, operator.results[0].shape
    last = len(taken) - 1
    splits = 0 < len(taken) < len(made) and made[last] < taken[last]
    return last if splits and made[:last] == taken[:last] else None


def layer_before(view: Operator, graph: OperatorGraph) -> Operator | None:
    """The linear layer whose columns a view splits, at once or once sections are taken; None where there is none."""
    maker = graph.by_id[view.operands[0].id]
    while isinstance(maker, Operator) and maker.op in SECTIONS:
        maker = graph.by_id[maker.operands[0].id]
    return maker if isinstance(maker, Operator) and maker.op == "linear" else None


def splitting(graph: OperatorGraph) -> dict[str, Split]:
    """The modules that split columns of linear layers in them, by path."""
    found: dict[str, dict[str, Operator]] = {}
    for view in graph.operators:
        if split_dim(view, graph) is not None and (layer := layer_before(view, graph)) is not None:
            if f"{layer.module}.".startswith(f"{view.module}."):
                found.setdefault(view.module, {})[layer.id] = layer
    return {
        path: Split(tuple(layers.values()), _others(path, layers, graph.operators)) for path, layers in found.items()
    }


def _others(path: str, layers: dict[str, Operator], operators: Sequence[Operator]) -> tuple[Operator, ...]:
    inside = (one for one in operators if one.op == "linear" and f"{one.module}.".startswith(f"{path}."))
    return tuple(one for one in inside if one.id not in layers)
