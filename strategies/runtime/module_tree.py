"""The program of one rank as a tree of torch.fx GraphModules that follows the user's module tree.

A contiguous run of instructions from one module call becomes one GraphModule with generated code, down to the modules
that own parameters; parameters keep the names and the order of the user's model. The tree matters: ZeRO-3 gathers
parameters module by module, and a flat graph would gather the complete model at once. A use of a parameter that another
module owns becomes a separate unit, under which the same Parameter object is registered again. Units with the same
code share it (see `reuse`); its names are then those of the first of them.
"""

from __future__ import annotations

import operator as python_operator
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn

from strategies.core.graph import Ref, rewrite
from strategies.core.program import (
    CARRYING,
    KEY,
    Compute,
    Copy,
    Fused,
    Instruction,
    Ordinal,
    Program,
    RankValue,
    Redistribute,
    Start,
)
from strategies.lowering.recompute import RegionPart, parts_of
from strategies.rules.registry import resolve
from strategies.runtime.buffers import store
from strategies.runtime.communicator import Communicator
from strategies.runtime.flight_recorder import with_place
from strategies.runtime.naming import OWN, inside, private, reach, register, variable
from strategies.runtime.offload import OffloadTraffic, copier
from strategies.runtime.opaque_random import make_random_opaque
from strategies.runtime.recompute import ShardedInput, recomputing, watched
from strategies.runtime.redistributions import edge, edges, starting, waiting
from strategies.runtime.shared_code import CodeForms, Template, constants_of, function_of, scalars, several, tensors_of
from strategies.runtime.units import owned, unit_path

MODULE = "module"
"""Key in `GraphModule.meta` of a unit: the path of the user's module whose instructions it holds."""
COPIED = "copied"
"""Key in `GraphModule.meta` of the program's root: its copies to the host and back, as `OffloadTraffic`."""
OPERATORS = "operators"
"""Key in `GraphModule.meta` of a unit: names of values in its code, and the plan names of what computes them here."""


def build(
    program: Program,
    tensors: Mapping[str, Tensor],
    communicator: Communicator,
    device: torch.device | str,
    *,
    compiled: bool = False,
) -> fx.GraphModule:
    """Build the module that `communicator.rank` runs.

    Args:
        program: what `lower` made.
        tensors: the local slice of every parameter (as nn.Parameter), buffer and constant, by name.
        communicator: with the groups of all axes over which the program communicates.
        device: where the module computes.
        compiled: make it fit for `compile_units`; its random key is then a tensor (`opaque_random.as_key`).

    Returns:
        A module whose `forward` takes the local batch entries in the order of the program's inputs, then the random key
        if the program has random operators, and returns the outputs (the bare one if there is only one).
    """
    return _Tree(program, tensors, communicator, torch.device(device), compiled).root


@dataclass(frozen=True)
class _Child:
    """A unit inside another one: its name there, what it takes and what it returns."""

    name: str
    unit: fx.GraphModule
    inputs: tuple[Ref, ...]
    results: tuple[Ref, ...]


