"""Branches on values: an `if`, a `while` or an early `break` whose predicate is a tensor, in a captured graph: both
sides, and a choice between their results.

The forward of a module that branches is traced once for every sequence of answers. What these paths have in common
stands in the graph once: all up to a predicate, and all that is equal again at their ends, behind choices between what
differs. Both sides are computed. A side that is not taken returns no gradient, not even where it divides by the zero
that the predicate excludes: what it reads from outside passes `where(predicate, x, x.detach())`. What it writes in
place is written back. Attributes that the sides set to different tensors are chosen, too.

Invariant: for all values the graph computes what the module computes. What cannot be chosen (results of different
shapes, Python values that differ, statistics of a batch norm, random numbers, parameters that one side alone trains,
which torch would leave without a gradient, or all of them, where a side returns a constant that requires one) is not
captured so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from strategies.capture.constants import answered, traced
from strategies.capture.masked import Selections
from strategies.capture.nodes import (
    WHENCE,
    beneath_tracing,
    call,
    draws,
    fakes,
    floating,
    forwards_wrapped,
    inferred,
    op_of,
    proxy_mode,
    replaced,
    shaped_by_values,
)
from strategies.capture.python_state import INTERNAL, PythonState, changed
from strategies.core.errors import StrategyError
from strategies.rules.registry import PLAIN

aten = torch.ops.aten
MOST_PATHS = 16
"""Sequences of answers of one call."""
CHOICE = "choice"
"""What the node of a choice between results of two sides says of itself."""
GATE = "gate"
"""Likewise of one by which a side that is not taken returns no gradient, or writes nothing."""
NONE: Mapping[fx.Node, bool] = MappingProxyType({})
Sides = frozenset[tuple[fx.Node, bool]]
"""The truths of branches, and which side of each is taken."""
STATISTICS = frozenset({"batch_norm", "instance_norm"})
"""Operators that write to buffers unseen, in training."""
ASSIGNING = frozenset(
    "copy_ fill_ index_copy_ index_fill_ index_put_ masked_fill_ masked_scatter_ scatter_ zero_".split()
)
"""Operators that write what they are given: no derivative of what they replace is multiplied with the gradient, which
would be NaN where that is infinite."""
HARMLESS = (*PLAIN, torch.dtype, torch.device, torch.Size, nn.Module, FunctionType, type)
"""Arguments that a forward does not change."""
GRADIENTS = torch._C._set_grad_enabled
EXITS = torch.amp.autocast_mode._exit_autocast
AUTOCAST = frozenset({torch.amp.autocast_mode._enter_autocast, EXITS})


OTHERWISE = (
    "Use torch.where, a Python number or an unsaved buffer (persistent=False) for a constant, or decide in a child "
    "module or the loss (loss.target): what takes and returns tensors of fixed shapes is one operator"
)
REFUSED = (
    f"all sides of a branch (at most {MOST_PATHS} paths) must return tensors of equal shapes, draw no random numbers, "
    f"change tensors alone and train the same parameters. {OTHERWISE}"
)
DRAWING = (
    "one side draws random numbers, as a dropout does, so a device that takes another side would number later draws "
    "otherwise. Draw before the branch, or compute both sides and choose: x = torch.where(keep, layer(x), x)"
)
TRAINING = (
    "one side alone trains some of the parameters, as where a layer is dropped at random, and torch leaves these "
    "without gradients in other steps. Compute both sides and choose, x = torch.where(keep, layer(x), x), or set the "
    "rate at which layers are dropped to 0 (layerdrop=0.0)"
)
STATISTICAL = (
    "one side alone writes the running statistics of a norm. Call the norm on both, and choose: "
    "x = torch.where(keep, norm(x), x)"
)
RESULTS = f"its sides return or assign tensors of different shapes or dtypes, or different Python values. {OTHERWISE}"
PATHS = f"its branches have more than {MOST_PATHS} paths. {OTHERWISE}"


class NotChosen(BaseException):
    """Modules of this class cannot be captured with both sides. Not an Exception, which a forward may handle."""

    def __init__(self, owner: type, why: str) -> None:
        super().__init__(owner)
        self.owner, self.why = owner, why


class _Different(Exception):
    """Two paths differ in what no operator chooses."""

    def __init__(self, why: str = REFUSED) -> None:
        super().__init__(why)
        self.why = why


class Branches:
    """The modules in `root` whose branches are captured, by their classes."""

    def __init__(self, root: nn.Module, selections: Selections) -> None:
        self.root, self.chosen, self.refused = root, set[type](), set[type]()
        self.known = {id(vars(module)): type(module) for module in root.modules()}
        """By what the exporter's stand-ins for a module share with it."""
        self.running: list[_Path] = []
        self.selections = selections
        """What masks have selected on the way."""
        self.why = REFUSED
        """Why the last of `refused` is there, and what would be right."""

    def choose(self, modules: Sequence[nn.Module]) -> bool:
        """Choose the class of the first of these modules, which branches, unless it was tried."""
        owner = next((self.known[id(vars(one))] for one in modules if id(vars(one)) in self.known), None)
        if owner is None or owner in self.chosen | self.refused:
            return False
        self.chosen.add(owner)
        return True

    def refuse(self, owner: type, why: str = REFUSED) -> None:
        self.chosen.discard(owner)
        self.refused.add(owner)
        self.why = why

    def refuse_others(self, exported: torch.export.ExportedProgram, training: bool) -> bool:
        """Refuse the classes of which an exported graph has what the module does not do; whether there are any: in
        training a parameter that one side alone trains, and a choice that is a copy where the module has the tensor
        itself, which somebody writes before another reads it."""
        parameters, modules = exported.graph_signature.inputs_to_parameters, dict(self.root.named_modules())
        nodes = list(exported.graph.nodes) if self.chosen else []
        choices = (node for node in nodes if CHOICE in node.meta)
        wrong = [choice for choice in choices if _shows_writes(choice, nodes[nodes.index(choice) + 1 :])]
        paths, trains = _gradient_paths(nodes) if training else {}, False
        for node in paths:
            name = parameters.get(node.name)
            if name is not None and self.root.get_parameter(name).requires_grad:
                if paths[node] and not _holds_one(paths[node]):  # torch leaves it without a gradient then
                    truths, trains = {truth for path in paths[node] for truth, _ in path}, True
                    wrong += (one for one in nodes if {GATE, CHOICE} & one.meta.keys() and one.args[0] in truths)
        stacks = (node.meta.get("nn_module_stack", {}).values() for node in wrong)
        found = {type(modules[path]) for stack in stacks for path, _ in stack} & self.chosen
        for owner in found:
            self.refuse(owner, TRAINING if trains else REFUSED)
        return bool(found)

    @contextmanager
    def as_choices(self) -> Iterator[None]:
        """Export within this context. Raises NotChosen within."""
        if not self.chosen:
            yield
            return
        truth: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__

        def chosen(symbol: torch.SymBool) -> bool:
            try:
                return truth(symbol)
            except GuardOnDataDependentSymNode:
                if not self.running or symbol.node.shape_env.size_like & symbol.node.expr.free_symbols:  # a shape
                    raise
                return self.running[-1].answer(torch.full((), symbol, dtype=torch.bool))  # type: ignore[call-overload]

        with (
            forwards_wrapped(self.chosen, self._watched),
            _Predicates(self.running),
            replaced(torch.SymBool, "__bool__", chosen),
        ):
            yield

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            tracing = proxy_mode()
            if tracing is None or id(vars(module)) not in self.known:
                return forward(module, *args, **kwargs)
            try:
                return self._traced(module, forward, (args, kwargs), tracing.tracer)
            except _Different as error:
                raise NotChosen(self.known[id(vars(module))], error.why) from error

        return call

    def _traced(self, module: nn.Module, forward: Callable[..., Any], given: Any, tracer: Any) -> Any:
        """What `forward` returns, chosen among what it returns for all sequences of answers."""
        before, paths, answers = _Attributes(module), list[_Path](), list[bool]()
        selected = self.selections.now()
        arguments, structure = tree_flatten(given)
        while True:
            path = _Path(answers, tracer)
            paths.append(path)
            self.running.append(path)
            try:
                args, kwargs = tree_unflatten(arguments, structure)  # of its own lists and dicts
                returned = forward(module, *args, **kwargs)
            except (_Different, GuardOnDataDependentSymNode, StrategyError):
                # of a module that is to be chosen itself, or refused
                raise
            except Exception as error:
                if path.predicates:
                    raise _Different from error
                raise
            finally:
                self.running.pop()
            path.end(returned, before)
            now = tree_flatten((args, kwargs))[0]
            unchanged = len(now) == len(arguments) and all(map(operator.is_, now, arguments))
            harmless = all(isinstance(leaf, (Tensor, *HARMLESS)) for leaf in arguments)
            if path.predicates and not (unchanged and harmless):
                raise _Different
            answers = list(path.answers)
            while answers and not answers[-1]:
                answers.pop()
            if not answers:
                break
            if len(paths) == MOST_PATHS:
                raise _Different(PATHS)
            answers[-1] = False
            before.restore()
            self.selections.restore(selected)
        if len(paths) == 1:
            return paths[0].returned
        if any(path.trains_nothing for path in paths):
            raise _Different
        self.selections.restore(selected)
        return _Merger(tracer, paths, before).result()


