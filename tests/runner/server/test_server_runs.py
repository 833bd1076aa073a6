"""Parameter servers in real processes: equal to one device, whoever is killed."""

import math
import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from composing import compose_config
from small import DOUBLE, MODES, SMALL

from runner import checkpoint as checkpoints
from runner.errors import ConfigError, RunFailed
from runner.launch import network
from runner.planning.datasets import datasets, order_of
from runner.server import links, roles
from strategies.core.errors import StrategyError

SERVED = (*SMALL, "parallel=parameter_server", "world_size=5", "parallel.server.servers=2", "train.log_every=1")
REPLICAS, PATIENCE = "parallel.server.replicas=1", "launch.timeout=30"
ADAM = ("optimizer={target: torch.optim.AdamW, args: {lr: 0.05}}", "train.clip=0.1")
MOMENTUM = (
    "optimizer={target: torch.optim.SGD, args: {lr: 0.1, momentum: 0.9}}", "train.accumulate=2",
    "loss.args={ignore_index: 0}",
)  # fmt: skip
MIXED = (*MOMENTUM, "loss.target=networks.MixedLoss")


def kill(rank, step, phase):
    return f"{{kind: kill, rank: {rank}, step: {step}, phase: {phase}}}"


def stored(run):
    """Checksums of the tensors of the last checkpoint."""
    path = checkpoints.newest(run.folder / "checkpoints")
    files = checkpoints.read(path).header.files
    return {name: stamp for name, stamp in files.items() if name.endswith("safetensors")}


@pytest.mark.parametrize(
    "optimizer", [ADAM, *(pytest.param(other, marks=pytest.mark.slow) for other in (MOMENTUM, MIXED, ()))]
)
def test_a_synchronous_step_equals_one_device(start, optimizer):
    assert start(*SERVED, DOUBLE, *optimizer, verb="verify").value < 1e-10


@pytest.mark.slow
def test_killed_workers_and_servers_change_no_bit(start):
    """By the time that the second server is killed the first one is back and has its copies."""
    served = (*SERVED, "train.steps=24")
    calm = start(*served, *ADAM, folder="calm")
    kills = [
        kill(3, 2, "forward"), kill(4, 3, "collective"), kill(1, 2, "collective"), kill(2, 22, "optimizer"),
        kill(3, 5, "backward"), kill(4, 6, "data"),
    ]  # fmt: skip
    hit = start(*served, *ADAM, REPLICAS, PATIENCE, f"launch.faults=[{', '.join(kills)}]", folder="hit")
    assert len([*(hit.folder / "faults").iterdir()]) == len(kills)
    assert stored(hit) == stored(calm) and hit.losses == calm.losses
    predicted = {key: calm.plan["server"][key] for key in ("bytes_pulled", "bytes_pushed")}
    assert all({key: one["server"][key] for key in predicted} == predicted for one in calm.records)
    counts = [record["server"] for record in hit.records if "server" in record]
    assert (
        sum(one.get("workers_lost", 0) for one in counts) == 4
        and sum(one.get("servers_lost", 0) for one in counts) == 2
    )


def test_members_wait_for_a_coordinator_that_is_slow_to_start(tmp_path):
    launch = SimpleNamespace(timeout=0.1)
    prepared = SimpleNamespace(config=SimpleNamespace(launch=launch))
    job = SimpleNamespace(folder=tmp_path, prepared=prepared, attempt=2)
    threading.Timer(0.5, (tmp_path / roles.PLACE).write_text, (roles.over(2),)).start()
    assert roles._coordinator(job) is None


def test_a_member_may_take_its_time_between_connecting_and_its_first_message():
    listener, secret, called = network.listener("127.0.0.1"), b"secret", queue.SimpleQueue()
    links.accept(listener, secret, 0.2, lambda link, hello: called.put((link, hello)))
    link = links.connect(listener.getsockname()[:2], secret, 0.2)
    time.sleep(0.5)
    link.send("worker")
    accepted, hello = called.get(timeout=5)
    for one in (listener, link, accepted):
        one.close()
    assert hello["op"] == "worker"


