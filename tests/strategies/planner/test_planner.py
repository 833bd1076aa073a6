"""Plans: forms of strategies, defaults, meshes, datasets, shared parameters - and one paragraph per invalid request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.ffn import FFN, MatMulNet
from models.matmul import OneMatMul, ReduceMeanMatMul, TwoMatMul
from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.layout import Layout
from strategies.core.plan import Plan
from strategies.core.request import NamedDims, NamedMatrix, Operand, OperatorStrategy, Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import follow, make_plan
from strategies.rules import rule_of
from tests.strategies.simulated_model import TOLERANCE, Model

CUBE = NamedMatrix((2, 2, 2), ("dp", "sp", "mp"))
LINE = NamedMatrix((8,), ("tp",))


class Tied(nn.Module):
    """A model for all errors: a tied weight, an operator without a rule, one whose last dim must be replicated, a
    module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.dense1, self.relu, self.dense2 = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)
        self.norm, self.same = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.same.weight = self.dense1.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.dense2(self.relu(self.dense1(x))))
        return self.same(self.norm(torch.renorm(h, 2, 0, 1.0)))


@pytest.fixture(scope="module")
def tied() -> Model:
    torch.manual_seed(0)
    return Model(Tied(), nn.MSELoss(), (torch.randn(24, 16), torch.randn(24, 32)))


@pytest.fixture(scope="module")
def two() -> Model:
    torch.manual_seed(0)
    return Model(TwoMatMul(32, 64, 16), nn.MSELoss(), (torch.randn(64, 32), torch.randn(64, 16)))


def wanted(*operands: Operand, out: tuple[Operand, ...] | None = None) -> OperatorStrategy:
    return OperatorStrategy(operands or None, out)


def cube(*dims: Any) -> NamedDims:
    return named("cube", *dims)


def named(layout: str, *dims: Any) -> NamedDims:
    return NamedDims(layout, tuple(() if dim is None else (dim,) if isinstance(dim, str) else dim for dim in dims))


def plan_of(model: Model | OperatorGraph, world_size: int = 8, mode: Any = "semi_auto", **options: Any) -> Plan:
    graph = model.graph if isinstance(model, Model) else model
    return make_plan(graph, Request(mode, world_size, **options))


def counts(graph: OperatorGraph, plan: Plan, name: str) -> list[tuple[int, ...]]:
    """The slices of every operand of an operator."""
    sharding = rule_of(graph.by_name[name], graph)
    return [layout.counts(plan.mesh) for layout in sharding.operand_layouts(plan.operators[name].assignment)]


def ranks_of_slices(plan: Plan, layout: Layout, dim: int) -> list[int]:
    """The lowest rank that holds each slice of a dim."""
    axes = layout.dims[dim]
    return [
        min(r for r in range(plan.mesh.size) if plan.mesh.index(r, axes) == i) for i in range(plan.mesh.product(axes))
    ]


# --- defaults


def test_semi_auto_slices_the_batch_over_all_devices(two: Model) -> None:
    plan = plan_of(two)
    assert plan.mesh.axes == (("d0", 8),)
    assert {name: counts(two.graph, plan, name)[0] for name in plan.operators} == dict.fromkeys(plan.operators, (8, 1))
    assert {layout.counts(plan.mesh) for layout in plan.tensors.values()} == {(1, 1)}
    assert {operator.origin for operator in plan.operators.values()} == {"default"}
    assert not any(step.kind != "all_reduce" for r in lower(two.graph, plan).redistributions for step in r.forward)


def test_the_largest_divisor_that_fits(tied: Model) -> None:
    plan = plan_of(tied, 16)  # 24 samples
    assert counts(tied.graph, plan, "dense1")[0] == (8, 1)
    assert plan.inputs["0"].counts(plan.mesh) == (8, 1)
    assert plan_of(tied, 5).mesh.axes == (("d0", 5),)
    assert counts(tied.graph, plan_of(tied, 5), "dense1")[0] == (1, 1)
    assert tied.difference(plan_of(tied, 6)) < TOLERANCE


