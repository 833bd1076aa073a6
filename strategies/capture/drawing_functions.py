"""Functions that draw numbers with Python's or numpy's global generators, in a captured graph: one node for each call.

What they draw would be constants of the graph, the same in every step. So the function of every drawing call
(`rules.drawing_calls`) becomes one random operator, which ranks call. It can be one where it returns arrays and tensors
of fixed shapes, the same for the same numbers, and does nothing else. An array of its results stands in the forward for
nothing but the tensor that is made of it. Of other draws only a comparison is answered that no number of the interval
would answer otherwise, as of a layer that is skipped with probability 0; all else is refused.
"""

from __future__ import annotations

import operator
import pickle
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from types import FrameType, ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import track_tensor_tree
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from strategies.capture.nodes import FUNCTION_CALL, beneath_tracing, proxy_mode, replaced, users_line
from strategies.core.errors import StrategyError
from strategies.rules.drawing_calls import INSTANCES, Interval, called_name, drawing_call, fits, noticing
from strategies.rules.function_calls import FunctionCall, drawn_function, tensors_in
from strategies.rules.module_calls import as_text, autocast_dtype, slotted
from strategies.rules.registry import function_class

DRAWN = (
    "outside of torch, which would be the same in every step. Draw them with torch (torch.rand), seed them within the "
    "forward, or draw them in a function of its own, at the top of a module, which takes numbers and tensors without "
    "gradients and returns arrays or tensors of fixed shapes."
)
STATES: dict[str, Callable[[], Any]] = {"random": random.getstate, "numpy.random": np.random.get_state}
GENERATORS = np.random.Generator, np.random.RandomState, random.Random
CONVERSIONS = frozenset((torch.tensor, torch.as_tensor, torch.asarray))
INDEXED = frozenset((Tensor.__getitem__, Tensor.__setitem__))