def hang(rank, step, phase):
    return kill(rank, step, phase).replace("kill", "hang")


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), ("parallel.server.parameters=[inner.*]",)], ids=["served", "kept"])
def test_workers_and_servers_that_hang_are_replaced(start, capfd, kept):
    calm = start(*SERVED, DOUBLE, *ADAM, *kept, folder="calm")
    phases = [hang(3, 2, "forward"), hang(1, 4, "collective"), hang(4, 5, "optimizer" if kept else "data")]
    faults = f"launch.faults=[{', '.join(phases)}]"
    hit = start(*SERVED, DOUBLE, *ADAM, *kept, REPLICAS, "launch.timeout=3", faults, folder="hit")
    assert len([*(hit.folder / "faults").iterdir()]) == 3
    printed = capfd.readouterr().out
    assert all(f"rank {rank} gives no answer" in printed for rank in (1, 3, 4))
    assert hit.losses == pytest.approx(calm.losses, rel=1e-12)
    counts = [record["server"] for record in hit.records if "server" in record]
    assert sum(one.get("workers_lost", 0) for one in counts) == 2
    assert sum(one.get("servers_lost", 0) for one in counts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("consistency", ["async", "bounded parallel.server.staleness=2"])
def test_a_server_that_hangs_in_an_update_is_replaced(start, capfd, consistency):
    """Its process answers, and so do its threads for other requests."""
    words = f"parallel.server.consistency={consistency} train.steps=12 launch.timeout=3".split()
    served = (*SERVED, REPLICAS, *words)
    hit = start(*served, f"launch.faults=[{hang(1, 4, 'optimizer')}]")
    assert "rank 1 gives no answer" in capfd.readouterr().out
    assert [one["step"] for one in hit.records] == [*range(1, 13)]
    assert sum(one["server"].get("servers_lost", 0) for one in hit.records if "server" in one) == 1


@pytest.mark.slow
def test_both_holders_of_a_shard_are_killed(start):
    """The broken connection by which a server hears of the other's end is no cause."""
    kills = f"launch.faults=[{kill(1, 3, 'optimizer')}, {kill(2, 3, 'optimizer')}]"
    with pytest.raises(RunFailed, match="the last copy of the parameters") as caught:
        start(*SERVED, REPLICAS, kills, PATIENCE)
    assert caught.value.code == "MW711"


@pytest.mark.slow
def test_a_server_is_killed_after_another_is_back(start):
    """Workers may still report that the first one was down, when the second has its replica anew."""
    words = "parallel.server.consistency=async train.steps=120 launch.timeout=4".split()
    kills = f"launch.faults=[{kill(1, 3, 'optimizer')}, {kill(2, 118, 'optimizer')}]"
    hit = start(*SERVED, REPLICAS, *words, kills)
    assert hit.records[-1]["step"] == 120
    assert sum(one["server"].get("servers_lost", 0) for one in hit.records if "server" in one) == 2


@pytest.mark.slow
def test_the_only_worker_hangs(start):
    fault = f"launch.faults=[{hang(2, 2, 'forward')}]"
    with pytest.raises(RunFailed, match=r"failed: the worker on rank 2 gave no answer for \d+ s") as caught:
        start(*SERVED, "world_size=3", "parallel.server.servers=1", "launch.timeout=4", fault)
    assert caught.value.code == "MW712"


@pytest.mark.slow
def test_a_run_outlives_thirty_workers_and_ten_servers(start):
    """Servers are killed in turns, each after the one before it is back and has its copies."""
    phases = ("forward", "backward", "collective", "data")
    kills = [kill(3 + number % 4, 8 + 14 * number, phases[number % 4]) for number in range(30)]
    kills += [kill(1 + number % 2, 15 + 42 * number, ("collective", "optimizer")[number % 2]) for number in range(10)]
    words = ("+recipe=parameter_server", "evaluate={}", PATIENCE, "train.log_every=50")
    hit = start(*words, f"launch.faults=[{', '.join(kills)}]", folder="hit")
    calm = start(*words, folder="calm")
    assert len([*(hit.folder / "faults").iterdir()]) == 40
    assert stored(hit) == stored(calm) and hit.losses == calm.losses


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_and_in_another_mode(start):
    long = start(*SERVED, *ADAM, DOUBLE, "checkpoint.every=3", folder="long")
    first = f"train.resume={long.folder}/checkpoints/step-00000003"
    again = start(*SERVED, *ADAM, DOUBLE, first, "parallel.server.servers=1", "world_size=4", folder="again")
    assert again.losses == pytest.approx(long.losses[3:], rel=1e-12)
    moved = start(*SMALL, *MODES["data_parallel"], *ADAM, DOUBLE, first, folder="moved")
    assert moved.losses == pytest.approx(long.losses[3:], rel=1e-12)


@pytest.mark.slow
def test_prediction_needs_no_servers(start):
    words = (*SERVED, DOUBLE, "evaluate.metric=accuracy", "evaluate.args={seed: 1}")
    run = start(*words, "evaluate.every=6", "checkpoint.every=6", folder="run")
    found = start(*words, f"predict.checkpoint={run.folder}", verb="predict", folder="found")
    assert found.value == pytest.approx(run.evaluations[6]["loss"], rel=1e-12)


@pytest.mark.slow
def test_without_a_replica_the_newest_checkpoint_is_left(start):
    fault = f"launch.faults=[{kill(1, 5, 'collective')}]"
    with pytest.raises(RunFailed) as caught:
        start(*SERVED, fault, PATIENCE, folder="lost")
    assert caught.value.code == "MW711"
    calm = start(*SERVED, folder="calm")
    again = start(*SERVED, fault, PATIENCE, "checkpoint.every=2", "launch.max_restarts=1", folder="again")
    assert stored(again) == stored(calm)
    assert "step-00000004" in (again.folder / "restarts.jsonl").read_text(encoding="utf-8")


@pytest.mark.slow
def test_rank_0_is_killed(start):
    """Servers and workers end with it; the next attempt goes on from the newest checkpoint."""
    fault = f"launch.faults=[{kill(0, 5, 'optimizer')}]"
    calm = start(*SERVED, *ADAM, folder="calm")
    again = start(*SERVED, *ADAM, fault, "checkpoint.every=2", "launch.max_restarts=1", folder="again")
    assert stored(again) == stored(calm)
    assert "step-00000004" in (again.folder / "restarts.jsonl").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("words", [("async",), pytest.param(("bounded", 1), marks=pytest.mark.slow)])
def test_slices_update_on_arrival(start, words):
    consistency, *staleness = words
    bound = [f"parallel.server.staleness={number}" for number in staleness]
    kills = f"launch.faults=[{kill(3, 2, 'forward')}, {kill(4, 4, 'collective')}, {kill(1, 3, 'optimizer')}]"
    steps = "train.steps=90"  # workers that were killed are back before the end
    arriving = f"parallel.server.consistency={consistency}"
    run = start(*SERVED, arriving, *bound, REPLICAS, PATIENCE, kills, steps)
    counts = [record["server"] for record in run.records if "server" in record]
    hit = [mark.name.rpartition("-on-")[2][0] for mark in (run.folder / "faults").iterdir()]
    lost = {"servers_lost": hit.count("1"), "workers_lost": hit.count("3") + hit.count("4")}
    assert len(counts) == 90 and hit and {key: sum(one.get(key, 0) for one in counts) for key in lost} == lost
    most = max(one["staleness_max"] for one in counts)
    assert 0 < most <= (60 if consistency == "async" else 2 * (2 * 1 + 1))  # slices of all within the bound
    assert run.losses == pytest.approx(start(*SERVED, steps, folder="sync").losses, rel=0.05)


TABLE = (
    "+recipe=vocab_ffn", "parallel=parameter_server", "world_size=5", "parallel.server.servers=2", DOUBLE,
    "parallel.strategies=null", "parallel.dataset_strategy=data_parallel", "train.log_every=1",
)  # fmt: skip


def test_workers_move_the_rows_that_a_slice_names(start):
    words = (*TABLE, "model.args.vocabulary=5000", "train.steps=3", "train.accumulate=2")
    run = start(*words, folder="rows")
    config = compose_config(*words)
    training, _, _ = datasets(config)
    order, wide, pulled, pushed = order_of(config, training), 32 * 8, [], []
    dense = sum(math.prod(one["shape"]) for name, one in run.plan["parameters"].items() if name != "embedding.weight")
    for step in range(3):
        rows = order.rows(step)
        slices = [[*rows[first : first + 4], *rows[first + 8 : first + 12]] for first in (0, 4)]
        used = [len(torch.unique(torch.stack([training[row]["input_ids"] for row in one]))) for one in slices]
        pulled.append(sum(8 * dense + wide * count for count in used))
        pushed.append(sum(8 * dense + (wide + 16) * count for count in used))
    counts = [record["server"] for record in run.records if "server" in record]
    assert [one["bytes_pulled"] for one in counts] == pulled
    assert [one["bytes_pushed"] for one in counts] == pushed
    assert pulled[0] <= run.plan["server"]["bytes_pulled"] < 2 * 8 * (dense + 5000 * 32)


def test_an_error_of_a_worker_names_its_operator(start):
    with pytest.raises(RunFailed, match=r"IndexError.* Where: operator table \(embedding, runner/networks.py:\d+\)"):
        start(*SERVED, "model.target=networks.Astray", "parallel.server.parameters=['inner.*']", folder="astray")


@pytest.mark.slow
@pytest.mark.parametrize("cache", [0, pytest.param(20, marks=pytest.mark.slow)])
def test_tables_equal_one_device(start, cache):
    words = (f"parallel.server.cache_rows={cache}", "verify.steps=4", "train.clip=0.1")
    assert start(*TABLE, *words, verb="verify").value < 1e-10


@pytest.mark.parametrize(("rank", "phase"), [(1, "forward"), (3, "optimizer"), (4, "save")])
def test_a_fault_that_never_happens_on_a_rank_is_refused(start, rank, phase):
    with pytest.raises(ConfigError) as caught:
        start(*SERVED, f"launch.faults=[{kill(rank, 2, phase)}]", "checkpoint.every=1")
    assert caught.value.code == "MW707"


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("world_size=3",), "MW205"),
        (("parallel.server.servers=1", "world_size=4", REPLICAS), "MW205"),
        (("parallel.zero.stage=1",), "MW205"),
        (("parallel.pipeline.stages=2",), "MW205"),
        (("parallel.server.consistency=bounded",), "MW205"),
        (("data.batch_size=15",), "MW205"),
        (("launch=torchrun",), "MW205"),
        (("train.precision=fp16", "parallel.server.consistency=async"), "MW205"),
        (("optimizer={target: torch.optim.Adafactor, args: {lr: 0.1}}",), "MW323"),
        (("optimizer={target: networks.Lars, args: {lr: 0.1}}",), "MW323"),
        (("parallel=data_parallel", "world_size=4"), "MW205"),
        (("+model.args.norm=true",), "MW413"),
        (("loss.target=networks.SquaredLoss",), "MW413"),
        (("model.target=networks.Spectral",), "MW454"),
    ],
)
def test_what_does_not_go_together_is_refused(start, words, code):
    with pytest.raises((ConfigError, StrategyError)) as caught:
        start(*SERVED, *words, verb="plan")
    assert caught.value.code == code