def test_an_operator_without_a_batch_dim_is_replicated() -> None:
    class WeightNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.w / self.w.norm())

    model = Model(WeightNorm(), nn.MSELoss(), (torch.randn(8, 8), torch.randn(8, 8)))
    plan = plan_of(model, 4)
    assert counts(model.graph, plan, "div")[0] == (1, 1)
    assert counts(model.graph, plan, "matmul") == [(4, 1), (1, 1)]
    assert model.difference(plan) < TOLERANCE


def test_batch_dim_is_followed_through_operators_that_replicate_it(tied: Model) -> None:
    plan = plan_of(tied)
    assert counts(tied.graph, plan, "renorm")[0] == (1, 1)  # no rule
    assert counts(tied.graph, plan, "norm")[0] == (8, 1)
    torch.manual_seed(0)
    model = Model(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Softmax(0), nn.Linear(8, 8)),
        nn.MSELoss(),
        (torch.randn(8, 8), torch.randn(8, 8)),
    )
    plan = plan_of(model)
    assert [counts(model.graph, plan, name)[0] for name in ("0", "1.batch_norm", "2", "3")] == [
        (8, 1),
        (8, 1),
        (1, 1),
        (8, 1),
    ]
    assert model.difference(plan) < TOLERANCE


def test_batch_dim_is_followed_through_views() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            h = self.qkv(x).view(4, 6, 2, 4).transpose(0, 2)  # [head, position, batch, channel]
            return (h.softmax(-1) + h[:1]).permute(2, 1, 0, 3).reshape(24, 8)

    model = Model(Heads(), nn.MSELoss(), (torch.randn(4, 6, 8), torch.randn(24, 8)))
    plan = plan_of(model, 4)
    assert counts(model.graph, plan, "softmax") == [(1, 1, 4, 1)]
    assert counts(model.graph, plan, "reshape") == [(4, 1, 1, 1)]
    assert model.difference(plan) < TOLERANCE


def test_data_parallel_replicates_parameters(tied: Model) -> None:
    plan = plan_of(tied, 8, "data_parallel")
    assert plan.mesh.axes == (("dp", 8),)
    assert all(not layout.axes for layout in plan.tensors.values())
    assert tied.difference(plan) < TOLERANCE


# --- forms


def test_counts_contract_over_neighbouring_ranks(two: Model) -> None:
    plan = plan_of(two, strategies={"matmul1": wanted((2, 4), (4, 1))})
    assert plan.mesh.axes == (("d0", 2), ("d1", 4))
    (first, *_) = [r for r in lower(two.graph, plan).redistributions if r.value.id == "matmul"]
    assert [step.group(plan.mesh, rank) for step in first.forward[:1] for rank in (0, 4)] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ]
    assert two.difference(plan) < TOLERANCE


def test_counts_with_devices_left_over(two: Model) -> None:
    plan = plan_of(two, strategies={"matmul1": wanted((1, 1), (1, 2)), "matmul2": wanted((8, 1), (1, 1))})
    assert plan.mesh.axes == (("d0", 2), ("d1", 4))
    assert plan.tensors["matmul1.weight"] == Layout(((), ("d0",)))
    assert counts(two.graph, plan, "matmul2") == [(8, 1), (1, 1)]
    assert two.difference(plan) < TOLERANCE


@pytest.mark.parametrize("order", [((3, 8), (8, 3)), ((8, 3), (3, 8))])
def test_counts_without_a_common_refinement_work_on_an_open_mesh(order: tuple[tuple[int, int], ...]) -> None:
    torch.manual_seed(0)
    model = Model(TwoMatMul(24, 24, 24), nn.MSELoss(), (torch.randn(24, 24), torch.randn(24, 24)))
    (a, b), (c, d) = order
    plan = plan_of(model, 24, strategies={"matmul1": wanted((a, b), (b, 1)), "matmul2": wanted((c, d), (d, 1))})
    assert counts(model.graph, plan, "matmul1") == [(a, b), (b, 1)]
    assert counts(model.graph, plan, "matmul2") == [(c, d), (d, 1)]
    assert model.difference(plan) < TOLERANCE


