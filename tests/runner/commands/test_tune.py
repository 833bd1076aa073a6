"""`run tune`: which plans are tried and kept, and how far predictions were."""

import json
import shlex

import pytest

from runner.commands import train, tune
from runner.errors import ConfigError, RunFailed

OPEN = ("+recipe=quickstart", "parallel.search=dynamic_programming", "parallel.strategies=null")


@pytest.fixture
def measured(monkeypatch):
    """Let training take the seconds per step that a function of the config says, without training."""

    def put(seconds_of):
        def run(config, folder):
            wait = sum(map(ord, str(config.parallel.mesh))) % 7  # which does not count
            steps = [
                {"step": n, "seconds": wait + (9.0 if n < 3 else seconds_of(config)), "data_seconds": wait}
                for n in range(1, config.train.steps + 1)
            ]
            (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in steps), encoding="utf-8")
            (folder / "plan.json").write_text(json.dumps(config.parallel.mesh), encoding="utf-8")

        monkeypatch.setattr(train, "run", run)

    return put


def test_the_fastest_that_was_measured_is_kept(start, capsys, measured):
    def seconds_of(config):
        if config.parallel.mesh is None:  # the search's own choice, 4 x 2
            return 0.375
        if len(config.parallel.mesh) == 1:
            raise RunFailed("MW711", "a rank died\nmore")
        return 0.25

    measured(seconds_of)
    ended = start(*OPEN, "tune.plans=3", "tune.steps=4", verb="tune")
    content = json.loads((ended.folder / "tune.json").read_text(encoding="utf-8"))
    plans = content["plans"]
    assert [list(one["mesh"].values()) for one in plans] == [[4, 2], [2, 4], [8]]
    assert [one["keys"] for one in plans] == [{}, {"parallel.mesh": {"d0": 2, "d1": 4}}, {"parallel.mesh": {"d0": 8}}]
    assert [one["measured"] for one in plans] == [0.375, 0.25, None]
    assert plans[2]["failure"] == "a rank died"
    assert sorted(one["predicted"] for one in plans) == [one["predicted"] for one in plans]
    assert (content["kept"], ended.value, ended.plan) == (1, 0.25, {"d0": 2, "d1": 4})
    out = capsys.readouterr().out
    low, high = sorted(one["measured"] / one["predicted"] for one in plans if one["measured"])
    assert f"from {low:.2f} to {high:.2f} times; the search's own first choice takes 50.0% more" in out


@pytest.mark.slow
def test_what_is_not_open_is_not_varied(start, measured):
    """A given mesh stays; of what is open, every choice is looked at, and equal plans are tried once."""
    measured(lambda config: 0.1 + config.parallel.zero.stage)
    words = ("parallel=data_parallel", "parallel.strategies=null", "parallel.search=recursive_programming")
    ended = start("+recipe=zero", *words, "parallel.zero.stage=auto", "tune.plans=9", verb="tune")
    content = json.loads((ended.folder / "tune.json").read_text(encoding="utf-8"))
    assert sorted(one["keys"]["parallel.zero.stage"] for one in content["plans"]) == [0, 1, 2, 3]
    assert content["plans"][content["kept"]]["keys"] == {"parallel.zero.stage": 0}


@pytest.mark.slow
def test_where_nothing_can_be_chosen_it_is_refused(start, measured):
    with pytest.raises(ConfigError) as refused:
        start("+recipe=quickstart", "parallel=stand_alone", "parallel.strategies=null", "world_size=1", verb="tune")
    assert refused.value.code == "MW861"
    with pytest.raises(ConfigError) as refused:
        start(*OPEN, "cluster=dgx_h100", "cluster.machine.memory=1", verb="tune", folder="b")
    assert refused.value.code == "MW861"


def test_when_all_fail_the_command_does(tmp_path):
    content = {"cost": {"total": 0.1}, "mesh": {"d0": 8}}
    with pytest.raises(RunFailed) as failed:
        tune.report([tune.Candidate({}, None, content, failure="a rank died")], tmp_path)
    assert failed.value.code == "MW862" and "a rank died" in str(failed.value)
    assert json.loads((tmp_path / "tune.json").read_text(encoding="utf-8"))["kept"] is None


@pytest.mark.slow
def test_the_kept_plan_trains(start, capsys):
    small = ("+recipe=gpt", "parallel=auto", "parallel.strategies=null", "parallel.mesh=null", "world_size=2")
    words = (*small, "parallel.search=dynamic_programming", "parallel.zero.stage=auto", "parallel.recompute=auto")
    ended = start(*words, "tune.plans=2", "tune.steps=2", verb="tune")
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("kept: ")]
    given = shlex.split(line.partition("train with it: ")[2])
    given[0] = f"parallel.plan={ended.folder / 'plan.json'}"
    again = start(*words, *given, "train.steps=1", "checkpoint.at_end=false", folder="again")
    plan = ended.plan
    assert again.plan["mesh"] == plan["mesh"] and again.plan["cost"]["total"] == pytest.approx(plan["cost"]["total"])
    assert json.loads((ended.folder / "tune.json").read_text(encoding="utf-8"))["plans"][1]["measured"] > 0
