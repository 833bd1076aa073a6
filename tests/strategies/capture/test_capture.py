"""Capture: a torch model becomes one graph that trains like the model, or an error names the unsupported
construct."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from strategies.capture import LossFunction, Objective, capture, duplicate, run_once
from strategies.core.errors import StrategyError
from strategies.core.graph import Ref
from tests.strategies.simulated_model import TOLERANCE, Model


class Lazy(ModuleType):
    """Imports what it is asked for, as modules of speechbrain do, and lacks the package that this takes."""

    def __getattr__(self, name: str) -> Any:
        if sys._getframe(1).f_code.co_filename.endswith("inspect.py"):
            raise AttributeError(name)
        raise ImportError(name)


def test_modules_that_import_lazily_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lazily_imported", Lazy("lazily_imported"))
    step = Objective(nn.Linear(8, 4), nn.MSELoss(), ["0", "1"], ["1"])
    assert len(capture(step, [torch.randn(2, 8), torch.randn(2, 4)], training=True).graph.operators) == 3


class Net(nn.Module):
    """A linear layer, and a body given as a function of (net, x)."""

    def __init__(self, body: Callable[[Net, Tensor], Any], **tensors: Any) -> None:
        super().__init__()
        self.body = body
        self.dense = nn.Linear(8, 8)
        for name, value in tensors.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


@dataclasses.dataclass
class Output:
    """A model output of a class unknown to torch."""

    logits: Tensor
    loss: Tensor
    extra: None = None


def in_place(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    first = h.mul_(2)
    h += x
    first.sub_(0.1)  # still the same tensor
    return F.relu(h, inplace=True) + first


def write_to_piece(net: Net, x: Tensor) -> Tensor:
    left = net.dense(x)[:, :4]
    left.add_(1)
    return left * x[:, :4]


def frozen_teacher(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = net.dense(x).tanh()
        scale = target.abs().sum(-1, keepdim=True)
    return net.dense(x) * target / scale


def several_results(net: Net, x: Tensor) -> Tensor:
    top, where = net.dense(x).max(dim=1)
    a, b = torch.split(net.dense(x), [3, 5], -1)
    low, high = torch.std_mean(x, -1)
    return a.sum(-1) * b.mean(-1) + top * where + low + high


def counted(net: Net, x: Tensor) -> Tensor:
    net.calls.add_(1)
    net.running.copy_(net.dense(x).detach().mean(0))
    return net.dense(x) * net.calls


def own_constant(net: Net, x: Tensor) -> Tensor:
    return net.dense(x) * torch.tensor([1.0, 2.0] * 4, dtype=x.dtype) + net.table[:8]


def mask(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    return h * (h > 0) + h.argmax(-1, keepdim=True)


def baked_batch(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x).view(8, 2, 4).transpose(1, 2).reshape(32, 2)
    return h @ h.new_ones(2, 3) + torch.arange(32).view(32, 1)


def shares(net: Net, x: Tensor) -> Tensor:
    """The weight of another module, directly and transposed."""
    return F.linear(net.dense(x), net.other.weight) + net.other(x) @ net.other.weight.t()


class CheckpointFunction(torch.autograd.Function):
    """As in improved-diffusion: gradients for the arguments alone, of which the first are those of the function."""

    @staticmethod
    def forward(ctx, run_function, length, *args):
        ctx.run_function, ctx.inputs, ctx.parameters = run_function, args[:length], args[length:]
        return run_function(*ctx.inputs)

    @staticmethod
    def backward(ctx, *gradients):
        inputs = [x.detach().requires_grad_() for x in ctx.inputs]
        with torch.enable_grad():
            results = ctx.run_function(*inputs)
        return None, None, *torch.autograd.grad(results, [*inputs, *ctx.parameters], gradients)


def computed_again(net: Net, x: Tensor) -> Tensor:
    again = nn.Sequential(net.dense, nn.Tanh(), nn.Dropout(0.0))
    return CheckpointFunction.apply(again, 1, net.dense(x), *again.parameters())


def fresh(net: Net, x: Tensor) -> Tensor:
    """Writes the same once more."""

    def part(h: Tensor) -> Tensor:
        net.table = h.detach().mean(0)
        return (h * net.table).tanh()

    return checkpoint(part, net.dense(x), use_reentrant=False)  # type: ignore[no-any-return]


BODIES: dict[str, tuple[Callable[[Net, Tensor], Any], dict[str, Any]]] = {
    "called three times": (lambda net, x: net.dense(net.dense(net.dense(x))), {}),
    "one tensor twice": (
        lambda net, x: torch.cat([(h := net.dense(x)), h, h * h], -1) @ torch.cat([h, h, h], -1).t(),
        {},
    ),
    "in place": (in_place, {}),
    "in place on a piece": (write_to_piece, {}),
    "no_grad": (frozen_teacher, {}),
    "several results": (several_results, {}),
    "buffers written": (counted, {"calls": torch.zeros(()), "running": torch.zeros(8)}),
    "constants": (own_constant, {"table": torch.arange(10.0)}),
    "mask": (mask, {}),
    "baked batch": (baked_batch, {}),
    "foreign weight": (shares, {"other": nn.Linear(8, 8)}),
    "unused parameter": (lambda net, x: net.dense(x), {"spare": nn.Parameter(torch.zeros(3)), "idle": nn.Linear(2, 2)}),
    "frozen parameter": (lambda net, x: net.fixed(net.dense(x)), {"fixed": nn.Linear(8, 8).requires_grad_(False)}),
    "parameter of no dims": (lambda net, x: net.dense(x) * net.scale, {"scale": nn.Parameter(torch.tensor(1.5))}),
    "checkpoint": (lambda net, x: checkpoint(net.dense, net.dense(x), use_reentrant=False), {}),
    "reentrant checkpoint": (lambda net, x: checkpoint(net.dense, net.dense(x), use_reentrant=True), {}),
    "checkpoint that is given the parameters": (computed_again, {}),
    "checkpoint that makes a buffer anew": (fresh, {"table": torch.zeros(8)}),
    "batch norm": (lambda net, x: net.norm(net.dense(x)), {"norm": nn.BatchNorm1d(8)}),
    "one module, two names": (lambda net, x: net.again(net.dense(x)), {}),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", BODIES)
def test_trains_like_the_model(name: str, draw: Any) -> None:
    torch.manual_seed(0)
    body, tensors = BODIES[name]
    net = Net(body, **tensors)
    if name == "one module, two names":
        net.again = net.dense
    model = Model(
        net,
        LossFunction(lambda out, target: (out.double().square().sum() - target.sum()) / 100, {}),
        (torch.randn(8, 8), torch.randn(8, 8)),
    )
    assert model.worst(draw) < TOLERANCE


def test_a_loss_of_one_element_is_a_scalar(draw: Any) -> None:
    torch.manual_seed(0)
    loss = LossFunction(lambda out, target: (out.double() - target).square().mean((0, 1), keepdim=True), {})
    model = Model(Net(lambda net, x: net.dense(x)), loss, (torch.randn(8, 8), torch.randn(8, 8)))
    assert model.worst(draw) < TOLERANCE


def gradients_within_none(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        still = net.dense(x)
        with torch.enable_grad():
            inner = net.dense(x) * 2
        scale = (still + inner).tanh()
    return net.dense(x) * scale


LAYERS: dict[str, tuple[Callable[[Net, Tensor], Tensor], dict[str, Any]]] = {
    "attention": (lambda net, x: net.layer(x, x, x)[0], {"layer": nn.MultiheadAttention(8, 2, batch_first=True)}),
    "encoder layer": (
        lambda net, x: net.layer(x),
        {"layer": nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)},
    ),
    "recurrent": (lambda net, x: net.layer(x)[0], {"layer": nn.LSTM(8, 8, batch_first=True)}),
    "recurrent states": (
        lambda net, x: torch.cat([net.layer(x)[1][0][-1], net.layer(x)[1][1][0]], -1),
        {"layer": nn.LSTM(8, 8, 2, batch_first=True)},
    ),
    "convolution": (
        lambda net, x: net.layer(x.unsqueeze(1)).flatten(1),
        {"layer": nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))},
    ),
    "parametrization": (
        lambda net, x: net.layer(x),
        {"layer": torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))},
    ),
    "parameter dict": (
        lambda net, x: x @ net.layer["a"] + x @ net.layer["b"].t(),
        {"layer": nn.ParameterDict({"a": nn.Parameter(torch.ones(8, 8)), "b": nn.Parameter(torch.rand(8, 8))})},
    ),
    "einsum": (lambda net, x: torch.einsum("bsi,ij->bsj", x, net.dense.weight), {}),
    "loop over positions": (lambda net, x: torch.stack([net.dense(x[:, t]) for t in range(4)], 1), {}),
    "nested no_grad": (gradients_within_none, {}),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_torch(name: str, draw: Any) -> None:
    torch.manual_seed(0)
    body, tensors = LAYERS[name]
    net = Net(lambda net, x: body(net, x).square().sum() / 10, **tensors)
    assert Model(net, None, {"x": torch.randn(8, 4, 8)}).worst(draw, 4) < TOLERANCE


def test_the_example_is_left_alone() -> None:
    net = Net(counted, calls=torch.zeros(()), running=torch.zeros(8)).eval()
    x, before = torch.randn(4, 8), {k: v.clone() for k, v in net.state_dict().items()}
    capture(Objective(net, LossFunction(torch.sum, {}), ("x",), ()), (x.clone().requires_grad_(),), training=False)
    assert not net.training and not net._forward_hooks
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    "answer",
    [
        lambda h: (h.sum(), h),
        lambda h: {"accuracy": h.mean(), "loss": h.sum(), "logits": h},
        lambda h: Output(h, h.sum()),
    ],
    ids=["tuple", "dict", "dataclass"],
)
def test_model_returns_its_loss(answer: Callable[[Tensor], Any], draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Net(lambda net, x: answer(net.dense(x))), None, {"x": torch.randn(8, 8)})
    assert [operator.op for operator in model.graph.operators] == ["linear", "sum"]
    assert model.worst(draw, 4) < TOLERANCE
    evaluated = capture(model.objective, model.batch, training=False).graph
    assert sorted(evaluated.specs[ref].shape for ref in evaluated.outputs)[-1] == (8, 8)


def test_dict_batch_with_a_loss(draw: Any) -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
            self.head.weight = self.emb.weight

        def forward(self, *, mask: Tensor, tokens: Tensor) -> Tensor:
            return self.head(self.emb(tokens) * mask.unsqueeze(-1)).transpose(1, 2)

    torch.manual_seed(0)
    tokens = torch.randint(0, 16, (4, 8))
    batch = {"tokens": tokens, "labels": tokens.roll(1, 1), "mask": torch.rand(4, 8)}
    model = Model(Embeds(), nn.CrossEntropyLoss(weight=torch.rand(16), ignore_index=3), batch, ("labels",))
    (tied,) = (source for source in model.graph.sources if source.aliases)
    assert (tied.name, tied.aliases) == ("emb.weight", ("head.weight",))
    assert "head.weight" not in model.graph.parameter_order
    assert [source.name for source in model.graph.of_kind("input")] == ["tokens", "labels", "mask"]
    assert model.worst(draw) < TOLERANCE


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(ignore_index=255), nn.NLLLoss(weight=torch.arange(1.0, 6.0))])
def test_labels_of_bytes(draw: Any, loss: nn.Module) -> None:
    torch.manual_seed(0)
    labels = torch.randint(0, 5, (4,), dtype=torch.uint8)
    batch = {"0": torch.randn(4, 3), "1": labels.index_fill(0, torch.tensor([1]), 255 if loss.weight is None else 4)}
    assert Model(nn.Linear(3, 5), loss, batch, ("1",)).worst(draw) < TOLERANCE


def test_loss_with_parameters_of_its_own(draw: Any) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(8))

        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            return ((out - target).square() * self.weight).mean()

    model = Model(Net(lambda net, x: net.dense(x)), Weighted(), (torch.randn(8, 8), torch.randn(8, 8)))
    assert "loss.weight" in model.gradients
    assert model.worst(draw, 4) < TOLERANCE


def test_one_tensor_for_two_entries_of_the_batch() -> None:
    x = torch.randn(4, 8)
    objective = Objective(Net(lambda net, x: net.dense(x)), nn.MSELoss(), ("0", "1"), ("1",))
    graph = capture(objective, (x, x), training=True).graph
    assert all(graph.users[Ref(source.id)] for source in graph.of_kind("input"))


def test_unused_operators_are_dropped_but_not_side_effects() -> None:
    def body(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        net.calls.add_(1)
        h = F.dropout(net.norm(net.dense(x)), 0.5)
        F.dropout(h.exp())  # its numbers count
        return net.dense(x).sum(), h.softmax(-1)

    net = Net(body, calls=torch.zeros(()), norm=nn.BatchNorm1d(8))
    graph = capture(Objective(net, None, ("x",), ()), (torch.randn(4, 8),), training=True).graph
    assert [operator.op for operator in graph.operators] == [
        "add", "linear", "add", "batch_norm_training", "dropout", "exp", "dropout", "linear", "sum",
    ]  # fmt: skip
    names = {source.id: source.name for source in graph.sources}
    written = {names[id]: graph.by_id[value.id].op for id, value in graph.updates}  # type: ignore[union-attr]
    assert written == {
        "calls": "add",
        "norm.num_batches_tracked": "add",
        "norm.running_mean": "batch_norm_training",
        "norm.running_var": "batch_norm_training",
    }


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


triple = Triple.apply


def branch(net: Net, x: Tensor) -> Tensor:
    return net.dense(x) if x.sum() > 0 else x


def wrong_shape(net: Net, x: Tensor) -> Tensor:
    return net.dense(x) @ x[:3]


def replacing(net: Net, x: Tensor) -> Tensor:
    def part(h: Tensor) -> Tensor:
        net.table = net.table * 0.9 + h.detach().mean(0)
        return (h * net.table).tanh()

    return checkpoint(part, net.dense(x), use_reentrant=False)  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[Net, Tensor], Any], str]] = {
    "branch": (branch, "branch or a shape from the values of a tensor at capture/test_capture.py:"),
    "wrong shape": (
        wrong_shape,
        r"failed on the example batch at capture/test_capture.py:\d+: return net.dense\(x\) @ x\[:3\] "
        r"\(RuntimeError: .*\)\.$",
    ),
    "raises": (
        lambda net, x: {}["missing"],
        r"failed on the example batch at capture/test_capture.py:\d+: .* \(KeyError: 'missing'\)",
    ),
    "numpy": (lambda net, x: net.dense(x.numpy()), "failed on the example batch|not a torch operator"),
    "nonzero": (lambda net, x: net.dense(x)[x > 0].sort().values, "whose shape depends on values"),
    "reentrant checkpoint": (
        lambda net, x: checkpoint(net.dense, net.dense(x), use_reentrant=True, preserve_rng_state=False),
        "use_reentrant=False",
    ),
    "checkpoint that is not given the parameters": (
        lambda net, x: CheckpointFunction.apply(net.dense, 1, net.dense(x), net.dense.weight),
        "for which it makes no gradient, as they are not among its arguments",
    ),
    "checkpoint that counts": (
        lambda net, x: checkpoint(lambda h: h * net.table[0].add_(1), net.dense(x), use_reentrant=False),
        "backward would write once more",
    ),
    "reentrant checkpoint that counts": (
        lambda net, x: checkpoint(lambda h: h * net.table.add_(1), net.dense(x), use_reentrant=True),
        "backward would write once more",
    ),
    "checkpoint that counts in a given tensor": (
        lambda net, x: checkpoint(
            lambda h: h * torch.add(net.table, 1.0, out=net.table), net.dense(x), use_reentrant=False
        ),
        "backward would write once more",
    ),
    "checkpoint that replaces a buffer": (replacing, "backward would write once more"),
    "checkpoint that draws again": (
        lambda net, x: CheckpointFunction.apply(F.dropout, 1, net.dense(x)),
        "draws other random numbers in backward",
    ),
    "targets of CTC one behind the other": (
        lambda net, x: F.ctc_loss(
            net.dense(x).expand(9, *x.shape).log_softmax(-1),
            (x > 0).long()[x > 0],
            torch.full(x.shape[:1], 9),
            (x > 0).sum(1),
        ),
        "Give them padded, one row per sample",
    ),
    "nothing trains": (lambda net, x: net.dense(x).detach(), "depends on no trainable parameter"),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_paragraph(name: str) -> None:
    body, text = REFUSED[name]
    objective = Objective(Net(body, table=torch.arange(8.0)), LossFunction(torch.sum, {}), ("x",), ())
    with pytest.raises(StrategyError, match=text) as caught:
        capture(objective, (torch.randn(8, 8),), training=True)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda h: h, r"The model \(loss.target is null.*returned a tensor float32\[8, 8\]"),
        (lambda h: (h, h.sum()), r"returned tuple of a tensor float32\[8, 8\], a tensor float32\[\]"),
        (lambda h: {"cost": h.sum()}, r"returned dict of cost: a tensor float32\[\]"),
        (lambda h: h.sum().long(), r"returned a tensor int64\[\]"),
        (lambda h: None, "returned None"),
        (lambda h: 3.0, "returned a float"),
    ],
)
def test_own_loss_must_be_a_scalar(answer: Callable[[Tensor], Any], text: str) -> None:
    objective = Objective(Net(lambda net, x: answer(net.dense(x))), None, ("x",), ())
    with pytest.raises(StrategyError, match=text):
        capture(objective, (torch.randn(8, 8),), training=True)


def test_loss_must_be_a_scalar() -> None:
    objective = Objective(Net(lambda net, x: net.dense(x)), nn.MSELoss(reduction="none"), ("0", "1"), ("1",))
    with pytest.raises(
        StrategyError, match=r"^The loss returned a tensor float32\[8, 8\]; training needs one floating-point scalar"
    ):
        capture(objective, (torch.randn(8, 8), torch.randn(8, 8)), training=True)


def test_loss_and_model_cannot_share_a_name() -> None:
    net = Net(lambda net, x: net.loss(net.dense(x)), loss=nn.Linear(8, 8))
    objective = Objective(net, nn.CrossEntropyLoss(weight=torch.ones(8)), ("0", "1"), ("1",))
    with pytest.raises(StrategyError, match=r"both have a tensor called loss\.weight"):
        capture(objective, (torch.randn(8, 8), torch.zeros(8, dtype=torch.long)), training=True)


THREE_CAPTURES = """
import sys
import torch
from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError

