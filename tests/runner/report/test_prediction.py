"""Predictions of a plan: speed, the bottleneck, and possible improvements; on described clusters."""

from __future__ import annotations

import json
import re

import pytest
from composing import compose_config
from small import MODES, SMALL

from runner.planning.clusters import described, shipped
from runner.report import prediction as predicting
from runner.report.prediction import doubled
from runner.report.text import layer_table, next_better, prediction_lines
from runner.report.units import shown_bytes, shown_rate, shown_seconds, shown_share, shown_time

LLAMA = "model.args={vocabulary: 4096, length: 512, width: 1024, layers: 4, heads: 8, kv_heads: 4, hidden: 4096}"
NOTHING = tuple(f"parallel.{key}" for key in ("mesh=null", "strategies=null", "dataset_strategy=data_parallel"))
WINDOWS = ("data.args={length: 512, train: true}", "data.batch_size=16", "train.precision=bf16")
PARAMETERS = 2 * 4096 * 1024 + 4 * (1024 * 1024 * 3 + 3 * 1024 * 4096)


def plan_of(start, *options, **more):
    return start("+recipe=llama", LLAMA, *WINDOWS, "cluster=dgx_h100", *options, verb="plan", **more).plan


@pytest.mark.slow
def test_speed_and_flops_hours_and_price(start, capsys):
    plan = plan_of(start, "train.steps=1000000", "cluster.price_per_hour=2.5")
    prediction = plan["prediction"]
    hours = 8 * 1e6 * prediction["seconds"] / 3600
    taken = {"steps": 1_000_000, "seconds": 1e6 * prediction["seconds"], "device_hours": hours, "price": 2.5 * hours}
    assert prediction["training"] == pytest.approx(taken)
    assert f"1000000 steps: {shown_time(taken['seconds'])}, {shown_rate(hours)} device hours, {2.5 * hours:,.2f} " in (
        capsys.readouterr().out
    )
    assert prediction["seconds"] == plan["cost"]["total"] > 0
    assert prediction["samples_per_second"] == pytest.approx(16 / prediction["seconds"])
    assert prediction["tokens_per_second"] == pytest.approx(16 * 512 / prediction["seconds"])
    attention = 3 * 4 * 2 * 2 * 16 * 512 * 512 * 1024  # layers, products, flops, batch, queries, keys, width
    flops = 6 * (PARAMETERS - 4096 * 1024) * 16 * 512 + attention
    assert prediction["mfu"] == pytest.approx(flops / (8 * 989e12) / prediction["seconds"], rel=0.02)
    assert (prediction["ranks"], prediction["devices"], prediction["axes"]) == (8, 8, {"dp": "gpu", "tp": "gpu"})
    parts = [entry["predicted"] for entry in plan["operators"]]
    assert sum(part["forward"] for part in parts) == pytest.approx(plan["cost"]["forward"])


@pytest.mark.slow
def test_no_device_and_no_memory_is_needed_and_no_plan_does_more_than_the_peak(start):
    """The utilization of bf16 matmuls is relative to the bf16 peak, whatever the dtype of their parameters."""
    options = ("+recipe=llama_8b", "cluster.nodes=2", "data.batch_size=16")
    plan = start(*options, verb="plan").plan
    assert plan["mesh"] == {"dp": 16}
    assert plan["prediction"]["axes"] == {"dp": "node"}
    assert plan["prediction"]["devices"] == plan["prediction"]["ranks"] == 16
    assert 0.2 < plan["prediction"]["mfu"] < 0.7
    assert plan["prediction"]["binding"] == "flops"
    plain = plan["prediction"]
    mixed = start(*options, "train.precision=bf16_autocast", verb="plan").plan["prediction"]
    assert plain["seconds"] == pytest.approx(mixed["seconds"], rel=0.5)
    assert plain["mfu"] * plain["seconds"] == pytest.approx(mixed["mfu"] * mixed["seconds"], rel=0.01)


@pytest.mark.slow
def test_memory_binds_where_it_does_not_suffice(start, capsys):
    small = "cluster.machine.memory=1.0e8"
    plan = plan_of(start, small)
    assert plan["prediction"]["binding"] == "memory"
    out = capsys.readouterr().out
    assert "it does not fit: " in out and "and a device has 95.4 MiB; parallel.zero.stage=1 would need " in out
    assert "; take more ranks, smaller micro-batches (train.accumulate), sliced parameters" in out
    assert "; parallel.zero.stage=auto parallel.recompute=auto finds out what fits without that, if anything\n" in out
    shrunk = plan["prediction"]["shrunk"]
    zero = [shrunk[f"parallel.zero.stage={stage}"] for stage in (1, 2, 3)]
    assert plan["prediction"]["memory"] > zero[0] > zero[1] > zero[2]
    assert shrunk["parallel.recompute=full parallel.zero.stage=3"] < shrunk["parallel.recompute=full"]


