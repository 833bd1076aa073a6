"""A captured graph without writes: what the model writes in place becomes new values.

Every tensor of the graph has a base tensor, whose memory it shows, and the view that it takes of it. A write through a
view computes the view's new value and puts it back along the views into a new value of the base tensor; whoever reads
the base tensor or any other view of it afterwards takes the same view of the new value. So gradients come out as in
eager torch: none for what was overwritten. The last value of a buffer that was written is an update; the batch itself
stays as it was. A parameter that learns is written without autograd (a temperature that is clamped, rows of an
embedding with max_norm): forward goes on with its new value, whose gradient is the parameter's. Batch normalization in
training, which writes its running statistics unseen, returns them instead. In-place operators and the operators that
return what they write are paired by their schemas.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from strategies.capture.nodes import at, call, fakes, floating, op_of
from strategies.core.errors import StrategyError
from strategies.rules.registry import resolve
from strategies.rules.traits import traits

aten = torch.ops.aten
CUMULATIVE = -1.0
"""The momentum that capture gives a batch normalization without one, which averages over all its batches."""
TIED = "parameter under several names"
UNSEEN = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "_batch_norm_impl_index"})
"""Operators that write running statistics although their schema does not say so, and that no module of torch calls."""
OTHERWISE = {
    "normal_": "normal_functional",
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__ixor__": "bitwise_xor",
    "__ilshift__": "bitwise_left_shift",
    "__irshift__": "bitwise_right_shift",
}
"""In-place operators whose functional overload has another name."""
LITERALS = frozenset({"lift_fresh", "lift_fresh_copy"})
"""Operators that return what `torch.tensor(numbers)` makes: in every step anew, whatever was written there."""
NUMBERS = frozenset({"full_like", "ones_like", "zeros_like"})
"""Operators that take only the shape and dtype of their operand (and those of a row of traits, `fills`)."""
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
"""Sizes by which the dims of a permuted tensor are recognised."""


def make_functional(
    graph: fx.Graph, kinds: dict[str, str], buffers: dict[str, str], trainable: Callable[[fx.Node], bool]
) -> dict[fx.Node, fx.Node]:
    """Rewrite `graph` in place; returns the new value of every buffer and parameter that is written.

    `kinds` says what each placeholder is that holds state (parameter, buffer or constant; the others are the batch),
    `buffers` the names of buffers by placeholder, `trainable` which placeholders need a gradient. Raises StrategyError
    for writes that are no plain value: to parameters of several names, to constants, through views that cannot be put
    back, to several tensors at once, and under no_grad or through a detached tensor to what else needs a gradient.
    """
    return _Rewriting(graph, kinds, buffers, trainable).updates


class _Rewriting:
    def __init__(
        self, graph: fx.Graph, kinds: dict[str, str], buffers: dict[str, str], trainable: Callable[[fx.Node], bool]
    ) -> None:
        self.graph, self.kinds, self.buffers, self.trainable = graph, kinds, buffers, trainable
        self.parent: dict[fx.Node, fx.Node] = {}  # view -> its base
        self.same: dict[fx.Node, fx.Node] = {}  # what an in-place operator returned -> what it wrote
        self.now: dict[fx.Node, fx.Node] = {}  # a base tensor -> its value
        self.version: dict[fx.Node, int] = {}  # a base tensor -> how often it was written
        self.seen: dict[fx.Node, tuple[int, fx.Node]] = {}  # a view -> its value at a version of its base tensor
        self.given: dict[fx.Node, Any] = {}  # a view -> its arguments as they were
        self.replaced: list[fx.Node] = []
        self.learned: dict[fx.Node, fx.Node] = {}
        """The new values of parameters that learn."""
        for node in list(graph.nodes):
            with graph.inserting_before(node):
                if node.op == "call_function":
                    self._call(node)
                elif node.op == "output":
                    node.args = fx.map_arg(node.args, self.read)
                else:
                    self._register(node, None)
        written = [base for base in self.now if base.name in kinds and self.version[base] > 0]
        self.updates = {base: self._computed(self.learned.get(base, self.now[base])) for base in written}
        for node in reversed(self.replaced):
            graph.erase_node(node)

    def _computed(self, value: fx.Node) -> fx.Node:
        """A value as an operator's result: a buffer may be given what another source of the graph holds."""
        if value.op != "placeholder" and traits(op_of(value)).equal != "left_out":
            return value
        (end,) = self.graph.find_nodes(op="output")
        with self.graph.inserting_before(end):
            return call(self.graph, value, aten.clone.default, value)

    def _register(self, node: fx.Node, parent: fx.Node | None) -> None:
        """Give a node its base tensor; its value is its own until something is written there."""
        if parent is None:
            self.now[node], self.version[node] = node, 0
        else:
            self.parent[node] = parent
            self.seen[node] = self.version[self._base_of(node)], node

    def _base_of(self, node: fx.Node) -> fx.Node:
        while node in self.same or node in self.parent:
            node = self.same[node] if node in self.same else self.parent[node]
        return node

    def read(self, node: fx.Node) -> fx.Node:
        """The node that holds the value of `node` now."""
        node = self._name(node)
        if node not in self.parent:
            return self.now[node]
        version = self.version[self._base_of(node)]
        known, value = self.seen[node]
        if known != version:
            args, kwargs = fx.map_arg(self.given[node], self.read)  # new nodes of other views come before
            value = self.graph.node_copy(node, lambda arg: arg)
            value.args, value.kwargs = args, kwargs
            self.seen[node] = version, value
        return value

    def _name(self, node: fx.Node) -> fx.Node:
        """The node that first stood for the tensor of `node`."""
        while node in self.same:
            node = self.same[node]
        return node

    def _write(self, node: fx.Node, value: fx.Node, writer: fx.Node) -> None:
        """Let `node`, which `writer` writes, hold `value` from now on."""
        node = self._name(node)
        if node not in self.parent:
            self._check(node, writer)
            self.now[node] = self._with_gradient(node, value, writer) if self._learns(node) else value
            self.version[node] += 1
            return
        view, piece = node, None
        if node.target is python_operator.getitem:
            view, piece = self.parent[node], node.args[1]
        above = self.parent[view]
        base_tensor = self._base_of(view)
        if op_of(view) == "detach" and not self._learns(base_tensor) and self._needs_gradient(self.read(base_tensor)):
            raise StrategyError(
                "MW903",
                _unknown_to_gradient(
                    writer,
                    "through a detached tensor",
                    "a new tensor: y = y.masked_fill(...) for y.data.masked_fill_(...)",
                ),
            )
        known = value
        if op_of(view) == "detach" and self._needs_gradient(value):  # only the detached tensor has its gradient
            known = call(self.graph, writer, aten.detach.default, value)
        complete = _put_back(self.graph, writer, view, piece, self.read(above), known)
        self._write(above, complete, writer)
        self.seen[node] = self.version[self._base_of(node)], value

    def _learns(self, base_tensor: fx.Node) -> bool:
        return self.kinds.get(base_tensor.name) in ("parameter", TIED)

    def _with_gradient(self, parameter: fx.Node, value: fx.Node, writer: fx.Node) -> fx.Node:
        """A new value of a parameter, of which the gradient is the parameter's: zeros that depend on it are added."""
        self.learned[parameter] = value = call(self.graph, writer, aten.detach.default, value)
        before = call(self.graph, writer, aten.detach.default, parameter)
        zeros = call(self.graph, writer, aten.sub.Tensor, parameter, before)
        learned = call(self.graph, writer, aten.add.Tensor, value, zeros)
        for node in (zeros, learned):  # whatever the writer is in
            node.meta.pop("without_grad", None)
        return learned

    def _check(self, base_tensor: fx.Node, writer: fx.Node) -> None:
        kind = self.kinds.get(base_tensor.name, "batch tensor") if base_tensor.op == "placeholder" else None
        if kind in (TIED, "constant"):
            cure = {
                TIED: "use the new value in its place (torch.nn.utils.parametrize), let the optimizer "
                "write it, freeze it, or hold it in a buffer",
                "constant": "register it as a buffer (register_buffer)",
            }
            raise StrategyError("MW903", f"{op_of(writer)}{at(writer)} writes in place to a {kind}; {cure[kind]}.")

    def _call(self, node: fx.Node) -> None:
        if node.target is python_operator.getitem:
            (above,) = node.all_input_nodes
            self.given[node] = node.args, node.kwargs
            node.args = (self.read(above), node.args[1])
            self._register(node, above if above in self.parent else None)
            return
        op = op_of(node)
        if op in ("batch_norm", "instance_norm") and _counts(node):
            self._statistics(node, op)
            return
        if op in UNSEEN and any(arg is True for arg in node.args):
            raise StrategyError(
                "MW903", f"{op}{at(node)} writes running statistics unseen; call torch.nn.functional.batch_norm."
            )
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            self._in_place(node, op)
            return
        shown = None if op in LITERALS else _shown(node)
        self.given[node] = node.args, node.kwargs
        node.args, node.kwargs = fx.map_arg(node.args, self.read), fx.map_arg(node.kwargs, self.read)
        self._register(node, None if shown is None else self._name(shown))

    def _in_place(self, node: fx.Node, op: str) -> None:
        assert isinstance(node.target, OpOverload)
        name = _written_argument(node.target)
        base = None if name is None else node.kwargs[name] if name in node.kwargs else node.args[0]
        if not isinstance(base, fx.Node):
            raise StrategyError(
                "MW903", f"{op}{at(node)} writes in place to several tensors, which cannot be captured."
            )
        if op == "set_" and isinstance(node.args[1], fx.Node) and self._name(node.args[1]) is self._name(base):
            self.same[node] = base  # a tensor for itself, as torch.nn.utils.parametrize keeps the original
            self.replaced.append(node)
            return
        if torch.Tag.inplace_view in node.target.tags and op != "detach_":
            self._turn(node, base, op)
            return
        old = self.read(base)
        value = self._new_value(node, op, old, name)
        if node.meta.get("without_grad") and floating(value.meta["val"]):
            base_tensor = self._base_of(base)
            if not self._learns(base_tensor) and self._needs_gradient(self.read(base_tensor)):
                raise StrategyError(
                    "MW903",
                    _unknown_to_gradient(node, "under no_grad", "outside of no_grad, or to a detached copy"),
                )
            value = call(self.graph, node, aten.detach.default, value)
        self._write(base, value, node)
        self.same[node] = base
        self.replaced.append(node)

    def _new_value(self, node: Any, op: str, old: fx.Node, name: str | None) -> fx.Node:
        """The new value of the tensor with the value `old` after the in-place operator `node`."""
        given: Any = fx.map_arg((node.args, dict(node.kwargs)), self.read)
        args, kwargs = given
        value: fx.Node
        if op == "copy_":
            value = args[1]
        elif op == "detach_":
            value = call(self.graph, node, aten.detach.default, old)
        elif op == "zero_":
            value = call(self.graph, node, aten.zeros_like.default, old)
        elif (
            op == "fill_diagonal_" and old.meta["val"].dim() == 2 and not kwargs.get("wrap", len(args) > 2 and args[2])
        ):
            device, sizes = old.meta["val"].device, list(old.meta["val"].shape)
            diagonal = call(self.graph, node, aten.eye.m, *sizes, dtype=torch.bool, device=device)
            value = call(self.graph, node, aten.masked_fill.Scalar, old, diagonal, args[1])
        else:
            target = _functional_overload(node.target)
            if target is None:
                raise StrategyError(
                    "MW903",
                    f"{op}{at(node)} writes in place and has no form that returns a new tensor; write it with "
                    "operators that have one (torch.where, index_put, masked_fill).",
                )
            kwargs = {key: item for key, item in kwargs.items() if key != name}
            value = call(self.graph, node, target, *args, *_defaults_left_out(node.target, target, len(args)), **kwargs)
        spec, fresh = old.meta["val"], value.meta["val"]
        if fresh.dtype != spec.dtype:
            value = call(self.graph, node, aten.to.dtype, value, spec.dtype)
        if fresh.shape != spec.shape:
            value = call(self.graph, node, aten.expand.default, value, list(spec.shape))
        return value

    def _turn(self, node: Any, base: fx.Node, op: str) -> None:
        """An operator that changes which view a tensor is (transpose_, unsqueeze_): its result is a view, and so are
        later uses of the tensor itself."""
        target, above = _functional_overload(node.target), self._name(base)
        if target is None or above.op == "placeholder":
            cure = "the other tensor in its place" if op == "set_" else op.rstrip("_")
            raise StrategyError("MW903", f"{op}{at(node)} changes the shape of a tensor in place; use {cure}.")
        view = call(self.graph, node, target, self.read(above), *node.args[1:], **node.kwargs)
        self.given[view] = (above, *node.args[1:]), node.kwargs
        self._register(view, above)
        for name in [other for other in self.same if self._name(other) is above] + [above, node]:
            for user in [user for user in name.users if user > node]:
                user.replace_input_with(name, view)
        self.replaced.append(node)

    def _statistics(self, node: fx.Node, op: str) -> None:
        """Normalization in training, which returns its running statistics."""
        given: Any = fx.map_arg(node.args, self.read)
        x, weight, bias, mean, var, _, momentum, eps, _ = given

        def make(target: Any, *args: Any) -> fx.Node:
            return call(self.graph, node, target, *args)

        rate = 1.0 if momentum == CUMULATIVE else momentum
        normed = self.graph.call_function(resolve(f"local.{op}_training"), (x, weight, bias, mean, var, rate, eps))
        normed.meta = {**node.meta, "val": (x.meta["val"], mean.meta["val"], var.meta["val"])}
        out, *news = (make(python_operator.getitem, normed, index) for index in range(3))
        for old, new, written in zip((mean, var), news, node.args[3:5], strict=True):
            if momentum == CUMULATIVE:  # the average of all batches, this one included
                part = make(aten.reciprocal.default, make(aten.to.dtype, self._count(node), new.meta["val"].dtype))
                new = make(aten.lerp.Tensor, old, new, part)
            assert isinstance(written, fx.Node)
            self._write(written, new, node)
        self._register(out, None)
        node.replace_all_uses_with(out)
        self.replaced.append(node)

    def _count(self, node: fx.Node) -> fx.Node:
        """How many batches the batch normalization `node` has seen, this one included."""
        assert isinstance(node.args[3], fx.Node)
        name = self.buffers[self._base_of(node.args[3]).name].removesuffix("running_mean") + "num_batches_tracked"
        return self.read(next(base_tensor for base_tensor in self.now if self.buffers.get(base_tensor.name) == name))

    def _needs_gradient(self, node: fx.Node) -> bool:
        """Whether a trainable parameter stands behind a value."""
        waiting, seen = [node], {node}
        while waiting:
            node = waiting.pop()
            if node.op == "placeholder" and self.trainable(node):
                return True
            if (
                (op := op_of(node)) in ("detach", *NUMBERS)
                or traits(op).fills
                or node.meta.get("without_grad")
                or not any(map(floating, fakes(node.meta.get("val"))))
            ):
                continue
            fresh = set(node.all_input_nodes) - seen
            seen |= fresh
            waiting += fresh
        return False


