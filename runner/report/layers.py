"""A plan's operators as layers: repeated layers with equal layouts are one kind, shown once.

Made from the content of plan.json alone. A layer is a module in a list (`layers.3`), the outermost one around an
operator; outside of lists it is the outermost module. Invariant: every operator is in exactly one kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

NUMBER = re.compile(r"\d+")
Entry = Mapping[str, Any]


class Sums:
    """Sums over operators: seconds by part, bytes sent per step, bytes of parameters and results per rank."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        costs = [entry["predicted"] for entry in entries]

        def total(*names: str) -> Any:
            return sum(cost[name] for cost in costs for name in names)

        self.compute: float = total("forward", "backward")
        self.communication: float = total("communication", "gradients")
        self.seconds = self.compute + self.communication
        self.sent: int = total("sent")
        self.parameters: int = total("parameters")
        self.results: int = total("results")


@dataclass(frozen=True)
class LayerKind:
    """`instances` are the operators (entries of plan.json) of each layer of this kind, in the same order;
    `name` says which layers these are: `layers.[0-31]`."""

    name: str
    instances: tuple[tuple[Entry, ...], ...]

    @property
    def count(self) -> int:
        return len(self.instances)

    @property
    def title(self) -> str:
        return self.name + (f" x {self.count}" if self.count > 1 else "")

    @cached_property
    def rows(self) -> list[Row]:
        """One row per operator of a layer, with the sums over the layers."""
        return [Row(relative(members[0]), members) for members in zip(*self.instances, strict=True)]

    @cached_property
    def sums(self) -> Sums:
        return Sums(entry for instance in self.instances for entry in instance)


@dataclass(frozen=True)
class Row:
    """The same operator of several layers. `name` is relative to the layer."""

    name: str
    members: tuple[Entry, ...]

    @property
    def first(self) -> Entry:
        return self.members[0]

    @property
    def layouts(self) -> str:
        """The layouts of the operator's operands and results."""
        return f"{' '.join(self.first['in_layouts'])} -> {' '.join(self.first['out_layouts'])}"

    @cached_property
    def sums(self) -> Sums:
        return Sums(self.members)

    @property
    def matters(self) -> bool:
        """Whether it has parameters or communicates, so that its layouts are of interest."""
        return self.sums.parameters > 0 or self.sums.sent > 0


def kinds(operators: Sequence[Entry]) -> list[LayerKind]:
    """The kinds in the order in which their first layers come."""
    layers: dict[str, list[Entry]] = {}
    for entry in operators:
        layers.setdefault(layer_of(entry["module"], entry["name"]), []).append(entry)
    classes: dict[tuple[Any, ...], list[str]] = {}
    for layer, members in layers.items():
        base, _, last = layer.rpartition(".")
        pattern = base if NUMBER.fullmatch(last) else layer
        classes.setdefault((pattern, *map(_signature, members)), []).append(layer)
    return [LayerKind(_together(names), tuple(tuple(layers[name]) for name in names)) for names in classes.values()]


def layer_of(module: str, name: str) -> str:
    """The path of the layer that holds an operator called `name` of `module`: up to the outermost number, else its
    outermost module; the operator itself, where it is in no module."""
    words = module.split(".")
    for position, word in enumerate(words):
        if NUMBER.fullmatch(word):
            return ".".join(words[: position + 1])
    return words[0] or name


def relative(entry: Entry) -> str:
    """An operator's name below its layer."""
    name: str = entry["name"]
    op: str = entry["op"]
    below = name.removeprefix(layer_of(entry["module"], name)).removeprefix(".")
    return below if below and below[0] != "@" else op + below


def _signature(entry: Entry) -> tuple[Any, ...]:
    decisive = (entry[key] for key in ("shapes", "in_strategy", "out_strategy", "in_layouts", "out_layouts"))
    return (relative(entry), entry["op"], entry.get("stage"), *map(repr, decisive))


def _together(names: Sequence[str]) -> str:
    """Layers of one list: `layers.0`, `layers.1`, `layers.3` -> `layers.[0-1,3]`."""
    if len(names) == 1:
        return names[0]
    base, numbers = names[0].rpartition(".")[0], sorted(int(name.rpartition(".")[2]) for name in names)
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    shown = ",".join("-".join(map(str, dict.fromkeys((run[0], run[-1])))) for run in runs)
    return f"{base}.[{shown}]" if base else f"[{shown}]"
