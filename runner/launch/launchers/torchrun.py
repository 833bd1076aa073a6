"""torchrun: an agent per host, which starts the ranks of that host and watches them.

With `launch.rendezvous=static` every agent is given its number; with c10d they find one another at the first host.
"""

from __future__ import annotations

from runner.config.launch import Launch
from runner.launch.launchers.commands import Command, LaunchSite, Started


def torchrun(launch: Launch, place: LaunchSite) -> Started:
    """One agent per host of `launch.hosts`, or one for this machine."""
    hosts: list[tuple[str | None, int]] = [(host.name, len(host.ranks)) for host in launch.hosts]
    hosts = hosts or [(None, place.world_size)]
    commands = []
    for number, (name, ranks) in enumerate(hosts):
        words = [place.python, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}", f"--nproc-per-node={ranks}"]
        if launch.rendezvous == "static":
            words += [
                f"--node-rank={number}",
                f"--master-addr={place.address}",
                f"--master-port={place.port}",
            ]
        else:
            words += [
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={place.address}:{place.port}",
                f"--rdzv-id={place.folder.name}",
                f"--rdzv-conf=is_host={int(number == 0)},join_timeout={max(1, round(launch.timeout))}",
            ]
        words += [f"--local-addr={name or place.address}", "--max-restarts=0", *launch.options]
        commands.append(Command((*words, *place.join), name, place.environment if name else {}))
    return Started(tuple(commands))
