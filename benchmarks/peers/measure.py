"""One comparison, measured: both sides in the same processes, one step of each in turn.

Invariant: the first steps are not timed, the side that goes first changes every round, and a step's time is that of the
slowest rank. Beside the wall clock, which other programs disturb, stand the CPU seconds of all ranks together.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peers import sides
from benchmarks.peers.parts import PARTS, Part, Size
from runner import launch
from runner.config.load import validated
from runner.config.origins import Origins
from runner.config.schema import Config
from runner.export.targets import exported
from runner.launch.orders import RankContext
from runner.planning.joint import prepare_decided

WARM = 3
"""Rounds that are not timed."""
TOLERANCE = 1e-4
"""The largest difference of a loss of the two sides, relative. AdamW turns rounding into steps, so it grows slowly."""


@dataclass(frozen=True)
class Measured:
    """Seconds of every timed step, CPU seconds of all ranks in it, and the losses of all steps, by side."""

    part: str
    family: str
    seconds: dict[str, list[float]]
    cpu: dict[str, list[float]]
    losses: dict[str, list[float]]

    def median(self, side: str) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds[side])

    @property
    def ratio(self) -> float:
        """Ours over the peer's: the median of the rounds, since what disturbs a round disturbs both of its steps."""
        return statistics.median(self._ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles of the ratio over the rounds."""
        low, _, high = statistics.quantiles(self._ratios, n=4)
        return low, high

    @property
    def _ratios(self) -> list[float]:
        return [own / other for own, other in zip(self.seconds["ours"], self.seconds["peer"], strict=True)]

    @property
    def cpu_ratio(self) -> float:
        """That of the CPU seconds."""
        return statistics.median(self.cpu["ours"]) / statistics.median(self.cpu["peer"])

    @property
    def difference(self) -> float:
        """The largest difference of a loss, relative."""
        pairs = zip(self.losses["ours"], self.losses["peer"], strict=True)
        return max((abs(own - other) / abs(other) for own, other in pairs), key=lambda one: (math.isnan(one), one))


def config_of(part: Part, family: str, size: Size, ranks: int, device: str) -> Config:
    """The config of ours."""
    case = part.case(family, size)
    parallel = part.parallel(case, ranks)
    if part.pipeline:
        parallel["pipeline"]["micro_batches"] = size.micro_batches
    sections = {
        "world_size": ranks,
        "device": device,
        "model": case.model_section,
        "loss": case.loss_section,
        "data": {"target": "benchmarks.peers.cases.Rows", "args": asdict(case), "batch_size": case.rows},
        "optimizer": {"target": "torch.optim.AdamW", "args": {"lr": sides.RATE}},
        "parallel": parallel,
        "train": {"steps": 1},
        "job": {"name": "train"},
    }
    return validated(sections, Origins())


def measure(rank: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Measured` on rank 0."""
    comparison, rounds = payload["comparison"], payload["rounds"]
    steps = [
        ("ours", sides.ours(comparison, rank)),
        ("peer", sides.BY_NAME[payload["part"]](comparison, rank)),
    ]
    seconds, cpu, losses = ({name: [] for name, _ in steps} for _ in range(3))
    for number in range(WARM + rounds):
        for name, step in steps[:: 1 if number % 2 else -1]:
            wall, spent, loss = timed(step, rank.device)
            losses[name].append(loss)
            if number >= WARM:
                seconds[name].append(wall)
                cpu[name].append(spent)
    return {"seconds": seconds, "cpu": cpu, "losses": losses}


def timed(step: Callable[[], Tensor], device: str) -> tuple[float, float, float]:
    """Seconds of the slowest rank, CPU seconds of all ranks, and the loss of one step (collective)."""
    dist.barrier()
    wall, spent = time.perf_counter(), time.process_time()
    loss = step()
    if device != "cpu":
        torch.cuda.synchronize()
    wall, spent = time.perf_counter() - wall, time.process_time() - spent
    slowest, total = (torch.tensor(one, dtype=torch.float64, device=device) for one in (wall, spent))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return slowest.item(), total.item(), loss.item()


def require_equal(measured: Measured) -> None:
    """Raises RuntimeError where the sides have different losses."""
    if not measured.difference <= TOLERANCE:  # also where one is not a number
        own, other = (measured.losses[side][:4] for side in ("ours", "peer"))
        raise RuntimeError(
            f"{measured.part} on {measured.family}: the losses of the two sides differ by {measured.difference:.1e}, "
            f"more than {TOLERANCE:.0e}: {own} and {other}"
        )


def run(
    name: str, families: Sequence[str], size: Size, ranks: int, rounds: int, device: str, say: Callable[[str], None]
) -> list[Measured]:
    """One part on some models. Raises RuntimeError where the sides have different losses."""
    part, found = PARTS[name], []
    for family in families:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            config = config_of(part, family, size, ranks, device)
            prepared = prepare_decided(config, folder, say=lambda line: None)
            if name == "export":
                text = exported("torch", prepared, f"{family} on {ranks} ranks", allow_changes=True)
                (folder / sides.EXPORTED).write_text(text, encoding="utf-8")
            micro_batches = size.micro_batches if part.pipeline else 1
            comparison = sides.Comparison(part.case(family, size), prepared, folder, micro_batches)
            lists = launch.run_ranks(
                "benchmarks.peers.measure:measure",
                {"comparison": comparison, "part": name, "rounds": rounds},
                world_size=ranks,
                run_dir=folder,
                device=device,
                timeout=300,
                threads=1,
            )
        measured = Measured(name, family, **lists)
        require_equal(measured)
        low, high = measured.spread
        say(
            f"{name:12} {family:6} ours {measured.median('ours') * 1e3:7.1f} ms  peer "
            f"{measured.median('peer') * 1e3:7.1f} ms  ratio {measured.ratio:.3f} [{low:.3f}, {high:.3f}]  "
            f"CPU {measured.cpu_ratio:.3f}  losses {measured.difference:.0e}"
        )
        found.append(measured)
    return found
