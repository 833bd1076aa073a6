"""An exported program read as an operator graph: sources, operators with names, paths and source lines, outputs.

Own passes: metadata asserts are dropped, no-grad regions are inlined behind `detach`, in-place operators on fresh
values become functional (others are refused), tied weights become one source, baked constants become sources.
"""

from __future__ import annotations

import operator as python_operator
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from strategies.errors import StrategyError
from strategies.graph import Kind, Operator, OperatorGraph, Ref, Source, TensorSpec

DROPPED = frozenset({"_assert_tensor_metadata", "_assert_scalar", "_guards_fn"})
BUFFER_WRITES = frozenset({"add_", "copy_", "mul_", "fill_"})
"""In-place operators that may write a buffer; they run replicated on the rank's own copy."""
PASSING = frozenset({"aten::dropout", "aten::feature_dropout", "aten::alpha_dropout"})
"""Operators (x, probability, training) that return x itself where they drop nothing, although their schema does not
say so."""
ROOT = Path(__file__).parent.parent
PACKAGES = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, ROOT / "strategies", ROOT / "runner"))
STANDARD = f"{sysconfig.get_paths()['stdlib']}/"
"""Where source lines are not the user's (site-packages may lie in the standard library's folder)."""


def in_library(filename: str) -> bool:
    return filename.startswith(("<", *PACKAGES)) or (filename.startswith(STANDARD) and "-packages" not in filename)


def short(filename: str) -> str:
    """The last two parts of a path: enough to find a file, and the same on every machine."""
    return "/".join(re.split(r"[/\\]", filename)[-2:])


def dtype_of(value: Tensor) -> str:
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


