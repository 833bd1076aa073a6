"""Activations stored by pipeline schedules: a GPT in two stages, one rank each, with as many and with twice as many
micro-batches as stages, and the same batch size.

Counts the storages that autograd has saved and not yet freed during a step, without the parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import built_stage, small_gpt
from strategies.capture import capture
from strategies.lowering.pipeline_schedule import make_schedule
from strategies.runtime.peers import Peers
from strategies.runtime.pipeline_stage import RankStage, StageRunner

RANKS, LAYERS, WIDTH, ROWS, LENGTH = 2, 4, 128, 16, 64
SCHEDULES, MICRO_BATCHES = ("gpipe", "1f1b"), (4, 8)


class StoredBytes:
    """Bytes that autograd has saved: a storage counts while any of its tensors is alive."""

    def __init__(self, others: set[int]) -> None:
        self.others, self.uses, self.now, self.most = others, dict[int, int](), 0, 0

    def pack(self, tensor: torch.Tensor) -> Any:
        number = tensor.untyped_storage()._cdata
        return tensor if number in self.others else Kept(tensor, number, self)


class Kept:
    def __init__(self, tensor: torch.Tensor, number: int, stored: StoredBytes) -> None:
        self.tensor, self.number, self.stored = tensor, number, stored
        uses = stored.uses.get(number, 0)
        stored.uses[number] = uses + 1
        stored.now += 0 if uses else tensor.untyped_storage().nbytes()
        stored.most = max(stored.most, stored.now)

    def __del__(self) -> None:
        self.stored.uses[self.number] -= 1
        if not self.stored.uses[self.number]:
            self.stored.now -= self.tensor.untyped_storage().nbytes()


def measure(rank: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The most bytes that each stage stored, by schedule and micro-batches, and the losses."""

    def step(kind: str, micro_batches: int) -> tuple[int, float]:
        objective, (tokens, labels) = small_gpt(ROWS, LENGTH, WIDTH, LAYERS)
        rows = ROWS // micro_batches
        captured = capture(objective, (tokens[:rows], labels[:rows]), training=True)
        stages, own = built_stage(captured, "auto", rank.rank, RANKS)
        peers = Peers(own.communicator, stages, range(RANKS))
        sgd = lambda groups: torch.optim.SGD(groups, lr=0.01)  # noqa: E731
        updates = own.updates(sgd, accumulate=micro_batches, peers=peers)
        parts = list(zip(tokens.split(rows), labels.split(rows), strict=True))
        stored = StoredBytes({tensor.untyped_storage()._cdata for tensor in own.tensors.values()})

        def run(entries: Any, key: int) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(stored.pack, lambda saved: getattr(saved, "tensor", saved)):
                return own.module(*entries)

        reduced = tuple(own.tensors[name] for name in own.program.reductions)
        unit = RankStage(stages[rank.rank], own.program, run, reduced)
        schedule = make_schedule(kind, RANKS, micro_batches)
        runner = StageRunner(peers, [unit], schedule, micro_batches, "cpu", {})
        total = runner.step(lambda number: (parts[number], 0), updates)
        updates.reduce()
        updates.close()
        peers.share_loss(total)
        return stored.most, total.item() / micro_batches

    found = {}
    for count in MICRO_BATCHES:
        for kind in SCHEDULES:
            most, loss = step(kind, count)
            all_: list[Any] = [None] * RANKS
            dist.all_gather_object(all_, most)
            found[kind, count] = all_, loss
    return found


def table(found: dict[Any, Any]) -> str:
    lines = []
    for count in MICRO_BATCHES:
        for kind in SCHEDULES:
            stored, loss = found[kind, count]
            by_stage = ", ".join(f"{one / 2**20:.2f} MiB" for one in stored)
            lines.append(f"  {kind:6} with {count} micro-batches stores at most {by_stage} by stage; loss {loss:.6f}")
        ratio = max(found["1f1b", count][0]) / max(found["gpipe", count][0])
        lines.append(f"  1f1b over gpipe, the busiest rank: {ratio:.2f} (goal below 1)")
    return "\n".join(lines)
