"""Capture of repeated layers once: further layers of a list are traced as one node each, which copies of the nodes of a
layer that was traced replace afterwards.

A layer repeats another only where its forward can do nothing else: its modules are of the same classes, hold tensors of
the same shapes, and equal values in every attribute that the other's forward has read; it is called in the same mode
with equal arguments, but for other tensors of the same shapes and strides. Invariant: the graph is that of a complete
capture, name by name. The first two layers of a list and the last are traced. Where their nodes differ, and wherever a
layer is seen to do more than return tensors, the complete model is captured.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import HigherOrderOperator
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from strategies.capture.nodes import beneath_tracing, forwards_wrapped, in_library, proxy_mode
from strategies.rules.registry import PLAIN

LEAST_LAYERS = 6
"""Layers of a list that is worth it."""
TABLES = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that hold tensors and modules, which are compared by themselves."""
NUMBERED = re.compile(r"(.*?)(?:_(\d+))?")
FRAME = re.compile(r'File "([^"]+)", line (\d+)')


Look = tuple[Any, ...]
"""What a forward can observe of an argument or result."""


class NotRepeated(BaseException):
    """The complete model must be captured. Not an Exception, which a model's forward may handle."""


class _Note(HigherOrderOperator):
    """The target of nodes (kind, path of a layer, tensors): `begin` with arguments and `end` with results around the
    nodes of a layer, `again` with arguments for one that is not traced."""

    def __init__(self) -> None:
        super().__init__("meshwright_repeated_module")  # type: ignore[no-untyped-call]

    def __call__(self, *_: Any) -> Any:
        raise NotImplementedError


NOTE = _Note()
fx.node.has_side_effect(NOTE)  # else those without users would be dropped


@dataclass(frozen=True)
class _Call:
    """How a layer was called, which attributes its forward has read, by the names of modules, and their values."""

    arguments: object
    read: Mapping[str, set[str]]
    modules: object
    results: Sequence[Look]
    structure: Any


@dataclass
class _List:
    """Layers of one class in a list, by path."""

    layers: dict[str, nn.Module]
    traced: _Call | None = None
    """The call of the second."""
    called: set[str] = field(default_factory=set)


class RepeatedModules:
    """The repeated layers of one module."""

    def __init__(self, root: nn.Module) -> None:
        self.lists = list(_lists(root))
        self.places = {id(vars(layer)): (path, some) for some in self.lists for path, layer in some.layers.items()}

    @contextmanager
    def traced_once(self) -> Iterator[None]:
        """Export within this context. Raises NotRepeated within."""
        classes = {type(layer) for some in self.lists for layer in some.layers.values()}
        with forwards_wrapped(classes, self._watched):
            yield

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            tracing = proxy_mode()
            place = self.places.get(id(vars(module)))  # the tracer's stand-ins share it
            if tracing is None or place is None:
                return forward(module, *args, **kwargs)
            return _called(*place, lambda: forward(module, *args, **kwargs), (args, kwargs), tracing.tracer)

        return call

    def expand(self, exported: torch.export.ExportedProgram) -> None:
        """Replace the notes in an exported graph. Raises NotRepeated where traced layers differ."""
        graph, signature = exported.graph, exported.graph_signature
        owners = signature.inputs_to_parameters | signature.inputs_to_buffers
        placeholders = {owners[node.name]: node for node in graph.nodes if node.name in owners}
        notes = [node for node in graph.nodes if node.target is NOTE]
        expansion = _Expansion(graph, placeholders)
        for some in self.lists:
            own = [note for note in notes if note.args[1] in some.layers]
            if any(note.args[0] == "again" for note in own):
                expansion.expand(own)
        expansion.rename()
        for note in reversed(notes):
            graph.erase_node(note)