def test_named_mesh(two: Model) -> None:
    strategies = {"matmul1": wanted((2, 4), (4, 1)), "matmul2": wanted((4, 1), (1, 2))}
    plan = plan_of(two, mesh=(("dp", 2), ("tp", 4)), strategies=strategies)
    assert plan.mesh.axes == (("dp", 2), ("tp", 4))
    assert plan.operators["matmul1"].assignment == {"m": ("dp",), "k": ("tp",)}
    assert plan.operators["matmul2"].assignment == {"m": ("tp",), "n": ("dp",)}
    assert plan.inputs["0"] == Layout((("dp", "tp"), ()))
    assert two.difference(plan) < TOLERANCE
    split = plan_of(two, mesh=(("dp", 2), ("tp", 4)), strategies={"matmul1": wanted((2, 2), (2, 2))})
    assert split.mesh.axes == (("dp", 2), ("tp.0", 2), ("tp.1", 2))
    assert two.difference(split) < TOLERANCE


def test_explicit_layouts_fix_ranks() -> None:
    """The slices a0..a3 of a row are on ranks 0, 4, 2, 6; one plan mixes several layouts, counts and None."""
    torch.manual_seed(0)
    model = Model(MatMulNet([32, 16, 16, 8]), nn.CrossEntropyLoss(), (torch.randn(8, 32), torch.randint(0, 8, (8,))))
    strategies = {
        "matmul1": wanted(cube("mp", ("sp", "dp")), cube(("sp", "dp"), None)),
        "relu1": wanted((4, 1)),
        "matmul2": wanted(named("line", None, "tp"), named("line", "tp", None)),
        "relu2": wanted((8, 1)),
    }
    plan = plan_of(model, layouts={"cube": CUBE, "line": LINE}, strategies=strategies)
    assert plan.mesh.axes == (("dp", 2), ("sp", 2), ("mp", 2))
    operand = rule_of(model.graph.by_name["matmul1"], model.graph).operand_layouts(
        plan.operators["matmul1"].assignment
    )[0]
    assert ranks_of_slices(plan, operand, 1) == [0, 4, 2, 6]
    assert ranks_of_slices(plan, operand, 0) == [0, 1]
    assert plan.tensors["matmul2.weight"] == Layout((("dp", "sp", "mp"), ()))
    assert model.difference(plan) < TOLERANCE


def test_counts_and_layouts_in_one_strategy(two: Model) -> None:
    plan = plan_of(two, layouts={"cube": CUBE}, strategies={"matmul1": wanted((2, 1), cube(None, ("mp", "dp")))})
    assert plan.operators["matmul1"].assignment == {"m": ("sp",), "n": ("mp", "dp")}
    assert two.difference(plan) < TOLERANCE


def test_an_unused_layout_changes_nothing(two: Model) -> None:
    odd = {"odd": NamedMatrix((5, 5), ("a", "b"))}
    assert plan_of(two, layouts=odd).mesh == plan_of(two).mesh


# --- results


@pytest.mark.parametrize(
    ("out", "layout"),
    [
        ((8, 1), (("d0", "d1"), ())),  # rows x contraction: one reduce-scatter
        ((2, 1), (("d0",), ())),
        ((2, 4), (("d0",), ("d1",))),
        ((1, 8), ((), ("d0", "d1"))),
        ((1, 1), ((), ())),
    ],
)
def test_counts_of_results(two: Model, out: tuple[int, int], layout: Any) -> None:
    plan = plan_of(two, strategies={"matmul1": wanted((2, 4), (4, 1), out=(out,))})
    assert plan.operators["matmul1"].outputs == (Layout(layout),)
    (step, *_) = [r for r in lower(two.graph, plan).redistributions if r.operator == "matmul1" and r.operand == -1]
    if out == (8, 1):
        assert [str(part) for part in step.forward] == ["reduce_scatter dim 0 over d1"]
    assert two.difference(plan) < TOLERANCE


def test_results_can_grow_where_another_dim_shrinks(two: Model) -> None:
    plan = plan_of(two, strategies={"matmul1": wanted((2, 1), (1, 4), out=((8, 1),))})
    assert plan.operators["matmul1"].outputs == (Layout((("d0", "d1"), ())),)
    assert two.difference(plan) < TOLERANCE


