"""The ranks started on one host, and the assignment of all ranks of a launch to hosts."""

from __future__ import annotations

from runner.config.launch import Launch
from runner.errors import ConfigError
from runner.launch import network
from runner.launch.local import LocalRanks

USUAL_PORT = 29500


def part_by_hand(launch: Launch) -> LocalRanks | None:
    """The ranks that `launch.host` or `launch.rank` makes this command start; None if neither is set.

    Raises ConfigError where there are none, or the first host cannot be found.
    """
    if not launch.by_hand:
        return None
    assert launch.port is not None
    first = next(host for host in launch.hosts if 0 in host.ranks)
    chosen = [
        (rank, device)
        for host in launch.hosts
        for rank, device in zip(host.ranks, host.devices, strict=True)
        if (rank == launch.rank if launch.host is None else host.name == launch.host)
    ]
    if not chosen:
        raise ConfigError("MW701", f"the table of ranks has no host {launch.host!r} and no rank {launch.rank}.")
    ranks, devices = zip(*chosen, strict=True)
    return LocalRanks(ranks, devices, network.resolve(launch.address or first.name), launch.port)


def address_of(launch: Launch) -> str:
    """The address by which the hosts of a launch reach this machine: the one that `launch.address` names, else the one
    on the way to the first host; loopback where no hosts are configured. Raises ConfigError if there is no such
    address."""
    if launch.address is not None:
        return network.resolve(launch.address, "launch.address")
    names = [host.name for host in launch.hosts]
    if not names and launch.nodes in (None, 1):
        return network.loopback()
    if not names:
        raise ConfigError(
            "MW704",
            f"launch.nodes = {launch.nodes}: the hosts must know where to find this command; set launch.address to "
            "this machine's name or address in their network.",
        )
    addresses = [network.resolve(name) for name in names]
    others = [address for address in addresses if not network.is_loopback(address)]
    if others and len(others) < len(addresses):
        raise ConfigError(
            "MW704",
            f"launch.hosts has {', '.join(names)}: the other hosts cannot reach one that is called localhost; give "
            "names or addresses that hold in the whole network.",
        )
    return network.towards(others[0]) if others else network.loopback()


def meeting(launch: Launch, *, resolve: bool = True) -> tuple[str, int]:
    """The rendezvous address and port: those of the first host. A port that is not configured is free where the first
    host is this machine, else the usual one. Without `resolve` no machine is looked at: the name, and the usual
    port. Raises ConfigError where another process has the port."""
    alone = network.loopback() if resolve else network.LOOPBACK
    address = launch.hosts[0].name if launch.hosts else alone
    address = network.resolve(address) if resolve else address
    if resolve and network.is_here(address):
        return address, network.free_port(address, launch.port or 0)
    return address, launch.port or USUAL_PORT


def seats_of(launch: Launch) -> tuple[tuple[str, int, int, int], ...]:
    """Per rank: its host, its local rank, how many ranks are there, its device."""
    seats = {
        rank: (host.name, local, len(host.ranks), device)
        for host in launch.hosts
        for local, (rank, device) in enumerate(zip(host.ranks, host.devices, strict=True))
    }
    return tuple(seats[rank] for rank in sorted(seats))
