"""`run explain OPERATOR`: the origin of its strategy, its communication, and the next best strategy."""

from __future__ import annotations

import re

import pytest
from small import MODES, SMALL

from runner.errors import ConfigError


def explained(start, capsys, *options):
    start(*options, verb="explain")
    return capsys.readouterr().out


def test_a_configured_operator(start, capsys):
    out = explained(start, capsys, "+recipe=quickstart", "explain.operator=matmul")
    assert "matmul (matmul, models/matmul.py:22)\n" in out
    assert "  strategy   (d0, d1) (d1, -) -> (d0, -) partial over d1\n" in out
    assert "  why        configured: parallel.strategies.matmul\n" in out
    assert "  around     its operand 0, forward: all_to_all from dim 0 to dim 1 over d1, 192 B sent per rank\n" in out
    assert "  around     operand 0 of relu, forward: reduce_scatter dim 1 over d1, 384 B sent per rank\n" in out
    assert "strategies on this mesh" in out
    assert "operator                shapes" not in out


def test_a_propagated_operator_and_its_runner_up(start, capsys):
    out = explained(start, capsys, "+recipe=quickstart", "explain.operator=relu")
    assert "  why        propagated: " in out
    assert "  runner-up  (d0, -) -> (d0, -)\n             takes " in out and ") more: " in out
    assert "             keeps 384 B more per rank" in out
    assert "  legal      9 strategies on this mesh" in out


@pytest.mark.slow
def test_equal_layers_share_a_paragraph(start, capsys):
    out = explained(start, capsys, "+recipe=megatron_tp", "explain.operator='layers.*.attention.[qo]_proj'")
    for name in ("q_proj", "o_proj"):
        place = rf"layers.0.attention.{name} \(linear, models/transformer.py:\d+\)"
        assert re.search(rf"{place} and 1 like it: layers.1.attention.{name}", out)
    assert out.count("  why        configured: parallel.strategies.layers.*.attention.o_proj.matmul") == 1


@pytest.mark.slow
def test_operators_that_no_one_chose(start, capsys):
    options = (*SMALL, *MODES["data_parallel"], "model.target=networks.Renormed")
    out = explained(start, capsys, *options, "explain.operator=renorm")
    assert "  why        its kind has no sharding rule, so it is replicated on every rank" in out
    assert "  runner-up  none: no other strategy is legal on this mesh" in out
    assert "  why        not configured and not reached" in explained(start, capsys, *options, "explain.operator=inner")


def test_a_cheaper_neighbour_is_reported(start, capsys):
    strategies = "parallel.strategies={inner.matmul: [[4,1],[1,1]], outer.matmul: [[1,4],[4,1]]}"
    out = explained(start, capsys, *SMALL, "parallel=semi_auto", strategies, "explain.operator=outer")
    assert "  cheaper    (d0, -) (-, -) (-) -> (d0, -)\n             takes " in out and ") less: " in out
    assert "(with its neighbours unchanged; changed together they may cost less still)" in out


@pytest.mark.slow
def test_operators_of_a_pipelines_stage(start, capsys):
    out = explained(start, capsys, "+recipe=gpt_pipeline", "explain.operator=layers.3.attention.q_proj")
    assert "layers.3.attention.q_proj (linear" in out and "strategies on this mesh" in out


@pytest.mark.slow
def test_a_loaded_plan_says_so(start, capsys):
    saved = start(*SMALL, *MODES["auto"], verb="plan", folder="saved")
    options = ("parallel=semi_auto", f"parallel.plan={saved.folder}", "explain.operator=inner")
    assert "  why        configured where the plan was made" in explained(start, capsys, *SMALL, *options)


@pytest.mark.slow
def test_a_name_that_means_nothing_leaves_nothing(start, tmp_path, command):
    with pytest.raises(ConfigError, match=r"explain\.operator = 'relx' matches no operator .* Did you mean 'relu'"):
        start("+recipe=quickstart", "explain.operator=relx", verb="explain", folder="run")
    assert list((tmp_path / "run").iterdir()) == []
    with pytest.raises(ConfigError, match=r"Did you mean 'layers\.\*\.feed_forward\.experts\.\*'\?"):
        start("+recipe=moe", "explain.operator=feed_forward.experts", verb="explain", folder="run")


@pytest.mark.slow
def test_the_operator_is_a_bare_word(command):
    done = command("explain", "relu", "+recipe=quickstart")
    assert done.code == 0 and "relu (relu, models/quickstart.py" in done.out


def table(out, name):
    """The rows of the table of `name`: (rank, *dims, partial over)."""
    lines = out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(f"{name} ["))
    rows = lines[first + 1 : lines.index("", first) if "" in lines[first:] else None]
    assert rows[0].split()[0] == "rank" and rows[0].endswith("partial over")
    return [tuple(row.split()) for row in rows[1:]]


@pytest.mark.slow
def test_slices_of_parameters_inputs_and_results(start, capsys):
    out = explained(start, capsys, "+recipe=quickstart", "explain.slices='*'")
    product = table(out, "matmul")
    assert [row[0] for row in product] == [*map(str, range(8))]
    assert product[0][1:] == ("0:8", "0:16", "d1") and product[7][1:] == ("8:16", "0:16", "d1")
    sliced = explained(start, capsys, *SMALL, *MODES["semi_auto"], "explain.slices=outer.weight")
    assert [row[1:] for row in table(sliced, "outer.weight")] == [("0:4", "0:8", "-"), ("0:4", "8:16", "-")] * 2
    assert "inner" not in sliced


@pytest.mark.slow
def test_slices_of_a_pipeline_name_the_ranks_of_the_stage(start, capsys):
    options = (*SMALL, "parallel=data_parallel", "parallel.pipeline.stages=2", "data.args.keys=true")
    out = explained(start, capsys, *options, "explain.slices='outer.*'")
    assert table(out, "outer.bias") == [("2", "0:4", "-"), ("3", "0:4", "-")]
    assert [row[1] for row in table(explained(start, capsys, *options, "explain.slices=x"), "x")] == ["0:2", "2:4"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "typed", [("--slices", "matmul", "+recipe=quickstart"), ("+recipe=quickstart", "--slices=relu")]
)
def test_slices_are_an_option_in_any_place(command, typed):
    done = command("explain", *typed)
    assert done.code == 0 and "partial over" in done.out


def test_slices_of_nothing_are_refused(start, command, tmp_path):
    with pytest.raises(ConfigError, match=r"explain\.slices = 'inner\.wieght' .*Did you mean 'inner\.weight'"):
        start(*SMALL, "parallel=data_parallel", "explain.slices=inner.wieght", verb="explain", folder="run")
    assert list((tmp_path / "run").iterdir()) == []
    assert command("plan", "+recipe=quickstart", "--slices", "relu").code == 2
    assert command("explain", "+recipe=quickstart", "--slices").code == 2
