"""ZeRO 1-3 against plain torch on one device, on four ranks; every convention of DeepSpeed that we rely on has a case,
and so has what our own stages are for."""

import copy
import math
from functools import cache

import pytest
import torch

from strategies.core.mesh import Mesh
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.optimizer.zero import traffic as zero_traffic
from strategies.runtime.offload import Offload

TOLERANCE = {"fp64": 1e-10, "fp32": 2e-6, "bf16": 2e-2, "fp16": 3e-3}
NATIVE = {"stage": 3, "engine": "native"}


def conventions(training):
    """Convention -> the case that tests it."""
    case, data_parallel, sliced = training.Case, training.DATA_PARALLEL, training.FULLY_SLICED
    found = {}
    # clip=None: DeepSpeed clips at 1.0 unless clipping is disabled, and the norms here are above 5
    found["unsliced parameters are the dense group, stage 3"] = case(data_parallel, 3)
    found["no dense group and replica groups of one rank, stage 1"] = case(sliced, 1, clip=0.3)
    found["a replica group for every parameter, stage 2"] = case(0, 2, clip=0.3)
    found["fp16 with a loss scale, stage 2"] = case(4, 2, precision="fp16", clip=0.3)
    found["native: a replica group for every parameter, fp64"] = case(0, precision="fp64", clip=0.3, **NATIVE)
    found["native: one replica group, small buckets"] = case(
        training.DATA_PARALLEL, optimizer="adamw", options={"reduce_bucket_size": 100}, **NATIVE
    )
    own = {"engine": "native"}
    found["native: bf16 with fp32 masters, overlapped, stage 1"] = case(
        4, 1, precision="bf16", clip=0.3, overlap=True, **own
    )
    found["native: one replica group, small overlapped buckets, stage 2"] = case(
        training.DATA_PARALLEL, 2, "adamw", options={"reduce_bucket_size": 100}, overlap=True, **own
    )
    found["native: experts that no token chooses, stage 3"] = case(
        training.DATA_PARALLEL, 3, "adamw", 0.3, "fp64", chooses=True, **own
    )
    return found


