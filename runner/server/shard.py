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

from runner.server.flat_parameters import wide
from runner.server.gradients import Gradient, Rows, added
from runner.server.partition import ServerShard
from strategies.optimizer.updates import Groups, OptimizerFactory


class ServedShard:
    """The numbers of a shard.

    Args:
        shard: what it holds.
        groups: parameter groups by name, as for `strategies.optimizer.updates.Updates`.
        factory: makes the optimizer, which does to rows that no batch has used what it does to zero gradients.
        dtype: with which workers compute. The shard has masters in fp32 or wider.

    Attributes:
        values: all dense pieces, one after the other; [elements].
        version: updates that were applied: steps where synchronous, else slices.
        total: the sum of the gradients of step `version` + 1, once it is prepared.
    """

    def __init__(self, shard: ServerShard, groups: Groups, factory: OptimizerFactory, dtype: torch.dtype) -> None:
        self._shard, self._sent, dtype = shard, dtype, wide(dtype)
        self.values = torch.zeros(shard.size, dtype=dtype)
        parts = torch.split(self.values, [piece.size for piece in shard.dense])
        self._parameters = {piece.name: nn.Parameter(part) for piece, part in zip(shard.dense, parts, strict=True)}
        for piece in shard.tables:
            first, last = piece.rows
            self._parameters[piece.name] = nn.Parameter(torch.zeros(last - first, piece.width or 0, dtype=dtype))
        self._optimizer = factory(
            [
                {key: value for key, value in group.items() if key != "names"}
                | {"params": [self._parameters[name] for name in group["names"] if name in self._parameters]}
                for group in groups
            ]
        )
        self.version = 0
        self._changed = [torch.zeros(piece.rows[1] - piece.rows[0], dtype=torch.int64) for piece in shard.tables]
        """Of every row of the tables the version that has changed it last."""
        self._pushed: dict[int, Gradient] = {}
        self._arrived: set[int] = set()
        self.total: Gradient | None = None

    @property
    def _tables(self) -> list[nn.Parameter]:
        return [self._parameters[piece.name] for piece in self._shard.tables]

    def pull(self, wanted: Sequence[Tensor]) -> list[Tensor]:
        """The dense values, and of each table the rows that have changed.

        Args:
            wanted: per table the rows [n], and the versions [n] in which the worker has them, -1 where it does not; or
                no versions [0] where it has none.

        Returns:
            The dense values; per table the positions of the rows that are sent (none [0] where all are), and the rows.
        """
        results = [self.values.to(self._sent, copy=True)]
        for table, changed, ids, versions in zip(self._tables, self._changed, wanted[::2], wanted[1::2], strict=True):
            positions = torch.empty(0, dtype=torch.int64)
            if len(versions):
                positions = (changed[ids] > versions).nonzero().view(-1)
                ids = ids[positions]
            results += [positions, table.detach()[ids].to(self._sent)]
        return results

    def push(self, step: int, number: int, gradient: Gradient) -> None:
        """Take slice `number` of `step`; one of another step, or one that comes again, is dropped."""
        if step == self.version + 1 and self.total is None:
            self._pushed[number] = gradient

    def prepare(self, step: int, slices: int) -> list[int]:
        """Add up the gradients of `step`. Returns the slices that are missing; none where it is done."""
        if step != self.version + 1 or self.total is not None:
            return []
        if missing := [number for number in range(slices) if number not in self._pushed]:
            return missing
        self.total = added([self._pushed[number] for number in range(slices)])
        self._pushed.clear()
        return []

    def apply(self, step: int, scale: float | None, options: Sequence[Mapping[str, Any]]) -> None:
        """Update with `scale` times the prepared gradient of `step`, with these options of the parameter groups; with
        no scale the step leaves everything as it is."""
        if step != self.version + 1:
            return
        assert self.total is not None
        self.configure(options)
        if scale is None:
            self.version += 1
        else:
            self._update(self.total.times(scale))
        self.total = None

    def arrive(self, unit: int, floor: int, gradient: Gradient) -> bool:
        """Update with the gradient of one slice, unless it has arrived before. No unit below `floor` comes again."""
        if unit in self._arrived or unit < floor:
            return False
        self._arrived = {one for one in self._arrived if one >= floor} | {unit}
        self._update(gradient)
        return True

    def gradient(self) -> list[Tensor]:
        """The prepared gradient of every piece, flat."""
        assert self.total is not None
        parts = [*torch.split(self.total.dense, [piece.size for piece in self._shard.dense])]
        return parts + [_spread(rows, table).view(-1) for rows, table in self._rows(self.total)]

    def _rows(self, gradient: Gradient) -> list[tuple[Rows, nn.Parameter]]:
        return [*zip(gradient.tables, self._tables, strict=True)]

    def _update(self, gradient: Gradient) -> None:
        parts = torch.split(gradient.dense, [piece.size for piece in self._shard.dense])
        for piece, part in zip(self._shard.dense, parts, strict=True):
            self._parameters[piece.name].grad = part
        for rows, table in self._rows(gradient):
            table.grad = _spread(rows, table)
        before = [table.detach().clone() for table in self._tables]
        if self._parameters:
            self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None
        self.version += 1
        for changed, old, table in zip(self._changed, before, self._tables, strict=True):
            changed[(old != table.detach()).any(1)] = self.version

    def configure(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Set options of the parameter groups, such as the learning rate."""
        for group, values in zip(self._optimizer.param_groups, options, strict=True):
            for key, value in values.items():
                group[key] = tuple(value) if isinstance(value, list) else value

    def state(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Everything that another process needs to go on with this shard: plain data, and tensors, of which the first
        are the pieces, flat."""
        tensors = [self._parameters[piece.name].detach().view(-1) for piece in self._shard.pieces]
        states: dict[str, dict[str, Any]] = {}
        for name, parameter in self._parameters.items():
            states[name] = {}
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    states[name][key] = {"tensor": len(tensors)}
                    tensors.append(value.view(-1) if value.shape == parameter.shape else value)
                else:
                    states[name][key] = {"value": value}
        options = [plain(group) for group in self._optimizer.param_groups]
        fields = {"version": self.version, "states": states, "options": options, "arrived": sorted(self._arrived)}
        prepared = [] if self.total is None else self.total.tensors()
        return fields | {"prepared": len(prepared)}, tensors + prepared

    def load(self, fields: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Take over what `state` has returned."""
        pieces = self._shard.pieces
        for piece, tensor in zip(pieces, tensors, strict=False):
            self._parameters[piece.name].detach().view(-1).copy_(tensor)
        self.version, self._arrived = fields["version"], set(fields["arrived"])
        for changed in self._changed:
            changed.fill_(self.version)
        self.configure(fields["options"])
        if count := fields["prepared"]:
            self.total = Gradient.of(tensors[-count:])
        for name, states in fields["states"].items():
            parameter = self._parameters[name]
            self._optimizer.state[parameter] = {
                key: _like(tensors[value["tensor"]], parameter) if "tensor" in value else value["value"]
                for key, value in states.items()
            }


def _spread(rows: Rows, table: Tensor) -> Tensor:
    """Rows as a tensor like `table`, with zeros elsewhere."""
    result = torch.zeros_like(table)
    result[rows.ids] = rows.values
    return result


def _like(state: Tensor, parameter: Tensor) -> Tensor:
    """A flat state in the shape of its parameter; other states as they are."""
    return state.view(parameter.shape) if state.dim() and state.numel() == parameter.numel() else state


def plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a parameter group that may change while it trains: numbers, and tuples of numbers."""

    def number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    return {
        key: value
        for key, value in group.items()
        if number(value) or (isinstance(value, tuple | list) and value and all(map(number, value)))
    }