class _Reader:
    """Reads one exported program into a graph."""

    def __init__(
        self, exported: torch.export.ExportedProgram, objective: nn.Module, names: Sequence[str], mode: str
    ) -> None:
        module = exported.graph_module
        _inline_regions(module)
        self.signature, self.objective, self.mode = exported.graph_signature, objective, mode
        self.values: dict[fx.Node, Any] = {}  # fx node -> Ref, or list of Refs for a node with several results
        self.tensors: dict[str, Tensor] = {}
        self.sources: list[Source] = []
        self.operators: list[Operator] = []
        self.owners = self._owners(exported)
        inputs = iter(names)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._read_source(node, inputs)
            elif node.op == "call_function":
                self._read_call(node)
            elif node.op == "output":
                outputs = tuple(self.values[arg] for arg in node.args[0] if isinstance(arg, fx.Node))
            elif not (node.op == "get_attr" and isinstance(getattr(module, str(node.target), None), fx.GraphModule)):
                raise StrategyError(
                    f"The captured model holds {node.op} {node.target}, which cannot be sliced.{_at(node)}"
                )
        order = tuple(_strip(name) for name, _ in (*objective.named_parameters(), *objective.named_buffers()))
        self.graph = OperatorGraph(tuple(self.sources), _named(self.operators), outputs, order)

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
                f"The loss and the model both have a tensor called {min(clash)}: the loss is known as `loss`, so the "
                "model's own child "
                "`loss` needs another name."
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
        for position, known in enumerate(self.sources):
            if known.name == name and known.kind != "input":  # another name of a tied weight
                self.values[node] = Ref(known.id)
                alias = _strip({**self.signature.inputs_to_parameters, **self.signature.inputs_to_buffers}[node.name])
                self.sources[position] = replace(known, aliases=(*known.aliases, alias))
                return
        constant = node.name in self.signature.inputs_to_lifted_tensor_constants
        kind: Kind = "constant" if constant else "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        self.values[node] = Ref(node.name)
        self.tensors[name] = tensor.detach()
        self.sources.append(Source(node.name, kind, name, _spec(tensor), kind == "parameter" and tensor.requires_grad))

    def _read_call(self, node: fx.Node) -> None:
        if node.target is python_operator.getitem:
            self.values[node] = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            known = "torch.autocast inside forward" if "autocast" in str(node.target) else str(node.target)
            raise StrategyError(
                f"The captured model calls {known}{_at(node)}, which is not a torch operator and cannot be sliced."
            )
        op = node.target._schema.name.split("::")[1]
        if op in DROPPED:
            return
        target = node.target
        if target._schema.is_mutable:
            target = self._functional(node, op)
            op = target._schema.name.split("::")[1]
        result = node.meta["val"]
        multiple = isinstance(result, (tuple, list))
        values = tuple(result) if multiple else (result,)
        for value in values:
            if not isinstance(value, Tensor) or any(isinstance(size, torch.SymInt) for size in value.shape):
                what = (
                    "a tensor whose shape depends on values"
                    if isinstance(value, Tensor)
                    else f"a {type(value).__name__}, not a tensor"
                )
                raise StrategyError(
                    f"{op}{_at(node)} returns {what}, so the model is not one graph of tensors with known shapes."
                )
        results = tuple(map(_spec, values))
        paths = _paths(node)
        args, kwargs = self._plain(node.args), self._plain(dict(node.kwargs))
        self.operators.append(
            Operator(
                id=node.name,
                name="",
                module=paths[-1] if paths else "",
                op=op,
                target=str(target),
                args=args,
                kwargs=tuple(kwargs.items()),
                results=results,
                multiple=multiple,
                source=_source(node),
                path=_relative(paths),
            )
        )
        self.values[node] = [Ref(node.name, i) for i in range(len(results))] if multiple else Ref(node.name)
        if target is not node.target:  # later uses of the overwritten value see the new one, under whichever name
            for same in self._names_of(node.args[0]):
                self.values[same] = self.values[node]

    def _functional(self, node: fx.Node, op: str) -> torch._ops.OpOverload:
        """The operator that returns what an in-place one writes. Raises StrategyError where that would change the
        meaning."""
        base = node.args[0]
        assert isinstance(node.target, torch._ops.OpOverload)
        if not isinstance(base, fx.Node):
            raise StrategyError(f"{op}{_at(node)} writes in place to several tensors, which cannot be captured yet.")
        names = self._names_of(base)
        if base.op == "placeholder" and base.name in self.signature.inputs_to_buffers and op in BUFFER_WRITES:
            return node.target
        memory = {alias for name in names for alias in _sharing(_origin(name), node)}
        sources = [alias for alias in memory if alias.op == "placeholder"]
        if sources or any(user > node for alias in memory.difference(names) for user in alias.users):
            kind = {
                name: kind for kind in ("parameter", "buffer") for name in getattr(self.signature, f"inputs_to_{kind}s")
            }
            what = (
                f"a {kind.get(sources[0].name, 'batch tensor or constant')}"
                if sources
                else "memory that is read later under another name"
            )
            raise StrategyError(
                f"{op}{_at(node)} writes in place to {what}, which cannot be captured yet; use an operator that "
                "returns a new tensor "
                f"({op.rstrip('_')}, torch.where, torch.cat ...)."
            )
        twin = getattr(getattr(torch.ops.aten, op.removesuffix("_"), None), node.target._overloadname, None)
        if twin is None:
            raise StrategyError(f"{op}{_at(node)} writes in place and has no form that returns a new tensor.")
        functional: torch._ops.OpOverload = twin
        return functional

    def _names_of(self, node: Any) -> list[fx.Node]:
        """The nodes that stand for the same tensor: what in-place operators return is what they wrote."""
        return [other for other, value in self.values.items() if value == self.values[node]]

    def _plain(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.values[value]
        if isinstance(value, (tuple, list)):
            return tuple(self._plain(item) for item in value)
        if isinstance(value, dict):
            return {key: self._plain(item) for key, item in value.items()}
        return value


def _is_view(node: fx.Node) -> bool:
    """Whether a node may share memory with its operand."""
    if node.target is python_operator.getitem:
        return isinstance(node.args[0], fx.Node) and _is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return False
    if node.target._schema.name in PASSING:
        return not (node.args[1] and node.args[2])
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _origin(node: fx.Node) -> fx.Node:
    """The node whose memory a view shows."""
    while _is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _sharing(node: fx.Node, before: fx.Node) -> Iterator[fx.Node]:
    """A node and its views, as far as they exist `before` another node."""
    yield node
    for user in node.users:
        if user < before and _is_view(user):
            yield from _sharing(user, before)


def _at(node: fx.Node) -> str:
    source = _source(node)
    return f" at {source}" if source else ""


def _inline_regions(module: fx.GraphModule) -> None:
    """Replace no-grad regions by their operators, with `detach` on what leaves them."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or "wrap_with_set_grad_enabled" not in str(node.target):
            continue
        enabled, body = node.args[0], node.args[1]
        inner: fx.GraphModule = getattr(module, body.target)
        _inline_regions(inner)
        inputs = iter(node.args[2:])
        copied: dict[fx.Node, Any] = {}
        with module.graph.inserting_before(node):
            for part in inner.graph.nodes:
                if part.op == "placeholder":
                    copied[part] = next(inputs)
                elif part.op == "output":
                    results = [copied[value] for value in part.args[0]]
                else:
                    copied[part] = module.graph.node_copy(part, copied.__getitem__)
            if not enabled:
                results = [_detached(module.graph, value) for value in results]
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            module.graph.erase_node(user)
        module.graph.erase_node(node)
        if not body.users:
            module.graph.erase_node(body)


def _detached(graph: fx.Graph, value: fx.Node) -> fx.Node:
    node = graph.call_function(torch.ops.aten.detach.default, (value,))
    node.meta = dict(value.meta)
    return node


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


def _source(node: fx.Node) -> str:
    """file:line of the innermost frame outside torch, or nothing."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    for filename, line in reversed(frames):
        if not in_library(filename):
            return f"{short(filename)}:{line}"
    return ""


def _named(operators: list[Operator]) -> tuple[Operator, ...]:
    """Give every operator its unique plan name `module.path[.op][@k]`."""
    kinds: dict[str, set[str]] = {}
    for operator in operators:
        kinds.setdefault(operator.module, set()).add(operator.op)

    def base(operator: Operator) -> str:
        if not operator.module:
            return operator.op
        return operator.module if len(kinds[operator.module]) == 1 else f"{operator.module}.{operator.op}"

    total, seen, named = Counter(map(base, operators)), Counter[str](), []
    for operator in operators:
        name = base(operator)
        named.append(replace(operator, name=f"{name}@{seen[name]}" if total[name] > 1 else name))
        seen[name] += 1
    return tuple(named)
