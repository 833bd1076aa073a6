"""The module of a rank: a tree of GraphModules with readable code, the model's own names in the model's own order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from models.ffn import FFN
from strategies.capture import Objective, capture
from strategies.core.graph import OperatorGraph
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import LoweringOptions, Program
from strategies.core.request import OperatorStrategy, Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.runtime.communicator import Communicator
from strategies.runtime.module_tree import build
from strategies.runtime.slices import slices_of
from tests.strategies.simulated_model import TOLERANCE, Model

ALONE = Mesh((("world", 1),))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Registered in another order than used; tied, foreign, unused and frozen parameters, one on the root; names with
    underscores that read like paths; a module called twice, functions between."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.layers = nn.ModuleList([Block(), Block()])
        self.emb = nn.Embedding(16, 8)
        self.unused = nn.Linear(3, 3)
        self.layers_0_norm = nn.Linear(8, 8)
        self.mid = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.relu = nn.ReLU()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("idle", torch.zeros(2))
        self.head.weight = self.emb.weight
        self.mid[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        h = self.relu(self.emb(x)) * self.scale
        for layer in self.layers:
            h = self.mid(layer(h))
        h = F.relu(self.layers_0_norm(h)) + F.linear(h, self.layers[0].up.weight.t() @ self.layers[1].up.weight)
        a, b = self.relu(h).split(4, -1)
        c, d = (a + b).split(2, -1)
        return self.head(torch.cat([c * d, a, d], -1) + self.layers[0].norm.weight) + self.calls


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    tokens = torch.randint(0, 16, (8,))
    return Model(Net(), nn.CrossEntropyLoss(), (tokens, tokens.roll(1)))


def replicated_plan(graph: OperatorGraph) -> Plan:
    """A replicated plan on one rank."""
    layouts = {source.name: Layout.replicated(len(source.spec.shape)) for source in graph.sources}
    inputs = {source.name: layouts[source.name] for source in graph.of_kind("input")}
    return Plan(ALONE, {o.name: OperatorPlan({}, "default") for o in graph.operators}, inputs, layouts)


def built(graph: OperatorGraph, values: dict[str, Tensor]) -> tuple[fx.GraphModule, Program]:
    """The module of the one rank, on its own copies of the tensors."""
    program = lower(graph, replicated_plan(graph))
    return build(program, slices_of(values, program, 0), Communicator(ALONE, 0), "cpu"), program


def test_trains_like_the_model(model: Model) -> None:
    module, _ = built(model.graph, model.values)
    for step in (1, 2):  # the buffer keeps counting
        module.zero_grad()
        loss = module(*model.batch)
        loss.backward()
        if step == 1:
            assert abs(loss.item() - model.loss.item()) < TOLERANCE
            for name, parameter in module.named_parameters():
                if parameter.requires_grad:
                    found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    assert torch.allclose(found, model.gradients[name], rtol=TOLERANCE, atol=TOLERANCE)
    assert module.get_buffer("calls") == 2


def test_names_and_order_are_the_models(model: Model) -> None:
    module, _ = built(model.graph, model.values)
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in model.net.named_parameters()]
    assert set(dict(module.named_buffers())) == set(dict(model.net.named_buffers()))
    expected = {name: p.requires_grad for name, p in model.net.named_parameters()}
    assert {name: p.requires_grad for name, p in module.named_parameters()} == expected
    (tied,) = module.get_submodule("emb").parameters()
    assert tied is module.get_parameter("head.weight")


def test_state_of_the_model_can_be_loaded(model: Model) -> None:
    module, _ = built(model.graph, {name: torch.zeros_like(value) for name, value in model.values.items()})
    own = {name: value for name, value in model.net.state_dict().items() if name in module.state_dict()}
    module.load_state_dict(own, strict=False)
    assert all(torch.equal(parameter, model.net.get_parameter(name)) for name, parameter in module.named_parameters())


def test_the_tree_follows_the_modules(model: Model) -> None:
    module, _ = built(model.graph, model.values)
    units = {name: type(unit).__name__ for name, unit in module.named_modules() if isinstance(unit, fx.GraphModule)}
    for name in (
        "",
        "emb",
        "relu",
        "layers.0",
        "layers.0.norm",
        "layers.0.up",
        "layers.0.down",
        "layers.1.down",
        "mid",
        "mid.0",
        "mid.1",
        "layers_0_norm",
    ):
        assert name in units
    assert units[""] == "Program"
    foreign = [name for name in units if name.rpartition(".")[2].startswith("use_")]
    assert len(foreign) == 4  # two transposes, the head's product, the sum with a norm's weight


def test_every_unit_holds_no_more_than_its_own_parameters(model: Model) -> None:
    """What ZeRO-3 gathers at a time: the parameters of one unit."""
    module, _ = built(model.graph, model.values)
    for name, unit in module.named_modules():
        if isinstance(unit, fx.GraphModule):
            used = {node.target for node in unit.graph.nodes if node.op == "get_attr"}
            own = {leaf for leaf, _ in unit.named_parameters(recurse=False)} | {
                leaf for leaf, _ in unit.named_buffers(recurse=False)
            }
            assert used <= own, name
            assert not name or len(own) <= 2


def test_code_can_be_read() -> None:
    torch.manual_seed(0)
    graph = capture(
        Objective(FFN([8, 16, 4]), nn.CrossEntropyLoss(), ("0", "1"), ("1",)),
        (torch.randn(8, 8), torch.randint(0, 4, (8,))),
        training=True,
    ).graph
    plan = make_plan(graph, Request("auto", 4, strategies={"dense1": OperatorStrategy(((2, 1), (2, 1)), None)}))
    program = lower(graph, plan, LoweringOptions(partial_loss=True))
    tensors = {
        s.name: nn.Parameter(torch.zeros(program.layouts[s.id].local_shape(s.spec.shape, plan.mesh)))
        for s in program.sources
        if s.kind == "parameter"
    }
    module = build(program, tensors, _Silent(plan.mesh, 0), "cpu")
    assert module.code.strip().splitlines() == [
        "def forward(self, tensors_0, tensors_1):",
        "    dense1 = self.dense1(tensors_0);  tensors_0 = None",
        "    relu = self.relu(dense1);  dense1 = None",
        "    dense2 = self.dense2(relu);  relu = None",
        "    loss = self.loss(dense2, tensors_1);  dense2 = tensors_1 = None",
        "    return loss",
    ]
    lines = module.get_submodule("dense1").code.strip().splitlines()
    assert lines[0] == "def forward(self, tensors_0):"
    assert any("redistribute_all_gather_dim_0_over_d1(_own_0, tensors_0)" in line for line in lines)
    assert any("torch.ops.aten.linear.default(" in line for line in lines)


class _Silent(Communicator):
    """A rank that makes no process groups: its module is read, not run."""

    def prepare(self, axes: Any) -> None:
        return None

    def group(self, axes: Any) -> Any:
        return None


def twice_and_between(net: Any, x: Tensor) -> Tensor:
    """Names of units, values and placeholders that would collide without renaming."""
    a = net.relu(net.dense(x))
    b = F.relu(a - 1)
    relu_1 = net.relu(net.dense(b))
    return net.relu_1(F.relu(relu_1 + b) - net.pieces(relu_1)[1].sum()) + a.mean()


class Pieces(nn.Module):
    """Has several inputs and outputs, among them `split`'s second and the first of `split_1`."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = x.split(4, -1)
        third, fourth = (first * second).split(2, -1)
        return third.exp(), second * 2 + fourth.repeat(1, 2), fourth


