"""Which hosts and ranks a run continues with after losing some."""

import json
import re

import pytest
from composing import compose_config
from disturbed import RESTARTS, faults
from pydantic import ValidationError
from small import MODES, SMALL

from runner.cli import recipes
from runner.config.schema import Config
from runner.errors import ConfigError
from runner.launch import local
from runner.recovery import resizing
from runner.recovery.resizing import candidates, hosts_left

HOSTS = [
    {"name": name, "ranks": ranks, "devices": [0, 1]} for name, ranks in (("a", [0, 3]), ("b", [1, 4]), ("c", [2, 5]))
]


def test_ranks_keep_their_order():
    assert hosts_left(HOSTS, 4, ["b"]) == [
        {"name": "a", "ranks": (0, 2), "devices": (0, 1)},
        {"name": "c", "ranks": (1, 3), "devices": (0, 1)},
    ]


def test_what_is_too_many_is_left_out():
    assert hosts_left(HOSTS, 1, ["a"]) == [{"name": "b", "ranks": (0,), "devices": (0,)}]
    assert hosts_left(HOSTS, 2, ["b", "c"]) == [{"name": "a", "ranks": (0, 1), "devices": (0, 1)}]


PIPELINES = {
    "as it is": (),
    "a number": ("parallel.pipeline=2",),
    "cuts": ("parallel.pipeline={stages: 2, cuts: {outer: 1}}",),
    "virtual": ("parallel.pipeline={stages: 2, virtual_stages: 2, schedule: interleaved_1f1b}",),
    "zero bubble": ("parallel.pipeline={stages: 2, micro_batches: 4, schedule: zero_bubble}",),
    "auto": ("parallel.pipeline=auto",),
    "micro-batches auto": ("parallel.pipeline={stages: 2, micro_batches: auto}",),
    "recomputed": ("parallel.pipeline=2", "parallel.recompute=auto"),
    "ZeRO 1": ("parallel.pipeline=2", "parallel.zero=1"),
}


def fitting(made, count):
    """The valid candidates for `count` ranks. Asserts that all others break a rule of the config."""
    found, section = [], made.parallel.pipeline
    decided = (
        (2, 4) if section.stages == "auto" or section.micro_batches == "auto" else (section.known or 1, section.parts)
    )
    for values in candidates(made, count, (), decided):
        try:
            found.append(Config.model_validate(values))
        except ValidationError as error:
            assert {one["type"] for one in error.errors()} == {"refusal"}, error
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(recipes.catalogue().keys() - {"parameter_server"}))  # it replaces ranks
def test_every_recipe_has_a_valid_smaller_one(name):
    made = compose_config(f"+recipe={name}", "launch.max_restarts=1", "launch.min_ranks=1")
    for count in range(1, made.world_size or 4):
        found = fitting(made, count)
        assert found or made.parallel.mode == "hybrid"
        assert all(one.world_size == count for one in found)


@pytest.mark.few(3)
@pytest.mark.parametrize("form", PIPELINES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_form_of_pipeline_has_a_valid_smaller_one(form, count):
    made = compose_config(*SMALL, *MODES["data_parallel"], *PIPELINES[form], "data.batch_size=24")
    found = fitting(made, count)
    assert found[0].parallel.pipeline.stages == (2 if form != "as it is" and count == 2 else None)
    assert len({one.parts for one in found}) == 1  # a sum is that of each micro-batch


def test_why_no_smaller_run_fits_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(resizing, "candidates", lambda *given: [{"world_size": "many"}])
    made = compose_config(*SMALL, *MODES["data_parallel"], "launch.max_restarts=1", "launch.min_ranks=2")
    with pytest.raises(ConfigError, match=r"With 3 ranks: .*world_size.*With 2 ranks: "):
        resizing.resized(made, range(3, 1, -1), (), tmp_path, tmp_path, (1, 1))


@pytest.mark.parametrize(
    ("words", "count", "devices"),
    [((), 3, (0, 2, 3)), ((), 2, (0, 2)), (("launch.devices=[4,5,6,7]",), 3, (4, 6, 7))],
)
def test_the_device_of_the_rank_that_failed_is_left_out(words, count, devices):
    made = compose_config(*SMALL, *MODES["data_parallel"], *words)
    values = next(candidates(made, count, failed=1))
    assert Config.model_validate(values | {"data": values["data"] | {"batch_size": 12}}).launch.devices == devices


def test_the_host_of_the_rank_that_failed_has_one_less():
    assert hosts_left(HOSTS, 3, [], 0)[0] == {"name": "a", "ranks": (2,), "devices": (1,)}


@pytest.mark.slow
def test_a_smaller_run_takes_the_devices_that_are_left(start, monkeypatch):
    given = {}
    begin = local._LocalRank.start

    def recorded(self, orders, name):
        if "train" in orders.group.entry:
            given.setdefault(orders.group.world_size, {})[orders.rank] = orders.device
        begin(self, orders, name)

    monkeypatch.setattr(local._LocalRank, "start", recorded)
    twice = ["{kind: kill, rank: 0, step: 4, phase: data}"] * 2
    start(*PIPELINE, "world_size=2", *RESTARTS, faults(*twice), "launch.min_ranks=1")
    assert given == {2: {0: 0, 1: 1}, 1: {0: 1}}


PIPELINE = (*SMALL, *MODES["data_parallel"], "checkpoint.every=2", "train.log_every=1", "data.batch_size=24")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        (("world_size=2", "parallel.pipeline={stages: 2, cuts: {outer: 1}}"), 1),
        (("parallel.pipeline=2", "parallel.zero=1", "+loss.args.reduction=sum"), 3),
    ],
)
def test_a_pipeline_that_loses_a_rank_for_good_goes_on(start, capfd, words, ranks):
    expected = start(*PIPELINE, *words, folder="uninterrupted").losses
    capfd.readouterr()
    twice = [f"{{kind: kill, rank: {ranks}, step: 4, phase: data}}"] * 2
    ended = start(*PIPELINE, *words, *RESTARTS, faults(*twice), "launch.min_ranks=1")
    said = capfd.readouterr().out
    assert re.search(f"With {ranks} ranks?, and a plan searched anew, it goes on from step-00000002", said)
    assert ended.losses == pytest.approx(expected, rel=1e-5)
    assert [
        json.loads(line)["ranks"] for line in (ended.folder / "restarts.jsonl").read_text(encoding="utf-8").splitlines()
    ][1:] == [ranks]
