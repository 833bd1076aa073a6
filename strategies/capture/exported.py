"""An exported program read as an operator graph: sources, operators with names, paths and source lines, outputs.

Before, passes make it plain: regions become operators, writes become values, numbers become tensors. Tied weights
become one source, baked constants become sources.
"""

from __future__ import annotations

import operator as python_operator
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from strategies.capture.causal import shorten_masks
from strategies.capture.functional import TIED, make_functional
from strategies.capture.nodes import AUTOGRAD_FUNCTION, OpaqueCall, at, function_target, modules_of, op_of, source_of
from strategies.capture.numbers import goes_on, resolve_numbers
from strategies.capture.regions import flatten
from strategies.core.errors import StrategyError
from strategies.core.graph import Kind, Operator, OperatorGraph, Ref, Source, TensorSpec
from strategies.rules.declared import lines_of
from strategies.rules.registry import LOCAL_FUNCTIONS
from strategies.rules.traits import traits


def dtype_of(value: Tensor) -> str:
    """The name of a tensor's dtype, without `torch.`."""
    return str(value.dtype).removeprefix("torch.")


def _spec(value: Tensor) -> TensorSpec:
    return TensorSpec(tuple(int(size) for size in value.shape), dtype_of(value))


def read(
    exported: torch.export.ExportedProgram, objective: nn.Module, names: Sequence[str], mode: str
) -> tuple[OperatorGraph, dict[str, Tensor]]:
    """The graph of an exported objective, and the tensors of its sources by name (not copied). `names` are those of the
    batch entries; `mode` marks constants, which are numbered anew in every graph."""
    reader = _Reader(exported, objective, names, mode)
    return reader.graph, reader.tensors


def check_constants(graph: OperatorGraph, tensors: Mapping[str, Tensor], taken: Set[str], assigned: Set[str]) -> None:
    """Raises StrategyError where a forward reads memory of a trained parameter, or of a buffer that it writes, by
    another tensor than that.

    Args:
        graph: as read.
        tensors: those of its sources, by name.
        taken: the paths of buffers that forward takes from elsewhere than their modules.
        assigned: the paths of those that it replaces, which leaves their old memory as it is.
    """
    if both := taken & assigned:
        raise StrategyError(
            "MW901",
            f"The model's forward replaces buffer {_strip(min(both))} and also takes it from elsewhere than its module "
            "(a dict or list of its own), where the first one stays. Write it in place, with copy_.",
        )
    written = {graph.by_id[buffer].name for buffer, _ in graph.updates} - set(map(_strip, assigned))
    changing = {
        tensors[source.name].untyped_storage()._cdata: source
        for source in graph.of_kind("parameter", "buffer")
        if source.trainable or source.name in written
    }
    for constant in graph.of_kind("constant"):
        if (owner := changing.get(tensors[constant.name].untyped_storage()._cdata)) is not None:
            raise StrategyError(
                "MW901",
                f"The model's forward uses a tensor that shares its memory with {owner.kind} {owner.name} (made of it "
                "outside of forward, by .data, .detach() or a view), which changes with every step. Make it in "
                f"forward, of the {owner.kind} itself, such as {owner.name}.detach().",
            )


