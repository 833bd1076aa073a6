"""The registry of rules: every one has tests, no operator has two rules, and unknown ones run replicated."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

from strategies.rules import table
from strategies.rules.registry import LOCAL_FUNCTIONS, RULES, resolve, rule

CASES = [
    ("sorted search", torch.searchsorted, torch.arange(12.0), torch.tensor([0.5, 3.5])),
    ("distances", torch.pdist, torch.randn(6, 12).double()),
    ("distances of a product", lambda a: torch.pdist(a * 2), torch.randn(6, 12).double()),
]


def test_every_rule_beyond_the_table_is_covered_by_a_test_file():
    files = [import_module(f"{__package__}.{path.stem}") for path in Path(__file__).parent.glob("test_*.py")]
    covered = {name for file in files for name in getattr(file, "COVERS", "").split()}
    beyond = {name for name, rule in RULES.items() if rule.__module__ != table.__name__}
    assert {name for name in beyond if "tests::" not in name} <= covered


def test_every_rule_is_of_an_operator():
    """An operator of torch, of capture, or of Hugging Face's models."""
    foreign = {name for name in RULES if not hasattr(torch.ops.aten, name) and name not in LOCAL_FUNCTIONS}
    assert {name for name in foreign if "tests::" not in name} == {
        "transformers::grouped_mm_fallback",
        "meshwright::packed_network",
    }


def test_a_second_rule_is_refused():
    with pytest.raises(ValueError, match="embedding has two rules"):
        rule("embedding")(lambda operator, specs: None)


def test_resolve():
    assert resolve("aten.relu.default") is torch.ops.aten.relu.default
    assert resolve("local.lookup_slice").__name__ == "lookup_slice"


def test_operators_without_a_rule_run_replicated(cases, check, known, mesh):
    assert known(cases, "pdist") == [False, False]
    check(cases, mesh, samples=2)
