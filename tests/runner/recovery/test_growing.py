"""When a run takes lost ranks back, and which spare host takes the place of a lost one."""

import json
import re
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
from composing import compose_config
from disturbed import RESTARTS, faults
from small import MODES, SMALL

from runner.config.launch import Launch
from runner.errors import ConfigError, RunFailed
from runner.launch.launchers.start import Ready
from runner.recovery import restarting
from runner.recovery.growing import EVERY, HostProbe, Return
from runner.recovery.resizing import candidates, with_standby
from runner.recovery.restarting import Lost

HOSTS = ("launch=rank_table", "launch.hosts=[a:2,b:2]", "world_size=4", "launch.max_restarts=1")


def wait(probe: HostProbe) -> bool:
    """The first answer."""
    deadline, now = time.monotonic() + 20, EVERY
    while time.monotonic() < deadline:
        if probe.answers(now):
            return True
        if probe._process is None and now > EVERY:
            return False
        now += 0.01
        time.sleep(0.01)
    raise AssertionError("no answer")


def test_a_host_answers_if_its_command_succeeds():
    assert wait(HostProbe(["true"]))
    assert not wait(HostProbe(["false"]))
    assert not HostProbe(["no-such-program"]).answers(EVERY)


def test_a_host_that_does_not_answer_is_asked_again_later():
    probe = HostProbe(["sleep", "60"])
    assert not probe.answers(EVERY) and probe._process is not None
    assert not probe.answers(EVERY + 20) and probe._process is None
    assert not probe.answers(EVERY + 1)
    assert probe._process is None  # too early
    probe.close()


def test_a_lost_rank_is_tried_again_after_as_many_checkpoints(tmp_path):
    def save(step):
        place = tmp_path / f"step-{step:08d}"
        place.mkdir()
        (place / "checkpoint.json").touch()

    save(2)
    returning = Return(Launch(), (), tmp_path, after=2)
    assert not returning()
    save(4)
    assert not returning() and not returning.requested
    save(6)
    assert returning() and returning.requested
    returning.close()


def test_a_spare_host_takes_the_ranks_of_a_lost_one():
    made = compose_config(*SMALL, *MODES["data_parallel"], *HOSTS, "launch.standby=[c:1,d:4]")
    replaced = with_standby(made, ["b"])
    assert replaced is not None
    assert [(host.name, host.ranks, host.devices) for host in replaced.launch.hosts] == [
        ("a", (0, 1), (0, 1)),
        ("d", (2, 3), (0, 1)),
    ]
    assert [host.name for host in replaced.launch.standby] == ["c"]
    assert with_standby(replaced, ["a"]) is None  # c is too small
    assert with_standby(made, ["a", "b"]) is None
    assert with_standby(made, []) is None  # a rank was lost, not a host


def test_a_spare_host_joins_a_complete_run_only():
    lost = Lost(compose_config(*SMALL, *MODES["data_parallel"], *HOSTS, "launch.standby=[c:2]"))
    lost.ranks = 4
    lost.add(())  # a rank on a host that is up: the run goes on with 3
    assert not lost.replace(["b"], 3)
    assert [host.name for host in lost.complete.launch.hosts] == ["a", "b"]
    assert lost.replace(["b"], 4)  # after it has grown back
    assert [host.name for host in lost.complete.launch.hosts] == ["a", "c"]


@pytest.mark.parametrize("words", [("world_size=4",), ("world_size=null",)])
def test_a_run_that_is_complete_again_has_its_own_config(words):
    made = compose_config(
        *SMALL, "parallel=auto", "parallel.search=recursive_programming", *HOSTS, *words, "parallel.mesh={dp: 4}"
    )
    first = next(candidates(made, 4))
    assert first == made.model_dump() | {"train": made.model_dump()["train"] | {"resume": "auto"}}
    assert next(candidates(made, 4, ["b"]))["parallel"]["mesh"] is None


