"""A stand-in for OpenMPI's `mpirun` on one machine: starts the processes with the variables that OpenMPI sets."""

from __future__ import annotations

import os
import subprocess
import sys

WITH_VALUE = {"-np": 1, "--host": 1, "--map-by": 1, "--bind-to": 1, "--wdir": 1, "-x": 1, "--mca": 2}


def main(words: list[str]) -> int:
    count = 0
    while words[0].startswith("-"):
        name = words.pop(0)
        values, words = words[: WITH_VALUE.get(name, 0)], words[WITH_VALUE.get(name, 0) :]
        assert values or name == "--allow-run-as-root", f"mpirun has no {name}"
        count = int(values[0]) if name == "-np" else count
    ranks = []
    for rank in range(count):
        variables = {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": str(count),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(count),
        }
        ranks.append(subprocess.Popen(words, env={**os.environ, **variables}))
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
