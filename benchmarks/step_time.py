"""Predicted against measured seconds of a step: eight plans each of three models, on local ranks of this machine.

    python benchmarks/step_time.py [--ranks 8] [--steps 4] [--seconds 60] [--models ffn,gpt,llama] [--cluster FILE]
                                   [--predict]

Without `--cluster` the machine is calibrated first; `--predict` prints the predictions for the machine that is
described, by default without calibration, and measures nothing. Plans are data parallel (ZeRO 0-3), tensor parallel and
both. Each runs in separate processes, as in training, in two passes, the second in reverse order, so that other load on
the machine affects all of them. A plan's time is the median of the slowest rank's steps, without the first ones of a
round.
Printed: a table, Spearman's rank correlation over all plans and by model, and how much slower the plan that is
predicted to be the fastest is than the fastest one. Goals: at least 0.9, and at most 1.05.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ranks import built, on_ranks
from models.ffn import FFN
from models.gpt import GPT
from models.llama import Llama
from models.losses import NextTokenLoss
from runner import launch
from runner.planning.clusters import from_description
from strategies.capture import Objective, capture
from strategies.core.program import LoweringOptions
from strategies.core.request import OperatorStrategy, Request
from strategies.cost.step import step_cost
from strategies.lowering.fusion import KINDS, LARGEST, fuse
from strategies.lowering.lowering import lower
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.planner import make_plan
from strategies.runtime.slices import entries_of

Strategies = Mapping[str, tuple[tuple[int, ...], ...]]
WARM, REPETITIONS = 2, 2


@dataclass(frozen=True)
class Wish:
    """One plan: `data` x `tensor` ranks, a ZeRO stage."""

    data: int
    tensor: int
    stage: int = 0

    @property
    def name(self) -> str:
        return f"{self.data} x {self.tensor}" + f", ZeRO-{self.stage}" * bool(self.stage)


def wishes(ranks: int) -> list[Wish]:
    """Data parallel with and without ZeRO, and every division into data and tensor parallel."""
    found = [Wish(ranks, 1, stage) for stage in range(4)]
    tensor = 2
    while tensor <= ranks:
        found.append(Wish(ranks // tensor, tensor))
        tensor *= 2
    return [*found, Wish(ranks // 2, 2, 1)]


def model_of(name: str) -> tuple[Any, Any, tuple[Any, ...]]:
    """A model, its loss, a batch."""

    torch.manual_seed(0)
    if name == "ffn":
        return (
            FFN([512, 1024, 1024, 1024, 64]),
            nn.CrossEntropyLoss(),
            (torch.randn(1024, 512), torch.randint(64, (1024,))),
        )
    tokens, labels = (torch.randint(512, (16, 128)) for _ in range(2))
    if name == "gpt":
        return GPT(512, 128, 384, 3, 8), NextTokenLoss(), (tokens, labels)
    return Llama(512, 128, 256, 3, 8, 8, 768), NextTokenLoss(), (tokens, labels)


def strategies_of(name: str, wish: Wish) -> Strategies:
    """Column-wise, then row-wise, in every pair of products; the rest is propagated."""
    d, t = wish.data, wish.tensor
    if name == "ffn":
        columns, rows = ((d, 1), (1, t)), ((d, t), (t, 1))
        return {"dense1.matmul": columns, "dense2.matmul": rows, "dense3.matmul": columns, "dense4.matmul": rows}
    columns, rows = ((d, 1, 1), (1, t)), ((d, 1, t), (t, 1))
    inner, outer = ("up_proj", "down_proj") if name == "gpt" else ("[gu]*_proj", "down_proj")
    return {
        "layers.*.attention.[qkv]_proj.matmul": columns,
        "layers.*.attention.o_proj.matmul": rows,
        f"layers.*.feed_forward.{inner}.matmul": columns,
        f"layers.*.feed_forward.{outer}.matmul": rows,
    }


@dataclass(frozen=True)
class Task:
    """A plan to measure, as plain data for the ranks."""

    graph: Any
    plan: Any
    stage: int
    tensors: Mapping[str, Any]
    batch: tuple[Any, ...]


def tasks(name: str, ranks: int) -> Iterator[tuple[Wish, Task]]:
    """Every plan of a model."""

    net, loss, batch = model_of(name)
    captured = capture(Objective(net, loss, ("0", "1"), ("1",)), batch, training=True)
    tensors = {key: value.detach() for key, value in captured.tensors.items()}
    for wish in wishes(ranks):
        if wish.tensor == 1:
            request = Request("data_parallel", ranks)
        else:
            wanted = {path: OperatorStrategy(form, None) for path, form in strategies_of(name, wish).items()}
            request = Request("auto", ranks, mesh=(("dp", wish.data), ("tp", wish.tensor)), strategies=wanted)
        yield wish, Task(captured.graph, make_plan(captured.graph, request), wish.stage, tensors, batch)


def program_of(task: Task) -> Any:

    options = LoweringOptions(sharded_optimizer=task.stage > 0, partial_loss=True)
    return fuse(lower(task.graph, task.plan, options), dict.fromkeys(KINDS, LARGEST))


def factory(groups: Any) -> Any:

    return torch.optim.AdamW(groups, lr=1e-3)


def settings(task: Task) -> Any:

    return OptimizerSettings(task.stage, factory, overlap=True, engine="native")


class Built:
    """One plan, built on one rank."""

    def __init__(self, task: Task, rank: int) -> None:
        program = program_of(task)
        self.axes, own = program.loss_axes, built(program, task.tensors, rank)
        self.communicator, self.batch = own.communicator, entries_of(task.batch, program, rank)
        self.updates = own.updates(factory, stage=task.stage, overlap=True, engine="native")

    def step(self) -> float:

        dist.barrier()
        started = time.perf_counter()
        loss = self.updates.module(*self.batch)
        self.updates.backward(loss)
        total = loss.detach().double()
        if self.axes:
            dist.all_reduce(total, group=self.communicator.group(self.axes))
        self.updates.reduce()
        self.updates.update(measure=False)
        return time.perf_counter() - started


def measure(rank: Any, payload: dict[str, Any]) -> list[float]:
    """Seconds of the measured steps of a plan on the slowest rank, without warm-up steps."""

    plan = Built(Task(*payload["task"]), rank.rank)
    found = torch.tensor([plan.step() for _ in range(WARM + payload["steps"])], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return [float(value) for value in found[WARM:]]


def ranks_of(values: Sequence[float]) -> list[float]:
    """The rank of every value; ties get their mean rank."""
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation."""
    return statistics.correlation(ranks_of(first), ranks_of(second))


