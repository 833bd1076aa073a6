"""Graphs that were captured before, in the folder `captures` of the plan cache: a model under another plan, or trained
once more, need not be exported again.

The question is the objective (its classes and attributes, the shapes of its parameters, the values of its buffers), the
batch, the config of model, loss and data, and the environment. An entry also names the files of all modules that were
loaded, and is useless once the time or size of one has changed. Invariants: what a pickle does not tell (a lambda, a
class of a notebook) is captured anew, values of parameters that decided are compared, and to read an entry runs no code
but that of graphs.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import pickle
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from runner import home
from runner.config.schema import Config
from strategies.capture import Captured, Objective, capture
from strategies.core import graph as graphs
from strategies.core.graph import OperatorGraph
from strategies.planner import plan_cache

BEGUN = time.time_ns()
"""A file that was written later may be another than the one that was imported."""
MOST = 2**24
"""Bytes of an entry: constants are in it."""
OF_A_PROCESS = frozenset("_ OLDPWD OMP_NUM_THREADS PWD SHLVL TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR".split())
"""Variables of the environment that differ between equal commands, or that torch sets itself."""
PLAIN = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)

OF_ARGUMENTS = {
    ("torch", "device"): torch.device,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("builtins", "slice"): slice,
    ("builtins", "complex"): complex,
}
"""How a pickle names what arguments of operators are made of, besides dtypes, layouts and memory formats."""

Stored = tuple[str, tuple[int, ...], bytes]
"""A tensor: dtype, shape and content."""


class Untold(pickle.PicklingError):
    """What an objective computes does not follow from its pickle."""


def captured(
    config: Config,
    objective: Objective,
    batch: Sequence[Tensor],
    say: Callable[[str], None],
    *,
    training: bool = True,
    like: OperatorGraph | None = None,
) -> Captured:
    """What `capture` returns, from the cache where it was captured before.

    Args:
        config: its `parallel.plan_cache` is where; None: nowhere.
        objective, batch, training, like: as for `capture`.
        say: told of an entry that cannot be used.

    Raises:
        StrategyError: as `capture`.
    """
    folder = home.plan_cache(config.parallel.plan_cache, lambda _: None)
    key = None if folder is None else _key(config, objective, batch, training, like)
    if folder is None or key is None:
        return capture(objective, batch, training=training, like=like)
    folder /= "captures"
    found = plan_cache.load(folder, key, say, lambda content: _read(content, objective))
    if found is not None:
        return found
    made = capture(objective, batch, training=training, like=like)
    if (content := _written(made, objective)) is not None:
        plan_cache.store(folder, key, content, say)
    return made


def _key(
    config: Config, objective: Objective, batch: Sequence[Tensor], training: bool, like: OperatorGraph | None
) -> str | None:
    """The name of the entry; None for an objective whose pickle does not tell what it computes."""
    asked = config.model_dump_json(include={"device", "model", "loss", "data"}), training, like and like.signature()
    known = sorted((name, value) for name, value in os.environ.items() if name not in OF_A_PROCESS)
    around = sys.version, torch.__version__, torch.get_default_dtype(), os.getcwd(), known
    digest = _Digest(repr((plan_cache.code_of(Path(graphs.__file__).parents[1]), asked, around)))
    try:
        _Question(digest).dump((objective, tuple(batch)))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, RecursionError):
        return None
    return digest.made.hexdigest()[:32]


class _Digest:
    """A file that keeps a hash of what is written to it."""

    def __init__(self, text: str) -> None:
        self.made = hashlib.sha256(text.encode())

    def write(self, data: bytes) -> int:
        self.made.update(data)
        return len(data)


class _Question(pickle.Pickler):
    """Writes an objective as what decides its graph: parameters without their values, classes and functions with the
    state of their files, sets in order."""

    def __init__(self, file: _Digest) -> None:
        super().__init__(file)
        self.tensors: dict[int, int] = {}
        self.storages: dict[int, int] = {}
        self.files: dict[str, list[int]] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._described(value)
        if type(value) in (set, frozenset):
            return "set", sorted(map(repr, value))
        if type(value).__name__ == "GenerationConfig":  # of transformers, with a hash that every process makes anew
            return "generation", repr(sorted(value.to_dict().items()))
        if isinstance(value, (type, FunctionType)):
            return "code", value.__module__, value.__qualname__, self._file(value)
        return None

    def _described(self, tensor: Tensor) -> tuple[Any, ...]:
        if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_quantized:
            raise Untold(f"a {type(tensor).__name__}")
        fake = isinstance(tensor, FakeTensor) or tensor.is_meta
        number = self.tensors.setdefault(id(tensor), len(self.tensors))
        memory = self.storages.setdefault(tensor.untyped_storage()._cdata, len(self.storages))
        value = None if fake or isinstance(tensor, nn.Parameter) else hashlib.sha256(_content(tensor)).hexdigest()
        where = tensor.device, tensor.storage_offset(), tensor.stride()
        return number, memory, type(tensor), tensor.dtype, tensor.shape, where, tensor.requires_grad, value

    def _file(self, code: type | FunctionType) -> list[int]:
        """The state of the file of a class or function."""
        name = code.__module__
        if name not in self.files:
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None)
            if module is None or (file is None and name not in sys.builtin_module_names) or name == "__main__":
                raise Untold(f"{name}.{code.__qualname__}")
            self.files[name] = [] if file is None else plan_cache.state([file]).get(file, [])
        found: Any = sys.modules[name]
        for part in code.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not code:  # a local class, a lambda, a function that was replaced
            raise Untold(f"{name}.{code.__qualname__}")
        return self.files[name]


def _content(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _own(objective: Objective) -> dict[str, Tensor]:
    """The parameters and buffers by the names of a graph's sources."""
    named = (*objective.named_buffers(), *objective.named_parameters())
    return {name.removeprefix("model."): tensor.detach() for name, tensor in named}


