"""Statements of a forward, or of a function that it calls, that decide by values (a loop over the classes of a batch, a
search for pairs by numpy), in a captured graph: one node, as of a module that does (`opaque_modules`).

These are as few statements of a function's body as take tensors, plain values and modules of the model, and leave
tensors of fixed shapes behind: from the one that asks for values back to where all that it reads is such, and on to
where all that is read later is, at most to the function's end. Ranks compute them for the complete batch.
Invariant: what other statements read is what it would be; where statements may do more (draw, write into tensors or
attributes), they are not one node.
"""

from __future__ import annotations

import ast
import copy
import inspect
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from logging import Logger
from types import CodeType, FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch._C import _TorchDispatchModeKey
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch.utils._pytree import tree_leaves

from strategies.capture.branches import shows_writes
from strategies.capture.nodes import in_library, replaced
from strategies.capture.opaque_modules import NotOpaque, Varies, check_parts, recorded, skeleton_of
from strategies.capture.repeated_modules import TABLES
from strategies.rules.registry import PLAIN
from strategies.rules.statements import Statements, code_of

CALLED = "_meshwright_statements"
"""The global by which the code around them calls statements."""
RESULTS = "_meshwright_results"
"""The variable that has what they return."""
DECIDED = "decided"
"""What the node of a result of statements says of itself: their function."""
CONTAINERS = (list, dict, set)
READING = frozenset("len zip enumerate sum reversed list tuple stack cat isinstance".split())
"""Functions of Python and torch that leave lists as they are."""
UNSUITABLE = (ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)


class Outlines(BaseException):
    """Other statements must be one node. Not an Exception, which a model's forward may handle."""


@dataclass
class _Span:
    """Which statements of the body of a function are one node: from `begin` to before `end`."""

    definition: ast.FunctionDef
    begin: int
    end: int

    @property
    def body(self) -> list[ast.stmt]:
        return self.definition.body

    @property
    def inside(self) -> list[ast.stmt]:
        return self.body[self.begin : self.end]

    @property
    def later(self) -> list[ast.stmt]:
        return self.body[self.end :]

    def read_later(self, function: FunctionType) -> set[str]:
        """The variables that are read behind the statements, by functions within the function, too."""
        return _loaded(self.later) | {*function.__code__.co_cellvars}


