"""Statements of a function as a module: what a rank executes of a forward that decides by values (`module_calls`)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_compiled: WeakKeyDictionary[Statements, Callable[..., Any]] = WeakKeyDictionary()


def code_of(function: ast.FunctionDef, filename: str, free: tuple[str, ...] = ()) -> CodeType:
    """The code of a function definition with these free variables."""
    names: list[ast.stmt] = [ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)) for name in free]
    outer = ast.FunctionDef("outer", _no_arguments(), [*names, function], [], None, None)
    outer.type_params = []  # type: ignore[attr-defined]
    tree = ast.fix_missing_locations(ast.Module([outer], []))
    around = next(one for one in compile(tree, filename, "exec").co_consts if isinstance(one, CodeType))
    return next(one for one in around.co_consts if isinstance(one, CodeType) and one.co_name == function.name)


def _no_arguments() -> ast.arguments:
    return ast.arguments([], [], None, [], [], None, [])


class Statements(nn.Module):
    """The statements `body` of a function in the Python module `owner`. They read the variables `names`; those that are
    modules are children. They return what the variables `results` hold afterwards, in order, or, where that is None,
    what they return themselves."""

    def __init__(
        self,
        body: list[ast.stmt],
        filename: str,
        owner: str,
        names: tuple[str, ...],
        results: tuple[str, ...] | None,
        modules: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        self.body, self.filename, self.owner, self.names, self.results = body, filename, owner, names, results
        for name, module in modules.items():
            self.add_module(f"module_{name}", module)

    def forward(self, values: dict[str, Any]) -> Any:
        if self not in _compiled:
            _compiled[self] = FunctionType(self._code(), vars(import_module(self.owner)))
        modules = {name.removeprefix("module_"): child for name, child in self._modules.items()}
        return _compiled[self](**values, **modules)

    def _code(self) -> CodeType:
        arguments = _no_arguments()
        arguments.args = [ast.arg(name) for name in self.names]
        end: list[ast.stmt] = []
        if self.results is not None:
            end = [ast.Return(ast.Tuple([ast.Name(name, ast.Load()) for name in self.results], ast.Load()))]
        function = ast.FunctionDef("statements", arguments, [*self.body, *end], [], None, None)
        function.type_params = []  # type: ignore[attr-defined]
        return code_of(function, self.filename)