class DrawsIn(BaseException):
    """The function of this name must be one node. Not an Exception, which a model's forward may handle."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class DrawingFunctions:
    """The functions that are to be one node, by name, in the forward of `root`."""

    def __init__(self, root: nn.Module) -> None:
        self.chosen, self.suspected = set[str](), set[str]()
        self.generators = list(_generators(root))

    def choose(self, error: BaseException) -> bool:
        """Choose the function whose call asks for values, which raised an error, if a trial shows that it draws."""
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        call = drawing_call(frame)
        name = None if call is None else called_name(call)
        if name is None or name in self.chosen:
            return False
        self.chosen.add(name)
        self.suspected.add(name)
        return True

    @contextmanager
    def as_nodes(self) -> Iterator[None]:
        """Export within this context. Raises DrawsIn within for a function that must be one node, StrategyError for
        numbers that cannot be restored so."""
        before = {name: pickle.dumps(state()) for name, state in STATES.items()}
        own = list(map(pickle.dumps, self.generators))
        with ExitStack() as stack:
            for name in self.chosen:
                stack.enter_context(_recording(name, name in self.suspected))
            if self.chosen:  # else there are no arrays of theirs
                stack.enter_context(_Conversions())
            stack.enter_context(replaced(torch, "from_numpy", _of_arrays(torch.from_numpy)))
            stack.enter_context(replaced(np.random, "default_rng", _seeded(np.random.default_rng)))
            seeded = stack.enter_context(noticing(self._notice))
            checked = stack.enter_context(_type_checks())
            yield
        for generator, dumped in zip(self.generators, own, strict=True):
            if pickle.dumps(generator) != dumped:
                raise _own(type(generator).__name__)
        for name, state in STATES.items():
            if name == "random" and checked():
                continue
            if name not in seeded and pickle.dumps(state()) != before[name]:  # by a function of another name
                raise StrategyError("MW906", f"The model's forward draws numbers with {name}, {DRAWN}")

    def _notice(self, frame: FrameType, generator: str, interval: Interval | None) -> RandomNumber | None:
        if _tracer() is None:  # in a trial
            return None
        call = drawing_call(frame)
        name = None if call is None else called_name(call)
        if name is None or name in self.chosen:
            refusal = StrategyError(
                "MW906", f"The model's forward draws numbers with {generator}{users_line()}, {DRAWN}"
            )
            if call is not None or interval is None:
                raise refusal
            return RandomNumber(interval, refusal)
        raise DrawsIn(name)


@contextmanager
def _type_checks() -> Iterator[Callable[[], bool]]:
    """Yields a function: whether all draws from Python's generator, of which there are some, were those of beartype,
    whose wrappers check elements of lists at random. That changes no value."""
    draws: set[bool] = set()

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__name__", "") in ("random", "getrandbits"):
            if getattr(function, "__self__", None) is INSTANCES[random]:
                draws.add(frame.f_code.co_filename.startswith("<@beartype("))

    if "beartype" in sys.modules and sys.getprofile() is None:
        sys.setprofile(note)
        try:
            yield lambda: draws == {True}
        finally:
            sys.setprofile(None)
    else:
        yield lambda: False


def _generators(root: nn.Module) -> Iterator[Any]:
    """Generators of Python and numpy that modules hold, or that are global in the files of their classes."""
    files = {sys.modules.get(type(module).__module__) for module in root.modules()} - {None}
    values = (value for owner in (*root.modules(), *files) for value in list(vars(owner).values()))
    return (value for value in values if isinstance(value, GENERATORS) and value not in INSTANCES.values())


def _seeded(default_rng: Callable[..., Any]) -> Callable[..., Any]:
    def call(seed: Any = None) -> Any:
        if seed is None and _tracer() is not None:
            raise _own("Generator")
        return default_rng(seed)

    return call


def _own(kind: str) -> StrategyError:
    return StrategyError("MW906", f"The model's forward draws numbers from a {kind} of its own, {DRAWN}")


def _tracer() -> Any:
    tracing = proxy_mode()
    return None if tracing is None else tracing.tracer


@contextmanager
def _recording(name: str, suspected: bool) -> Iterator[None]:
    """Calls of a function become nodes, by whatever name a module holds it."""
    module, _, path = name.partition("::")
    function = function_class(path, module)
    owner = function_class(path.rpartition(".")[0], module) if "." in path else sys.modules[module]
    own = [(owner, path.rpartition(".")[2])]
    if isinstance(owner, ModuleType):
        others = [one for one in list(sys.modules.values()) if isinstance(one, ModuleType)]
        own = [(one, key) for one in others for key, value in list(vars(one).items()) if value is function]
    before = [vars(one)[key] for one, key in own]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tracer = _tracer()
        if tracer is None or not fits((args, kwargs)):
            return function(*args, **kwargs)
        try:
            return _recorded(name, function, (args, kwargs), tracer)
        except StrategyError:
            if suspected:
                return function(*args, **kwargs)
            raise

    try:
        for (one, key), value in zip(own, before, strict=True):
            setattr(one, key, staticmethod(call) if isinstance(value, staticmethod) else call)
        yield
    finally:
        for (one, key), value in zip(own, before, strict=True):
            setattr(one, key, value)


def _recorded(name: str, function: Callable[..., Any], given: Any, tracer: Any) -> Any:
    """What a function returns for `given`, as results of one node."""
    tensors, arguments = slotted(given)
    proxies = [tracer.unwrap_proxy(one) for one in tensors]
    if not all(isinstance(proxy, fx.Proxy) for proxy in proxies):
        raise _refusal(name, "takes a tensor that is neither computed nor a parameter, buffer or entry of the batch")
    device = next((one.device for one in tensors), torch.device("cpu"))
    call = FunctionCall(name, arguments, autocast_dtype(device))
    with _disable_current_modes(), torch.device("cpu"):
        returned, drew = _tried(call, function, tensors)
        results = tuple((tuple(one.shape), one.dtype) for one in tensors_in(returned))
    if not drew:  # for these arguments
        return function(*given[0], **given[1])
    text = as_text(replace(call, results=results))
    with beneath_tracing():
        made = drawn_function(text, device, *tensors)
    node = tracer.create_proxy("call_function", FUNCTION_CALL, (text, device, *proxies), {}, function.__name__.lower())
    tracked = iter(track_tensor_tree(made, node, constant=None, tracer=tracer))
    return tree_map_only(
        (Tensor, np.ndarray),
        lambda one: RandomArray(next(tracked), name) if isinstance(one, np.ndarray) else next(tracked),
        returned,
    )


def _tried(call: FunctionCall, function: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[Any, bool]:
    """What a function returns for zeros, or else for ones, in place of its tensors, and whether it draws. Raises
    StrategyError where it cannot be one operator."""
    device, errors = torch.device("cpu"), list[Exception]()
    for number in (0, 1):
        given = [torch.full(tuple(one.shape), number, dtype=one.dtype) for one in tensors]
        try:
            (returned, drew), (again, _) = (call.returned(function, given, device, 0) for _ in range(2))
        except Exception as error:  # whatever it raises on numbers that it did not expect
            errors.append(error)
            continue
        try:
            pairs = zip(tensors_in(returned), tensors_in(again), strict=True)
            same = all(one.equal(other) for one, other in pairs)
        except TypeError as error:
            raise _refusal(call.name, f"returns {error}, beside tensors and arrays") from error
        if not same:
            raise _refusal(call.name, "returns other numbers where these generators begin at the same ones")
        memory = {one.untyped_storage()._cdata for one in given}
        if any(one.untyped_storage()._cdata in memory for one in tensors_in(returned)):
            raise _refusal(call.name, "returns memory of its arguments")
        return returned, drew
    raise _refusal(call.name, f"fails on tensors of zeros and of ones ({errors[0]})") from errors[0]


def _refusal(name: str, what: str) -> StrategyError:
    return StrategyError(
        "MW906",
        f"The model's forward draws numbers with Python's random or numpy in {name}, which ranks cannot call as one "
        f"operator: it {what}. Draw them with torch (torch.rand), or in a function that takes numbers and tensors "
        "without gradients, and returns new arrays or tensors of fixed shapes.",
    )


class RandomArray:
    """Stands in a traced forward for an array that a random function returns: a tensor may be made of it, or indexed
    by it, and nothing else be done with it. Raises StrategyError for anything else."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor, self.name = tensor, name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal(self.name, f"returns an array, and{users_line()} more is done with it than to make a tensor")

    __array__ = __getitem__ = __setitem__ = __iter__ = __len__ = __bool__ = __invert__ = __neg__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse


