"""Errors that are found before any rank starts, but not from the config alone."""

import math
from types import SimpleNamespace

import hydra
import pytest
from composing import compose_config
from small import HYBRID, MODES, SMALL

from runner.cli import recipes
from runner.config import load as config
from runner.config.origins import Origins
from runner.errors import ConfigError
from runner.planning import capacity
from runner.planning import joint as deciding
from runner.planning import prepare as preparing
from runner.planning.joint import prepare_decided
from runner.planning.prepare import prepare
from runner.planning.sources import request_of
from strategies.core.errors import StrategyError


def test_a_hybrid_mesh_must_have_the_ranks_that_are_at_hand():
    recipes.register()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        overrides = [*SMALL, *HYBRID, "world_size=null", "device=cpu"]
        open_ended = config.load(hydra.compose("config", overrides), Origins(overrides))
    with pytest.raises(ConfigError, match=r"has 4 devices, but there are 8 ranks .*; set world_size=4 or another mesh"):
        prepare(open_ended, None)


@pytest.mark.parametrize(("momentum", "kept"), [(0.0, 0), (0.9, 1)])
def test_a_search_knows_what_the_optimizer_keeps(momentum, kept):
    optimizer = ("optimizer.target=torch.optim.SGD", f"+optimizer.args.momentum={momentum}")
    assert request_of(compose_config(*SMALL, "parallel=data_parallel", *optimizer), 4).optimizer_state_factor == kept


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ((), 1),
        (("train.accumulate=2",), 2),
        (("train.accumulate=2", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=4"), 10),
    ],
    ids=str,
)
def test_a_search_counts_the_micro_batches_of_a_step(words, count):
    """The bubble of a pipeline of two stages adds one micro-batch."""
    config = compose_config(*SMALL, "parallel=data_parallel", "data.batch_size=64", *words)
    assert request_of(config, 4).micro_batches == count


OPEN = ("parallel=auto", "parallel.search=dynamic_programming", "parallel.zero.stage=auto")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*MODES["semi_auto"], "parallel.copies=3"), "parallel.copies = 3"),
        ((*MODES["semi_auto"], "evaluate.metric=networks.wrong"), "evaluate.metric"),
        ((*MODES["semi_auto"], "evaluate.every=1", "+evaluate.args.keys=true"), "evaluate.args"),
        ((*OPEN, "model.weights=missing.pt"), "model.weights"),
        ((*OPEN, "parallel.offload.activations={to: host, modules: [nowhere]}"), "nowhere"),
        ((*OPEN, "optimizer.scheduler.target=torch.optim.lr_scheduler.StepLR"), "step_size"),
        ((*OPEN, "evaluate.metric=networks.wrong"), "evaluate.metric"),
    ],
    ids=["copies", "metric", "evaluation", "weights", "offload", "scheduler", "metric of what is open"],
)
def test_what_needs_no_plan_is_refused_before_a_search(monkeypatch, words, said):
    def searched(*args, **options):
        raise AssertionError("a plan was searched")

    monkeypatch.setattr(preparing, "planned", searched)
    monkeypatch.setattr(deciding, "decide", searched)
    with pytest.raises((ConfigError, StrategyError), match=said):
        prepare_decided(compose_config(*SMALL, *words), None)


@pytest.mark.parametrize("words", [MODES["semi_auto"], OPEN], ids=["configured", "open"])
def test_a_checkpoint_of_another_model_is_refused_before_a_search(monkeypatch, words):
    def refuse(graph, published):
        assert "inner.weight" in published and graph.of_kind("parameter")
        raise ConfigError("MW607", "another model")

    monkeypatch.setattr(preparing, "planned", None)
    monkeypatch.setattr(deciding, "decide", None)
    with pytest.raises(ConfigError, match="another model"):
        prepare_decided(compose_config(*SMALL, *words), None, accept=refuse)


@pytest.mark.parametrize(
    "words", [("train.resume=missing",), ("job=predict", "predict.checkpoint=missing")], ids=["resume", "predict"]
)
def test_a_checkpoint_that_is_not_there_is_refused_before_anything_is_prepared(monkeypatch, tmp_path, words):
    from runner.commands import entries

    monkeypatch.setattr(entries, "prepare_decided", None)
    given = compose_config(*SMALL, *MODES["semi_auto"], *words).model_dump_json()
    with pytest.raises(ConfigError, match="missing"):
        entries.prepare_alone(SimpleNamespace(run_dir=tmp_path), {"config": given, "folder": str(tmp_path)})


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("engine", "memory", "here", "fills"),
    [
        ("deepspeed", 10**9, None, True),
        ("deepspeed", 1, None, False),
        ("deepspeed", 10**9, 4 * (capacity.RANK + capacity.DEEPSPEED) + 4000, False),
        ("native", 10**9, None, False),
    ],
)
def test_deepspeeds_stage_3_fills_the_memory_of_a_device(engine, memory, here, fills, monkeypatch):
    """As its own defaults do, as far as this machine has it; what is beyond it is not refused without a limit."""
    monkeypatch.setattr(capacity, "memory_at_hand", lambda: here)
    monkeypatch.setattr(capacity, "check_model", lambda *_: None)
    zero = f"parallel.zero={{stage: 3, engine: {engine}}}"
    words = (*SMALL, "parallel=data_parallel", "cluster=laptop_gloo", f"cluster.machine.memory={memory}", zero)
    prepared = prepare_decided(compose_config(*words), None)
    threshold = prepared.config.parallel.zero.options.get("stage3_param_persistence_threshold", 0)
    sizes = [math.prod(one.spec.shape) for one in prepared.graph.of_kind("parameter")]
    assert threshold == prepared.plan.search.get("complete", 0) == (max(sizes) if fills else 0)
