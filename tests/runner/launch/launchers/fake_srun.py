"""A stand-in for Slurm's `srun`: starts the tasks of a step on the hosts of SPACES ({address: namespace}; unset: here)
with the variables that Slurm sets, and ends the step when one task fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

WITH_VALUE = (
    "--nodes",
    "--ntasks",
    "--ntasks-per-node",
    "--nodelist",
    "--kill-on-bad-exit",
    "--distribution",
    "--export",
)


def main(words: list[str]) -> int:
    options = {}
    while words[0].startswith("--"):
        name, _, value = words.pop(0).partition("=")
        options[name] = value
    unknown = set(options) - {*WITH_VALUE, "--chdir"}
    assert not unknown, f"srun has no {unknown}"
    spaces = json.loads(os.environ.get("SPACES", "{}"))
    nodes = options["--nodelist"].split(",") if "--nodelist" in options else list(spaces)
    nodes = nodes[: int(options["--nodes"])]
    per_node, count = int(options["--ntasks-per-node"]), int(options["--ntasks"])
    tasks = []
    for number in range(count):
        variables = {
            "SLURM_PROCID": str(number),
            "SLURM_NTASKS": str(count),
            "SLURM_LOCALID": str(number % per_node),
            "SLURM_NTASKS_PER_NODE": str(per_node),
            "SLURM_STEP_ID": "0",
        }
        host = ["ip", "netns", "exec", spaces[nodes[number // per_node]]] if spaces else []
        tasks.append(subprocess.Popen([*host, *words], env={**os.environ, **variables}, cwd=options["--chdir"]))
    while any(task.poll() is None for task in tasks) and not any(task.poll() for task in tasks):
        time.sleep(0.05)
    for task in tasks:
        task.kill()
    return max(task.wait() for task in tasks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