def test_the_operator_that_needs_all_slices_is_named(start):
    """Not the one after it, whose operand is sliced again."""
    with pytest.raises(StrategyError, match="parameter_server: embedding needs values of all slices") as caught:
        start(*TABLE, "model.target=networks.FrequencyScaled", verb="plan")
    assert caught.value.code == "MW413"


KEEPING = (*SERVED, "parallel.server.parameters=[inner.*]")


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        (ADAM, 2),
        pytest.param(MOMENTUM, 1, marks=pytest.mark.slow),
        pytest.param((), 0, marks=pytest.mark.slow),
    ],
)
def test_parameters_that_workers_keep_equal_one_device(start, optimizer, states):
    """One matrix is on servers; workers add up the gradients of the other one, as many bytes as predicted."""
    assert start(*KEEPING, DOUBLE, *optimizer, verb="verify").value < 1e-10
    run = start(*KEEPING, *optimizer, folder="counted")
    predicted = {key: run.plan["server"][key] for key in ("bytes_pulled", "bytes_pushed", "bytes_reduced")}
    served, kept = (12 * 16 + 16) * 4, (16 * 4 + 4) * 4
    assert predicted["bytes_reduced"] == 2 * kept
    assert run.plan["memory"]["parameters"] == served + kept
    assert run.plan["memory"]["optimizer"] == pytest.approx(states * kept, abs=16)
    arrived = 2 * served
    assert run.plan["server"]["memory"] == pytest.approx((served * (2 + states) + arrived) / 2, abs=16)
    assert all({key: one["server"][key] for key in predicted} == predicted for one in run.records)


