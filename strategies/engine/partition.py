"""The program of one rank as a tree of torch.fx GraphModules that follows the user's module tree.

A contiguous run of instructions from one module call becomes one GraphModule with generated code, down to the modules
that own parameters; parameters keep the names and the order of the user's model. The tree matters: ZeRO-3 gathers
parameters module by module, and a flat graph would gather the whole model at once. A use of a parameter that another
module owns becomes a unit of its own, under which the same Parameter object is registered again.
"""

from __future__ import annotations

import operator as python_operator
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn

from strategies.engine.buffers import store
from strategies.engine.communicator import Carrier, CarrierOfAll, Communicator
from strategies.engine.compiled import opaque, opaque_all
from strategies.engine.offload import Moved
from strategies.engine.place import copier
from strategies.engine.program import KEY, Copy, Fused, Instruction, Program, RankValue, Redistribute
from strategies.engine.recompute import Hold, Part, carried_once, parts_of, recomputing, watched
from strategies.engine.units import owned, unit_path
from strategies.graph import Ref, rewrite
from strategies.redistribution import Chain
from strategies.rules.registry import resolve

Edge = Callable[[Tensor], Tensor]
MODULE = "module"
"""Key in `GraphModule.meta` of a unit: the path of the user's module whose instructions it holds."""
COPIED = "copied"
"""Key in `GraphModule.meta` of the whole program: what it has copied to the host and back, as `Moved`."""


class _Redistribution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Carrier, backward: Carrier, scale: float) -> Tensor:
        ctx.carrier, ctx.scale = backward, scale
        result = forward(tensor)
        return result.view_as(result) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.scale != 1:
            gradient = gradient * ctx.scale
        return ctx.carrier(gradient), None, None, None


def edge(
    instruction: Redistribute, communicator: Communicator, compiled: bool = False, part: Part | None = None
) -> Edge:
    """The function that carries a value to its use, named after what it does so that generated code can be read.
    `part` is what it is of a recomputed module that keeps some results."""

    def carrier(steps: Chain) -> Carrier:
        found = communicator.carrier(steps)
        return opaque(found, steps, communicator.mesh) if compiled else found

    forward, backward, scale = carrier(instruction.forward), carrier(instruction.backward), instruction.scale
    if part is not None and part.kept:
        forward = carried_once(forward)
    if instruction.differentiable:

        def redistribute(tensor: Tensor) -> Tensor:
            result: Tensor = _Redistribution.apply(tensor, forward, backward, scale)  # type: ignore[no-untyped-call]
            return result
    else:

        def redistribute(tensor: Tensor) -> Tensor:
            return forward(tensor.detach())

    if part is not None:
        redistribute = watched(redistribute, part, "")
    return _named(redistribute, instruction.forward)


def _named(function: Callable[..., Any], steps: Chain) -> Callable[..., Any]:
    text = " then ".join(map(str, steps)) or "keep"
    function.__name__ = function.__qualname__ = re.sub(r"\W+", "_", text).strip("_")
    function.__module__ = "redistribute"
    return function


