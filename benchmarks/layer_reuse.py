"""The cost of model depth on a rank: code, time and memory of its program, for a GPT of growing depth.

    python benchmarks/layer_reuse.py [--layers 4 16 64] [--compile] [--backend inductor]

The program of rank 0 of a 2 x 2 mesh (data x tensor parallel) is built without process groups, once with layers sharing
their code and once with code for each unit; printed are units, distinct code objects, nodes of their graphs, seconds to
lower and to build, bytes that python has allocated for it (tracemalloc), and the process groups that it needs. With
--compile, also the seconds of a first and a second step and the graphs that were compiled, on one rank.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, fx, nn

from models.gpt import GPT
from models.losses import NextTokenLoss
from strategies.capture import Captured, Objective, capture
from strategies.core.program import LoweringOptions, Program
from strategies.core.request import OperatorStrategy, Request
from strategies.core.steps import LOCAL
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.runtime import compiled, module_tree
from strategies.runtime.communicator import Communicator
from strategies.runtime.compiled import as_key
from strategies.runtime.module_tree import build

TOKENS = torch.zeros(8, 16, dtype=torch.int64)
COLUMNS, ROWS = OperatorStrategy(((2, 1, 1), (1, 2)), None), OperatorStrategy(((2, 1, 2), (2, 1)), None)
STRATEGIES = {
    "layers.*.attention.[qkv]_proj.matmul": COLUMNS,
    "layers.*.attention.o_proj.matmul": ROWS,
    "layers.*.feed_forward.up_proj.matmul": COLUMNS,
    "layers.*.feed_forward.down_proj.matmul": ROWS,
}


class Silent(Communicator):
    """A communicator without process groups, for a module that is built but not run."""

    def prepare(self, axes: Any) -> None:
        return None

    def group(self, axes: Any) -> Any:
        return None


def captured(layers: int) -> Captured:
    torch.manual_seed(0)
    step = Objective(GPT(64, 16, 32, layers, 4, dropout=0.1), NextTokenLoss(), ("0", "1"), ("1",))
    return capture(step, (TOKENS, TOKENS), training=True)


def slices(program: Program) -> dict[str, Tensor]:
    """Local tensors of zeros."""
    found: dict[str, Tensor] = {}
    for source in program.sources:
        local = torch.zeros(program.layouts[source.id].local_shape(source.spec.shape, program.mesh))
        if source.kind != "input":
            found[source.name] = nn.Parameter(local) if source.kind == "parameter" else local
    return found


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def measured(program: Program) -> str:
    """Build once: units, code objects, nodes, seconds and bytes."""
    tensors = slices(program)
    make = lambda: build(program, tensors, Silent(program.mesh, 0), "cpu")  # noqa: E731
    seconds = min(timed(make)[0] for _ in range(3))
    gc.collect()
    tracemalloc.start()
    module = make()
    gc.collect()
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    units = [unit for unit in module.modules() if isinstance(unit, fx.GraphModule)]
    codes = {type(unit).forward.__code__ for unit in units}
    nodes = sum(len(graph.nodes) for graph in {unit.graph for unit in units})
    return f"{len(units):6} units {len(codes):5} codes {nodes:6} nodes {seconds:7.3f} s {allocated / 1e6:7.2f} MB"


def compile_once(seen: Captured, backend: str) -> str:
    program = lower(seen.graph, make_plan(seen.graph, Request("data_parallel", 1)), LoweringOptions(partial_loss=True))
    module = build(program, slices(program), Communicator(program.mesh, 0), "cpu", compiled=True)
    torch._inductor.config.force_disable_caches = True  # it would hold the graphs of another depth
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled.compile_units(module, "cpu", backend=backend)
    step = lambda: module(TOKENS, TOKENS, as_key(1)).backward()  # noqa: E731
    first, second = timed(step)[0], timed(step)[0]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return f"first step {first:6.1f} s, second {second:6.3f} s, {graphs} graphs compiled"


def measure(layers: int, backend: str | None) -> None:
    """Print the cost of a GPT with `layers` layers."""
    seen = captured(layers)
    plan = make_plan(seen.graph, Request("auto", 4, mesh=(("dp", 2), ("tp", 2)), strategies=STRATEGIES))
    seconds, program = timed(lambda: lower(seen.graph, plan, LoweringOptions(partial_loss=True)))
    chains = [chain for one in program.redistributions for chain in (one.forward, one.backward)]
    groups = {step.axes for chain in chains for step in chain if step.kind not in LOCAL}
    print(f"{layers} layers: {len(program.instructions)} instructions lowered in {seconds:.3f} s, {len(groups)} groups")
    print(f"    shared {measured(program)}")
    form = module_tree._Tree._form
    module_tree._Tree._form = lambda *_: object()  # type: ignore[assignment]
    print(f"    apart  {measured(program)}", flush=True)
    module_tree._Tree._form = form  # type: ignore[method-assign]
    if backend is not None:
        print(f"    compiled ({backend}): {compile_once(seen, backend)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--backend", default="inductor")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for layers in options.layers:
        measure(layers, options.backend if options.compile else None)


if __name__ == "__main__":
    main()