def test_layouts_of_results() -> None:
    torch.manual_seed(0)
    model = Model(OneMatMul(16, 16), nn.MSELoss(), (torch.randn(16, 16), torch.randn(16, 16)))
    strategy = wanted(cube("mp", ("sp", "dp")), cube(("sp", "dp"), None), out=(cube(("mp", "sp", "dp"), None),))
    plan = plan_of(model, layouts={"cube": CUBE}, strategies={"matmul": strategy})
    assert plan.operators["matmul"].outputs == (Layout((("mp", "sp", "dp"), ())),)
    (change,) = [r for r in lower(model.graph, plan).redistributions if r.operator == "matmul" and r.operand == -1]
    assert [str(step) for step in change.forward] == ["reduce_scatter dim 0 over sp*dp"]
    assert model.difference(plan) < TOLERANCE


# --- set_data_parallel and datasets


def test_marked_modules_slice_the_batch(tied: Model) -> None:
    strategies = {"dense1": wanted((1, 1), (8, 1))}
    plan = plan_of(tied, mode="auto", strategies=strategies, set_data_parallel=("dense2", "norm"))
    assert plan.operators["dense2"].origin == plan.operators["norm"].origin == "data_parallel"
    assert counts(tied.graph, plan, "dense2")[0] == counts(tied.graph, plan, "norm")[0] == (8, 1)
    assert plan.operators["dense1"].origin == "configured"
    assert tied.difference(plan) < TOLERANCE


def test_a_strategy_counts_before_a_mark(tied: Model) -> None:
    plan = plan_of(tied, strategies={"dense1": wanted((1, 1), (8, 1))}, set_data_parallel=("dense*",))
    assert counts(tied.graph, plan, "dense1")[1] == (8, 1)


@pytest.mark.parametrize(
    ("strategy", "layouts"),
    [
        ("data_parallel", [(8, 1), (8, 1)]),
        ("full_batch", [(1, 1), (1, 1)]),
        (((2, 4), (1, 1)), [(2, 4), (1, 1)]),
        (((4, 1), cube(("mp", "dp"), "sp")), [(4, 1), (4, 2)]),
    ],
)
def test_dataset_strategies(two: Model, strategy: Any, layouts: list[tuple[int, int]]) -> None:
    plan = plan_of(two, layouts={"cube": CUBE}, dataset_strategy=strategy)
    assert [layout.counts(plan.mesh) for layout in plan.inputs.values()] == layouts
    assert counts(two.graph, plan, "matmul1")[0] == (8, 1)  # operators keep their default
    assert two.difference(plan) < TOLERANCE


def test_batch_entries_without_dims_or_of_other_sizes() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: Tensor, classes: Tensor) -> Tensor:
            return (self.dense(x) * scale).square().mean() + classes.sum()

    batch = {"x": torch.randn(8, 4), "scale": torch.tensor(2.0), "classes": torch.randn(6)}
    model = Model(Scaled(), None, batch)
    plan = plan_of(model, 4)
    assert [layout.counts(plan.mesh) for layout in plan.inputs.values()] == [(4, 1), (), (2,)]
    assert model.difference(plan) < TOLERANCE


# --- shared parameters


def test_configured_users_of_one_parameter_must_agree(tied: Model) -> None:
    strategies = {"dense1": wanted((1, 1), (8, 1)), "same": wanted((8, 1), (1, 1))}
    with pytest.raises(StrategyError) as caught:
        plan_of(tied, strategies=strategies)
    text = str(caught.value)
    assert text.startswith("Parameter dense1.weight is used by two operators whose strategies slice it differently: ")
    assert "dense1 (linear, planner/test_planner.py:" in text and "has ((1, 1), (8, 1)) and needs (8, 1)" in text
    assert "same (linear, planner/test_planner.py:" in text and "has ((8, 1), (1, 1)) and needs (1, 1)" in text


def test_a_default_user_follows(tied: Model) -> None:
    for configured_one, other in (("dense1", "same"), ("same", "dense1")):
        plan = plan_of(tied, strategies={configured_one: wanted((1, 1), (8, 1))})
        assert plan.tensors["dense1.weight"].counts(plan.mesh) == (8, 1)
        assert counts(tied.graph, plan, other)[:2] == [(8, 1), (1, 1)]
        assert tied.difference(plan) < TOLERANCE


