"""The outputs of a run: metrics of every step, the console, TensorBoard, predicted memory and time."""

import json
import sys

import pytest
from small import ALONE, MODES, SMALL

from runner.errors import ConfigError


@pytest.mark.slow
def test_metrics_of_a_run(start, capfd):
    ended = start(*SMALL, *MODES["auto"], "evaluate.every=4", "train.log_every=2")
    steps = [record for record in ended.records if "loss" in record]
    assert [record["step"] for record in ended.records] == [1, 2, 3, 4, 4, 5, 6, 6]
    for record in steps:
        assert record.keys() >= {"step", "loss", "lr", "seconds", "samples_per_second"}
        assert record["samples_per_second"] == pytest.approx(16 / record["seconds"])
        assert ("grad_norm" in record) == (record["step"] % 2 == 0)
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("networks.Classifier: parallel.mode=auto, 4 ranks on cpu, run folder ")
    assert lines[1].startswith("plan: mesh ")
    assert lines[2].startswith("propagation: ")
    assert lines[3].startswith("first step after ")
    words = [line.partition("  ")[0] for line in lines[4:-1]]
    assert words == ["step 2/6", "step 4/6", "step 4/6", "step 6/6", "step 6/6"]
    last = ended.evaluations[6]["loss"]
    assert lines[-1].startswith(f"done: 6 steps, loss {ended.value:.6g}, test loss {last:.4g}; results in ")


def test_ranks_keep_their_logs(start):
    ended = start(*SMALL, *MODES["data_parallel"])
    assert sorted(path.name for path in (ended.folder / "ranks").iterdir()) == [f"{rank}.log" for rank in range(4)]
    assert "step 6/6" in (ended.folder / "ranks" / "0.log").read_text(encoding="utf-8")


def test_progress_bar_on_demand(start, capfd):
    start(*SMALL, *ALONE, "report.progress=true")
    out = capfd.readouterr().out
    assert "6/6" in out and "loss=" in out and "step 6/6" not in out


@pytest.mark.slow
def test_tensorboard_on_demand(start):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ended = start(*SMALL, *MODES["data_parallel"], "report.tensorboard=true", "evaluate.every=3")
    events = EventAccumulator(str(ended.folder / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/lr", "evaluation/loss"} <= set(events.Tags()["scalars"])
    seen = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert seen == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in enumerate(ended.losses, start=1)]
    assert [event.step for event in events.Scalars("evaluation/loss")] == [3, 6]


def test_tensorboard_that_is_not_installed(start, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr("runner.training.loggers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"report\.tensorboard = true needs the package tensorboard"):
        start(*SMALL, *ALONE, "report.tensorboard=true")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("stage", "share", "copies", "engine"),
    [(0, 1, 2, "auto"), (1, 8, 2, "auto"), (2, 8, 3, "deepspeed"), (3, 8, 2, "auto")],
)
def test_memory_by_stage(start, stage, share, copies, engine):
    """At stages 1 and 2 DeepSpeed updates copies of the weights, and a rank keeps the gradients of all parameters of
    which it owns a shard."""
    words = (f"parallel.zero.stage={stage}", f"parallel.zero.engine={engine}")
    memory = start("+recipe=zero", *words, verb="plan").plan["memory"]
    shapes = [a * b for a, b in zip((784, 512, 256, 128, 64), (512, 256, 128, 64, 10), strict=True)]
    size = 4 * (sum(shapes) + 512 + 256 + 128 + 64 + 10)
    assert memory["optimizer"] == pytest.approx(copies * size / share, rel=1e-3)
    assert memory["parameters"] == pytest.approx(size / (8 if stage == 3 else 1), rel=1e-3)
    if engine == "deepspeed":
        assert 4 * shapes[0] <= memory["gradients"] <= size
    else:
        assert memory["gradients"] == pytest.approx(size / share, rel=1e-3)


def test_explain_names_operators_without_a_rule(start, capsys):
    start(*SMALL, *MODES["data_parallel"], "model.target=networks.Renormed", verb="explain")
    out = capsys.readouterr().out
    assert "no sharding rule for renorm (renorm, " in out
    assert "replicated on every rank" in out


def test_modes_without_a_plan_have_nothing_to_explain(start, capsys):
    for verb in ("explain", "plan"):
        ended = start(*SMALL, *ALONE, verb=verb)
        assert ended.value is None
        assert list(ended.folder.iterdir()) == []
    assert "parallel.mode=stand_alone, 1 rank on cpu" in capsys.readouterr().out


@pytest.mark.slow
def test_verdict_is_a_table(start, capfd):
    ended = start(*SMALL, *MODES["semi_auto"], verb="verify")
    out = capfd.readouterr().out
    assert "verify passed: 3 steps, tolerance 1e-05 relative" in out
    assert "gradients of 4 parameters, the worst:" in out
    assert json.loads((ended.folder / "verify.json").read_text(encoding="utf-8")).keys() == {
        "loss_max_abs_diff",
        "loss_max_rel_diff",
        "grad_max_rel_diff",
        "weight_max_rel_diff",
        "tolerance",
        "steps",
        "passed",
        "rounding",
    }
