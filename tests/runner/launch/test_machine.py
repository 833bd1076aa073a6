"""The resources of a machine, read from made-up systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.planning import capacity as machine

MIB = 2**20
HOST = {
    "proc/meminfo": "MemTotal: 2048 kB\nMemAvailable: 1048576 kB\nSwapFree: 0 kB\n",
    "proc/loadavg": "0.1 0.2 0.3 2/300 4711\n",
    "proc/sys/kernel/threads-max": "9000\n",
    "proc/sys/kernel/pid_max": "4096\n",
}
V2 = {
    "proc/self/cgroup": "0::/outer/inner\n",
    "sys/fs/cgroup/outer/inner/memory.max": "max\n",
    "sys/fs/cgroup/outer/inner/memory.current": f"{100 * MIB}\n",
    "sys/fs/cgroup/outer/memory.max": f"{512 * MIB}\n",
    "sys/fs/cgroup/outer/memory.current": f"{300 * MIB}\n",
    "sys/fs/cgroup/outer/memory.stat": f"anon 5\ninactive_file {20 * MIB}\n",
    "sys/fs/cgroup/outer/inner/pids.max": "100\n",
    "sys/fs/cgroup/outer/inner/pids.current": "40\n",
}
V1 = {
    "proc/self/cgroup": "9:name=systemd:/\n8:pids:/\n4:cpu,memory:/on/the/host\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{256 * MIB}\n",  # in a container the path is not visible
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{200 * MIB}\n",
    "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {10 * MIB}\n",
    "sys/fs/cgroup/pids/pids.max": "max\n",
    "sys/fs/cgroup/pids/pids.current": "12\n",
}


def system(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("files", "memory", "threads"),
    [
        ({}, None, None),
        (HOST, 1024 * MIB, 3796),
        (HOST | {"proc/meminfo": "MemAvailable: 1024 kB\nSwapFree: 1024 kB\n"}, 2 * MIB, 3796),
        (HOST | V2, 232 * MIB, 60),
        (HOST | V1, 66 * MIB, 3796),
    ],
    ids=["nothing known", "no limits", "swap", "version 2", "version 1"],
)
def test_what_is_at_hand(tmp_path: Path, files: dict[str, str], memory: int | None, threads: int | None) -> None:
    root = system(tmp_path, files)
    assert machine.memory_at_hand(root) == memory
    assert machine.threads_at_hand(root) == threads
