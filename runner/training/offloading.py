"""`parallel.offload` on a rank: the modules whose saved tensors are offloaded, and the traffic."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from strategies.runtime.activation_offload import Activations, matching_modules
from strategies.runtime.disk import Disk
from strategies.runtime.offload import Offload, OffloadTraffic


def activations(module: nn.Module, offload: Offload, device: str) -> Activations | None:
    """Offload the tensors that `module` saves for backward according to `offload`. The result counts the traffic."""
    if offload.activations == "none":
        return None
    disk = Disk(offload.place) if offload.activations == "disk" else None
    hooks = Activations(torch.device(device), offload.larger_than, disk)
    staying: list[Tensor] = [*module.parameters(), *module.buffers()]
    hooks.attach(matching_modules(module, offload.modules), staying)
    return hooks


def change(before: Mapping[str, OffloadTraffic], after: Mapping[str, OffloadTraffic]) -> dict[str, int]:
    """Bytes of one step, under the names that metrics.jsonl uses; `stored` is a state, not a change."""
    changes: dict[str, int] = {}
    for kind, now in after.items():
        then = before.get(kind, OffloadTraffic())
        changes |= {f"{kind}_out": now.out - then.out, f"{kind}_back": now.back - then.back, f"{kind}_held": now.stored}
    return changes


def summary(moved: Mapping[str, OffloadTraffic], offload: Offload) -> str:
    """One line for the end of a run: rank 0's offload traffic."""
    parts = []
    for kind, traffic in moved.items():
        what = "placed operators, host" if kind == "place" else f"{kind} to {getattr(offload, kind)}"
        most = f", at most {traffic.stored:,} there" if traffic.stored else ""
        parts.append(f"{what}: {traffic.out:,} bytes out, {traffic.back:,} back{most}")
    return "offload (rank 0): " + "; ".join(parts)