class _Predicates(TorchFunctionMode):
    """Chooses a side where Python reads the truth of a tensor whose values are not known."""

    def __init__(self, running: list[_Path]) -> None:
        super().__init__()
        self.running = running

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__bool__ and self.running and traced(args[0])[0] is not None and args[0].numel() == 1:
            if (answer := answered(function, args[0])) is not None:
                return answer[0]
            return self.running[-1].answer(args[0].detach().reshape(()) != 0)
        if self.running and (function is Tensor.requires_grad_ or (kwargs or {}).get("requires_grad")):
            self.running[-1].has_learning_constants = True
        return function(*args, **(kwargs or {}))


class _Attributes:
    """What the modules in `module` have in attributes and buffers, when this is made."""

    def __init__(self, module: nn.Module) -> None:
        self.root = nn.Sequential(module)  # a path of its own for each module
        self.tables = [(part, table, dict(table)) for part in module.modules() for table in (vars(part), part._buffers)]
        self.state = PythonState(self.root)

    def restore(self) -> None:
        for _, table, before in self.tables:
            for name in [name for name in table if name not in before]:
                del table[name]
            table.update(before)
        self.state.restore()

    def changes(self) -> dict[tuple[int, str], Any]:
        """New values of attributes and buffers, by the number of a table and a name. Raises _Different where more than
        these has changed."""
        found = {
            (number, name): table.get(name)
            for number, (_, table, before) in enumerate(self.tables)
            for name in {**before, **table}
            if name not in INTERNAL and table.get(name) is not before.get(name)
        }
        for (path, _, place), value in changed(self.state.values, PythonState(self.root).values).items():
            if (place or not path) and isinstance(value, Tensor):
                raise _Different
        return found

    def outside(self) -> object:
        """Python values that are no attributes by themselves."""
        values = PythonState(self.root).values
        return {key: value for key, value in values.items() if (key[2] or not key[0]) and type(value) in PLAIN}

    def assign(self, values: dict[tuple[int, str], Any]) -> None:
        for (number, name), value in values.items():
            part, table, before = self.tables[number]
            table[name] = before.get(name)  # what those who watch assignments find
            setattr(part, name, value)


