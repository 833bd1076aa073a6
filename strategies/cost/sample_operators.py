"""Operators that `run calibrate` measures by name, because kernels of one machine may be far from its roofline: fused
attention, the backward of normalisations that are a dozen operators on CPUs, a cross-entropy that passes several times
over its operand, dropout, whose random numbers cost CPUs more than its bytes, convolutions, which GPUs compute in TF32
by default.

A sample is one operator on some tokens, as a graph: what runs and what the roofline counts are the same call. A `stack`
is many operators, each on what the one before it returned, as a step has them: what it takes beside the sum of its
operators is what caches, allocation and autograd take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from strategies.core.graph import Operator, OperatorGraph, Ref, Source, TensorSpec

WIDTH, HIDDEN, VOCABULARY, SEQUENCE, HEADS = 256, 1024, 1024, 128, 4
CHANNELS, SIDE, PER_PICTURE = 64, 14, 32
"""Of pictures; a sample on `n` tokens has n / PER_PICTURE of them."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class SampleCall:
    """A call on `tokens`: shapes of its operands (of integers where `indices` names their position, of buffers for the
    last `buffers`), further arguments, and the shape of its result, which new values of the buffers follow."""

    target: str
    operands: Callable[[int], tuple[Shape, ...]]
    result: Callable[[int], Shape]
    args: tuple[object, ...] = ()
    kwargs: tuple[tuple[str, object], ...] = ()
    indices: int | None = None
    buffers: int = 0


def _rows(width: int) -> Callable[[int], Shape]:
    return lambda tokens: (tokens, width)


def _heads(tokens: int) -> Shape:
    return max(tokens // SEQUENCE, 1), HEADS, SEQUENCE, WIDTH // HEADS


def _pictures(tokens: int) -> Shape:
    return max(tokens // PER_PICTURE, 1), CHANNELS, SIDE, SIDE


FORMS = {  # first those that differ most from the roofline
    "scaled_dot_product_attention": SampleCall(
        "aten.scaled_dot_product_attention.default", lambda n: (_heads(n),) * 3, _heads, kwargs=(("is_causal", True),)
    ),
    "rms_norm": SampleCall("aten.rms_norm.default", lambda n: ((n, WIDTH), (WIDTH,)), _rows(WIDTH)),
    "layer_norm": SampleCall("aten.layer_norm.default", lambda n: ((n, WIDTH), (WIDTH,), (WIDTH,)), _rows(WIDTH)),
    "cross_entropy_loss": SampleCall(
        "aten.cross_entropy_loss.default", lambda n: ((n, VOCABULARY), (n,)), lambda n: (), indices=1
    ),
    "dropout": SampleCall("aten.dropout.default", lambda n: ((n, HIDDEN),), _rows(HIDDEN), args=(0.1, True)),
    "conv2d": SampleCall(
        "aten.conv2d.default",
        lambda n: (_pictures(n), (CHANNELS, CHANNELS, 3, 3)),
        _pictures,
        args=(None, (1, 1), (1, 1)),
    ),
    "batch_norm_training": SampleCall(
        "local.batch_norm_training",
        lambda n: (_pictures(n), *((CHANNELS,),) * 4),
        _pictures,
        args=(0.1, 1e-5),
        buffers=2,
    ),
    "softmax": SampleCall("aten.softmax.int", lambda n: ((n, HIDDEN),), _rows(HIDDEN), args=(-1,)),
    "gelu": SampleCall("aten.gelu.default", lambda n: ((n, HIDDEN),), _rows(HIDDEN)),
    "silu": SampleCall("aten.silu.default", lambda n: ((n, HIDDEN),), _rows(HIDDEN)),
}
NORMALISED = ("rms_norm", "layer_norm")
STACK, DEPTH = "stack of layers", 4
"""The name of the sample of many operators, and how often it repeats them."""


def sample(op: str, tokens: int) -> OperatorGraph:
    """The graph of one operator on `tokens`, in float32, whose operands of floating numbers have gradients."""
    form, sources = FORMS[op], []
    shapes = form.operands(tokens)
    for position, shape in enumerate(shapes):
        kind = "buffer" if position >= len(shapes) - form.buffers else "parameter"
        kind = "input" if position == form.indices else kind
        spec = TensorSpec(shape, "int64" if kind == "input" else "float32")
        sources.append(Source(f"x{position}", kind, f"x{position}", spec, kind == "parameter"))  # type: ignore[arg-type]
    first, *others = (Ref(source.id) for source in sources)
    args = (first, (WIDTH,), *others) if op in NORMALISED else (first, *others, *form.args)
    results = tuple(
        TensorSpec(shape, "float32") for shape in (form.result(tokens), *shapes[len(shapes) - form.buffers :])
    )
    one = Operator(op, op, "", op, form.target, args, form.kwargs, results, bool(form.buffers), "", ())
    return OperatorGraph(tuple(sources), (one,), (Ref(op),), ())


def stack(tokens: int) -> OperatorGraph:
    """`DEPTH` feed-forward layers with a norm before and a residual around each, in float32, with gradients."""
    narrow, wide = TensorSpec((tokens, WIDTH), "float32"), TensorSpec((tokens, HIDDEN), "float32")
    sources, operators = [Source("x", "parameter", "x", narrow, True)], list[Operator]()

    def parameter(*shape: int) -> Ref:
        name = f"w{len(sources)}"
        sources.append(Source(name, "parameter", name, TensorSpec(shape, "float32"), True))
        return Ref(name)

    def call(op: str, target: str, result: TensorSpec, *args: object) -> Ref:
        name = f"{op}{len(operators)}"
        operators.append(Operator(name, name, "", op, target, args, (), (result,), False, "", ()))
        return Ref(name)

    x = Ref("x")
    for _ in range(DEPTH):
        norm = call("layer_norm", "aten.layer_norm.default", narrow, x, (WIDTH,), parameter(WIDTH), parameter(WIDTH))
        up = call("linear", "aten.linear.default", wide, norm, parameter(HIDDEN, WIDTH))
        down = call(
            "linear",
            "aten.linear.default",
            narrow,
            call("gelu", "aten.gelu.default", wide, up),
            parameter(WIDTH, HIDDEN),
        )
        x = call("add", "aten.add.Tensor", narrow, x, down)
    return OperatorGraph(tuple(sources), tuple(operators), (x,), ())