class Net(torch.nn.Linear):
    def forward(self, x):
        print("forward of the user", file=sys.stderr)
        y = super().forward(x if way == "works" else x[:, 1:] if way == "shape" else x)
        return y.sum() if way != "branch" or y.sum() > 0 else -y[y > 0].sort()[0].cumsum(0).sum()

for way in ("works", "shape", "branch"):
    try:
        capture(Objective(Net(4, 4), None, ("x",), ()), (torch.randn(2, 4),), training=True)
    except StrategyError as error:
        print(way, "refused")
"""


@pytest.mark.slow
def test_a_failing_capture_prints_nothing_itself() -> None:
    """In a separate process, because torch's loggers keep the first standard error stream that they opened."""
    words = [sys.executable, "-c", THREE_CAPTURES]
    ended = subprocess.run(words, cwd=Path(__file__).parents[3], capture_output=True, encoding="utf-8", check=True)
    assert ended.stdout.splitlines() == ["shape refused", "branch refused"]
    assert set(ended.stderr.splitlines()) == {"forward of the user"}


def test_custom_backward_is_no_matter_in_evaluation() -> None:
    objective = Objective(Net(lambda net, x: triple(net.dense(x))), None, ("x",), ())
    graph = capture(objective, (torch.randn(8, 8),), training=False).graph
    assert [operator.op for operator in graph.operators] == ["linear", "clone"]


