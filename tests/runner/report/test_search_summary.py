"""The search summary: the mesh with its runner-up, and both costs of sharding propagation."""

from __future__ import annotations

from runner.report.text import mesh_line, propagation_line, search_lines, zero_line
from tests.runner.composing import compose_config

MESH = {"mesh": [2, 4], "seconds": 2.0}


def test_the_mesh_and_its_runner_up():
    line = {"mesh": MESH, "runner_up": {"mesh": [8], "seconds": 2.5}, "meshes": 3, "left_out": 1}
    assert mesh_line(line) == (
        "mesh: 2 x 4, the best of 4 factorisations of the ranks (1 pruned by bounds); "
        "the runner-up 8 takes 2.5 s per step, 25 % more"
    )
    one = {"mesh": {"mesh": [3], "seconds": 0.5}, "runner_up": None, "left_out": 0}
    assert mesh_line(one | {"meshes": 1}) == "mesh: 3, the only factorisation of the ranks"
    assert mesh_line(one | {"meshes": 1, "runner_up": {"mesh": [2, 2], "seconds": 1.0}}) is None
    two = mesh_line(one | {"meshes": 2})
    assert two is not None and two.startswith("mesh: 3, the best of 2") and "no runner-up" in two
    assert mesh_line({"cost": 1.0}) is None


def test_what_propagation_followed():
    prices = {"followed": 3.0, "cheapest": 1.0, "by_price": False}
    kept, taken = (propagation_line({"propagation": prices | {"by_price": by_price}}) for by_price in (False, True))
    assert kept is not None and "3 s per step as propagated; 1 s if optimised by cost" in kept
    assert taken == "propagation: 1 s per step, re-optimised by cost; the propagated plan takes 3 s"
    assert propagation_line({"propagation": prices | {"cheapest": 3.0}}) is None and propagation_line({}) is None
    assert search_lines({"propagation": prices}) == [kept] and search_lines({}) == []


def test_the_engine_of_stage_3_and_why_it_runs():
    words = ("+recipe=zero", "parallel.zero.stage=3")
    assert zero_line(compose_config(*words)) == "zero: stage 3 by our own engine, the faster one"
    needing = zero_line(compose_config(*words, "parallel.offload.optimizer=host"))
    assert needing == "zero: stage 3 by DeepSpeed, which parallel.offload.optimizer='host' needs"
    given = zero_line(compose_config(*words, "parallel.zero.engine=deepspeed"))
    assert given == "zero: stage 3 by DeepSpeed, as parallel.zero.engine=deepspeed says"


def test_command_and_report_say_the_same(start, capsys):
    ended = start("+recipe=quickstart", "parallel.search=dynamic_programming", verb="plan")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mesh: ")]
    assert "runner-up" in line and line in (ended.folder / "report.html").read_text(encoding="utf-8")
