"""Ranks with different programs or versions are reported before the first step."""

import pytest
from small import MODES, SMALL

from runner.errors import RunFailed
from runner.recovery import restarting
from runner.training.agreement import _without_names, different


def test_those_who_differ_from_most_are_named():
    facts = [{"torch": "2.13", "the config": "a"} for _ in range(6)]
    assert different(range(6), facts) == ""
    facts[2] = {"torch": "2.12", "the config": "a", "one more": "c"}
    assert different(range(6), facts).endswith(" Rank 2 differs in one more: c instead of nothing.")
    facts[2] = {"torch": "2.12", "the config": "a"}
    assert different(range(6), facts) == "Rank 2 differs in torch: 2.12 instead of 2.13."
    facts[5] = {"torch": "2.12", "the config": "b"}
    message = "Ranks 12, 15 differ in torch: 2.12 instead of 2.13. Rank 15 differs in the config: b instead of a."
    assert different(range(10, 16), facts) == message


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("with_another_plan", "Rank 2 differs in the captured model and its plan: "),
        ("with_another_config", r"Rank 2 differs in optimizer.args.lr: 0.5 instead of .*\. The ranks"),
        ("with_another_torch", "Rank 2 differs in torch: 0.1 instead of 2."),
        ("with_other_code", "Rank 2 differs in the generated code: "),
    ],
)
def test_a_rank_with_another_program(start, monkeypatch, entry, message):
    plain = restarting.start
    monkeypatch.setattr(restarting, "start", lambda _, *args: plain(f"drill_entries:{entry}", *args))
    with pytest.raises(RunFailed, match=message):
        start(*SMALL, *MODES["semi_auto"], "train.steps=2")


def test_code_is_compared_without_numbers_and_names_of_values():
    first = (
        "def forward(self, add):\n    dropout = local.dropout(add, 16, self._own_1);  add = None\n    return dropout\n"
    )
    renamed = first.replace("add", "linear_1").replace("16", "32").replace("_own_1", "other_bias")
    assert _without_names(first) == _without_names(renamed)
    assert _without_names(first) != _without_names(first.replace("local.dropout", "local.relu"))
    assert _without_names(first) != _without_names(first.replace("return dropout", "return self"))
