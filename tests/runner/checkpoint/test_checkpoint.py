"""Resuming from a checkpoint is bit-exact; an interrupted save leaves earlier checkpoints intact; a checkpoint of
another run is refused."""

import copy
import importlib
import io
import json
import random
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import six_ranks
import torch

from runner import checkpoint as checkpoints
from runner.checkpoint import content, folder, index, saving, writing
from runner.checkpoint.continuation import ENDLESS, compare, differences
from runner.checkpoint.loading import check_model
from runner.errors import ConfigError, RunFailed
from strategies.core.errors import StrategyError
from strategies.optimizer.state import OptimizerScalars, placed
from tests.ranks import start_ranks

HERE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def entries():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        patch.syspath_prepend(str(HERE.parent / "strategies"))
        yield importlib.import_module("checkpoint_entries")


@pytest.fixture(scope="module")
def ranks(entries, tmp_path_factory):
    def call(entry, payload, world_size=4):
        run_dir = tmp_path_factory.mktemp("run")
        return start_ranks(f"checkpoint_entries:{entry}", payload, world_size, run_dir, timeout=60.0)

    return call


@pytest.fixture(scope="module")
def task(entries):
    return importlib.import_module("sharded_training").task(steps=2 * entries.HALF, accumulate=1)[1]


@pytest.fixture(scope="module")
def cases(entries):
    case = entries.Case
    return [
        case(0, 0, clip=0.3, accumulate=1),
        case(1, 0, "adamw", accumulate=1),
        case(2, 1, clip=0.3, accumulate=1),
        case(3, 2, "adamw", accumulate=1),
        case(4, 3, "adamw", clip=0.3, accumulate=1),
        case(5, 3, accumulate=1, options={"stage3_param_persistence_threshold": 50}),
    ]


