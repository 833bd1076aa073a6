"""A recorded case as a plain torch module, a batch and a request to the planner.

Every recorded node is a submodule, so that the torch operators it becomes are found by their module. Unused
results enter the loss: the mean square of every such result. Sizes that a case leaves open are the first
that the network runs with. The networks of pipeline stages run one after another on the devices of one stage.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.conformance.forms import NotMapped
from tests.conformance.operators import TABLE

Case = Mapping[str, Any]
Sizes = Mapping[str, int]


def devices(case: Case) -> int:
    """Of one stage."""
    stages = (case.get("context") or {}).get("pipeline_stages") or 1
    return int(case["device_num"]) // int(stages)


def dataset_strategy(case: Case) -> Any:
    context = case.get("context") or {}
    return context.get("dataset_strategy", "full_batch" if context.get("full_batch") else "data_parallel")


def is_open(size: Any) -> bool:
    return not isinstance(size, int) or size < 0


def shape_of(spec: Mapping[str, Any], sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes[f"{spec['tensor']}.{i}"] if is_open(size) else size for i, size in enumerate(spec["shape"]))


class Step(nn.Module):
    """One recorded node. Takes its tensors in order; numbers and lists are its own."""

    def __init__(self, node: Mapping[str, Any]) -> None:
        super().__init__()
        self.node = node
        self.attrs = {**(node.get("attrs") or {}), **(node.get("prim_attrs") or {})}

    def forward(self, *tensors: Any) -> Any:
        return TABLE[self.node["op"]].compute(self.arguments(tensors), self.attrs)

    def arguments(self, tensors: tuple[Any, ...]) -> list[Any]:
        waiting = iter(tensors)

        def filled(argument: Any) -> Any:
            if isinstance(argument, list) and argument and isinstance(argument[0], dict):
                return [filled(item) for item in argument]
            return next(waiting) if isinstance(argument, dict) else argument

        return [filled(argument) for argument in self.node["in"]]


class Sum(nn.Module):
    """The mean squares of all results, times a gain of one, so that there is something to train in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, *tensors: Tensor) -> Tensor:
        total = sum(t.to(self.gain.dtype).square().mean() for t in tensors)
        return self.gain * total


class Network(nn.Module):
    """The recorded nodes in order. `steps[i]` is the submodule `<name><i>` of node i."""

    def __init__(self, case: Case, sizes: Sizes) -> None:
        super().__init__()
        self.nodes = case["network"]
        self.inputs = [entry["tensor"] for entry in case["inputs"] if isinstance(entry, dict)]
        known = {node["op"] for node in self.nodes}
        for missing in sorted(known - TABLE.keys()):
            raise NotMapped(f"operator {missing}")
        self.parameter_names: dict[tuple[int, int], str] = {}
        self.steps: list[Step] = []
        self._parameters_of(case, sizes)
        for node in self.nodes:
            step = Step(node)
            self.add_module(name_of(node), step)
            self.steps.append(step)
        self.sum = Sum()
        self.used = {taken for node in self.nodes for item in flat(node["in"]) for taken in results_taken(node, item)}

    def _parameters_of(self, case: Case, sizes: Sizes) -> None:
        """A name that the case lists once per use is a separate parameter at each use."""
        listed = [p["name"] for p in case.get("params") or []]
        fixed = {p["name"] for p in case.get("params") or [] if p.get("requires_grad") is False}
        uses: dict[str, int] = {}
        for node in self.nodes:
            for position, item in enumerate(flat(node["in"])):
                if "param" in item:
                    name = item["param"]
                    number = min(uses.get(name, 0), max(listed.count(name), 1) - 1)
                    uses[name] = uses.get(name, 0) + 1
                    full = name.replace(".", "_") + (f"__{number}" if number else "")
                    if not hasattr(self, full):
                        tensor = torch.zeros(shape_of(item, sizes))
                        self.register_parameter(full, nn.Parameter(tensor, requires_grad=name not in fixed))
                    self.parameter_names[node["id"], position] = full
                elif "tensor" in item and item["tensor"] not in self.inputs:
                    self.register_buffer(f"const_{node['id']}_{position}", torch.zeros(shape_of(item, sizes)))

    def forward(self, *batch: Tensor) -> Tensor:
        values: dict[int, Any] = {}
        given = dict(zip(self.inputs, batch, strict=True))

        def value(node: Mapping[str, Any], position: int, item: Mapping[str, Any]) -> Any:
            if "param" in item:
                return getattr(self, self.parameter_names[node["id"], position])
            if "tensor" in item:
                own = f"const_{node['id']}_{position}"
                return given[item["tensor"]] if item["tensor"] in given else getattr(self, own)
            found = values[item["node"]]
            if isinstance(found, tuple) and node["op"] != "getitem":
                return found[item.get("out", 0)]
            return found

        for node, step in zip(self.nodes, self.steps, strict=True):
            values[node["id"]] = step(*(value(node, i, item) for i, item in enumerate(flat(node["in"]))))
        ends = []
        for node in self.nodes:
            results = values[node["id"]]
            results = results[: TABLE[node["op"]].results] if isinstance(results, tuple) else (results,)
            ends += [result for i, result in enumerate(results) if (node["id"], i) not in self.used]
        total: Tensor = self.sum(*ends)
        return total


def results_taken(node: Mapping[str, Any], item: Mapping[str, Any]) -> set[tuple[int, int]]:
    """(node, result) that an argument of `node` consumes; an index of a single result takes all of it."""
    if "node" not in item:
        return set()
    if node["op"] == "getitem":
        return {(item["node"], (node.get("attrs") or {}).get("index", 0)), (item["node"], 0)}
    return {(item["node"], item.get("out", 0))}


def name_of(node: Mapping[str, Any]) -> str:
    words = re.sub(r"\W", "_", node.get("name") or node["op"])
    return f"{words}_n{node['id']}"


def flat(arguments: list[Any]) -> list[Mapping[str, Any]]:
    """The tensors among the arguments, lists opened."""
    items = [item for a in arguments for item in (a if isinstance(a, list) else [a])]
    return [item for item in items if isinstance(item, dict)]
