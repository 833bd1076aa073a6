"""Derivatives within a forward (`torch.autograd.grad`) as operators: gradient penalties, forces of an energy, residuals
of a differential equation, gradients of an inner loop.

The exporter does not see what torch's engine computes. So the operators between a differentiated value and its inputs,
as they stand in the graph so far, are run once more under a tracer below autograd, with their backward; what that
records is called again, as operators of the forward, and has derivatives of its own. Formulas of backward are
decomposed into operators of which all derivatives exist. Invariant: the values are those of eager torch, so nothing may
be drawn again and no statistics may be written twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.fx.experimental.proxy_tensor import make_fx, track_tensor_tree
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from strategies.capture.constants import behind
from strategies.capture.nodes import beneath_tracing, draws, fakes, op_of, proxy_mode, replaced, users_line
from strategies.capture.repeated_modules import NOTE, NotRepeated
from strategies.core.errors import StrategyError

aten = torch.ops.aten
DECOMPOSED = """
    _log_softmax_backward_data _prelu_kernel_backward _softmax_backward_data diagonal_backward embedding_dense_backward
    gelu_backward glu_backward hardsigmoid_backward hardswish_backward hardtanh_backward huber_loss_backward
    leaky_relu_backward logit_backward max_pool2d_with_indices_backward mse_loss_backward native_batch_norm_backward
    native_group_norm_backward native_layer_norm_backward nll_loss2d_backward nll_loss_backward select_backward
    sigmoid_backward silu_backward slice_backward smooth_l1_loss_backward tanh_backward threshold_backward
    unfold_backward
