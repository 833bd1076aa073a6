"""Questions of a forward about values: what it is answered while it is traced.

A tensor that is computed from Python numbers, literals and constant buffers alone has the same values in every step:
the operators behind it run for once, as they stand in the graph so far, and the answer is exact. A tensor that depends
on the batch, on parameters or on other buffers has no values here, but integers of the batch may (`sizes_of_batch`):
every step compares what they answer. A comparison of what `torch.rand` draws with a rate of 0 or 1 has one answer (that
of exactly 0 with a rate of 0, one draw in 2^24, is left out). What has as many elements as values say
(repeat_interleave, a mask as index) becomes a literal where these are known, and so does a size that is a tensor. Of a
tensor or a number without values only the question of an `assert`, or of an `if` that comes to nothing but to raise
what no `try` around it catches, is answered, by whatever goes on: the graph holds for every batch for which the model
does not raise.
Invariant: no answer decides what a later step would decide differently.
"""

from __future__ import annotations

import ast
import linecache
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.capture.nodes import fakes, in_library, op_of, proxy_mode
from strategies.capture.repeated_modules import NOTE, NotRepeated

QUESTIONS: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.__bool__: bool,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__index__: Tensor.__index__,
    Tensor.item: Tensor.item,
    Tensor.tolist: Tensor.tolist,
}
SIZED_BY_VALUES = frozenset(
    "repeat_interleave nonzero argwhere unique unique_consecutive masked_select bincount".split()
)
"""Functions whose results have as many elements as values say; and indexing with a mask."""
COUNTING = frozenset("arange linspace zeros ones empty full eye".split())
RESIZING = frozenset(
    "repeat tile expand view reshape split narrow interpolate pad unflatten roll multinomial permute transpose "
    "swapaxes swapdims movedim moveaxis flip select unsqueeze".split()
)
"""Functions that take sizes or dims, RESIZING ones behind a tensor, and ask tensors that are given as such for their
values."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
LARGEST = 2**24
"""Elements of a tensor that is computed for an answer."""
EXPORT = torch.export.export.__code__.co_filename
"""The file whose frames are around all that is traced."""
TRIES: tuple[type[ast.Try], ...] = ast.Try, getattr(ast, "TryStar", ast.Try)
EXITS = frozenset({"exit", "quit", "sys.exit", "os._exit"})
VALUES, HAS_DECIDED = "constant_buffer", "has_decided"
"""What the node of a constant buffer says of itself: the buffer, and that an answer has depended on it."""
BATCH = "entry_of_batch"
"""What the node of an entry of the batch has whose numbers may be read (`sizes_of_batch`)."""
CLASSES = {"one_hot": ("num_classes", 1), "bincount": ("minlength", 2)}
"""Functions that look for the largest of classes where this argument does not say how many there are, and its place."""
DRAWN = ("rand", "rand_like")
LESS = {"lt": True, "le": True, "gt": False, "ge": False}
"""Comparisons, and whether they ask if the first number is the smaller one."""
OF_SHAPES = frozenset("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty".split())
"""Operators that read no value of their first operand."""


def has_values(tensor: Any) -> bool:
    """Whether a traced tensor has the same values in every step."""
    return values_of(tensor) is not None


def traced(tensor: Any) -> tuple[fx.Proxy | None, Any]:
    """What stands for a tensor in the graph that is traced, and the literals of that graph."""
    tracing = proxy_mode()
    proxy = None if tracing is None else tracing.tracer.unwrap_proxy(tensor)
    return (proxy, tracing.tracer.root) if isinstance(proxy, fx.Proxy) else (None, None)


def answered(question: Any, tensor: Tensor) -> tuple[Any] | None:
    """The answer of a traced tensor to one of `QUESTIONS`, or None if its values are not known."""
    if traced(tensor)[0] is None:
        return None
    value = values_of(tensor)
    if value is None and tensor.dtype in INTEGERS:
        value = _compared(tensor)
    if value is not None:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return (QUESTIONS[question](value),)
    if question is Tensor.__bool__ and (likely := _certain(tensor)) is not None:
        return (likely,)
    asks_truth = question is Tensor.__bool__ or (question is Tensor.item and tensor.dtype is torch.bool)
    return (truth,) if asks_truth and (truth := goes_on()) is not None else None


def _certain(tensor: Tensor) -> bool | None:
    """Whether a number drawn between 0 and 1 is above, or below, another, where that is not between these."""
    proxy, _ = traced(tensor)
    node = None if proxy is None else proxy.node
    if node is None or (less := LESS.get(op_of(node))) is None or len(node.args) != 2:
        return None
    drawn, rate = node.args
    if not isinstance(drawn, fx.Node) or op_of(drawn) not in DRAWN or type(rate) not in (int, float):
        return None
    operators = (one.target for one in behind(node, list(node.graph.nodes)))
    if any(isinstance(one, OpOverload) and one._schema.is_mutable for one in operators):
        return None  # it was written since, perhaps through a view
    return None if 0 < rate < 1 else less == (rate >= 1)  # type: ignore[operator]


def literal(function: Any, args: Any, kwargs: Any) -> Any:
    """The results of a function whose shapes values decide, as new literals; None for other functions, and where not
    all of its tensors have the same values in every step."""
    name, indexing = getattr(function, "__name__", ""), function is Tensor.__getitem__
    if not indexing and name not in SIZED_BY_VALUES:
        return None
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not leaves or (indexing and all(leaf.dtype is not torch.bool for leaf in leaves[1:])):
        return None
    if name == "repeat_interleave" and isinstance(kwargs.get("repeats", *args[1:2] or (None,)), int):
        return None
    known: dict[int, Tensor] = {}
    for leaf in leaves:
        if (value := values_of(leaf)) is None:
            return None
        known[id(leaf)] = value
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        args, kwargs = tree_map_only(Tensor, lambda leaf: known[id(leaf)], (args, kwargs))
        results = function(*args, **kwargs)
    device = leaves[0].device
    return tree_map_only(Tensor, lambda one: _as_literal(one, device), results)


def repeated(x: Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Tensor | None:
    """torch.repeat_interleave where it is known how often each row is repeated, as an index; None where it is not."""
    unknown = isinstance(x, Tensor) and isinstance(repeats, Tensor) and values_of(x) is None
    if not unknown or (answer := answered(Tensor.tolist, repeats)) is None:
        return None
    x, dim = (x.flatten(), 0) if dim is None else (x, dim)
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        index = torch.arange(x.shape[dim]).repeat_interleave(torch.tensor(answer[0]))
    return x.index_select(dim, _as_literal(index, x.device))


def _as_literal(value: Tensor, device: torch.device) -> Tensor:
    made = torch.tensor(value.tolist(), dtype=value.dtype, device=device)
    return made if value.numel() else made.reshape(value.shape)  # a list says nothing of dims behind an empty one


def places(function: Any, args: Any) -> tuple[Any, Any]:
    """A function and its arguments; where it takes elements by a mask that is the same in every step, by their
    places, and with numbers for tensors of them in slices."""
    if getattr(function, "__name__", "") == "masked_select" and len(args) == 2:
        tensor, mask = args
        shape = torch.broadcast_shapes(tensor.shape, mask.shape)  # type: ignore[no-untyped-call]
        if (value := values_of(mask)) is not None:
            return Tensor.__getitem__, (tensor.expand(shape), _places(value, shape, mask.device))
    if function not in (Tensor.__getitem__, Tensor.__setitem__):
        return function, args
    tensor, index, *written = args
    parts: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        masking = not written and isinstance(part, Tensor) and part.dtype is torch.bool and part.dim()
        if masking and (value := values_of(part)) is not None:
            parts += _places(value, part.shape, part.device)
        elif isinstance(part, slice):
            parts.append(slice(*map(number, (part.start, part.stop, part.step))))
        else:
            parts.append(part)
    return function, (tensor, parts[0] if len(parts) == 1 and not isinstance(index, tuple) else tuple(parts), *written)


def _places(mask: Tensor, shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        found = mask.expand(shape).nonzero(as_tuple=True)
    return tuple(_as_literal(one, device) for one in found)


def counted(function: Any, args: Any, kwargs: Any) -> Any:
    """`args` and `kwargs` of a function that takes sizes, with numbers for tensors of integers that are the same in
    every step."""
    name = getattr(function, "__name__", "")
    if name not in COUNTING and name not in RESIZING:
        return args, kwargs
    begin = 1 if name in RESIZING else 0
    args, kwargs = (*args[:begin], *tree_map_only(Tensor, number, tuple(args[begin:]))), dict(kwargs or {})
    return args, {key: one if key == "input" else tree_map_only(Tensor, number, one) for key, one in kwargs.items()}


def with_classes(name: str, args: Any, kwargs: Any) -> Any:
    """The keyword arguments of a function of `CLASSES`, with the number of classes that integers of the batch say."""
    key, place = CLASSES[name]
    if name == "one_hot" and args and args[0].dtype != torch.int64:
        raise TypeError(f"one_hot takes int64, not {args[0].dtype}; cast it: labels.long()")  # as torch computes
    proxy, _ = traced(args[0]) if args else (None, None)
    given = args[place] if len(args) > place else kwargs.get(key, 0)
    if proxy is None or given > 0 or all(BATCH not in node.meta for node in proxy.node.graph.nodes):
        return kwargs
    largest = answered(Tensor.item, args[0].max())
    return kwargs if largest is None else {**kwargs, key: largest[0] + 1}


def number(leaf: Any) -> Any:
    """An integer in place of a tensor that has it in every step."""
    single = isinstance(leaf, Tensor) and not leaf.dim() and leaf.dtype in INTEGERS
    return answer[0] if single and (answer := answered(Tensor.item, leaf)) else leaf


def values_of(tensor: Any) -> Tensor | None:
    """The values of a tensor that are the same in every step: of one that is traced, or that a module has as a plain
    attribute and the graph does not have yet."""
    proxy, root = traced(tensor)
    if proxy is not None:
        return _value(proxy.node, root)
    tracing = proxy_mode()
    plain = tracing is not None and type(tensor) is Tensor and not tensor.requires_grad
    return tensor if plain else None


def _compared(tensor: Tensor) -> Tensor | None:
    """The values that integers have in the batch that is captured, with which every step compares its own."""
    proxy, literals = traced(tensor)
    assert proxy is not None
    nodes = list(proxy.node.graph.nodes)
    needed = behind(proxy.node, nodes)
    nodes = [one for one in nodes if one in needed]
    entries = [one.meta[BATCH] for one in nodes if BATCH in one.meta]
    value: Tensor | None = _constants(nodes, literals, of_batch=True).get(proxy.node) if entries else None
    if value is not None:
        entries[-1].compare(tensor, value)
    return value


def _value(node: fx.Node, literals: nn.Module) -> Tensor | None:
    """The values of a node that are the same in every step. Raises NotRepeated where a layer that stands for others
    asks about what comes from outside of it."""
    nodes, begin = list(node.graph.nodes), 0
    for position, other in enumerate(nodes):
        if other.target is NOTE:
            begin = position if other.args[0] == "begin" else 0
    needed = behind(node, nodes)
    value = _constants([one for one in nodes[begin:] if one in needed], literals).get(node)
    if value is None and begin and _constants([one for one in nodes if one in needed], literals).get(node) is not None:
        raise NotRepeated
    if value is not None:
        for one in needed:
            if VALUES in one.meta:
                one.meta[HAS_DECIDED] = True
    return value


def behind(node: fx.Node, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """What the values of a node may depend on: all that it reads, and what writes to memory that this may share."""
    memory: dict[fx.Node, fx.Node] = {}

    def root(one: fx.Node) -> fx.Node:
        while (parent := memory.get(one, one)) is not one:
            one = parent
        return one

    writers: list[fx.Node] = []
    for one in nodes:
        schema = one.target._schema if isinstance(one.target, OpOverload) else None
        if schema is None or any(argument.alias_info is not None for argument in schema.arguments):
            for read in one.all_input_nodes:
                memory[root(read)] = root(one)
        if schema is not None and schema.is_mutable:
            writers.append(one)
    writing: dict[fx.Node, list[fx.Node]] = {}
    for one in writers:
        writing.setdefault(root(one), []).append(one)
    behind, waiting = set[fx.Node](), [node]
    while waiting:
        if (one := waiting.pop()) not in behind:
            behind.add(one)
            waiting += [*one.all_input_nodes, *writing.get(root(one), ())]
    return behind


def _constants(nodes: Sequence[fx.Node], literals: nn.Module, of_batch: bool = False) -> dict[fx.Node, Any]:
    """What those of `nodes` that depend on nothing that changes hold after the last of them; `of_batch` on nothing but
    entries of the batch that changes."""
    known: dict[fx.Node, Any] = {}
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        for node in nodes:
            if node.op == "get_attr":
                literal = getattr(literals, str(node.target))
                if isinstance(literal, Tensor) and not isinstance(literal, FakeTensor):
                    known[node] = literal.cpu().clone()
            elif VALUES in node.meta:
                known[node] = node.meta[VALUES].detach().cpu().clone()
            elif BATCH in node.meta and of_batch:
                known[node] = node.meta[BATCH].value.cpu().clone()
            elif node.target is getitem and node.args[0] in known:
                known[node] = known[node.args[0]][node.args[1]]  # type: ignore[index]
            elif isinstance(node.target, OpOverload):
                _run(node, node.target, known)
    return known


def _run(node: fx.Node, target: OpOverload, known: dict[fx.Node, Any]) -> None:
    """Add the result of a node to the known ones if all that it reads is known; else forget what it writes."""
    unread = node.args[0] if target._schema.name.partition("::")[2] in OF_SHAPES else None
    made = [fake for fake in fakes(node.meta.get("val")) if isinstance(fake, Tensor)]
    large = any(_shapeless(fake) or fake.numel() > LARGEST for fake in made)
    random = torch.Tag.nondeterministic_seeded in target.tags
    if large or random or not all(arg in known or arg is unread for arg in node.all_input_nodes):
        if target._schema.is_mutable:
            memory = {_memory(known[arg]) for arg in node.all_input_nodes if arg in known}
            for other in [other for other, value in known.items() if _memory(value) in memory]:
                del known[other]
        return

    def value_of(arg: fx.Node) -> Any:
        fake = arg.meta["val"]
        return known[arg] if arg in known else torch.empty(() if _shapeless(fake) else fake.shape, dtype=fake.dtype)

    args, kwargs = tree_map_only(
        torch.device, lambda _: torch.device("cpu"), fx.map_arg((node.args, dict(node.kwargs)), value_of)
    )
    known[node] = target(*args, **kwargs)


def _shapeless(fake: Tensor) -> bool:
    return any(isinstance(size, torch.SymInt) for size in fake.shape)


def _memory(value: Any) -> object:
    """What two values have in common that share memory."""
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else id(value)


def goes_on() -> bool | None:
    """The truth with which the statement that asks does not raise; None if it does more than to raise in the end, or if
    a forward might go on after that."""
    truth = None
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if name == EXPORT:
            break
        if in_library(name) or frame.f_code.co_name == "__torch_function__":
            continue
        checks, caught = _checks(name)
        if truth is None:
            truth = checks.get(line)
        if truth is None or line in caught:
            return None
    return truth


@lru_cache(maxsize=64)
def _checks(filename: str) -> tuple[dict[int, bool], set[int]]:
    """The lines of the conditions in a source file that decide on nothing but to raise, and the truth that does not;
    and the lines that stand in a `try` with an `except`."""
    lines: dict[int, bool] = {}
    caught: set[int] = set()
    for statement in ast.walk(ast.parse("".join(linecache.getlines(filename)))):
        if isinstance(statement, TRIES) and statement.handlers:
            caught |= {*range(statement.lineno, statement.handlers[0].lineno)}
        raises = isinstance(statement, ast.If) and _ends(statement.body)
        if not raises and not isinstance(statement, ast.Assert):
            continue
        test: ast.expr = statement.test  # type: ignore[attr-defined]
        if (truth := _truth(test, not raises)) is not None:
            lines |= dict.fromkeys(range(test.lineno, (test.end_lineno or test.lineno) + 1), truth)
    return lines, caught


def _ends(body: Sequence[ast.stmt]) -> bool:
    """Whether what statements come to is that the last of them raises an exception, or exits."""
    called = body[-1].value if isinstance(body[-1], ast.Expr) else None
    exits = isinstance(called, ast.Call) and ast.unparse(called.func) in EXITS
    goes_elsewhere = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Try)
    return (exits or isinstance(body[-1], ast.Raise)) and not any(
        isinstance(part, goes_elsewhere) for statement in body for part in ast.walk(statement)
    )


def _truth(test: ast.expr, wanted: bool) -> bool | None:
    """What all that a condition asks must be for it to be as wanted, if it is the same for all."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truth(test.operand, not wanted)
    if isinstance(test, ast.BoolOp):
        truths = {_truth(part, wanted) for part in test.values}
        return truths.pop() if len(truths) == 1 else None
    plain = not any(isinstance(part, (ast.Not, ast.IfExp, ast.NamedExpr)) for part in ast.walk(test))
    return wanted if plain else None