class RandomNumber:
    """Stands in a traced forward for a number of an interval: comparisons are answered that hold for all of it or for
    none. Raises StrategyError for anything else."""

    def __init__(self, interval: Interval, refusal: StrategyError) -> None:
        self.interval, self.refusal = interval, refusal

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise self.refusal

    def _compared(self, compare: Callable[[float, Any], Any], other: Any) -> bool:
        answers = [compare(end, other) for end in self.interval] if type(other) in (int, float) else []
        if answers[:1] != answers[1:]:
            self._refuse()
        return bool(answers[0]) if answers else self._refuse()

    def __lt__(self, other: Any) -> bool:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(operator.ge, other)

    __float__ = __int__ = __index__ = __round__ = __bool__ = __array__ = __neg__ = __pow__ = __rpow__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse


class _Conversions(TorchFunctionMode):
    """Makes a tensor of a `RandomArray`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in CONVERSIONS and any(isinstance(one, RandomArray) for one in (*args, *kwargs.values())):
            return _converted(function, *args, **kwargs)
        if function in INDEXED:
            args = tree_map_only(RandomArray, lambda one: one.tensor, args)
        return function(*args, **kwargs)


def _converted(function: Any, data: RandomArray, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    tensor = data.tensor.clone() if function is torch.tensor else data.tensor
    return tensor.to(device or tensor.device, dtype or tensor.dtype)


def _of_arrays(from_numpy: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    return lambda array: array.tensor if isinstance(array, RandomArray) else from_numpy(array)
