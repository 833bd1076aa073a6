"""The text of plan.json."""

import json

from runner.report.plan_files import plan_text


def test_every_operator_has_a_line() -> None:
    content = {
        "mesh": {"dp": 2},
        "operators": [{"name": "a", "in_strategy": [[2, 1], []]}, {"name": 'ü"b', "in_strategy": []}],
        "parameters": {"a.weight": {"shape": [4, 2]}, "b.weight": {"shape": []}},
        "cost": {"total": 0.5, "forward": None},
        "redistributions": [],
        "seconds": 1.5,
    }
    lines = plan_text(content).splitlines()
    assert json.loads("\n".join(lines)) == content
    assert '    {"name": "a", "in_strategy": [[2, 1], []]},' in lines
    assert '    "a.weight": {"shape": [4, 2]},' in lines
    assert '  "cost": {"total": 0.5, "forward": null},' in lines
