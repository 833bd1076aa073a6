"""CPU seconds of commands that start no rank: a plan of Llama 8B for a described cluster, anew and from the plan cache,
one for another cluster with the graph that was captured for the first, the help, and a refusal.

    python -m benchmarks.thought [--repetitions 3]

Each is the least of several runs of the real command, with everything that it starts, and with the byte code of all
modules, as an installed package has it; on a machine that is used otherwise too, CPU seconds grow as well.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

GOALS = {"plan, anew": 4.0, "plan, from the cache": 1.5, "plan, another cluster": 4.0, "help": 0.5, "refusal": 0.5}


def seconds(words: list[str], cache: Path, code: int = 0) -> float:
    """CPU seconds of one command with its own user cache."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(
        [sys.executable, "-m", "runner", *words], env=environment, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode != code:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=3)
    found: dict[str, list[float]] = {name: [] for name in GOALS}
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        seconds(["plan", "+recipe=llama_8b", f"hydra.run.dir={folder}/first"], cache)  # compiles all that it imports
        for number in range(parser.parse_args().repetitions):
            plan = ["plan", "+recipe=llama_8b", f"hydra.run.dir={folder}/runs/{number}"]
            for entry in (cache / "meshwright" / "plans").rglob("*.json"):
                entry.unlink()
            found["plan, anew"].append(seconds(plan, cache))
            found["plan, from the cache"].append(seconds([*plan[:-1], f"{plan[-1]}_again"], cache))
            found["plan, another cluster"].append(seconds([*plan[:-1], f"{plan[-1]}_two", "cluster.nodes=2"], cache))
            found["help"].append(seconds(["--help"], cache))
            found["refusal"].append(seconds(["plan", "+recipe=absent"], cache, code=2))
    for name, goal in GOALS.items():
        least = min(found[name])
        print(f"| {name} | {least:.1f} s | {goal:g} s | {'yes' if least <= goal else '**no**'} |")


if __name__ == "__main__":
    main()