def _unknown_to_gradient(writer: fx.Node, how: str, instead: str) -> str:
    return (
        f"{op_of(writer)}{at(writer)} writes in place, {how}, to a value that needs a gradient, which would not know "
        f"of it; write {instead}."
    )


def _counts(node: fx.Node) -> bool:
    """Whether a normalization writes running statistics: (x, weight, bias, mean, var, of this batch, ...)."""
    return node.args[3] is not None and node.args[5] is True


def _shown(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the result of a node shows, if any."""
    tensors = [fake for fake in fakes(node.meta.get("val")) if isinstance(fake, Tensor)]
    if not tensors:
        return None
    memory = tensors[0].untyped_storage()._cdata
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if isinstance(value, Tensor) and value.untyped_storage()._cdata == memory:
            return operand
    return None


def _written_argument(target: OpOverload) -> str | None:
    """The name of the one argument that an operator writes; None if it writes several, or a list."""
    written = [given for given in target._schema.arguments if given.alias_info and given.alias_info.is_write]
    return str(written[0].name) if len(written) == 1 and str(written[0].type) == "Tensor" else None


@cache
def _functional_overload(target: OpOverload) -> OpOverload | None:
    """The operator that returns a new tensor with what `target` writes in place (or to `out`), or None."""
    space, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), OTHERWISE.get(name, name.removesuffix("_")), None)
    if packet is None:
        return None
    wanted = _arguments(target)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    fitting = [found for found in overloads if not found._schema.is_mutable and _arguments(found) == wanted]
    fitting.sort(key=lambda found: found._overloadname != target._overloadname)
    return fitting[0] if fitting else None


def _arguments(target: OpOverload) -> list[tuple[str, str]]:
    """Types, and names of those that are given by name, without `out`."""
    return [
        (str(argument.type), argument.name if argument.kwarg_only else "")
        for argument in target._schema.arguments
        if not argument.is_out
    ]


def _defaults_left_out(target: OpOverload, other: OpOverload, given: int) -> list[Any]:
    """The defaults of `target` for arguments after the first `given` for which its functional overload has none."""
    pairs = zip(target._schema.arguments[given:], other._schema.arguments[given:], strict=False)
    return [own.default_value for own, same in pairs if not same.kwarg_only and not same.has_default_value()]


def _put_back(graph: fx.Graph, writer: fx.Node, view: fx.Node, index: Any, base: fx.Node, value: fx.Node) -> fx.Node:
    """`base` with `value` in the part that `view` shows of it (`index`: the number of the view, of several).

    Raises StrategyError if the way back of the view is not known.
    """
    op = op_of(view)
    target: Any = view.target
    shape, own = base.meta["val"].shape, value.meta["val"].shape
    args: Any = view.args[1:]
    kwargs: Any = dict(view.kwargs)
    make: Callable[..., fx.Node] = lambda target, *args, **kwargs: call(graph, writer, target, *args, **kwargs)  # noqa: E731
    if base.meta["val"].is_complex() and op in ("select", "slice"):  # whose scatter has no complex derivative
        dim = args[0] if args else kwargs.pop("dim", 0)
        real = [make(aten.view_as_real.default, part) for part in (base, value)]
        args = (dim if dim >= 0 else dim - 1, *args[1:])
        scatter = aten.select_scatter.default if op == "select" else aten.slice_scatter.default
        return make(aten.view_as_complex.default, make(scatter, *real, *args, **kwargs))
    if op == "select":
        return make(aten.select_scatter.default, base, value, *args, **kwargs)
    if op == "diagonal":
        return make(aten.diagonal_scatter.default, base, value, *args, **kwargs)
    if op == "unbind":
        return make(aten.select_scatter.default, base, value, args[0] if args else kwargs.get("dim", 0), index)
    kind = traits(op).result
    if kind == "split":
        return _part(view, index, base, value, make)
    if op == "view_as_real":
        return make(aten.view_as_complex.default, value)
    if op == "view_as_complex":
        return make(aten.view_as_real.default, value)
    if kind == "permutation":
        labels = torch.empty(PRIMES[: len(shape)], device="meta")
        order = [PRIMES.index(size) for size in target(labels, *args, **kwargs).shape]
        return make(aten.permute.default, value, [order.index(dim) for dim in range(len(order))])
    bits = getattr(target, "_overloadname", "") == "dtype" and op == "view"
    if any(isinstance(one, torch.SymInt | fx.Node) for one in (*shape, *own, *args)):
        if op == "slice" and not any(isinstance(one, torch.SymInt | fx.Node) for one in args):  # of selected rows
            return make(aten.slice_scatter.default, base, value, *args, **kwargs)
        raise StrategyError(
            "MW902",
            f"{op_of(writer)}{at(writer)} writes to a slice that the values of a tensor bound, which are not known "
            "when the model is captured; write by a mask (torch.where), or take bounds that are Python numbers.",
        )
    if own == shape and value.meta["val"].dtype == base.meta["val"].dtype and not bits:
        return value  # the view shows all of it
    if op == "slice":
        return make(aten.slice_scatter.default, base, value, *args, **kwargs)
    if op == "narrow":
        dim, start, length = args
        return make(aten.slice_scatter.default, base, value, dim, start, start + length)
    if own.numel() == shape.numel() and not bits and kind in ("reshape", "expansion"):
        return make(aten.reshape.default, value, list(shape))
    raise StrategyError("MW903", f"{op_of(writer)}{at(writer)} writes in place through {op}, which cannot be captured.")


def _part(view: fx.Node, index: int, base: fx.Node, value: fx.Node, make: Callable[..., fx.Node]) -> fx.Node:
    """The way back of one of the parts into which a dim is cut."""
    parts = [tuple(found.shape) for found in view.meta["val"]]
    shape = tuple(base.meta["val"].shape)
    dim = next((d for d, size in enumerate(shape) if parts[0][d] != size), 0)
    start = sum(found[dim] for found in parts[:index])
    if len(parts) == 1:
        return value
    return make(aten.slice_scatter.default, base, value, dim, start, start + parts[index][dim])
