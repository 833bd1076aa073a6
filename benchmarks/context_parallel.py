"""Attention over a sequence that four ranks share: time against torch's own context parallelism and against causal work
without balance, what overlaps, and the memory of a rank by length.

    python -m benchmarks.context_parallel [--length 4096] [--repetitions 9] [--out docs/context_parallel.md]

Forward and backward of one causal attention on gloo, one thread per rank. Variants alternate in the same processes, and
each is judged by its median. Where there are fewer cores than ranks the wall clock hides imbalance, so the CPU
seconds of the busiest rank stand beside it. Goals: memory proportional to length / ranks, as predicted; causal work
balanced; blocks sent while others are computed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.ranks import command_line, on_ranks
from runner import launch
from runner.cli.jobs import composed
from runner.commands import train

RANKS, HEADS, WIDTH = 4, 8, 64
LENGTHS = (1024, 2048, 4096, 8192)
SHARES = (0.25, 0.5, 1.0)
"""Of the time in which a rank computes a block, what an injected link takes to send one."""
TRAINED = (
    "+recipe=gpt_long parallel.context_parallel=ring parallel.recompute=none train.measure_memory=true train.steps=4 "
    "checkpoint.at_end=false data.batch_size=1 model.args.dropout=0 model.args.attention_dropout=0 "
    "data.args.length={length} model.args.length={length} world_size={ranks} parallel.mesh={{cp:{ranks}}} "
    "parallel.dataset_strategy=[[1,{ranks}],[1,{ranks}]] "
    "parallel.strategies={{layers.*.attention.scaled_dot_product_attention:"
    "[[1,1,{ranks},1],[1,1,{ranks},1],[1,1,{ranks},1]]}}"
)
Step = Callable[[], None]


def measure(rank: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of every variant by the wall clock and of the CPU of the busiest rank; largest differences from one
    device; what a slow link adds."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import Tensor, nn

    from benchmarks.slow_link import agreed
    from strategies.capture import Objective, capture
    from strategies.core.program import LoweringOptions
    from strategies.core.request import OperatorStrategy, Request
    from strategies.lowering.lowering import lower
    from strategies.planner.planner import make_plan
    from strategies.rules import ring_attention
    from strategies.runtime.communicator import Communicator
    from strategies.runtime.module_tree import build

    class Attend(nn.Module):
        def __init__(self, query: Tensor, key: Tensor, value: Tensor) -> None:
            super().__init__()
            self.query, self.key, self.value = map(nn.Parameter, (query, key, value))

        def forward(self, weights: Tensor) -> Tensor:
            attended = F.scaled_dot_product_attention(self.query, self.key, self.value, is_causal=True)
            return (attended * weights).sum()

    torch.manual_seed(0)
    shape = (1, HEADS, options["length"], WIDTH)
    model, weights = Attend(*(torch.randn(shape) for _ in range(3))), torch.randn(shape)
    along, own = (1, 1, RANKS, 1), lambda tensor: tensor.detach().chunk(RANKS, 2)[rank.rank].clone()
    graph = capture(Objective(model, None, ("weights",), ()), [weights], training=True).graph
    strategies = {"scaled_dot_product_attention": OperatorStrategy((along, along, along), None)}
    search = "sharding_propagation", (("cp", RANKS),), strategies
    plan = make_plan(graph, Request("auto", RANKS, *search, dataset_strategy=(along,)))

    def ours(ring: bool) -> tuple[Step, dict[str, nn.Parameter]]:
        program = lower(graph, plan, LoweringOptions(partial_loss=True, ring=ring))
        tensors = {name: nn.Parameter(own(tensor)) for name, tensor in model.named_parameters()}
        module = build(program, tensors, Communicator(plan.mesh, rank.rank, [("cp",)]), "cpu")
        slice_of_weights = own(weights)
        return lambda: module(slice_of_weights).backward(), tensors

    def theirs() -> tuple[Step, dict[str, nn.Parameter]]:
        attend, here = _templated(dist.group.WORLD), own(weights)
        tensors = {name: nn.Parameter(own(tensor)) for name, tensor in model.named_parameters()}
        return lambda: (attend(*tensors.values()) * here).sum().backward(), tensors

    half, steps = ring_attention.first_half, {"ring": ours(True), "gather": ours(False), "torch": theirs()}

    def in_order() -> None:
        ring_attention.first_half = lambda length: length  # nothing is swapped
        steps["ring"][0]()
        ring_attention.first_half = half

    variants = {"ring": steps["ring"][0], "ring, not balanced": in_order}
    variants |= {name: steps[name][0] for name in ("gather", "torch")}
    model(weights).backward()
    gaps = {}
    for name in ("ring", "gather"):
        steps[name][0]()
        wanted = {full: own(one.grad) for full, one in model.named_parameters()}
        gaps[name] = agreed(max((one.grad - wanted[full]).abs().max().item() for full, one in steps[name][1].items()))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for repetition in range(options["repetitions"] + 2):
        for name in list(variants)[:: 1 if repetition % 2 else -1]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            variants[name]()
            cpu = time.process_time() - cpu
            dist.barrier()
            if repetition > 1:
                times[name].append((time.perf_counter() - wall, cpu))
    busiest = {name: agreed(statistics.median(cpu for _, cpu in every)) for name, every in times.items()}
    return {
        "seconds": {name: agreed(statistics.median(wall for wall, _ in every)) for name, every in times.items()},
        "busiest": busiest,
        "gaps": gaps,
        "refused": _public(model, weights, rank.rank),
        "hidden": _hidden(variants["ring"], busiest["ring"], options),
    }


def _templated(group: Any) -> Callable[..., Any]:
    """torch's ring with its kernel for CPUs, which its public entry does not take there: queries, keys and values in
    zigzag order already."""
    import torch
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    theirs._cp_options.rotate_method = theirs._RotateMethod.ALL_TO_ALL
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def adjoint(*, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool) -> Any:
        given = grad_out, query, key, value, out, logsumexp, 0.0, is_causal
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given)

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            result, logarithms = theirs._templated_ring_attention(group, 2, kernel, *tensors, is_causal=True)
            ctx.save_for_backward(*tensors, result, logarithms)
            return result

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            saved = ctx.saved_tensors
            return theirs._templated_ring_attention_backward(
                group, 2, adjoint, gradient, "grad_out", *saved, is_causal=True
            )

    return lambda *tensors: Ring.apply(*tensors)


def _public(model: Any, weights: Any, rank: int) -> str:
    """What torch's public entry says on CPUs: the error, or nothing where its gradients are those of one device."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    tensors = [tensor.detach().clone() for tensor in (*model.parameters(), weights)]
    try:
        with context_parallel(init_device_mesh("cpu", (RANKS,)), buffers=tensors, buffer_seq_dims=[2] * 4):
            *inputs, scale = tensors
            inputs = [one.requires_grad_() for one in inputs]
            result = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True)
            (result * scale).sum().backward()
            shares = [one.grad.norm() ** 2 for one in inputs]
            for one in inputs:
                one.requires_grad_(False)  # else they are not restored
    except Exception as error:
        first = error.__context__ or error  # the exit of the context fails after what failed inside
        return f"{type(first).__name__}: {' '.join(str(first).split())[:200]}"
    for share, full in zip(shares, model.parameters(), strict=True):
        torch.distributed.all_reduce(share)
        if not torch.isclose(share, full.grad.norm() ** 2, rtol=1e-3):
            return f"no error, but the norm of a gradient is {share**0.5:.4f}, of one device {full.grad.norm():.4f}"
    return ""