class DecidingStatements:
    """The statements that are to be one node in functions that the forward of `root` calls."""

    def __init__(self, root: nn.Module) -> None:
        self.root, self.spans, self.refused = root, dict[FunctionType, _Span](), set[FunctionType]()
        self.paths = {id(vars(module)): path for path, module in root.named_modules()}
        """By what the exporter's stand-ins for a module share with it."""
        self.codes: dict[tuple[FunctionType, int, int], CodeType] = {}
        """What calls spans of functions, once for each: `Conversions` knows functions by their code."""

    def choose(self, lines: Sequence[tuple[str, int]]) -> bool:
        """Choose the statement of the first of these lines of files that may be one."""
        for filename, line in lines:
            found = None if in_library(filename) else _function_at(filename, line)
            if found is None or found[0] in self.refused:
                continue
            function, definition = found
            places = [at for at, one in enumerate(definition.body) if one.lineno <= line <= (one.end_lineno or 0)]
            span = self.spans.get(function)
            if not places or (span is not None and span.begin <= places[0] and places[-1] < span.end):
                self._refuse(function)
                continue
            both = [*places, *(() if span is None else (span.begin, span.end - 1))]
            self.spans[function] = _Span(definition, min(both), max(both) + 1)
            return True
        return False

    def _refuse(self, function: FunctionType) -> None:
        self.refused.add(function)
        self.spans.pop(function, None)

    @contextmanager
    def as_nodes(self) -> Iterator[None]:
        """Export within this context. Raises Outlines within."""
        with ExitStack() as stack:
            if self.spans:
                self.skeleton = skeleton_of(self.root)
            for function, span in self.spans.items():
                code = self.codes.setdefault((function, span.begin, span.end), _around(function, span))
                stack.enter_context(replaced(function, "__code__", code))
                called = function.__globals__.setdefault(CALLED, {})
                called[function.__qualname__] = partial(self._called, function)
                stack.callback(function.__globals__.pop, CALLED, None)
            yield

    def _called(self, function: FunctionType, scope: dict[str, Any]) -> Any:
        """What some statements of a function return, or the variables that they set, for those in `scope`."""
        span = self.spans[function]
        tracing = _get_dispatch_mode_pre_dispatch(_TorchDispatchModeKey.PROXY)  # type: ignore[no-untyped-call]
        if tracing is None:
            made, values = self._statements(function, span, scope, skeletons=False)
            returned = made(values)
            return returned if made.results is None else dict(zip(made.results, returned, strict=True))
        scope = self._with_globals(function, span) | scope
        for end in range(span.end, len(span.body) + 1):
            tried = _Span(span.definition, span.begin, end)
            if end < len(span.body) and any(map(_returns, tried.inside)):
                continue
            self._check_given(function, tried, scope)
            made, values = self._statements(function, tried, scope, skeletons=True)
            try:
                check_parts(made)
                state = _tensors(made, scope)
                name, on_trial = function.__name__.lower(), end > span.end
                given: Any = (values,), {}
                returned = recorded(name, Statements.forward, made, state, given, tracing.tracer, on_trial=on_trial)
            except NotOpaque as error:
                if error.does_more or (isinstance(error, Varies) and end == len(span.body)):
                    self._refuse(function)
                    raise Outlines from error
                continue
            if on_trial:
                span.end = end
                raise Outlines
            for leaf in filter(_is_tensor, tree_leaves(returned)):
                tracing.tracer.unwrap_proxy(leaf).node.meta[DECIDED] = function
            return returned if made.results is None else dict(zip(made.results, returned, strict=True))
        self._begin_before(function, [])

    def refuse_others(self, exported: torch.export.ExportedProgram) -> bool:
        """Refuse the functions whose statements may leave a tensor behind itself, where the graph has a new one, which
        somebody writes before another reads it; whether there are any."""
        nodes = list(exported.graph.nodes) if self.spans else []
        results = [node for node in nodes if DECIDED in node.meta]
        found = {node.meta[DECIDED] for node in results if shows_writes(node, _like(node), nodes[nodes.index(node) :])}
        for function in found & {*self.spans}:
            self._refuse(function)
        return bool(found)

    def _with_globals(self, function: FunctionType, span: _Span) -> dict[str, Any]:
        """The plain values among the globals that statements may read, which ranks would have as an import leaves them.
        Raises Outlines for others than functions, classes, Python modules and loggers."""
        known = function.__globals__
        read = {name: known[name] for name in _loaded(span.body[span.begin :]) & known.keys()}
        plain = {name: one for name, one in read.items() if all(isinstance(leaf, PLAIN) for leaf in tree_leaves(one))}
        others = [one for name, one in read.items() if name not in plain and not isinstance(one, (ModuleType, Logger))]
        if any(isinstance(one, (Tensor, nn.Module)) or not callable(one) for one in others):
            self._refuse(function)
            raise Outlines
        return plain

    def _check_given(self, function: FunctionType, span: _Span, scope: Mapping[str, Any]) -> None:
        """Raises Outlines where statements read what a node cannot take."""
        given = {name: scope[name] for name in _loaded(span.inside) if name in scope}
        wrong = [name for name, value in given.items() if not self._is_suitable(value)]
        containers = [id(value) for value in given.values() if isinstance(value, CONTAINERS)]
        if wrong or len({*containers}) < len(containers):
            self._begin_before(function, wrong)

    def _begin_before(self, function: FunctionType, names: Sequence[str]) -> NoReturn:
        """Let statements begin further up, where these names are given values; raises Outlines."""
        span = self.spans[function]
        stores = [place for place in range(span.begin) if {*names} & _stored(span.body[place : place + 1])]
        begin = stores[-1] if stores else span.begin - 1
        if begin < 0 or (names and not stores):
            self._refuse(function)
        else:
            span.begin = begin
        raise Outlines

    def _is_suitable(self, value: Any) -> bool:
        if isinstance(value, nn.Module):
            return id(vars(value)) in self.paths
        return all(
            isinstance(leaf, PLAIN) or (isinstance(leaf, Tensor) and all(isinstance(size, int) for size in leaf.shape))
            for leaf in tree_leaves(value)
        )

    def _part(self, span: _Span, name: str, module: nn.Module) -> nn.Module:
        """A copy without tensors of a module, with those parts that statements read by the name of a variable."""
        known = self.skeleton.get_submodule(self.paths[id(vars(module))])
        return known if (read := _read_of(type(known), name, span.inside)) is None else _reduced(known, read)

    def _statements(
        self, function: FunctionType, span: _Span, scope: Mapping[str, Any], *, skeletons: bool
    ) -> tuple[Statements, dict[str, Any]]:
        """Statements as a module, with the modules that they read or copies of them, and what else they read."""
        read, stored = _loaded(span.inside), _stored(span.inside)
        containers = {name for name, value in scope.items() if name in read and isinstance(value, CONTAINERS)}
        stored |= {name for name in containers if _may_change(name, span.inside)}
        names = tuple(sorted(stored & span.read_later(function))) if span.later else None
        given = {name: value for name, value in scope.items() if name in read or name in (names or ())}
        modules = {name: value for name, value in given.items() if isinstance(value, nn.Module)}
        parts = {name: self._part(span, name, one) if skeletons else one for name, one in modules.items()}
        code, owner = function.__code__, str(function.__globals__["__name__"])
        made = Statements(span.inside, code.co_filename, owner, tuple(given), names, parts)
        return made, {name: value for name, value in given.items() if name not in modules}


