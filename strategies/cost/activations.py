"""What one rank stores between forward and backward, and what its program sends: counted by running the program once on
tensors that have shapes and no numbers.

Invariant: the rank's real module is run, so what autograd saves, what recomputed modules keep and where their second
run ends are what they will be in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from strategies.engine.communicator import Carrier, Communicator
from strategies.engine.partition import build
from strategies.engine.program import Program
from strategies.graph import Source
from strategies.redistribution import LOCAL, Step


@dataclass(frozen=True)
class Traced:
    """Of one micro-batch. `activations`: bytes that are stored when forward is done. `sent`: bytes that the busiest
    rank sends, by collective."""

    activations: int
    sent: dict[str, int]


class _Shaped(Communicator):
    """Collectives that return tensors of the right shape and count what the busiest rank would send."""

    def _step(self, step: Step) -> Carrier:
        if step.kind in LOCAL:
            return super()._step(step)
        shape, elements = step.after.local_shape(step.shape, self.mesh), step.busiest(self.mesh)

        def run(tensor: Tensor) -> Tensor:
            self.count(step.kind, elements, tensor)
            return tensor.new_zeros(shape)

        return run


class Saved:
    """The distinct storages that autograd has saved, without those of `others`."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        self._others = {tensor.untyped_storage()._cdata: tensor for tensor in others}
        self._found: dict[int, Tensor] = {}

    def add(self, tensor: Tensor) -> Tensor:
        number = tensor.untyped_storage()._cdata
        if number not in self._others:
            self._found.setdefault(number, tensor.detach())
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._found.values())


@contextmanager
def saved_tensors(others: Iterable[Tensor]) -> Iterator[Saved]:
    """Counts what autograd saves inside; what it has saved stays alive with the count."""
    saved = Saved(others)
    with torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
        yield saved


def trace(program: Program, device: str) -> Traced:
    """Forward and backward of one micro-batch on the first rank; what a stage of a pipeline receives is stored, too,
    where backward needs it. A model whose shapes depend on numbers (how many
    tokens an expert gets) is computed after all, on zeros."""
    program = replace(program, updates=())  # writing stores nothing, and looks at memory that is not there
    try:
        with FakeTensorMode():
            return _traced(program, device)
    except DataDependentOutputException:
        return _traced(program, device)


def _traced(program: Program, device: str) -> Traced:
    communicator = _Shaped(program.mesh, 0)
    tensors: dict[str, Tensor] = {}
    for source in program.sources:
        own = _zeros(program, source, device)
        tensors[source.name] = nn.Parameter(own, source.trainable) if source.kind == "parameter" else own
    entries = [source for source in program.sources if source.kind == "input"]
    inputs = [tensors.pop(source.name).requires_grad_(source.trainable) for source in entries]
    module: Callable[..., Any] = build(program, tensors, communicator, device)
    with saved_tensors([*tensors.values(), *(one for one in inputs if not one.requires_grad)]) as saved:
        made = module(*inputs, *([0] if program.random else []))
    stored = saved.bytes
    outputs = [one for one in (made if isinstance(made, tuple) else (made,)) if one.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
    return Traced(stored, dict(communicator.sent))


def _zeros(program: Program, source: Source, device: str) -> Tensor:
    shape = program.layouts[source.id].local_shape(source.spec.shape, program.mesh)
    return torch.zeros(shape, dtype=getattr(torch, source.spec.dtype), device=device)
