"""`run doctor`: can this machine and installation run? One line per check, and exit code 1 if one failed.

Checks are independent: a library that fails to import fails only its own line.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from runner.errors import ConfigError
from runner.packages import ROOT
from runner.training.loggers import PACKAGES

LIBRARIES = ("torch", "deepspeed", "hydra", "omegaconf", "pydantic", "numpy", "tqdm")
DISTRIBUTIONS = {"hydra": "hydra-core"}
OPTIONAL = {
    **{name: f"report.loggers=[{name}]" for name in PACKAGES},
    "transformers": "model.target=transformers.X",
}
BESIDE_RUNNER = ("conf", "recipes", "models", "strategies")
GIB = 2**30
LEAST_DISK, LEAST_SHARED_MEMORY = 1 * GIB, GIB // 16
SHARED_MEMORY = Path("/dev/shm")


class CheckFailed(Exception):
    """The error that a check found, and its remedy."""


def run(words: Sequence[str]) -> int:
    """Print every check. A word is a checkpoint, which is checked instead.

    Returns:
        The exit code: 0 if all are ok, else 1.

    Raises:
        ConfigError: There are more arguments, or one that is not a checkpoint.
    """
    if len(words) > 1:
        raise ConfigError("MW112", f"doctor takes one checkpoint or nothing, but got {' '.join(words)!r}.")
    if words:
        from runner.commands import doctor_checkpoint  # imports torch, which is one of the things to be checked

        return doctor_checkpoint.run(Path(words[0]))
    checks: dict[str, Callable[[], str]] = {
        "python": lambda: f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **{name: partial(_imported, name) for name in LIBRARIES},
        **{name: partial(_optional, name, use) for name, use in OPTIONAL.items()},
        **{"devices": _devices, "collectives": _collectives, "compiler": _compiler},
        **{name: partial(_placement, name) for name in BESIDE_RUNNER},
        **{"disk": _disk, "shared memory": _shared_memory},
    }
    return int(not all([_passes(name, check) for name, check in checks.items()]))


def _passes(name: str, check: Callable[[], str]) -> bool:
    """Run one check and print its line; output of libraries during import is dropped."""
    dropped = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(dropped), contextlib.redirect_stderr(dropped):
            warnings.simplefilter("ignore")
            result, passed = check(), True
    except CheckFailed as error:
        result, passed = str(error), False
    except Exception as error:  # a broken installation may raise anything
        result, passed = f"{type(error).__name__}: {' '.join(str(error).split())}", False
    print(f"{'ok' if passed else 'failed':<6}  {name:<13}  {result}", flush=True)
    return passed


def _imported(name: str) -> str:
    importlib.import_module(name)
    return importlib.metadata.version(DISTRIBUTIONS.get(name, name))


def _optional(name: str, use: str) -> str:
    absent = importlib.util.find_spec(name) is None
    return f"absent; only {use} needs it" if absent else importlib.metadata.version(PACKAGES.get(name, name))


def _compiler() -> str:
    import torch

    from strategies.runtime.compiled import missing

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if lacking := missing(device):
        return f"absent; only train.compile=true needs it: {lacking}"
    return f"torch.compile can be used on {device}"


def _devices() -> str:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    listed = ", ".join(f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)) or "no GPU"
    return f"{os.cpu_count()} CPU cores, {listed}"


def _collectives() -> str:
    import torch
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        raise CheckFailed("torch was built without gloo, which ranks on CPU need")
    nccl = distributed.is_nccl_available()
    if torch.cuda.is_available() and not nccl:
        raise CheckFailed("there are GPUs, but torch was built without nccl, which ranks on GPU need")
    return "gloo, nccl" if nccl else "gloo"


def _placement(name: str) -> str:
    """The packages have common names: another `models` in the way would be taken for ours."""
    package = importlib.util.find_spec(name)
    folders = [Path(folder).resolve() for folder in (package.submodule_search_locations or ())] if package else []
    if (wanted := ROOT / name) not in folders:
        where = ", ".join(map(str, folders)) or "nowhere"
        raise CheckFailed(f"found {where} instead of {wanted}; start `run` elsewhere or set PYTHONSAFEPATH=1")
    return str(wanted)


def _disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free
    if free < LEAST_DISK:
        raise CheckFailed(
            f"{free / GIB:.1f} GiB free here; runs and checkpoints need {LEAST_DISK / GIB:.0f} GiB or more"
        )
    return f"{free / GIB:.1f} GiB free here"


def _shared_memory() -> str:
    if not SHARED_MEMORY.is_dir():
        return f"no {SHARED_MEMORY}; the system shares memory in another way"
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < LEAST_SHARED_MEMORY:
        raise CheckFailed(
            f"{free / 2**20:.0f} MiB free in {SHARED_MEMORY}; {LEAST_SHARED_MEMORY / 2**20:.0f} are needed"
        )
    return f"{free / GIB:.1f} GiB free"
