"""Overrides on the command line: which keys they clear, remove and replace, and which values they accept."""

import os

import pytest
from composing import compose_config
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from runner.cli.arguments import for_hydra, quoted, readable
from runner.errors import ConfigError
from runner.sweep.job import typed

FFN, MESH = "+recipe=ffn_auto", "+recipe=mesh_2d"
CUBE = "+recipe=advanced_layout"
MATMUL = "[[1,8],[8,1]]"


@pytest.mark.parametrize(
    ("words", "left"),
    [
        (("parallel.strategies={}",), []),
        (("~parallel.strategies",), []),
        (("parallel.strategies=null",), []),
        (("parallel.strategies={}", f"parallel.strategies.dense2.matmul={MATMUL}"), ["dense2.matmul"]),
        ((f"parallel.strategies={{dense2.matmul: {MATMUL}}}",), ["dense1.matmul", "dense3.matmul", "dense2.matmul"]),
        (("~parallel.strategies.dense1.matmul",), ["dense3.matmul"]),
        (("~parallel.strategies.dense1",), ["dense3.matmul"]),
        (("~parallel.strategies.dense1.matmul", "~parallel.strategies.dense3.matmul"), []),
        ((f"parallel.strategies.a.b={MATMUL}", "~parallel.strategies.a.b"), ["dense1.matmul", "dense3.matmul"]),
        (("parallel.strategies.dense1.matmul=null",), ["dense3.matmul"]),
        (("+parallel.strategies={dense1: {matmul: null}}",), ["dense3.matmul"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_strategies_are_cleared_removed_and_added(words, left):
    assert list(compose_config(FFN, *words).parallel.strategies) == left


@pytest.mark.parametrize("path", ["dense1.matmull", "dense", "matmul"])
def test_a_strategy_that_is_not_there_cannot_be_removed(path):
    with pytest.raises(
        ConfigError, match=rf"parallel\.strategies\.{path} cannot be removed.*dense1\.matmul"
    ) as refused:
        compose_config(FFN, f"~parallel.strategies.{path}")
    assert f"(from the command line: ~parallel.strategies.{path})" in str(refused.value)


def test_other_paths_are_removed_too():
    place = "parallel.place={a.*: host, b: host}"
    assert list(compose_config(FFN, place, "~parallel.place.a.*").parallel.place) == ["b"]
    assert compose_config(FFN, place, "parallel.place={}").parallel.place == {}


@pytest.mark.parametrize(
    ("words", "mesh"),
    [
        (("parallel.mesh={tp: 8}",), {"tp": 8}),
        (("+parallel.mesh={tp: 8}",), {"tp": 8}),
        (("parallel.mesh={tp: 2, dp: 4}",), {"tp": 2, "dp": 4}),
        (("parallel.mesh={x: 2, y: 2, z: 2}",), {"x": 2, "y": 2, "z": 2}),
        (("parallel.mesh={tp: 4}", "parallel.mesh.dp=2"), {"tp": 4, "dp": 2}),
        (("parallel.mesh=null",), None),
        (("~parallel.mesh",), None),
    ],
)
def test_a_mesh_replaces_another(words, mesh):
    given = compose_config(MESH, "parallel.strategies={}", "parallel.layouts={}", *words).parallel.mesh
    assert given == mesh and list(given or ()) == list(mesh or ())  # the order of the axes counts


def test_open_mappings_are_emptied_by_empty_braces():
    config = compose_config(CUBE, "parallel.strategies={}", "parallel.layouts={}", "model.args={}", "optimizer.args={}")
    assert config.parallel.layouts == config.parallel.strategies == config.model.args == config.optimizer.args == {}
    config = compose_config(FFN, "optimizer.args={lr: 1.0}", "model.args={other: 1}", "~optimizer.args")
    assert config.optimizer.args == {} and len(config.model.args) > 1


ADAM = "torch.optim.Adam"


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ((f"optimizer={{target: {ADAM}, args: {{lr: 0.1}}}}",), {"lr": 0.1}),
        ((f"+optimizer={{args: {{lr: 0.1}}, target: '{ADAM}'}}",), {"lr": 0.1}),
        ((f"optimizer={{target: {ADAM}, args: {{}}}}",), {}),
        ((f"optimizer.target={ADAM}", "optimizer.args={lr: 0.1}"), {"lr": 0.1}),
        (("optimizer.args={lr: 0.1}", f"optimizer.target={ADAM}", "optimizer.args.eps=0.5"), {"lr": 0.1, "eps": 0.5}),
        (("optimizer.args.eps=0.5", f"optimizer={{target: {ADAM}, args: {{lr: 0.1}}}}"), {"lr": 0.1, "eps": 0.5}),
        (("optimizer.args={lr: 0.1}",), {"lr": 0.1, "momentum": 0.9}),
        (("optimizer={args: {lr: 0.1}}",), {"lr": 0.1, "momentum": 0.9}),
        ((f"optimizer.target={ADAM}", "optimizer.args.lr=0.1"), {"lr": 0.1, "momentum": 0.9}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_arguments_in_braces_replace_those_of_another_target(words, args):
    assert compose_config(FFN, *words).optimizer.args == args


@pytest.mark.parametrize(
    ("words", "args"),
    [
        ((f"optimizer.target={ADAM}",), {}),
        ((f"optimizer.target={ADAM}", "optimizer.args.eps=0.5"), {"eps": 0.5}),
        ((f"optimizer.target={ADAM}", "optimizer.args.lr=0.01"), {"lr": 0.01}),
        (("optimizer.target=torch.optim.SGD",), {"lr": 0.01}),
        ((), {"lr": 0.01}),
    ],
)
def test_the_default_rate_is_that_of_the_default_optimizer(words, args):
    own = ("model.target=networks.Classifier", "data.target=networks.Points", "train.steps=1")
    assert compose_config(*own, *words).optimizer.args == args


def test_a_rate_of_a_recipe_stays_where_it_equals_the_default():
    assert compose_config("+recipe=resnet").optimizer.args == {"lr": 0.01}


def test_arguments_in_braces_replace_in_every_section():
    words = ("model={target: a.B, args: {x: 1}}", "loss={target: a.L, args: {y: 1}}")
    words = (*words, "data={target: a.D, args: {z: 1}}")
    found = compose_config(FFN, *words, "optimizer={scheduler: {target: a.S, args: {w: 1}}}")
    assert (found.model.args, found.loss.args, found.data.args) == ({"x": 1}, {"y": 1}, {"z": 1})
    assert found.optimizer.scheduler.args == {"w": 1} and found.data.batch_size > 0


def test_a_sweep_over_sections_in_braces_shows_what_was_typed():
    word = "optimizer={target: a.B, args: {x: 1}},{target: a.C, args: {y: 1}}"
    first, *rest = for_hydra(None, [word])
    assert first == "++optimizer.args=null"
    assert typed([first, *rest]) == (word,)


VALUES = [
    ("~/data", os.path.expanduser("~/data")),
    ("~", None),
    ("a~b", "a~b"),
    ("/tmp/größe/日本 😀", "/tmp/größe/日本 😀"),
    ("/tmp/my data", "/tmp/my data"),
    ("runs/epoch=3", "runs/epoch=3"),
    ("a&b #c;d!<e>^`", "a&b #c;d!<e>^`"),
    ("it's", "it's"),
    ("file (1) [2].txt", "file (1) [2].txt"),
    ("https://é.x/y?q=1&r=2", "https://é.x/y?q=1&r=2"),
    ("two\nlines", "two\nlines"),
    ("C:\\é\\", "C:\\é\\"),
    ("[é, ~/x, 'a,b', 3]", ["é", os.path.expanduser("~/x"), "a,b", 3]),
    ("{k: é, u: {v: [~, https://ü]}, w: 1}", {"k": "é", "u": {"v": [None, "https://ü"]}, "w": 1}),
    ("\"'ö'\"", "'ö'"),
]


@pytest.mark.parametrize(("value", "wanted"), VALUES, ids=[value for value, _ in VALUES])
def test_values_arrive_as_they_are_typed(value, wanted):
    assert compose_config(FFN, f"model.args.x={value}").model.args["x"] == wanted


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1))
@example("\\\n")
def test_whatever_is_quoted_is_read_back(text):
    parse = OverridesParser.create().parse_override
    assert parse(f"a={quoted(text)}").value() == text


@pytest.mark.parametrize(
    "value", ["1,2", "range(1,3)", "choice(a,b)", "'a b'", "[[2,4],[4,1]]", "{in: [[1]], a.*: b}", ""]
)
def test_what_hydra_can_read_is_left_as_it_is(value):
    assert readable(value) == value


def test_sweeps_over_such_values():
    assert readable("~/a,é") == f"'{os.path.expanduser('~/a')}','é'"
    assert readable("choice(é,b)") == "choice('é',b)"


def test_jobs_of_a_sweep_show_what_was_typed():
    words = ("+recipe=x", "++parallel.mesh=null", "++parallel.mesh={tp:4}", "++parallel.strategies={-a.b: null}", "a=1")
    assert typed(words) == ("+recipe=x", "parallel.mesh={tp:4}", "~parallel.strategies.a.b", "a=1")


@pytest.mark.parametrize("word", ["model.args.größe=3", "model.args={größe: 3}"])
def test_keys_that_hydra_cannot_read_are_refused_for_that_reason(command, word):
    done = command(FFN, word)
    assert done.code == 2 and "keys on the command line are ASCII" in done.paragraphs[0]
    assert ("quote the value" in done.paragraphs[0]) == ("{" in word)


def test_a_recipe_with_another_ending_is_pointed_out(command, tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yml").write_text("defaults: [ffn_auto]\n", encoding="utf-8")
    done = command("plan", "+recipe=mine")
    assert done.code == 2 and "recipes/mine.yml is there" in done.paragraphs[0]


def test_words_behind_a_verb_may_hold_anything(command, tmp_path):
    done = command("predict", "no such/it's é=3", FFN)
    assert done.code == 2 and "no such/it's é=3" in done.paragraphs[0]


def test_options_may_be_anywhere():
    words = ("--cfg", "job", "a=1", "-m", "b=1", "--config-dir", "x=y", "~c", "--info", "d=2", "-i", "all")
    options = ["--cfg", "job", "-m", "--config-dir", "x=y", "--info", "-i", "all"]
    assert for_hydra("plan", words) == ["job=plan", "a=1", "b=1", "~c", "d=2", *options]
