"""Slurm: `srun` starts a process per rank, in a job or from a login node; a script for `sbatch` repeats the command.

In a job this command runs once, on its first node: it prepares, and its srun starts the ranks as a step of the job.
"""

from __future__ import annotations

import shlex

from runner.config.launch import Launch
from runner.launch.launchers.commands import Command, LaunchSite, Started

REPEATED = "launch.dry_run"


def slurm(launch: Launch, place: LaunchSite) -> Started:
    """The step, and the script of a job that has it."""
    nodes = len(launch.hosts) or launch.nodes or 1
    resources = [f"--nodes={nodes}", f"--ntasks={place.world_size}", f"--ntasks-per-node={place.world_size // nodes}"]
    if launch.hosts:
        resources.append(f"--nodelist={','.join(host.name for host in launch.hosts)}")
    step = ["srun", *resources, "--kill-on-bad-exit=1", "--distribution=block", "--export=ALL"]
    step += [f"--chdir={place.directory}", *launch.options]
    command = Command((*step, place.python, *place.join))
    repeated = [word for word in place.overrides if not word.startswith(REPEATED)]
    script = "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {word}" for word in ("--job-name=meshwright", *resources)),
            f"cd {shlex.quote(str(place.directory))}",
            "unset SLURM_PROCID  # of the script itself, which is no rank",
            shlex.join(["exec", place.python, *place.module("runner"), "train", *repeated]),
            "",
        ]
    )
    return Started((command,), script=script)
