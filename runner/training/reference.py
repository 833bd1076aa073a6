"""The single-device reference: the user's eager module, with the random numbers of `train.random=exact`.

Invariant: the n-th random operator of a forward draws from (key, n), as the captured program does. Most are torch's own
functions behind a seed. Where a slice could not repeat torch's numbers, both sides share a definition: dropout, leaky
relu with random slopes, attention and recurrent networks with dropout inside. A call of a function that draws with
Python's or numpy's global generator is one random operator; so is every draw outside of such a function. What the
module recomputes in backward (torch.utils.checkpoint) draws what it drew in forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._pytree import tree_leaves

from strategies.capture.nodes import forwards_wrapped, replaced
from strategies.core.graph import rewrite
from strategies.rules.attention import attention_block
from strategies.rules.drawing_calls import begin_at, drawing_call, noticing, restored
from strategies.rules.packed_sequences import LAYERS, packed_layers
from strategies.rules.random import dropout_block, in_row_major, mix, rrelu_block, seeding
from strategies.rules.recurrent import BLOCK, NETWORKS, drops, recurrent_block
from strategies.rules.registry import named
from strategies.rules.traits import traits

Function = Callable[..., Any]
DROPOUTS = frozenset({functional.dropout, torch.dropout})
COMPOSED = frozenset({functional.gumbel_softmax, torch.svd_lowrank, torch.pca_lowrank})
FRACTIONAL = frozenset(
    getattr(functional, f"fractional_max_pool{end}") for end in ("2d", "3d", "2d_with_indices", "3d_with_indices")
)
"""Functions that draw once, through an operator of another name; FRACTIONAL ones unless they are given the numbers."""
INITIALISERS = frozenset(name for name in dir(nn.init) if name.endswith("_") and not name.startswith("_")) - frozenset(
    "constant_ dirac_ eye_ ones_ zeros_".split()
)
"""Names of functions of torch.nn.init that draw, each once: of a layer that a forward makes."""
SWITCHED = frozenset("dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout rrelu".split())
"""Names of functions that draw only in training (`training` or `train`), and dropouts only if `p` is not 0."""


@cache
def _drawing(name: str) -> bool:
    """Whether torch's operator of this name reads generators."""
    packet: Any = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    overloads: list[Any] = [getattr(packet, overload) for overload in packet.overloads()]  # type: ignore[no-untyped-call]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _given(func: Function, target: str, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, of a function written in python or of torch's operator `target`."""
    if not isinstance(func, FunctionType):
        return named(target, args, kwargs)
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _is_double(leaf: object) -> bool:
    return (leaf.dtype if isinstance(leaf, Tensor) else leaf) is torch.float64


def _as_single(leaf: Any) -> Any:
    if not _is_double(leaf):
        return leaf
    return leaf.float() if isinstance(leaf, Tensor) else torch.float32


def _as_double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.dtype == torch.float32 else leaf


