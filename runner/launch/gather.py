"""Plain values from all ranks. They travel as JSON: what another process sends is never unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What every rank of a group, by default all, gives, in the order of the ranks (collective): numbers, strings,
    lists and dicts with strings as keys."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device), group=group)
    largest = max(int(size) for size in sizes)
    padded = torch.zeros(largest, dtype=torch.uint8, device=device)
    padded[: len(content)] = content
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=group)
    return [json.loads(bytes(one[: int(size)].tolist())) for one, size in zip(found, sizes, strict=True)]