def test_equal_counts_agree_although_their_operators_place_them_differently(tied: Model) -> None:
    """Counts say how many slices, not which ranks: ((2, 1), (4, 1)) after ((1, 1), (4, 1))."""
    strategies = {"dense1": wanted((1, 1), (4, 1)), "same": wanted((2, 1), (4, 1))}
    plan = plan_of(tied, strategies=strategies)
    assert counts(tied.graph, plan, "same")[:2] == [(2, 1), (4, 1)]
    assert plan.operators["same"].assignment["n"] == plan.tensors["dense1.weight"].dims[0]
    assert tied.difference(plan) < TOLERANCE


def test_equal_counts_on_other_ranks_disagree_if_layouts_fix_them(tied: Model) -> None:
    strategies = {
        "dense1": wanted(cube(None, None), cube("dp", None)),
        "same": wanted(cube(None, None), cube("mp", None)),
    }
    with pytest.raises(StrategyError, match=r"needs \(dp, -\), same .* needs \(mp, -\)"):
        plan_of(tied, layouts={"cube": CUBE}, strategies=strategies)


def test_a_parameter_of_which_no_user_is_configured_follows_its_first_user(tied: Model) -> None:
    plan = plan_of(tied, mode="auto", strategies={"dense2": wanted((1, 8), (1, 8))})
    uses = [counts(tied.graph, plan, name)[1] for name in ("dense1", "same")]
    assert plan.tensors["dense1.weight"].counts(plan.mesh) == uses[0]
    assert tied.difference(plan) < TOLERANCE


# --- evaluation


def test_evaluation_follows_the_training_plan() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 4))
    graph = capture(
        Objective(net, nn.MSELoss(), ("0", "1"), ("1",)), (torch.randn(16, 8), torch.randn(16, 4)), training=True
    ).graph
    plan = plan_of(graph, strategies={"0": wanted((2, 1), (4, 1))})
    for rows in (16, 12, 3, 1):
        seen = capture(Objective(net, None, ("0",), ()), (torch.randn(rows, 8),), training=False).graph
        followed = follow(plan, seen)
        assert followed.mesh == plan.mesh
        assert followed.tensors == {name: layout for name, layout in plan.tensors.items() if name in followed.tensors}
        fits = rows > 1  # three rows are padded to two slices of two
        if rows == 16:
            assert counts(seen, followed, "2")[0] == counts(graph, plan, "2.batch_norm")[0] != (1, 1)
        assert counts(seen, followed, "0")[:2] == ([(2, 1), (4, 1)] if fits else [(1, 1), (1, 1)])
        assert followed.inputs["0"].counts(plan.mesh) == ((8, 1) if rows == 16 else (1, 1))
        lower(seen, followed)


def test_reduction_before_a_product() -> None:
    torch.manual_seed(0)
    model = Model(ReduceMeanMatMul(16, 8), nn.MSELoss(), (torch.randn(16, 8, 16), torch.randn(16, 1, 8)))
    strategies = {"reduce_mean": wanted((2, 4, 1)), "matmul": wanted((2, 1, 2), (2, 2))}
    assert model.difference(plan_of(model, strategies=strategies)) < TOLERANCE


def test_a_plan_is_made_in_milliseconds() -> None:
    graph = capture(
        Objective(FFN([1024] * 6), nn.CrossEntropyLoss(), ("0", "1"), ("1",)),
        (torch.zeros(1024, 1024), torch.zeros(1024, dtype=torch.long)),
        training=True,
    ).graph
    plan = plan_of(graph, 64, "auto", strategies={"dense1.matmul": wanted((2, 4), (4, 1))})
    assert plan.search["seconds"] < 5  # on a busy core; enumerating six axes would take a minute


# --- errors

