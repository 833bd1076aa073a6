"""Modules that call a function of torch on operands of any placement, made of the samples of torch's own tests."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo  # which takes seconds, as all tests are collected

FORMS = "function", "method", "in place"


class Call(nn.Module):
    """The loss of a call: a weighted sum of its results, [rows] -> scalar.

    An operand `v` that is trained is the sum of a parameter `[2v, -v]`: slices of its dim 0 make the operand a partial
    sum, those of the others slices of the operand. All other operands are buffers.

    Args:
        function: to call.
        given: its arguments, (args, kwargs).
        used: the result that the loss uses, counted modulo their number; None: all.
    """

    def __init__(self, function: Callable[..., Any], given: Any, used: int | None) -> None:
        super().__init__()
        leaves, self.structure = tree_flatten(given)
        self.function, self.used = function, used
        self.constants = {at: one for at, one in enumerate(leaves) if not isinstance(one, Tensor)}
        self.count = len(leaves)
        for at, one in enumerate(leaves):
            if not isinstance(one, Tensor):
                continue
            value = one.detach().clone().contiguous()
            if one.requires_grad:
                shares = torch.stack([2 * value, -value])
                numbers = torch.view_as_real(shares) if one.is_complex() else shares
                setattr(self, f"operand{at}", nn.Parameter(numbers))
            else:
                self.register_buffer(f"operand{at}", value)
        self.complexes = {at for at, one in enumerate(leaves) if isinstance(one, Tensor) and one.is_complex()}
        self.scale = nn.Parameter(torch.ones(2))

    def _operand(self, at: int) -> Any:
        if at in self.constants:
            return self.constants[at]
        value = getattr(self, f"operand{at}")
        if not isinstance(value, nn.Parameter):
            return value
        return torch.view_as_complex(value.sum(0)) if at in self.complexes else value.sum(0)

    def forward(self, rows: Tensor) -> Tensor:
        args, kwargs = tree_unflatten(list(map(self._operand, range(self.count))), self.structure)
        results = [one for one in tree_leaves(self.function(*args, **kwargs)) if isinstance(one, Tensor)]
        if self.used is not None:
            results = [results[self.used % len(results)]]
        total = (rows * self.scale[0]).sum()
        for one in results:
            numbers = torch.view_as_real(one.resolve_conj()) if one.is_complex() else one.double()
            if not numbers.requires_grad:
                numbers = numbers.nan_to_num(1.0, 2.0, 3.0)
            weights = torch.linspace(0.5, 1.5, numbers.numel()).view(numbers.shape)
            total = total + (numbers * weights).sum()
        return total

    def operands(self) -> dict[str, Tensor]:
        return {name: one for name, one in (*self.named_parameters(), *self.named_buffers()) if name != "scale"}


@dataclass(frozen=True)
class Sample:
    """A call by name, with what one device makes of it: loss, gradients, and buffers afterwards."""

    name: str
    call: Call
    loss: Tensor
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


@cache
def functions() -> Mapping[str, OpInfo]:
    """torch's descriptions of its functions, by name and variant."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    return {".".join(filter(None, (one.name, one.variant_test_name))): one for one in op_db}


def samples_of(name: str, count: int, *, dtype: torch.dtype = torch.float64) -> list[Sample]:
    """Samples of a function whose operands have elements and whose results one device computes without chance, in all
    its forms. `count` bounds those of each form."""
    info, rng = functions()[name], random.Random(name)
    trained = dtype in info.supported_backward_dtypes("cpu") and info.supports_autograd
    torch.manual_seed(0)
    every = list(info.sample_inputs("cpu", dtype, requires_grad=trained))
    chosen: list[Sample] = []
    for form, function in zip(FORMS, (info.op, info.method_variant, info.inplace_variant), strict=True):
        if function is None:
            continue
        found = 0
        for at, sample in enumerate(_diverse(every)):
            given = (sample.input, *sample.args), sample.kwargs
            tensors = [one for one in tree_leaves(given) if isinstance(one, Tensor)]
            if found == count or not tensors or any(not one.numel() or one.layout != torch.strided for one in tensors):
                continue
            used = rng.randrange(8) if at % 2 else None
            made = _on_one_device(f"{form} {at}: {_words(given)}", Call(function, given, used))
            if made is not None:
                chosen.append(made)
                found += 1
    return chosen