@dataclass
class _Path:
    """One run of a forward: the nodes that it adds to the graph."""

    given: Sequence[bool]
    tracer: Any
    answers: list[bool] = field(default_factory=list)
    predicates: list[fx.Node] = field(default_factory=list)
    """What each branch reads, in order."""
    gradients: list[bool] = field(default_factory=list)
    """Whether gradients were on at each."""
    has_learning_constants: bool = False
    """Whether a tensor was made that requires a gradient."""

    def __post_init__(self) -> None:
        self.begin = next(iter(reversed(self.tracer.graph.nodes)))  # of torch 2.11 no iterator

    def answer(self, truth: Tensor) -> bool:
        node = _node(self.tracer, truth)
        if node is None or len(self.predicates) == MOST_PATHS:
            raise _Different(REFUSED if node is None else PATHS)
        self.answers.append(self.given[len(self.predicates)] if len(self.predicates) < len(self.given) else True)
        self.predicates.append(node)
        self.gradients.append(torch.is_grad_enabled())
        return self.answers[-1]

    def end(self, returned: Any, before: _Attributes) -> None:
        self.returned = returned
        self.leaves, self.structure = tree_flatten(returned)
        learned = filter(floating, self.leaves if self.has_learning_constants else ())
        self.trains_nothing = not all(_computed(_node(self.tracer, leaf)) for leaf in learned)
        self.changes, self.outside = before.changes(), before.outside()
        nodes, node = list[fx.Node](), self.begin.next
        while node.op != "root":
            nodes.append(node)
            node = node.next
        for one in reversed(nodes):  # of what masks select, where it was computed without it (`masked`)
            if not one.users and (shaped_by_values(one) or _of_sizes(one)):
                nodes.remove(one)
                self.tracer.graph.erase_node(one)
        erased = any(given._erased for one in nodes for given in one.all_input_nodes)  # a size in another path
        if self.predicates and (erased or any(map(shaped_by_values, nodes))):
            raise _Different
        self.segments, start = list[list[fx.Node]](), 0
        for one in self.predicates:
            end = nodes.index(one, start) + 1 if one in nodes[start:] else start  # read twice
            self.segments.append(nodes[start:end])
            start = end
        self.segments.append(nodes[start:])


