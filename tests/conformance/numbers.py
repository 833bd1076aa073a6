"""Sizes and numbers for a recorded network: those that the case leaves open are chosen so that torch can run it."""

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

from tests.conformance.forms import NotMapped
from tests.conformance.network import Case, Network, Sizes, Step, dataset_strategy, devices, flat, is_open, shape_of
from tests.conformance.operators import TABLE

FEW_INDICES = 8
"""Indices are random below this number, or below the table's rows."""


def open_dims(case: Case) -> dict[str, str]:
    """Every open dim of an input, by a name that says its place, with its known values."""
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


def global_batches(case: Case) -> list[Case]:
    """The case with global inputs, the most likely first. With a data-parallel dataset the recorded inputs are the
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
    """Inputs whose leading dims are multiplied by `counts`, and whose first one is divided by `parts`."""

    def entry(item: Any, factors: list[int]) -> Any:
        factors = [*factors, *(1,) * len(item["shape"])]
        shape = [size if is_open(size) else size * factor for size, factor in zip(item["shape"], factors, strict=False)]
        if shape and not is_open(shape[0]):
            shape[0] = max(shape[0] // parts, 1)
        return {**item, "shape": shape}

    factors = iter(counts)
    inputs = [entry(item, next(factors)) if isinstance(item, dict) else item for item in case["inputs"]]
    return {**case, "inputs": inputs}


def index_tensors(case: Case) -> set[str]:
    """Inputs and constants that are indices, also by way of other operators."""
    wanted: set[Any] = set()
    for node in reversed(case["network"]):
        counterpart = TABLE[node["op"]]
        for position, item in enumerate(flat(node["in"])):
            sparse = node["op"] != "nn.SoftmaxCrossEntropyWithLogits" or (node.get("attrs") or {}).get("sparse")
            if node["id"] in wanted or (position in counterpart.indices and sparse):
                wanted.add(
                    item.get("node", item.get("tensor"))
                    if item.get("tensor") != "const"
                    else f"const_{node['id']}_{position}"
                )
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
        """Elements of the largest tensor that flows in, or from one node to another."""
        tensors = (*self.batch, *self.network.parameters(), *self.network.buffers())
        shapes = [shape for given in self.seen.values() for shape in given]
        return max([tensor.numel() for tensor in tensors] + [math.prod(shape) for shape in shapes])


def build(case: Case, *, real: bool) -> Built:
    """The network and its batch, on the CPU or without memory. Raises NotMapped where the recorded shapes do not go
    together in torch."""
    failure = ""
    for global_case in global_batches(case):
        places = open_dims(global_case)
        known = [candidates(text, global_case) for text in places.values()]
        for chosen in itertools.islice(itertools.product(*known), 64):
            sizes = dict(zip(places, chosen, strict=True))
            try:
                with torch.device("meta"):
                    tried = Network(global_case, sizes)
                batch = fill(global_case, tried, sizes)
                seen = shapes_in(tried, batch)
            except (RuntimeError, IndexError, ValueError, TypeError, KeyError) as error:
                failure = failure or f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            if not real:
                return Built(tried, batch, seen)
            network = Network(global_case, sizes)
            return Built(network, fill(global_case, network, sizes, seen), seen)
    raise NotMapped(f"shapes and arguments that torch takes ({failure})")


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