@pytest.mark.slow
def test_workers_are_killed_that_keep_parameters(start):
    """While slices are computed, and while gradients are added up; each joins again with what the other one has."""
    few = ("world_size=7", "data.batch_size=20", "train.steps=8", REPLICAS, PATIENCE)  # one worker is always left
    calm = start(*KEEPING, DOUBLE, *ADAM, *few, folder="calm")
    kills = [kill(3, 2, "forward"), kill(4, 3, "optimizer"), kill(1, 4, "collective"), kill(5, 6, "data")]
    hit = start(*KEEPING, DOUBLE, *ADAM, *few, f"launch.faults=[{', '.join(kills)}]", folder="hit")
    assert len([*(hit.folder / "faults").iterdir()]) == len(kills)
    assert hit.losses == pytest.approx(calm.losses, rel=1e-12)
    counts = [record["server"] for record in hit.records if "server" in record]
    assert sum(one.get("workers_lost", 0) for one in counts) == 3


@pytest.mark.slow
def test_all_workers_are_killed_that_keep_parameters(start):
    """Nobody has them any more: the run goes on from the checkpoint, or ends."""
    kills = f"launch.faults=[{kill(3, 4, 'data')}, {kill(4, 4, 'data')}]"
    with pytest.raises(RunFailed) as failed:
        start(*KEEPING, PATIENCE, kills, folder="ends")
    assert failed.value.code == "MW711"
    calm = start(*KEEPING, DOUBLE, folder="calm")
    again = start(*KEEPING, DOUBLE, PATIENCE, kills, "checkpoint.every=2", "launch.max_restarts=1", folder="again")
    assert again.losses[-1] == pytest.approx(calm.losses[-1], rel=1e-12)


