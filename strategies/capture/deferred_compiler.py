"""torch's compiler, loaded when something asks for it.

torch.export imports torch._dynamo, torch._inductor and the joint graphs of AOTAutograd, an eighth of what `run plan`
takes, and calls none of them in a trace that is not strict. `defer` leaves these modules empty but for the names that
the exporter and torch.optim read from them. Invariant: while nothing is compiled, a name means what it means in torch;
whoever reads another one, or imports another module of these packages, gets the complete compiler first, in torch's own
order. Only releases of torch whose exporter was read are deferred, and only in processes that compile nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import TrackedFake
from torch.utils._python_dispatch import _disable_current_modes

from strategies.capture.nodes import beneath_tracing

READ = ("2.13.",)
"""Releases of torch for which the names below were looked up."""
PACKAGES = ("torch._dynamo", "torch._inductor")
AOT_AUTOGRAD = "torch._functorch.aot_autograd"


class _Compiled:
    """In place of classes that only the compiler instantiates: nothing is an instance."""


def _itself(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    return function


def _nothing(*_: Any, **__: Any) -> None:
    """A graph break where there is no graph."""


def _assignments(module: torch.nn.Module) -> Any:
    return import_module("torch._functorch._aot_autograd.frontend_utils")._detect_attribute_assignment(module)


def _joint(*args: Any, **kwargs: Any) -> Any:
    _load(sys.modules[AOT_AUTOGRAD])
    return sys.modules[AOT_AUTOGRAD].aot_export_joint_with_descriptors(*args, **kwargs)


STAND_INS: dict[str, dict[str, object]] = {
    "torch._dynamo": {
        "disable": _itself,
        "graph_break": _nothing,
        "OptimizedModule": _Compiled,
        "functional_export": SimpleNamespace(_DynamoBytecodeCodeGen=_Compiled),
    },
    "torch._dynamo.variables": {},
    "torch._dynamo.variables.builder": {"TrackedFake": TrackedFake},
    "torch._dynamo.guards": {"uninteresting_files": frozenset},  # files of frames that only the compiler makes
    "torch._dynamo.eval_frame": {},
    "torch._inductor": {},
    "torch._inductor.sizevars": {},
    AOT_AUTOGRAD: {"_detect_attribute_assignment": _assignments, "aot_export_joint_with_descriptors": _joint},
}
"""The names that a module without its contents has. Of modules without names the exporter asks for the file alone."""
ALONE = {
    *(f"torch._dynamo.{name}" for name in ("bytecode_analysis", "bytecode_transformation", "config", "exc")),
    *(f"torch._dynamo.{name}" for name in ("graph_utils", "metrics_context", "source", "utils")),
    *(f"torch._inductor.{name}" for name in ("compiler_bisector", "config", "custom_graph_pass", "fx_passes")),
    *(f"torch._inductor.{name}" for name in ("fx_passes.dedupe_symint_uses", "runtime", "runtime.cache_dir_utils")),
}
"""Modules that the exporter uses, and that import nothing else of the compiler."""
ABSENT = {"torch._inductor": {"codecache"}}
"""Modules that torch asks for, and does without, where nothing has been compiled."""


class _Deferred(ModuleType):
    """A module without its contents."""

    def __getattr__(self, name: str) -> Any:
        module = self.__name__
        if name.startswith("__") or name in ABSENT.get(module, ()):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        if name in STAND_INS[module]:
            return STAND_INS[module][name]
        if f"{module}.{name}" in ALONE:
            return import_module(f"{module}.{name}")
        _load(self)
        return getattr(self, name)


class _Later(Loader):
    """Makes a module whose contents `loader` adds when they are asked for."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing yet."""


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in STAND_INS:
            spec = PathFinder.find_spec(fullname, path, target)
            assert spec is not None and spec.loader is not None
            spec.loader = _Later(spec.loader)
            return spec
        package = ".".join(fullname.split(".")[:2])
        if package in PACKAGES and fullname not in ALONE:
            _load(sys.modules[package])
        return None


def defer() -> None:
    """Leave the compiler out of this process until something asks for it, if it is not there yet."""
    if torch.__version__.startswith(READ) and not any(name in sys.modules for name in STAND_INS):
        sys.meta_path.insert(0, _Finder())
        import_module("torch._higher_order_ops.triton_kernel_wrap")  # the exporter relies on the compiler's import


def _load(module: ModuleType) -> None:
    """Give a deferred module its contents; torch._dynamo first, which imports the others in an order that works."""
    if not isinstance(module, _Deferred):
        return
    if module.__name__ != PACKAGES[0]:
        _load(import_module(PACKAGES[0]))
        if not isinstance(module, _Deferred):
            return
    assert module.__spec__ is not None and isinstance(module.__spec__.loader, _Later)
    module.__class__ = ModuleType  # type: ignore[assignment]
    with beneath_tracing(), _disable_current_modes():
        module.__spec__.loader.loader.exec_module(module)
