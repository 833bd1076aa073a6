"""`run diff A B`: which layouts differ between two plans, and the effect on cost and memory."""

from __future__ import annotations

import json

import pytest
from composing import compose_config

from runner.commands import plan
from runner.commands.diff import differences


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    """Folders of plans of one model: tensor parallel, with sequence parallelism, and on another mesh."""
    found = {}
    for name in ("megatron_tp", "megatron_sp", "gpt"):
        found[name] = tmp_path_factory.mktemp(name)
        plan.run(compose_config(f"+recipe={name}", "job=plan", "parallel.plan_cache=null"), found[name])
    return found


def content(folder):
    return json.loads((folder / "plan.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_same_is_said_by_an_option_of_plan(command, plans):
    folders = str(plans["megatron_tp"]), str(plans["gpt"])
    assert command("plan", "--diff", *folders) == command("diff", *folders)
    assert command("plan", "--diff", folders[0]).code == 2


@pytest.mark.slow
def test_two_plans_on_one_mesh(command, plans):
    done = command("diff", str(plans["megatron_tp"]), str(plans["megatron_sp"] / "plan.json"))
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "mesh: dp 2 x tp 4"
    assert lines[1] == "operators: 17 of 53 have other layouts"
    at = lines.index("  layers.*.attention_norm (x 2)")
    assert lines[at + 1 : at + 3] == [
        "    first   (dp, -, -) (-) (-) -> (dp, -, -)",
        "    second  (dp, tp, -) (-) (-) -> (dp, tp, -)",
    ]
    assert "  layers.*@0 (x 2)" in lines
    one, other = content(plans["megatron_tp"]), content(plans["megatron_sp"])
    for title in ("cost:", "communication:", "memory:"):
        assert title in lines
    saved = other["memory"]["activations"] / one["memory"]["activations"] - 1
    assert next(line for line in lines if line.startswith("  activations")).endswith(f"({saved:+.1%})")
    assert next(line for line in lines if line.startswith("  parameters")).count("KiB") == 1


@pytest.mark.slow
def test_two_meshes_are_compared_by_slices(plans):
    lines = differences(content(plans["megatron_tp"]), content(plans["gpt"])).splitlines()
    assert lines[0] == "mesh: dp 2 x tp 4  ->  dp 4 x tp 2"
    at = lines.index("  layers.*.attention.q_proj (x 2)")
    assert lines[at + 1 : at + 3] == [
        "    first   (2,1,1) (4,1) (4) -> (2,1,4)",
        "    second  (4,1,1) (2,1) (2) -> (4,1,2)",
    ]


@pytest.mark.slow
def test_a_plan_does_not_differ_from_itself(plans):
    own = content(plans["gpt"])
    text = differences(own, own)
    assert f"operators: all {len(own['operators'])} have equal layouts" in text and "->" not in text


def test_operators_of_one_plan_only(start):
    folders = {"ffn_auto": "first", "quickstart": "second"}
    plans = [start(f"+recipe={name}", verb="plan", folder=folder).plan for name, folder in folders.items()]
    text = differences(*plans)
    assert "only in the first: dense1, relu@0, dense2" in text
    assert "only in the second: matmul, relu, matmul2" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "diff compares two plans, but got 0"),
        (["a", "b", "c"], "diff compares two plans, but got 3"),
        (["a", "b"], "the plan 'a' cannot be read: No such file or directory"),
    ],
)
def test_what_cannot_be_compared(command, words, message):
    done = command("diff", *words)
    assert done.code == 2 and message in done.err


def test_other_json_cannot_be_compared(command, tmp_path):
    for content in ("{}", "[]", "3"):
        (tmp_path / "other.json").write_text(content, encoding="utf-8")
        done = command("diff", "other.json", "other.json")
        assert done.code == 2 and "'other.json' is no plan.json" in done.err
