"""Joint optimisation: equal to brute force, within the memory limit, and as the ranks train it."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import pytest
from composing import compose_config
from small import HYBRID, MODES, SMALL

from runner.errors import ConfigError
from runner.planning.estimate import Programs
from runner.planning.joint import JointDecision, with_complete
from strategies.core.errors import StrategyError, TooLarge
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.search.joint import Choice

OPEN = ("parallel.zero.stage=auto", "parallel.pipeline.stages=auto", "parallel.recompute=auto")
STACK = (*SMALL, "model.target=networks.Stack", "optimizer.target=torch.optim.AdamW", "world_size=2")
DATA = (*STACK, "parallel=data_parallel", *OPEN)
GPT = (
    *("train.steps=2", "parallel=data_parallel", "optimizer.target=torch.optim.AdamW"),
    *("model.target=models.gpt.GPT", "model.args={vocabulary: 256, length: 32, width: 64, layers: 2, heads: 2}"),
    *("loss.target=models.losses.NextTokenLoss", "data.target=runner.data.text.Windows"),
    "data.args={length: 32, train: true}",
)
AUTO = (*STACK, "parallel=auto", "parallel.search=dynamic_programming", *OPEN)


@pytest.fixture(scope="module")
def stacked():
    """The open decision of a small stack, and the cost of every choice; earlier lower bounds never exceed it."""
    deciding = JointDecision(compose_config(*DATA, "parallel.plan_cache=null"), print)
    found = {}
    for choice in deciding.bounds:
        bounds = list(deciding.evaluate(choice))
        if choice.recompute == "full_keep":
            assert all(one.bytes is None for one in bounds)  # the layers have no collectives, so this is no plan
            continue
        *before, found[choice] = bounds
        assert [one.seconds for one in bounds] == sorted(one.seconds for one in bounds)
        assert [one.bytes is None for one in bounds] == [True] * len(before) + [False]
        assert len(before) >= (choice.zero > 0) + (choice.recompute != "none")
    return deciding, found


def with_limit(limit: int) -> JointDecision:
    return JointDecision(compose_config(*DATA, "parallel.plan_cache=null", f"parallel.memory_limit={limit}"), print)


@pytest.mark.slow
def test_memory_that_is_left_at_stage_3_holds_complete_parameters():
    """As many buckets as the limit allows, the more the fewer seconds; an option decides otherwise."""
    buckets = "parallel.zero={stage: 3, options: {reduce_bucket_size: 20000}}"
    words = (*GPT, buckets, "world_size=2", "parallel.plan_cache=null")
    choice, found = Choice(1, 3, 1, "none"), []
    first = JointDecision(compose_config(*words), print)
    alone, captures = first.fastest(choice), first.captures
    for more in (0, alone.completing[1][1], 10**9):
        limit = alone.peak + more
        config = compose_config(*words, f"parallel.memory_limit={limit}")
        plan = JointDecision(config, print, captures).plan()
        complete = plan.search.get("complete", 0)
        one = JointDecision(with_complete(config, complete), print, captures).fastest(choice)
        assert one.settings.complete == complete and one.peak <= limit
        assert plan.search["cost"] == pytest.approx(one.seconds)
        found.append((complete, one.seconds))
    assert found[0][0] < alone.completing[1][0] <= found[1][0] < found[2][0]
    assert found[2][0] == alone.completing[-1][0]
    assert found[0][1] > found[1][1] > found[2][1]
    given = buckets.replace("20000", "20000, stage3_model_persistence_threshold: 7")
    config = compose_config(*words, given, "parallel.memory_limit=1GB")
    assert JointDecision(config, print, captures).fastest(choice).settings.complete == 7


@pytest.mark.slow
def test_memory_that_is_left_at_stage_3_of_deepspeed_holds_complete_parameters():
    """Those of the most elements that it has room for; what an option says is predicted, too."""
    words = (*GPT, "parallel.zero={stage: 3, engine: deepspeed}", "world_size=2", "parallel.plan_cache=null")
    choice, found = Choice(1, 3, 1, "none"), []
    first = JointDecision(compose_config(*words), print)
    alone, captures = first.fastest(choice), first.captures
    for limit in (alone.peak, alone.peak + alone.completing[-2][1], 10**9):
        plan = JointDecision(compose_config(*words, f"parallel.memory_limit={limit}"), print, captures).plan()
        complete = plan.search.get("complete", 0)
        one = JointDecision(with_complete(compose_config(*words), complete), print, captures).fastest(choice)
        assert one.settings.complete == complete and one.peak <= limit
        assert plan.search["cost"] == pytest.approx(one.seconds)
        found.append((complete, one.seconds, one.memory(0).parameters))
    assert found[2][0] == max(elements for elements, _ in alone.completing)
    assert found[0][2] < found[2][2] and found[0][1] > found[2][1]
    assert found[2][2] - alone.memory(0).parameters == alone.completing[-1][1]


@pytest.mark.slow
def test_the_limit_is_kept_where_a_larger_bucket_is_gathered_ahead():
    """Of one that stays complete: a rank then needs more than what is added to its parts."""
    args = "{vocabulary: 64, length: 16, width: 64, layers: 3, heads: 4, kv_heads: 4, hidden: 176}"
    words = (
        *(*GPT, "model.target=models.llama.Llama", f"model.args={args}", "data.args={length: 16, train: true}"),
        *("parallel.zero={stage: 3, options: {reduce_bucket_size: 20000}}", "data.batch_size=4", "world_size=2"),
        "parallel.plan_cache=null",
    )
    first = JointDecision(compose_config(*words), print)
    alone = first.fastest(Choice(1, 3, 1, "none"))
    steps, peaks = alone.completing, []
    for elements, _ in steps:
        peaks.append(alone.with_settings(replace(alone.settings, complete=elements)).peak)
    number = next(n for n, (peak, (_, more)) in enumerate(zip(peaks, steps, strict=True)) if peak > alone.peak + more)
    limit = alone.peak + steps[number][1]
    config = compose_config(*words, f"parallel.memory_limit={limit}")
    plan = JointDecision(config, print, first.captures).plan()
    complete = plan.search["complete"]
    assert 0 < complete < steps[number][0]
    assert peaks[[elements for elements, _ in steps].index(complete)] <= limit


@pytest.mark.slow
def test_stage_3_has_a_plan_of_its_own():
    """Its gathers hide behind work, so other layouts than those of stage 0 are faster."""
    shape = "vocabulary: 32000, length: 2048, width: 4096, layers: 4, heads: 32, kv_heads: 32, hidden: 11008"
    words = (
        *("parallel=auto", "parallel.search=dynamic_programming", "parallel.plan_cache=null", *OPEN, "train.steps=1"),
        *("cluster=dgx_h100", "world_size=8", "model.target=models.llama.Llama", f"model.args={{{shape}}}"),
        *("loss.target=models.losses.NextTokenLoss", "optimizer.target=torch.optim.AdamW", "train.precision=bf16"),
        *("data.target=runner.data.text.Windows", "data.args={length: 2048, train: true}", "data.batch_size=16"),
        "job.name=plan",
    )
    deciding = JointDecision(compose_config(*words), print)
    plan = deciding.plan()
    shared = deciding.fastest(Choice(1, 3, 1, "none")).seconds
    assert plan.search["decided"]["zero"] == 3 and plan.search["decided"]["recompute"] == "none"
    assert plan.search["cost"] == plan.search["decided"]["seconds"] < 0.97 * shared
    assert deciding.estimate(Choice(1, 3, 1, "none"), plan).seconds == pytest.approx(plan.search["cost"])


@pytest.mark.slow
def test_bounds_are_below_every_cost(stacked):
    deciding, every = stacked
    assert len({choice.zero for choice in every}) == 4
    assert {choice.stages for choice in every} == {1, 2}
    assert {choice.recompute for choice in every} == {"none", "selective", "full"}
    for choice, one in every.items():
        assert 0 < deciding.bounds[choice].seconds <= one.seconds
        assert 0 < deciding.bounds[choice].bytes <= one.bytes


@pytest.mark.slow
def test_the_decision_is_that_of_brute_force_at_every_limit(stacked):
    _, every = stacked
    sizes = sorted({one.bytes for one in every.values()})
    for limit in (sizes[0], sizes[-1]):
        decided = with_limit(limit).plan().search["decided"]
        best = min(one.seconds for one in every.values() if one.bytes <= limit)
        assert decided["seconds"] == best if decided["modules"] is None else decided["seconds"] < best
    with pytest.raises(StrategyError, match=rf"the smallest needs {sizes[0] / 1024:.4g} KiB or more \(ZeRO"):
        with_limit(sizes[0] - 1).plan()


DEEPSPEED = "parallel.zero.engine=deepspeed"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "decided"),
    [
        (("world_size=8", "data.batch_size=8", OPEN[0], "parallel.memory_limit=10MB"), ("zero", 0)),
        (("world_size=8", "data.batch_size=8", OPEN[0], "parallel.memory_limit=2MB"), ("zero", 1)),
        (("world_size=8", "data.batch_size=8", OPEN[0], "parallel.memory_limit=1.6MB"), ("zero", 3)),
        (("world_size=8", "data.batch_size=8", OPEN[0], "parallel.memory_limit=2MB", DEEPSPEED), ("zero", 1)),
        (("world_size=8", "data.batch_size=8", OPEN[0], "parallel.memory_limit=1.7MB", DEEPSPEED), ("zero", 2)),
        (("world_size=2", "data.batch_size=8", *OPEN[::2], "parallel.memory_limit=2.5MB"), ("recompute", "full")),
    ],
)
def test_the_memory_limit_decides(words, decided):
    config = compose_config(*GPT, *words, "parallel.plan_cache=null")
    found = JointDecision(config, print).plan().search["decided"]
    assert found[decided[0]] == decided[1]


DEEP = (*GPT, "model.args.layers=6", "data.batch_size=8")
STAGED = ("parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("world_size=2", OPEN[0]),
        pytest.param(
            ("world_size=2", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=auto"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ZeRO", "stages"],
)
def test_the_recompute_that_keeps_the_limit_takes_the_least_time(words):
    """Compared with brute force over the layers of every group of ranks, in full or selectively."""
    words = (*DEEP, *words, "parallel.recompute=auto", "parallel.plan_cache=null")
    free = JointDecision(compose_config(*words), print)
    every = {one: free.fastest(one) for one in free.bounds if one.recompute == "full"}
    choice = min(every, key=lambda one: (every[one].seconds, one))
    none, full = free.fastest(replace(choice, recompute="none")).peak, every[choice].peak
    plan, layers = free.best_plan(choice, None), every[choice].recompute_fronts(free.recompute_by_mode(choice))
    counts = [[(all_, few) for all_ in range(4) for few in range(4 - all_)] for _ in layers]
    if len(layers) == 1:
        counts = [[(all_, few) for all_ in range(7) for few in range(7 - all_)]]
    brute = []
    for chosen in product(*counts):
        modes = {}
        for front, (all_, few) in zip(layers, chosen, strict=True):
            paths = front[-1].paths["full"]
            modes |= dict.fromkeys(paths[:all_], "full") | dict.fromkeys(paths[all_ : all_ + few], "selective")
        price = free.estimate(choice, replace(plan, recompute=free.mixed(choice, modes)))
        brute.append((price.seconds, price.peak))
    for share in (0.3, 0.7):
        limit = int(full + share * (none - full))
        one = JointDecision(compose_config(*words, f"parallel.memory_limit={limit}"), print)
        selected = next(priced for priced in one.evaluate(choice) if priced.bytes is not None and priced.bytes <= limit)
        assert selected.seconds <= 1.001 * min(seconds for seconds, peak in brute if peak <= limit)
        assert (selected.seconds, selected.bytes) in brute
        assert 0 < len(selected.modules) <= 6 and selected.plan.recompute.modules == selected.modules


SLICED = (
    *("+recipe=gpt", "cluster=dgx_h100", "world_size=8", "parallel=auto", "parallel.search=dynamic_programming"),
    *("parallel.mesh=null", "parallel.strategies=null", "parallel.dataset_strategy=data_parallel"),
    *("parallel.plan_cache=null", "job.name=plan"),
)


@pytest.mark.slow
def test_an_open_stage_is_no_dearer_than_a_fixed_one():
    """Plans of two pipeline stages that need half of the limit take twice the time of those that just keep it."""
    staged = ("parallel.memory_limit=2MB", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=auto")
    costs = {
        stage: JointDecision(compose_config(*SLICED, *staged, f"parallel.zero.stage={stage}"), print).plan()
        for stage in ("auto", 0, 1)
    }
    seconds = {stage: plan.search["decided"]["seconds"] for stage, plan in costs.items()}
    assert seconds["auto"] <= min(seconds[0], seconds[1])


@pytest.mark.slow
def test_a_refusal_names_no_more_than_the_fastest_plan_needs():
    """Those that are found for far less memory may need more."""
    deciding = JointDecision(compose_config(*SLICED, "parallel.memory_limit=800000"), print)
    with pytest.raises(StrategyError, match="the plan needs") as refused:
        deciding.plan()
    needed = float(re.search(r"the plan needs ([\d.]+) MiB", str(refused.value))[1])
    assert needed * 2**20 <= 1.001 * deciding.fastest(max(deciding.bounds)).peak


@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming"])
def test_slices_of_the_batch_keep_a_limit_that_no_searched_plan_keeps(search):
    """Copies of activations in other layouts, which the search's estimate leaves out, have several times its bytes."""
    words = (
        *("+recipe=resnet", "world_size=3", "data.batch_size=9", "parallel.mesh=null", "parallel.strategies=null"),
        *("parallel.dataset_strategy=data_parallel", "parallel.plan_cache=null"),
    )
    alone = Choice(1, 0, 1, "none")
    by_rows = JointDecision(compose_config(*words, "parallel=data_parallel"), print)
    limit, captures = by_rows.fastest(alone).peak, by_rows.captures
    words = (*words, "parallel=auto", f"parallel.search={search}", f"parallel.memory_limit={limit}")
    deciding = JointDecision(compose_config(*words), print, captures)
    plan = deciding.plan()
    found = deciding.estimate(alone, plan)
    assert found.peak <= limit and found.seconds <= by_rows.fastest(alone).seconds * (1 + 1e-9)
    assert plan.search["cost"] == pytest.approx(found.seconds) and plan.search["algorithm"] == search


