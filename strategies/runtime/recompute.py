"""Regions of a program whose intermediate tensors are recomputed in backward instead of being stored.

A region is one call of a unit. Its first run stores its inputs and the results that are kept; what autograd wants to
save becomes a number. The first number that backward asks for runs the region once more, up to the last tensor that is
needed; kept operators and collectives are not carried out again, they return what they returned. Invariant: both runs
see the same bits, because random operators draw from keys that are arguments, and nothing is written before the step's
end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from strategies.core.graph import leaves
from strategies.core.layout import Layout
from strategies.lowering.recompute import RegionPart
from strategies.resharding.path import resharding_path
from strategies.runtime.communicator import Carrier, Communicator

_running = threading.local()
"""`region`: the region that this thread runs, if it runs one. `twice`: whether backward will ask for tensors again."""


def in_region() -> bool:
    """Whether a recomputed module runs; it alone then decides which tensors are stored."""
    return getattr(_running, "region", None) is not None


@dataclass(frozen=True)
class ShardedInput:
    """How an input is stored that the ranks along `axes` hold too: each cuts its part, and they join them again."""

    axes: tuple[str, ...]
    communicator: Communicator
    carriers: dict[int, tuple[Carrier, Carrier]] = field(default_factory=dict)
    """To a part and back, by the number of elements."""

    def cut(self, tensor: Tensor) -> Tensor:
        return self._both(tensor.numel())[0]([tensor.reshape(-1)])[0].clone()  # a view would keep all of it

    def joined(self, part: Tensor, shape: torch.Size) -> Tensor:
        return self._both(shape.numel())[1]([part])[0].view(shape)

    def _both(self, elements: int) -> tuple[Carrier, Carrier]:
        if elements not in self.carriers:
            ends, mesh = (Layout.replicated(1), Layout((self.axes,))), self.communicator.mesh
            there, back = (resharding_path(*pair, (elements,), mesh) for pair in (ends, ends[::-1]))
            self.carriers[elements] = self.communicator.carrier([there]), self.communicator.carrier([back])
        return self.carriers[elements]


@dataclass
class _Result:
    """A tensor that a kept operator returned; where nobody needs its numbers, only how it looks."""

    tensor: Tensor | None
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    needed: bool = False

    def again(self, stored: dict[int, Tensor]) -> Tensor:
        if id(self) in stored:
            return stored[id(self)]
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device).zero_()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in the arguments or results of a call, in order."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


class _Stored(torch.autograd.Function):
    """Stores tensors where autograd stores its own, so that hooks of saved tensors see them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise AssertionError("nothing depends on the stored values")


def _store(tensors: Sequence[Tensor]) -> Any:
    """A tensor whose `grad_fn` stores `tensors`. Before torch 2.13 the node alone drops them with its result."""
    return _Stored.apply(torch.empty((), requires_grad=True), *tensors)  # type: ignore[no-untyped-call]


class _Enough(Exception):
    """All that backward needs has been recomputed."""