@dataclass
class SlowRing:
    """An all-to-all whose tensors of `block` elements take `delay` seconds on a link, one after the other. Time is the
    CPU time of this process and what it has waited for the link, so that other work on the machine does not count."""

    real: Callable[..., Any]
    block: int
    delay: float
    free: float = 0.0
    taken: float = 0.0
    waited: float = 0.0

    def now(self) -> float:
        return time.process_time() + self.waited

    def __call__(self, into: Any, tensor: Any, *args: Any, **options: Any) -> Any:
        work = self.real(into, tensor, *args, **options)
        if tensor.numel() != self.block:  # swapped with the mirror
            return work
        self.free, self.taken = max(self.free, self.now()) + self.delay, self.taken + self.delay
        return Sent(work, self, self.free)


@dataclass
class Sent:
    """A call that is done when it is, and not before `due`."""

    work: Any
    link: SlowRing
    due: float

    def wait(self) -> None:
        self.work.wait()
        self.link.waited += max(self.due - self.link.now(), 0.0)


def _hidden(step: Step, alone: float, options: dict[str, Any]) -> dict[str, float]:
    """The part of the time of rotations over an injected link in which a rank computes, by the link's time per send as
    a share of a block's."""
    import torch.distributed as dist

    from benchmarks.slow_link import agreed

    real, found, block = dist.all_to_all_single, {}, 2 * HEADS * WIDTH * options["length"] // RANKS
    for share in SHARES:
        link = SlowRing(real, block, share * alone / (3 * RANKS))  # backward takes twice the time of forward
        dist.all_to_all_single = link
        for _ in range(options["repetitions"]):
            dist.barrier()
            step()
        dist.all_to_all_single = real
        found[f"{share:.2f}"] = 1 - agreed(link.waited / link.taken)
    return found