class ExactRandom(TorchFunctionMode):
    """Makes random functions of an eager module draw from (key, ordinal of the call).

    With `single`, a module in fp64 draws the numbers of the same module in fp32. `ordinal` is that of the first call.
    """

    def __init__(self, key: int, *, single: bool = False, ordinal: int = 0) -> None:
        super().__init__()
        self.key, self.ordinal, self.single = key, ordinal, single
        self.patched = ExitStack()
        self.drawing: FrameType | None = None
        """The drawing call in whose numbers the global generators of Python and numpy are."""
        self.packed: PackedSequence | None = None
        """What the recurrent network that runs was called with, if it is packed."""

    def __enter__(self) -> ExactRandom:
        later, at_once = checkpoint._checkpoint_without_reentrant_generator, checkpoint.CheckpointFunction.apply

        def without_reentry(function: Function, *args: Any, **kwargs: Any) -> Any:
            return later(self._repeated(function), *args, **kwargs)  # calls it in backward alone

        def with_reentry(function: Function, *args: Any) -> Any:
            return at_once(self._repeated(function, already_called=False), *args)  # type: ignore[no-untyped-call]

        patches = {
            "_checkpoint_without_reentrant_generator": without_reentry,
            "CheckpointFunction": SimpleNamespace(apply=with_reentry),
        }
        for name, patch in patches.items():
            self.patched.enter_context(replaced(checkpoint, name, patch))
        self.patched.enter_context(forwards_wrapped((nn.LSTM, nn.GRU, nn.RNN), self._on_packed))
        self.patched.enter_context(restored())
        self.patched.enter_context(noticing(self._notice))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self.patched.close()
        self.drawing = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _notice(self, frame: FrameType, *_: Any) -> None:
        call = drawing_call(frame)
        if call is not None and call is not self.drawing:  # other draws are no operators
            begin_at(mix(self.key, self._next()))
        self.drawing = call

    def _repeated(self, function: Function, *, already_called: bool = True) -> Function:
        """A function that is recomputed, outside of this mode, with the numbers of its first call."""
        ordinal = self.ordinal

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal already_called
            if already_called:
                with ExactRandom(self.key, single=self.single, ordinal=ordinal):
                    return function(*args, **kwargs)
            already_called = True
            return function(*args, **kwargs)

        return call

    def __torch_function__(self, func: Function, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in DROPOUTS:
            given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            given["training"] = given.pop("train", given.get("training", True))  # torch.dropout calls it so
            return self._dropout(**given)
        if name == "scaled_dot_product_attention":
            return self._attention(func, args, kwargs)
        if name in NETWORKS:
            return self._network(func, args)
        if name.rstrip("_") in SWITCHED:
            return self._switched(func, name, args, kwargs)
        if func is functional.multi_head_attention_forward:
            with self._inside("dropout", "scaled_dot_product_attention"):
                return func(*args, **kwargs)
        if name in INITIALISERS and getattr(func, "__module__", "") == nn.init.__name__:
            with seeding(self.key, self._next()):
                return func(*args, **kwargs)
        if func in FRACTIONAL and (kwargs.get("_random_samples", *args[5:6] or (None,))) is None:
            return self._seeded(func, name, args, kwargs)
        if func in COMPOSED or _drawing(name):
            return self._seeded(func, name, args, kwargs)
        return func(*args, **kwargs)

    def _seeded(self, func: Function, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.single and any(map(_is_double, tree_leaves((args, kwargs)))):
            single = self._seeded(func, name, *rewrite((tuple(args), kwargs), _as_single))
            return args[0].copy_(single) if name.endswith("_") else rewrite(single, _as_double)
        with seeding(self.key, self._next()):
            if name.endswith("_") and traits(name[:-1]).fills and not args[0].is_contiguous():
                filled: Tensor = args[0]
                return filled.copy_(
                    func(torch.empty_like(filled).contiguous(), *in_row_major(tuple(args[1:])), **kwargs)
                )
            return func(*(args if name.endswith("_") else in_row_major(tuple(args))), **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        dropped = dropout_block(input, p, self.key, self._next(), tuple(input.shape), (0,) * input.dim())
        return input.copy_(dropped) if inplace else dropped

    def _switched(self, func: Function, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = _given(func, f"aten.{name.rstrip('_')}.default", args, kwargs)
        if not given.get("training", given.get("train")) or given.get("p") == 0:
            return func(*args, **kwargs)
        if not name.startswith("rrelu"):
            return self._seeded(func, name, args, kwargs)
        x: Tensor = given["input"] if "input" in given else given["self"]
        result = rrelu_block(x, given["lower"], given["upper"], self.key, self._next(), x.shape, (0,) * x.dim())
        return x.copy_(result) if given.get("inplace") or name == "rrelu_" else result

    def _attention(self, func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = named("aten.scaled_dot_product_attention.default", args, kwargs)
        if given["dropout_p"] == 0:
            return func(*args, **kwargs)
        query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
        dropout, scale, grouped = (given[name] for name in ("dropout_p", "scale", "enable_gqa"))
        batched = (query,) if grouped else (query, key, value)
        lead = torch.broadcast_shapes(*(x.shape[:-2] for x in batched))  # type: ignore[no-untyped-call]
        shape = (*lead, query.shape[-2], key.shape[-2])
        start, starts = 0 if given["is_causal"] else None, (0,) * len(shape)
        ordinal = self._next()
        return attention_block(
            query, key, value, mask, start, dropout, scale, grouped, self.key, ordinal, shape, starts
        )

    def _on_packed(self, forward: Function) -> Function:
        def call(module: nn.Module, input: Any, *args: Any, **kwargs: Any) -> Any:
            self.packed = input if isinstance(input, PackedSequence) else None
            return forward(module, input, *args, **kwargs)

        return call

    def _network(self, func: Function, args: Sequence[Any]) -> Any:
        packed = not isinstance(args[3], bool)  # has its weights there
        target = f"aten.{func.__name__}.{'data' if packed else 'input'}"
        given = named(target, args, {})
        if not drops(given):
            return func(*args)
        if packed:
            states = (given["hx"],) if isinstance(given["hx"], Tensor) else given["hx"]
            draws = self.key, self._next(), 0, states[0].shape[1]
            options = {name: given[name] for name in LAYERS}
            assert self.packed is not None
            return packed_layers(func.__name__, self.packed, states, **options, draws=draws)
        batch = given["input"].shape[0 if given["batch_first"] else 1]
        return recurrent_block(
            target,
            **{name: given[name] for name in BLOCK},
            key=self.key,
            ordinal=self._next(),
            batch=batch,
            start=0,
        )

    @contextmanager
    def _inside(self, *names: str) -> Iterator[None]:
        """Put this mode before functions of `functional` that another one of it calls: torch has switched modes off
        there."""
        before = {name: getattr(functional, name) for name in names}
        for name, function in before.items():
            setattr(
                functional, name, lambda *args, _of=function, **kwargs: self.__torch_function__(_of, (), args, kwargs)
            )
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(functional, name, function)

    def _next(self) -> int:
        ordinal, self.ordinal = self.ordinal, self.ordinal + 1
        return ordinal