def _lists(root: nn.Module) -> Iterator[_List]:
    """The lists inside, outermost only, whose layers share nothing."""
    modules = Counter(id(one) for _, one in root.named_modules(remove_duplicate=False))
    tensors = Counter(
        id(one) for named in (root.named_parameters, root.named_buffers) for _, one in named(remove_duplicate=False)
    )

    def alone(layer: nn.Module) -> bool:
        own = [*layer.parameters(), *layer.buffers()]
        return all(modules[id(one)] == 1 for one in layer.modules()) and all(tensors[id(one)] == 1 for one in own)

    def within(module: nn.Module, path: str) -> Iterator[_List]:
        children = {f"{path}.{name}".removeprefix("."): child for name, child in module.named_children()}
        for _, members in groupby(children.items(), key=lambda item: type(item[1])):
            layers = dict(members)
            several = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(layers) >= LEAST_LAYERS
            if several and all(map(alone, layers.values())):
                yield _List(layers)
            else:
                for name, layer in layers.items():
                    yield from within(layer, name)

    return within(root, "")


def _called(path: str, some: _List, forward: Callable[[], Any], given: Any, tracer: Any) -> Any:
    """What a layer returns: traced, or noted as the repetition of another."""
    if path in some.called:
        raise NotRepeated
    some.called.add(path)
    layer, ends = some.layers[path], [*some.layers][:2] + [*some.layers][-1:]
    leaves, structure = tree_flatten(given)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    arguments = structure, [_look(leaf) for leaf in leaves], [[a is b for a in tensors] for b in tensors], _mode()
    if path not in ends:
        known = some.traced
        if known is None or arguments != known.arguments or _described(layer, known.read) != known.modules:
            return forward()
        note = _note(tracer, "again", path, tensors)
        results = [_made(one) for one in known.results]
        return tree_unflatten(track_tensor_tree(results, note, constant=None, tracer=tracer), known.structure)
    state, read = _state(layer, tensors), dict[int, set[str]]()
    _note(tracer, "begin", path, tensors)
    with reading(read):
        returned = forward()
    results, structure = tree_flatten(returned)
    if _state(layer, tensors) != state or not all(isinstance(one, Tensor) for one in results):
        raise NotRepeated
    _note(tracer, "end", path, results)
    if path == ends[1]:
        by_name = {name: read.get(id(vars(module)), set()) for name, module in layer.named_modules()}
        some.traced = _Call(arguments, by_name, _described(layer, by_name), [_look(one) for one in results], structure)
    return returned


def _note(tracer: Any, kind: str, path: str, tensors: Sequence[Tensor]) -> fx.Proxy:
    proxies = [tracer.unwrap_proxy(tensor) for tensor in tensors]
    if not all(isinstance(proxy, fx.Proxy) for proxy in proxies):
        raise NotRepeated
    note: fx.Proxy = tracer.create_proxy("call_function", NOTE, (kind, path, proxies), {})
    return note


def _look(leaf: Any) -> Look:
    """An argument or result; equal for tensors that a forward cannot distinguish, unequal for what is neither tensor
    nor plain."""
    if isinstance(leaf, Tensor):
        placed = tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.storage_offset()
        return *placed, leaf.requires_grad, leaf.requires_grad and leaf.is_leaf
    return (type(leaf), leaf) if isinstance(leaf, PLAIN) else (object(),)


def _made(look: Look) -> Tensor:
    """A tensor of this look that the graph does not know yet."""
    shape, stride, dtype, device, *_, gradient, _ = look
    with beneath_tracing():
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device).requires_grad_(gradient).clone()
    if _look(made) != look:
        raise NotRepeated
    return made


def _mode() -> object:
    """What a forward may do otherwise by."""
    autocasts = [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), autocasts, torch.get_default_dtype()


def _described(layer: nn.Module, read: Mapping[str, set[str]]) -> object:
    """The modules of a layer with their tensors and with the attributes that were `read`, by names of modules."""

    def tensors(module: nn.Module) -> list[Any]:
        named = (*module._parameters.items(), *module._buffers.items())
        return [(name, type(tensor), None if tensor is None else _look(tensor)) for name, tensor in named]

    def values(module: nn.Module, names: set[str]) -> list[Any]:
        return [(name, _value(vars(module).get(name, NotRepeated))) for name in sorted(names.difference(TABLES))]

    with torch._C.DisableTorchFunction():  # else attributes of tensors pass through all modes
        every = layer.named_modules()
        return [(name, type(one), tensors(one), values(one, read.get(name, set()))) for name, one in every]