class _Redistributions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: CarrierOfAll, backward: CarrierOfAll, scales: tuple[float, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.carrier, ctx.scales = backward, scales
        results = zip(forward(tensors), tensors, strict=True)
        return tuple(result.view_as(result) if result is tensor else result for result, tensor in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        pairs = zip(gradients, ctx.scales, strict=True)
        found = ctx.carrier([gradient if scale == 1 else gradient * scale for gradient, scale in pairs])
        return (None, None, None, *found)


def edges(instruction: Fused, communicator: Communicator, compiled: bool = False) -> Callable[..., Sequence[Tensor]]:
    """The function that carries several values to their uses, with one call for all of them."""

    def carrier(chains: Sequence[Chain]) -> CarrierOfAll:
        found = communicator.carrier_of_all(chains)
        return opaque_all(found, chains, communicator.mesh) if compiled else found

    forward = carrier([part.forward for part in instruction.parts])
    backward = carrier([part.backward for part in instruction.parts])
    scales = tuple(part.scale for part in instruction.parts)
    if instruction.differentiable:

        def redistribute(*tensors: Tensor) -> Sequence[Tensor]:
            results: Sequence[Tensor] = _Redistributions.apply(forward, backward, scales, *tensors)  # type: ignore[no-untyped-call]
            return results
    else:

        def redistribute(*tensors: Tensor) -> Sequence[Tensor]:
            return forward([tensor.detach() for tensor in tensors])

    return _named(redistribute, instruction.parts[0].forward)


def build(
    program: Program,
    tensors: Mapping[str, Tensor],
    communicator: Communicator,
    device: torch.device | str,
    *,
    compiled: bool = False,
) -> fx.GraphModule:
    """The module that `communicator.rank` runs. `tensors` holds the local slice of every parameter, buffer and constant
    by name (parameters as nn.Parameter); `forward` takes the local batch entries in the order of the program's inputs,
    then the random key if the program draws random numbers, and returns the outputs (the bare one if there is only
    one). With `compiled` it is fit for `compile_units`.
    """
    return _Tree(program, tensors, communicator, torch.device(device), compiled).root


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
        self.compiled, self.copied = compiled, Moved()
        self.owned = owned(program)
        inputs = [Ref(source.id) for source in program.sources if source.kind == "input"] + [KEY] * program.random
        self.paths = {one.id: unit_path(one, program, self.owned) for one in program.instructions}
        self.producer = {instruction.id: instruction for instruction in program.instructions}
        self.users: dict[str, list[str]] = {instruction.id: [] for instruction in program.instructions}
        for instruction in program.instructions:
            for ref in instruction.operands:
                if ref.id in self.users:
                    self.users[ref.id].append(instruction.id)
        self.parts = parts_of(program)
        self.reserved = {part for name in program.parameter_order for part in name.split(".")}
        outputs = [*program.outputs, *(value for _, value in program.updates)]
        self.root = self._unit(list(program.instructions), 0, inputs, outputs, "Program", "", False)
        self._restore_names()
        self.root.meta[COPIED] = self.copied
        if program.updates:
            self._store()

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
        graph, module = fx.Graph(), nn.Module()
        values: dict[Ref, fx.Node] = {}
        seen: dict[str, int] = {}
        for ref in inputs:
            values[ref] = node = graph.placeholder(_name(ref))
            node.target = node.name  # `split_1` is the second split and the second result of the first one

        def value(ref: Ref) -> fx.Node:
            if ref not in values:
                values[ref] = graph.get_attr(self._register(module, ref, path))
            return values[ref]

        def level(instruction: Instruction) -> str | None:
            parts = self.paths[instruction.id]
            return parts[depth] if len(parts) > depth else None

        for key, run in groupby(instructions, key=level):
            part = list(run)
            if key is None:
                for instruction in part:
                    self._emit(graph, instruction, value, values)
                continue
            inside = {instruction.id for instruction in part}
            needed = dict.fromkeys(
                ref for i in part for ref in i.operands if ref.id not in inside and ref not in self.owned
            )
            results = self._results(part, inside, outputs)
            child_name = self._fresh(key, seen)
            region = not recomputed and self._recomputed(part[0], depth)
            child = self._unit(
                part,
                depth + 1,
                list(needed),
                results,
                re.sub(r"\W", "_", child_name),
                f"{path}.{child_name}".strip("."),
                recomputed or region,
            )
            if region:
                child.forward = recomputing(child.forward, [self._hold(ref) for ref in needed], self.parts)
            child.meta[MODULE] = ".".join(part[0].path[: depth + 1])
            _place(module, child_name, child)
            call = graph.call_module(child_name, tuple(value(ref) for ref in needed))
            if len(results) == 1:
                values[results[0]] = call
            else:
                values.update(
                    {ref: graph.call_function(python_operator.getitem, (call, i)) for i, ref in enumerate(results)}
                )
        found = [value(ref) for ref in outputs]
        graph.output(found[0] if len(found) == 1 else tuple(found))
        return fx.GraphModule(module, graph, name)

    def _recomputed(self, instruction: Instruction, depth: int) -> bool:
        """Whether the unit of an instruction at a depth of the tree is a call of a recomputed module."""
        chosen = self.program.recompute
        return chosen is not None and ".".join(self.paths[instruction.id][: depth + 1]) in chosen.modules

    def _hold(self, ref: Ref) -> Hold | None:
        """How a recomputed module stores an input: each rank its part, where others hold the same."""
        axes = self.program.replicas.get(ref, ())
        return Hold(axes, self.communicator) if axes else None

    def _emit(
        self, graph: fx.Graph, instruction: Instruction, value: Callable[[Ref], fx.Node], values: dict[Ref, fx.Node]
    ) -> None:
        if isinstance(instruction, Redistribute):
            node = graph.create_node(
                "call_function",
                edge(instruction, self.communicator, self.compiled, self.parts.get(instruction.id)),
                (value(instruction.value),),
                {},
                instruction.id,
            )
        elif isinstance(instruction, Fused):
            function = edges(instruction, self.communicator, self.compiled)
            node = graph.create_node(
                "call_function", function, tuple(map(value, instruction.operands)), {}, instruction.id
            )
            for index in range(len(instruction.parts)):
                values[Ref(instruction.id, index)] = graph.call_function(python_operator.getitem, (node, index))
            return
        elif isinstance(instruction, Copy):
            copy = copier(instruction.host, self.device, self.copied)
            if instruction.id in self.parts:
                copy = watched(copy, self.parts[instruction.id], copy.__name__)
            node = graph.create_node("call_function", copy, (value(instruction.value),), {}, instruction.id)
        else:
            device = torch.device("cpu") if instruction.host else self.device
            local = lambda leaf: self._local(leaf, value, device)  # noqa: E731
            args, kwargs = rewrite(instruction.args, local), rewrite(dict(instruction.kwargs), local)
            function = resolve(instruction.target)
            if instruction.id in self.parts:
                name = "_".join(instruction.target.split(".")[:2])
                function = watched(function, self.parts[instruction.id], name)
            node = graph.create_node("call_function", function, args, kwargs, instruction.id)
            if instruction.multiple:
                for user in dict.fromkeys(
                    ref for i in self.program.instructions for ref in i.operands if ref.id == instruction.id
                ):
                    values[user] = graph.call_function(python_operator.getitem, (node, user.index))
                for ref in (*self.program.outputs, *(value for _, value in self.program.updates)):
                    if ref.id == instruction.id and ref not in values:
                        values[ref] = graph.call_function(python_operator.getitem, (node, ref.index))
                return
        values[Ref(instruction.id)] = node

    def _local(self, leaf: Any, value: Callable[[Ref], fx.Node], device: torch.device) -> Any:
        if isinstance(leaf, Ref):
            return value(leaf)
        if isinstance(leaf, RankValue):
            return leaf.of(self.program.mesh, self.communicator.rank)
        return device if isinstance(leaf, torch.device) else leaf

    def _results(self, part: Sequence[Instruction], inside: set[str], outputs: Sequence[Ref]) -> list[Ref]:
        """What a unit hands on: values that are used outside, or are outputs of the unit around it."""
        outside = dict.fromkeys(
            ref
            for instruction in part
            for user in self.users[instruction.id]
            if user not in inside
            for ref in self.producer[user].operands
            if ref.id == instruction.id
        )
        return list(dict.fromkeys([*outside, *(ref for ref in outputs if ref.id in inside)]))

    def _fresh(self, key: str, seen: dict[str, int]) -> str:
        """`relu`, then `relu_1` for the second run of one module's instructions, never a name of the model itself."""
        number = seen.get(key, 0)
        seen[key] = number + 1
        name = f"{key}_{number}" if number else key
        while number and name in self.reserved:
            name += "_"
        return name

    def _register(self, module: nn.Module, ref: Ref, path: str) -> str:
        """Register the tensor behind `ref` on the unit that uses it; under its own name where the unit owns it."""
        name = self.owned[ref]
        owner, _, leaf = name.rpartition(".")
        local = leaf if owner == path else re.sub(r"\W", "_", name)
        tensor = self.tensors[name]
        while getattr(module, local, tensor) is not tensor:  # another tensor's name reads the same without its dots
            local += "_"
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(local, tensor)
        else:
            module.register_buffer(local, tensor)
        return local

    def _store(self) -> None:
        """Let the root keep the new values of buffers, which it computes beside the outputs, under the buffers' own
        names."""
        graph = self.root.graph
        (end,) = graph.find_nodes(op="output")
        count = len(self.program.outputs)
        found, values = end.args[0][:count], end.args[0][count:]
        with graph.inserting_before(end):
            buffers = tuple(graph.get_attr(self.owned[Ref(id)]) for id, _ in self.program.updates)
            graph.call_function(store, (buffers, values))
        end.args = (found[0] if count == 1 else found,)
        self.root.recompile()

    def _restore_names(self) -> None:
        """Give every parameter and buffer its own name in the model's order, also those that no unit owns."""
        order = [name for name in self.program.parameter_order if name in self.tensors]
        for name in order:
            owner, _, leaf = name.rpartition(".")
            module: nn.Module = self.root
            for part in owner.split(".") if owner else ():
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            tensor = self.tensors[name]
            if isinstance(tensor, nn.Parameter) and leaf not in module._parameters:
                module.register_parameter(leaf, tensor)
            elif not isinstance(tensor, nn.Parameter) and leaf not in module._buffers:
                module.register_buffer(leaf, tensor)
        _reorder(self.root, "", order)


def _name(ref: Ref) -> str:
    return f"{ref.id}_{ref.index}" if ref.index else ref.id


def _place(module: nn.Module, name: str, child: nn.Module) -> None:
    *around, last = name.split(".")
    for part in around:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    module.add_module(last, child)


def _reorder(module: nn.Module, prefix: str, order: Sequence[str]) -> None:
    rank: dict[str, int] = {}
    for position, name in enumerate(order):
        if name.startswith(prefix):
            rank.setdefault(name[len(prefix) :].split(".")[0], position)
    for table in (module._modules, module._parameters, module._buffers):
        items = sorted(table.items(), key=lambda item: rank.get(item[0], len(order)))
        table.clear()
        table.update(items)  # type: ignore[arg-type]
    for name, child in module._modules.items():
        if child is not None:
            _reorder(child, f"{prefix}{name}.", order)
