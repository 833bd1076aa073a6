"""Without torch's compiler a capture is what it is with it, and what asks for the compiler gets it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from models.llama import Llama
from models.losses import NextTokenLoss
from strategies.capture import Objective, capture, deferred_compiler
from strategies.core.graph import OperatorGraph

TOKENS = torch.zeros(4, 8, dtype=torch.int64)
ALONE = f"""\
import pickle, sys
from strategies.capture import deferred_compiler
deferred_compiler.defer()
from {__name__} import KINDS, graph_of
made = [graph_of(kind) for kind in sys.argv[2:]]
absent = type(sys.modules["torch._dynamo"]).__name__ == "_Deferred"
with open(sys.argv[1], "wb") as file:
    pickle.dump((made, absent), file)
"""


class Layer(nn.Module):
    """A layer whose forward uses the compiler as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "compiles":
            return torch.compile(lambda z: z.relu())(y).sum()
        if self.kind == "imports":
            import torch._dynamo.eval_frame as frames

            y = frames.innermost_fn(torch.tanh)(y)
        if self.kind == "asks":
            y = y * (2 if torch._dynamo.is_compiling() else 3)
        return y.sum()


KINDS = ("llama", "compiles", "imports", "asks")


def graph_of(kind: str) -> OperatorGraph:
    if kind == "llama":
        objective = Objective(Llama(16, 8, 16, 7, 2, 1, 16), NextTokenLoss(), ("0", "1"), ("1",))
        return capture(objective, (TOKENS, TOKENS), training=True).graph
    return capture(Objective(Layer(kind), None, ("0",), ()), (torch.ones(4, 4),), training=True).graph


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.compile is ignored")
@pytest.mark.parametrize("kind", KINDS)
def test_capture_is_that_of_a_process_with_the_compiler(tmp_path, kind):
    command = [sys.executable, "-c", ALONE, str(tmp_path / "graphs"), kind]
    subprocess.run(command, cwd=Path(__file__).parents[3], check=True, timeout=300)
    (graph,), absent = pickle.loads((tmp_path / "graphs").read_bytes())
    assert absent == (kind == "llama")
    assert graph == graph_of(kind)


def test_a_compiler_that_is_there_stays(monkeypatch):
    import torch._dynamo  # noqa: F401

    monkeypatch.setattr(sys, "meta_path", before := [*sys.meta_path])
    deferred_compiler.defer()
    assert sys.meta_path is before and not any(type(f) is deferred_compiler._Finder for f in before)