class _Merger:
    """Several paths of one call, as one."""

    def __init__(self, tracer: Any, paths: Sequence[_Path], before: _Attributes) -> None:
        self.tracer, self.graph, self.paths, self.before = tracer, tracer.graph, paths, before
        self.same: dict[fx.Node, fx.Node] = {}
        """What stands for a node that is no longer in the graph."""
        self.memory: dict[int | None, int | None] = {}
        """What stands for the memory of such a node."""

    def result(self) -> Any:
        first, keys = self.paths[0], dict.fromkeys(key for path in self.paths for key in path.changes)
        if any(path.structure != first.structure or path.outside != first.outside for path in self.paths):
            raise _Different(RESULTS)
        for path in self.paths:
            own = [path.changes.get(key, self.before.tables[key[0]][2].get(key[1])) for key in keys]
            path.leaves = [*path.leaves, *own]
        _, leaves = self._merged(self.paths, 0)
        self._retarget()
        count = len(leaves) - len(keys)
        self.before.restore()
        self.before.assign(dict(zip(keys, leaves[count:], strict=True)))
        return tree_unflatten(leaves[:count], first.structure)

    def _merged(self, paths: Sequence[_Path], depth: int) -> tuple[list[fx.Node], list[Any]]:
        """The nodes of paths from their segment number `depth` on, and what they return."""
        first = paths[0]
        if len(paths) == 1:
            return list(chain(*first.segments[depth:])), first.leaves
        for other in paths[1:]:
            self._drop(other.segments[depth], first.segments[depth])
        yes = self._merged([path for path in paths if path.answers[depth]], depth + 1)
        no = self._merged([path for path in paths if not path.answers[depth]], depth + 1)
        nodes, leaves = self._joined(self._now(first.predicates[depth]), first.gradients[depth], yes, no)
        return first.segments[depth] + nodes, leaves

    def _now(self, node: fx.Node) -> fx.Node:
        while node in self.same:
            node = self.same[node]
        return node

    def _memory(self, node: fx.Node) -> int | None:
        """The memory of its value, as it was before what stands for others was found."""
        return self.memory.get(memory := _memory(node), memory)

    def _drop(self, nodes: Sequence[fx.Node], others: Sequence[fx.Node]) -> None:
        """Let `others` stand for `nodes`, which compute the same."""
        if [node.target for node in nodes if node.op != "get_attr"] != [
            node.target for node in others if node.op != "get_attr"
        ]:
            raise _Different
        for node, other in zip(nodes, others, strict=True):
            node.replace_all_uses_with(other)
            self.same[node] = other
            if _memory(node) != _memory(other):
                self.memory[_memory(node)] = self._memory(other)
        for node in reversed(nodes):
            self.graph.erase_node(node)

    def _joined(
        self, truth: fx.Node, gradients: bool, yes: tuple[list[fx.Node], list[Any]], no: tuple[list[fx.Node], list[Any]]
    ) -> tuple[list[fx.Node], list[Any]]:
        """Two sides as one: each up to where they are equal, choices, the equal part of the second, and what they
        return. `gradients` says whether these were on at the branch."""
        (left, first), (right, second) = yes, no
        count = self._equal_at_end(left, right)
        left, removed = left[: len(left) - count], left[len(left) - count :]
        right, common = right[: len(right) - count], right[len(right) - count :]
        pairs, choices = dict(zip(removed, common, strict=True)), dict[tuple[fx.Node, fx.Node], fx.Node]()
        for one, other in pairs.items():
            operands = list[fx.Node]()
            for given, own in zip(_operands(one), _operands(other), strict=True):
                choose = given is not own and pairs.get(given) is not own
                if choose and (given, own) not in choices:
                    with self.graph.inserting_before(common[0]):
                        choices[given, own] = self._made(aten.where.self, (truth, given, own), other)
                    choices[given, own].meta[CHOICE] = True
                operands.append(choices[given, own] if choose else own)
            _set_operands(other, operands)
        self._drop(removed, common)
        self._guard(left, truth, True, gradients)
        self._guard(right, truth, False, gradients)
        nodes = [*left, *right, *choices.values(), *common]
        leaves = [self._leaf(truth, *pair, nodes) for pair in zip(first, second, strict=True)]
        return nodes, leaves

    def _equal_at_end(self, left: Sequence[fx.Node], right: Sequence[fx.Node]) -> int:
        """How many nodes at the ends of two sides compute the same of the choice."""
        count = 0
        while count < min(len(left), len(right)) and self._equivalent(left[-1 - count], right[-1 - count]):
            count += 1
        while count:
            ends = left[len(left) - count :], right[len(right) - count :]
            pairs = dict(zip(*ends, strict=True))
            inside = set(ends[0]) | set(ends[1])
            rewritten = {self._memory(one) for one in map(_written, inside) if one is not None}
            bad = [
                number
                for number, pair in enumerate(pairs.items())
                for given, own in zip(*map(_operands, pair), strict=True)
                if given is not own
                and pairs.get(given) is not own
                and (
                    not inside.isdisjoint((given, own))
                    or not _choosable(given, own)
                    or not rewritten.isdisjoint((self._memory(given), self._memory(own)))
                )
            ]
            if not bad:
                return count
            count -= bad[-1] + 1
        return 0

    def _equivalent(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two nodes are one operator with equal arguments but for tensors."""
        if (one.op, len(_operands(one))) != (other.op, len(_operands(other))) or one.target in AUTOCAST:
            return False
        if one.op == "get_attr":
            first, second = (getattr(self.tracer.root, str(node.target)) for node in (one, other))
            if any(not isinstance(value, Tensor) or isinstance(value, FakeTensor) for value in (first, second)):
                return False
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return bool(first.dtype == second.dtype) and torch.equal(first, second)
        leaves, others = ([(type(leaf), leaf) for leaf in _plain(node)] for node in (one, other))
        return one.target == other.target and leaves == others and _looks(one) == _looks(other)

    def _guard(self, side: list[fx.Node], truth: fx.Node, taken: bool, gradients: bool) -> None:
        """Let a side that is not taken return no gradients, write nothing, and end as it began."""
        own, undone = set(side), list[tuple[fx.Node, fx.Node]]()
        if any(map(draws, side)):
            raise _Different(DRAWING)
        for node in list(side):
            if op_of(node) in STATISTICS and len(node.args) > 5 and isinstance(node.args[3], fx.Node) and node.args[5]:
                raise _Different(STATISTICAL)
            written, operands = _written(node), list[fx.Node]()
            if written is not None and not self._is_outside(written, own):
                written = None
            elif written is not None:
                if floating(written.meta["val"]) and op_of(node) not in ASSIGNING and not self._is_state(written):
                    raise _Different
                with self.graph.inserting_before(node):
                    undone.append((written, self._made(aten.clone.default, (written,), node)))
                side.insert(side.index(node), undone[-1][1])
            learned = any(map(floating, tree_flatten(node.meta.get("val"))[0]))
            views = [given for given in _operands(node) if given not in own and self._shows(node, given)]
            if views:  # of values outside, as which they are read and written
                own.discard(node)
            for given in _operands(node):
                passes = learned and floating(given.meta.get("val")) and given.target is not aten.detach.default
                if given in own or given in views or not passes:
                    operands.append(given)
                    continue
                with self.graph.inserting_before(node):
                    detached = self._made(aten.detach.default, (given,), node)
                    gate = self._made(aten.where.self, _sides(truth, taken, given, detached), node)
                    gate.meta[GATE] = True
                operands.append(gate)
                position = side.index(node)
                side[position:position] = [detached, gate]
            _set_operands(node, operands)
        for written, old in reversed(undone):
            with self.graph.inserting_after(side[-1]):
                kept = self._made(aten.where.self, _sides(truth, taken, written, old), side[-1])
                kept.meta[GATE] = True
            with self.graph.inserting_after(kept):
                side += [kept, self._made(aten.copy_.default, (written, kept), kept)]
        borders = [node.target for node in side if node.target in AUTOCAST]
        if borders[:1] == [EXITS] or borders.count(EXITS) * 2 != len(borders):
            raise _Different
        if taken and [gradients, *(node.args[0] for node in side if node.target is GRADIENTS)][-1] is not gradients:
            with self.graph.inserting_after(side[-1]):
                border = self.graph.call_function(GRADIENTS, (gradients,))
            border.meta = {name: side[-1].meta[name] for name in WHENCE if name in side[-1].meta} | {"val": None}
            side.append(border)

    def _shows(self, node: fx.Node, given: fx.Node) -> bool:
        """Whether the result of a node shows memory of an operand."""
        return node.target is operator.getitem or self._memory(node) == self._memory(given)

    def _is_outside(self, written: fx.Node, own: set[fx.Node]) -> bool:
        """Whether memory that is written is that of a node of no side's own."""
        memory = self._memory(written)
        return any(self._memory(node) == memory for node in self.graph.nodes if node not in own)

    def _is_state(self, written: fx.Node) -> bool:
        """Whether memory is that of a buffer or another input."""
        return any(self._memory(node) == self._memory(written) for node in self.graph.find_nodes(op="placeholder"))

    def _made(self, target: Any, args: Any, serves: fx.Node) -> fx.Node:
        with _disable_current_modes(), beneath_tracing():
            return call(self.graph, serves, target, *args)

    def _leaf(self, truth: fx.Node, yes: Any, no: Any, nodes: list[fx.Node]) -> Any:
        """The result for a leaf of two sides; a choice is added to their `nodes`."""
        if yes is no or (type(yes) in PLAIN and type(yes) is type(no) and yes == no):
            return yes
        one, other = (_node(self.tracer, leaf) if isinstance(leaf, Tensor) else None for leaf in (yes, no))
        if one is None or other is None:
            raise _Different(RESULTS)
        one, other = self._now(one), self._now(other)
        if one is other and yes.requires_grad <= no.requires_grad:
            return no
        if one is not other:
            if not _choosable(one, other):
                raise _Different(RESULTS)
            with self.graph.inserting_after((nodes or [truth])[-1]):
                one = self._made(aten.where.self, (truth, one, other), (nodes or [truth])[-1])
            one.meta[CHOICE] = True
            nodes.append(one)
        with beneath_tracing():
            made = torch.where(torch.ones((), dtype=torch.bool, device=no.device), yes, no)
        track_tensor_tree(made, fx.Proxy(one, self.tracer), constant=None, tracer=self.tracer)
        return made

    def _retarget(self) -> None:
        """Let traced tensors whose nodes are gone belong to those that stand for them."""
        for proxy in self.tracer.tensor_tracker.values():
            proxy.proxy.node = self._now(proxy.proxy.node)
        with _disable_current_modes(), beneath_tracing():
            for node in self.graph.nodes:
                if node.op == "call_function" and _memory(node) in self.memory:  # which shows what it is a view of
                    node.meta["val"] = inferred(self.graph, node.target, node.args, node.kwargs)


def _node(tracer: Any, tensor: Tensor) -> fx.Node | None:
    proxy = tracer.unwrap_proxy(tensor)
    return proxy.node if isinstance(proxy, fx.Proxy) else None


def _computed(node: fx.Node | None) -> bool:
    """Whether a value depends on a parameter or an argument."""
    seen, waiting = set[fx.Node](), [] if node is None else [node]
    while waiting:
        one = waiting.pop()
        if one.op == "placeholder":
            return True
        waiting += [given for given in one.all_input_nodes if given not in seen]
        seen |= {*one.all_input_nodes}
    return False


def _of_sizes(node: fx.Node) -> bool:
    """Whether a node returns the size of a tensor whose shape depends on values, or compares or combines such."""
    number = isinstance(node.meta.get("val"), (bool, torch.SymBool, torch.SymFloat, torch.SymInt))
    return number and any(one._erased or shaped_by_values(one) or _of_sizes(one) for one in node.all_input_nodes)


def _operands(node: fx.Node) -> list[fx.Node]:
    """The operands of a node, each as often as it occurs."""
    found = list[fx.Node]()
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _plain(node: fx.Node) -> list[Any]:
    """The arguments of a node that are no operands, and the structure of all of them."""
    leaves, structure = tree_flatten(fx.map_arg((node.args, node.kwargs), lambda _: None))
    return [*leaves, structure]


def _set_operands(node: fx.Node, operands: Sequence[fx.Node]) -> None:
    rest = iter(operands)
    node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(rest))


