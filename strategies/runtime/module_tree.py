"""The program of one rank as a tree of torch.fx GraphModules that follows the user's module tree.

A contiguous run of instructions from one module call becomes one unit, a GraphModule with generated code, down to the
modules that own parameters; parameters keep the names and the order of the user's model. The tree matters: ZeRO-3
gathers parameters module by module, and a flat graph would gather the complete model at once. A use of a parameter that
another module owns becomes a separate unit, under which the same Parameter object is registered again. `units` finds
the parameters of each unit without building the tree.

Units of one form are instances of one class with one code object, as repeated layers are; names in it are those of the
first of them. The form is all that decides the code: what each instruction calls, with values numbered from the unit's
inputs, parameters named as inside of the unit, and the numbers of its rank. What differs between repeated layers
(numbers of random operators, parts of a recomputed region, the tensors themselves) becomes attributes of the unit.
Invariant: an instance of the first one's class computes what a unit built for itself would.
"""

from __future__ import annotations

import operator as python_operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn

from strategies.core.graph import Ref, leaves, rewrite
from strategies.core.program import (
    CARRYING,
    KEY,
    Compute,
    Cooperate,
    Copy,
    Fused,
    Instruction,
    Ordinal,
    Program,
    RankValue,
    Redistribute,
    Start,
    Wait,
)
from strategies.core.steps import ReshardingPath
from strategies.lowering.recompute import RegionPart, parts_of
from strategies.rules.registry import resolve
from strategies.runtime.communicator import Communicator
from strategies.runtime.compiled import (
    OPTIONAL,
    in_eager,
    is_scaled,
    is_unrolled,
    make_random_opaque,
    old_value,
    scaling,
)
from strategies.runtime.cooperation import cooperating
from strategies.runtime.flight_recorder import recorder, with_place
from strategies.runtime.naming import OWN, attach, inside, private, reach, register, variable
from strategies.runtime.offload import OffloadTraffic, copier
from strategies.runtime.recompute import Recomputing, ShardedInput, watched
from strategies.runtime.redistributions import redistributing, starting, waiting

Paths = Mapping[str, tuple[str, ...]]
"""The place of every instruction in the tree, by id."""
Constant = RegionPart | int
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
        compiled: make it fit for `compile_units`; its random key is then a tensor (`compiled.as_key`).

    Returns:
        A module whose `forward` takes the local batch entries in the order of the program's inputs, then the random key
        if the program has random operators, and returns the outputs (the bare one if there is only one).
    """
    return _Tree(program, tensors, communicator, torch.device(device), compiled).root


def store(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write each value into its buffer, as if all were written at once: a value may be the memory of another buffer.

    It ends a step: every operator reads the old value of a buffer, and operators that need the new value take it as an
    operand. Autograd keeps no old value of a buffer that one device would not keep too.
    """
    written = {buffer.untyped_storage()._cdata for buffer in buffers}  # tensors without numbers have no data_ptr
    with torch.no_grad():
        fresh = [value.clone() if value.untyped_storage()._cdata in written else value for value in values]
        for buffer, value in zip(buffers, fresh, strict=True):
            buffer.copy_(value)


@dataclass(frozen=True)
class ModuleUnit:
    """`parameters` are full names; `inward`: whether a gradient flows from the unit into the values that it takes."""

    parameters: tuple[str, ...]
    inward: bool


def units(program: Program) -> list[ModuleUnit]:
    """Every unit that owns parameters and runs, in the order in which units are entered."""
    return program.once("units", partial(_units, program))


def _units(program: Program) -> list[ModuleUnit]:
    names, paths = _owned(program), _paths(program)
    kinds = {source.name for source in program.parameters}
    homes: dict[tuple[str, ...], set[str]] = {}
    for name in kinds:
        homes.setdefault(tuple(name.split(".")[:-1]), set()).add(name)
    learned = {source.id for source in program.sources if source.trainable}  # values that may have a gradient
    for step in program.instructions:
        if getattr(step, "differentiable", True) and any(ref.id in learned for ref in step.operands):
            learned.add(step.id)

    def walk(part: Sequence[Instruction], depth: int) -> Iterator[ModuleUnit]:
        here = paths[part[0].id][:depth]
        direct = (ref for step in part if len(paths[step.id]) == depth for ref in step.operands)
        own = {names[ref] for ref in direct if names.get(ref) in kinds}
        own |= homes.pop(tuple(".".join(here).split(".")) if here else (), set())  # all of a module at its first run
        if own:
            within = {step.id for step in part}
            taken = {ref for step in part for ref in step.operands if ref.id not in within}
            yield ModuleUnit(tuple(sorted(own)), any(ref.id in learned and ref not in names for ref in taken))
        for key, run in _runs(part, depth, paths):
            if key is not None:
                yield from walk(run, depth + 1)

    return list(walk(program.instructions, 0)) if program.instructions else []


