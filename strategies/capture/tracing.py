"""The settings under which a model is traced so that its graph is complete; all are restored afterwards.

torch.export makes sub-graphs of no_grad and autocast regions, but drops regions that only write, and no_grad within
autocast; so the borders of regions stay in the graph as they were recorded. inference_mode is traced as no_grad. Batch
normalizations that average over all batches get a number in place of what python would read from a buffer. An autocast
of the caller is not the model's. Checks of values within torch itself, which raise or choose a faster path to the same
result, are left out: a graph has no values. Three bugs of torch 2.11 are worked around: a power of a zero-dim tensor,
the shape of an LSTM's states, and the range check of quantiles. Tensors that index others in masks of positions are
operators, not a torch.autograd.Function with a rule for vmap. A forward may go on after an error of a child. Hugging
Face models leave out masks that hide nothing, except for exporters, whose graphs serve many shapes and values; this
graph serves one shape, and positions that the model itself counts have values.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import decompositions
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._subclasses import fake_impls
from torch.autograd.grad_mode import inference_mode
from torch.distributions import Distribution
from torch.fx import Tracer
from torch.nn import functional
from torch.nn.modules import transformer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils._named_member_accessor import NamedMemberAccessor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from strategies.capture.bags import embedding_bag
from strategies.capture.checking_numbers import asked_of_tensors
from strategies.capture.checking_operators import WITHOUT_QUESTIONS, bincount, narrow
from strategies.capture.constants import (
    CLASSES,
    QUESTIONS,
    answered,
    counted,
    has_values,
    literal,
    places,
    repeated,
    traced,
    with_classes,
)
from strategies.capture.functional import CUMULATIVE
from strategies.capture.logged_arrays import LoggedArray
from strategies.capture.nodes import beneath_tracing, replaced
from strategies.capture.numbers import SYMBOLS
from strategies.capture.unsupported import Unhooked

READS_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
READS_NODE = Tensor.grad_fn.__get__  # type: ignore[union-attr]
WRITES_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
SWITCHES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
TALKATIVE = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export")
"""Loggers of torch that print tracebacks of what the exporter raises anyway."""


@contextmanager
def traceable(objective: nn.Module) -> Iterator[StandIns]:
    """Export `objective` within this context."""
    with ExitStack() as stack:
        stack.enter_context(in_few_words())
        stack.enter_context(_cumulative_averages(objective))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        keep = lambda module, signature: (module, signature)  # noqa: E731
        for file, name in (
            (replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass"),
            (replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass"),
        ):
            stack.enter_context(replaced(file, name, keep))
        if masks := sys.modules.get("transformers.masking_utils"):
            for query, answer in (
                ("is_torchdynamo_exporting", lambda: False),
                ("is_tracing", lambda tensor=None: not has_values(tensor)),
            ):
                if hasattr(masks, query):  # a release has either or both
                    stack.enter_context(replaced(masks, query, answer))
        if indexing := sys.modules.get("torch._dynamo._trace_wrapped_higher_order_op"):
            stack.enter_context(replaced(indexing, "mod_index", torch.ops.aten.index.Tensor))
        stack.enter_context(replaced(inference_mode, "__enter__", _begin))
        stack.enter_context(replaced(inference_mode, "__exit__", _end))
        stack.enter_context(replaced(Distribution, "_validate_args", False))
        stand_ins = StandIns(objective)
        swap = _swapped(NamedMemberAccessor.swap_tensor, stand_ins)
        stack.enter_context(replaced(NamedMemberAccessor, "swap_tensor", swap))
        stack.enter_context(replaced(transformer, "_detect_is_causal_mask", _said_to_be_causal))
        stack.enter_context(replaced(functional, "gaussian_nll_loss", _unchecked(functional.gaussian_nll_loss)))
        stack.enter_context(replaced(decompositions, "one_layer_lstm", _in_shape(decompositions.one_layer_lstm)))
        stack.enter_context(replaced(nn.Module, "_apply", _converted(nn.Module._apply)))
        stack.enter_context(replaced(Tracer, "call_module", _left_on_errors(Tracer.call_module)))
        stack.enter_context(asked_of_tensors())
        stack.enter_context(_Unasked(stand_ins))
        yield stand_ins


def _left_on_errors(call: Callable[..., Any]) -> Callable[..., Any]:
    """Leave a module that raises, too: torch's tracer would take it for the caller of those that come next."""

    def called(tracer: Any, *given: Any) -> Any:
        depth = len(tracer.module_stack)
        try:
            return call(tracer, *given)
        except BaseException:
            while len(tracer.module_stack) > depth:
                tracer.module_stack.popitem()
            raise

    return called


