"""Injected faults, so that recovery can be tried before it is needed (`launch.faults`).

Each is injected once per run folder: a mark is written to disk first, so the restarted run is not hit again.
Invariant: a rank without a fault at the current step runs unmodified.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from runner.checkpoint import folder
from runner.config.launch import Fault, Phase
from runner.config.schema import Config
from runner.errors import ConfigError
from runner.launch.orders import RankContext
from strategies.runtime.communicator import Communicator

DAMAGE = ("corrupt", "truncate")
SYNC = os.fsync  # before a fault replaces it
CALLS = ("sum", "gather", "scatter", "exchange")
"""The calls of a communicator for which others wait."""
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # linux/sockios.h, linux/if.h
FULL = "/dev/full"
"""Takes nothing: every write that reaches it fails as on a full disk."""


def check(config: Config, world_size: int, steps: int) -> None:
    """Raises ConfigError for a fault that could not happen in a run of `world_size` ranks and `steps` steps."""
    for number, fault in enumerate(config.launch.faults):
        where = f"launch.faults.{number} ({fault.kind} in {fault.phase} of step {fault.step} on rank {fault.rank})"
        if fault.rank >= world_size:
            raise ConfigError("MW707", f"{where}: there are {world_size} ranks; choose one from 0 to {world_size - 1}.")
        if fault.step > steps:
            raise ConfigError("MW707", f"{where}: the run has {steps} steps; choose one from 1 to {steps}.")
        if config.parallel.elastic and fault.rank and fault.phase not in (phases := _phases(config, fault.rank)):
            raise ConfigError(
                "MW707",
                f"{where}: that never happens on this rank of mode parameter_server, which has the phases "
                f"{', '.join(phases)}; rank 0 saves, {', '.join(f'rank {one}' for one in config.server_ranks)} "
                f"serve{'s' if config.parallel.server.servers == 1 else ''}, the others work.",
            )
        if fault.phase == "collective" and world_size == 1:
            raise ConfigError(
                "MW707", f"{where}: one rank alone joins no collective; choose another phase or more ranks."
            )
        if fault.phase == "save" and not _saves(config, fault.step, steps):
            raise ConfigError(
                "MW707",
                f"{where}: nothing is saved after that step with checkpoint.every = {config.checkpoint.every} and "
                f"checkpoint.at_end = {config.checkpoint.at_end}; choose a step after which the run saves.",
            )


def _phases(config: Config, rank: int) -> tuple[Phase, ...]:
    """The phases of a server or a worker; collective is where a server has the sum of a step (sync) and where a worker
    has a gradient to push; optimizer where workers add up the gradients of what they keep."""
    section = config.parallel.server
    if rank not in config.server_ranks:
        phases: tuple[Phase, ...] = ("data", "forward", "backward", "collective")
        return phases if section.parameters is None else (*phases, "optimizer")
    return ("collective", "optimizer") if section.consistency == "sync" else ("optimizer",)


def _saves(config: Config, step: int, steps: int) -> bool:
    wanted = config.checkpoint
    if wanted.minutes is not None or wanted.best is not None:
        return True  # only the run itself knows
    return (wanted.every is not None and step % wanted.every == 0) or (wanted.at_end and step == steps)


class Faults:
    """The injected faults of `rank`, which runs one of `modules` in a step, and its `communicator`; only training has
    faults.

    Each has a mark, the file that records that it was injected: those of equal faults end with different numbers.
    """

    def __init__(self, config: Config, rank: RankContext, modules: Sequence[nn.Module], communicator: Communicator):
        self._modules, self._communicator, self._saved = modules, communicator, rank.run_dir / "checkpoints"
        faults = config.launch.faults if config.job.name == "train" else ()
        marks = {
            rank.run_dir / "faults" / f"{f.kind}-in-{f.phase}-of-{f.step}-on-{f.rank}-{faults[:place].count(f)}": f
            for place, f in enumerate(faults)
            if f.rank == rank.rank
        }
        self._due = {mark: fault for mark, fault in marks.items() if not mark.exists()}
        self._step = 0
        self._undo: list[Callable[[], None]] = []

    def begin(self, step: int) -> None:
        """Begin a step: prepare the faults to inject during it."""
        self.end()
        self._step = step
        for mark, fault in self._due.items():
            if fault.step == step and fault.phase in ("forward", "backward"):
                self._inside(mark, fault)
            elif fault.step == step and fault.phase == "collective":
                for name in CALLS:
                    self._before(self._communicator, name, mark, fault)

    def at(self, phase: Phase) -> None:
        """Inject the faults that are due in this phase of the step."""
        for mark, fault in [*self._due.items()]:
            if fault.step == self._step and fault.phase == phase:
                self._inject(mark)

    def saving(self) -> None:
        """Inject the faults due before a checkpoint is written."""
        for mark, fault in [*self._due.items()]:
            if fault.step != self._step or fault.phase != "save":
                continue
            if fault.kind == "disk_full":
                self._record(mark)
                self._undo.append(fill_disk(self._written(fault)))
            elif fault.kind not in DAMAGE:
                self._before(os, "fsync", mark, fault)

    def end(self) -> None:
        """Inject the faults that wait for a committed checkpoint, and those that could not be injected inside the
        step."""
        for mark, fault in [*self._due.items()]:
            saved = folder.target(self._saved, fault.step)
            if fault.step > self._step or (fault.phase == "save" and not saved.is_dir()):
                continue
            if fault.kind in DAMAGE:
                self._record(mark)
                damage(saved, cut=fault.kind == "truncate")
            elif fault.step == self._step:
                self._inject(mark)

    def _written(self, fault: Fault) -> Path:
        """The temporary name of the checkpoint of a fault."""
        return folder.hidden(folder.target(self._saved, fault.step))

    def _inside(self, mark: Path, fault: Fault) -> None:
        """Inject it in the second half of the module's units, or else at the end of the module."""

        def reached(*_: Any) -> None:
            self._inject(mark)

        def left(unit: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(reached)  # type: ignore[no-untyped-call]
                    return

        for module in self._modules:
            units = [unit for unit in module.modules() if unit is not module]
            half = units[len(units) // 2 :]
            if fault.phase == "forward":
                hooks = [unit.register_forward_pre_hook(reached) for unit in half]
                hooks.append(module.register_forward_hook(reached))
            else:
                hooks = [unit.register_forward_hook(left) for unit in (*half, module)]
            self._undo += [hook.remove for hook in hooks]

    def _before(self, owner: Any, name: str, mark: Path, fault: Fault) -> None:
        """Inject it before the next call of `owner.name`; in a save, once that of the fault's own checkpoint is being
        written, and not still the previous one."""
        own, plain = name in vars(owner), getattr(owner, name)

        def call(*args: Any, **named: Any) -> Any:
            if fault.phase != "save" or [self._written(fault)] == [*self._saved.glob(".step-*.partial")]:
                self._inject(mark)
            return plain(*args, **named)

        setattr(owner, name, call)
        self._undo.append(partial(setattr, owner, name, plain) if own else partial(delattr, owner, name))

    def _record(self, mark: Path) -> None:
        fault = self._due.pop(mark)
        mark.parent.mkdir(exist_ok=True)
        with mark.open("x", encoding="utf-8") as file:
            file.write(fault.model_dump_json() + "\n")
            file.flush()
            SYNC(file.fileno())
        print(f"injected fault: {fault.kind} in {fault.phase} of step {fault.step}", flush=True)

    def _inject(self, mark: Path) -> None:
        if mark not in self._due:
            return
        while self._undo:
            self._undo.pop()()
        fault = self._due[mark]
        self._record(mark)
        match fault.kind:
            case "kill":
                kill()
            case "hang":
                hang()
            case "raise":
                raise Injected(f"an injected fault, in {fault.phase} of step {fault.step}")
            case "network":
                assert fault.interface is not None
                take_down(fault.interface)


class Injected(RuntimeError):
    """The error that a fault of kind `raise` raises."""


def kill() -> NoReturn:
    """End this process as the kernel does when memory is short."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nothing runs after SIGKILL")


def hang() -> NoReturn:
    """Sleep forever, as a rank that hangs does."""
    while True:
        time.sleep(3600)


def damage(path: Path, *, cut: bool) -> Path:
    """Flip every bit of one byte in the middle of the largest file of the checkpoint `path`, or cut the file there.
    Returns the file."""
    largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    middle = largest.stat().st_size // 2
    if cut:
        os.truncate(largest, middle)
        return largest
    with largest.open("r+b") as file:
        flipped = os.pread(file.fileno(), 1, middle)[0] ^ 0xFF
        os.pwrite(file.fileno(), bytes([flipped]), middle)
    return largest


def fill_disk(folder: Path) -> Callable[[], None]:
    """Make writes of this process to files below `folder` fail from now on, as with a full disk. Returns a function
    that undoes it."""
    plain, inside = io.open, str(folder.absolute()) + os.sep

    def opened(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and set(mode) & set("wax+"):
            if os.path.abspath(os.fsdecode(file)).startswith(inside):
                return plain(FULL, mode.replace("x", "w"), *args, **named)
        return plain(file, mode, *args, **named)

    io.open = builtins.open = opened

    def undo() -> None:
        io.open = builtins.open = plain

    return undo


def take_down(interface: str) -> None:
    """Take a network interface of this host down, as `ip link set INTERFACE down` does. Raises OSError where there is
    no such interface, or no right to do it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = interface.encode()
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sh14x", name, 0))
        flags = struct.unpack("16sh14x", answer)[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", name, flags & ~_UP))