def _owned(program: Program) -> dict[Ref, str]:
    """The values that are tensors of the model, by their full names."""
    return {Ref(source.id): name for name, source in program.tensors.items()}


def _paths(program: Program) -> Paths:
    names, ordered = _owned(program), set(program.parameter_order)

    def path(step: Instruction) -> tuple[str, ...]:
        used = {names[ref] for ref in step.operands if ref in names} & ordered
        foreign = any(name.rpartition(".")[0] != ".".join(step.path) for name in used)
        return (*step.path, _use_of(step)) if foreign else step.path

    return {step.id: path(step) for step in program.instructions}


def _use_of(step: Instruction) -> str:
    """The name of the unit around an instruction that uses a parameter of another module."""
    return f"use_{step.id}"


def _runs(part: Sequence[Instruction], depth: int, paths: Paths) -> list[tuple[str | None, list[Instruction]]]:
    """The instructions of one unit by the unit inside it to which they belong, in order; None: its own."""
    level = lambda step: paths[step.id][depth] if len(paths[step.id]) > depth else None  # noqa: E731
    return [(key, list(run)) for key, run in groupby(part, key=level)]


@dataclass(frozen=True)
class _Child:
    """A unit inside another one: its name there, what it takes and what it returns."""

    name: str
    unit: fx.GraphModule
    inputs: tuple[Ref, ...]
    results: tuple[Ref, ...]