@pytest.fixture(scope="module")
def saved(ranks, task, cases, tmp_path_factory):
    """The folder with a checkpoint halfway through every case, and the final results of the cases."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, ranks("throughout", (task, cases, folder))


@pytest.mark.slow
def test_continuing_gives_the_same_bits(ranks, task, cases, saved):
    folder, expected = saved
    found = ranks("continued", (task, cases, folder))
    for case, one, other in zip(cases, found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in other:
            assert torch.equal(one[name], other[name]), (case, name)


@pytest.mark.slow
def test_every_element_is_stored_once(saved, cases):
    folder, expected = saved
    for number, _ in enumerate(cases):
        path = folder / str(number) / "step-00000003"
        forms = json.loads((path / "index.json").read_text(encoding="utf-8"))
        stored = index.from_json(forms[0])
        for key, entry in stored.items():
            assert sum(part.elements for part in entry.parts) == entry.elements, key
        names = {key.removeprefix("model/") for key in stored if key.startswith("model/")}
        assert names == set(expected[number]) - {"learning rate", "random numbers"}
        for name in names:
            assert stored[f"model/{name}"].shape == tuple(expected[number][name].shape)


def test_other_runs_are_refused_with_what_differs(ranks, task, cases, tmp_path):
    first = cases[0]
    ranks("throughout", (task, [first], tmp_path))
    others = [
        (replace(first, optimizer="adamw"), "", 'optimizer.target was "sgd" and is now "adamw"'),
        (first, "fingerprint=another", 'was "a hash" and is now "another"'),
        (first, "", ""),
    ]
    said = ranks("refused", (task, [(case, change) for case, change, _ in others], tmp_path))
    for (case, change, reason), text in zip(others, said, strict=True):
        assert reason in text, (case, change, text)
        assert "\n" not in text
        assert text.startswith("StrategyError: The checkpoint") if reason else text == ""


@pytest.fixture(scope="module")
def alone(entries, task):
    """`make()` returns a run of one rank, without process groups, and its checkpoint content."""

    def make(case=None):
        setup = entries.Setup(task, case or entries.Case(accumulate=1), 0, entries.ALONE)
        return setup, entries.content(setup, case or entries.Case(accumulate=1))

    return make


def save(*args):
    return checkpoints.Saver(background=False).save(*args)


def weights_of(setup):
    return {name: tensor.clone() for name, tensor in setup.weights().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)


def test_an_interrupted_save_harms_nothing(alone, task, tmp_path, monkeypatch):
    """Interrupted before every change of a file or name."""
    setup, content = alone()
    setup.step(task.batches[0])
    save(tmp_path, 1, content)
    expected = weights_of(setup)
    setup.step(task.batches[1])
    steps = [(writing, "write"), (writing, "write_bytes"), (saving, "commit")]
    steps += [(folder, name) for name in ("sync", "put")]
    for module, name in steps:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, interrupted)
            with pytest.raises((InterruptedError, checkpoints.SaveFailed)):
                save(tmp_path, 2, content)
        assert checkpoints.newest(tmp_path) == tmp_path / "step-00000001"
        checkpoints.clean(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    fresh, target = alone()
    assert checkpoints.load(checkpoints.locate(tmp_path), target).step == 1
    assert same(fresh.weights(), expected)


def interrupted(*_, **__):
    raise InterruptedError


def test_replacing_a_checkpoint_of_the_same_step_can_be_interrupted(alone, task, tmp_path, monkeypatch):
    setup, content = alone()
    setup.step(task.batches[0])
    path = save(tmp_path, 1, content)
    renames = []

    def rename(self, target, original=Path.rename):
        if "step-" in Path(target).name:
            renames.append(self)
        if len(renames) == 2:
            raise InterruptedError
        return original(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(checkpoints.SaveFailed):
            save(tmp_path, 1, content)
    assert checkpoints.newest(tmp_path) is None
    checkpoints.clean(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoints.load(path, alone()[1]).step == 1
    assert save(tmp_path, 1, content) == path
    assert [one.name for one in tmp_path.iterdir()] == ["step-00000001"]


def test_the_last_ones_are_kept(alone, tmp_path):
    _, content = alone()
    for step in (2, 10, 9):
        save(tmp_path, step, content)
    save(tmp_path, 11, content, checkpoints.SaveOptions(keep=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000011"]
    save(tmp_path, 3, content, checkpoints.SaveOptions(keep=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010", "step-00000011"]


def test_random_states_go_on(alone, tmp_path):
    _, content = alone()
    path = save(tmp_path, 1, content)
    expected = (torch.rand(3).tolist(), numpy.random.rand(3).tolist(), random.random())
    random.seed(5)
    checkpoints.load(path, content)
    assert (torch.rand(3).tolist(), numpy.random.rand(3).tolist(), random.random()) == expected


def test_schedulers_with_counters_are_restored(alone, tmp_path):
    setup, content = alone()

    def scheduler(optimizer):
        kinds = torch.optim.lr_scheduler
        return kinds.SequentialLR(
            optimizer, [kinds.MultiStepLR(optimizer, [1, 2]), kinds.CosineAnnealingLR(optimizer, 9)], [3]
        )

    one = scheduler(setup.updates.optimizer)
    for _ in range(4):
        setup.updates.optimizer.step()
        one.step()
    path = save(tmp_path, 1, replace(content, scheduler=one))
    fresh, target = alone()
    other = scheduler(fresh.updates.optimizer)
    checkpoints.load(path, replace(target, scheduler=other))
    for _ in range(3):
        for setup_, scheduler_ in ((setup, one), (fresh, other)):
            setup_.updates.optimizer.step()
            scheduler_.step()
        assert one.get_last_lr() == other.get_last_lr()


def test_a_state_that_cannot_be_stored_is_refused(alone, tmp_path):
    setup, content = alone()
    setup.updates.optimizer.param_groups[0]["odd"] = interrupted
    with pytest.raises(ConfigError, match="keeps something in its state that a checkpoint cannot hold"):
        save(tmp_path, 1, content)
    assert checkpoints.newest(tmp_path) is None


def damage_header(path):
    (path / checkpoints.HEADER).write_text("{", encoding="utf-8")


def damage_header_entry(path):
    header = json.loads((path / checkpoints.HEADER).read_text(encoding="utf-8"))
    header["step"] = 7
    (path / checkpoints.HEADER).write_text(json.dumps(header), encoding="utf-8")


def damage_index(path):
    file = path / "index.json"
    file.write_text(file.read_text(encoding="utf-8").replace("0", "1", 1), encoding="utf-8")


def remove_index(path):
    (path / "index.json").unlink()


def cut_data(path):
    data = next(path.glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:100])


def remove_data(path):
    next(path.glob("*.safetensors")).unlink()


def remove_plain(path):
    next(path.glob("*.pt")).unlink()


@pytest.mark.parametrize(
    "damage", [damage_header, damage_header_entry, damage_index, remove_index, cut_data, remove_data, remove_plain]
)
def test_a_damaged_checkpoint_is_named_with_the_others(alone, tmp_path, damage):
    setup, content = alone()
    path = save(tmp_path, 2, content)
    save(tmp_path, 1, content)
    before = weights_of(setup)
    damage(path)
    with pytest.raises(ConfigError, match=r"step-00000002 is damaged .* Others beside it: step-00000001") as caught:
        checkpoints.load(path, content)
    assert str(caught.value).endswith(f"such as {tmp_path / 'step-00000001'}.")
    assert "\n" not in str(caught.value)
    assert same(setup.weights(), before), "a failed load must not change anything"


def test_what_is_no_checkpoint_is_refused(alone, tmp_path):
    with pytest.raises(ConfigError, match="missing': this folder does not exist"):
        checkpoints.locate(tmp_path / "missing")
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        checkpoints.locate(tmp_path)
    with pytest.raises(ConfigError, match=r"has no checkpoint\.json"):
        checkpoints.load(tmp_path, alone()[1])
    assert checkpoints.newest(tmp_path / "missing") is None


def test_a_run_folder_stands_for_its_newest_checkpoint(alone, tmp_path):
    _, content = alone()
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save(folder, step, content)
    shutil.rmtree(folder / "step-00000002" / checkpoints.HEADER, ignore_errors=True)
    for path in (tmp_path, folder, folder / "step-00000002"):
        assert checkpoints.locate(path) == folder / "step-00000002"
    assert checkpoints.locate(folder / "step-00000001") == folder / "step-00000001"


def test_differences_name_the_first_entry():
    before = {"a": {"b": [1, 2], "c": 3}, "d": 4}
    assert list(differences(before, copy.deepcopy(before), "plan")) == []
    assert list(differences(before, {"a": {"b": [1], "c": 3}, "e": 4}, "plan")) == [
        ("plan.a.b", [1, 2], [1]),
        ("plan.d", 4, None),
        ("plan.e", None, 4),
    ]


def test_who_chose_a_strategy_does_not_matter_but_the_order_of_axes_does():
    plan = {
        "mesh": {"a": 2, "b": 2},
        "assignments": {"x": {"assignment": {}, "origin": "default"}},
        "search": {"seconds": 1},
    }
    saved = {"plan": plan, "config": {}, "fingerprint": ""}
    other = copy.deepcopy(plan) | {"search": {"seconds": 2}}
    other["assignments"]["x"]["origin"] = "configured"
    assert not compare(Path("p"), saved, plan=other, config={}, fingerprint="").moved
    moved = compare(Path("p"), saved, plan=plan | {"mesh": {"b": 2, "a": 2}}, config={}, fingerprint="").moved
    assert moved == (("plan.mesh", [["a", 2], ["b", 2]], [["b", 2], ["a", 2]]),)


def test_another_number_of_rows_is_refused_or_named():
    def of(source, rows):
        return {"plan": {}, "config": {"data": {"args": source}}, "fingerprint": "", "samples": rows}

    assert not compare(Path("p"), of(1, 64), **of(1, 64)).data
    assert not compare(Path("p"), of(1, None), **of(1, 64)).data  # the checkpoint does not record it
    with pytest.raises(StrategyError, match="had 64 rows and has 60 now"):
        compare(Path("p"), of(1, 64), **of(1, 60))
    with pytest.raises(StrategyError, match=r"counted by train\.steps, .* Go on with train\.steps\."):
        compare(Path("p"), of(1, ENDLESS), **of(1, 60))
    assert compare(Path("p"), of(1, 64), **of(2, 60)).data[-1] == ("the number of training rows", 64, 60)


def test_a_stage_knows_what_other_stages_train():
    opened = SimpleNamespace(path="p", tensors={"optimizer/exp_avg/loss.scale": None})
    with pytest.raises(StrategyError, match=r"has trained loss\.scale"):
        check_model(opened, (), frozenset({"weight"}))
    check_model(opened, (), frozenset({"weight"}), frozenset({"loss.scale"}))


def test_another_number_of_micro_batches_is_said():
    def of(accumulate, **pipeline):
        config = {"train": {"accumulate": accumulate}, "parallel": {"pipeline": pipeline}}
        return {"plan": {}, "config": config, "fingerprint": ""}

    pipelined = of(2, stages=2, micro_batches=None)
    assert not [*compare(Path("p"), pipelined, **of(8)).lines({}, False)]
    (line,) = compare(Path("p"), pipelined, **of(2)).lines({}, False)
    assert "had 8 micro-batches and now has 2" in line


def kill_and_continue(ranks, entries, alone, task, folder, seconds, world_size):
    with pytest.raises(RunFailed, match="SIGKILL"):
        ranks("killed", (task, entries.Case(accumulate=1), folder, seconds), world_size=world_size)
    checkpoints.clean(folder)
    names = [path.name for path in folder.iterdir()]
    assert all(checkpoints.NAME.fullmatch(name) for name in names)
    assert 1 <= len(names) <= 3


def test_a_rank_killed_while_saving_leaves_a_good_checkpoint(ranks, entries, alone, task, tmp_path):
    for number, seconds in enumerate((0.01, 0.1)):
        folder = tmp_path / str(number)
        kill_and_continue(ranks, entries, alone, task, folder, seconds, world_size=1)
        setup, content = alone()
        done = checkpoints.load(checkpoints.locate(folder), content).step
        after, _ = alone()
        for _ in range(done):
            after.step(task.batches[0])
        assert same(setup.weights(), after.weights())


@pytest.mark.slow
def test_killed_ranks_ten_times(ranks, entries, alone, task, tmp_path):
    draw = random.Random(0)
    for number in range(10):
        kill_and_continue(ranks, entries, alone, task, tmp_path / str(number), draw.random() / 2, world_size=4)


class Counted:
    """Updates of three parameters, of which two have done as many steps."""

    def plain(self):
        return OptimizerScalars([], {name: {"step": torch.tensor(step)} for name, step in STEPS.items()})


STEPS = {"first": 3.0, "second": 3.0, "third": 4.0}


def test_equal_counters_are_stored_once_and_restored_apart():
    data = content.serialised(content.plain(replace(six_ranks.content(0), updates=Counted())))
    tensors = [name for name in zipfile.ZipFile(io.BytesIO(data)).namelist() if "/data/" in name]
    assert len(tensors) == 3  # torch's random state, 3.0 and 4.0
    scalars = torch.load(io.BytesIO(data), weights_only=True)["scalars"]
    steps = {name: placed("step", states["step"], torch.zeros(5), {}) for name, states in scalars.items()}
    for step in steps.values():
        step += 1
    assert {name: step.item() for name, step in steps.items()} == {name: step + 1 for name, step in STEPS.items()}
