"""Nodes of an exported graph: where the user wrote them, and new ones beside them; and torch, patched meanwhile.

A pass that adds a node computes its value on fake tensors, so that every node knows its shape and dtype, and gives it
the module call and the source line of the node that it serves.
"""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, _get_dispatch_mode_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from strategies.rules.registry import FUNCTION, resolve

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(f"{folder}/" for folder in (Path(torch.__file__).parent, ROOT / "strategies", ROOT / "runner"))
CAPTURE = f"{Path(__file__).parent}/"
STANDARD = f"{sysconfig.get_paths()['stdlib']}/"
"""Where source lines are not the user's (site-packages may be inside the standard library's folder)."""
WHENCE = ("nn_module_stack", "stack_trace", "without_grad", "autocast")
"""What a new node inherits from the node that it serves."""


class _AutogradFunction(HigherOrderOperator):
    """The target of a node that stands for a torch.autograd.Function."""

    def __init__(self) -> None:
        super().__init__("meshwright_autograd_function")  # type: ignore[no-untyped-call]

    def __call__(self, name: str, autocast: str | None, *args: Any) -> Any:
        """Call the function `name` (`module::Class`) under torch.autocast of a dtype, or none."""
        return resolve(function_target(name, autocast))(*args)


AUTOGRAD_FUNCTION = _AutogradFunction()


class OpaqueCall(HigherOrderOperator):
    """The target of a node that stands for the call of a module or function: the local function `name`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)  # type: ignore[no-untyped-call]

    def __call__(self, call: str, *operands: Any) -> Any:
        """The results of the call, given as text."""
        return resolve(f"local.{self.__name__}")(call, *operands)


MODULE_CALL, FUNCTION_CALL = OpaqueCall("called_module"), OpaqueCall("drawn_function")
COMPARED = OpaqueCall("compared")
fx.node.has_side_effect(FUNCTION_CALL)  # like all that draws
fx.node.has_side_effect(COMPARED)


def draws(node: fx.Node) -> bool:
    """Whether a traced node draws random numbers; a dropout, and an attention with one, only if its rate is not 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return node.target is FUNCTION_CALL
    schema = node.target._schema  # type: ignore[union-attr]
    named = {one.name: one.default_value for one in schema.arguments} | dict(
        zip([one.name for one in schema.arguments], node.args, strict=False)
    )
    named |= node.kwargs
    return next((named[name] != 0 for name in ("p", "dropout_p") if name in named), True)


def function_target(name: str, autocast: str | None) -> str:
    """The target of an operator, as `resolve` looks it up, for the autograd function `module::Class`."""
    module, _, path = name.partition("::")
    return f"{FUNCTION}{f':{autocast}' if autocast else ''}.{path}@{module}"


@contextmanager
def replaced(owner: Any, name: str, other: Any) -> Iterator[None]:
    """`other` in place of the attribute `name` of `owner` meanwhile."""
    before = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def forwards_wrapped(
    classes: Collection[type], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """`wrap` of the forward of each class in its place meanwhile. An inherited one is inherited again afterwards."""
    own: dict[Any, Any] = {cls: vars(cls).get("forward") for cls in classes}
    for cls in own:
        cls.forward = wrap(cls.forward)
    try:
        yield
    finally:
        for cls, forward in own.items():
            if forward is None:
                del cls.forward
            else:
                cls.forward = forward


def proxy_mode() -> Any:
    """The mode that records what is traced now; None where nothing is."""
    return _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY)  # type: ignore[no-untyped-call]


@contextmanager
def beneath_tracing() -> Iterator[None]:
    """Operators called meanwhile do not enter the graph that is traced."""
    beneath = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)
    include = torch._C._dispatch_tls_local_include_set().remove(torch._C.DispatchKey.PreDispatch)
    exclude = torch._C._dispatch_tls_local_exclude_set() | beneath
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch._C.DisableTorchFunction():
        yield


def in_library(filename: str) -> bool:
    """Whether a file belongs to torch, another package that calls models, or Python itself."""
    return filename.startswith(("<", *PACKAGES)) or (filename.startswith(STANDARD) and "-packages" not in filename)


def asked_by_user() -> bool:
    """Whether the innermost frame that is not of the capture itself is the user's; `if size` is a comparison of
    torch's."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
    asking = (one.co_filename for one in codes if one.co_name != "__bool__")
    return not in_library(next(name for name in asking if not name.startswith(CAPTURE)))


def short(filename: str) -> str:
    """The last two parts of a path: enough to find a file, and the same on every machine."""
    return "/".join(re.split(r"[/\\]", filename)[-2:])


def users_line() -> str:
    """` at file:line` of the innermost frame of the user's, or nothing."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if not in_library(frame.f_code.co_filename):
            return f" at {short(frame.f_code.co_filename)}:{line}"
    return ""


def source_of(node: fx.Node) -> str:
    """file:line of the innermost frame outside torch, or nothing."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    for filename, line in reversed(frames):
        if not in_library(filename):
            return f"{short(filename)}:{line}"
    return ""


def file_of(name: str) -> str:
    """The file of a module of Python; "" without one. From its dict: `__getattr__` of a lazy module may raise."""
    return str(getattr(sys.modules.get(name), "__dict__", {}).get("__file__") or "")


def modules_of(node: fx.Node) -> list[str]:
    """The Python modules outside of torch from which a node was called, innermost first: to import them registers the
    operators that they call."""
    files = {file_of(name): name for name in list(sys.modules)}
    frames = re.findall(r'File "([^"]+)", line \d+', node.meta.get("stack_trace") or "")
    called = (files.get(filename) for filename in reversed(frames) if not in_library(filename))
    return list(dict.fromkeys(name for name in called if name is not None))


def at(node: fx.Node) -> str:
    """` at file:line`, for errors, or nothing."""
    source = source_of(node)
    return f" at {source}" if source else ""


def op_of(node: fx.Node) -> str:
    """The name of what a node calls, without overload: `relu`, or `library::name` if it is not torch's own, which may
    have torch's name and another meaning."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target._schema.name).removeprefix("aten::")
    if node.target is AUTOGRAD_FUNCTION:
        return str(node.args[0])
    return getattr(node.target, "__name__", str(node.target))


def floating(value: Any) -> bool:
    """Whether a value is a tensor of floating-point or complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def values(nested: Any) -> Any:
    """Nested arguments with the (fake) values of nodes in their place."""
    return fx.map_arg(nested, lambda node: node.meta["val"])


def fakes(nested: Any) -> Iterator[FakeTensor]:
    """The fake tensors in nested plain data."""
    return (leaf for leaf in tree_leaves(nested) if isinstance(leaf, FakeTensor))


def shaped_by_values(node: fx.Node) -> bool:
    """Whether the shape of a result depends on values."""
    return any(isinstance(size, torch.SymInt) for fake in fakes(node.meta.get("val")) for size in fake.shape)


def mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The mode in which the graph's values were made."""
    return next(fake.fake_mode for node in graph.nodes for fake in fakes(node.meta.get("val")))


def inferred(graph: fx.Graph, target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What `target` returns on fake tensors; arguments are nodes and plain data. Raises whatever the operator raises
    for operands that do not fit."""
    with mode_of(graph), torch.no_grad():
        return target(*values(args), **values(kwargs))


def call(graph: fx.Graph, serves: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new node at the graph's insertion point, which computes something for the node `serves`."""
    value = inferred(graph, target, args, kwargs)
    node = graph.call_function(target, args, kwargs)
    node.meta = {name: serves.meta[name] for name in WHENCE if name in serves.meta} | {"val": value}
    return node
