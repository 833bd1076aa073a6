"""parallel.recompute in a config: errors before anything starts, and the alternatives that they suggest."""

from __future__ import annotations

import pytest

GPT = "+recipe=gpt"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["parallel.recompute=auto"], "null; give a limit per rank such as parallel.memory_limit=16GB, or choose none"),
        (["parallel.recompute=ful"], "parallel.recompute.operators = 'ful' is not allowed."),
        (["parallel.recompute=2"], "must be a list. Allowed too: none, full, selective, auto."),
        (["parallel.recompute.slice_inputs=true"], "does not go with parallel.recompute.operators = 'none'"),
        (
            ["parallel.recompute=full", "train.compile=true"],
            "choose train.compile=false or parallel.recompute.operators",
        ),
        (
            ["parallel.recompute=full", "parallel.recompute.slice_inputs=true"],
            "give the keys of parallel.recompute one",
        ),
    ],
)
def test_what_clashes_is_refused(command, words, text):
    done = command("plan", GPT, *words)
    assert done.code == 2
    assert text in done.err


def test_a_module_that_runs_as_it_is_has_no_plan_to_recompute(command):
    done = command("plan", "+recipe=hybrid_matmul", "parallel.recompute=full")
    assert done.code == 2
    assert "parallel.mode = 'hybrid'" in done.err
