"""The table from torch operator names to sharding rules, the table of local functions that rules' programs call, and
an operator's arguments by the names that torch's schema gives them, whether a call wrote them or left them out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, reduce
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import Tensor

from strategies.core.graph import Operator, TensorSpec
from strategies.rules.sharding import Sharding

Rule = Callable[[Operator, Sequence[TensorSpec]], Sharding | None]
RULES: dict[str, Rule] = {}
LOCAL_FUNCTIONS: dict[str, Callable[..., Any]] = {}
Landing = Callable[[], list[list[Tensor]]]
Link = Callable[[Sequence[Sequence[Tensor]]], Landing]
"""Begins to send tensors of every rank at hand, by rank, and returns what waits for those that arrive."""
Once = Callable[[Callable[[Sequence[Tensor]], list[Tensor]]], Callable[[Sequence[Tensor]], list[Tensor]]]
"""A function of tensors as one whose results a recomputed module may keep."""
PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(None))
"""What a call may take beside tensors: values that are compared, and that ranks get from a file."""
FUNCTION = "function"
"""How targets begin that are torch.autograd.Functions."""

R = TypeVar("R", bound=Rule)
F = TypeVar("F", bound=Callable[..., Any])


def rule(*operators: str) -> Callable[[R], R]:
    """Register a rule for operators, by name without overload (`relu`; `library::name` for those that are not torch's).
    A rule returns None for calls it cannot cover."""

    def register(function: R) -> R:
        for name in operators:
            if name in RULES:
                raise ValueError(f"Operator {name} has two rules.")
            RULES[name] = function
        return function

    return register


def local_function(function: F) -> F:
    """Register a function that local programs call by the target `local.<name>`.

    A cooperative one, which local programs call by `Local.cooperate`, takes the links of its channels, a `Once`, and
    the arguments of every rank at hand (one, or in a simulation all); it returns the result of each.
    """
    LOCAL_FUNCTIONS[function.__name__] = function
    return function


def resolve(target: str) -> Callable[..., Any]:
    """The callable behind a target.

    | target                              | is                                                                     |
    |-------------------------------------|------------------------------------------------------------------------|
    | `aten.relu.default`                 | torch's operator                                                       |
    | `local.lookup_slice`                | a local function                                                       |
    | `mylib.scan.default@nets,kernels`   | an operator of another library; importing these modules registers it   |
    | `function.Scan@kernels`             | `apply` of the torch.autograd.Function `Scan` of the module `kernels`  |
    | `function:bfloat16.Scan@kernels`    | the same under torch.autocast of this dtype                            |

    A process that did not capture the graph, such as a rank, imports what it needs here.
    """
    path, _, modules = target.partition("@")
    space, _, rest = path.partition(".")
    if space == "local":
        return LOCAL_FUNCTIONS[rest]
    if space.startswith(FUNCTION):
        return _applied(rest, modules, space.partition(":")[2])
    name, _, overload = rest.partition(".")
    library = getattr(torch.ops, space)
    for module in modules.split(",") if modules else ():
        if not hasattr(library, name):
            import_module(module)
    function: Callable[..., Any] = getattr(getattr(library, name), overload or "default")
    return function


@cache
def _applied(name: str, module: str, autocast: str) -> Callable[..., Any]:
    function = function_class(name, module)

    def call(*args: Any) -> Any:
        return function.apply(*args)

    def under_autocast(*args: Any) -> Any:
        device = next(arg.device.type for arg in args if isinstance(arg, Tensor))
        with torch.autocast(device, getattr(torch, autocast)):
            return function.apply(*args)

    applied = under_autocast if autocast else call
    applied.__name__ = applied.__qualname__ = function.__name__  # in generated code
    applied.__module__ = module
    return applied


def function_class(name: str, module: str) -> Any:
    """The torch.autograd.Function of this qualified name in a module. Raises ImportError or AttributeError."""
    return reduce(getattr, name.split("."), import_module(module))


def named(target: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> value of every argument of operator `target`, in the schema's order (of an autograd function: in that of
    its forward); defaults where the call has none."""
    if target.startswith(FUNCTION):
        path, _, module = target.partition("@")
        function = function_class(path.partition(".")[2], module)
        names = list(inspect.signature(function.forward).parameters)
        with_context = function.setup_context is torch.autograd.Function.setup_context
        return dict(zip(names[1:] if with_context else names, args, strict=False))
    schema: Any = resolve(target)._schema  # type: ignore[attr-defined]
    values = {argument.name: argument.default_value for argument in schema.arguments}
    return values | dict(zip(values, args, strict=False)) | dict(kwargs)


def arguments(operator: Operator) -> dict[str, Any]:
    """Name -> value of every argument of a call, with `Ref`s in place of tensors."""
    return named(operator.target, operator.args, operator.keywords)


def dim_of(operator: Operator, rank: int) -> int:
    """The argument `dim` of a call on a tensor of `rank` dims, counted from the left."""
    return int(arguments(operator)["dim"]) % rank


def changed(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], **changes: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of `target`, positional and by keyword, with `changes` by name."""
    schema: Any = resolve(target)._schema  # type: ignore[attr-defined]
    values = named(target, args, kwargs) | changes
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    given = max([len(args), *(positional.index(name) + 1 for name in changes if name in positional)])
    rest = {name: values[name] for name in values if name not in positional[:given]}
    keep = {*kwargs, *changes}
    return tuple(values[name] for name in positional[:given]), {n: v for n, v in rest.items() if n in keep}
