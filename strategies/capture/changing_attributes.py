"""What a forward computes from and changes, outside of buffers: a count of steps, a flag that it sets, the hidden
state that it left behind, a running average in a plain tensor.

A graph is the same in every step, so it would have what the first one has found. The exporter restores attributes after
it has traced a forward, not new ones, nor the content of lists, classes or globals. So where a forward has changed
anything, the module is called twice, and put back: what a forward sets once, such as the length of a cached table, is
the same in the second call, which computes what a first call would with its random numbers: nothing happens just
once. Numbers and flags that are read must be the same, but for a number of calls or steps to which a forward only adds.
What the first call has left behind may not matter to the second one: it computes the same where tensors of it are not
numbers, and with what was added to lists. What it computes may not follow a clock or what else it reads of the system.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from strategies.capture.python_state import ENTRIES, INTERNAL, Place, PythonState, State, changed
from strategies.capture.repeated_modules import reading
from strategies.capture.system_reads import AHEAD, SystemReads, controlled
from strategies.capture.written_parameters import WrittenParameters
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph, Ref
from strategies.rules.drawing_calls import begin_at, restored

NUMBERS = frozenset({int, float})
HOOKS = frozenset(name for name in INTERNAL if "_hooks" in name)
ROUNDING = 100
"""Neighbouring numbers of the largest element by which equal results may differ."""
LARGEST = 1 << 30
"""Bytes of parameters up to which a model is called to see whether it computes with tensors that it leaves behind: a
forward on the host takes long."""


class ChangingAttributes:
    """What the forward of `root` changes."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._first: PythonState | None = None
        self._names: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        """The tables of every module, and what they hold when the first forward begins."""
        self._keys: list[tuple[dict[Any, Any], Set[Any]]] = []
        """The same, and their keys when a forward begins."""
        self._before: State = {}
        self._tensors: dict[tuple[str, str], Tensor] = {}
        self._counts = self._keeps = False
        """Whether a value of Python, an attribute or a hook, and whether a tensor has changed."""
        self._replaced: dict[tuple[str, str], Tensor] = {}
        self._parameters: dict[str, nn.Parameter] = {}
        self._registered: str | None = None
        """A trainable parameter that the forward makes."""
        self._system = SystemReads()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Export within this context."""
        hooks = [self._root.register_forward_pre_hook(self._begin), self._root.register_forward_hook(self._end)]
        try:
            with self._system.watched():
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self.restore()

    def restore(self) -> None:
        """Take back what an export leaves outside of modules' attributes, in containers of these, and in attributes
        and hooks that a forward is the first to set: traced tensors."""
        if self._first is not None:
            self._first.restore()
        for table, before in self._names:
            for name in table.keys() - before.keys():
                del table[name]
            if any(_of_user(hook) for name, hook in before.items() if type(name) is int and name not in table):
                kept = {name: hook for name, hook in before.items() if name in table or _of_user(hook)}
                table.clear()
                table.update(kept)

    def _begin(self, *_: Any) -> None:
        self._system.in_forward, now = True, PythonState(self._root)
        tables = [table for part in self._root.modules() for table in _tables(part)]
        if self._first is None:
            self._first, self._names = now, [(table, dict(table)) for table in tables]
        self._keys = [(table, {*table}) for table in tables]
        self._before, self._tensors = now.values, _tensors(self._root)
        self._parameters = dict(self._root.named_parameters(remove_duplicate=False))

    def _end(self, *_: Any) -> None:
        self._system.in_forward = False
        tensors = {isinstance(one, Tensor) for one in changed(self._before, PythonState(self._root).values).values()}
        added = any(table.keys() != before for table, before in self._keys)
        self._counts, self._keeps = self._counts or added or False in tensors, self._keeps or True in tensors
        parameters = self._root.named_parameters(remove_duplicate=False)
        new = (name for name, one in parameters if one.requires_grad and self._parameters.get(name) is not one)
        self._registered = self._registered or next(new, None)
        now = _tensors(self._root)
        self._replaced |= {key: one for key, one in self._tensors.items() if now.get(key) is not one}

    def check(
        self,
        graph: OperatorGraph,
        tensors: Mapping[str, Tensor],
        batch: Sequence[Tensor],
        training: bool,
        decides: bool,
    ) -> None:
        """Check what the export has done, and, where a module that `decides` by values was not traced, what a call
        does. Raises StrategyError for a trainable parameter that the forward makes, for a tensor that it replaces
        and the graph needs, for a number or flag that it computes with, and changes in every call, for a tensor of the
        call before that it needs, and for a clock, a process or a file that changes."""
        if self._registered is not None:
            raise StrategyError(
                "MW906",
                f"The model's forward makes the parameter {self._registered.removeprefix('model.')}, which no "
                "optimizer would update and no checkpoint would hold. Make parameters, and layers that have some, in "
                "the constructor; forward may compute other tensors from them.",
            )
        own = (*self._root.parameters(), *self._root.buffers())
        shapes_alone = any(one.is_meta or isinstance(one, FakeTensor) for one in own)
        small = not shapes_alone and sum(one.numel() * one.element_size() for one in own) <= LARGEST
        places = {_memory(one): key for key, one in self._replaced.items()}
        for source in graph.of_kind("constant"):
            value = tensors[source.name]
            key = places.get(_memory(value))
            if (
                key is not None
                and graph.users[Ref(source.id)]
                and not (small and self._cast(key, value, batch, training))
            ):
                raise StrategyError(
                    "MW906",
                    f"The model's forward replaces the tensor {_shown(*key)}, which is no buffer, and computes with "
                    "it: a graph would have its first values in every step. Register it as a buffer "
                    "(register_buffer).",
                )
        if shapes_alone:
            return
        if self._counts or ((self._keeps or decides) and small):
            with (
                controlled(0),
                torch.random.fork_rng([]),
                restored(),
                torch.no_grad(),
                unchanged(self._root) as written,
            ):
                self._call_twice(batch, training, written)
        if self._system.read and small:
            with torch.random.fork_rng([]), restored(), torch.no_grad(), unchanged(self._root) as written:
                self._call_later(batch, training, written)

    def _cast(self, key: tuple[str, str], value: Tensor, batch: Sequence[Tensor], training: bool) -> bool:
        """Whether a call replaces a tensor by itself, but for the dtype: `self.mean = self.mean.type_as(x)`."""
        with controlled(0), torch.random.fork_rng([]), restored(), torch.no_grad(), unchanged(self._root):
            _called(self._root.train(training), batch)
            now = _tensors(self._root).get(key)
        return now is not None and now.shape == value.shape and torch.equal(now, value.to(now.dtype))

    def _call_later(self, batch: Sequence[Tensor], training: bool, written: WrittenParameters) -> None:
        module = self._root.train(training)
        put_back, results = _restoring(module), []
        for seconds in (0, AHEAD):
            with controlled(seconds):
                results.append(_called(module, batch))
            put_back()
            written.restore()
        if not _equal(*results):
            raise StrategyError(
                "MW906",
                f"The model's forward computes with {self._system.what}, of which a graph would have what its capture "
                "read in every step, and which no two ranks have in common. Count steps in a buffer (register_buffer), "
                "draw numbers with torch, and give the constructor what does not change.",
            )

    def _call_twice(self, batch: Sequence[Tensor], training: bool, written: WrittenParameters) -> None:
        module, read = self._root.train(training), dict[int, set[str]]()
        states, results = [PythonState(module).values], list[list[Any]]()
        buffers, between, first = _buffers(module), None, _restoring(module)

        def put_back() -> None:
            buffers()
            written.restore()

        for number in range(2):
            if number and any(isinstance(one, Tensor) for one in changed(*states).values()):
                between = _restoring(module)
            put_back()
            with reading(read):
                results.append(_called(module, batch, number))
            states.append(PythonState(module).values)
        names = {path: read.get(id(vars(one)), set()) for path, one in module.named_modules()}
        changes = changed(*states[1:])
        growing = {(path, name) for path, name, place in changes if place.endswith(ENTRIES)}
        for (path, name, place), last in changes.items():
            if isinstance(last, Tensor) or (path, name) in growing or (path and name not in names[path]):
                continue
            put_back()
            if _only_counted(module, path, name, batch, results[-1]):
                continue
            shown = ", ".join(textwrap.shorten(repr(state.get((path, name, place))), 60) for state in states)
            raise StrategyError(
                "MW906",
                f"The model's forward counts in {_shown(path, name)}{place}, a value of Python ({shown} after so many "
                "calls), of which a graph would have the first one in every step. Count in a buffer "
                "(register_buffer), or leave it out.",
            )
        first()
        put_back()
        left = [*(growing or {place[:2]: None for place in changed(*states[:2])})] or [("", "its hooks")]
        matters = not _equal(results[-1], _called(module, batch, 1))
        if between is not None and not matters:
            between()
            put_back()
            from_first = {place for place in changed(*states[:2]) if place[:2] in growing}
            left = _unusable(module, changes.keys() | from_first, states[0])
            matters = bool(left) and not _equal(results[-1], _called(module, batch, 1))
        if matters:
            raise StrategyError(
                "MW906",
                f"The model's forward computes with what the forward before has left in {_shown(*left[0])}: a graph "
                "would do without it in every step, as the first one. Register it as a buffer (register_buffer), with "
                "its shape from the beginning, reset it at the beginning of a forward, or do in the constructor what "
                "is done once (call the model there on a batch).",
            )


@contextmanager
def unchanged(module: nn.Module) -> Iterator[WrittenParameters]:
    """Leave a module as it was after calls in this context, which may know what of its parameters they write."""
    restore, modes = _restoring(module), {part: part.training for part in module.modules()}
    try:
        with WrittenParameters(module) as own:
            yield own
    finally:
        restore()
        own.restore()
        for part, mode in modes.items():
            part.training = mode


def _restoring(module: nn.Module) -> Callable[[], None]:
    """What gives a module its present state back, but for the values of parameters."""
    python, buffers = PythonState(module), _buffers(module)
    tables = [(table, dict(table)) for part in module.modules() for table in _tables(part)]

    def restore() -> None:
        python.restore()
        for table, entries in tables:
            table.clear()
            table.update(entries)
        buffers()

    return restore


def _tables(part: nn.Module) -> tuple[dict[str, Any], ...]:
    """The attributes of a module by name, and its hooks: a forward that installs some once says so in an attribute."""
    hooks = (value for name, value in vars(part).items() if name in HOOKS and isinstance(value, dict))
    return vars(part), part._buffers, part._parameters, part._modules, *hooks


def _buffers(module: nn.Module) -> Callable[[], None]:
    """What gives buffers their present values back."""
    tables = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    values = [(one, one.detach().clone()) for one in module.buffers()]

    @torch.no_grad()
    def restore() -> None:
        for table, entries in tables:
            table.update(entries)
        for tensor, value in values:
            tensor.copy_(value)

    return restore


def _of_user(hook: Any) -> bool:
    """Whether a hook is not one of the capture's own, which are gone by themselves."""
    return not str(getattr(hook, "__module__", "")).startswith("strategies.")