def _begin(region: Any) -> None:
    region.gradients_before = torch.is_grad_enabled()
    if region.mode:
        torch.set_grad_enabled(False)


def _end(region: Any, *_: Any) -> None:
    torch.set_grad_enabled(region.gradients_before)


class StandIns:
    """The traced tensors in the places of parameters and buffers, for forwards that take these from elsewhere than
    their modules, such as a dict of their own.

    Attributes:
        taken: the ids of the parameters and buffers that were taken so.
        transforms: the lines that transform functions, whose operators are traced instead.
    """

    def __init__(self, objective: nn.Module) -> None:
        tables = (table for module in objective.modules() for table in (module._parameters, module._buffers))
        self.owned = {(id(table), key): tensor for table in tables for key, tensor in table.items()}
        self.by_id: dict[int, Tensor] = {}
        self.taken: set[int] = set()
        self.transforms: set[str] = set()

    def note(self, table: Mapping[str, Tensor | None], key: str, value: Tensor) -> None:
        """Note the tensor that a module has now."""
        owned = self.owned.get((id(table), key))
        if owned is value:
            self.by_id.pop(id(owned), None)
        elif owned is not None:
            self.by_id[id(owned)] = value

    def __call__(self, leaf: Any) -> Any:
        if id(leaf) in self.by_id:
            self.taken.add(id(leaf))
            return self.by_id[id(leaf)]
        return leaf

    def among(self, leaves: Iterable[Any]) -> bool:
        """Whether one of these has a stand-in."""
        return not self.by_id.keys().isdisjoint(map(id, leaves))


def _swapped(swap: Callable[..., Any], stand_ins: StandIns) -> Callable[..., Any]:
    """`swap`, by which the exporter puts traced tensors into a module, by the name of any parameter or buffer: it looks
    them up as attributes, which names with a dot and those of methods (a child `forward`) are not."""

    def call(accessor: Any, name: str, value: Any, allow_missing: bool = False) -> Any:
        known = accessor.memo.get("")
        if known is None:
            tables = (
                (prefix, table)
                for prefix, module in accessor.module.named_modules(remove_duplicate=False)
                for table in (module._parameters, module._buffers)
            )
            known = {f"{prefix}.{key}".removeprefix("."): (table, key) for prefix, table in tables for key in table}
            accessor.memo[""] = known
        if name not in known or not isinstance(value, Tensor):
            return swap(accessor, name, value, allow_missing)
        table, key = known[name]
        before, table[key] = table[key], value
        stand_ins.note(table, key, value)
        return before

    return call


