"""Bytes sent by hand-written plans, compared with plans that the search finds within the same memory.

    python -m benchmarks.hand_plans [--only WORD] [--out docs/hand_plans.md]

Tiny models with realistic structure. A hand plan's memory is its predicted peak over ranks (see docs/memory.md); the
search (dynamic_programming, without ZeRO or at the hand plan's stage) gets that as its limit, and a cluster where only
communication costs time: one level, slow, without latency. Both plans then take a step on real ranks, whose
communicators count what they send. Goal: the search never sends more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.ranks import on_ranks
from benchmarks.step_time import Built, Strategies, Task, program_of, settings
from models.ffn import FFN
from models.gpt import GPT
from models.llama import Llama
from models.losses import NextTokenLoss
from models.moe import MoE
from models.vocabulary import VocabularyFFN
from runner import launch
from strategies.capture import Captured, Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.plan import Plan
from strategies.core.request import OperatorStrategy, Request
from strategies.cost.cluster import RING, Cluster, Level, Link
from strategies.cost.step import step_cost
from strategies.memory.parts import memory
from strategies.memory.trace import trace
from strategies.planner.planner import make_plan
from strategies.search.joint import Bound, Choice, Priced, decide

FAST = 1e13
"""Flops and bytes of memory per second: a step's work is a millionth of a second, its bytes are tenths."""
ROOMS = (1.2, 1.05, 0.95, 0.85, 0.75)
"""Memory limits of the search, relative to the limit."""
Model = tuple[nn.Module, nn.Module, tuple[torch.Tensor, ...]]


def by_bytes(ranks: int) -> Cluster:
    """A cluster on which the step time is that of the bytes sent."""
    return Cluster(
        "bytes", (Level("rank", ranks, Link(1e6, 0.0)),), {"float32": FAST}, 2**50, FAST, 0.0, algorithms=(RING,)
    )


def _text(net: nn.Module, length: int = 32, rows: int = 8) -> Model:
    tokens, labels = (torch.randint(64, (rows, length)) for _ in range(2))
    return net, NextTokenLoss(), (tokens, labels)


def gpt() -> Model:
    return _text(GPT(64, 32, 64, 2, 4))


def llama() -> Model:
    return _text(Llama(64, 32, 64, 2, 4, 4, 128))


def moe() -> Model:
    return _text(MoE(64, 32, 32, 2, 4, 64, 4, 2))


def vocabulary() -> Model:
    return _text(VocabularyFFN(64, 32, 128))


def ffn() -> Model:
    return FFN([64, 256, 128, 256, 16]), nn.CrossEntropyLoss(), (torch.randn(64, 64), torch.randint(16, (64,)))


def megatron(data: int, tensor: int, inner: Sequence[str], *, sequence: bool = False, tied: bool = True) -> Strategies:
    """Column-then-row pairs, a vocabulary sharded from the head to the loss; with `sequence`, norms, dropouts and
    additions between the pairs are sharded along the sequence."""
    d, t = data, tensor
    s = t if sequence else 1
    weights = ((1,), (1,)) if tied else ((1,),)
    between = (d, s, 1)
    found: dict[str, tuple[tuple[int, ...], ...]] = {
        "tokens": ((t, 1), (d, 1)),
        "layers.*.*_norm": (between, *weights),
        "layers.*.attention.[qkv]_proj.matmul": ((d, 1, 1), (1, t)),
        "layers.*.attention.o_proj.matmul": ((d, 1, t), (t, 1)),
        "layers.*.feed_forward.down_proj.matmul": ((d, 1, t), (t, 1)),
        "layers.*.add": (between, between),
        "norm": (between, *weights),
        "head.matmul": ((d, 1, 1), (1, t)),
        "loss.cross_entropy_loss": ((d, t, 1), (d, 1)),
    }
    found |= {f"layers.*.feed_forward.{name}.matmul": ((d, 1, 1), (1, t)) for name in inner}
    return found