def _value(value: Any) -> Any:
    """Equal for equal plain data and for the same object."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return type(value), [_value(item) for item in value]
    if isinstance(value, dict):
        return type(value), [(_value(key), _value(item)) for key, item in value.items()]
    return (type(value), value) if isinstance(value, PLAIN) else id(value)


def _state(layer: nn.Module, tensors: Sequence[Tensor]) -> object:
    """What a forward may change beside what it returns."""
    with torch._C.DisableTorchFunction():
        own = (*tensors, *layer.parameters(), *layer.buffers())
        return [_value(vars(module)) for module in layer.modules()], [tensor._version for tensor in own]


@contextmanager
def reading(read: dict[int, set[str]]) -> Iterator[None]:
    """Note which attributes of modules are read, by the id of the table of attributes."""

    def get(module: Any, name: str) -> Any:
        read.setdefault(id(object.__getattribute__(module, "__dict__")), set()).add(name)
        return object.__getattribute__(module, name)

    nn.Module.__getattribute__ = get  # type: ignore[method-assign]
    try:
        yield
    finally:
        del nn.Module.__getattribute__


class _Nodes:
    """The nodes of a traced layer between its notes."""

    def __init__(self, begin: fx.Node, end: fx.Node) -> None:
        self.path, self.arguments, self.results = str(begin.args[1]), begin.args[2], end.args[2]
        self.begin, self.end, node = begin, end, begin.next
        self.inside = list[fx.Node]()
        while node is not end:
            if node.op != "call_function" or node.target is NOTE:
                raise NotRepeated
            self.inside.append(node)
            node = node.next

    def outside(self, path: str, arguments: Any, placeholders: Mapping[str, fx.Node]) -> dict[fx.Node, fx.Node]:
        """The values from outside that the layer `path` takes, called with `arguments`, where this one takes others."""
        if len(self.arguments) != len(arguments):  # type: ignore[arg-type]
            raise NotRepeated
        taken = dict(zip(self.arguments, arguments, strict=True))  # type: ignore[arg-type]
        for name, node in placeholders.items():
            if name.startswith(f"{self.path}."):
                if (other := placeholders.get(path + name.removeprefix(self.path))) is None:
                    raise NotRepeated
                taken.setdefault(node, other)
        return taken

    def repeated_by(self, other: _Nodes, placeholders: Mapping[str, fx.Node]) -> bool:
        """Whether another layer was traced to the same nodes."""
        known = self.outside(other.path, other.arguments, placeholders)

        def here(value: Any) -> Any:
            return fx.map_arg(value, lambda node: known.get(node, node))

        for one, its in zip(self.inside, other.inside, strict=False):
            calls = (its.target, its.args, its.kwargs, _looks(its))
            if (one.target, here(one.args), here(one.kwargs), _looks(one)) != calls:
                return False
            known[one] = its
        return len(self.inside) == len(other.inside) and here(self.results) == other.results

    def copied(self, graph: fx.Graph, note: fx.Node, placeholders: Mapping[str, fx.Node]) -> Iterator[fx.Node]:
        """Copies in place of a layer that was not traced, by its note."""
        path = str(note.args[1])
        known = self.outside(path, note.args[2], placeholders)
        for node in self.inside:
            with graph.inserting_before(note):
                copy = known[node] = graph.node_copy(node, lambda one: known.get(one, one))
            stack = node.meta.get("nn_module_stack") or {}
            called = {key: (_moved(of, self.path, path), *others) for key, (of, *others) in stack.items()}
            copy.meta = node.meta | {"nn_module_stack": called}
            yield copy
        for item in list(note.users):
            result = self.results[item.args[1]]  # type: ignore[index]
            item.replace_all_uses_with(known.get(result, result))  # type: ignore[arg-type]
            graph.erase_node(item)


def _looks(node: fx.Node) -> list[Look]:
    return [_look(leaf) for leaf in tree_leaves(node.meta.get("val"))]


def _moved(path: str, before: str, after: str) -> str:
    """The path of a module inside of the layer `before`, in the layer `after`."""
    return after + path.removeprefix(before) if f"{path}.".startswith(f"{before}.") else path


def _lines(node: fx.Node) -> list[tuple[str, str]]:
    """The lines outside of libraries from which a layer was called."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    return [(file, line) for file, line in frames if not in_library(file)]