LAYOUTS = {"cube": CUBE, "line": LINE}
BIG, SHORT = {"big": NamedMatrix((4, 4), ("a", "b"))}, {"big": NamedMatrix((4, 2), ("a",))}
FIRST = r"^parallel.strategies.dense1: .* on dense1 \(linear, planner/test_planner.py:\d+\):? "
DATA = r"^parallel.dataset_strategy"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such path": (
        {"dense9": wanted((8, 1), (1, 1))},
        "dense9 matches no operator of the model. .* Did you mean 'dense2'",
    ),
    "no such glob": ({"*.nothing": wanted((8, 1), (1, 1))}, "matches no operator"),
    "no such call": ({"relu@2": wanted((8, 1))}, "relu@2 matches no operator .* Did you mean 'relu@1'"),
    "two paths": ({"dense1": wanted((2, 1), (4, 1)), "dense1.matmul": wanted((2, 1), (1, 2))}, "both configure dense1"),
    "operand missing": ({"dense1": wanted((8, 1))}, FIRST + r"operand 1 \(shape \(32, 16\)\) has no entry"),
    "operand too many": ({"relu": wanted((8, 1), (8, 1))}, r"relu@0 .* gives 2 operands, but the operator has 1"),
    "dim too many": ({"dense1": wanted((8, 1, 1), (1, 1))}, FIRST + r"operand 0 has 2 dims .* the strategy gives 3"),
    "dim missing": ({"dense1": wanted((8,), (1, 1))}, FIRST + "operand 0 has 2 dims .* the strategy gives 1"),
    "not of the devices": (
        {"dense1": wanted((3, 1), (1, 1))},
        FIRST + "needs 3 slices, which do not divide the 8 devices",
    ),
    "more than devices": ({"dense1": wanted((8, 2), (1, 2))}, FIRST + "needs 16 slices"),
    "dim does not divide": (
        {"dense1": wanted((1, 5), (1, 5))},
        FIRST + "dim 1 of operand 0 .* into 5 equal slices; counts that fit: 1, 2, 4, 8, 16",
    ),
    "zero slices": ({"dense1": wanted((0, 1), (1, 1))}, r"^parallel.strategies.dense1: \(0, 1\) has a count of 0"),
    "negative slices": ({"dense1": wanted((-2, 1), (1, 1))}, "has a count of -2"),
    "loops disagree": (
        {"dense1": wanted((2, 4), (1, 2))},
        FIRST + "dim 1 of operand 1 .* is the same loop as dim 1 of operand 0",
    ),
    "loops disagree, matmul": (
        {"dense1.matmul": wanted((2, 4), (2, 1))},
        r"dim 0 of operand 1 \(shape \(16, 32\)\) is the same loop",
    ),
    "bias disagrees": (
        {"dense1": wanted((2, 1), (4, 1), (2,))},
        FIRST + "dim 0 of operand 2 .* is the same loop as dim 0 of operand 1",
    ),
    "must be replicated": (
        {"norm": wanted((1, 8), (8,), (8,))},
        r"dim 1 of operand 0 \(shape \(24, 16\)\) must be replicated for layer_norm",
    ),
    "no rule": ({"renorm": wanted((8, 1))}, "operator renorm has no sharding rule"),
    "result too many": (
        {"dense1": wanted((8, 1), (1, 1), out=((8, 1), (8, 1)))},
        FIRST + "it gives 2 results, the operator has 1",
    ),
    "result of other rank": (
        {"dense1": wanted((8, 1), (1, 1), out=((8, 1, 1),))},
        FIRST + r"\(8, 1, 1\) has 3 entries",
    ),
    "result of too many slices": (
        {"dense1": wanted((8, 1), (1, 1), out=((16, 1),))},
        FIRST + ".* no unused axes for the 16 slices of dim 0",
    ),
    "result twice all devices": (
        {"dense1": wanted((8, 1), (1, 1), out=((8, 8),))},
        FIRST + ".* no unused axes for the 8 slices of dim 1",
    ),
    "result does not divide": (
        {"dense2": wanted((1, 1), (1, 1), out=((1, 3),))},
        "no unused axes for the 3 slices of dim 1",
    ),
    "result of a scalar": ({"loss.mse_loss": wanted((8, 1), (8, 1), out=((2,),))}, "the tensor of shape .. has 0 dims"),
    "result alone": (
        {"dense1": wanted(out=((8, 1),))},
        FIRST + "an output strategy needs the input strategy beside it",
    ),
    "result with zero slices": ({"dense1": wanted((8, 1), (1, 1), out=((0, 1),))}, r"\(0, 1\) has a count of 0"),
    "no such layout": (
        {"dense1": wanted(named("cub", "dp", None), cube(None, None))},
        "layout 'cub' is not in parallel.layouts. .* Did you mean 'cube'",
    ),
    "no such layout, replicated": (
        {"norm": wanted(named("cub", None, None), (1,), (1,))},
        "layout 'cub' is not in parallel.layouts",
    ),
    "no such axis": (
        {"dense1": wanted(cube("dq", None), cube(None, None))},
        "'dq' is not an axis of parallel.layouts.cube. Known: dp, sp, mp",
    ),
    "no such axis in a result": ({"dense1": wanted((1, 1), (1, 1), out=(cube("dq", None),))}, "'dq' is not an axis"),
    "axis twice in a tensor": (
        {"dense1": wanted(cube("dp", "dp"), cube(None, "dp"))},
        r"cube\(dp, dp\) uses axis 'dp' twice",
    ),
    "axis twice in a dim": ({"dense1": wanted(cube(("dp", "dp"), None), cube(None, None))}, "uses axis 'dp' twice"),
    "axis on two loops": (
        {"dense1": wanted(cube("dp", None), cube("dp", None))},
        FIRST + "a mesh axis slices two different loops",
    ),
    "layouts overlap": (
        {"dense1": wanted(cube("dp", None), named("line", "tp", None))},
        FIRST + "a mesh axis slices two different loops",
    ),
    "layout entries": (
        {"dense1": wanted(cube("dp"), cube(None, None))},
        FIRST + "operand 0 has 2 dims .* the strategy gives 1",
    ),
    "layout of an unsliced dim": ({"norm": wanted(cube(None, "dp"))}, "must be replicated"),
    "layout loops disagree": (
        {"dense1": wanted(cube("dp", "sp"), cube(None, "mp"))},
        FIRST + "dim 1 of operand 1 .* is the same loop",
    ),
    "layout does not divide": (
        {"dense1": wanted(named("line", None, None), named("line", None, "tp"))},
        FIRST + "dim 1 of operand 1 .* is the same loop",
    ),
    "layouts and counts disagree": (
        {"dense1": wanted(cube(None, "dp"), (1, 2))},
        FIRST + "dim 1 of operand 1 .* is the same loop",
    ),
}
WRONG_REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "layout of another size": (
        {"strategies": {"relu": wanted(named("big", "a", None))}, "layouts": BIG},
        r"parallel.layouts.big \(4, 4\) has 16 devices",
    ),
    "layout without names": (
        {"strategies": {"relu": wanted(named("big", "a", None))}, "layouts": SHORT},
        "must name each of the 2 axes",
    ),
    "layout that does not divide": (
        {
            "strategies": {"relu": wanted(named("wide", ("a", "b"), None))},
            "world_size": 16,
            "layouts": {"wide": NamedMatrix((4, 4), ("a", "b"))},
        },
        r"^parallel.strategies.relu: .* on relu@0 .* a dim of size 24 cannot be cut into 16 equal slices",
    ),
    "no module": (
        {"set_data_parallel": ("nothing",)},
        "^parallel.set_data_parallel: 'nothing' matches no module of the model. Known: dense1, ",
    ),
    "module glob": ({"set_data_parallel": ("dense1", "dense*.x")}, "'dense.*.x' matches no module"),
    "dataset entries": ({"dataset_strategy": ((8, 1),)}, DATA + r" gives 1 entries, the batch has 2 \(0, 1\)"),
    "dataset dims": (
        {"dataset_strategy": ((8, 1), (8, 1, 1))},
        DATA + r" for batch entry '1': \(8, 1, 1\) has 3 entries",
    ),
    "dataset devices": (
        {"dataset_strategy": ((16, 1), (1, 1))},
        DATA + " for batch entry '0': .* no unused axes that make 16 slices",
    ),
    "dataset does not divide": (
        {"dataset_strategy": ((16, 1), (1, 1)), "world_size": 16},
        DATA + " for batch entry '0': dim 0 .* into 16 equal slices",
    ),
    "dataset zero": ({"dataset_strategy": ((0, 1), (1, 1))}, DATA + r": \(0, 1\) has a count of 0"),
    "dataset layout": (
        {"dataset_strategy": (named("nocube", "dp", None), (1, 1)), "layouts": LAYOUTS},
        DATA + ": layout 'nocube' is not in",
    ),
    "dataset axis twice": (
        {"dataset_strategy": (cube("dp", "dp"), (1, 1)), "layouts": LAYOUTS},
        DATA + ".*uses axis 'dp' twice",
    ),
    "mesh of another size": ({"mesh": (("dp", 3),)}, r"^parallel.mesh \(3,\) has 3 devices, but world_size is 8"),
    "mesh axis twice": ({"mesh": (("dp", 2), ("dp", 4))}, "^parallel.mesh must name each of the 2 axes"),
    "mesh of nothing": ({"mesh": (("dp", 0), ("tp", 4))}, "has an axis of size 0"),
    "no refinement": (
        {
            "strategies": {"relu@0": wanted(named("a", "x", None)), "relu@1": wanted(named("b", "u", None))},
            "layouts": {"a": NamedMatrix((3, 8), ("x", "y")), "b": NamedMatrix((8, 3), ("u", "v"))},
            "world_size": 24,
        },
        r"^parallel.layouts.a \(3, 8\) and parallel.layouts.b \(8, 3\) have no common refinement",
    ),
    "nothing configured": ({"mode": "auto"}, "none is configured"),
    "later search": (
        {"mode": "auto", "search": "recursive_programing"},
        "^parallel.search = 'recursive_programing' is not available.* Did you mean 'recursive_programming'",
    ),
    "no plan": ({"mode": "hybrid"}, "^parallel.mode = hybrid has no plan"),
    "no device": ({"world_size": 0}, "^world_size = 0"),
    "data_parallel, batch": ({"mode": "data_parallel", "world_size": 16}, "has 24 samples .* take a multiple of 16"),
    "data_parallel, strategies": (
        {"mode": "data_parallel", "strategies": {"relu": wanted((8, 1))}},
        "data_parallel would ignore it",
    ),
    "data_parallel, mesh": ({"mode": "data_parallel", "mesh": (("dp", 8),)}, "data_parallel would ignore it"),
    "data_parallel, marks": (
        {"mode": "data_parallel", "set_data_parallel": ("relu",)},
        "data_parallel would ignore it",
    ),
    "data_parallel, full_batch": (
        {"mode": "data_parallel", "dataset_strategy": "full_batch"},
        "data_parallel would ignore it",
    ),
}


