"""Reject, with its line, what a forward graph cannot express, before export misreads it.

Hooks change or watch gradients from outside of the operators: export drops them silently, and the graph would train to
other numbers. Sparse gradients end in torch errors that do not name the cause.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as every_module

from strategies.capture.nodes import asked_by_user, at, fakes, op_of, replaced, users_line
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.rules.registry import named

HOOK = (
    "which would never be called: the ranks run operators of their own, not this module. Remove it, or write what it "
    "does as operators of the forward, e.g. h = h / 2 + (h / 2).detach() to halve a gradient."
)
SAVED = (
    "which would never be called: the ranks run operators of their own. Leave it out; parallel.recompute and "
    "parallel.offload.activations say what is kept for backward, and where."
)
SPARSE = "has sparse=True, but gradients are dense here; leave it out (and take a dense optimizer)."

REGISTERED: tuple[tuple[type, str], ...] = (
    (Tensor, "register_hook"),
    (Tensor, "register_post_accumulate_grad_hook"),
    (nn.Module, "register_backward_hook"),
    (nn.Module, "register_full_backward_hook"),
    (nn.Module, "register_full_backward_pre_hook"),
)
SEEDING: tuple[tuple[Any, str], ...] = tuple(
    (owner, name)
    for owner, names in (
        (torch, ("manual_seed", "seed", "set_rng_state")),
        (torch.random, ("fork_rng", "manual_seed", "seed", "set_rng_state")),
        (torch.cuda, ("manual_seed", "manual_seed_all", "set_rng_state")),
        (torch.cuda.random, ("manual_seed", "manual_seed_all", "set_rng_state")),
    )
    for name in names
)
UNTRACED = (
    "all_gather_object all_to_all barrier broadcast broadcast_object_list gather irecv isend recv reduce "
    "reduce_scatter scatter send"
).split()
"""Collectives of torch.distributed of which export makes no operators."""
DIFFERENTIABLE = (
    "all_gather all_reduce all_to_all all_to_all_single broadcast gather reduce reduce_scatter scatter".split()
)
COLLECTIVES = {
    "torch.distributed": UNTRACED,
    "torch.distributed.nn": DIFFERENTIABLE,
    "torch.distributed.nn.functional": DIFFERENTIABLE,
}
AS_ONE_DEVICE = (
    "but the program of the ranks has its own collectives, and a forward computes with the batch of all ranks as one "
    "device does. Leave it out, as where torch.distributed.is_initialized() is false (sync_codebook=False)."
)
ALONE: dict[str, Any] = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
"""What torch.distributed says to a forward that is captured."""
DISTRIBUTED = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
_ENTER = saved_tensors_hooks.__enter__
FLOATING = re.compile("float|complex")
ONE_DTYPE = frozenset(
    """
    binary_cross_entropy cdist complex conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d cross
    grid_sampler linalg_cross polar
    """.split()
)
"""Operators whose floating operands all have one dtype, which torch does not ask of tensors without numbers."""
INDEXED = frozenset({"index_add", "index_copy", "index_put", "index_reduce"})
"""Those that write their last operand into the first one."""
PRODUCTS = frozenset({"addmm", "addmv", "baddbmm", "bmm", "linear", "matmul", "mm", "mv"})
NORMS = frozenset({"batch_norm", "batch_norm_training", "group_norm", "instance_norm", "layer_norm"})
CLASSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd"})
HALVES = ("bfloat16", "float16")


def check_hooks(objective: nn.Module) -> None:
    """Raises StrategyError for a parameter or module with a hook on its gradients."""
    for name, parameter in objective.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise StrategyError("MW904", f"Parameter {name.removeprefix('model.')} has a hook on its gradient, {HOOK}")
    if every_module._global_backward_hooks or every_module._global_backward_pre_hooks:
        raise StrategyError("MW904", f"All modules have a backward hook (register_module_full_backward_hook), {HOOK}")
    for name, module in objective.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            called = name.removeprefix("model").removeprefix(".") or type(module).__name__
            raise StrategyError("MW904", f"Module {called} has a backward hook, {HOOK}")


def check_scripted(objective: nn.Module) -> None:
    """Raises StrategyError for a module that torch.jit has compiled: its forward is no Python that can be traced."""
    for name, module in objective.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise StrategyError(
                "MW906",
                f"Module {name.removeprefix('model').removeprefix('.') or 'of the model'} is compiled by "
                "torch.jit.script or torch.jit.trace (or loaded by torch.jit.load), which cannot be captured; use the "
                "module itself. train.compile=true compiles what the ranks run.",
            )


def check_dense(objective: nn.Module) -> None:
    """Raises StrategyError for a table whose gradient is sparse."""
    for name, part in objective.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise StrategyError("MW906", f"Module {name.removeprefix('model.')} {SPARSE}")


@contextmanager
def refusing_unseen(training: bool) -> Iterator[None]:
    """Export within this context: raises StrategyError, with the user's line, where the forward does what a graph
    cannot hold."""
    with ExitStack() as stack:
        if training:
            for owner, name in REGISTERED:
                stack.enter_context(_refused(owner, name, "registers a hook on a gradient", HOOK))
            stack.enter_context(replaced(saved_tensors_hooks, "__enter__", _entered))
        for owner, name in SEEDING:
            stack.enter_context(replaced(owner, name, _seeding(getattr(owner, name), name)))
        if dist.is_available():
            for module, names in COLLECTIVES.items():
                for name in names if module in sys.modules else ():
                    stack.enter_context(_refused(sys.modules[module], name, f"calls {module}.{name}", AS_ONE_DEVICE))
            for name, answer in ALONE.items():
                stack.enter_context(replaced(dist, name, _answering(getattr(dist, name), answer)))
        yield


class Unhooked:
    """The autograd node of a tensor, as a traced forward reads it (`grad_fn`); it refuses hooks."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def register_hook(self, *_: Any) -> NoReturn:
        raise StrategyError("MW906", f"The model's forward registers a hook on a gradient{users_line()}, {HOOK}")

    register_prehook = register_hook


