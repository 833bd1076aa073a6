"""One shard of the parameters with its optimizer states: how gradients become updates.

A synchronous step has two phases, as a transaction that several shards commit together: `prepare` adds up the gradients
of all slices, `apply` updates. An update on arrival is one call. Invariant: each slice of a step counts once, however
often it arrives, and the order in which slices arrive changes no bit of a synchronous step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.server import partition
from strategies.optimizer.updates import Groups, OptimizerFactory


class ServedShard:
    """The numbers of a shard.

    Args:
        pieces: what it holds.
        groups: parameter groups by name, as for `strategies.optimizer.updates.Updates`.
        factory: makes the optimizer.
        dtype: of the parameters.

    Attributes:
        values: all pieces, one after the other; [elements of the shard].
        version: updates that were applied: steps where synchronous, else slices.
    """

    def __init__(self, pieces: partition.Shard, groups: Groups, factory: OptimizerFactory, dtype: torch.dtype) -> None:
        self.values = torch.zeros(partition.size(pieces), dtype=dtype)
        parts = self.values.split([piece.size for piece in pieces])
        self._parameters = {piece.name: nn.Parameter(part) for piece, part in zip(pieces, parts, strict=True)}
        self._optimizer = factory(
            [
                {key: value for key, value in group.items() if key != "names"}
                | {"params": [self._parameters[name] for name in group["names"] if name in self._parameters]}
                for group in groups
            ]
        )
        self.version = 0
        self._pushed: dict[int, Tensor] = {}
        self._arrived: set[int] = set()
        self.total: Tensor | None = None
        """The sum of the gradients of step `version` + 1, once it is prepared."""

    def push(self, step: int, number: int, gradient: Tensor) -> None:
        """Take slice `number` of `step`; one of another step, or one that comes again, is dropped."""
        if step == self.version + 1 and self.total is None:
            self._pushed[number] = gradient

    def prepare(self, step: int, slices: int) -> list[int]:
        """Add up the gradients of `step`. Returns the slices that are missing; none where it is done."""
        if step != self.version + 1 or self.total is not None:
            return []
        if missing := [number for number in range(slices) if number not in self._pushed]:
            return missing
        self.total = self._pushed[0].clone()
        for number in range(1, slices):
            self.total += self._pushed[number]
        self._pushed.clear()
        return []

    def square(self) -> float:
        """The sum of the squares of the prepared gradient."""
        assert self.total is not None
        return float(self.total.double().square().sum())

    def apply(self, step: int, scale: float, options: Sequence[Mapping[str, Any]]) -> None:
        """Update with `scale` times the prepared gradient of `step`, with these options of the parameter groups."""
        if step != self.version + 1:
            return
        assert self.total is not None
        self.configure(options)
        self._update(self.total if scale == 1.0 else self.total * scale)
        self.total = None

    def arrive(self, unit: int, floor: int, gradient: Tensor) -> bool:
        """Update with the gradient of one slice, unless it has arrived before. No unit below `floor` comes again."""
        if unit in self._arrived or unit < floor:
            return False
        self._arrived = {one for one in self._arrived if one >= floor} | {unit}
        self._update(gradient)
        return True

    def _update(self, gradient: Tensor) -> None:
        parts = gradient.split([parameter.numel() for parameter in self._parameters.values()])
        for parameter, part in zip(self._parameters.values(), parts, strict=True):
            parameter.grad = part
        if self._parameters:
            self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None
        self.version += 1

    def configure(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Set options of the parameter groups, such as the learning rate."""
        for group, values in zip(self._optimizer.param_groups, options, strict=True):
            for key, value in values.items():
                group[key] = tuple(value) if isinstance(value, list) else value

    def state(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Everything that another process needs to go on with this shard: plain data, and tensors."""
        tensors, states = [self.values], {}
        for name, parameter in self._parameters.items():
            states[name] = {}
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    states[name][key] = {"tensor": len(tensors)}
                    tensors.append(value)
                else:
                    states[name][key] = {"value": value}
        options = [plain(group) for group in self._optimizer.param_groups]
        fields = {"version": self.version, "states": states, "options": options, "arrived": sorted(self._arrived)}
        if self.total is not None:
            tensors.append(self.total)
        return fields | {"prepared": self.total is not None}, tensors

    def load(self, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Take over what `state` has returned."""
        self.values.copy_(tensors[0])
        self.version, self._arrived = fields["version"], set(fields["arrived"])
        self.configure(fields["options"])
        self.total = tensors[-1] if fields["prepared"] else None
        for name, states in fields["states"].items():
            self._optimizer.state[self._parameters[name]] = {
                key: tensors[value["tensor"]] if "tensor" in value else value["value"] for key, value in states.items()
            }


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that may change while it trains: numbers, and tuples of numbers."""

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    return {
        key: value
        for key, value in group.items()
        if number(value) or (isinstance(value, tuple | list) and value and all(map(number, value)))
    }