class _Region:
    """One call of a unit, from its forward to the end of its backward.

    The numbers of a kept result are needed if autograd saves them, or if an operator takes them that is repeated
    because its own results, or tensors inside it, are needed. Others are not stored.
    """

    def __init__(
        self, run: Callable[..., Any], holds: Sequence[ShardedInput | None], parts: Mapping[str, RegionPart]
    ) -> None:
        self.run, self.holds, self.parts = run, holds, parts
        self.part: RegionPart | None = None
        self.taken: dict[int, str] = {}  # storage -> value, for what the part that runs takes
        self.needed: set[str] = set()
        self.returned: dict[str, list[_Result]] = {}  # by kept part
        self.wanted = 0
        self.results: list[tuple[list[_Result | Any], TreeSpec]] = []
        self.by_storage: dict[int, list[_Result]] = {}
        self.position = -1  # of the kept result that the second run takes next; -1 in the first run
        self.again: dict[int, Tensor] = {}

    def forward(self, inputs: Sequence[Any]) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self._number, self._tensor):
            results = _within(self, self.run, inputs)
        if self.wanted:
            self._store(inputs)
        self.by_storage, self.returned = {}, {}
        return results

    def _store(self, inputs: Sequence[Any]) -> None:
        self.plain = [None if isinstance(value, Tensor) else value for value in inputs]
        tensors = [(i, value) for i, value in enumerate(inputs) if isinstance(value, Tensor)]
        self.forms = [(i, value.shape, value.requires_grad) for i, value in tensors]
        with torch.no_grad():
            parts = [value if (hold := self.holds[i]) is None else hold.cut(value) for i, value in tensors]
        self.inputs = _store(parts)
        self._spread_need()
        self.kept = [one for flat, _ in self.results for one in flat if isinstance(one, _Result) and one.needed]
        self.numbers = _store([one.tensor for one in self.kept if one.tensor is not None])
        for flat, _ in self.results:
            for one in flat:
                if isinstance(one, _Result):
                    one.tensor = None

    def _number(self, tensor: Tensor) -> int:
        if self.parts:
            self._need(_storage(tensor))
        self.wanted += 1
        return self.wanted - 1

    def _need(self, storage: int) -> None:
        """Autograd saves a tensor: one that the running part takes, or else one that is made inside it."""
        if storage in self.by_storage:
            for one in self.by_storage[storage]:  # several, where an operator writes into what another one made
                one.needed = True
        elif self.part is None:
            self.needed |= self.parts.keys()
        elif storage in self.taken:
            self.needed.add(self.taken[storage])
        else:
            self.needed.add(self.part.id)

    def _spread_need(self) -> None:
        """Trace the needed values back to the kept results from which they are recomputed."""
        waiting, seen = list(self.needed), set(self.needed)
        while waiting:
            part = self.parts.get(waiting.pop())
            if part is not None and part.kept:
                for one in self.returned.get(part.id, ()):
                    one.needed = True
            elif part is not None:
                waiting += [id for id in part.takes if id not in seen]
                seen.update(part.takes)

    def _tensor(self, number: int) -> Tensor:
        if not self.repeats:
            self._repeat()
        return self.again[number] if getattr(_running, "twice", False) else self.again.pop(number)

    def _repeat(self) -> None:
        inputs, self.position = self._inputs(), 0
        self.stored = {
            id(one): tensor for one, tensor in zip(self.kept, self.numbers.grad_fn.saved_tensors, strict=True)
        }
        del self.inputs, self.numbers

        def collect(tensor: Tensor) -> None:
            self.again[len(self.again)] = tensor.detach()
            if len(self.again) == self.wanted:
                raise _Enough

        def never(_: None) -> Tensor:
            raise AssertionError("the second run has no backward")

        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(collect, never):
                _within(self, self.run, inputs)
        except _Enough:
            return
        finally:
            self.stored, self.results, self.kept = {}, [], []
        raise RuntimeError(
            f"A recomputed module saved {len(self.again)} tensors in its second run, {self.wanted} in its first."
        )

    @torch.no_grad()
    def _inputs(self) -> list[Any]:
        values = list(self.plain)
        for (i, shape, learns), tensor in zip(self.forms, self.inputs.grad_fn.saved_tensors, strict=True):
            hold = self.holds[i]
            value = tensor.detach() if hold is None else hold.joined(tensor, shape)
            values[i] = value.requires_grad_(learns)
        return values

    @property
    def repeats(self) -> bool:
        return self.position >= 0

    def keep(self, results: Any) -> None:
        """Remember what an operator of torch inside a kept part returned."""
        flat, spec = tree_flatten(results)
        for i, one in enumerate(flat):
            if isinstance(one, Tensor):
                flat[i] = _Result(one.detach(), one.size(), one.stride(), one.dtype, one.device)
                self.by_storage.setdefault(_storage(one), []).append(flat[i])
        self.results.append((flat, spec))

    def carry_out(self, part: RegionPart, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One part of the first run."""
        self.part = part
        self.taken = {_storage(one): id for one, id in zip(tensors_in([args, kwargs]), part.takes, strict=True)}
        try:
            results = function(*args, **kwargs)
        finally:
            self.part, self.taken = None, {}
        if part.kept:
            found = [self.by_storage.get(_storage(tensor), []) for tensor in tensors_in(results)]
            self.returned[part.id] = [one for same in found for one in same]
        return results

    def take(self) -> Any:
        """What the next kept operator returned in the first run."""
        flat, spec = self.results[self.position]
        self.position += 1
        return tree_unflatten([one.again(self.stored) if isinstance(one, _Result) else one for one in flat], spec)


def _within(region: _Region | None, run: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    _running.region = region
    try:
        return run(*inputs)
    finally:
        _running.region = None


@contextmanager
def unpacked_twice() -> Iterator[None]:
    """Inside runs the first half of a backward that comes in two: what was recomputed stays for the second."""
    _running.twice = True
    try:
        yield
    finally:
        _running.twice = False


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


class _Once(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operators of torch are carried out in a region's first run only. What only
    looks at a tensor (views, its device) is always carried out: it costs nothing."""

    def __init__(self, region: _Region) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.region = region

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        if self.region.repeats:
            return self.region.take()
        results = func(*args, **(kwargs or {}))
        self.region.keep(results)
        return results


def watched(function: Callable[..., Any], part: RegionPart, name: str) -> Callable[..., Any]:
    """`function`, an operator or what carries a value, as the region carries it out that runs at the time. Its first
    argument is the part that it is: `part`, or the same one of another module with the same code."""
    once = part.kept and not part.carries

    def run(part: RegionPart, *args: Any, **kwargs: Any) -> Any:
        region: _Region | None = getattr(_running, "region", None)
        if region is None:
            return function(*args, **kwargs)
        with _Once(region) if once else nullcontext():
            if region.repeats:
                return function(*args, **kwargs)
            return region.carry_out(part, function, args, kwargs)

    run.__name__ = run.__qualname__ = name
    run.__module__ = "kept" if part.kept else "repeated"
    return run


def carried_once(carrier: Carrier) -> Carrier:
    """`carrier`, which a region does not repeat."""

    def carry(tensors: Sequence[Tensor]) -> list[Tensor]:
        region: _Region | None = getattr(_running, "region", None)
        if region is None:
            return carrier(tensors)
        if region.repeats:
            stored: list[Tensor] = region.take()
            return stored
        results = carrier(tensors)
        region.keep(results)
        return results

    return carry


class Recomputing:
    """A unit's `forward` as a region of `parts`; `holds` says how each of its inputs is stored. `run` is what both
    runs call."""

    def __init__(
        self, run: Callable[..., Any], holds: Sequence[ShardedInput | None], parts: Mapping[str, RegionPart]
    ) -> None:
        self.run, self.holds, self.parts = run, holds, parts

    def __call__(self, *inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run(*inputs)
        return _Region(self.run, self.holds, self.parts).forward(inputs)
