"""A recorded case as a plain torch module, a batch and a request to the planner.

Every recorded node is a submodule of its own, so that the torch operators it becomes are found by their module. What
nobody consumes goes into the loss: the mean square of every such result. Sizes that a case leaves open are the first
that the network runs with. The networks of pipeline stages run one after another on the devices of one stage.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strategies.graph import OperatorGraph
from strategies.request import SEARCHES, NamedDims, NamedMatrix, Operand, Request, Wanted
from tests.conformance.operators import TABLE, Form, Forms, NotMapped, Recorded

Case = Mapping[str, Any]
Sizes = Mapping[str, int]
FEW_INDICES = 8
"""Indices are drawn below this number, or below the table's rows."""


def devices(case: Case) -> int:
    """Of one stage."""
    stages = (case.get("context") or {}).get("pipeline_stages") or 1
    return int(case["device_num"]) // int(stages)


# sizes that the case leaves open


def is_open(size: Any) -> bool:
    return not isinstance(size, int) or size < 0


def open_dims(case: Case) -> dict[str, str]:
    """Every open dim of an input, by a name that tells its place, with what is known of it."""
    return {
        f"{entry['tensor']}.{dim}": str(size)
        for entry in case["inputs"]
        if isinstance(entry, dict) and entry.get("tensor")
        for dim, size in enumerate(entry["shape"])
        if is_open(size)
    }


def candidates(known: str, case: Case) -> list[int]:
    """Sizes that fit `sym(divisor=8, remainder=1)`, those of the case first where nothing smaller is known."""
    numbers = {name: int(value) for name, value in re.findall(r"(divisor|remainder)=(\d+)", known)}
    divisor, remainder = numbers.get("divisor", devices(case)), numbers.get("remainder", 0)
    here = {size for entry in specs_of(case) for size in entry["shape"] if not is_open(size)}
    fitting = sorted(size for size in here if size % divisor == remainder % divisor)
    return list(dict.fromkeys([remainder or divisor, *fitting, math.lcm(divisor, devices(case)) + remainder]))


def specs_of(case: Case) -> Iterator[Mapping[str, Any]]:
    """Every tensor or parameter that flows in."""
    for node in case["network"]:
        for argument in node["in"]:
            for item in argument if isinstance(argument, list) else [argument]:
                if isinstance(item, dict) and "node" not in item:
                    yield item


def shape_of(spec: Mapping[str, Any], sizes: Sizes) -> tuple[int, ...]:
    return tuple(sizes[f"{spec['tensor']}.{i}"] if is_open(size) else size for i, size in enumerate(spec["shape"]))


# the module


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
        used = {(item["node"]) for node in self.nodes for item in flat(node["in"]) if "node" in item}
        self.results = [node["id"] for node in self.nodes if node["id"] not in used]

    def _parameters_of(self, case: Case, sizes: Sizes) -> None:
        """A name that the case lists as often as it is used is a parameter of its own at every use."""
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
            if node["id"] in self.results:
                end = values[node["id"]]
                ends += end[: TABLE[node["op"]].results] if isinstance(end, tuple) else [end]
        total: Tensor = self.sum(*ends)
        return total


def name_of(node: Mapping[str, Any]) -> str:
    words = re.sub(r"\W", "_", node.get("name") or node["op"])
    return f"{words}_n{node['id']}"


def flat(arguments: list[Any]) -> list[Mapping[str, Any]]:
    """The tensors among the arguments, lists opened."""
    items = [item for a in arguments for item in (a if isinstance(a, list) else [a])]
    return [item for item in items if isinstance(item, dict)]


# the batch


def index_tensors(case: Case) -> set[str]:
    """Inputs and constants that are indices, also by way of other operators."""
    wanted: set[Any] = set()
    for node in reversed(case["network"]):
        counterpart = TABLE[node["op"]]
        for position, item in enumerate(flat(node["in"])):
            sparse = node["op"] != "nn.SoftmaxCrossEntropyWithLogits" or (node.get("attrs") or {}).get("sparse")
            if node["id"] in wanted or (position in counterpart.indices and sparse):
                wanted.add(item.get("node", item.get("tensor")) if item.get("tensor") != "const" else
                           f"const_{node['id']}_{position}")
    return {name for name in wanted if isinstance(name, str)}


