"""Measure the claims about the searches, and write docs/search.md with its figures.

    python -m benchmarks.search [--only PART[,PART]] [--quick] [--out docs]

Each part runs in a separate process, so that no part profits from another's caches. The page is made of the
outcomes in OUT/search/*.json; parts that are not measured keep their last outcome. With --quick parts skip slow cases;
without --out nothing is written and the page is printed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.search.outcome import Record, Setting, read
from benchmarks.search.page import page

PARTS = ("speed", "open_mesh", "scale", "joint", "optimality", "quality", "bytes", "step_time", "memory", "cache")


def measure(name: str, setting: Setting) -> Record:
    """Measure one part and write its outcome."""
    part = importlib.import_module(f"benchmarks.search.{name}")
    print(f"{name}: {part.TITLE}", flush=True)
    started = time.perf_counter()
    outcome = part.measure(setting)
    command = f"python -m benchmarks.search --only {name}" + " --quick" * setting.quick
    record = Record(
        name, part.TITLE, datetime.date.today().isoformat(), command, time.perf_counter() - started, outcome
    )
    record.write(setting.pictures)
    for claim in outcome.claims:
        print(f"{name}: {'met' if claim.met else 'NOT MET'}: {claim.goal}: {claim.measured}", flush=True)
    return record


def write_page(folder: Path) -> Path:
    """Make the page of all outcomes in a folder."""
    files = [folder / "search" / f"{name}.json" for name in PARTS]
    written = folder / "search.md"
    written.write_text(page([read(file) for file in files if file.exists()]), encoding="utf-8")
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="leave out what takes long")
    parser.add_argument("--out", type=Path, help="folder of search.md and search/ (default: docs)")
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    out = options.out or (Path(tempfile.mkdtemp()) if options.quick else Path("docs"))
    failed = []
    if len(names) == 1:
        torch.set_num_threads(1)
        measure(names[0], Setting(out, options.quick))
    for name in names if len(names) > 1 else ():
        words = ["--only", name, "--out", str(out), *["--quick"] * options.quick]
        if subprocess.run([sys.executable, "-m", "benchmarks.search", *words], check=False).returncode:
            failed.append(name)
    written = write_page(out)
    print(written.read_text(encoding="utf-8") if options.quick and options.out is None else f"page: {written}")
    if failed:
        print(f"parts that ended with an error: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
