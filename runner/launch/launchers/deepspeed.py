"""DeepSpeed's launcher: it reads a hostfile, reaches the hosts by pdsh and ssh, and starts a process per rank.

An option keeps it from adding its own arguments to the program. The library itself is not imported here.
"""

from __future__ import annotations

from runner.config.launch import Launch
from runner.launch.launchers.commands import JOIN, Command, LaunchSite, Started

HOSTFILE = "hostfile"


def deepspeed(launch: Launch, place: LaunchSite) -> Started:
    """One command, and the hostfile that it reads."""
    words = [place.python, "-m", "deepspeed.launcher.runner", f"--hostfile={place.folder / HOSTFILE}"]
    words += [f"--master_addr={place.address}", f"--master_port={place.port}"]
    words += ["--force_multi"] if len(launch.hosts) > 1 else ["--no_ssh_check"]
    words += ["--no_local_rank", *launch.options, *place.module(JOIN, "--module"), str(place.folder)]
    content = "".join(f"{host.name} slots={len(host.ranks)}\n" for host in launch.hosts)
    return Started((Command(tuple(words)),), {HOSTFILE: content})
