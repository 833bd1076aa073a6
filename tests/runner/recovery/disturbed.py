"""Runs with injected faults, and the results that they leave."""

import json

from runner import checkpoint as checkpoints

RESTARTS = ("launch.max_restarts=9", "launch.timeout=5")


def faults(*wanted):
    return f"launch.faults=[{', '.join(wanted)}]"


def stored(folder):
    """Checksums of the tensors of the last checkpoint, and the lines of metrics without the clock."""
    path = checkpoints.newest(folder / "checkpoints")
    files = {name: stamp for name, stamp in checkpoints.read(path).header.files.items() if name.endswith("safetensors")}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return path.name, files, [(one["step"], one["loss"], one.get("grad_norm")) for one in records if "loss" in one]
