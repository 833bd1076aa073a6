"""OpenMPI's mpirun: one command, which reaches the hosts by itself and starts a process per rank.

MPI is not used: ranks only read their numbers from the environment. Its daemons are set to notice that a host is down
before the ranks do: one that still has to report the end of its ranks would wait for minutes.
"""

from __future__ import annotations

import os
import shlex

from runner.config.launch import Launch
from runner.launch.launchers.commands import Command, LaunchSite, Started
from runner.launch.launchers.connection import silence_of


def mpirun(launch: Launch, place: LaunchSite) -> Started:
    """One command for all ranks, host by host."""
    words = ["mpirun", "-np", str(place.world_size)]
    if launch.hosts:
        words += ["--host", ",".join(f"{host.name}:{len(host.ranks)}" for host in launch.hosts)]
        probe = max(1, int(silence_of(launch.timeout) / 6))
        settings = {
            "plm_rsh_agent": shlex.join(launch.remote),
            "oob_tcp_keepalive_time": str(probe),
            "oob_tcp_keepalive_intvl": str(probe),
            "oob_tcp_keepalive_probes": "3",
        }
        words += [word for name, value in settings.items() for word in ("--mca", name, value)]
        words += ["--wdir", str(place.directory)]
        words += [word for name in place.environment for word in ("-x", name)]
    else:
        words += ["--host", f"localhost:{place.world_size}"]
    words += ["--map-by", "slot", "--bind-to", "none"]
    if os.geteuid() == 0:
        words.append("--allow-run-as-root")
    return Started((Command((*words, *launch.options, place.python, *place.join)),))
