"""Simulated hosts: network namespaces of this machine, each with its own address, joined by a bridge.

They share the file system but no network, not even loopback. Needs root and the program `ip`. Invariant: `close`
removes everything that was created, and kills every process that still runs inside.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

NEEDED = (
    "hosts of tests are network namespaces, which need root and the program `ip`: run the tests as root, after "
    "`apt-get install iproute2`, or leave them out with --ignore=tests/runner/launch/launchers"
)


class Hosts:
    """`count` hosts; `names` are their addresses. A test starts its command on the first one."""

    def __init__(self, count: int, folder: Path) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None:
            raise RuntimeError(NEEDED)
        remove_left()
        tag = f"{os.getpid()}"
        subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.bridge = f"mw{tag}"
        self.namespaces = {f"{subnet}.{number + 1}": f"mw{tag}-{number}" for number in range(count)}
        self.folder = folder
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        return list(self.namespaces)

    def _make(self) -> None:
        # the bridge is in a separate namespace, so the machine's firewall and routes do not change
        ip("netns", "add", self.bridge)
        ip("-n", self.bridge, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.bridge, "link", "set", "bridge", "up")
        for number, (address, namespace) in enumerate(self.namespaces.items()):
            ip("netns", "add", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
            ip(
                "-n",
                namespace,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                f"p{number}",
                "netns",
                self.bridge,
            )
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", namespace, "link", "set", "eth0", "up")
            ip("-n", self.bridge, "link", "set", f"p{number}", "master", "bridge", "up")
        self._write_ssh()

    def _write_ssh(self) -> None:
        """A program `ssh` that enters the namespace of an address."""
        cases = "\n".join(f"  {address}) space={name};;" for address, name in self.namespaces.items())
        self.program(
            "ssh",
            'while :; do case "$1" in\n'
            "  -o|-p|-l|-i) shift 2;;\n"
            "  -*) shift;;\n"
            "  *) break;;\n"
            "esac; done\n"
            f'case "$1" in\n{cases}\n'
            '  *) echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255;;\n'
            "esac\n"
            "shift\n"
            'exec ip netns exec "$space" sh -c "$*"',
        )

    def program(self, name: str, script: str) -> None:
        """Install a program of that name for the commands that are started with `environment`."""
        file = self.folder / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        file.chmod(0o755)

    def environment(self) -> dict[str, str]:
        """The environment of a command that reaches the hosts through the program `ssh`."""
        return {"PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def inside(self, name: str, words: list[str]) -> list[str]:
        """The words that run a command on the host `name`."""
        return ["ip", "netns", "exec", self.namespaces[name], *words]

    def cut_off(self, name: str) -> None:
        """Cut the host's network link without closing any connection."""
        ip("-n", self.bridge, "link", "set", f"p{self.names.index(name)}", "down")

    def bring_back(self, name: str) -> None:
        ip("-n", self.bridge, "link", "set", f"p{self.names.index(name)}", "up")

    def processes(self) -> list[int]:
        """All processes on any of the hosts."""
        outputs = [
            subprocess.run(["ip", "netns", "pids", name], capture_output=True, encoding="utf-8").stdout
            for name in self.namespaces.values()
        ]
        return [int(pid) for text in outputs for pid in text.split()]

    def empty(self, seconds: float) -> bool:
        """Whether no process is left on any host after a few seconds."""
        until = time.monotonic() + seconds
        while self.processes() and time.monotonic() < until:
            time.sleep(0.1)
        return not self.processes()

    def close(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        for name in (*self.namespaces.values(), self.bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def remove_left() -> None:
    """Remove the hosts of killed tests."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, encoding="utf-8").stdout
    for name in re.findall(r"^mw\d+(?:-\d+)?", listed, re.MULTILINE):
        if not Path(f"/proc/{name[2:].partition('-')[0]}").exists():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ip(*words: str) -> None:
    ended = subprocess.run(["ip", *words], capture_output=True, encoding="utf-8")
    if ended.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {ended.stderr.strip()}. {NEEDED}")