@pytest.mark.slow
def test_what_would_fit_is_what_it_takes(start, capsys):
    limit = "cluster.machine.memory=6.0e8"
    prediction = plan_of(start, limit)["prediction"]
    assert "; parallel.zero.stage=auto parallel.recompute=auto finds the fastest that fits\n" in capsys.readouterr().out
    assert prediction["memory"] > 6e8 > prediction["shrunk"]["parallel.recompute=full"]
    recomputed = plan_of(start, limit, "parallel.recompute=full")["prediction"]
    assert recomputed["memory"] == prediction["shrunk"]["parallel.recompute=full"]
    assert recomputed["binding"] != "memory" and recomputed["shrunk"] == {}


@pytest.mark.slow
def test_one_rank_has_nothing_to_divide(start, capsys, monkeypatch):
    monkeypatch.setattr(predicting, "trace_repeated", None)  # recompute cannot keep this limit, so it is not traced
    alone = "world_size=1", "parallel.mode=data_parallel", *NOTHING
    prediction = plan_of(start, *alone, "cluster.machine.memory=1.0e8")["prediction"]
    assert list(prediction["shrunk"]) == ["parallel.recompute=full"]
    assert prediction["memory"] > prediction["shrunk"]["parallel.recompute=full"] > prediction["memory_limit"]
    assert capsys.readouterr().out.split("it does not fit: ")[1].splitlines()[0].endswith("(parallel.offload)")


@pytest.mark.slow
def test_slow_links_bind_and_faster_ones_help(start, capsys):
    slow = "cluster.machine.levels.gpu.bandwidth=1.0e9"
    prediction = plan_of(start, slow)["prediction"]
    assert prediction["binding"] == "gpu link"
    assert max(prediction["speedups"], key=prediction["speedups"].get) == "gpu link"
    assert 1.5 < prediction["speedups"]["gpu link"] < 2
    out = capsys.readouterr().out
    assert "bottleneck: gpu link" in out and "next better: a gpu link twice as fast 1." in out


def test_operators_shorter_than_their_launch_are_bound_by_their_calls(start, capsys):
    """A model of a few thousand parameters on a fast GPU, whose compute and memory time are negligible."""
    prediction = start(*SMALL, "world_size=1", "parallel.mode=data_parallel", "cluster=one_gpu", verb="plan").plan[
        "prediction"
    ]
    assert prediction["binding"] == "operator calls"
    assert prediction["shares"]["operator calls"] > 100 * (
        prediction["shares"]["flops"] + prediction["shares"]["memory bandwidth"]
    )
    assert prediction["speedups"]["operator calls"] > 1.5
    assert re.search(r"next better: launching calls in half the time [12]\.\d\d times as fast", capsys.readouterr().out)


@pytest.mark.slow
def test_useless_ranks_are_reported(start, capsys):
    """A model so small that the exact search gathers the batch and computes it on every rank."""
    options = ("parallel=auto", "parallel.search=dynamic_programming", "cluster=dgx_h100")
    layouts = {
        layout for entry in start(*SMALL, *options, verb="plan").plan["operators"] for layout in entry["out_layouts"]
    }
    assert not any("d" in layout for layout in layouts)
    out = capsys.readouterr().out
    assert "nothing is sliced: every rank computes the entire batch" in out and "idle" not in out
    start(*SMALL, *MODES["auto"], verb="plan", folder="sliced")
    assert "nothing is sliced" not in capsys.readouterr().out


@pytest.mark.parametrize(("flops", "says"), [(9.0, ["90% of a rank's flops"]), (1.0, [])])
def test_work_that_every_rank_repeats_is_reported(flops, says):
    rates = {"ranks": 2, "memory": 0, "memory_limit": 1, "seconds": 0.0}
    operators = [
        {"name": name, "source": "net.py:1", "out_layouts": [layout], "predicted": {"flops": own}}
        for name, layout, own in (("sliced", "(dp, -)", 1.0), ("repeated", "(-, -)", flops))
    ]
    lines = next_better({"prediction": rates, "operators": operators})
    assert [line[: len(words)] for line, words in zip(lines, says, strict=True)] == says
    assert all("repeated (net.py:1)" in line for line in lines)