@pytest.mark.slow
def test_a_long_decision_reports_its_progress(monkeypatch):
    monkeypatch.setattr("runner.planning.joint.EVERY", 0.0)
    said = []
    one = with_limit(2**30)
    one.say = said.append
    count = one.plan().search["decided"]["tried"]
    lines = [line for line in said if line.startswith("deciding: ")]
    assert lines[0].startswith(f"deciding: 1 of {len(one.bounds)} choices evaluated; now ")
    assert lines[-1].startswith(f"deciding: {count} of ")


@pytest.mark.slow
def test_layers_that_are_computed_again_train_as_one_process(start):
    words = (*DEEP, "world_size=2", "parallel.zero.stage=1", "parallel.pipeline.stages=auto", "parallel.recompute=auto")
    ended = start(*words, "parallel.memory_limit=6MB", "train.precision=fp32", verb="verify")
    assert ended.verdict["passed"]
    assert 1 <= len(ended.plan["search"]["decided"]["modules"]) < 6
    assert ended.plan["memory"]["peak"] <= 6e6


@pytest.mark.slow
def test_a_given_pipeline_computes_again_as_little_as_keeps_the_limit(start, command):
    """Every stage recomputes only as many layers as it needs."""
    words = (*DEEP, "world_size=2", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=4")
    free = start(*words, verb="plan", folder="free").plan["memory"]["peak"]
    least = start(*words, "parallel.recompute=full", verb="plan", folder="least").plan["memory"]["peak"]
    limit = (free + least) // 2
    limited = (*words, "parallel.recompute=auto", f"parallel.memory_limit={limit}")
    ended = start(*limited, "train.precision=fp32", verb="verify")
    decided = ended.plan["search"]["decided"]
    assert ended.verdict["passed"]
    assert ended.plan["memory"]["peak"] <= limit
    assert (decided["stages"], decided["micro_batches"], decided["recompute"]) == (2, 4, "full and selective")
    kept = ended.plan["recompute"]["kept"]
    full = [name for name in decided["modules"] if not any(one.startswith(f"{name}.") for one in kept)]
    by_stage = [sum(int(name.rpartition(".")[2]) // 3 == stage for name in full) for stage in (0, 1)]
    assert by_stage[0] > by_stage[1]
    done = command("plan", *limited[:-1], f"parallel.memory_limit={least // 2}")
    assert done.code == 2 and "[MW502]" in done.paragraphs[0]


@pytest.mark.slow
def test_a_plan_of_another_budget_keeps_the_limit(start):
    """Propagation within the limit finds what plans of the smaller budgets around it miss."""
    recompute = ("parallel.recompute.operators=auto", "parallel.recompute.communication=keep")
    limit = 2061064
    assert (
        start("+recipe=gpt", *recompute, f"parallel.memory_limit={limit}", verb="plan").plan["memory"]["peak"] <= limit
    )


@pytest.mark.slow
def test_one_process_agrees_with_what_was_decided(start):
    ended = start(*AUTO, "train.precision=fp32", "verify.steps=2", verb="verify")
    assert ended.verdict["passed"]
    assert ended.plan["search"]["decided"]["tried"] >= 1


@pytest.fixture
def saved(start):
    return start(*DATA, verb="plan", folder="saved")


@pytest.mark.slow
def test_a_saved_plan_keeps_what_was_decided(start, saved):
    loaded = start(*DATA, f"parallel.plan={saved.folder}", verb="explain", folder="loaded")
    assert loaded.plan["search"]["decided"] == saved.plan["search"]["decided"]
    assert loaded.plan | {"search": None} == saved.plan | {"search": None}
    fixed = start(*STACK, "parallel=data_parallel", verb="plan", folder="fixed")
    with pytest.raises(ConfigError, match=r"was made with parallel\.zero\.stage and parallel\.pipeline given"):
        start(*DATA, f"parallel.plan={fixed.folder}", verb="plan")


@pytest.mark.slow
def test_the_cache_remembers_the_decision(start, tmp_path, capsys):
    words = (*DATA, f"parallel.plan_cache={tmp_path / 'cache'}")
    first, again = (start(*words, verb="plan", folder=folder) for folder in ("first", "again"))
    assert again.plan["search"] == first.plan["search"] | {"loaded_from": "the plan cache"}
    assert "jointly optimised: ZeRO " in capsys.readouterr().out
    other = start(*words, "parallel.zero.stage=1", verb="plan", folder="other")
    assert other.plan["search"]["decided"]["zero"] == 1


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*SMALL, *HYBRID, "parallel.zero.stage=auto"), "does not go with parallel.mode = 'hybrid'"),
        ((*SMALL, *MODES["stand_alone"], "parallel.zero.stage=auto"), "ZeRO needs ranks"),
        (
            (*SMALL, *MODES["stand_alone"], "parallel.pipeline.stages=auto"),
            "does not go with parallel.mode = 'stand_alone'",
        ),
        ((*DATA, "parallel.pipeline.cuts={layers.2: 1}"), "'auto' leaves open how many there are"),
        ((*DATA, "parallel.pipeline.stages=null", "parallel.pipeline.micro_batches=auto"), "would ignore it"),
    ],
)
def test_what_cannot_be_decided_is_refused(command, words, said):
    done = command(*words)
    assert done.code == 2
    assert said in done.paragraphs[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "words"),
    [
        pytest.param("sharding_propagation", (), marks=pytest.mark.slow),
        pytest.param("dynamic_programming", (), marks=pytest.mark.slow),
        ("dynamic_programming", STAGED),
    ],
    ids=["propagation", "dynamic", "stages"],
)
def test_memory_bounds_without_a_trace_are_never_too_high(search, words):
    words = (*DEEP, "world_size=4", OPEN[0], *words, "parallel.recompute=auto", "parallel.plan_cache=null")
    one = JointDecision(compose_config(*words, f"parallel.search={search}"), print)
    before = {choice: one.memory_bounds(choice) for choice in one.bounds}
    assert all(bounds.likely is None for bounds in before.values())
    for choice in one.bounds:
        if not choice.zero:
            assert one.fastest(choice).peak
    behind = {choice: one.memory_bounds(choice) for choice in one.bounds}
    sizes = {choice: one.fastest(choice).peaks for choice in one.bounds}
    assert len({choice.zero for choice in one.bounds}) >= 2
    for choice, true in sizes.items():
        none = sizes[replace(choice, recompute="none")]
        for bounds in (before[choice], behind[choice]):
            assert all(a <= b <= c for a, b, c in zip(bounds.recomputed, bounds.least, true, strict=True))
            assert choice.recompute != "none" or all(a <= b for a, b in zip(bounds.recomputed, none, strict=True))
        assert behind[choice].likely == pytest.approx(true, rel=0.2)
        assert all(a <= b for a, b in zip(before[choice].least, behind[choice].least, strict=True))
        price = one.fastest(choice)
        assert price.likely == pytest.approx(true, rel=0.35)
        count = len(true)
        assert price.peaks_within([2**40] * count) == true
        assert max(price.peaks_within([max(true) - 1] * count)) == max(true)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("parallel.offload.optimizer=host",), marks=pytest.mark.slow),
        pytest.param(("parallel.offload.activations.to=host",), marks=pytest.mark.slow),
        pytest.param(("train.precision=bf16", "train.accumulate=2"), marks=pytest.mark.slow),
        (*STAGED, "parallel.pipeline.schedule=interleaved_1f1b", "parallel.pipeline.virtual_stages=2"),
        pytest.param((*STAGED, "parallel.pipeline.schedule=gpipe"), marks=pytest.mark.slow),
        pytest.param(("parallel.comm_fusion.all_reduce.mode=none",), marks=pytest.mark.slow),
        ("parallel.zero.options={reduce_bucket_size: 2000}",),
    ],
    ids=["host", "activations", "accumulated", "virtual", "gpipe", "apart", "buckets"],
)
def test_what_is_known_of_bytes_holds_whatever_a_step_does(words):
    words = (*DEEP, "world_size=4", OPEN[0], OPEN[2], *words, "parallel.memory_limit=1GB", "parallel.plan_cache=null")
    one = JointDecision(compose_config(*words), print)
    for choice in one.bounds:
        try:
            price = one.fastest(choice)
        except ConfigError:
            continue  # the stage conflicts with the requested options
        bounds = replace(price, traced={}).bounds(None)
        assert all(a <= b <= c for a, b, c in zip(bounds.recomputed, bounds.least, price.peaks, strict=True))
    assert len(one.estimates) >= 6