def refused(tied: Model, request: dict[str, Any], text: str) -> None:
    with pytest.raises(StrategyError, match=text) as caught:
        plan_of(tied, **request)
    assert "\n" not in str(caught.value) and "#" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
def test_wrong_strategies(tied: Model, name: str, mode: str) -> None:
    strategies, text = WRONG[name]
    refused(tied, {"mode": mode, "strategies": strategies, "layouts": LAYOUTS}, text)


@pytest.mark.parametrize("name", WRONG_REQUESTS)
def test_wrong_requests(tied: Model, name: str) -> None:
    request, text = WRONG_REQUESTS[name]
    refused(tied, request, text)


class Attend(nn.Module):
    """Causal self-attention."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum()


def test_keys_that_are_configured_replicated_are_gathered() -> None:
    graph = capture(Objective(Attend(), None, ("0",), ()), (torch.randn(2, 2, 8, 4),), training=False).graph
    queries, replicated = (1, 1, 4, 1), (1, 1, 1, 1)

    def planned(*operands: Operand) -> Plan:
        return plan_of(graph, 4, strategies={"scaled_dot_product_attention": wanted(*operands)})

    alone, together = planned(queries, replicated, replicated), planned(queries, queries, queries)
    assert alone.operators == together.operators
    assert counts(graph, alone, "scaled_dot_product_attention") == [queries] * 3
    with pytest.raises(StrategyError, match="is the same loop"):
        planned(queries, (1, 1, 2, 1), replicated)
