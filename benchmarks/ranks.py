"""What benchmarks on real ranks share: a command line, the start of the ranks, and a program as one rank runs it."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.gpt import GPT
from models.losses import NextTokenLoss
from runner import launch
from strategies.capture import Captured, Objective
from strategies.core.program import LoweringOptions, Program
from strategies.core.request import Request
from strategies.lowering.lowering import lower, random_ordinals
from strategies.lowering.pipeline import Stage, cut, in_stages
from strategies.optimizer.stages import make_updates
from strategies.optimizer.updates import OptimizerFactory, Updates, axes_needed
from strategies.planner.planner import make_plan
from strategies.runtime.communicator import Communicator
from strategies.runtime.module_tree import build
from strategies.runtime.slices import slices_of

PARTIAL_LOSS = LoweringOptions(partial_loss=True)


def command_line(text: str | None, **numbers: int) -> argparse.ArgumentParser:
    """A parser that shows `text`, with an option for each of the numbers."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser


def on_ranks(entry: str, payload: Any, ranks: int, device: str = "cpu") -> Any:
    """What `entry` (module:function) returns on rank 0, of ranks of one thread each in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        return launch.run_ranks(
            entry, payload, world_size=ranks, run_dir=Path(folder), device=device, timeout=600, threads=1
        )


def small_gpt(rows: int, length: int, width: int, layers: int) -> tuple[Objective, tuple[Tensor, Tensor]]:
    """A GPT with its loss, and a batch, the same on all ranks."""
    torch.manual_seed(0)
    net = GPT(256, length, width, layers, 4)
    batch = torch.randint(256, (rows, length)), torch.randint(256, (rows, length))
    return Objective(net, NextTokenLoss(), ("0", "1"), ("1",)), batch


@dataclass(frozen=True)
class Built:
    """A program on one rank: `module` computes on the slices `tensors`."""

    program: Program
    communicator: Communicator
    tensors: dict[str, Tensor]
    module: nn.Module

    def updates(self, optimizer: OptimizerFactory, *, stage: int = 0, **options: Any) -> Updates:
        """What `make_updates` makes for all trainable parameters in one group."""
        groups = [{"names": list(self.program.trainable_names)}]
        return make_updates(stage, self.module, self.program, self.communicator, optimizer, groups, **options)


def built(
    program: Program,
    tensors: Mapping[str, Tensor],
    rank: int,
    make: type[Communicator] = Communicator,
    device: torch.device | str = "cpu",
    **pipeline: int,
) -> Built:
    """`program` on `rank`, with copies of its slices of `tensors`; `pipeline` is the stage of how many. Collective."""
    communicator = make(program.mesh, rank, [*program.axes, *axes_needed(program)], **pipeline)
    own = slices_of(tensors, program, rank, device)
    return Built(program, communicator, own, build(program, own, communicator, device))


def built_stage(captured: Captured, cuts: Any, rank: int, ranks: int) -> tuple[tuple[Stage, ...], Built]:
    """All stages of a data-parallel pipeline of one rank each, and the program of that of `rank`. Collective."""
    plan = make_plan(captured.graph, Request("data_parallel", 1))
    placed, ordinals = in_stages(captured.graph, ranks, cuts), random_ordinals(captured.graph, PARTIAL_LOSS)
    stages = cut(captured.graph, plan, placed, ordinals)
    stage = stages[rank]
    program = lower(stage.graph, stage.plan, PARTIAL_LOSS, outputs=stage.sends, ordinals=stage.ordinals)
    return stages, built(program, captured.tensors, 0, stage=rank, stages=ranks)