def more_conventions(training):
    case, cpu = training.Case, {"device": "cpu"}
    found = {
        "unsliced parameters are the dense group, stage 1": case(training.DATA_PARALLEL, 1),
        "no dense group and replica groups of one rank, stage 3": case(training.FULLY_SLICED, 3, clip=0.3),
        "unsliced parameters are the dense group, stage 2": case(training.DATA_PARALLEL, 2),
        "no dense group and replica groups of one rank, stage 2": case(training.FULLY_SLICED, 2, clip=0.3),
        "a replica group for every parameter, stage 1": case(0, 1, clip=0.3),
        "a replica group for every parameter, stage 3": case(0, 3, clip=0.3),
        "Adagrad is not replaced, stage 1": case(3, 1, "adagrad", clip=0.3),
        "bf16 with fp32 masters, slices, stage 3": case(4, 3, precision="bf16", clip=0.3),
        "fp16 with a loss scale, stage 1": case(4, 1, precision="fp16", clip=0.3),
        "fp16 with a loss scale, stage 3": case(4, 3, precision="fp16", clip=0.3),
        "bf16 with fp32 masters, other slices, stage 1": case(4, 1, precision="bf16", clip=0.3),
        "native: fp16 with a loss scale": case(4, precision="fp16", clip=0.3, **NATIVE),
        "native: a replica group for every parameter, fp64, stage 1": case(
            0, 1, precision="fp64", clip=0.3, engine="native"
        ),
        "native: some parameters stay complete, fp64": case(
            0,
            optimizer="adamw",
            precision="fp64",
            clip=0.3,
            options={"reduce_bucket_size": 50, "stage3_model_persistence_threshold": 200},
            **NATIVE,
        ),
        "native: experts that no token chooses, stage 1": case(
            0, 1, "adamw", 0.3, "fp64", chooses=True, engine="native"
        ),
        "experts that no token chooses, on the host, stage 3": case(
            training.DATA_PARALLEL, 3, "adamw", chooses=True, options={"offload_optimizer": cpu}
        ),
    }
    for stage in (1, 2, 3):
        found[f"options of torch groups across replica groups, stage {stage}"] = case(1, stage, "adamw", clip=0.3)
        found[f"one micro-batch, stage {stage}"] = case(2, stage, accumulate=1)
        found[f"bf16 with fp32 masters, stage {stage}"] = case(
            training.DATA_PARALLEL, stage, precision="bf16", clip=0.3
        )
    found["offload of everything, stage 3"] = case(5, 3, options={"offload_optimizer": cpu, "offload_param": cpu})
    found["small buckets, overlapped, stage 2"] = case(5, 2, options={"overlap_comm": True, "reduce_bucket_size": 200})
    found["native: nothing to gather"] = case(training.FULLY_SLICED, clip=0.3, **NATIVE)
    found["native: Adagrad has states when it is made"] = case(3, optimizer="adagrad", clip=0.3, **NATIVE)
    found["native: bf16 with fp32 masters"] = case(4, precision="bf16", clip=0.3, **NATIVE)
    found["native: one micro-batch"] = case(2, accumulate=1, **NATIVE)
    for seed, elements in ((training.DATA_PARALLEL, 300), (4, 10**9)):
        some = {"reduce_bucket_size": 50, "stage3_model_persistence_threshold": elements}
        found[f"native: {elements} elements stay complete, bf16"] = case(
            seed, optimizer="adamw", precision="bf16", clip=0.3, options=some, **NATIVE
        )
    for stage in (1, 2):
        own = {"stage": stage, "clip": 0.3, "engine": "native", "overlap": stage == 1}
        found[f"native: nothing to gather, stage {stage}"] = case(training.FULLY_SLICED, **own)
        found[f"native: Adagrad has states when it is made, stage {stage}"] = case(3, optimizer="adagrad", **own)
        found[f"native: fp16 with a loss scale, stage {stage}"] = case(4, precision="fp16", **own)
        found[f"native: options of torch groups across replica groups, stage {stage}"] = case(
            1, optimizer="adamw", **own
        )
        found[f"native: one micro-batch, fp64, stage {stage}"] = case(2, precision="fp64", accumulate=1, **own)
        found[f"native: experts that no token chooses, slices, stage {stage + 1}"] = case(
            0, optimizer="adamw", precision="fp64", chooses=True, **(own | {"stage": stage + 1})
        )
    for stage in (1, 3):
        found[f"experts that no token chooses, slices, stage {stage}"] = case(0, stage, "adamw", 0.3, chooses=True)
    for stage in (1, 2):
        found[f"experts that no token chooses, on the host, stage {stage}"] = case(
            training.DATA_PARALLEL, stage, "adamw", 0.3, chooses=True, options={"offload_optimizer": cpu}
        )
    found["Adagrad is not replaced, stage 3"] = case(3, 3, "adagrad", clip=0.3)
    found["offload without compiling an optimizer, stage 2"] = case(5, 2, "adamw", options={"offload_optimizer": cpu})
    found["experts that no token chooses, stage 2"] = case(training.DATA_PARALLEL, 2, "adamw", chooses=True)
    kept = {"param_persistence_threshold": 50, "stage3_prefetch_bucket_size": 1000, "stage3_max_reuse_distance": 1000}
    found["kept and prefetched parameters, stage 3"] = case(5, 3, options=kept)
    return found