@pytest.mark.parametrize("consistency", ["async", "bounded"])
def test_parameters_that_workers_keep_need_whole_steps(consistency):
    staleness = ("parallel.server.staleness=1",) if consistency == "bounded" else ()
    with pytest.raises(ConfigError, match=r"parallel\.server\.parameters"):
        compose_config(*KEEPING, f"parallel.server.consistency={consistency}", *staleness)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("base", [SERVED, TABLE, KEEPING], ids=["dense", "rows", "kept"])
def test_half_precision(start, base, precision):
    """Workers pull half the bytes, and the masters are on the servers."""
    words = (*(word for word in base if word != DOUBLE), f"train.precision={precision}", "train.accumulate=2")
    assert start(*words, *ADAM, verb="verify").verdict["passed"]
    run = start(*words, *ADAM, folder="counted")
    assert run.losses[-1] < run.losses[0]
    if base is not TABLE:
        predicted = {key: run.plan["server"][key] for key in ("bytes_pulled", "bytes_pushed")}
        assert 2 * predicted["bytes_pulled"] == predicted["bytes_pushed"]
        assert all({key: one["server"][key] for key in predicted} == predicted for one in run.records)


@pytest.mark.slow
def test_a_step_that_overflows_is_left_out_by_all(start):
    """The steps are those of data parallelism with the same slices, and killed processes change no bit."""
    words = ("train.precision=fp16", "loss.args.reduction=sum", *ADAM)
    kills = f"launch.faults=[{kill(3, 2, 'forward')}, {kill(1, 3, 'collective')}]"
    calm, hit = start(*SERVED, *words, folder="calm"), start(*SERVED, *words, REPLICAS, PATIENCE, kills, folder="hit")
    ranks = start(*SMALL, "parallel=data_parallel", "world_size=2", *words, "train.log_every=1", folder="ranks")
    skipped = [one["skipped_steps"] for one in calm.records]
    assert skipped == [one["skipped_steps"] for one in ranks.records] and 0 < skipped[-1] < 6
    assert stored(hit) == stored(calm)


@pytest.mark.slow
def test_half_precision_of_slices_that_update_on_arrival(start):
    words = ("train.precision=bf16", "parallel.server.consistency=async", "train.steps=60")
    run = start(*SERVED, *words)
    assert run.losses == pytest.approx(start(*SERVED, "train.steps=60", folder="sync").losses, rel=0.1)


def test_a_glob_that_matches_no_parameter(start):
    with pytest.raises(ConfigError, match=r"parallel\.server\.parameters: 'none\.\*'"):
        start(*SERVED, "parallel.server.parameters=[none.*]")