EXPERTS: Strategies = {
    "layers.*.feed_forward.experts.up_proj.einsum": ((1, 4, 1, 1), (4, 1, 1)),
    "layers.*.feed_forward.experts.gelu": ((1, 4, 1, 1),),
    "layers.*.feed_forward.experts.down_proj.einsum": ((1, 4, 1, 1), (4, 1, 1)),
}
HEAD: Strategies = {
    "embedding": ((4, 1), (1, 1)),
    "feed_forward.up_proj.matmul": ((1, 1, 1), (1, 4)),
    "feed_forward.down_proj.matmul": ((1, 1, 4), (4, 1)),
    "head.matmul": ((1, 1, 1), (1, 4)),
    "loss.cross_entropy_loss": ((1, 4, 1), (1, 1)),
}
PAIRS: Strategies = {
    "dense1.matmul": ((2, 1), (1, 2)),
    "dense2.matmul": ((2, 2), (2, 1)),
    "dense3.matmul": ((2, 1), (1, 2)),
    "dense4.matmul": ((2, 2), (2, 1)),
}
CUBE: Strategies = {f"dense{number}.matmul": ((2, 2), (2, 2)) for number in (1, 2, 3, 4)}


@dataclass(frozen=True)
class Hand:
    """A plan as people write it: `strategies` by path, else data parallel, at a ZeRO `stage`."""

    name: str
    model: Callable[[], Model]
    strategies: Strategies = field(default_factory=dict)
    mesh: tuple[int, ...] = (2, 2)
    stage: int = 0
    mode: str = "auto"
    batch: str = "data_parallel"

    @property
    def ranks(self) -> int:
        found = 1
        for size in self.mesh:
            found *= size
        return found

    @property
    def request(self) -> Request:
        if self.mode == "data_parallel":
            return Request("data_parallel", self.ranks)
        wanted: Mapping[str, OperatorStrategy] = {
            path: OperatorStrategy(form, None) for path, form in self.strategies.items()
        }
        named = tuple(zip("abc", self.mesh, strict=False)) if self.mode == "auto" else None
        mode: Any = self.mode
        batch: Any = self.batch
        return Request(mode, self.ranks, mesh=named, strategies=wanted, dataset_strategy=batch)


HANDS = (
    Hand("data parallel", gpt, mode="data_parallel"),
    Hand("data parallel, ZeRO-1", gpt, mode="data_parallel", stage=1),
    Hand("data parallel, ZeRO-2", gpt, mode="data_parallel", stage=2),
    Hand("data parallel, ZeRO-3", gpt, mode="data_parallel", stage=3),
    Hand("Megatron, tensor parallel", gpt, megatron(1, 4, ["up_proj"]), (4,), batch="full_batch"),
    Hand("Megatron, with sequences", gpt, megatron(1, 4, ["up_proj"], sequence=True), (4,), batch="full_batch"),
    Hand("2-D: data x Megatron", gpt, megatron(2, 2, ["up_proj"])),
    Hand("2-D, ZeRO-1", gpt, megatron(2, 2, ["up_proj"]), stage=1),
    Hand("Megatron on llama", llama, megatron(1, 4, ["gate_proj", "up_proj"], tied=False), (4,), batch="full_batch"),
    Hand("pairs in a feed-forward net", ffn, PAIRS),
    Hand("experts by expert", moe, EXPERTS, (4,), mode="semi_auto"),
    Hand("sliced vocabulary", vocabulary, HEAD, (4,), batch="full_batch"),
    Hand("3-D products", ffn, CUBE, (2, 2, 2)),
)


@dataclass(frozen=True)
class Predicted:
    """The prediction for a task: bytes of memory, and seconds on a cluster where only communication costs time."""

    peak: int
    seconds: float


def predicted(task: Task, ranks: int) -> Predicted:
    program, how = program_of(task), settings(task)
    cost = step_cost(task.graph, task.plan, program, by_bytes(ranks), how)
    return Predicted(memory(trace(program, how), how).peak, cost.total)


def pair(hand: Hand) -> tuple[Task, Task]:
    """The hand plan, and the plan searched within its memory."""
    torch.manual_seed(0)
    net, loss, batch = hand.model()
    captured = capture(Objective(net, loss, ("0", "1"), ("1",)), batch, training=True)
    tensors = {name: tensor.detach() for name, tensor in captured.tensors.items()}
    written = Task(captured.graph, make_plan(captured.graph, hand.request), hand.stage, tensors, batch)
    plan, stage = found(hand, captured, predicted(written, hand.ranks).peak, written)
    return written, replace(written, plan=plan, stage=stage)