def refusals(training):
    """Rejected cases, each with a part of its error message."""
    case = training.Case
    return [
        (case(stage=1, precision="fp64"), "ZeRO stage 1 cannot train in fp64: DeepSpeed keeps the weights"),
        (case(stage=3, options={"stage": 2}), "is given by parallel.zero.stage"),
        (case(stage=2, options={"overlap_com": True}), "Did you mean 'overlap_comm'?"),
        (case(stage=2, options={"reduce_scatter": False}), "it must stay true"),
        (case(stage=1, options={"parameter_alignment": True}), "pads parameters where checkpoints expect elements"),
        (case(stage=2, options={"zero_quantized_weights": True}), "changes the numbers"),
        (case(stage=3, options={"offload_param": {"device": "nvme"}}), "Use device: cpu"),
        (case(stage=2, options={"reduce_bucket_size": "many"}), "DeepSpeed refuses {'reduce_bucket_size': 'many'}"),
        (case(options={"overlap_comm": True}, **NATIVE), "'native' has no parallel.zero.options.overlap_comm"),
        (case(optimizer="Muon", **NATIVE), "Optimizer Muon treats every parameter as one matrix, but ZeRO stage 3"),
        (case(offload=Offload(optimizer="host"), **NATIVE), "'native' has no parallel.offload of optimizer"),
        (case(stage=1, options={"offload_param": {"device": "cpu"}}), "at stage 3 only; parallel.zero.stage is 1"),
        (case(stage=2, options={"stage3_max_reuse_distance": 9}), "at stage 3 only; parallel.zero.stage is 2"),
    ]


def carry_out(training, ranks, given, refused=()):
    """Every convention with the result of the ranks and of one device; and the error messages of rejected cases."""
    dtypes = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

    @cache
    def task_of(precision, accumulate, chooses):
        return training.task(dtypes[precision], 3 if chooses else 2, accumulate, chooses=chooses)

    def task(case):
        return task_of(case.precision, case.accumulate, case.chooses)

    payload = [(task(case)[1], case) for case in given.values()]
    done = ranks("train", [*payload, *((task_of("fp32", 2, False)[1], case) for case, _ in refused)])
    results = {}
    for (what, case), result in zip(given.items(), done[: len(given)], strict=True):
        assert not isinstance(result, str), (what, result)
        net, of_case = task(case)
        # the ranks update fp32 masters, so the reference starts from the same rounded weights in fp32
        wide = torch.float64 if case.precision == "fp64" else torch.float32
        expected = training.eager(copy.deepcopy(net).to(wide), case, of_case.batches, tuple(result.gradients))
        results[what] = (case, result, expected)
    return results, done[len(given) :]


@pytest.fixture(scope="module")
def run(training, ranks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")  # fp16 trains on processors without fast fp16 products, too
        return carry_out(training, ranks, conventions(training), refusals(training))


@pytest.fixture(scope="module")
def results(run):
    return run[0]


def apart(found, expected):
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-9))


def test_steps_are_those_of_one_device(results):
    """One test, because each process that runs one of these computes all results."""
    check(results)


def check(results):
    """Frozen and unused parameters too: sliced ones must not be overwritten by the weights of rank 0."""
    for what, (case, result, expected) in results.items():
        most = TOLERANCE[case.precision]
        for name in expected.gradients:
            assert apart(result.gradients[name], expected.gradients[name]) < most, (what, name)
        for found, norm in zip(result.norms, expected.norms, strict=True):
            assert found == pytest.approx(norm, rel=most), what
        for name in expected.weights:
            assert apart(result.weights[name], expected.weights[name]) < most, (what, name)
        assert result.losses == pytest.approx(expected.losses, rel=most), what
        for found, output in zip(result.evaluated, expected.evaluated, strict=True):
            assert apart(found, output) < 2 * most, what  # between steps, with the new weights
        assert result.replicas_equal, what


def test_unsupported_cases_are_refused_with_the_reason(training, run):
    for (case, reason), said in zip(refusals(training), run[1], strict=True):
        assert isinstance(said, str), case
        assert reason in said, case
        assert "\n" not in said


@pytest.mark.slow
def test_stage_3_holds_one_layer_at_a_time(training, ranks):
    trained, evaluated, untouched = ranks("most_live", training.layers_task(), world_size=2)
    layer = 16 * 16 + 16
    assert 0 < trained <= 2 * layer
    assert 0 < evaluated <= 2 * layer
    assert untouched, "DeepSpeed replaced functions of torch for the entire process"


