"""What a unit of generated code calls its children and tensors.

They are registered under the user's names, which make the state dict and may be anything that torch takes: keywords,
`self`, names of methods, text with quotes. Code reaches them by these names only where they are plain, else by a
property of the unit's class that looks them up. Invariant: no text of the user's gets into generated code except as an
identifier that means nothing else there.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Container
from functools import cache
from typing import Any

from torch import Tensor, fx, nn

OWN, REACHED = "_own_", "_reached_"
"""Attributes of units that are not the user's: constants, and properties."""


@cache
def _taken() -> frozenset[str]:
    """What attributes of modules mean already."""
    return frozenset(dir(fx.GraphModule(nn.Module(), fx.Graph())))


def plain(name: str) -> bool:
    """Whether generated code may say `.name`."""
    legal = (name.isidentifier() and not keyword.iskeyword(name)) or name.isdigit()
    return legal and name.isascii() and name not in _taken() and not name.startswith((OWN, REACHED, "__"))


def variable(name: str) -> str:
    """A local name of generated code for something called `name`; fx keeps it apart from builtins and other names."""
    word = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"{word}_" if word == "self" else word


def private(name: str, *taken: Container[str]) -> str:
    """A plain name like `name` that is in none of `taken`."""
    word = variable(name) if plain(variable(name)) else f"unit_{variable(name)}"
    while any(word in names for names in taken):
        word += "_"
    return word


def reach(unit: fx.GraphModule, path: str, of: str, ambiguous: Container[str] = ()) -> str:
    """The attribute by which the code of `unit` accesses the entry registered at `path` inside it: a tensor
    (`get_attr`) or a child (`call_module`), whose name may also be that of a tensor if it is `ambiguous`."""
    *around, leaf = path.split(".")
    if all(map(plain, (*around, leaf))) and (of == "get_attr" or leaf not in ambiguous):
        return path

    def look_up(module: Any) -> Any:
        for part in around:
            module = module._modules[part]
        if of == "call_module":
            return module._modules[leaf]
        return module._parameters[leaf] if leaf in module._parameters else module._buffers[leaf]

    kind = type(unit)
    name = f"{REACHED}{sum(known.startswith(REACHED) for known in vars(kind))}"
    setattr(kind, name, property(look_up))
    return name


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module by all their names."""
    return dict(module.named_parameters(remove_duplicate=False))


def register(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Give `module` a parameter or a buffer, under any name."""
    table: dict[str, Any] = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
    table[name] = tensor


def inside(module: nn.Module, path: str) -> nn.Module:
    """The module at `path` inside of `module`, made of plain ones as far as there is none."""
    for part in path.split(".") if path else ():
        module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    return module


def attach(module: nn.Module, path: str, child: nn.Module) -> None:
    """Give `module` a child, with plain modules for the dots in its path."""
    around, _, last = path.rpartition(".")
    inside(module, around)._modules[last] = child
