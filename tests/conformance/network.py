"""A recorded case as a plain torch module, a batch and a request to the planner.

Every recorded node is a submodule of its own, so that the torch operators it becomes are found by their module. What
nobody consumes goes into the loss: the mean square of every such result. Sizes that a case leaves open are the first
that the network runs with. The networks of pipeline stages run one after another on the devices of one stage.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from strategies.graph import OperatorGraph
from strategies.request import SEARCHES, NamedMatrix, Request, Wanted
from tests.conformance.operators import TABLE, Form, Forms, NotMapped, Recorded

Case = Mapping[str, Any]
Sizes = Mapping[str, int]
FEW_INDICES = 8
"""Indices are drawn below this number, or below the table's rows."""
INTERLEAVED = "interleaved_parallel"
"""An axis of a device matrix that is no devices: halves of a micro-batch, whose communication hides the other's."""


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


def dataset_strategy(case: Case) -> Any:
    context = case.get("context") or {}
    return context.get("dataset_strategy", "full_batch" if context.get("full_batch") else "data_parallel")


def whole_batches(case: Case) -> list[Case]:
    """The case with whole inputs, what is most likely first. With a data-parallel dataset the recorded inputs are the
    part of one device, and so they may be with a strategy for the dataset; interleaved micro-batches are parts too."""
    strategy, parts = dataset_strategy(case), 1
    for wrapper in case.get("wrappers") or []:
        if wrapper.get("cell") == "MicroBatchInterleaved" and wrapper.get("args"):
            parts *= int(wrapper["args"][0])
    found: list[Case] = [case]
    if strategy == "data_parallel":
        found.insert(0, scaled(case, itertools.repeat([devices(case)])))
    elif not isinstance(strategy, str) and all(isinstance(counts, list) for counts in strategy):
        found.append(scaled(case, strategy))
    if parts > 1:
        found.append(scaled(case, itertools.repeat([1]), parts))
    return found