def conditions(case: Case) -> set[str]:
    return {
        item["tensor"]
        for node in case["network"]
        for position, item in enumerate(flat(node["in"]))
        if "tensor" in item and ((node["op"] == "Select" and position == 0) or node["op"].startswith("Logical"))
    }


def fill(case: Case, network: Network, sizes: Sizes) -> tuple[Tensor, ...]:
    """Numbers for parameters and constants, in place, and the batch; on the device of the parameters."""
    draw = torch.Generator().manual_seed(0)
    positive = any(TABLE[node["op"]].domain for node in case["network"])
    device = network.sum.gain.device
    indices, bools = index_tensors(case), conditions(case)
    rows = [item["shape"] for node in case["network"] for item in flat(node["in"])[:1] if TABLE[node["op"]].indices]
    below = min([FEW_INDICES, *(min([n for n in shape if not is_open(n)], default=1) for shape in rows)])
    if any(TABLE[node["op"]].indices and node["op"] == "OneHot" for node in case["network"]):
        below = 2

    def numbers(name: str, shape: tuple[int, ...]) -> Tensor:
        if device.type == "meta":
            dtype = torch.int64 if name in indices else torch.bool if name in bools else torch.float64
            return torch.empty(shape, dtype=dtype, device=device)
        if name in indices:
            return torch.randint(0, max(below // 4, 1), shape, generator=draw)
        if name in bools:
            return torch.rand(shape, generator=draw) < 0.5
        if positive:
            return torch.rand(shape, generator=draw, dtype=torch.float64) + 0.5
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name != "sum.gain":
                parameter.data = numbers(name, tuple(parameter.shape))
        for name, buffer in list(network.named_buffers()):
            setattr(network, name, numbers(name, tuple(buffer.shape)))
    network.sum.double()
    listed = [entry for entry in case["inputs"] if isinstance(entry, dict)]
    return tuple(numbers(entry["tensor"], shape_of(entry, sizes)) for entry in listed)


@dataclass(frozen=True)
class Built:
    network: Network
    batch: tuple[Tensor, ...]

    @property
    def largest(self) -> int:
        """Elements of the largest tensor that flows in."""
        tensors = (*self.batch, *self.network.parameters(), *self.network.buffers())
        return max(tensor.numel() for tensor in tensors)


def build(case: Case, *, real: bool) -> Built:
    """The network and its batch, on the CPU or without memory. Raises NotMapped where the recorded shapes do not go
    together in torch."""
    places = open_dims(case)
    failure = ""
    for chosen in itertools.islice(itertools.product(*(candidates(known, case) for known in places.values())), 64):
        sizes = dict(zip(places, chosen, strict=True))
        try:
            with torch.device("meta"):
                tried = Network(case, sizes)
            batch = fill(case, tried, sizes)
            tried(*batch)
        except (RuntimeError, IndexError, ValueError) as error:
            failure = failure or str(error).splitlines()[0]
            continue
        if not real:
            return Built(tried, batch)
        network = Network(case, sizes)
        return Built(network, fill(case, network, sizes))
    raise NotMapped(f"shapes that torch takes ({failure})")


# the request


def request_of(case: Case, graph: OperatorGraph, built: Built) -> Request:
    """Raises NotMapped for a mode, a search or a strategy that has no counterpart."""
    layouts: dict[str, NamedMatrix] = {}
    strategies: dict[str, Wanted] = {}
    for node, step in zip(built.network.nodes, built.network.steps, strict=True):
        strategies |= wanted_of(node, step, graph, layouts)
    mode = case["mode"]
    if mode not in ("semi_auto", "auto", "data_parallel"):
        raise NotMapped(f"mode {mode}")
    if mode == "auto" and not searched(case):
        mode = "semi_auto"
    return Request(
        mode,
        devices(case),
        strategies=strategies,
        layouts=layouts,
        dataset_strategy=dataset_of(case, layouts),
    )


def searched(case: Case) -> bool:
    """Whether our search of the same name can take the case: it has to be there, and propagation starts from
    configured operators. Otherwise the planner's defaults stand for it."""
    search = case["search_mode"]
    configured = any(node.get("in_strategy") or node.get("out_strategy") for node in case["network"])
    return search in SEARCHES and (configured or search != "sharding_propagation")


def dataset_of(case: Case, layouts: dict[str, NamedMatrix]) -> Any:
    context = case.get("context") or {}
    strategy = context.get("dataset_strategy", "full_batch" if context.get("full_batch") else "data_parallel")
    if isinstance(strategy, str):
        return strategy
    return tuple(form_of(entry, layouts).operand() for entry in strategy)


def form_of(entry: Any, layouts: dict[str, NamedMatrix]) -> Form:
    """Counts, or a layout: device matrix, a name per axis, and a name, several or None per dim."""
    if isinstance(entry, list):
        return Form(tuple(entry))
    layout = entry["layout"]
    matrix = NamedMatrix(tuple(layout["device_matrix"]), tuple(layout["alias"]))
    name = next((n for n, known in layouts.items() if known == matrix), f"l{len(layouts)}")
    layouts[name] = matrix
    dims = [[dim] if isinstance(dim, str) else dim or [] for dim in layout["map"]]
    return Form(tuple(tuple(axis for axis in dim if axis != "None") for dim in dims), name)


def numbered(matrix: list[int], maps: list[list[int]], layouts: dict[str, NamedMatrix]) -> Forms:
    """Layouts written as numbers of axes, counted from the right; -1 is not sliced."""
    alias = [f"a{i}" for i in range(len(matrix))]
    return tuple(
        form_of(
            {"layout": {"device_matrix": matrix, "alias": alias, "map": [alias[-1 - n] if n >= 0 else [] for n in dims]}},
            layouts,
        )
        for dims in maps
    )


def wanted_of(
    node: Mapping[str, Any], step: Step, graph: OperatorGraph, layouts: dict[str, NamedMatrix]
) -> dict[str, Wanted]:
    """The strategies of one node's torch operators, by plan name."""
    if not node.get("in_strategy") and not node.get("out_strategy"):
        return {}
    if not node.get("in_strategy"):
        raise NotMapped("an output strategy without an input strategy")
    inputs = tuple(form_of(entry, layouts) for entry in node["in_strategy"])
    config = step.attrs.get("layout") or {}
    if config.get("input_tensor_map"):
        inputs = numbered(config["dev_matrix"], config["input_tensor_map"], layouts)
    outputs = tuple(form_of(entry, layouts) for entry in node["out_strategy"]) if node.get("out_strategy") else None
    operators = tuple(o for o in graph.operators if o.module == name_of(node))
    if not operators:
        raise NotMapped(f"a strategy for {node['op']}, which torch does not compute here")
    shapes = tuple(tuple(spec.shape for spec in graph.operand_specs(o)) for o in operators)
    record = Recorded(inputs, outputs, arguments_of(node, step, graph), step.attrs, operators, shapes)
    return TABLE[node["op"]].spread(record)


def arguments_of(node: Mapping[str, Any], step: Step, graph: OperatorGraph) -> list[Any]:
    """The node's arguments with empty tensors of the recorded shapes; a shape that is not recorded is that of the
    operand in the same place."""
    first = next(o for o in graph.operators if o.module == name_of(node))
    seen = [spec.shape for spec in graph.operand_specs(first)]
    tensors = []
    for position, item in enumerate(flat(node["in"])):
        shape = item.get("shape")
        if shape is None or any(is_open(size) for size in shape):
            shape = seen[position] if position < len(seen) else ()
        tensors.append(torch.empty(tuple(shape), device="meta"))
    return step.arguments(tuple(tensors))


def operand_text(operand: Operand) -> str:
    return str(operand) if isinstance(operand, NamedDims) else "x".join(map(str, operand))