def _called(module: nn.Module, batch: Sequence[Tensor], seed: int = 0) -> list[Any]:
    """What a module returns, with the same random numbers in every call of a `seed`."""
    torch.manual_seed(seed)
    begin_at(seed)
    return tree_leaves(module(*(tensor.detach().clone() for tensor in batch)))


class _Count:
    """Stands for a number of a module, to which a forward may add numbers. Anything else raises TypeError, and is
    noted."""

    def __init__(self) -> None:
        self.used = False

    def _add(self, other: Any) -> _Count:
        return self if type(other) in NUMBERS else self._refuse()

    def _refuse(self, *_: Any) -> NoReturn:
        self.used = True
        raise TypeError("more is done with this number than to count")

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    __add__ = __radd__ = __sub__ = _add
    __bool__ = __int__ = __float__ = __index__ = __complex__ = __hash__ = __str__ = __repr__ = __format__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __round__ = __rsub__ = _refuse
    __mul__ = __rmul__ = __mod__ = __rmod__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __pow__ = __rpow__ = __divmod__ = __iter__ = __len__ = __array__ = _refuse


def _only_counted(module: nn.Module, path: str, name: str, batch: Sequence[Tensor], expected: Sequence[Any]) -> bool:
    """Whether a forward does nothing with a number of the module `path` but to add numbers to it."""
    owner, count = module.get_submodule(path), _Count()
    if type(before := vars(owner).get(name)) not in NUMBERS:
        return False
    setattr(owner, name, count)
    try:
        return _equal(_called(module, batch, 1), expected) and vars(owner)[name] is count and not count.used
    except Exception:  # whatever the user's forward makes of it
        return False
    finally:
        setattr(owner, name, before)


