"""Stage 0 against plain torch on one device: gradients and norms (Adam would hide a wrong factor), and bytes."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.program import LoweringOptions
from strategies.core.request import Request
from strategies.lowering.lowering import lower
from strategies.optimizer.buckets import buckets, completed, predicted
from strategies.optimizer.loss_scale import WINDOW, LossScale, scale_of
from strategies.optimizer.replicated import BucketedUpdates
from strategies.optimizer.stages import make_updates
from strategies.optimizer.state import StoredState
from strategies.optimizer.updates import BucketLimits
from strategies.planner.planner import make_plan
from strategies.runtime.communicator import Communicator
from strategies.runtime.module_tree import build
from strategies.runtime.shards import OPTIMIZER
from strategies.runtime.simulate import shard
from strategies.runtime.slices import slices_of

ALONE = Mesh((("a", 1),))
TOLERANCE = {"fp32": 2e-6, "fp64": 1e-12, "bf16": 2e-2, "fp16": 3e-3}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


def cases(training):
    case, data_parallel, sliced = training.Case, training.DATA_PARALLEL, training.FULLY_SLICED
    return [
        case(data_parallel, clip=0.3),
        case(sliced, clip=0.3),
        *(
            case(seed, optimizer=kind, clip=clip)
            for seed, kind, clip in [(0, "sgd", 0.3), (1, "adamw", 0.3), (2, "sgd", None)]
        ),
        case(3, optimizer="adagrad", clip=0.3),
        *(case(seed, precision="fp64", optimizer=kind, clip=0.3) for seed, kind in [(4, "sgd"), (5, "adamw")]),
        case(data_parallel, precision="bf16"),
        case(6, precision="bf16", clip=0.3),
        case(data_parallel, precision="fp16", clip=0.3),
        case(6, precision="fp16", optimizer="adamw", clip=0.3),
    ]


@pytest.fixture(scope="module")
def results(training, ranks):
    """Every case with the result of the ranks and of one device."""
    tasks = {precision: training.task(dtype) for precision, dtype in DTYPES.items()}
    given = cases(training)
    done = ranks("train", [(tasks[case.precision][1], case) for case in given])
    found = []
    for case, result in zip(given, done, strict=True):
        assert not isinstance(result, str), result
        net, task = tasks[case.precision]
        # below fp32 the ranks update fp32 masters, so their reference starts from the same rounded weights in fp32
        reference = copy.deepcopy(net).float() if case.precision in ("bf16", "fp16") else copy.deepcopy(net)
        found.append((case, result, training.eager(reference, case, task.batches, tuple(result.gradients))))
    return found


def apart(found, expected):
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-9))


def test_steps_are_those_of_one_device(results):
    """One test, because each process that runs one of these computes all results."""
    for case, result, expected in results:
        most = TOLERANCE[case.precision]
        for name in expected.gradients:
            assert apart(result.gradients[name], expected.gradients[name]) < most, (case, name)
        for found, norm in zip(result.norms, expected.norms, strict=True):
            assert found == pytest.approx(norm, rel=most), case
        for name in expected.weights:
            assert apart(result.weights[name], expected.weights[name]) < most, (case, name)
        assert result.losses == pytest.approx(expected.losses, rel=most), case
        for found, output in zip(result.evaluated, expected.evaluated, strict=True):
            assert apart(found, output) < 2 * most, case  # between steps, with the new weights
        assert result.replicas_equal, case
        assert result.sent == result.predicted, case
    assert max(result.sent for _, result, _ in results) > 1000


@pytest.fixture(scope="module")
def alone(training):
    """A net on one rank without any process group: (task, make) with make(**options) -> updates."""
    _, task = training.task()
    program = lower(task.graph, training.plan_of(task.graph, training.DATA_PARALLEL, ALONE))

    def make(kind="sgd", factory=None, groups=None, stage=0, **options):
        module = build(program, slices_of(task.tensors, program, 0), Communicator(ALONE, 0), "cpu")
        groups = training.groups_of(program) if groups is None else groups
        return make_updates(
            stage, module, program, Communicator(ALONE, 0), factory or training.factory(kind), groups, **options
        )

    return task, program, make


def test_the_norm_is_only_measured_where_it_is_needed(alone):
    task, _, make = alone
    for clip, measure, expected in [(None, False, False), (None, True, True), (0.3, False, True)]:
        updates = make(clip=clip)
        updates.backward(updates.module(*task.batches[0][0]))
        updates.reduce()
        assert (updates.update(measure) is not None) is expected


def test_a_norm_that_is_not_finite_is_reported(alone):
    task, _, make = alone
    updates = make(clip=1.0)
    updates.backward(updates.module(*task.batches[0][0]) * float("nan"))
    norm = updates.step()
    assert norm is not None
    assert norm != norm


def test_only_parameters_that_the_loss_depends_on_are_trained(alone):
    _, program, _ = alone
    assert "unused.weight" in program.reductions
    assert set(program.trainable_names) == set(program.reductions) - {"unused.weight", "unused.bias"}
    assert "ln.bias" not in program.reductions
    assert [name for name in program.parameter_order if name in program.trainable_names] == list(
        program.trainable_names
    )


class Threshold(nn.Module):
    """No gradient comes back to a threshold and to detached values: an optimizer must not decay them."""

    def __init__(self):
        super().__init__()
        self.dense, self.least, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x):
        h = self.dense(x)
        return (h * (h > self.least) * self.scale.detach()).sum()


def test_what_comparisons_alone_take_is_not_trained():
    graph = capture(Objective(Threshold(), None, ("x",), ()), (torch.randn(8, 4),), training=True).graph
    program = lower(graph, make_plan(graph, Request("data_parallel", 2)), LoweringOptions(sharded_optimizer=True))
    assert program.trainable_names == ("dense.weight", "dense.bias")
    assert {"least", "scale"} <= program.reductions.keys()


def test_parameters_without_a_gradient_have_a_gradient_of_zeros(alone):
    task, program, make = alone
    updates = make()
    updates.backward(updates.module(*task.batches[0][0]))
    found = dict(updates.gradients())
    assert set(found) == set(program.reductions)
    assert torch.equal(found["unused.weight"], torch.zeros(4, 4))


def taken_over(second, first):
    """Give `second` weights and state of `first`, as loading a checkpoint does."""
    pieces_by_key = {key: pieces for batch in first.pieces() for key, pieces in batch.items()}
    states = {}
    for key, (piece,) in pieces_by_key.items():
        if key.startswith(OPTIMIZER):
            _, state, name = key.split("/", 2)
            states.setdefault(state, {})[name] = StoredState(piece.shape, piece.view.dtype, True)
    second.begin(states, copy.deepcopy(first.plain()))
    for batch in second.pieces(write=True):
        for key, (piece,) in batch.items():
            piece.view.copy_(pieces_by_key[key][0].view)
    second.loaded()


def test_setting_weights_and_state_continues_bit_for_bit(alone):
    task, _, make = alone
    for kind in ("sgd", "adamw"):
        first, second = make(kind), make(kind)
        names = [name for name, _ in first.gradients()]
        for updates, number in ((first, 0), (first, 1)):
            updates.backward(updates.module(*task.batches[number][0]))
            updates.step()
        taken_over(second, first)
        for updates in (first, second):
            updates.backward(updates.module(*task.batches[2][0]))
            updates.step()
        assert all(torch.equal(first.weight(name), second.weight(name)) for name in names)


def sharded_program(training, mesh):
    _, task = training.task()
    return lower(task.graph, training.plan_of(task.graph, training.DATA_PARALLEL, mesh))


def test_buckets_hold_every_open_gradient_once_within_their_size(training):
    program = sharded_program(training, Mesh((("a", 2), ("b", 2))))
    for size in (1, 300, 700, 10**6):
        found = buckets(program, BucketLimits(size))
        names = [name for bucket in found for name in bucket.names]
        assert sorted(names) == sorted(name for name in program.trainable_names if program.reductions[name])
        for bucket in found:
            assert bucket.elements == sum(program_elements(program, name) for name in bucket.names)
            assert bucket.elements * 4 <= size or len(bucket.names) == 1
    assert len(buckets(program, BucketLimits(10**6))) == 1
    assert len(buckets(program, BucketLimits(1))) == len(program.trainable_names)


def test_buckets_leave_in_the_order_of_backward(training):
    program = sharded_program(training, Mesh((("a", 2), ("b", 2))))
    order = completed(program)
    assert order[-1] == "emb.weight" and order[0].startswith("dense")  # the tied weight is used first and last
    last = [max(order.index(name) for name in bucket.names) for bucket in buckets(program, BucketLimits(300))]
    assert last == sorted(last) and len(last) > 2


def test_buckets_are_split_at_configured_positions(training):
    program = sharded_program(training, Mesh((("a", 2), ("b", 2))))
    order = completed(program)
    assert [bucket.names for bucket in buckets(program, BucketLimits(at=(2, 3)))] == [order[:2], order[2:3], order[3:]]
    assert [bucket.names for bucket in buckets(program, BucketLimits(at=()))] == [order]
    with pytest.raises(StrategyError, match=rf"cuts behind gradient 99, but there are {len(order)} gradients"):
        buckets(program, BucketLimits(at=(1, 99)))


def program_elements(program, name):
    source = next(source for source in program.sources if source.name == name)
    return shard(torch.zeros(source.spec.shape), program.layouts[source.id], program.mesh)[0].numel()


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True], ids=["fp32 of all", "every"])
def test_buckets_that_leave_during_backward_give_the_same_bits(training, ranks, every):
    tasks = {precision: training.task(dtype)[1] for precision, dtype in DTYPES.items()}
    seeds = (training.DATA_PARALLEL, 1, 4)
    kinds = [(seed, p) for seed in seeds for p in DTYPES if every or seed == seeds[0] or p == "fp32"]
    cases = [training.Case(seed, precision=precision, cut=BucketLimits(300), clip=0.3) for seed, precision in kinds]
    cases.append(training.Case(training.DATA_PARALLEL, cut=BucketLimits(at=(1, 4)), clip=0.3))
    done = ranks("overlapped", [(tasks[case.precision], case) for case in cases])
    for case, (same, during, after, as_many) in zip(cases, done, strict=True):
        assert same and as_many, case
        assert during[0] == after[0] == after[1], case  # an early micro-batch is not reduced
    open_buckets = len(buckets(sharded_program(training, Mesh((("a", 2), ("b", 2)))), cases[-1].cut))
    assert done[-1][1][1] - done[-1][2][1] == open_buckets == 3  # all of them are sent before backward returns


def test_prediction_against_manual_calculation(training):
    program = sharded_program(training, Mesh((("a", 4),)))
    sums = sum(-(-2 * 3 * program_elements(program, name) // 4) for name in program.trainable_names)
    assert predicted(program, measure=False) == {"all_reduce": sums * 4}
    assert predicted(program) == {"all_reduce": sums * 4 + 2 * 8}
    assert predicted(sharded_program(training, ALONE)) == {}


def test_a_parameter_must_be_in_one_group(alone, training):
    _, program, make = alone
    groups = training.groups_of(program)
    with pytest.raises(StrategyError, match=r"emb\.weight is in 2 groups"):
        make(groups=[*groups, {"names": ["emb.weight"]}])
    with pytest.raises(StrategyError, match=r"is in 0 groups"):
        make(groups=groups[:1])


def test_groups_of_other_stages_stay_empty(alone, training):
    """Schedulers may have an entry for each group."""
    _, program, make = alone
    groups = [{"names": ["of.another.stage"], "lr": 0.5}, *training.groups_of(program)]
    assert make(groups=groups).optimizer.param_groups[0]["lr"] == 0.5
    assert make(groups=groups).plain().groups[0]["names"] == []


def test_nothing_to_train_is_refused(alone):
    _, program, _ = alone
    sources = tuple(replace(source, trainable=False) for source in program.sources)
    with pytest.raises(StrategyError, match="nothing to train"):
        BucketedUpdates(
            torch.nn.Module(), replace(program, sources=sources[:0]), Communicator(ALONE, 0), torch.optim.SGD, []
        )


@pytest.mark.parametrize("kind", ["LBFGS", "SparseAdam"])
def test_optimizers_that_do_not_fit_the_step_are_refused(alone, kind):
    _, program, make = alone
    with pytest.raises(StrategyError, match=f"Optimizer {kind} cannot be used here"):
        make(factory=getattr(torch.optim, kind), groups=[{"names": list(program.trainable_names)}])


def test_optimizers_by_shape_need_full_parameters(alone, training):
    _, program, make = alone
    groups = [{"names": list(program.trainable_names)}]
    make(factory=torch.optim.Adafactor, groups=groups)
    sliced = replace(program, layouts={**program.layouts, ids(program)["emb.weight"]: Layout((("a",), ()))})
    module = build(program, slices_of(training.task()[1].tensors, program, 0), Communicator(ALONE, 0), "cpu")
    with pytest.raises(StrategyError, match=r"Adafactor .* this plan slices emb\.weight"):
        BucketedUpdates(module, sliced, Communicator(ALONE, 0), torch.optim.Adafactor, groups)


def ids(program):
    return {source.name: source.id for source in program.sources}


@pytest.mark.slow
def test_accumulated_gradients_are_added_once_per_step(training, ranks):
    """Stage 2 keeps only a shard of every gradient, so DeepSpeed has to reduce them after every micro-batch."""
    _, task = training.task()
    cases = [training.Case(training.DATA_PARALLEL, stage) for stage in (0, 1, 2)]
    cases.append(training.Case(training.DATA_PARALLEL, overlap=True))
    after, one, two, during = ranks("reductions", [(task, case) for case in cases])
    assert after == [0, 0, 1]  # two micro-batches, then the update
    assert during == one == [0, 1, 0]
    assert two == [1, 1, 0]


def test_a_step_with_overflow_leaves_everything_as_it_was(training):
    _, task = training.task(torch.float16)
    program = lower(task.graph, training.plan_of(task.graph, training.DATA_PARALLEL, ALONE))
    module = build(program, slices_of(task.tensors, program, 0), Communicator(ALONE, 0), "cpu")
    updates = make_updates(
        0, module, program, Communicator(ALONE, 0), training.factory("adamw"), training.groups_of(program),
        precision="fp16",
    )  # fmt: skip

    def step(factor):
        updates.backward(updates.module(*task.batches[0][0]) * factor)
        return updates.step()

    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert updates.loss_scale == LossScale(2.0**15)
    assert not math.isfinite(step(10.0))
    assert updates.loss_scale == LossScale(2.0**14, skipped=1)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not [key for batch in updates.pieces() for key in batch if key.startswith(OPTIMIZER)]  # no state yet
    assert math.isfinite(step(0.01)) and updates.loss_scale == LossScale(2.0**14, good=1, skipped=1)
    saved = updates.plain()
    assert not math.isfinite(step(10.0)) and updates.loss_scale == LossScale(2.0**13, skipped=2)
    updates.begin({}, saved)
    assert updates.loss_scale == LossScale(2.0**14, good=1, skipped=1)


def test_the_loss_scale_grows_after_many_good_steps_and_has_an_end():
    scale = LossScale(2.0, good=WINDOW - 1)
    scale.note(finite=True)
    assert scale == LossScale(4.0)
    for _ in range(2):
        scale.note(finite=False)
    with pytest.raises(FloatingPointError, match="not finite in fp16 even with a loss scale of 1; train with"):
        scale.note(finite=False)
    constant = scale_of(8.0)
    constant.note(finite=False)
    assert constant == LossScale(8.0, adapts=False, skipped=1)