class _Reader:
    """Reads one exported program into a graph."""

    def __init__(
        self, exported: torch.export.ExportedProgram, objective: nn.Module, names: Sequence[str], mode: str
    ) -> None:
        module = exported.graph_module
        self.signature, self.objective, self.mode = exported.graph_signature, objective, mode
        self.values: dict[fx.Node, Any] = {}  # fx node -> Ref, or list of Refs for a node with several results
        self.tensors: dict[str, Tensor] = {}
        self.sources: list[Source] = []
        self.positions: dict[str, int] = {}
        """Of the sources but for inputs, by name."""
        self.operators: list[Operator] = []
        self.owners = self._owners(exported)
        flatten(module.graph, self._trainable)
        written = make_functional(module.graph, self._kinds(), dict(self.signature.inputs_to_buffers), self._trainable)
        instead = resolve_numbers(module.graph)
        written = {buffer: instead.get(value, value) for buffer, value in written.items()}
        self.constants = self.signature.inputs_to_lifted_tensor_constants  # made anew by every call
        shorten_masks(module.graph, {holder: exported.constants[name] for holder, name in self.constants.items()})
        self.written = written.keys()
        inputs = iter(names)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._read_source(node, inputs)
            elif node.op == "call_function":
                self._read_call(node)
            elif node.op == "output":
                outputs = tuple(self.values[arg] for arg in node.args[0] if isinstance(arg, fx.Node))
            else:
                raise StrategyError(
                    "MW906", f"The captured model holds {node.op} {node.target}, which cannot be sliced.{at(node)}"
                )
        order = tuple(_strip(name) for name, _ in (*objective.named_parameters(), *objective.named_buffers()))
        updates = tuple((self.values[buffer].id, self.values[value]) for buffer, value in written.items())
        self.graph = OperatorGraph(tuple(self.sources), _named(self.operators), outputs, order, updates)

    def _kinds(self) -> dict[str, str]:
        """What each placeholder that holds state is. A frozen parameter is a buffer to those who write it."""
        signature = self.signature
        frozen = [name for name in signature.inputs_to_parameters if not self.owners[name][1].requires_grad]
        names = Counter(self.owners[name][0] for name in signature.inputs_to_parameters)
        return (
            {name: TIED if names[self.owners[name][0]] > 1 else "parameter" for name in signature.inputs_to_parameters}
            | dict.fromkeys(frozen, "buffer")
            | dict.fromkeys(signature.inputs_to_buffers, "buffer")
            | dict.fromkeys(signature.inputs_to_lifted_tensor_constants, "constant")
        )

    def _trainable(self, placeholder: fx.Node) -> bool:
        owner = self.owners.get(placeholder.name)
        return owner is not None and isinstance(owner[1], nn.Parameter) and owner[1].requires_grad

    def _owners(self, exported: torch.export.ExportedProgram) -> dict[str, tuple[str, Tensor]]:
        """Placeholder name -> (canonical name, tensor). Tied weights have several placeholders and one canonical
        name."""
        objective = self.objective
        tensors = dict(objective.named_parameters(remove_duplicate=False)) | dict(
            objective.named_buffers(remove_duplicate=False)
        )
        canonical = {id(tensor): name for name, tensor in (*objective.named_buffers(), *objective.named_parameters())}
        clash = {_strip(name) for name in tensors if name.startswith("loss.")} & {
            _strip(name) for name in tensors if name.startswith("model.")
        }
        if clash:
            raise StrategyError(
                "MW907",
                f"The loss and the model both have a tensor called {min(clash)}: the loss is known as `loss`, so the "
                "model's own child "
                "`loss` needs another name.",
            )
        owners = {}
        for placeholder, name in (self.signature.inputs_to_parameters | self.signature.inputs_to_buffers).items():
            tensor = tensors[name]
            owners[placeholder] = (_strip(canonical[id(tensor)]), tensor)
        for placeholder, name in self.signature.inputs_to_lifted_tensor_constants.items():
            owners[placeholder] = (f"{self.mode}.{name}", exported.constants[name])  # numbered anew in every graph
        return owners

    def _read_source(self, node: fx.Node, inputs: Any) -> None:
        if node.name not in self.owners:
            self.values[node] = Ref(node.name)
            self.sources.append(Source(node.name, "input", next(inputs), _spec(node.meta["val"])))
            return
        name, tensor = self.owners[node.name]
        if (position := self.positions.get(name)) is not None:  # another name of a tied weight
            known = self.sources[position]
            self.values[node] = Ref(known.id)
            signature = self.signature
            alias = _strip((signature.inputs_to_parameters | signature.inputs_to_buffers)[node.name])
            self.sources[position] = replace(known, aliases=(*known.aliases, alias))
            return
        constant = node.name in self.constants
        trained = isinstance(tensor, nn.Parameter) and (tensor.requires_grad or node not in self.written)
        kind: Kind = "constant" if constant else "parameter" if trained else "buffer"
        self.values[node] = Ref(node.name)
        self.tensors[name] = tensor.detach()
        self.positions[name] = len(self.sources)
        self.sources.append(Source(node.name, kind, name, _spec(tensor), kind == "parameter" and tensor.requires_grad))

    def _read_call(self, node: fx.Node) -> None:
        if node.target is python_operator.getitem:
            self.values[node] = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        op, target = op_of(node), _target(node)
        if traits(op).equal == "left_out":
            self.values[node] = self.values[node.args[0]]  # type: ignore[index]
            return
        result = node.meta["val"]
        multiple = isinstance(result, (tuple, list))
        values = tuple(result) if multiple else (result,)
        for value in values:
            if not isinstance(value, Tensor):
                what = f"a {type(value).__name__}, not a tensor, so the model is not one graph of tensors"
                raise StrategyError("MW906", f"{op}{at(node)} returns {what}.")
            if any(isinstance(size, torch.SymInt) for size in value.shape):
                raise goes_on(node)
        results = tuple(map(_spec, values))
        paths = _paths(node)
        given = node.args[2:] if node.target is AUTOGRAD_FUNCTION else node.args
        args, kwargs = self._plain(given), self._plain(dict(node.kwargs))
        self.operators.append(
            Operator(
                id=node.name,
                name="",
                module=paths[-1] if paths else "",
                op=op,
                target=target,
                args=args,
                kwargs=tuple(kwargs.items()),
                results=results,
                multiple=multiple,
                source=source_of(node),
                path=_relative(paths),
                lines=lines_of(op),
            )
        )
        self.values[node] = [Ref(node.name, i) for i in range(len(results))] if multiple else Ref(node.name)

    def _plain(self, value: Any) -> Any:
        match value:
            case fx.Node():
                return self.values[value]
            case tuple() | list():
                return tuple(map(self._plain, value))
            case dict():
                return {key: self._plain(item) for key, item in value.items()}
        return value


