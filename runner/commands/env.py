"""`run env`: versions, hardware and settings of this machine, as a block for an issue report.

Nothing that identifies a person or opens a door is printed: no host name, no paths of a home folder, and of environment
variables only those in `VARIABLES`.
"""

from __future__ import annotations

import fnmatch
import importlib.metadata
import os
import platform
from collections.abc import Iterator, Sequence

from runner.commands.doctor import DISTRIBUTIONS, GIB, LIBRARIES, OPTIONAL
from runner.errors import ConfigError
from runner.training.loggers import PACKAGES

VARIABLES = tuple(
    "CUDA_DEVICE_* CUDA_LAUNCH_BLOCKING CUDA_VISIBLE_DEVICES GLOO_SOCKET_IFNAME MKL_* NCCL_* OMP_* PYTHONHASHSEED "
    "PYTHONSAFEPATH PYTORCH_* TORCH_*".split()
)
"""Globs of the variables that change how a run computes or communicates."""


def run(words: Sequence[str]) -> int:
    """Print the block. Returns the exit code 0. Raises ConfigError for arguments."""
    if words:
        raise ConfigError("MW112", f"env takes nothing, but got {' '.join(words)!r}.")
    lines = list(_lines())
    width = max(len(name) for name, _ in lines)
    print("```text")
    for name, value in lines:
        print(f"{name:<{width}}  {value}")
    print("```")
    return 0


def _lines() -> Iterator[tuple[str, str]]:
    yield "meshwright", _version("meshwright")
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", f"{platform.platform()}, {' '.join(platform.libc_ver())}".rstrip(", ")
    for name in (*LIBRARIES, *OPTIONAL):
        yield name, _version(PACKAGES.get(name, DISTRIBUTIONS.get(name, name)))
    yield "processor", f"{platform.machine()}, {os.cpu_count()} cores"
    yield "memory", f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / GIB:.1f} GiB"
    try:
        yield from _devices()
    except Exception as error:  # a broken installation may raise anything, and is what the report is about
        yield "torch", f"{type(error).__name__}: {' '.join(str(error).split())}"
    for name in sorted(os.environ):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in VARIABLES):
            yield name, os.environ[name]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _devices() -> Iterator[tuple[str, str]]:
    """What torch was built for, and the GPUs that it sees."""
    import torch
    from torch import distributed

    yield "built for", f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    kinds = [f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, sm_{gpu.major}{gpu.minor}" for gpu in gpus]
    yield "GPUs", "; ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"
    if not distributed.is_available():
        yield "collectives", "none"
        return
    backends = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    names = [name for name, present in backends.items() if present]
    if gpus and backends["nccl"]:
        names[-1] += " " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    yield "collectives", ", ".join(names) or "none"