""".split()
"""Formulas of backward that torch decomposes into operators with derivatives and sharding rules."""
NORMS = "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit".split()
"""Operators that return statistics beside their result, of which autograd knows no derivatives; decomposed, too."""
RECORDING: list[Any] = []
"""The mode that records operators, while a transform of torch.func runs (see `transforms`)."""
REMEDY = "write it as operators, or train with parallel.mode=stand_alone."


@contextmanager
def derivatives_as_operators() -> Iterator[None]:
    """Export within this context. Raises StrategyError, with the user's line, for a derivative that cannot be
    captured."""

    def run(outputs: Any, upstream: Any, retain: bool, create: bool, inputs: Any, *rest: Any, **options: Any) -> Any:
        tracing = proxy_mode()
        if tracing is not None:
            tracer = tracing.tracer
        elif RECORDING and all(_proxy(RECORDING[-1].tracer, one) is not None for one in (*outputs, *inputs)):
            tracer = RECORDING[-1].tracer  # `upstream` has rows of a vmap, the value is from outside
        else:  # of the operators that are run once more, or of a transform
            return _engine_run_backward(outputs, upstream, retain, create, inputs, *rest, **options)
        if options.get("accumulate_grad"):
            raise _refusal("backward() writes to .grad", "use torch.autograd.grad.")
        results = _derivatives(outputs, upstream, inputs, tracer)
        unused = options.get("allow_unreachable", bool(rest and rest[0]))
        if not unused and any(one is None for one in results):
            raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph.")
        return tuple(one if one is None or create else one.detach() for one in results)

    with replaced(torch.autograd, "_engine_run_backward", run):
        yield


def _refusal(why: str, remedy: str = REMEDY) -> StrategyError:
    where = users_line()
    return StrategyError(
        "MW906", f"The model's forward computes a derivative{where}, which is not captured: {why}; {remedy}"
    )


def _derivatives(
    outputs: Sequence[Tensor], upstream: Sequence[Tensor | None], inputs: Sequence[Tensor], tracer: Any
) -> list[Tensor | None]:
    """The products of `upstream` with the derivatives of `outputs` by `inputs`, as tensors that are traced."""
    proxies = [_proxy(tracer, one) for one in (*outputs, *inputs)]
    if any(proxy is None for proxy in proxies):
        raise _refusal("it is of, or by, a value that is no tensor of the graph")
    nodes: list[fx.Node] = [proxy.node for proxy in proxies if proxy is not None]
    wanted, by = nodes[: len(outputs)], nodes[len(outputs) :]
    between = _between(wanted, by)
    outside = list(dict.fromkeys(arg for node in between for arg in node.all_input_nodes if arg not in {*between, *by}))
    known = {node: one for node, one in zip(nodes, (*outputs, *inputs), strict=True)}
    operands = [known[node] if node in known else _tensor(node, tracer) for node in (*by, *outside)]
    given = [*operands, *(one for one in upstream if one is not None)]
    backward = _Backward(between, by, outside, wanted, [one is not None for one in upstream])
    return _called(_recorded(backward, given), given)


def _proxy(tracer: Any, tensor: Tensor) -> fx.Proxy | None:
    proxy = tracer.unwrap_proxy(tensor)
    return proxy if isinstance(proxy, fx.Proxy) else None


def _between(outputs: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> list[fx.Node]:
    """The operators through which `outputs` depend on `inputs`, in order; and those that make what these write into."""
    nodes = list(outputs[0].graph.nodes)
    if any(node.target is NOTE for node in nodes):
        raise NotRepeated
    needed = {one for output in outputs for one in behind(output, nodes)}
    made = set[fx.Node]()
    while True:
        depending, differentiable = {*inputs, *made}, True
        for node in nodes:
            if node.target is torch._C._set_grad_enabled:
                differentiable = bool(node.args[0])
            elif node.target is torch.amp.autocast_mode._enter_autocast:
                raise _refusal("it is under autocast")
            elif node in depending or not differentiable or node.target is aten.detach.default:
                continue
            elif not depending.isdisjoint(node.all_input_nodes) and any(map(_floating, fakes(node.meta.get("val")))):
                depending.add(node)
        between = [node for node in nodes if node in depending and node in needed and node not in inputs]
        if not (outside := {one for node in between for one in _written(node)} - {*between}):
            break
        if any(one.op != "call_function" or one in inputs for one in outside):
            raise _refusal("it goes through a write into a tensor that it does not make")
        made |= outside
    for node in between:
        if node.target is getitem:
            continue
        if not isinstance(node.target, OpOverload):
            raise _refusal(f"it goes through {op_of(node)}")
        if draws(node):
            raise _refusal(f"it goes through {op_of(node)}, which draws random numbers")
    return between


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """What an operator writes into, and what that is a view of."""
    schema = node.target._schema if isinstance(node.target, OpOverload) else None
    for argument, given in zip(schema.arguments if schema is not None else (), node.args, strict=False):
        info = argument.alias_info
        while info is not None and info.is_write and isinstance(given, fx.Node):
            yield given
            first = given.target._schema.arguments[:1] if isinstance(given.target, OpOverload) else ()
            is_view = given.target is getitem or any(one.alias_info is not None for one in first)
            given = given.args[0] if is_view else None


def _floating(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _tensor(node: fx.Node, tracer: Any) -> Tensor:
    """A tensor that stands for the value of a node."""
    (value,) = fakes(node.meta["val"])
    with beneath_tracing(), temporarily_clear_interpreter_stack():
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        made.requires_grad_(_floating(made))
    track_tensor_tree(made, fx.Proxy(node, tracer), constant=None, tracer=tracer)
    return made


class _Backward:
    """Operators and their backward as a function of tensors: `by`, `outside`, and what comes from above."""

    def __init__(
        self,
        between: Sequence[fx.Node],
        by: Sequence[fx.Node],
        outside: Sequence[fx.Node],
        wanted: Sequence[fx.Node],
        given: Sequence[bool],
    ) -> None:
        self._between, self._by, self._outside, self._wanted, self._given = between, by, outside, wanted, given

    def __call__(self, *operands: Tensor) -> list[Tensor | None]:
        inputs = [operand.detach().requires_grad_() for operand in operands[: len(self._by)]]
        constants = operands[len(inputs) : len(inputs) + len(self._outside)]
        above = iter(operands[len(inputs) + len(constants) :])
        values: dict[fx.Node, Any] = dict(zip((*self._by, *self._outside), (*inputs, *constants), strict=True))
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            for node in self._between:
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*_without_statistics(node, args), **kwargs)  # type: ignore[operator]
            upstream = [next(above) if given else None for given in self._given]
            outputs = [values[node] for node in self._wanted]
            # formulas that can be derived again are other ones
            found = torch.autograd.grad(outputs, inputs, upstream, create_graph=True, allow_unused=True)
        return list(found)


def _without_statistics(node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a batch norm in training without its running averages, which the first call has written."""
    if node.target is aten.batch_norm.default and args[5]:
        return *args[:3], None, None, *args[5:]
    return args


@cache
def formulas() -> Mapping[Any, Callable[..., Any]]:
    """Operators of which not all derivatives exist, or that have no sharding rules, by ones that do."""
    packets = [getattr(aten, name) for name in (*DECOMPOSED, *NORMS)]
    targets = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    known = {target: decomposition_table[target] for target in targets if target in decomposition_table}
    return known | FORMULAS


def _recorded(backward: Callable[..., Any], operands: Sequence[Tensor]) -> fx.GraphModule:
    looks = [(one.shape, one.stride(), one.dtype, one.device) for one in operands]
    with _disable_current_modes(), torch._C.DisableTorchFunction(), FakeTensorMode():
        fake = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in looks
        ]
        with replaced(sys.modules[__name__], "RECORDING", []), temporarily_clear_interpreter_stack():
            recorded: fx.GraphModule = make_fx(backward, decomposition_table=formulas())(*fake)
    recorded.graph.eliminate_dead_code()
    return recorded