def test_names_paths_and_source_lines() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.relu = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.dense(x) + self.relu(x))

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block(), Block()])
            self.tail = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.tail(F.relu(x) * 2).sum()

    graph = capture(Objective(Stack(), None, ("x",), ()), (torch.randn(2, 4),), training=True).graph
    assert [operator.name for operator in graph.operators] == [
        "layers.0.dense", "layers.0.relu@0", "layers.0", "layers.0.relu@1",
        "layers.1.dense", "layers.1.relu@0", "layers.1", "layers.1.relu@1",
        "relu", "mul", "tail.0", "tail.1", "sum",
    ]  # fmt: skip
    assert [operator.path for operator in graph.operators[:3]] == [
        ("layers.0", "dense"),
        ("layers.0", "relu"),
        ("layers.0",),
    ]
    assert graph.by_name["tail.0"].path == ("tail", "0")
    line = Block.forward.__code__.co_firstlineno + 1
    assert graph.by_name["layers.1.dense"].source == f"capture/test_capture.py:{line}"
    assert graph.by_name["layers.0"].where == f"layers.0 (add, capture/test_capture.py:{line})"


def test_without_a_capture_any_backward_will_do() -> None:
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 3 * gradient

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            tripled: Tensor = Tripled.apply(self.dense(x))
            return tripled.mean() if x.shape[0] else tripled

    step, batch = Objective(Net(), None, ("0",), ()), [torch.randn(4, 4)]
    run_once(step, batch)
    with pytest.raises(StrategyError, match="Tripled"):
        capture(step, batch, training=True)
    with pytest.raises(StrategyError, match="scalar"):
        run_once(step, [torch.randn(0, 4)])
    with pytest.raises(StrategyError, match="Module 0 has sparse=True"):
        run_once(Objective(nn.Sequential(nn.Embedding(4, 1, sparse=True)), None, ("0",), ()), [torch.arange(4)])


def test_a_duplicate_shares_what_python_cannot_copy() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.held = {"lock": threading.Lock(), "sizes": [2]}

    net = nn.Sequential(Locked())
    net.first = [net[0]]
    made = duplicate(net)
    locked = made[0]
    assert locked is not net[0] and locked.layer.weight is not net[0].layer.weight and made.first == [locked]
    assert locked.held["lock"] is net[0].held["lock"] and locked.held["sizes"] is not net[0].held["sizes"]
