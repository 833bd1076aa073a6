"""The joint optimisation of ZeRO, pipeline, micro-batches and recompute for the shape of a 7B llama on 8 devices.

    python -m benchmarks.search_joint [--layers 32] [--length 2048] [--limits none 60 40 20]

The model is captured on meta tensors, once per number of rows of a micro-batch, and the exact search plans it; every
limit (GiB of a device) is optimised anew, except for the captures and the sharding rules of their operators. Prints CPU
seconds of one core, the number of choices, searches and memory traces, and the decision. Goal: at most 10 s.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from runner.planning import joint
from runner.planning.joint import JointDecision
from strategies.core import result_shapes as shapes
from strategies.memory.trace import Trace
from strategies.rules import sharding
from tests.runner.composing import compose_config

OPEN = ("parallel.zero.stage=auto", "parallel.pipeline.stages=auto", "parallel.recompute=auto")


def deciding(layers: int, length: int, limit: str) -> JointDecision:
    shape = (
        f"vocabulary: 32000, length: {length}, width: 4096, layers: {layers}, heads: 32, kv_heads: 32, hidden: 11008"
    )
    words = (
        *("parallel=auto", "parallel.search=dynamic_programming", "parallel.plan_cache=null", *OPEN),
        *("cluster=dgx_h100", "world_size=8", "model.target=models.llama.Llama", f"model.args={{{shape}}}"),
        *("loss.target=models.losses.NextTokenLoss", "optimizer.target=torch.optim.AdamW", "train.precision=bf16"),
        *("data.target=runner.data.text.Windows", f"data.args={{length: {length}, train: true}}"),
        *("data.batch_size=16", "job.name=plan"),
    )
    return JointDecision(
        compose_config(*words, *([] if limit == "none" else [f"parallel.memory_limit={limit}GiB"])), print
    )


def capture(one: JointDecision) -> dict[int, joint.Capture]:
    """Capture the model with the rows of every choice."""
    for choice in one.choices:
        one.searched(choice)
    return one.captures


def forget() -> None:
    """Clear the caches that one decision leaves to the next in a process, except captures."""
    shapes.forget()
    sharding.forget()


@contextmanager
def timed(module: Any, name: str) -> Iterator[list[float]]:
    """CPU seconds of every call of `module.name`."""
    found: list[float] = []
    call = getattr(module, name)

    def run(*given: Any, **named: Any) -> Any:
        started = time.process_time()
        try:
            return call(*given, **named)
        finally:
            found.append(time.process_time() - started)

    with mock.patch.object(module, name, run):
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--limits", nargs="+", default=["none", "60", "40", "20"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    seen = None
    for limit in options.limits:
        one = deciding(options.layers, options.length, limit)
        started = time.process_time()
        if seen is None:
            seen = capture(one)
            print(f"{len(seen)} captures of {options.layers} layers: {time.process_time() - started:.1f} s", flush=True)
        one.captures.update(seen)
        forget()
        started = time.process_time()
        with timed(joint.Planning, "plan") as searches, timed(Trace, "run") as traces:
            decided = one.plan().search["decided"]
        seconds = time.process_time() - started
        parts = f"{len(searches)} searches {sum(searches):.1f} s, {len(traces)} traces {sum(traces):.1f} s"
        print(f"limit {limit:>4}: {seconds:5.1f} s, {len(one.bounds)} choices; {parts}\n    {decided}", flush=True)


if __name__ == "__main__":
    main()