def _like(result: fx.Node) -> list[fx.Node]:
    """What a result of statements may be itself, of what they take and of what else they return."""
    call, value = result.all_input_nodes[0], result.meta["val"]
    others = (other for other in (*call.all_input_nodes, *call.users) if isinstance(other.meta["val"], Tensor))
    return [one for one in others if one.meta["val"].dtype == value.dtype and one.meta["val"].numel() >= value.numel()]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _tensors(made: Statements, scope: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those in `scope` of the tensors that copies of modules have, of several names of one the first."""
    own: dict[str, Tensor] = {}
    for child in dict(made.named_children()):
        module = scope[child.removeprefix("module_")]
        every = *module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)
        own |= {f"{child}.{name}": tensor for name, tensor in every}
    return {name: own[name] for name, _ in (*made.named_parameters(), *made.named_buffers())}


def _returns(statement: ast.stmt) -> bool:
    return any(isinstance(part, ast.Return) for part in ast.walk(statement))


def _around(function: FunctionType, span: _Span) -> CodeType:
    """The code of a function that calls some of its statements as one."""
    body, later = span.inside, span.later
    call = ast.parse(f"{CALLED}[{function.__qualname__!r}](locals())", mode="eval").body
    made: list[ast.stmt] = [ast.Return(call)]
    if later:
        made = [ast.Assign([ast.Name(RESULTS, ast.Store())], call)]
        for name in sorted((_stored(body) | _loaded(body)) & span.read_later(function)):
            if name in function.__code__.co_varnames + function.__code__.co_cellvars:
                made += ast.parse(f"if {name!r} in {RESULTS}: {name} = {RESULTS}[{name!r}]").body
    for one in made:  # which tracebacks find
        for part in ast.walk(one):
            ast.copy_location(part, body[0])
    definition = copy.copy(span.definition)
    definition.decorator_list, definition.returns = [], None
    free = [ast.Expr(ast.Name(name, ast.Load())) for name in function.__code__.co_freevars]
    kept: list[ast.stmt] = [ast.If(ast.Constant(False), list(free), [])] if free else []
    definition.body = [*kept, *span.body[: span.begin], *made, *later]
    code = code_of(definition, function.__code__.co_filename, function.__code__.co_freevars)
    assert code.co_freevars == function.__code__.co_freevars  # in whose order the function has their values
    return code


@lru_cache(maxsize=64)
def _definitions(filename: str) -> list[tuple[str, ast.FunctionDef]]:
    """The functions in a source file that others do not define, with their qualified names."""
    found: list[tuple[str, ast.FunctionDef]] = []
    waiting = [("", one) for one in ast.parse("".join(linecache.getlines(filename))).body]
    while waiting:
        prefix, one = waiting.pop()
        if isinstance(one, ast.ClassDef):
            waiting += [(f"{prefix}{one.name}.", part) for part in one.body]
        elif isinstance(one, ast.FunctionDef):
            found.append((f"{prefix}{one.name}", one))
        elif isinstance(one, (ast.If, ast.Try)):
            waiting += [(prefix, part) for part in ast.iter_child_nodes(one) if isinstance(part, ast.stmt)]
    return found


def _function_at(filename: str, line: int) -> tuple[FunctionType, ast.FunctionDef] | None:
    """The function whose body has a line of a file; None where it is none of a module or class that can be two."""
    module = next((one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == filename), None)
    for path, definition in _definitions(filename) if module is not None else ():
        if not definition.body[0].lineno <= line <= (definition.end_lineno or 0):
            continue
        try:
            found: Any = inspect.unwrap(reduce(inspect.getattr_static, path.split("."), module))  # type: ignore[arg-type]
        except AttributeError:
            return None
        found = getattr(found, "__func__", found)
        found = getattr(found, "__wrapped__", found)
        names = {part.id for part in ast.walk(definition) if isinstance(part, ast.Name)}
        private = any(
            isinstance(part, ast.Attribute) and part.attr.startswith("__") and not part.attr.endswith("__")
            for part in ast.walk(definition)
        )
        own = isinstance(found, FunctionType) and found.__code__.co_name == definition.name
        unsuitable = any(isinstance(part, UNSUITABLE) for part in ast.walk(definition))
        return (found, definition) if own and not private and not unsuitable and "locals" not in names else None
    return None


def _stored(body: Sequence[ast.stmt]) -> set[str]:
    """The variables that statements set."""
    found = set[str]()
    parts = [part for one in body for part in ast.walk(one)]
    inner = {id(one) for part in parts if isinstance(part, ast.comprehension) for one in ast.walk(part.target)}
    for part in parts:
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) and id(part) not in inner:
            found.add(part.id)
        elif isinstance(part, (ast.FunctionDef, ast.ClassDef)):
            found.add(part.name)
        elif isinstance(part, (ast.Import, ast.ImportFrom)):
            found |= {one.asname or one.name.partition(".")[0] for one in part.names}
    return found


def _loaded(body: Sequence[ast.stmt]) -> set[str]:
    """The variables that statements may read."""
    parts = [part for one in body for part in ast.walk(one)]
    updated = {
        part.target.id for part in parts if isinstance(part, ast.AugAssign) and isinstance(part.target, ast.Name)
    }
    return updated | {part.id for part in parts if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Store)}


def _may_change(name: str, body: Sequence[ast.stmt]) -> bool:
    """Whether statements may do more with a list or dict than to read what is in it."""
    parts = [part for one in body for part in ast.walk(one)]
    every = sum(isinstance(part, ast.Name) and part.id == name for part in parts)
    reading = 0
    for part in parts:
        if isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Load):
            reading += _is(part.value, name)
        elif isinstance(part, (ast.For, ast.comprehension)):
            reading += _is(part.iter, name)
        elif isinstance(part, ast.Call) and ast.unparse(part.func).removeprefix("torch.") in READING:
            reading += sum(_is(one, name) for one in part.args)
    return reading < every


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _read_of(owner: type, name: str, body: Sequence[ast.stmt]) -> set[str] | None:
    """The attributes that statements read of a module, an instance of `owner`, which is the variable `name`, by its
    methods, too; None where these are not known."""
    read, seen, waiting = set[str](), set[str](), [(name, body)]
    while waiting:
        name, body = waiting.pop()
        parts = [part for one in body for part in ast.walk(one)]
        found = [part.attr for part in parts if isinstance(part, ast.Attribute) and _is(part.value, name)]
        if len(found) < sum(isinstance(part, ast.Name) and part.id in (name, "super") for part in parts):
            return None
        for attribute in {*found} - seen:
            if attribute in (*TABLES, "__dict__"):
                return None
            seen.add(attribute)
            static = inspect.getattr_static(owner, attribute, None)
            method = (
                static.fget if isinstance(static, property) else inspect.unwrap(static) if callable(static) else None
            )
            if not isinstance(method, FunctionType):
                read.add(attribute)
                continue
            code = method.__code__
            last = max(line for _, _, line in code.co_lines() if line is not None)
            inside = _function_at(code.co_filename, last) if code.co_argcount else None
            if inside is None or inside[0] is not method or in_library(code.co_filename):
                return None
            waiting.append((code.co_varnames[0], inside[1].body))
    return read


def _reduced(module: nn.Module, names: set[str]) -> nn.Module:
    """A module with those parameters, buffers and modules alone."""
    made = copy.copy(module)
    for table in TABLES:
        setattr(made, table, {key: value for key, value in vars(module)[table].items() if key in names})
    return made
