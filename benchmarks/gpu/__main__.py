"""Everything on one GPU: what runs, how fast, and how well time and memory are predicted.

    python -m benchmarks.gpu [--only PART...] [--device cuda|cpu] [--out docs] [--page]

Written: OUT/gpu.json and OUT/gpu.md. With --only the other parts keep what they have, and the
seconds stay those of a run of all. --page writes the page from the JSON and runs nothing. On a CPU every part is the
same but for the sizes of models; --out is required then, so that docs/gpu.md is about GPUs alone. Exit codes: 0, 1
where a part failed, 2 where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import count
from pathlib import Path

import torch

from benchmarks.gpu import page
from benchmarks.gpu.parts import BESIDE, PARTS, SMALL, TOGETHER, config_of, measured
from runner import launch
from runner.errors import ConfigError
from runner.planning.clusters import device_of

LIMIT = 520.0
"""Seconds after which no part begins on a GPU."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    if options.device == "cpu" and options.out is None:
        parser.error("--device cpu needs --out FOLDER: docs/gpu.md is about GPUs.")
    folder = options.out or Path("docs")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "gpu.json"
    stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if not options.page:
        try:
            require(options.device)
        except ConfigError as error:
            print(f"benchmarks.gpu: {error}", file=sys.stderr)
            return 2
        earlier = stored if options.out is None and stored is not None else {"parts": {}}
        for stored in run(options.only, options.device, earlier["parts"]):  # measurements stay if it ends early
            if len(options.only) < len(PARTS):
                stored["seconds"] = earlier.get("seconds", stored["seconds"])
            file.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    (folder / "gpu.md").write_text(page.text(stored), encoding="utf-8")
    failed = any(
        "error" in row for part in (stored or {"parts": {}})["parts"].values() for row in part["rows"].values()
    )
    return int(failed)


def require(device: str) -> None:
    """Raises ConfigError where this machine has no such device."""
    device_of(config_of(SMALL, device, "fp32", compiled=False))


def run(names: list[str], device: str, before: dict[str, object]) -> Iterator[dict[str, object]]:
    """Run parts, those that time nothing at the same time, and say how each went. Yields all that is there so far."""
    started, parts, said = time.perf_counter(), dict(before), count(1)

    def note(name: str, outcome: str) -> None:
        print(f"[{next(said)}/{len(names)}] {name}: {outcome}", flush=True)

    def take(name: str) -> None:
        if device == "cuda" and time.perf_counter() - started > LIMIT:
            note(name, "left out, there is no time")
            return
        found = measured(name, device, Path(made))
        parts[name] = asdict(found)
        failed = "; ".join(f"{row} failed: {found.rows[row]['error']}" for row in found.failed)
        note(name, f"{failed or 'ran'} ({found.seconds} s)")

    launch.warm()
    with tempfile.TemporaryDirectory() as made:
        with ThreadPoolExecutor(TOGETHER) as pool:
            for _ in pool.map(take, (name for name in names if name in BESIDE)):
                yield _stored(device, started, parts)
        for name in names:
            if name not in BESIDE:
                take(name)
                yield _stored(device, started, parts)


def _stored(device: str, started: float, parts: dict[str, object]) -> dict[str, object]:
    return {
        "device": device,
        "name": torch.cuda.get_device_name() if device == "cuda" else "a CPU",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - started, 1),
        "parts": dict(parts),
    }


if __name__ == "__main__":
    sys.exit(main())