def _called(recorded: fx.GraphModule, operands: Sequence[Tensor]) -> list[Tensor | None]:
    """The results of recorded operators on traced tensors; a user's own detach is in front of what was recorded."""
    values: dict[fx.Node, Any] = {}
    left = iter(operands)
    for node in recorded.graph.nodes:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda one: values[one])
        if node.op == "placeholder":
            values[node] = next(left)
        elif node.op == "output":
            found: list[Tensor | None] = list(args[0])
        elif node.op == "get_attr":
            raise _refusal("it needs a constant of torch's own")
        else:
            target, args = known_by_rules(node.target, args, getattr(args[0], "ndim", 0) if args else 0)
            values[node] = target(*args, **kwargs)
    return found


def known_by_rules(target: Any, args: tuple[Any, ...], dims: int = 0) -> tuple[Any, tuple[Any, ...]]:
    """The operator that a model would call in place of one below autograd, whose first operand has `dims` dims. What
    autograd detaches of what it saves is not detached."""
    if target is aten.detach.default:
        return aten.alias.default, args
    if target is aten._softmax.default:
        return aten.softmax.int, args[:2]
    if target is aten._log_softmax.default:
        return aten.log_softmax.int, args[:2]
    if target is aten.convolution.default:
        plain = {3: aten.conv1d.default, 4: aten.conv2d.default, 5: aten.conv3d.default}
        upwards = {3: aten.conv_transpose1d.default, 4: aten.conv_transpose2d.input, 5: aten.conv_transpose3d.input}
        if args[6]:
            return upwards[dims], (*args[:5], args[7], args[8], args[5])
        return plain[dims], (*args[:6], args[8])
    return target, args


def _softplus_backward(above: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    return torch.where(x * beta > threshold, above, above * torch.sigmoid(x * beta))


def _log_sigmoid_backward(above: Tensor, x: Tensor, _: Tensor) -> Tensor:
    return above * torch.sigmoid(-x)


def _elu_backward(above: Tensor, alpha: float, scale: float, input_scale: float, of_result: bool, x: Tensor) -> Tensor:
    falling = x + alpha * scale if of_result else alpha * scale * torch.exp(x.clamp(max=0) * input_scale)
    return above * torch.where(x > 0, scale, falling * input_scale)


def _convolution_backward(
    above: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> Any:
    """Backward of a convolution by operators that have sharding rules: a derivative by the input is a convolution the
    other way."""
    weights = None
    if wanted[1]:
        weights = _weight_gradient(above, x, weight.shape, stride, padding, dilation, transposed, groups)
    if not wanted[0]:
        return None, weights, above.sum((0, *range(2, above.dim()))) if wanted[2] else None
    reached = [
        (out - 1) * s - 2 * p + d * (k - 1) + 1
        for out, s, p, d, k in zip(above.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True)
    ]
    left = [0] * len(reached) if transposed else [n - m for n, m in zip(x.shape[2:], reached, strict=True)]
    back = aten.convolution.default(above, weight, None, stride, padding, dilation, not transposed, left, groups)
    return back, weights, above.sum((0, *range(2, above.dim()))) if wanted[2] else None


def _weight_gradient(
    above: Tensor,
    x: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
) -> Tensor:
    """A convolution of the operand with the gradient as weights, whose channels are the samples."""
    x, above = (above, x) if transposed else (x, above)
    rows, size = len(x), x.shape[1] // groups

    def by_group(value: Tensor) -> Tensor:  # [groups, channels of a group, rows, ...]
        return value.reshape(rows, groups, value.shape[1] // groups, *value.shape[2:]).movedim(0, 2)

    operand = by_group(x).movedim(1, 0).reshape(size, groups * rows, *x.shape[2:])
    kernel = by_group(above).reshape(above.shape[1], rows, *above.shape[2:])
    zeros = [0] * len(stride)
    found: Tensor = aten.convolution.default(operand, kernel, None, dilation, padding, stride, False, zeros, groups)
    for dim, length in enumerate(shape[2:], 2):
        found = found.narrow(dim, 0, length)
    return found.transpose(0, 1)


FORMULAS: dict[Any, Callable[..., Any]] = {
    aten.softplus_backward.default: _softplus_backward,
    aten.log_sigmoid_backward.default: _log_sigmoid_backward,
    aten.elu_backward.default: _elu_backward,
    aten.convolution_backward.default: _convolution_backward,
}
"""Formulas whose second derivatives are finite where an exponential is not, and those that torch does not have."""