def _written(made: Captured, objective: Objective) -> str | None:
    """The content of an entry; None for what cannot be one."""
    files = plan_cache.state(plan_cache.module_files())
    if max(time for time, _ in files.values()) >= BEGUN:
        return None
    own, kinds = _own(objective), {source.name: source.kind for source in made.graph.sources}
    constants = {name: tensor for name, tensor in made.tensors.items() if kinds.get(name) == "constant"}
    tensors = *constants.values(), *made.decided.values()
    if any(type(one) not in PLAIN[:3] or one.is_meta or one.requires_grad for one in tensors):
        return None
    if not made.tensors.keys() - constants.keys() <= own.keys():
        return None
    if sum(one.numel() * one.element_size() for one in tensors) > MOST:
        return None
    stored = [{name: _stored(one) for name, one in some.items()} for some in (constants, made.decided)]
    data = pickle.dumps((files, made.graph, list(made.tensors), *stored))
    try:
        _Graphs(io.BytesIO(data)).load()
    except pickle.UnpicklingError:
        return None
    return base64.b64encode(zlib.compress(data, 1)).decode()


def _read(content: str, objective: Objective) -> Captured | None:
    """What an entry holds, for the tensors of an objective; None where it does not hold any more."""
    try:
        entry = _Graphs(io.BytesIO(zlib.decompress(base64.b64decode(content)))).load()
    except (pickle.UnpicklingError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error
    files, graph, names, constants, decided = entry
    if files != plan_cache.state(files):
        return None
    tensors = _own(objective) | {name: _tensor(one) for name, one in constants.items()}
    known = {name: _tensor(one) for name, one in decided.items()}
    if not all(_same(tensors[name], value) for name, value in known.items()):
        return None
    return Captured(graph, {name: tensors[name] for name in names}, known)


def _same(one: Tensor, other: Tensor) -> bool:
    return not isinstance(one, FakeTensor) and not one.is_meta and _stored(one) == _stored(other)


def _stored(tensor: Tensor) -> Stored:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _content(tensor)


def _tensor(stored: Stored) -> Tensor:
    dtype, shape, content = stored
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return flat.view(getattr(torch, dtype)).view(shape)


class _Graphs(pickle.Unpickler):
    """Reads graphs, and no other objects than theirs."""

    def find_class(self, module: str, name: str) -> Any:
        if module == graphs.__name__ and isinstance(found := getattr(graphs, name, None), type):
            return found
        if module == "torch" and isinstance(
            found := getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format)
        ):
            return found
        if (module, name) in OF_ARGUMENTS:
            return OF_ARGUMENTS[module, name]
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which no graph does")
