"""parallel.memory_limit, parallel.recompute=auto and train.measure_memory, through the command."""

from __future__ import annotations

import json

import pytest
from small import SMALL

from benchmarks import memory as benchmark
from runner.config.parallel import Bytes
from runner.config.section import Section

SOME_COMPLETE = "{reduce_bucket_size: 20000, stage3_model_persistence_threshold: 60000}"
SMALL_COMPLETE = "{stage3_param_persistence_threshold: 20000}"
AVERAGED = "train.callbacks=[{target: ema}]"


class Limited(Section):
    limit: Bytes


@pytest.mark.parametrize(
    ("given", "meant"),
    [(7, 7), ("80GB", 80 * 10**9), ("512MiB", 512 * 2**20), ("1.5 KiB", 1536), ("12B", 12)],
)
def test_units(given, meant):
    assert Limited(limit=given).limit == meant


@pytest.mark.parametrize("given", ["80gb", "GB", "-1GB", "-1", "1.5", 0, -5, 1.5])
def test_what_is_no_number_of_bytes(given):
    with pytest.raises(ValueError):
        Limited(limit=given)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["parallel.memory_limit=12XB"], ["parallel.memory_limit = '12XB' is no number of bytes; write one such as"]),
        (
            ["parallel.memory_limit=1MB"],
            ["per rank, but the plan needs", "The largest part is activations: choose parallel.recompute=auto"],
        ),
        (
            ["parallel.memory_limit=1MB", "parallel.recompute=auto"],
            ["even with all repeated layers recomputed the plan needs"],
        ),
        (
            ["+recipe=hybrid_matmul", "parallel.memory_limit=1GB"],
            ["parallel.mode = 'hybrid'", "parallel.memory_limit=null"],
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_a_rank_starts(command, words, texts):
    done = command("plan", *(() if words[0].startswith("+recipe") else ("+recipe=gpt",)), *words)
    assert done.code == 2
    assert all(text in done.err for text in texts)


@pytest.mark.slow
def test_auto_keeps_the_limit(command, tmp_path):
    folder = tmp_path / "auto"
    words = ("+recipe=gpt", "parallel.memory_limit=2.4MB", "parallel.recompute=auto", f"hydra.run.dir={folder}")
    assert command("plan", *words).code == 0
    content = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    assert content["memory"]["peak"] <= 2_400_000
    assert content["recompute"]["modules"]


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.zero.stage=0", "parallel.recompute=full", AVERAGED),
        pytest.param(
            ("parallel.zero.stage=2", "train.accumulate=2", "parallel.offload.optimizer=host"), marks=pytest.mark.slow
        ),
        pytest.param(("parallel.zero.stage=3", "parallel.offload.activations.to=disk"), marks=pytest.mark.slow),
        pytest.param(("parallel.zero={stage: 3, engine: native}", "train.accumulate=2"), marks=pytest.mark.slow),
        pytest.param((f"parallel.zero={{stage: 3, options: {SOME_COMPLETE}}}",), marks=pytest.mark.slow),
        pytest.param(
            (f"parallel.zero={{stage: 3, engine: deepspeed, options: {SMALL_COMPLETE}}}",), marks=pytest.mark.slow
        ),
        pytest.param(("parallel.zero.stage=1", "train.accumulate=2"), marks=pytest.mark.slow),
        pytest.param(("parallel.zero.stage=2", "train.precision=bf16", AVERAGED), marks=pytest.mark.slow),
    ],
)
def test_real_ranks_take_what_was_predicted(start, words):
    two = ("world_size=2", "parallel=data_parallel", "parallel.mesh=null", "~parallel.strategies")
    few = ("+parallel.strategies={}", "train.steps=3", "+data.args.limit=200000", "train.measure_memory=true")
    ended = start("+recipe=gpt", *two, *few, *words)
    content = json.loads((ended.folder / "memory.json").read_text(encoding="utf-8"))
    most = max(content["measured"], key=lambda one: one["peak"])
    for key in ("held", "peak", "host"):
        assert content["predicted"][key] == pytest.approx(most[key], rel=0.02, abs=20_000)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("train.accumulate=1",), ("train.accumulate=2", "parallel.offload.optimizer=host")])
