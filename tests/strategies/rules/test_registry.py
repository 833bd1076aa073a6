"""The table of rules: every family has its tests, no operator two rules, unknown operators run whole and are right."""

from pathlib import Path

import pytest
import torch

from strategies.core.graph import TensorSpec
from strategies.rules import FAMILIES
from strategies.rules.registry import LOCAL_FUNCTIONS, RULES, resolve, rule
from strategies.rules.sharding import notation

CASES = [
    ("sorted search", torch.searchsorted, torch.arange(12.0), torch.tensor([0.5, 3.5])),
    ("distances", torch.pdist, torch.randn(6, 12).double()),
    ("distances of a product", lambda a: torch.pdist(a * 2), torch.randn(6, 12).double()),
]


def test_every_family_has_a_test_file():
    families = {module.__name__.rpartition(".")[2] for module in FAMILIES}
    tested = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert families <= tested
    assert {function.__module__.rpartition(".")[2] for function in RULES.values()} == families


def test_every_rule_is_of_an_operator():
    """Of torch, one that capture makes, or one that Hugging Face's models bring along."""
    foreign = {name for name in RULES if not hasattr(torch.ops.aten, name) and name not in LOCAL_FUNCTIONS}
    assert foreign == {"grouped_mm_fallback"}


def test_a_second_rule_is_refused():
    with pytest.raises(ValueError, match="mm has two rules"):
        rule("mm")(lambda operator, specs: None)


def test_resolve():
    assert resolve("aten.relu.default") is torch.ops.aten.relu.default
    assert resolve("local.lookup_slice").__name__ == "lookup_slice"


def test_operators_without_a_rule_run_whole(cases, check, known, mesh):
    assert known(cases, "pdist") == [False, False]
    check(cases, mesh, samples=2)


def test_notation():
    """Names are factors, `!name` stays whole, `...` are leading dims, what no result carries is summed."""
    specs = [TensorSpec(shape, "float32") for shape in ((2, 6, 12), (18, 12), (18,))]
    found = notation("... k, n k, n -> ... n", specs, [TensorSpec((2, 6, 18), "float32")])
    assert found.operands == (("batch0", "batch1", "k"), ("n", "k"), ("n",))
    assert found.results == (("batch0", "batch1", "n"),)
    assert found.sums == {"k"}
    assert dict(found.sizes) == {"batch0": 2, "batch1": 6, "k": 12, "n": 18}
    blocked = notation("b !d, !d -> b !d", [specs[1], TensorSpec((12,), "float32")], [specs[1]])
    assert blocked.operands == (("b", None), (None,))
    assert blocked.sums == frozenset()