def test_idle_devices_are_reported(start, capsys):
    start(*SMALL, *MODES["auto"], "cluster=dgx_h100", "cluster.nodes=2", verb="plan")
    assert "12 devices idle (world_size=null takes all)" in capsys.readouterr().out


def test_every_rate_is_doubled_alone():
    cluster = described("dgx_h100", shipped("dgx_h100", 4))
    found = doubled(cluster)
    assert list(found) == ["flops", "memory bandwidth", "operator calls", "node link", "gpu link"]
    assert found["operator calls"].launch == cluster.launch / 2
    assert found["flops"].peak("bfloat16") == 2 * cluster.peak("bfloat16")
    assert found["node link"].levels[0].link.bandwidth == 2 * cluster.levels[0].link.bandwidth
    assert found["node link"].levels[1] == cluster.levels[1]
    assert found["memory bandwidth"].memory_bandwidth == 2 * cluster.memory_bandwidth
    assert list(doubled(described("one_gpu", shipped("one_gpu")))) == ["flops", "memory bandwidth", "operator calls"]


@pytest.mark.slow
def test_the_table_has_a_line_per_kind_of_layer(start, capsys):
    plan = plan_of(start)
    lines = layer_table(plan).splitlines()
    starts = [line.split("  ")[0] for line in lines if not line.startswith(" ")]
    assert starts == ["layer", "tokens", "layers.[0-3]", "norm", "head", "loss"]
    assert "x 4" in next(line for line in lines if line.startswith("layers"))
    assert any(line.startswith("  attention.q_proj ") and "(tp, -)" in line for line in lines)
    out = capsys.readouterr().out
    assert layer_table(plan) in out and prediction_lines(plan) in out


def test_plans_without_words_have_no_tokens(start):
    prediction = start(*SMALL, *MODES["auto"], verb="plan").plan["prediction"]
    assert prediction["tokens_per_second"] is None and prediction["samples_per_second"] > 0


@pytest.mark.slow
def test_every_batch_split_launches_its_operators(start):
    """Two batch splits compute as much as one, in twice as many calls; except for splitting and joining the batch, the
    times of the operators add up to the step."""
    plan = start("+recipe=gpt_multi_copy", "cluster=dgx_h100", verb="plan").plan
    one = start("+recipe=gpt_multi_copy", "cluster=dgx_h100", "parallel.copies=1", verb="plan", folder="one").plan
    parts = [entry["predicted"] for entry in plan["operators"]]
    for way in ("forward", "backward"):
        assert sum(part[way] for part in parts) == pytest.approx(plan["cost"][way], rel=0.02)
        assert plan["cost"][way] > 1.7 * one["cost"][way]


def test_a_pipeline_is_as_fast_as_its_slowest_stage(start):
    plan = start("+recipe=gpt_pipeline", verb="plan").plan
    assert plan["prediction"]["shares"]["waiting"] == plan["cost"]["waiting"] > 0
    assert len([entry for entry in plan["operators"] if "predicted" in entry]) == len(plan["operators"])
    before = {entry["name"] for entry in plan["operators"] if entry["stage"] == 0}
    first = next(entry for entry in plan["operators"] if entry["stage"] == 1)
    assert first["name"] == "layers.2.attention_norm" and "layers.1@1" in set(first["inputs"]) & before


def test_units():
    assert [shown_share(share) for share in (0.367, 0.0005, 0.00049)] == ["36.7%", "0.1%", "<0.1%"]
    assert [shown_seconds(s) for s in (0, 4e-8, 3e-6, 2e-4, 0.5, 12)] == [
        "0 ms",
        "<0.1 us",
        "3.0 us",
        "0.20 ms",
        "500.00 ms",
        "12.00 s",
    ]
    assert [shown_bytes(b) for b in (0, 1023, 2048, 3 << 40)] == ["0 B", "1023 B", "2.0 KiB", "3.0 TiB"]
    assert [shown_rate(r) for r in (0.1234, 12.34, 123456.7)] == ["0.123", "12.3", "123,457"]


@pytest.mark.slow
def test_predictions_are_json(start):
    plan = plan_of(start)
    assert json.loads(json.dumps(plan["prediction"])) == plan["prediction"]
    assert compose_config("+recipe=llama").cluster.machine is None


def test_the_time_of_a_training_has_the_unit_that_suits_it():
    shown = {0.5: "0.5 s", 119: "119 s", 121: "2.02 min", 7199: "120 min", 7201: "2 h", 172_801: "2 days"}
    assert {seconds: shown_time(seconds) for seconds in shown} == shown
