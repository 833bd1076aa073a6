"""Addresses of this machine: name resolution, the address towards another host, and its interface.

Invariant: nothing here listens. What does listen binds to the address found here, never to all interfaces.
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
import sys
from contextlib import suppress

from runner.errors import ConfigError

LOOPBACK, LOOPBACK_6 = "127.0.0.1", "::1"
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface


def resolve(host: str, key: str = "launch.hosts") -> str:
    """The IPv4 or IPv6 address of a host name. Raises ConfigError, naming `key`, if there is none."""
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "it is no name of a host"
        raise ConfigError("MW702", f"{key}: the host {host!r} cannot be found: {reason}; give its address.") from None
    best = min(addresses, key=lambda entry: entry[0] != socket.AF_INET)  # gloo and NCCL support IPv4 best
    return str(best[4][0])


def is_loopback(address: str) -> bool:
    """Whether an address reaches this machine alone."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_here(address: str) -> bool:
    """Whether an address is one of this machine."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def towards(address: str) -> str:
    """The local address on the route to `address`; nothing is sent. Raises ConfigError if there is no route."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise ConfigError("MW702", f"there is no way from this machine to {address}: {error.strerror}.") from None
        return str(probe.getsockname()[0])


def loopback() -> str:
    """The address by which the ranks of this machine reach each other: that of IPv6 where there is no other. Raises
    ConfigError where there is none; they would time out."""
    try:
        return towards(LOOPBACK)
    except ConfigError as error:
        with suppress(ConfigError, OSError):  # no IPv6 in the kernel
            return towards(LOOPBACK_6)
        raise ConfigError(
            "MW702",
            f"ranks talk through this machine's loopback interface, which is down: {error} Bring it up (ip link set lo "
            "up), or start the command where there is one, not under unshare -n.",
        ) from None


def listener(address: str, port: int = 0) -> socket.socket:
    """A listening socket at `address` alone. Raises ConfigError if binding fails."""
    try:
        return socket.create_server((address, port), family=_family(address), backlog=4096)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            text = f"another process listens at {address} port {port}; choose another launch.port, everywhere the same."
        else:
            text = (
                f"this machine cannot listen at {address} port {port}: {error.strerror}; launch.address must be an "
                "address of this machine."
            )
        raise ConfigError("MW702", text) from None


def free_port(address: str, port: int) -> int:
    """A port of `address`, of this machine, at which nobody listens now: `port`, or any. Raises ConfigError."""
    with listener(address, port) as probe:
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str | None:
    """The name of the interface that has `address`; None where the system does not say."""
    if is_loopback(address):
        return "lo" if sys.platform == "linux" else None
    if sys.platform != "linux":
        return None
    if ":" in address:
        wanted = ipaddress.ip_address(address.partition("%")[0]).exploded.replace(":", "")
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            return next((line.split()[5] for line in file if line.split()[0] == wanted), None)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def variables(address: str) -> dict[str, str]:
    """The environment variables that name the interface of the host that has `address` to libraries of collectives.

    By itself gloo looks up the host name, which laptops often cannot resolve, and NCCL takes any interface that it
    finds.
    """
    interface = interface_of(towards(address))
    if interface is None:
        return {}
    if is_loopback(address):
        return {"GLOO_SOCKET_IFNAME": interface}  # NCCL has faster transports inside a machine
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
    }


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