def _diverse(samples: Sequence[Any]) -> Iterator[Any]:
    """Samples in an order in which those of new numbers of dims and new options come first."""
    seen: set[Any] = set()
    later = []
    for one in samples:
        leaves = tree_leaves((one.input, one.args))
        kind = tuple(leaf.ndim if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves), tuple(one.kwargs)
        if kind in seen:
            later.append(one)
        else:
            seen.add(kind)
            yield one
    random.Random(0).shuffle(later)
    yield from later


def _words(given: Any) -> str:
    args, kwargs = given

    def word(one: Any) -> str:
        if isinstance(one, Tensor):
            return "x".join(map(str, one.shape)) or "scalar"
        if isinstance(one, (list, tuple)):
            return f"[{', '.join(map(word, one))}]"
        return str(one)

    return ", ".join([*map(word, args), *(f"{name}={word(one)}" for name, one in kwargs.items())])


def _on_one_device(name: str, call: Call) -> Sample | None:
    """The sample; None where one device does not compute it, or not twice the same."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        ran = copy.deepcopy(call)
        try:
            loss = ran(torch.ones(4))
            loss.backward()
        except Exception:  # counted by nobody: torch itself does not run it
            return None
        gradients = {key: one.grad for key, one in ran.named_parameters() if one.grad is not None}
        results.append((loss.detach(), gradients))
    (loss, gradients), (again, others) = results
    if not loss.isfinite() or not torch.equal(loss, again):
        return None
    if any(not torch.equal(one.nan_to_num(), others[key].nan_to_num()) for key, one in gradients.items()):
        return None
    return Sample(name, call, loss, gradients, dict(ran.named_buffers()))


def _once(words: Sequence[str]) -> tuple[str, ...]:
    """Each dim sliced by one axis alone: one that several slice into unequal parts is in no plan."""
    return tuple("R" if word in words[:at] else word for at, word in enumerate(words))


def placements(sample: Sample, axes: int, count: int, seed: str) -> list[dict[str, tuple[str, ...]]]:
    """Random placements of the operands over `axes` axes of the mesh: "R" or the sliced dim of a parameter or buffer.
    First those in which the same dim of all operands, counted from the last, is sliced, then one operand alone."""
    rng, single = random.Random(seed), []
    operands = sample.call.operands()
    trained = {name for name, _ in sample.call.named_parameters()}

    def dims(name: str) -> list[int]:
        complexes = int(name.removeprefix("operand")) in sample.call.complexes and name in trained
        shape = operands[name].shape[: operands[name].ndim - complexes]
        return [dim for dim, size in enumerate(shape) if size > 1]

    from_last = {dim - operands[name].ndim for name in operands for dim in dims(name)}
    for last in sorted(from_last, reverse=True):
        single.append({name: str(one.ndim + last) for name, one in operands.items() if one.ndim + last in dims(name)})
    single += [{name: str(dim)} for name in operands for dim in dims(name)]
    single += [{name: rng.choice(["R", *map(str, dims(name))]) for name in operands} for _ in range(2)]
    unique = [dict(one) for one in dict.fromkeys(tuple(sorted(one.items())) for one in single)]
    if axes > 1:
        drawn = [rng.choices(unique, k=axes) for _ in range(count)]
        return [{name: _once([each.get(name, "R") for each in one]) for name in operands} for one in drawn]
    if len(unique) > count:
        unique = rng.sample(unique, count)
    return [{name: (one.get(name, "R"),) for name in operands} for one in unique]