@dataclass(frozen=True)
class _Template:
    """The first unit of a form, and the names that its code uses: of its tensors, constants, units inside (each in the
    order in which they are first used), and of the values that its own instructions return. `shared` are attributes of
    every unit of the form."""

    kind: type[fx.GraphModule]
    shared: Mapping[str, Any]
    tensors: Sequence[str]
    constants: Sequence[str]
    children: Sequence[str]
    values: Sequence[str]

    def unit(self) -> fx.GraphModule:
        """One more unit of this form, without what its code reaches. `GraphModule` makes a class per instance; this is
        an instance of a class that exists."""
        unit: fx.GraphModule = object.__new__(self.kind)
        nn.Module.__init__(unit)
        vars(unit).update(self.shared, meta={})
        return unit


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
        self.owned, self.paths, self.parts = _owned(program), _paths(program), parts_of(program)
        inputs = [Ref(source.id) for source in program.inputs] + [KEY] * program.random
        outputs = [*program.outputs, *(value for _, value in program.updates)]
        results: dict[str, set[int]] = {step.id: set() for step in program.instructions if _several(step)}
        self.used: dict[Ref, list[str]] = {ref: [] for ref in outputs}
        for step in program.instructions:
            for ref in step.operands:
                self.used.setdefault(ref, []).append(step.id)
        for ref in self.used:
            if ref.id in results:
                results[ref.id].add(ref.index)
        self.taken = {id: sorted(indices) for id, indices in results.items()}
        # DeepSpeed holds parameters of shape () with shape (1,), so code views them as what they are
        self.scalars = {source.name for source in program.parameters if not source.spec.shape}
        self.written = {id for id, _ in program.updates}
        self.numbers: dict[Hashable, int] = {}
        self.path_numbers: dict[int, int] = {}  # by id: the program holds them
        self.calls = {step.id: self._number(self._call(step)) for step in program.instructions}
        self.templates: dict[Hashable, _Template] = {}
        self.functions: dict[Hashable, Callable[..., Any]] = {}
        self.leaves = {name.rpartition(".")[2] for name in program.parameter_order}
        self.reserved = {part for name in program.parameter_order for part in name.split(".")}
        self.root = self._unit(list(program.instructions), 0, inputs, outputs, "Program", "", False)
        self._restore_names()
        self.root.meta[COPIED] = self.copied

    def _number(self, form: Hashable) -> int:
        return self.numbers.setdefault(form, len(self.numbers))

    def _call(self, step: Instruction) -> Hashable:
        """All that decides the code of an instruction but for its operands; 1, 1.0 and True are different arguments."""
        part = self.parts.get(step.id)
        around = None if part is None else (part.kept, part.carries), tuple(self.taken.get(step.id, ()))
        if isinstance(step, Compute):

            def leaf(value: Any) -> Any:
                if isinstance(value, (Ref, Ordinal)):
                    return type(value)
                return value.of(self.program.mesh, self.communicator.rank) if isinstance(value, RankValue) else value

            said = repr(rewrite((step.args, dict(step.kwargs)), leaf))
            return step.target, said, step.multiple, step.host, self._channels(step), around
        if isinstance(step, Copy):
            return "copy", step.host, around
        return *self._carrying(step), around

    def _carrying(self, step: Redistribute | Fused | Start | Wait) -> tuple[Any, ...]:
        """What decides what a redistribution calls: equal paths have one number."""
        of = step.of if isinstance(step, Start | Wait) else step
        carried = tuple(
            (self._path_number(one.forward), self._path_number(one.backward), one.scale) for one in of.parts
        )
        return type(step), type(of), carried, of.differentiable

    def _channels(self, step: Compute) -> tuple[tuple[int, ...], ...]:
        channels = step.channels if isinstance(step, Cooperate) else ()
        return tuple(
            tuple(self._path_number(path) for part in channel.parts for path in (part.forward, part.backward))
            for channel in channels
        )

    def _path_number(self, steps: ReshardingPath) -> int:
        if id(steps) not in self.path_numbers:
            self.path_numbers[id(steps)] = self._number(steps)
        return self.path_numbers[id(steps)]

    def _form(
        self, part: Sequence[Instruction], depth: int, inputs: Sequence[Ref], outputs: Sequence[Ref], path: str
    ) -> Hashable:
        """The form of the unit at `path` that holds `part`, whose place in the tree begins with `depth` names."""
        values: dict[Ref, Hashable] = {ref: number for number, ref in enumerate(inputs)}
        position = {step.id: number for number, step in enumerate(part)}

        def value(ref: Ref) -> Hashable:
            if ref not in values:
                if ref in self.owned:
                    name = self.owned[ref]
                    own = not path or name.startswith(f"{path}.")
                    word = name.removeprefix(f"{path}.") if own else ("foreign", len(values))
                    copied = self.compiled and ref.id in self.written
                    values[ref] = ("scalar" if name in self.scalars else "old" if copied else "", word)
                else:
                    values[ref] = position[ref.id], ref.index
            return values[ref]

        rows = []
        for number, step in enumerate(part):
            place = tuple(("use", number) if name == _use_of(step) else name for name in self.paths[step.id][depth:])
            rows.append((place, self.calls[step.id], tuple(map(value, step.operands))))
        return tuple(rows), len(inputs), tuple(map(value, outputs))

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
        form = self._form(instructions, depth, inputs, outputs, path)
        template = self.templates.get(form)
        runs = _runs(instructions, depth, self.paths)
        keys = [key for key, _ in runs if key is not None]
        names = iter(self._names(keys) if template is None else template.children)
        content: list[Instruction | _Child] = []
        for key, part in runs:
            content += part if key is None else [self._child(part, depth, outputs, next(names), path, recomputed)]
        own = [step for step in content if not isinstance(step, _Child)]
        children = [child.unit for child in content if isinstance(child, _Child)]
        if template is None:
            unit, template = self._written(content, depth, inputs, outputs, name, path)
            self.templates[form] = template
        else:
            unit = template.unit()
        used = dict.fromkeys(ref for step in own for ref in step.operands) | dict.fromkeys(outputs)
        tensors = [self.tensors[self.owned[ref]] for ref in used if ref in self.owned]
        for attribute, tensor in zip(template.tensors, tensors, strict=True):
            register(unit, attribute, tensor)
        for attribute, child in zip(template.children, children, strict=True):
            attach(unit, attribute, child)
        constants = [constant for step in own for constant in self._constants(step)]
        for attribute, constant in zip(template.constants, constants, strict=True):
            value = torch.tensor(constant) if self.compiled and isinstance(constant, Ordinal) else constant
            vars(unit)[attribute] = value
        unit.meta[OPERATORS] = template.values, tuple(step.operator for step in own)
        unit.meta[OPTIONAL] = any(step.id in self.program.optional for step in own)
        return unit

    def _constants(self, step: Instruction) -> list[Constant]:
        """What an instruction takes that differs between repeated layers, in the order of its arguments."""
        constants: list[Constant] = [self.parts[step.id]] if step.id in self.parts else []
        if isinstance(step, CARRYING) and not self.compiled:
            constants.append(recorder.place(step.operator))
        if isinstance(step, Compute):
            constants += [leaf for leaf in leaves((step.args, step.kwargs)) if isinstance(leaf, Ordinal)]
        return constants

    def _child(
        self,
        part: Sequence[Instruction],
        depth: int,
        outputs: Sequence[Ref],
        name: str,
        path: str,
        recomputed: bool,
    ) -> _Child:
        within = {step.id: number for number, step in enumerate(part)}
        operands = (ref for step in part for ref in step.operands)
        needed = dict.fromkeys(ref for ref in operands if ref.id not in within and ref not in self.owned)
        results = self._results(part, within, outputs)
        chosen = () if self.program.recompute is None else self.program.recompute.modules
        region = not recomputed and ".".join(self.paths[part[0].id][: depth + 1]) in chosen
        inner = f"{path}.{name}".strip(".")
        unit = self._unit(part, depth + 1, list(needed), results, variable(name), inner, recomputed or region)
        if region:
            replicas = [self.program.replicas.get(ref, ()) for ref in needed]
            holds = [ShardedInput(axes, self.communicator) if axes else None for axes in replicas]
            vars(unit)["forward"] = Recomputing(unit.forward, holds, self.parts)
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
    ) -> tuple[fx.GraphModule, _Template]:
        """A unit with its own code, from its instructions and the units inside."""
        graph, unit = fx.Graph(), fx.GraphModule(nn.Module(), fx.Graph(), name)
        children = [one for one in content if isinstance(one, _Child)]
        units = {child.name.partition(".")[0] for child in children}
        values: dict[Ref, fx.Node] = {}
        tensors: list[str] = []
        constants: list[str] = []
        for ref in inputs:
            values[ref] = node = graph.placeholder(f"{ref.id}_{ref.index}" if ref.index else ref.id)
            node.target = node.name  # `split_1` is the second split and the second result of the first one

        def reached(operation: str, path: str, taken: tuple[fx.Node, ...] = ()) -> fx.Node:
            attribute = reach(unit, path, operation, self.leaves)
            return graph.create_node(operation, attribute, taken, name=variable(path))

        def value(ref: Ref) -> fx.Node:
            if ref not in values:
                full = self.owned[ref]
                owner, _, leaf = full.rpartition(".")
                local = leaf if owner == path else private(full, units, tensors, self.reserved)
                tensors.append(local)
                values[ref] = reached("get_attr", local)
                if self.compiled and ref.id in self.written:
                    values[ref] = graph.call_function(old_value, (values[ref],))
                if full in self.scalars:
                    values[ref] = graph.call_function(torch.ops.aten.view.default, (values[ref], []))
            return values[ref]

        def constant() -> fx.Node:
            constants.append(f"{OWN}{len(constants)}")
            return graph.get_attr(constants[-1])

        def emit(step: Instruction) -> str:
            if isinstance(step, Compute):
                device = torch.device("cpu") if step.host else self.device
                before = [constant() for _ in range((step.id in self.parts) + isinstance(step, Cooperate))]

                def local(leaf: Any) -> Any:
                    if isinstance(leaf, Ref):
                        return value(leaf)
                    if isinstance(leaf, Ordinal):
                        return constant()
                    if isinstance(leaf, RankValue):
                        return leaf.of(self.program.mesh, self.communicator.rank)
                    return device if isinstance(leaf, torch.device) else leaf

                args, kwargs = rewrite(step.args, local), rewrite(dict(step.kwargs), local)
            else:
                before, args, kwargs = [constant() for _ in self._constants(step)], tuple(map(value, step.operands)), {}
            node = graph.create_node("call_function", self._function(step), (*before, *args), kwargs, step.id)
            if not _several(step):
                values[Ref(step.id)] = node
            for index in self.taken.get(step.id, ()):
                values[Ref(step.id, index)] = graph.call_function(python_operator.getitem, (node, index))
            return node.name

        made = []
        for one in content:
            if isinstance(one, _Child):
                call = reached("call_module", one.name, tuple(map(value, one.inputs)))
                for index, ref in enumerate(one.results):
                    several = len(one.results) > 1
                    values[ref] = graph.call_function(python_operator.getitem, (call, index)) if several else call
            else:
                made.append(emit(one))
        returned = [value(ref) for ref in outputs]
        if depth == 0 and self.program.updates:  # buffers take their new values under their own names
            buffers = tuple(reached("get_attr", self.owned[Ref(id)]) for id, _ in self.program.updates)
            graph.call_function(store, (buffers, tuple(returned[len(self.program.outputs) :])))
            returned = returned[: len(self.program.outputs)]
        graph.output(returned[0] if len(returned) == 1 else tuple(returned))
        if self.compiled:
            make_random_opaque(graph, constants)
        unit.graph = graph  # while no name is taken by the user's
        # fx's own adds two calls of Python to each, and drops the traceback of an error in the code
        type(unit).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        own = {*vars(nn.Module()), "meta"}
        shared = {name: value for name, value in vars(unit).items() if name not in own}
        return unit, _Template(type(unit), shared, tensors, constants, [child.name for child in children], made)

    def _function(self, step: Instruction) -> Callable[..., Any]:
        """What an instruction calls; the same function for the same call, so that its code can be shared."""
        part = self.parts.get(step.id)
        kept = part is not None and part.kept
        key: Hashable
        make: Callable[[], Callable[..., Any]]
        if isinstance(step, Cooperate):
            key = step.target, self._channels(step), kept
            make = partial(cooperating, step, self.communicator, kept)
        elif isinstance(step, Compute):
            eager = self.compiled and is_unrolled(step.target)
            scaled = self.compiled and is_scaled(step.target, dict(step.kwargs))
            of = in_eager if eager else scaling if scaled else resolve
            key, make = (step.target, scaled), partial(of, step.target)
        elif isinstance(step, Copy):
            key, make = ("copy", step.host), partial(copier, step.host, self.device, self.copied)
        else:
            key = *self._carrying(step), kept
            if isinstance(step, Start | Wait):
                make = partial(starting if isinstance(step, Start) else waiting, step.of, self.communicator)
            else:
                make = partial(redistributing, step, self.communicator, self.compiled, kept)
        placing = isinstance(step, CARRYING) and not self.compiled
        function = self._once(key, (lambda: with_place(make())) if placing else make)
        if part is None:
            return function
        words = step.target.partition("@")[0].split(".")[:2] if isinstance(step, Compute) else [function.__name__]
        name = variable("_".join(words))
        return self._once((key, kept, part.carries), partial(watched, function, part, name))

    def _once(self, key: Hashable, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        if key not in self.functions:
            self.functions[key] = make()
        return self.functions[key]

    def _results(
        self, part: Sequence[Instruction], within: Mapping[str, int], outputs: Sequence[Ref]
    ) -> tuple[Ref, ...]:
        """What a unit hands on, in the order in which it is made: values that are used outside, or are outputs of the
        unit around it."""
        wanted = {ref for ref in outputs if ref.id in within}
        for step in part:
            for index in self.taken.get(step.id, (0,)):
                ref = Ref(step.id, index)
                if any(user not in within for user in self.used.get(ref, ())):
                    wanted.add(ref)
        return tuple(sorted(wanted, key=lambda ref: (within[ref.id], ref.index)))

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


def _several(step: Instruction) -> bool:
    """Whether an instruction returns several values."""
    of = step.of if isinstance(step, Wait) else step
    return isinstance(of, Fused) or (isinstance(of, Compute) and of.multiple)


def _reorder(module: nn.Module, path: str, first: Mapping[str, int]) -> None:
    """Put children and tensors in the order in which `first` has the paths of the parameters in them."""
    for table in (module._modules, module._parameters, module._buffers):
        items = sorted(table.items(), key=lambda item: first.get(f"{path}{item[0]}", len(first)))
        table.clear()
        table.update(items)  # type: ignore[arg-type]
    for name, child in module._modules.items():
        if child is not None:
            _reorder(child, f"{path}{name}.", first)