def _entered(saved: saved_tensors_hooks) -> None:
    """Torch's own packing (checkpoint, save_on_cpu) changes no number."""
    if not str(saved.pack_hook.__module__).startswith("torch."):
        raise StrategyError(
            "MW906",
            f"The model's forward keeps values for backward by a function (saved_tensors_hooks){users_line()}, {SAVED}",
        )
    _ENTER(saved)


def _seeding(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`function`, which the forward may not call."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not asked_by_user():
            return function(*args, **kwargs)
        raise StrategyError(
            "MW906",
            f"The model's forward sets the state of torch's random numbers ({name}){users_line()}, but those of a step "
            "depend on train.seed, the step and the operator alone. Draw what is the same in every step once, in the "
            "constructor, and keep it as a buffer; leave it out for numbers that differ from step to step.",
        )

    return call


def _answering(function: Callable[..., Any], answer: Any) -> Callable[..., Any]:
    """`function`, which answers the user's code otherwise."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return answer if asked_by_user() else function(*args, **kwargs)

    return call


def check_nodes(graph: fx.Graph, training: bool) -> None:
    """Raises StrategyError for collectives, sparse tensors, and in training for lookups whose gradients are sparse."""
    for node in graph.nodes:
        if getattr(node.target, "namespace", "") in DISTRIBUTED:
            raise StrategyError("MW906", f"The model's forward calls {op_of(node)}{at(node)}, {AS_ONE_DEVICE}")
        if op_of(node).startswith("as_strided"):
            raise StrategyError(
                "MW906",
                f"{op_of(node)}{at(node)} reads memory by strides, which other layouts of the same tensor do not have, "
                "and the result is no windows of its operand; use unfold, or views and slices.",
            )
        if node.kwargs.get("generator") is not None:
            raise StrategyError(
                "MW906",
                f"{op_of(node)}{at(node)} draws numbers from a torch.Generator of its own, whose state no graph has; "
                "leave it out: numbers of the global one depend on train.seed and the step alone.",
            )
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        given = (fake for one in (node, *node.all_input_nodes) for fake in fakes(one.meta.get("val")))
        if any(fake.layout != torch.strided for fake in given):
            raise StrategyError(
                "MW906",
                f"{op_of(node)}{at(node)} takes or makes a sparse tensor, of which a rank would have no slices; use a "
                "dense one (to_dense()), or indices and values with index_select and index_add.",
            )
        if training and named(str(node.target), node.args, dict(node.kwargs)).get("sparse") is True:
            raise StrategyError(
                "MW906",
                f"{op_of(node)}{at(node)} {SPARSE}",
            )


def check_operands(graph: OperatorGraph) -> None:
    """Raises StrategyError for what torch refuses when it computes, but not when it traces: operands of two dtypes,
    norms whose weights have another one, labels that are neither int64 nor uint8, those of other pictures, and
    indices in a matrix."""
    for operator in graph.operators:
        specs = graph.operand_specs(operator)
        dtypes, shapes = [spec.dtype for spec in specs], [spec.shape for spec in specs]
        classes = operator.op in CLASSES
        pictures = (shapes[0][0], *shapes[0][2:]) if classes and len(shapes[0]) == len(shapes[1]) + 1 > 2 else None
        if pictures is not None and shapes[1] != pictures:
            what = f"has scores of {list(shapes[0])} and labels of {list(shapes[1])}"
            cure = f"labels of {list(pictures)} belong to these scores"
        elif operator.op in PRODUCTS and len({*dtypes}) > 1:
            what, cure = (
                f"multiplies {' and '.join(dict.fromkeys(dtypes))}",
                f"cast to one of them, e.g. x.to({dtypes[-1]})",
            )
        elif len(mixed := {*filter(FLOATING.search, dtypes)}) > 1 and operator.op in ONE_DTYPE:
            what, cure = f"takes {' and '.join(sorted(mixed))}", f"cast to one of them, e.g. x.to({dtypes[0]})"
        elif operator.op in INDEXED and dtypes[0] != dtypes[-1]:
            what, cure = f"writes {dtypes[-1]} into {dtypes[0]}", f"make it with dtype=x.dtype, or cast to {dtypes[0]}"
        elif operator.op in NORMS and any(
            one != dtypes[0] and (one != "float32" or dtypes[0] not in HALVES) for one in dtypes[1:3]
        ):
            what, cure = f"has an operand of {dtypes[0]} and weights of {dtypes[1]}", f"cast it, e.g. x.to({dtypes[1]})"
        elif classes and dtypes[1] in ("bool", "int8", "int16", "int32"):
            what, cure = f"has labels of {dtypes[1]}", "give them as int64 (labels.long() in the dataset)"
        elif operator.op == "index_select" and len(shapes[1]) > 1:
            what, cure = f"selects by indices of {list(shapes[1])}", "give it a vector, or index: x[indices]"
        else:
            continue
        raise StrategyError(
            "MW901", f"The model or its loss fails at {operator.where}: it {what}, which torch refuses; {cure}."
        )


def _refused(owner: Any, name: str, what: str, why: str) -> AbstractContextManager[None]:
    """Let the function `name` of `owner` raise meanwhile."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise StrategyError("MW906", f"The model's forward {what}{users_line()}, {why}")

    return replaced(owner, name, refuse)