def test_a_run_that_cannot_grow_waits_for_twice_as_many_checkpoints(monkeypatch, tmp_path):
    made = compose_config(
        *SMALL, *MODES["data_parallel"], "world_size=4", "launch.max_restarts=2", "launch.min_ranks=2",
        "launch.max_ranks=4",
    )  # fmt: skip
    ready = Ready(4, "cpu", b"", None, ())
    waits = []

    def start(entry, ready, config, run_dir, payload, until, hosts):
        if until is None:
            raise RunFailed("MW711", "rank 3 was killed.", rank=3)
        waits.append(until.after)
        until.requested = len(waits) < 3
        return {"stopped": 1 if until.requested else None}

    def resized(config, counts, *rest):
        if 4 in counts:
            raise ConfigError("MW708", "With 4 ranks: no.")
        return config, replace(ready, world_size=3)

    for name, function in {
        "start": start,
        "resized": resized,
        "make_ready": lambda *given: ready,
        "_newest": lambda *given: None,
    }.items():
        monkeypatch.setattr(restarting, name, function)
    monkeypatch.setattr(restarting.lineage, "begin", lambda *given: None)
    assert restarting.train(made, tmp_path, {"folder": str(tmp_path), "marks": ()}) == {"stopped": None}
    assert waits == [1, 2, 4]


@pytest.mark.parametrize(
    ("failed", "saved", "expected"),
    [
        ((2, 3), False, ["ab", "ab", "ac"]),  # both on b
        ((2, 2), False, ["ab", "ab", "ac"]),
        ((0, 3), False, ["ab", "ab", "ab"]),
        ((2, 3), True, ["ab", "ab", "ab"]),  # there was a checkpoint in between
        ((2, 3, 2, 2), False, ["ab", "ab", "ac", "ac", "ac"]),  # there is no other spare host
    ],
)
def test_a_host_on_which_ranks_fail_twice_gives_way_to_a_spare_one(monkeypatch, tmp_path, failed, saved, expected):
    words = (*HOSTS, "launch.standby=[c:2]", "launch.max_restarts=9")
    made, left, tried = compose_config(*SMALL, *MODES["data_parallel"], *words), [*failed], []

    def start(entry, ready, config, *rest):
        tried.append("".join(host.name for host in config.launch.hosts))
        if left:
            raise RunFailed("MW711", "it was killed.", rank=left.pop(0))
        return {"stopped": None}

    for name, function in {
        "start": start,
        "check": lambda *given: None,
        "warm_hosts": lambda *given: nullcontext(),
        "make_ready": lambda *given: Ready(4, "cpu", b"", None, ()),
        "_newest": lambda *given: f"step-{len(tried):08d}" if saved else None,
    }.items():
        monkeypatch.setattr(restarting, name, function)
    monkeypatch.setattr(restarting.lineage, "begin", lambda *given: None)
    restarting.train(made, tmp_path, {"folder": str(tmp_path), "marks": ()})
    assert tried == expected


@pytest.mark.parametrize(
    ("words", "pattern"),
    [
        (("launch.max_ranks=4",), "launch.min_ranks"),
        ((*HOSTS, "launch.min_ranks=3", "launch.max_ranks=2"), "launch.max_ranks = 2 is less than"),
        (("launch.standby=[c:2]", "launch.max_restarts=1"), "launch.hosts"),
        ((*HOSTS, "launch.standby=[b:2]"), "name b more than once"),
    ],
)
def test_what_cannot_be_is_refused(words, pattern):
    with pytest.raises(ConfigError, match=pattern):
        compose_config(*SMALL, *MODES["data_parallel"], *words)


@pytest.mark.slow
def test_a_run_that_lost_a_rank_grows_back(start, capfd):
    words = (*SMALL, *MODES["data_parallel"], "world_size=4", "data.batch_size=24", "train.log_every=1")
    words = (*words, "checkpoint.every=2", "train.steps=400")
    expected = start(*words, folder="uninterrupted").losses
    capfd.readouterr()
    twice = ["{kind: kill, rank: 3, step: 4, phase: data}"] * 2
    ended = start(*words, *RESTARTS, faults(*twice), "launch.min_ranks=2", "launch.max_ranks=4")
    said = capfd.readouterr().out
    assert re.search("With 3 ranks, and a plan searched anew, it goes on from step-00000002", said)
    assert "growing: lost ranks are tried again after a checkpoint. With 4 ranks" in said
    lines = (ended.folder / "restarts.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["ranks"] for line in lines] == [4, 3, 4]
    assert ended.losses == pytest.approx(expected, rel=1e-5)
