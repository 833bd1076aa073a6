"""Buffers that forward replaces: `self.mean = 0.9 * self.mean + ...` becomes a write at the end of the forward.

torch.export notes assignments to the buffers of the outermost module only, and drops all others. The new tensor stays
the module's attribute for the rest of the forward, so names for the old one keep the old values; at the end, the tensor
that stood there before is given the values of the last one. What read the old values reads a copy of them, which
backward may keep. Invariant: after a step, a buffer that is saved has the values, the shape and the dtype that it has
after a step of eager torch.

A table that is not saved and that the first forward brings to the size of the batch, from numbers alone, is the same
in every step: the graph computes it anew, and has no such buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from strategies.capture.constants import has_values
from strategies.capture.nodes import call
from strategies.core.errors import StrategyError

aten = torch.ops.aten

Buffers = dict[str, Tensor | None]


class AssignedBuffers:
    """What the forward of `root` assigns. A buffer that was None, or that forward registers, has no state: forward
    computes it in every step."""

    def __init__(self, root: nn.Module) -> None:
        self.root, self.running = root, False
        self.tables = [(part._buffers, dict(part._buffers)) for part in root.modules()]
        self.before: dict[tuple[int, str], tuple[Buffers, Tensor]] = {}
        """By a module's table of buffers (the tracer's stand-ins for the module share it) and a name in it: the table,
        and the tensor that stood there when forward began."""
        self.names: set[str] = set()
        """The buffers that the last forward replaced."""
        self.tables_of_numbers: dict[str, StrategyError] = {}
        """Those of them that it computes in every step, with the refusal where it reads what they were before."""

    @contextmanager
    def written(self) -> Iterator[None]:
        """Export within this context."""
        hooks = [
            register_module_buffer_registration_hook(self._assigned),
            self.root.register_forward_pre_hook(self._begin),
            self.root.register_forward_hook(self._end),
        ]
        try:
            yield
        finally:
            self.running = False
            for hook in hooks:
                hook.remove()
            self.restore()

    def restore(self) -> None:
        """Give modules the buffers back that they had: what an export leaves there are traced tensors."""
        for table, before in self.tables:
            if table.keys() != before.keys() or any(table[name] is not one for name, one in before.items()):
                table.clear()
                table.update(before)

    def _begin(self, *_: Any) -> None:
        self.running = True
        self.before.clear()
        self.names.clear()
        self.tables_of_numbers.clear()

    def _assigned(self, module: nn.Module, name: str, value: Tensor | None) -> None:
        before = module._buffers.get(name)
        if self.running and before is not None:
            self.before.setdefault((id(module._buffers), name), (module._buffers, before))

    def _end(self, *_: Any) -> None:
        self.running = False
        writes = []
        for (_table, name), (table, before) in self.before.items():
            now = table.get(name)
            if now is before:
                continue
            path, owner = next((path, one) for path, one in self.root.named_modules() if one._buffers is table)
            self.names.add(f"{path}.{name}")
            if now is None or now.shape != before.shape or now.dtype != before.dtype:
                refusal = StrategyError("MW908", _refusal(f"{path}.{name}".removeprefix("model."), before, now))
                if now is None or name not in owner._non_persistent_buffers_set or not has_values(now):
                    raise refusal
                self.tables_of_numbers[f"{path}.{name}"] = refusal
                continue
            writes.append((before, now.detach().clone()))  # all are read before the first is written
        for before, value in writes:
            before.copy_(value)

    def copy_old_values(self, exported: torch.export.ExportedProgram) -> None:
        """Let all operators of an exported graph but the last write read a copy of a buffer that was replaced, and
        leave out buffers that forward computes. Raises StrategyError where it reads one before."""
        graph, buffers = exported.graph, exported.graph_signature.inputs_to_buffers
        first = next(node for node in graph.nodes if node.op != "placeholder")
        for node in graph.find_nodes(op="placeholder"):
            name = buffers.get(node.name, "")
            if name in self.tables_of_numbers:
                if node.users:
                    raise self.tables_of_numbers[name]
                graph.erase_node(node)
            elif name in self.names:
                writes = [user for user in node.users if user.target is aten.copy_.default and user.args[0] is node]
                if readers := [user for user in node.users if user is not writes[-1]]:
                    with graph.inserting_before(first):
                        old = call(graph, node, aten.clone.default, node)
                    for reader in readers:
                        reader.replace_input_with(node, old)


def _refusal(name: str, before: Tensor, now: Tensor | None) -> str:
    return (
        f"The model's forward replaces buffer {name}, {_look(before)}, by {_look(now)}: a buffer of a graph keeps its "
        "shape and dtype. Register it in __init__ as it is to be, or call the model once on a batch before it is "
        "handed over."
    )


def _look(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