@pytest.mark.essential  # in place of one that asks for all results
def test_native_stage_3_has_one_complete_layer_at_a_time(training, ranks):
    """Autograd holds none between forward and backward, but the one that backward begins with."""
    trained, between, evaluated, left = ranks("most_gathered", training.layers_task(), world_size=2)
    layer = 16 * 16 + 16 + 16  # the last is padding
    assert layer <= trained <= 2 * layer  # gloo's threads may let go of one a little later
    assert layer <= evaluated <= 2 * layer
    assert between == layer
    assert left == 0


def test_predicted_bytes_against_manual_calculation(training):
    """On 4 ranks in fp32: adding n elements sends 6 n bytes per rank, gathering or scattering them 3 n."""

    def lowered(task):
        plan = training.plan_of(task.graph, training.DATA_PARALLEL, Mesh((("a", 4),)))
        sources = task.graph.of_kind("parameter")
        sizes = {source.name: math.prod(source.spec.shape) for source in sources}
        return lower(task.graph, plan, LoweringOptions(sharded_optimizer=True)), sizes

    program, sizes = lowered(training.task()[1])
    learns = sum(sizes.values()) - sizes["ln.bias"] - sizes["unused.weight"] - sizes["unused.bias"]
    assert zero_traffic.predicted(program, 1, 3) == {"all_reduce": 6 * learns, "all_gather": 3 * learns}
    assert zero_traffic.predicted(program, 2, 3) == {"all_reduce": 18 * learns, "all_gather": 3 * learns}
    program, sizes = lowered(training.layers_task())  # gathered for forward and for backward of every micro-batch
    everything = sum(sizes.values())
    assert zero_traffic.predicted(program, 3, 3) == {"reduce_scatter": 9 * everything, "all_gather": 18 * everything}


@pytest.mark.slow
def test_more_conventions(training, ranks):
    results, _ = carry_out(training, ranks, more_conventions(training))
    check(results)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Adadelta", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"])
def test_elementwise_optimizers_of_torch(training, ranks, kind):
    net, task = training.task()
    cases = [training.Case(7, stage, kind, clip=0.3) for stage in (0, 1, 2, 3)]
    cases.append(training.Case(7, optimizer=kind, clip=0.3, **NATIVE))
    for case, result in zip(cases, ranks("train", [(task, case) for case in cases]), strict=True):
        expected = training.eager(copy.deepcopy(net), case, task.batches, tuple(result.gradients))
        # dividing by the root of a small sum amplifies the last digit of a gradient
        assert all(apart(result.weights[name], expected.weights[name]) < 1e-4 for name in expected.weights), case


@pytest.mark.slow
def test_many_random_plans(training, ranks):
    net, task = training.task()
    cases = [training.Case(seed, 1 + seed % 3, ("sgd", "adamw")[seed % 2], clip=0.3) for seed in range(100, 130)]
    cases += [training.Case(seed, optimizer=("sgd", "adamw")[seed % 2], clip=0.3, **NATIVE) for seed in range(200, 220)]
    for case, result in zip(cases, ranks("train", [(task, case) for case in cases]), strict=True):
        expected = training.eager(copy.deepcopy(net), case, task.batches, tuple(result.gradients))
        assert all(apart(result.gradients[name], expected.gradients[name]) < 2e-6 for name in expected.gradients), case
        assert result.norms == pytest.approx(expected.norms, rel=2e-6), case


@pytest.mark.slow
def test_one_rank_alone(training, ranks):
    net, task = training.task()
    cases = [training.Case(training.DATA_PARALLEL, stage, "adamw", clip=0.3) for stage in (0, 1, 2, 3)]
    cases.append(training.Case(training.DATA_PARALLEL, optimizer="adamw", clip=0.3, **NATIVE))
    for case, result in zip(cases, ranks("train_alone", (task, cases), world_size=1), strict=True):
        expected = training.eager(copy.deepcopy(net), case, task.batches, tuple(result.gradients))
        assert all(apart(result.gradients[name], expected.gradients[name]) < 2e-6 for name in expected.gradients), case
        assert result.norms == pytest.approx(expected.norms, rel=2e-6), case
