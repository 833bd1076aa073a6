"""Steps of ours beside the same steps of others, in one run.

    python -m benchmarks.peers [--only PART...] [--models gpt llama vit] [--rounds 15] [--ranks 4] [--device cpu|cuda]
                               [--width 256 --layers 4 --deep 8 --sequence 128 --rows 16 --micro-batches 8]
                               [--out docs]

Model, weights, batch, loss and optimizer (AdamW) are the same on both sides, which take one step each in turn in the
same processes; the run fails where their losses differ. Written: OUT/peers/PART.json for every part that ran, and
OUT/peers.md and OUT/images/peers.svg from those of all parts.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import fields
from pathlib import Path

import torch

from benchmarks.peers import page
from benchmarks.peers.measure import run
from benchmarks.peers.parts import FAMILIES, PARTS, Size
from runner import launch


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=[*FAMILIES])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    for one in fields(Size):
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=int, default=one.default)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be 2 or more: the spread of a ratio needs two.")
    device = options.device or ("cuda" if torch.cuda.device_count() >= options.ranks else "cpu")
    size = Size(**{one.name: getattr(options, one.name) for one in fields(Size)})
    launch.warm()
    for number, name in enumerate(options.only, 1):
        print(f"[{number}/{len(options.only)}] {PARTS[name].peer}", flush=True)
        load = os.getloadavg()[0]
        found = run(
            name, options.models, size, options.ranks, options.rounds, device, lambda line: print(line, flush=True)
        )
        page.store(options.out, name, found, size, options.ranks, device, load)
        page.write(options.out)


if __name__ == "__main__":
    sys.exit(main())
