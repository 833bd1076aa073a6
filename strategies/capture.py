"""From a torch module to an `OperatorGraph`, by torch.export on an example batch.

torch.export is used without `run_decompositions` (which loses no_grad regions and breaks batch-norm in training). Own passes:
metadata asserts are dropped, no-grad regions are inlined behind `detach`, in-place operators on fresh values become functional,
tied weights become one source, baked constants become sources. The module and the batch are left as they were.
"""

from __future__ import annotations

import operator as python_operator
import re
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from strategies.errors import StrategyError
from strategies.graph import Operator, OperatorGraph, Ref, Source, TensorSpec

VIEWS = frozenset(
    "view reshape _unsafe_view transpose permute t select slice expand unsqueeze squeeze narrow split chunk unbind flatten unflatten "
    "alias detach view_as expand_as numpy_T movedim split_with_sizes".split()
)
DROPPED = frozenset({"_assert_tensor_metadata", "_assert_scalar", "_guards_fn"})
BUFFER_WRITES = frozenset({"add_", "copy_", "mul_", "fill_"})
"""In-place operators that may write a buffer; they run replicated on the rank's own copy."""


@dataclass(frozen=True)
class Captured:
    """A graph, and the model's own tensors by name (not copied): parameters, buffers and baked constants."""

    graph: OperatorGraph
    tensors: dict[str, Tensor]


class Objective(nn.Module):
    """The model and its loss as one module: flat batch tensors in, the loss (training) or the outputs (evaluation) out.

    With a loss the last entry of a tuple batch is the target; of a dict batch, whatever `forward` does not take by name.
    """

    def __init__(self, model: nn.Module, loss: nn.Module | None, names: Sequence[str], targets: Sequence[str]) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.names, self.targets = tuple(names), frozenset(targets)

    def forward(self, *tensors: Tensor) -> Any:
        batch = dict(zip(self.names, tensors, strict=True))
        inputs = {name: value for name, value in batch.items() if name not in self.targets}
        if all(name.isdigit() for name in self.names):
            output = self.model(*inputs.values())
        else:
            output = self.model(**inputs)
        return output if self.loss is None else self.loss(output, *(batch[name] for name in self.names if name in self.targets))


class LossFunction(nn.Module):
    """A plain function as a module, so that its operators are named `loss`."""

    def __init__(self, function: Any, keywords: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.keywords = function, keywords

    def forward(self, *args: Tensor) -> Tensor:
        result: Tensor = self.function(*args, **self.keywords)
        return result


def capture(objective: Objective, batch: Sequence[Tensor], *, training: bool) -> Captured:
    """The operator graph of `objective` on `batch` (global shapes).

    For training the only output is the scalar loss; for evaluation every tensor that the module returns.
    Raises StrategyError if the module does not run, cannot be captured, or does not return a scalar loss.
    """
    modes = {module: module.training for module in objective.modules()}
    objective.train(training)
    try:
        exported = torch.export.export(objective, tuple(tensor.clone() for tensor in batch), strict=False)
    except Exception as error:  # whatever the user's forward raises, told as one paragraph
        raise StrategyError(_capture_failure(error)) from error
    finally:
        for module, mode in modes.items():
            module.training = mode
    reader = _Reader(exported, objective, "training" if training else "evaluation")
    if training:
        return replace(reader.captured, graph=_with_scalar_loss(reader.captured.graph, objective.loss is None))
    return reader.captured


def _with_scalar_loss(graph: OperatorGraph, own: bool) -> OperatorGraph:
    scalars = [ref for ref in graph.outputs if graph.specs[ref].shape == () and graph.specs[ref].floating]
    if not scalars or graph.outputs[0] != scalars[0] and not own:
        shapes = ", ".join(f"{graph.specs[ref].dtype}{list(graph.specs[ref].shape)}" for ref in graph.outputs) or "nothing"
        who = "The model (loss.target is null, so it must return its loss)" if own else "The loss"
        raise StrategyError(f"{who} returned {shapes}; training needs one floating-point scalar. A reduction such as .mean() is missing?")
    return replace(graph, outputs=(scalars[0],))


def _capture_failure(error: BaseException) -> str:
    line = next((text for text in str(error).splitlines() if text.strip()), "")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _in_library(f.filename)]
    where = f" at {_short(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return f"The model's forward failed on the example batch{where} ({type(error).__name__}: {line.strip()[:300]})."


def _in_library(filename: str) -> bool:
    return bool(re.search(r"[/\\](torch|strategies|runner|contextlib|functools)[/\\.]|^<", filename))


def _short(filename: str) -> str:
    """The last two parts of a path: enough to find a file, and the same on every machine."""
    return "/".join(re.split(r"[/\\]", filename)[-2:])


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _spec(value: Tensor) -> TensorSpec:
    return TensorSpec(tuple(int(size) for size in value.shape), _dtype(value))