def memory() -> list[dict[str, Any]]:
    """Bytes of the fullest rank by length and ranks beside what stays from step to step, predicted and measured."""
    launch.warm()
    found = []
    for ranks, length in product((1, 2, 4), LENGTHS):
        checked = composed(TRAINED.format(length=length, ranks=ranks).split())
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
            train.run(checked, Path(folder))
            content = json.loads((Path(folder) / "memory.json").read_text(encoding="utf-8"))
        predicted, measured = content["predicted"], content["measured"]
        found.append(
            {"ranks": ranks, "length": length, "predicted": predicted["peaks"]["forward"] - predicted["held"]}
            | {"measured": max(one["peaks"]["forward"] - one["held"] for one in measured)}
            | {"stored": predicted["activations"], "kept": max(one["activations"] for one in measured)}
        )
    return found


def page(timed: dict[str, Any], stored: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The page, in markdown."""
    seconds, busiest = timed["seconds"], timed["busiest"]
    lines = [
        "# Long sequences: time and memory",
        "",
        f"`python -m benchmarks.context_parallel`: {RANKS} ranks on gloo, {os.cpu_count()} cores, one thread each.",
        "",
        "## Time",
        "",
        f"Forward and backward of a causal attention of {HEADS} heads of {WIDTH} columns over {options.length:,} "
        f"tokens in fp32, medians of {options.repetitions}.",
        "",
        "| variant | wall clock [ms] | of ring | CPU of the busiest rank [ms] | of ring |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in seconds:
        pair = [f"{one[name] * 1e3:.0f} | {one[name] / one['ring']:.2f}" for one in (seconds, busiest)]
        lines.append(f"| {name} | {' | '.join(pair)} |")
    hidden = ", ".join(
        f"{value:.0%} (where a send takes {float(share):.0%} of a block)" for share, value in timed["hidden"].items()
    )
    said = timed["refused"]
    lines += [
        "",
        "`torch` is torch's ring (`_templated_ring_attention`, zigzag order, all-to-all) with its kernel for CPUs, on "
        "data that is in zigzag order already; ours swaps halves itself. "
        + (f"Its public `context_parallel` does not run on CPUs: `{said}`." if said else "Its public entry runs too."),
        "",
        f"Of the time of rotations over an injected link, by the clock of a rank's CPU, ranks compute in {hidden}. "
        "The last of 9, which brings gradients home, leaves nothing to compute.",
        f"Largest difference of a gradient from one device: {max(timed['gaps'].values()):.1e} in fp32.",
        "",
        "## Memory",
        "",
        "Recipe `gpt_long` with `ring`, one row, without dropout and recompute: bytes of the fullest rank at the "
        "fullest moment of forward, and stored for backward, beside what stays from step to step.",
        "",
        "![Memory by length](images/context_memory.svg)",
        "",
        "| ranks | tokens | peak predicted | measured | stored predicted | measured | stored x ranks / tokens |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in stored:
        sizes = (f"{one[key]:,}" for key in ("predicted", "measured", "stored", "kept"))
        per = one["kept"] * one["ranks"] / one["length"]
        lines.append(f"| {one['ranks']} | {one['length']:,} | {' | '.join(sizes)} | {per:,.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = command_line(__doc__, length=4096, repetitions=9)
    parser.add_argument("--out", type=Path, help="where to write the page; pictures go to images/ beside it")
    options = parser.parse_args()
    payload = {"length": options.length, "repetitions": options.repetitions}
    timed = on_ranks("benchmarks.context_parallel:measure", payload, RANKS)
    stored = memory()
    text = page(timed, stored, options)
    print(text)
    if options.out is not None:
        from benchmarks.search import charts

        (options.out.parent / "images").mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
        lines: dict[str, list[tuple[float, float]]] = {}
        for one in stored:
            lines.setdefault(f"on {one['ranks']}", []).append((one["length"], one["measured"]))
        predicted = [(one["length"], one["predicted"]) for one in stored]
        charts.lines(options.out.parent / "images" / "context_memory.svg", lines, predicted, ("tokens", "bytes"))


if __name__ == "__main__":
    main()