def _target(node: fx.Node) -> str:
    """The target of an operator, in the form that `resolve` looks up."""
    if isinstance(node.target, torch._ops.OpOverload):
        foreign = node.target.namespace != "aten"
        return f"{node.target}@{','.join(modules_of(node))}" if foreign else str(node.target)
    if node.target is AUTOGRAD_FUNCTION:
        return function_target(*node.args[:2])  # type: ignore[arg-type]
    if isinstance(node.target, OpaqueCall) or LOCAL_FUNCTIONS.get(op_of(node)) is node.target:
        return f"local.{op_of(node)}"
    raise StrategyError(
        "MW906",
        f"The captured model calls {op_of(node)}{at(node)}, which is not a torch operator and cannot be sliced.",
    )


def _paths(node: fx.Node) -> list[str]:
    """Module paths of the calls around a node, outermost first, without the wrapper."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [_strip(path) for path, _ in stack.values()]
    return [path for position, path in enumerate(paths) if path and path not in paths[:position]]


def _strip(path: str) -> str:
    return "" if path == "model" else path.removeprefix("model.")


def _relative(paths: list[str]) -> tuple[str, ...]:
    """Each path relative to the one around it: layers.0, layers.0.attn -> layers.0, attn."""
    before, parts = "", []
    for path in paths:
        parts.append(path.removeprefix(before + ".") if before else path)
        before = path
    return tuple(parts)


def _named(operators: list[Operator]) -> tuple[Operator, ...]:
    """Give every operator its unique plan name `module.path[.label][@k]`."""
    kinds: dict[str, set[str]] = {}
    for operator in operators:
        kinds.setdefault(operator.module, set()).add(operator.label)

    def base(operator: Operator) -> str:
        if not operator.module:
            return operator.label
        return operator.module if len(kinds[operator.module]) == 1 else f"{operator.module}.{operator.label}"

    total, seen, named = Counter(map(base, operators)), Counter[str](), []
    for operator in operators:
        name = base(operator)
        named.append(replace(operator, name=f"{name}@{seen[name]}" if total[name] > 1 else name))
        seen[name] += 1
    return tuple(named)