class _Tree:
    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        communicator: Communicator,
        device: torch.device,
        compiled: bool,
    ) -> None:
        self.program, self.tensors, self.communicator, self.device = program, tensors, communicator, device
        self.compiled, self.copied = compiled, OffloadTraffic()
        self.owned = owned(program)
        inputs = [Ref(source.id) for source in program.sources if source.kind == "input"] + [KEY] * program.random
        outputs = [*program.outputs, *(value for _, value in program.updates)]
        self.paths = {one.id: unit_path(one, program, self.owned) for one in program.instructions}
        results: dict[str, set[int]] = {step.id: set() for step in program.instructions if several(step)}
        for ref in (*outputs, *(ref for step in program.instructions for ref in step.operands)):
            if ref.id in results:
                results[ref.id].add(ref.index)
        self.taken = {id: sorted(found) for id, found in results.items()}
        self.used: dict[Ref, list[str]] = {}
        for instruction in program.instructions:
            for ref in instruction.operands:
                self.used.setdefault(ref, []).append(instruction.id)
        self.parts = parts_of(program)
        self.forms = CodeForms(program, communicator.rank, self.paths, self.parts, self.taken, self.owned)
        self.scalars = scalars(program)
        self.templates: dict[Hashable, Template] = {}
        self.functions: dict[Hashable, Callable[..., Any]] = {}
        self.leaves = {name.rpartition(".")[2] for name in program.parameter_order}
        self.reserved = {part for name in program.parameter_order for part in name.split(".")}
        self.root = self._unit(list(program.instructions), 0, inputs, outputs, "Program", "", False)
        self._restore_names()
        self.root.meta[COPIED] = self.copied

    def _unit(
        self,
        instructions: Sequence[Instruction],
        depth: int,
        inputs: Sequence[Ref],
        outputs: Sequence[Ref],
        name: str,
        path: str,
        recomputed: bool,
    ) -> fx.GraphModule:
        """The unit at `path`; an instance of the class of one with the same form, if there is one."""
        form = self.forms.of(instructions, depth, inputs, outputs, path)
        template = self.templates.get(form)
        runs = [(key, list(run)) for key, run in groupby(instructions, key=lambda one: self._level(one, depth))]
        keys = [key for key, _ in runs if key is not None]
        names = iter(self._names(keys) if template is None else template.children)
        content: list[Instruction | _Child] = []
        for key, part in runs:
            content += part if key is None else [self._child(part, depth, outputs, next(names), path, recomputed)]
        children = [one for one in content if isinstance(one, _Child)]
        own = [one for one in content if not isinstance(one, _Child)]
        constants = [one for step in own for one in constants_of(step, self.parts, not self.compiled)]
        if template is None:
            unit, template = self._written(content, depth, inputs, outputs, name, path)
            self.templates[form] = template
        else:
            tensors = [self.tensors[self.owned[ref]] for ref in tensors_of(own, outputs, self.owned)]
            unit = template.unit(tensors, [child.unit for child in children])
        for attribute, constant in zip(template.constants, constants, strict=True):
            value = torch.tensor(constant) if self.compiled and isinstance(constant, Ordinal) else constant
            vars(unit)[attribute] = value
        unit.meta[OPERATORS] = template.values, tuple(step.operator for step in own)
        return unit

    def _level(self, instruction: Instruction, depth: int) -> str | None:
        path = self.paths[instruction.id]
        return path[depth] if len(path) > depth else None

    def _child(
        self,
        part: Sequence[Instruction],
        depth: int,
        outputs: Sequence[Ref],
        name: str,
        path: str,
        recomputed: bool,
    ) -> _Child:
        inside = {instruction.id: number for number, instruction in enumerate(part)}
        needed = dict.fromkeys(
            ref for i in part for ref in i.operands if ref.id not in inside and ref not in self.owned
        )
        results = self._results(part, inside, outputs)
        region = not recomputed and self._recomputed(part[0], depth)
        unit = self._unit(
            part,
            depth + 1,
            list(needed),
            results,
            variable(name),
            f"{path}.{name}".strip("."),
            recomputed or region,
        )
        if region:
            vars(unit)["forward"] = recomputing(unit.forward, [self._hold(ref) for ref in needed], self.parts)
        unit.meta[MODULE] = ".".join(part[0].path[: depth + 1])
        return _Child(name, unit, tuple(needed), results)

    def _written(
        self,
        content: Sequence[Instruction | _Child],
        depth: int,
        inputs: Sequence[Ref],
        outputs: Sequence[Ref],
        name: str,
        path: str,
    ) -> tuple[fx.GraphModule, Template]:
        """A unit with its own code, from its instructions and the units inside."""
        graph, unit = fx.Graph(), fx.GraphModule(nn.Module(), fx.Graph(), name)
        children = [one for one in content if isinstance(one, _Child)]
        units = {child.name.partition(".")[0] for child in children}
        values: dict[Ref, fx.Node] = {}
        tensors: dict[str, Tensor] = {}
        constants: list[str] = []
        for ref in inputs:
            values[ref] = node = graph.placeholder(_name(ref))
            node.target = node.name  # `split_1` is the second split and the second result of the first one

        def reached(operation: str, path: str, taken: tuple[fx.Node, ...] = ()) -> fx.Node:
            attribute = reach(unit, path, operation, self.leaves)
            return graph.create_node(operation, attribute, taken, name=variable(path))

        def value(ref: Ref) -> fx.Node:
            if ref not in values:
                full = self.owned[ref]
                owner, _, leaf = full.rpartition(".")
                local = leaf if owner == path else private(full, units, tensors, self.reserved)
                tensors[local] = self.tensors[full]
                values[ref] = reached("get_attr", local)
                if full in self.scalars:
                    values[ref] = graph.call_function(torch.ops.aten.view.default, (values[ref], []))
            return values[ref]

        def constant() -> fx.Node:
            constants.append(f"{OWN}{len(constants)}")
            return graph.get_attr(constants[-1])

        made = []
        for one in content:
            if isinstance(one, _Child):
                _spread(graph, values, one.results, reached("call_module", one.name, tuple(map(value, one.inputs))))
            else:
                made.append(self._emit(graph, one, value, constant, values).name)
        found = [value(ref) for ref in outputs]
        if depth == 0 and self.program.updates:  # buffers take their new values under their own names
            buffers = tuple(reached("get_attr", self.owned[Ref(id)]) for id, _ in self.program.updates)
            graph.call_function(store, (buffers, tuple(found[len(self.program.outputs) :])))
            found = found[: len(self.program.outputs)]
        graph.output(found[0] if len(found) == 1 else tuple(found))
        if self.compiled:
            make_random_opaque(graph, constants)
        unit.graph = graph  # while no name is taken by the user's
        template = Template.made_from(unit, [*tensors], constants, [child.name for child in children], made)
        template.fill(unit, [*tensors.values()], [child.unit for child in children])
        return unit, template

    def _recomputed(self, instruction: Instruction, depth: int) -> bool:
        """Whether the unit of an instruction at a depth of the tree is a call of a recomputed module."""
        chosen = self.program.recompute
        return chosen is not None and ".".join(self.paths[instruction.id][: depth + 1]) in chosen.modules

    def _hold(self, ref: Ref) -> ShardedInput | None:
        """How a recomputed module stores an input: each rank its part, where others hold the same."""
        axes = self.program.replicas.get(ref, ())
        return ShardedInput(axes, self.communicator) if axes else None

    def _emit(
        self,
        graph: fx.Graph,
        step: Instruction,
        value: Callable[[Ref], fx.Node],
        constant: Callable[[], fx.Node],
        values: dict[Ref, fx.Node],
    ) -> fx.Node:
        part = self.parts.get(step.id)
        watching = () if part is None else (constant(),)
        if isinstance(step, Compute):
            device = torch.device("cpu") if step.host else self.device
            local = lambda leaf: self._local(leaf, value, constant, device)  # noqa: E731
            args, kwargs = rewrite(step.args, local), rewrite(dict(step.kwargs), local)
        else:
            args, kwargs = tuple(map(value, step.operands)), {}
        function = self._function(step, part)
        place = [constant() for _ in constants_of(step, {}, not self.compiled) if not isinstance(step, Compute)]
        node = graph.create_node("call_function", function, (*watching, *place, *args), kwargs, step.id)
        if not several(step):
            values[Ref(step.id)] = node
        for index in self.taken.get(step.id, ()):
            values[Ref(step.id, index)] = graph.call_function(python_operator.getitem, (node, index))
        return node

    def _function(self, step: Instruction, part: RegionPart | None) -> Callable[..., Any]:
        """What an instruction calls; the same function for the same call, so that its code can be shared."""
        kept = part is not None and part.kept
        key: Hashable
        if isinstance(step, Compute):
            key = step.target
            make: Callable[[], Callable[..., Any]] = partial(resolve, step.target)
        elif isinstance(step, Copy):
            key = "copy", step.host
            make = partial(copier, step.host, self.device, self.copied)
        elif isinstance(step, Redistribute):
            key = function_of(step), kept
            make = partial(edge, step, self.communicator, self.compiled, kept)
        elif isinstance(step, Fused):
            key = function_of(step)
            make = partial(edges, step, self.communicator, self.compiled)
        elif isinstance(step, Start):
            key = "start", function_of(step.of)
            make = partial(starting, step, self.communicator)
        else:
            key = "wait", function_of(step.of)
            make = partial(waiting, step, self.communicator)
        placing = isinstance(step, CARRYING) and not self.compiled
        function = self._once(key, (lambda: with_place(make())) if placing else make)
        if part is None:
            return function
        name = "_".join(step.target.split(".")[:2]) if isinstance(step, Compute) else function.__name__
        return self._once((key, kept, part.carries), partial(watched, function, part, name))

    def _once(self, key: Hashable, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        if key not in self.functions:
            self.functions[key] = make()
        return self.functions[key]

    def _local(
        self, leaf: Any, value: Callable[[Ref], fx.Node], constant: Callable[[], fx.Node], device: torch.device
    ) -> Any:
        if isinstance(leaf, Ref):
            return value(leaf)
        if isinstance(leaf, Ordinal):
            return constant()
        if isinstance(leaf, RankValue):
            return leaf.of(self.program.mesh, self.communicator.rank)
        return device if isinstance(leaf, torch.device) else leaf

    def _results(
        self, part: Sequence[Instruction], inside: Mapping[str, int], outputs: Sequence[Ref]
    ) -> tuple[Ref, ...]:
        """What a unit hands on, in the order in which it is made: values that are used outside, or are outputs of the
        unit around it."""
        wanted = {ref for ref in outputs if ref.id in inside}
        for step in part:
            for index in self.taken.get(step.id, (0,)):
                ref = Ref(step.id, index)
                if any(user not in inside for user in self.used.get(ref, ())):
                    wanted.add(ref)
        return tuple(sorted(wanted, key=lambda ref: (inside[ref.id], ref.index)))

    def _names(self, keys: Sequence[str]) -> list[str]:
        """What the units of runs are called: the first run of a module by its path, unless another unit is on that
        path; further ones `relu_1` and so on, never by a name of the model itself."""
        seen: Counter[str] = Counter()
        first, taken = {*keys}, {key.partition(".")[0] for key in keys}
        found: list[str] = []
        for key in keys:
            nested = any(key[:end] in first for end, letter in enumerate(key) if letter == ".")
            if seen[key] or nested:
                name = private(f"{key}_{seen[key]}" if seen[key] else key, taken, self.reserved)
                taken.add(name)
            found.append(name if seen[key] or nested else key)
            seen[key] += 1
        return found

    def _restore_names(self) -> None:
        """Give every parameter and buffer its own name in the model's order, also those that no unit owns."""
        order = [name for name in self.program.parameter_order if name in self.tensors]
        for name in order:
            owner, _, leaf = name.rpartition(".")
            register(inside(self.root, owner), leaf, self.tensors[name])
        first: dict[str, int] = {}
        for position, name in enumerate(order):
            words = name.split(".")
            for end in range(1, len(words) + 1):
                first.setdefault(".".join(words[:end]), position)
        _reorder(self.root, "", first)


def _name(ref: Ref) -> str:
    return f"{ref.id}_{ref.index}" if ref.index else ref.id


def _spread(graph: fx.Graph, values: dict[Ref, fx.Node], results: Sequence[Ref], call: fx.Node) -> None:
    """Note what the call of a unit returns."""
    if len(results) == 1:
        values[results[0]] = call
    else:
        items = {ref: graph.call_function(python_operator.getitem, (call, i)) for i, ref in enumerate(results)}
        values.update(items)


def _reorder(module: nn.Module, path: str, first: Mapping[str, int]) -> None:
    """Put children and tensors in the order in which `first` has the paths of the parameters in them."""
    for table in (module._modules, module._parameters, module._buffers):
        items = sorted(table.items(), key=lambda item: first.get(f"{path}{item[0]}", len(first)))
        table.clear()
        table.update(items)  # type: ignore[arg-type]
    for name, child in module._modules.items():
        if child is not None:
            _reorder(child, f"{path}{name}.", first)