@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_that_set_the_peak_in_bf16_are_predicted(start, stage, words):
    """Of many weights and few rows, by DeepSpeed."""
    few = ("parallel=data_parallel", "world_size=2", "train.steps=2", "train.measure_memory=true", *words)
    zero = (f"parallel.zero={{stage: {stage}, engine: deepspeed}}", "train.precision=bf16", "model.args.hidden=20000")
    ended = start(*SMALL, *few, *zero)
    content = json.loads((ended.folder / "memory.json").read_text(encoding="utf-8"))
    assert content["predicted"]["peak"] == pytest.approx(max(one["peak"] for one in content["measured"]), rel=0.01)


@pytest.mark.slow
def test_tensors_of_a_dataset_are_not_measured(start):
    ended = start(
        *SMALL,
        "parallel=data_parallel",
        "world_size=2",
        "+data.args.rows=20000",
        "train.steps=2",
        "train.measure_memory=true",
    )
    content = json.loads((ended.folder / "memory.json").read_text(encoding="utf-8"))
    assert [one["peak"] for one in content["measured"]] == pytest.approx([content["predicted"]["peak"]] * 2, rel=0.02)


@pytest.mark.parametrize("words", [("train.accumulate=4",), ("parallel.pipeline.micro_batches=4",)], ids=["", "staged"])
def test_micro_batches_are_not_kept_for_their_counts(start, words):
    """The mean over labels reads those of all micro-batches before the first."""
    images = "data.args={rows: 16, channels: 1, height: 64, width: 64, classes: 4}"
    staged = ("parallel.pipeline.stages=2", "parallel.pipeline.cuts={outer: 1}") if "pipeline" in words[0] else ()
    few = ("parallel=data_parallel", "world_size=2", "train.steps=2", "train.measure_memory=true", *staged)
    data = ("data.target=runner.data.synthetic.LargeImages", images, "model.target=networks.Averaged")
    ended = start(*SMALL, *few, *data, *words)
    content = json.loads((ended.folder / "memory.json").read_text(encoding="utf-8"))
    assert content["predicted"]["peak"] == pytest.approx(max(one["peak"] for one in content["measured"]), rel=0.05)


@pytest.mark.parametrize(
    ("words", "most"),
    [
        (("1f1b",), 0.01),
        pytest.param(("zero_bubble", "parallel.recompute=full"), 0.06, marks=pytest.mark.slow),
        *(pytest.param((kind,), 0.1, marks=pytest.mark.slow) for kind in ("gpipe", "zero_bubble", "zbv", "auto")),
    ],
)
def test_ranks_of_a_pipeline_take_at_most_what_was_predicted(start, words, most):
    """The first backward of a stage counts gradients that are not there yet."""
    kind, *others = words
    two = ("world_size=2", "parallel=semi_auto", "parallel.mesh=null", "parallel.dataset_strategy=data_parallel")
    few = ("parallel.strategies={}", "train.steps=2", "+data.args.limit=200000", "train.measure_memory=true")
    cut = ("parallel.pipeline.cuts=auto", "model.args.dropout=0.0", f"parallel.pipeline.schedule={kind}")
    ended = start("+recipe=gpt_pipeline", *two, *few, *cut, *others)
    content = json.loads((ended.folder / "memory.json").read_text(encoding="utf-8"))
    measured = max(one["peak"] for one in content["measured"])
    assert -0.001 <= content["predicted"]["peak"] / measured - 1 <= most


@pytest.mark.slow
def test_every_pair_of_the_benchmark(tmp_path):
    page = tmp_path / "memory.md"
    results = benchmark.run(page)
    assert len(results) >= 40
    assert sum(abs(one.difference) for one in results) / len(results) <= 0.05
    assert min(one.difference for one in results) >= -0.03
    assert page.read_text(encoding="utf-8").count("\n|") > 40