def calibrated(file: Path, ranks: int, seconds: float) -> None:
    """Write the description of this machine to `file`."""
    words = ["calibrate", str(file), f"calibrate.seconds={seconds}", f"world_size={ranks}", "device=cpu"]
    run_dir = f"hydra.run.dir={file.parent / 'calibrate'}"
    subprocess.run([sys.executable, "-m", "runner", *words, run_dir], check=True)


@dataclass(frozen=True)
class Result:
    """One plan of a model: its predicted cost, and the measured seconds of a step."""

    model: str
    wish: Wish
    predicted: Any
    seconds: float


def run(models: Sequence[str], ranks: int, steps: int, seconds: float, cluster: Path | None) -> list[Result]:
    """Measure every plan of the models on `ranks` ranks; the machine is described by the file `cluster`, or calibrated
    for `seconds` seconds."""
    launch.warm()

    with tempfile.TemporaryDirectory() as name:
        file = cluster or Path(name) / "calibrated.yaml"
        if cluster is None:
            calibrated(file, ranks, seconds)
        machine = from_description(file)
        wanted = [(model, wish, task) for model in models for wish, task in tasks(model, ranks)]
        found: dict[int, list[float]] = {number: [] for number in range(len(wanted))}
        for turn in range(REPETITIONS):
            for number in list(found)[:: -1 if turn % 2 else 1]:
                payload = {"task": tuple(vars(wanted[number][2]).values()), "steps": steps}
                found[number] += on_ranks("benchmarks.step_time:measure", payload, ranks)
        measured = [statistics.median(times) for times in found.values()]
    return [
        Result(model, wish, step_cost(task.graph, task.plan, program_of(task), machine, settings(task)), one)
        for (model, wish, task), one in zip(wanted, measured, strict=True)
    ]


def predicted(models: Sequence[str], ranks: int, cluster: Path | None) -> Iterator[tuple[str, Wish, Any]]:
    """The cost of every plan on the machine in a file, or on the one that is assumed for CPUs."""
    from runner.planning.clusters import DEFAULTS, busy, from_description, shipped

    name = DEFAULTS["cpu"]
    machine = busy(name, shipped(name), ranks) if cluster is None else from_description(cluster)
    for model in models:
        for wish, task in tasks(model, ranks):
            yield model, wish, step_cost(task.graph, task.plan, program_of(task), machine, settings(task))


def of_best(results: Sequence[Result]) -> float:
    """The measured time of the plan predicted fastest, relative to the fastest plan."""
    first = min(results, key=lambda one: one.predicted.total)
    return first.seconds / min(one.seconds for one in results)


def correlation(results: Sequence[Result]) -> float:
    """Spearman's rank correlation of predicted and measured times."""
    return spearman([one.predicted.total for one in results], [one.seconds for one in results])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--models", default="ffn,gpt,llama")
    parser.add_argument("--cluster", type=Path)
    parser.add_argument("--predict", action="store_true")
    options = parser.parse_args()
    models = options.models.split(",")
    if options.predict:
        for model, wish, cost in predicted(models, options.ranks, options.cluster):
            print(f"{model:6} {wish.name:14} {cost.total * 1e3:8.1f} ms", flush=True)
        return
    results = run(models, options.ranks, options.steps, options.seconds, options.cluster)
    for model in models:
        found = [one for one in results if one.model == model]
        print(f"{model:14} predicted  measured   ms: compute, communication, optimizer predicted")
        for one in found:
            cost = one.predicted
            parts = ", ".join(f"{x * 1e3:.1f}" for x in (cost.compute, cost.communication, cost.optimizer))
            print(f"  {one.wish.name:12} {cost.total * 1e3:9.1f} {one.seconds * 1e3:9.1f}   {parts}")
        ratio = f"the plan predicted best takes {of_best(found):.3f} of the best"
        print(f"  Spearman {correlation(found):.3f}; {ratio}")
    print(f"Spearman over {len(results)} plans: {correlation(results):.3f}")


if __name__ == "__main__":
    sys.exit(main())
