"""Activations stored by pipeline schedules: a GPT in two stages, one rank each, with as many and with twice as many
micro-batches as stages, and the same batch size.

Counts the storages that autograd has saved and not yet freed during a step, without the parameters.
"""

from __future__ import annotations

from typing import Any

RANKS, LAYERS, WIDTH, ROWS, LENGTH = 2, 4, 128, 16, 64
SCHEDULES, MICRO_BATCHES = ("gpipe", "1f1b"), (4, 8)


def measure(rank: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The most bytes that each stage stored, by schedule and micro-batches, and the losses."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from models.gpt import GPT
    from models.losses import NextTokenLoss
    from strategies.capture import Objective, capture
    from strategies.core.program import LoweringOptions
    from strategies.core.request import Request
    from strategies.lowering.lowering import lower, random_ordinals
    from strategies.lowering.pipeline import cut, in_stages
    from strategies.lowering.pipeline_schedule import make_schedule
    from strategies.optimizer.stages import make_updates
    from strategies.optimizer.updates import axes_needed
    from strategies.planner.planner import make_plan
    from strategies.runtime.communicator import Communicator
    from strategies.runtime.module_tree import build
    from strategies.runtime.peers import Peers
    from strategies.runtime.pipeline_stage import RankStage, StageRunner

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

    def step(kind: str, micro_batches: int) -> tuple[int, float]:
        torch.manual_seed(0)
        net = GPT(256, LENGTH, WIDTH, LAYERS, 4)
        tokens, labels = (torch.randint(256, (ROWS, LENGTH)) for _ in range(2))
        rows = ROWS // micro_batches
        objective = Objective(net, NextTokenLoss(), ("0", "1"), ("1",))
        captured = capture(objective, (tokens[:rows], labels[:rows]), training=True)
        plan = make_plan(captured.graph, Request("data_parallel", 1))
        lowered = LoweringOptions(partial_loss=True)
        placed = in_stages(captured.graph, RANKS, "auto")
        stages = cut(captured.graph, plan, placed, random_ordinals(captured.graph, lowered))
        stage = stages[rank.rank]
        program = lower(stage.graph, stage.plan, lowered, outputs=stage.sends, ordinals=stage.ordinals)
        communicator = Communicator(program.mesh, 0, axes_needed(program), stage=rank.rank, stages=RANKS)
        own = [source for source in program.sources if source.kind != "input"]
        tensors = {source.name: captured.tensors[source.name].detach().clone() for source in own}
        tensors |= {source.name: nn.Parameter(tensors[source.name]) for source in own if source.kind == "parameter"}
        module = build(program, tensors, communicator, "cpu")
        peers = Peers(communicator, stages, range(RANKS))
        updates = make_updates(
            0,
            module,
            program,
            communicator,
            lambda groups: torch.optim.SGD(groups, lr=0.01),
            [{"names": [source.name for source in own if source.kind == "parameter"]}],
            accumulate=micro_batches,
            peers=peers,
        )
        parts = list(zip(tokens.split(rows), labels.split(rows), strict=True))
        stored = StoredBytes({tensor.untyped_storage()._cdata for tensor in tensors.values()})

        def run(entries: Any, key: int) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(stored.pack, lambda saved: getattr(saved, "tensor", saved)):
                return module(*entries)

        unit = RankStage(stage, program, run, tuple(tensors[name] for name in program.reductions))
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