def found(hand: Hand, captured: Captured, limit: int, written: Task) -> tuple[Plan, int]:
    """The plan that sends the smallest number of bytes within `limit` bytes of memory, and its ZeRO stage."""
    request = hand.request
    mesh = tuple(zip("abc", hand.mesh, strict=False)) if len(hand.mesh) > 1 else (("a", 2), ("b", hand.ranks // 2))
    free = Request("auto", hand.ranks, "dynamic_programming", mesh, dataset_strategy=request.dataset_strategy)
    machine = by_bytes(hand.ranks)

    def look(choice: Choice) -> Iterator[Priced]:
        """The shortest time within the limit; the search's memory is a model, so it gets several budgets."""
        fits: Priced | None = None
        for share in (None, *ROOMS):
            room = None if share is None else int(share * limit)
            try:
                plan = make_plan(captured.graph, replace(free, zero_stage=choice.zero, memory_limit=room), machine)
            except StrategyError:
                break  # no plan is so small
            one = predicted(replace(written, plan=plan, stage=choice.zero), hand.ranks)
            if one.peak <= limit and (fits is None or one.seconds < fits.seconds):
                fits = Priced(plan, one.seconds, one.peak)
            if room is None and fits is not None:
                break
        if fits is None:
            raise StrategyError("MW502", f"no plan at ZeRO stage {choice.zero} was found that keeps {limit} bytes")
        yield fits

    bounds = {Choice(1, zero, 1, "none"): Bound(0.0, 0.0) for zero in sorted({0, hand.stage})}
    decision = decide(bounds, limit, look)
    return decision.priced.plan, decision.choice.zero


def count(rank: Any, payload: dict[str, Any]) -> list[int]:
    """Bytes that the busiest rank sends in a step of every task, without the loss."""
    import torch.distributed as dist

    found = []
    for one in payload["tasks"]:
        built = Built(Task(*one), rank.rank)
        built.step()
        before = built.communicator.sent.total()
        built.step()
        found.append(built.communicator.sent.total() - before)
    sums = torch.tensor(found)
    dist.all_reduce(sums, dist.ReduceOp.MAX)
    return [int(value) for value in sums]


@dataclass(frozen=True)
class Result:
    """Bytes sent and bytes of memory, of the hand plan and of ours at `stage`."""

    hand: Hand
    sent: tuple[int, int]
    peaks: tuple[int, int]
    stage: int


def run(hands: Sequence[Hand]) -> list[Result]:
    """Plan all pairs, and count what they send on real ranks."""
    pairs = [pair(hand) for hand in hands]
    counted: dict[int, list[int]] = {}
    for ranks in sorted({hand.ranks for hand in hands}):
        tasks = [
            tuple(vars(one).values())
            for hand, both in zip(hands, pairs, strict=True)
            for one in both
            if hand.ranks == ranks
        ]
        counted[ranks] = on_ranks("benchmarks.hand_plans:count", {"tasks": tasks}, ranks)
    results = []
    for hand, both in zip(hands, pairs, strict=True):
        sent = counted[hand.ranks].pop(0), counted[hand.ranks].pop(0)
        peaks = predicted(both[0], hand.ranks).peak, predicted(both[1], hand.ranks).peak
        results.append(Result(hand, sent, peaks, both[1].stage))
    return results


def table(results: Sequence[Result]) -> str:
    """The page, in markdown."""
    more = [one.hand.name for one in results if one.sent[1] > one.sent[0]]
    named = f": {', '.join(more)}" if more else ""
    lines = [
        "# Hand-written plans, and those that the search finds within their memory",
        "",
        "`python -m benchmarks.hand_plans` executes both on real ranks (CPU, gloo) and counts the bytes that the",
        "busiest rank sends in a step; memory is the predicted peak of a rank, and the hand plan's is the limit of the",
        "search, for which time is bytes, without ZeRO or at the hand plan's stage.",
        f"Plans that are found send more than {len(more)} of {len(results)} hand plans{named}.",
        "",
        "| hand plan | ranks | bytes sent | memory | ours: bytes sent | memory | ZeRO | bytes, relative |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in results:
        ratio = f"{one.sent[1] / one.sent[0]:.3f}" if one.sent[0] else ""
        lines.append(
            f"| {one.hand.name} | {one.hand.ranks} | {one.sent[0]:,} | {one.peaks[0]:,} | {one.sent[1]:,} | "
            f"{one.peaks[1]:,} | {one.stage} | {ratio} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="hand plans whose name holds this text")
    parser.add_argument("--out", type=Path, help="where to write the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    launch.warm()
    page = table(run([hand for hand in HANDS if options.only in hand.name]))
    print(page)
    if options.out is not None:
        options.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