class Clash(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.dense, self.relu, self.relu_1, self.pieces = (
            body,
            nn.Linear(8, 8),
            nn.ReLU(),
            nn.ReLU(),
            Pieces(),
        )
        self.times = nn.Bilinear(4, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).square().sum()


def across_pieces(net: Any, x: Tensor) -> Tensor:
    first, second, third = net.pieces(net.dense(x))
    again, once_more, last = net.pieces(torch.cat([first, third, second], -1))
    return torch.cat([again, first], -1) * once_more + last.sum() * second


def two_of_two_splits(net: Any, x: Tensor) -> Tensor:
    """`split_1` is the second result of the first split, and the second split: both go into one unit."""
    a, b = net.dense(x).split(4, -1)
    c, d = net.dense(x + 1).split(4, -1)
    return torch.cat([net.times(b, c), a * d], -1)


@pytest.mark.parametrize("body", [twice_and_between, across_pieces, two_of_two_splits])
def test_names_do_not_clash(body: Callable[[Any, Tensor], Tensor], draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Clash(body), None, {"x": torch.randn(4, 8)})
    module, _ = built(model.graph, model.values)
    loss = module(*model.batch)
    loss.backward()
    assert abs(loss.item() - model.loss.item()) < TOLERANCE
    assert torch.allclose(
        module.get_parameter("dense.weight").grad, model.gradients["dense.weight"], rtol=TOLERANCE, atol=TOLERANCE
    )
    assert model.worst(draw, 4) < TOLERANCE


def test_foreign_names_that_read_the_same_are_kept_apart() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.randn(4))

    class Adds(nn.Module):
        def forward(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
            return torch.where(x > 0, first, second)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.a_b, self.adds = Inner(), nn.Parameter(torch.randn(4)), Adds()

        def forward(self, x: Tensor) -> Tensor:
            return self.adds(x, self.a.b, self.a_b).square().sum()

    torch.manual_seed(0)
    model = Model(Outer(), None, {"x": torch.randn(4, 4)})
    module, _ = built(model.graph, model.values)
    module(*model.batch).backward()
    for name in ("a.b", "a_b"):
        assert torch.allclose(module.get_parameter(name).grad, model.gradients[name])


QUOTED = (
    'x")); raise SystemExit(("',
    "x'] or exit() or ['",
    "\n    exit()\n",
    "\\",
    "{exit()}",
    '"""',
    "class",
    "self",
)


@pytest.mark.parametrize("name", QUOTED)
def test_no_name_of_the_users_is_executed(name: str) -> None:
    """Names of a child, its child and a parameter, each also used from outside of the module that owns it."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, name, nn.Sequential())
            self._modules[name]._modules[name] = nn.Linear(4, 4)  # type: ignore[union-attr]
            self._parameters[name] = nn.Parameter(torch.randn(4))
            self._buffers[f"{name}+"] = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            child = self._modules[name]
            inner: Any = child._modules[name]  # type: ignore[union-attr]
            self._buffers[f"{name}+"].add_(1)  # type: ignore[union-attr]
            return (child(x) * self._parameters[name] + inner(x) @ inner.weight).square().mean()  # type: ignore[misc]

    torch.manual_seed(0)
    model = Model(Named(), None, {"x": torch.randn(4, 4)})
    module, _ = built(model.graph, model.values)
    module(*model.batch).backward()
    state, found = model.net.state_dict(), dict(module.named_parameters())
    assert (
        list(found) == [key for key, _ in model.net.named_parameters()] and state.keys() <= module.state_dict().keys()
    )
    assert all(torch.allclose(found[key].grad, gradient) for key, gradient in model.gradients.items())
    for unit in module.modules():
        if isinstance(unit, fx.GraphModule):
            assert "exit" not in unit.code.replace("_exit_", "") and unit.code.count("def ") == 1


def test_further_runs_are_not_called_like_other_modules() -> None:
    """The second run of `act` is not `act_1`, which is another module."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.act, self.act_1 = nn.Linear(4, 4), nn.ReLU(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            x = self.act(self.dense(x))
            return self.act_1(self.act(x - 0.1) + 1).square().sum()

    torch.manual_seed(0)
    model = Model(Twice(), None, {"x": torch.randn(4, 4)})
    module, _ = built(model.graph, model.values)
    assert abs(module(*model.batch).item() - model.loss.item()) < TOLERANCE


def test_random_key_and_several_outputs() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    graph = capture(
        Objective(net, nn.MSELoss(), ("0", "1"), ("1",)), (torch.randn(4, 8), torch.zeros(4, 8)), training=True
    )
    module, program = built(graph.graph, graph.tensors)
    batch = torch.randn(4, 8), torch.zeros(4, 8)
    assert program.random
    assert module(*batch, 1) == module(*batch, 1) != module(*batch, 2)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> dict[str, Any]:
            h = self.dense(x)
            return {"all": h, "best": h.max(-1), "input": x}

    both = Both()
    seen = capture(Objective(both, None, ("0",), ()), batch[:1], training=False)
    module, program = built(seen.graph, seen.tensors)
    found, expected = module(batch[0]), both(batch[0])
    assert not program.random and len(found) == 4
    assert torch.allclose(found[0], expected["all"]) and torch.equal(found[2], expected["best"].indices)
    assert torch.equal(found[3], batch[0])


class Remembering(nn.Module):
    """Buffers of several modules, updated by every kind of write, two of them exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.inner = nn.Module()
        self.inner.register_buffer("now", torch.zeros(8))
        self.inner.register_buffer("before", torch.ones(8))
        self.register_buffer("weights", torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dense(x))
        kept = self.inner.now.clone()
        self.inner.now.copy_(h.detach().mean(0) + self.inner.before)
        self.inner.before.copy_(kept)
        with torch.no_grad():
            self.weights.copy_(self.dense.weight)
        return (h * self.inner.now).square().mean()


def test_buffers_are_written_at_the_end_of_a_step() -> None:
    torch.manual_seed(0)
    net = Remembering()
    model = Model(net, None, {"x": torch.randn(4, 8)})
    module, _ = built(model.graph, model.values)
    assert [name for name, _ in module.named_buffers()] == [name for name, _ in net.named_buffers()]
    for step in (1, 2):
        module(*model.batch).backward()
        if step == 2:
            net(*model.batch)  # the first one was the model's
        for name, buffer in net.named_buffers():
            found = module.get_buffer(name).double()
            assert torch.allclose(found, buffer.double(), rtol=TOLERANCE, atol=TOLERANCE), (step, name)