def scaled(case: Case, counts: Iterable[list[int]], parts: int = 1) -> Case:
    """Inputs whose leading dims are so many times as long, and whose first one is divided by `parts`."""

    def entry(item: Any, factors: list[int]) -> Any:
        factors = [*factors, *(1,) * len(item["shape"])]
        shape = [size if is_open(size) else size * factor for size, factor in zip(item["shape"], factors, strict=False)]
        if shape and not is_open(shape[0]):
            shape[0] = max(shape[0] // parts, 1)
        return {**item, "shape": shape}

    factors = iter(counts)
    inputs = [entry(item, next(factors)) if isinstance(item, dict) else item for item in case["inputs"]]
    return {**case, "inputs": inputs}


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
        self.used = {taken for node in self.nodes for item in flat(node["in"]) for taken in results_taken(node, item)}

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


def smallest_range(case: Case, seen: Mapping[int, tuple[tuple[int, ...], ...]]) -> int:
    """Indices below this number are good wherever the case uses some."""
    found = [FEW_INDICES]
    for node in case["network"]:
        if node["op"] == "OneHot":
            found.append(node["in"][1])
        elif TABLE[node["op"]].indices and node["id"] in seen:
            found.append(min(seen[node["id"]][0]))
    return min(found)


def fill(
    case: Case, network: Network, sizes: Sizes, seen: Mapping[int, tuple[tuple[int, ...], ...]] = MappingProxyType({})
) -> tuple[Tensor, ...]:
    """Numbers for parameters and constants, in place, and the batch; on the device of the parameters."""
    draw = torch.Generator().manual_seed(0)
    positive = any(TABLE[node["op"]].domain for node in case["network"])
    device = network.sum.gain.device
    indices, bools = index_tensors(case), conditions(case)
    below = smallest_range(case, seen)

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
    seen: Mapping[int, tuple[tuple[int, ...], ...]]
    """Per node the shapes of its tensors."""

    @property
    def largest(self) -> int:
        """Elements of the largest tensor that flows in."""
        tensors = (*self.batch, *self.network.parameters(), *self.network.buffers())
        return max(tensor.numel() for tensor in tensors)


def build(case: Case, *, real: bool) -> Built:
    """The network and its batch, on the CPU or without memory. Raises NotMapped where the recorded shapes do not go
    together in torch."""
    failure = ""
    for whole in whole_batches(case):
        places = open_dims(whole)
        known = [candidates(text, whole) for text in places.values()]
        for chosen in itertools.islice(itertools.product(*known), 64):
            sizes = dict(zip(places, chosen, strict=True))
            try:
                with torch.device("meta"):
                    tried = Network(whole, sizes)
                batch = fill(whole, tried, sizes)
                seen = shapes_in(tried, batch)
            except (RuntimeError, IndexError, ValueError) as error:
                failure = failure or str(error).splitlines()[0]
                continue
            if not real:
                return Built(tried, batch, seen)
            network = Network(whole, sizes)
            return Built(network, fill(whole, network, sizes, seen), seen)
    raise NotMapped(f"shapes that torch takes ({failure})")


def shapes_in(network: Network, batch: tuple[Tensor, ...]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """What every node is given when the network runs."""
    found: dict[int, tuple[tuple[int, ...], ...]] = {}

    def note(step: nn.Module, given: tuple[Any, ...]) -> None:
        assert isinstance(step, Step)
        found[step.node["id"]] = tuple(tuple(item.shape) for item in given if isinstance(item, Tensor))

    hooks = [step.register_forward_pre_hook(note) for step in network.steps]
    network(*batch)
    for hook in hooks:
        hook.remove()
    return found


# the request


def request_of(case: Case, graph: OperatorGraph, built: Built) -> Request:
    """Raises NotMapped for a mode, a search or a strategy that has no counterpart."""
    layouts: dict[str, NamedMatrix] = {}
    strategies: dict[str, Wanted] = {}
    for node, step in zip(built.network.nodes, built.network.steps, strict=True):
        strategies |= wanted_of(node, step, graph, layouts, built.seen[node["id"]], devices(case))
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
    strategy = dataset_strategy(case)
    if isinstance(strategy, str):
        return strategy
    return tuple(form_of(entry, layouts).operand() for entry in strategy)


def form_of(entry: Any, layouts: dict[str, NamedMatrix]) -> Form:
    """Counts, or a layout: device matrix, a name per axis, and a name, several or None per dim."""
    if isinstance(entry, list):
        return Form(tuple(entry))
    layout = entry["layout"]
    axes = [(a, n) for a, n in zip(layout["alias"], layout["device_matrix"], strict=True) if a != INTERLEAVED]
    matrix = NamedMatrix(tuple(n for _, n in axes), tuple(a for a, _ in axes))
    name = next((n for n, known in layouts.items() if known == matrix), f"l{len(layouts)}")
    layouts[name] = matrix
    dims = [[dim] if isinstance(dim, str) else dim or [] for dim in layout["map"]]
    return Form(tuple(tuple(axis for axis in dim if axis not in ("None", INTERLEAVED)) for dim in dims), name)


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
    node: Mapping[str, Any],
    step: Step,
    graph: OperatorGraph,
    layouts: dict[str, NamedMatrix],
    seen: tuple[tuple[int, ...], ...],
    ranks: int,
) -> dict[str, Wanted]:
    """The strategies of one node's torch operators, by plan name."""
    parts = any(name.startswith("shard.") for name in step.attrs)
    if not node.get("in_strategy") and not node.get("out_strategy") and not parts:
        return {}
    if not node.get("in_strategy") and not parts:
        raise NotMapped("an output strategy without an input strategy")
    inputs = tuple(form_of(entry, layouts) for entry in node.get("in_strategy") or [])
    config = step.attrs.get("layout") or {}
    if config.get("input_tensor_map"):
        inputs = numbered(config["dev_matrix"], config["input_tensor_map"], layouts)
    outputs = tuple(form_of(entry, layouts) for entry in node["out_strategy"]) if node.get("out_strategy") else None
    operators = tuple(o for o in graph.operators if o.module == name_of(node))
    if not operators:
        raise NotMapped(f"a strategy for {node['op']}, which torch does not compute here")
    shapes = tuple(tuple(spec.shape for spec in graph.operand_specs(o)) for o in operators)
    arguments = step.arguments(tuple(torch.empty(shape, device="meta") for shape in seen))
    record = Recorded(inputs, outputs, arguments, step.attrs, operators, shapes, ranks)
    return TABLE[node["op"]].spread(record)