def _sides(truth: fx.Node, taken: bool, this: fx.Node, other: fx.Node) -> tuple[fx.Node, ...]:
    """What a choice takes to be `this` on the side of `taken`."""
    return (truth, this, other) if taken else (truth, other, this)


def _looks(node: fx.Node) -> list[Any]:
    values = tree_flatten(node.meta.get("val"))[0]
    return [(one.shape, one.dtype) if isinstance(one, Tensor) else type(one) for one in values]


def _choosable(one: fx.Node, other: fx.Node) -> bool:
    values = one.meta.get("val"), other.meta.get("val")
    return all(isinstance(value, Tensor) for value in values) and _looks(one) == _looks(other)


def _written(node: fx.Node) -> fx.Node | None:
    """The operand that an operator writes to."""
    if not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable:
        return None
    for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(given, fx.Node):
            return given
    return None


def _memory(node: fx.Node) -> int | None:
    value = next(fakes(node.meta.get("val")), None)
    return None if value is None else value.untyped_storage()._cdata


def _shows_writes(choice: fx.Node, later: Sequence[fx.Node]) -> bool:
    """Whether a choice is written and one of what it was chosen from is read afterwards, or the other way
    round."""
    own, others = {_memory(choice)}, {_memory(given) for given in _operands(choice)[1:]}
    for position, node in enumerate(later):
        written = _written(node)
        if written is None or _memory(written) not in own | others:
            continue
        stale = others if _memory(written) in own else own
        if any(_memory(given) in stale for reader in later[position + 1 :] for given in _operands(reader)):
            return True
    return False