class _Reader:
    """Reads one exported program into a graph."""

    def __init__(self, exported: torch.export.ExportedProgram, objective: Objective, mode: str) -> None:
        module = exported.graph_module
        _inline_regions(module)
        self.signature, self.objective, self.mode = exported.graph_signature, objective, mode
        self.values: dict[fx.Node, Any] = {}  # fx node -> Ref, or list of Refs for a node with several results
        self.tensors: dict[str, Tensor] = {}
        self.sources: list[Source] = []
        self.operators: list[Operator] = []
        self.owners = self._owners(exported)
        inputs = iter(objective.names)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._read_source(node, inputs)
            elif node.op == "call_function":
                self._read_call(node)
            elif node.op == "output":
                outputs = tuple(self.values[arg] for arg in node.args[0] if isinstance(arg, fx.Node))
            else:
                raise StrategyError(f"The captured model holds {node.op} {node.target}, which cannot be sliced.")
        order = tuple(_strip(name) for name, _ in (*objective.named_parameters(), *objective.named_buffers()))
        self.captured = Captured(OperatorGraph(tuple(self.sources), _named(self.operators), outputs, order), self.tensors)

    def _owners(self, exported: torch.export.ExportedProgram) -> dict[str, tuple[str, Tensor]]:
        """Placeholder name -> (canonical name, tensor). Tied weights have several placeholders and one canonical name."""
        objective = self.objective
        tensors = dict(objective.named_parameters(remove_duplicate=False)) | dict(objective.named_buffers(remove_duplicate=False))
        canonical = {id(tensor): name for name, tensor in (*objective.named_buffers(), *objective.named_parameters())}
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
        kind = "constant" if constant else "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        self.values[node] = Ref(node.name)
        self.tensors[name] = tensor.detach()
        self.sources.append(Source(node.name, kind, name, _spec(tensor), kind == "parameter" and tensor.requires_grad))

    def _read_call(self, node: fx.Node) -> None:
        if node.target is python_operator.getitem:
            self.values[node] = self.values[node.args[0]][node.args[1]]  # type: ignore[index]
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise StrategyError(f"The captured model calls {node.target} ({_source(node)}), which is not a torch operator and cannot be sliced.")
        op = node.target._schema.name.split("::")[1]
        if op in DROPPED:
            return
        target = node.target
        if target._schema.is_mutable:
            target = self._functional(node, op)
            op = target._schema.name.split("::")[1]
        result = node.meta["val"]
        multiple = isinstance(result, (tuple, list))
        results = tuple(_spec(value) for value in result) if multiple else (_spec(result),)
        paths = _paths(node)
        args, kwargs = self._plain(node.args), self._plain(dict(node.kwargs))
        self.operators.append(
            Operator(
                node.name, "", paths[-1] if paths else "", op, str(target), args, tuple(kwargs.items()), results, multiple, _source(node),
                _relative(paths),
            )
        )  # fmt: skip
        self.values[node] = [Ref(node.name, i) for i in range(len(results))] if multiple else Ref(node.name)
        if target is not node.target:  # later uses of the overwritten value see the new one
            self.values[node.args[0]] = self.values[node]  # type: ignore[index]

    def _functional(self, node: fx.Node, op: str) -> torch._ops.OpOverload:
        """The operator that returns what an in-place one writes. Raises StrategyError where that would change the meaning."""
        base = node.args[0]
        assert isinstance(base, fx.Node) and isinstance(node.target, torch._ops.OpOverload)
        source = base.op == "placeholder"
        if source and base.name in self.signature.inputs_to_buffers and op in BUFFER_WRITES:
            return node.target
        later = [user for user in base.users if user > node and user.target is not python_operator.getitem]
        aliases = [user for user in base.users if _is_view(user) and any(use > node for use in user.users)]
        if source or _is_view(base) or aliases:
            what = "a batch tensor or parameter" if source else "a view, or a value that has views"
            raise StrategyError(
                f"{op} at {_source(node) or node.name} writes in place to {what}, which cannot be captured yet; use the operator that "
                f"returns a new tensor ({op.rstrip('_')}). {len(later)} later uses would be affected."
            )
        twin = getattr(getattr(torch.ops.aten, op.removesuffix("_"), None), node.target._overloadname, None)
        if twin is None:
            raise StrategyError(f"{op} at {_source(node) or node.name} writes in place and has no form that returns a new tensor.")
        functional: torch._ops.OpOverload = twin
        return functional

    def _plain(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.values[value]
        if isinstance(value, (tuple, list)):
            return tuple(self._plain(item) for item in value)
        if isinstance(value, dict):
            return {key: self._plain(item) for key, item in value.items()}
        return value


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name.split("::")[1] in VIEWS


def _inline_regions(module: fx.GraphModule) -> None:
    """Replace no-grad regions by their operators, with `detach` on what leaves them."""
    for node in list(module.graph.nodes):
        if node.op != "call_function" or "wrap_with_set_grad_enabled" not in str(node.target):
            continue
        enabled, body = node.args[0], node.args[1]
        inner: fx.GraphModule = getattr(module, body.target)
        inputs = iter(node.args[2:])
        copied: dict[fx.Node, Any] = {}
        with module.graph.inserting_before(node):
            for part in inner.graph.nodes:
                if part.op == "placeholder":
                    copied[part] = next(inputs)
                elif part.op == "output":
                    results = [copied[value] for value in part.args[0]]
                else:
                    copied[part] = module.graph.node_copy(part, lambda old: copied[old])
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
        if not _in_library(filename):
            return f"{_short(filename)}:{line}"
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