class _Expansion:
    """Replaces notes of a graph, and gives all nodes the names of a complete capture: what a node calls, and a number
    that grows with each of its calls."""

    def __init__(self, graph: fx.Graph, placeholders: Mapping[str, fx.Node]) -> None:
        self.graph, self.placeholders = graph, placeholders
        self.names = {node: _numbered(node.name) for node in graph.nodes if node.op == "call_function"}
        self.origin: dict[fx.Node, tuple[fx.Node, _Nodes]] = {}
        self.taken: dict[_Nodes, Counter[str]] = {}
        """Names that a layer takes."""
        self.of: dict[fx.Node, _Nodes] = {}
        """The traced layer by the notes of its repetitions, and by its own end."""

    def expand(self, notes: Sequence[fx.Node]) -> None:
        """Replace the repetitions of one list. Raises NotRepeated where traced layers differ."""
        ends = [note for note in notes if note.args[0] != "again"]
        kinds = [(note.args[0], note.args[1] == ends[at - at % 2].args[1]) for at, note in enumerate(ends)]
        if kinds != [("begin", True), ("end", True)] * 3:  # not all are called, or one within another
            raise NotRepeated
        first, second, last = (_Nodes(*pair) for pair in zip(ends[::2], ends[1::2], strict=True))
        if not all(second.repeated_by(other, self.placeholders) for other in (first, last)):
            raise NotRepeated
        self.taken[second] = self._taken(first, second)
        self.of[second.end] = second
        for note in notes:
            if note.args[0] == "again":
                if _lines(note) != _lines(second.begin):
                    raise NotRepeated
                self.of[note] = second
                copies = second.copied(self.graph, note, self.placeholders)
                self.origin |= {copy: (node, second) for node, copy in zip(second.inside, copies, strict=True)}

    def _taken(self, first: _Nodes, second: _Nodes) -> Counter[str]:
        """Names that a layer takes: from its first to the first of the next, but for those between the layers."""
        before, here = (dict(self.names[one] for one in reversed(layer.inside)) for layer in (first, second))
        if before.keys() != here.keys():
            raise NotRepeated
        taken = Counter({name: number - before[name] for name, number in here.items()})
        between = first.end
        while between is not second.begin:
            if between in self.names:
                taken[self.names[between][0]] -= 1
            between = between.next
        return taken

    def rename(self) -> None:
        """Give all nodes their names."""
        moved, seen = Counter[str](), Counter[str]()
        at: dict[_Nodes, Counter[str]] = {}
        names = self.graph._graph_namespace = fx.graph._Namespace()
        for node in self.graph.nodes:
            wanted = node.name
            if node in self.origin:
                template, layer = self.origin[node]
                kind, number = self.names[template]
                since = moved[kind] + seen[kind] - at[layer][kind] + self.taken[layer][kind]
                wanted = _name(kind, number + since)
            elif node in self.of:
                layer = self.of[node]
                if node is layer.end:
                    at[layer] = moved + seen
                else:
                    moved += self.taken[layer]
            elif node in self.names:
                kind, number = self.names[node]
                seen[kind] += 1
                wanted = _name(kind, number + moved[kind])
            node.name = names.create_name(wanted, node)


def _numbered(name: str) -> tuple[str, int]:
    """`add`, 2 for the node `add_2`."""
    found = NUMBERED.fullmatch(name)
    assert found is not None
    return found[1], int(found[2] or 0)


def _name(kind: str, number: int) -> str:
    return f"{kind}_{number}" if number else kind