def _gradient_paths(nodes: Sequence[fx.Node]) -> dict[fx.Node, set[Sides]]:
    """For each node of a graph, the sides that must be taken along each path of gradients from an output to the node.
    Writes to memory reach all that reads it afterwards."""
    found: dict[fx.Node, set[Sides]] = {}
    read: dict[int | None, set[Sides]] = {}

    def through(given: fx.Node, user: fx.Node) -> set[Sides]:
        if user.op == "output":
            return {frozenset()} if floating(given.meta.get("val")) else set()
        learned = any(map(floating, tree_flatten(user.meta.get("val"))[0]))
        if user.target is aten.detach.default or not learned:
            return set()
        if GATE not in user.meta and CHOICE not in user.meta:
            return found[user]
        truth, first, second = user.args
        sides: list[tuple[Any, bool]] = [
            (truth, side) for side, one in ((True, first), (False, second)) if one is given
        ]
        return {path | {side} for side in sides for path in found[user] if (side[0], not side[1]) not in path}

    for node in reversed(nodes):
        paths = set[Sides]().union(*(through(node, user) for user in node.users))
        if (written := _written(node)) is not None:
            paths |= read.get(_memory(written), set())
        found[node] = {path for path in paths if not any(other < path for other in paths)}
        for given in _operands(node):
            read.setdefault(_memory(given), set()).update(through(given, node))
    return found


def _holds_one(paths: Iterable[Iterable[tuple[Any, bool]]], decided: Mapping[fx.Node, bool] = NONE) -> bool:
    """Whether all sides of one of these paths are taken, whatever those truths are that are not `decided`."""
    left = list[list[tuple[fx.Node, bool]]]()
    for path in paths:
        known = [(_chosen(truth, decided), taken) for truth, taken in path]
        if all(decided.get(truth, taken) is taken for truth, taken in known):
            left.append([one for one in known if one[0] not in decided])
    if not left or [] in left:
        return bool(left)
    truth: Any = left[0][0][0]
    while CHOICE in truth.meta:
        truth = _chosen(truth.args[0], decided)
    return all(_holds_one(left, {**decided, truth: side}) for side in (True, False))


def _chosen(node: Any, decided: Mapping[fx.Node, bool]) -> fx.Node:
    """What a choice is by truths that are decided."""
    while CHOICE in node.meta and (truth := _chosen(node.args[0], decided)) in decided:
        node = node.args[1 if decided[truth] else 2]
    return node  # type: ignore[no-any-return]