def _unusable(module: nn.Module, places: Set[Place], before: State) -> list[tuple[str, str]]:
    """Fill the tensors at these places with NaN, or other integers than they hold, but for those that parameters and
    buffers share, or `before`. Returns the attributes and globals that hold them."""
    known = (*module.parameters(), *module.buffers(), *before.values())
    own, filled = {_memory(one) for one in known if isinstance(one, Tensor)}, []
    for place, value in PythonState(module).values.items():
        if isinstance(value, Tensor) and place in places and _memory(value) not in own:
            memory = torch.empty(0, dtype=value.dtype, device=value.device).set_(value.untyped_storage())
            if value.is_floating_point() or value.is_complex():
                memory.fill_(math.nan)
            else:
                memory.fill_(0 if memory.any() else 1)
            filled.append(place[:2])
    return filled


def _equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two results of a forward are the same, but for rounding: operators may add up in another order where
    memory is aligned otherwise."""
    return len(first) == len(second) and all(
        torch.equal(one.isnan(), other.isnan()) and _close(one.nan_to_num(), other.nan_to_num())
        for one, other in zip(first, second, strict=True)
        if isinstance(one, Tensor)
    )


def _close(one: Tensor, other: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()) or one.dtype != other.dtype:
        return False
    return bool((one - other).abs().max() <= ROUNDING * torch.finfo(one.dtype).eps * other.abs().max())


def _shown(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix("model.").removeprefix(".")


def _tensors(root: nn.Module) -> dict[tuple[str, str], Tensor]:
    return {
        (path, name): value
        for path, module in root.named_modules()
        for name, value in vars(module).items()
        if name not in INTERNAL and isinstance(value, Tensor)
    }


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