def test_where_too_little_room_is_guessed_the_plan_that_keeps_least_is_tried():
    words = (*AUTO, "world_size=4", "parallel.plan_cache=null")
    one = JointDecision(compose_config(*words), print)
    choice = Choice(1, 0, 1, "none")
    free = one.best_plan(choice, None).search["bytes"]
    with pytest.raises(TooLarge) as refused:
        one.best_plan(choice, 1)
    least = refused.value.smallest
    assert least < free
    for room in (1, int(least) - 1, None):
        assert one.smaller_plan(choice, room, [(free, 2**40)]).search["bytes"] == pytest.approx(least)
    assert one.smaller_plan(choice, int(free) + 1, [(free, 2**40)]).search["bytes"] == free
    one = JointDecision(compose_config(*words, "parallel.memory_limit=1GB"), print)
    assert one.smaller_plan(choice, None, [(free, 2**20)]) is None  # close to the limit


def test_plans_with_different_recompute_share_a_program():
    """The shared program equals the result of lowering each plan separately."""
    one = JointDecision(compose_config(*DEEP, "world_size=2", *OPEN, "parallel.plan_cache=null"), print)
    graph, made = one.captured(one.rows)[1].graph, Programs()
    plans = [one.best_plan(Choice(1, 0, 1, again), None) for again in ("none", "selective", "full")]
    assert len({plan.recompute for plan in plans}) == 3
    for plan in plans:
        for options in (LoweringOptions(partial_loss=True), LoweringOptions(partial_loss=True, sharded_optimizer=True)):
            assert made(graph, plan, options) == lower(graph, plan, options)
    assert len(made.programs) == 2
    sliced = replace(plans[2], recompute=replace(plans[2].recompute, slices_inputs=True))
    assert made(graph, sliced, LoweringOptions()) == lower(graph, sliced, LoweringOptions()) and len(made.programs) == 2