def _converted(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`apply`, by which Module.to converts a module, where it does anything: forwards call it to be sure of a dtype."""

    def call(module: nn.Module, function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        tensors = [*module.parameters(), *module.buffers()]
        with beneath_tracing():
            nothing = all(map(_same, tensors, map(function, tensors)))
        if nothing:
            return module
        converted: nn.Module = apply(module, function, *args, **kwargs)
        return converted

    return call


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two traced tensors have the same dtype and memory."""
    return one.dtype == other.dtype and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _said_to_be_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """What torch's transformer passes on beside a mask; it would compare the mask with a causal one."""
    return is_causal is True


def _unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which asks with torch.any whether to raise, without the question."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with replaced(torch, "any", lambda _: False):
            return function(*args, **kwargs)

    return call


def _in_shape(layer: Callable[..., Any]) -> Callable[..., Any]:
    """`layer`, which computes one layer of an LSTM, with new states of the shape of the old ones."""

    def call(batch: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
        output, new = layer(batch, states, *args, **kwargs)
        return output, tuple(one.reshape(old.shape) for one, old in zip(new, states, strict=True))

    return call


def _without_bytes(leaf: Any) -> Any:
    return leaf.long() if isinstance(leaf, Tensor) and leaf.dtype == torch.uint8 else leaf


class _Unasked(TorchFunctionMode):
    """Makes an exponent a tensor where it is a number that a tensor holds: torch would ask whether it is 1. Quantiles
    are in range. Questions about constants have answers, and `.data` is a detached tensor. So is a parameter whose
    `requires_grad` a forward switches off (the discriminator in the loss of a generator), until it is on again. A
    parameter that a forward takes from elsewhere than its module (a dict of its own) is the traced one."""

    def __init__(self, stand_ins: StandIns) -> None:
        super().__init__()
        self.frozen: dict[int, Tensor] = {}
        self.stand_ins = stand_ins

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        lists = (leaf for arg in args if type(arg) in (list, tuple) for leaf in arg)
        if self.stand_ins.among(chain(args, lists, (kwargs or {}).values())):
            args, kwargs = tree_map(self.stand_ins, (tuple(args), kwargs or {}))
        if name == "__get__" and function == READS_NODE:
            return args[0].grad_fn and Unhooked(args[0].grad_fn)
        if name == "__get__" and not self.frozen and function != READS_DATA:  # half of all calls
            return function(*args)
        if name in ("pow", "pow_") and len(args) == 2 and isinstance(args[1], SYMBOLS):
            base, exponent = args
            exact = isinstance(exponent, torch.SymFloat) and (base.is_floating_point() or base.is_complex())
            args = base, torch.full((), exponent, dtype=base.dtype if exact else None, device=base.device)
        if function in SWITCHES:
            if (args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True)) is False:
                if args[0].requires_grad:
                    self.frozen[id(args[0])] = args[0]
                return args[0]
            if self.frozen.pop(id(args[0]), None) is not None:
                return args[0]
        elif self.frozen:
            detached = lambda leaf: leaf.detach() if id(leaf) in self.frozen else leaf  # noqa: E731
            args, kwargs = tree_map(detached, (tuple(args), kwargs))
        if function in WITHOUT_QUESTIONS:
            return WITHOUT_QUESTIONS[function](*args, **(kwargs or {}))
        if function is Tensor.numpy and traced(args[0])[0] is not None:
            return LoggedArray(args[0])
        if function is functional.embedding_bag:
            return embedding_bag(*args, **(kwargs or {}))
        if name in CLASSES:
            kwargs = with_classes(name, args, kwargs or {})
        if function in (functional.cross_entropy, functional.nll_loss):  # torch's formula takes no bytes as classes
            args, kwargs = tree_map(_without_bytes, (tuple(args), kwargs))
        if function in (torch.bincount, Tensor.bincount) and (len(args) > 2 or (kwargs or {}).get("minlength", 0)):
            return bincount(*args, **(kwargs or {}))
        if name in ("quantile", "nanquantile"):
            with _all_equal():
                return function(*args, **(kwargs or {}))
        if function in QUESTIONS and (answer := answered(function, args[0])):
            return answer[0]
        if (found := literal(function, args, kwargs or {})) is not None:
            return found
        if name == "repeat_interleave" and len(args) > 1 and (made := repeated(*args, **(kwargs or {}))) is not None:
            return made
        function, args = places(function, args)
        args, kwargs = counted(function, args, kwargs)
        if function in (torch.narrow, Tensor.narrow):
            return narrow(*args, **(kwargs or {}))
        if function == READS_DATA:
            return args[0].detach()
        if function == WRITES_DATA and (args[0].shape, args[0].dtype) == (args[1].shape, args[1].dtype):
            if _same(*args) and args[0].stride() == args[1].stride():  # `w.data = w.data.to(dtype)`
                return None
            with torch.no_grad():
                return args[0].copy_(args[1].detach())
        return function(*args, **(kwargs or {}))


@contextmanager
def _all_equal() -> Iterator[None]:
    """Let tensors without values say that they are equal: so torch 2.11 asks whether quantiles are from 0 to 1."""
    known, equal = fake_impls.op_implementations_dict, torch.ops.aten.equal.default
    before = known.get(equal)
    known[equal] = lambda *args, **kwargs: True
    try:
        yield
    finally:
        del known[equal]
        if before is not None:
            known[equal] = before


@contextmanager
def _cumulative_averages(objective: nn.Module) -> Iterator[None]:
    """Give batch normalizations without a momentum one that stands for the average over all batches: they would
    compute it in python, from a buffer."""
    norms = [m for m in objective.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    averaging = [norm for norm in norms if norm.momentum is None]
    try:
        for norm in averaging:
            norm.momentum = CUMULATIVE
        yield
    finally:
        for norm in averaging:
            norm.momentum = None


@contextmanager
def in_few_words() -> Iterator[None]:
    """Keep torch from printing tracebacks and half a graph when an export fails: the exception has both."""
    levels = {name: logging.getLogger(name).level for name in TALKATIVE}
    printed = io.StringIO()
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(printed):
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    sys.stderr.write(printed.getvalue())  # what the user's own forward had to say
