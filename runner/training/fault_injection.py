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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor, nn

from runner.checkpoint import folder
from runner.config.faults import Fault, Phase
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


def _saves(config: Config, step: int, steps: int) -> bool:
    wanted = config.checkpoint
    if wanted.minutes is not None or wanted.best is not None:
        return True  # only the run itself knows
    return (wanted.every is not None and step % wanted.every == 0) or (wanted.at_end and step == steps)


class Faults:
    """The injected faults of `rank`, which runs `module` and its `communicator`; only training has faults."""

    def __init__(self, config: Config, rank: RankContext, module: nn.Module, communicator: Communicator) -> None:
        self._marks, self._saved = rank.run_dir / "faults", rank.run_dir / "checkpoints"
        self._module, self._communicator = module, communicator
        wanted = config.launch.faults if config.job.name == "train" else ()
        mine = [(wanted[:place].count(fault), fault) for place, fault in enumerate(wanted) if fault.rank == rank.rank]
        self._due = [(number, fault) for number, fault in mine if not self._mark(number, fault).exists()]
        self._step = 0
        self._undo: list[Callable[[], None]] = []

    def _mark(self, number: int, fault: Fault) -> Path:
        """The file that records that a fault, the `number`-th of its kind, was injected."""
        return self._marks / f"{fault.kind}-in-{fault.phase}-of-{fault.step}-on-{fault.rank}-{number}"

    def begin(self, step: int) -> None:
        """Begin a step: prepare the faults to inject during it."""
        if not self._due:
            return
        self._late()
        self._step = step
        for number, fault in self._due:
            if fault.step == step and fault.phase in ("forward", "backward"):
                self._inside(number, fault)
            elif fault.step == step and fault.phase == "collective":
                for name in CALLS:
                    self._before(self._communicator, name, number, fault)

    def at(self, phase: Phase) -> None:
        """Inject the faults that are due in this phase of the step."""
        for number, fault in list(self._due):
            if fault.step == self._step and fault.phase == phase:
                self._happen(number, fault)

    def saving(self) -> None:
        """Inject the faults due before a checkpoint is written."""
        for number, fault in list(self._due):
            if fault.step != self._step or fault.phase != "save":
                continue
            if fault.kind == "disk_full":
                self._remember(number, fault)
                self._undo.append(fill_disk(self._written(fault)))
            elif fault.kind not in DAMAGE:
                self._before(os, "fsync", number, fault)

    def end(self) -> None:
        """Inject the faults due after the last step is done and saved."""
        self._late()

    def _written(self, fault: Fault) -> Path:
        """The temporary name of the checkpoint of a fault."""
        return folder.hidden(folder.target(self._saved, fault.step))

    def _is_written(self, fault: Fault) -> bool:
        """Whether that checkpoint is being written, and not still the previous one."""
        return [self._written(fault)] == list(self._saved.glob(".step-*.partial"))

    def _late(self) -> None:
        """Inject the faults that wait for a committed checkpoint, and those that could not be injected inside the
        step."""
        for number, fault in list(self._due):
            saved = folder.target(self._saved, fault.step)
            if fault.step > self._step or (fault.phase == "save" and not saved.is_dir()):
                continue
            if fault.kind in DAMAGE:
                self._remember(number, fault)
                damage(saved, cut=fault.kind == "truncate")
            elif fault.step == self._step:
                self._happen(number, fault)

    def _inside(self, number: int, fault: Fault) -> None:
        """Inject it in the second half of the module's units, or else at the end of the module."""
        units = [unit for unit in self._module.modules() if unit is not self._module]
        half = units[len(units) // 2 :]

        def reached(*_: Any) -> None:
            self._happen(number, fault)

        def left(unit: nn.Module, inputs: Any, output: Any) -> None:
            learning = [one for one in _tensors(output) if one.requires_grad]
            for tensor in learning[:1]:
                tensor.register_hook(reached)  # type: ignore[no-untyped-call]

        if fault.phase == "forward":
            hooks = [unit.register_forward_pre_hook(reached) for unit in half]
            hooks.append(self._module.register_forward_hook(reached))
        else:
            hooks = [unit.register_forward_hook(left) for unit in (*half, self._module)]
        self._undo += [hook.remove for hook in hooks]

    def _before(self, holder: Any, name: str, number: int, fault: Fault) -> None:
        """Inject it before the next call of `holder.name`."""
        own, plain = name in vars(holder), getattr(holder, name)

        def call(*args: Any, **named: Any) -> Any:
            if fault.phase != "save" or self._is_written(fault):
                self._happen(number, fault)
            return plain(*args, **named)

        setattr(holder, name, call)
        self._undo.append((lambda: setattr(holder, name, plain)) if own else (lambda: delattr(holder, name)))

    def _remember(self, number: int, fault: Fault) -> None:
        self._due.remove((number, fault))
        self._marks.mkdir(exist_ok=True)
        with self._mark(number, fault).open("x", encoding="utf-8") as mark:
            mark.write(fault.model_dump_json() + "\n")
            mark.flush()
            SYNC(mark.fileno())
        print(f"injected fault: {fault.kind} in {fault.phase} of step {fault.step}", flush=True)

    def _happen(self, number: int, fault: Fault) -> None:
        if (number, fault) not in self._due:
            return
        while self._undo:
            self._undo.pop()()
        self._remember(number, fault)
        if fault.kind == "kill":
            kill()
        if fault.kind == "hang":
            hang()
        if fault.kind == "raise":
            raise Injected(f"an injected fault, in {fault.phase} of step {fault.step}")
        assert fault.kind == "network" and fault.interface is not None
        take_down(fault.interface)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [one for item in value for one in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []


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
        file.seek(middle)
        byte = file.read(1)
        file.seek(middle)
        file.write(bytes([byte[0] ^ 0xFF]))
    return largest


def fill_disk(folder: Path) -> Callable[[], None]:
    """From now on, writes of this process to files below `folder` fail with a full disk. Returns a function that undoes
    it."""
    plain, inside = io.open, str(folder.absolute()) + os.sep

    def opened(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and set(mode) & set("wax+") and _below(file, inside):
            return plain(FULL, mode.replace("x", "w"), *args, **named)
        return plain(file, mode, *args, **named)

    io.open = builtins.open = opened

    def undo() -> None:
        io.open = builtins.open = plain

    return undo


def _below(file: str | os.PathLike[Any], inside: str) -> bool:
    return os.path.abspath(os.fsdecode(file)).startswith(inside)


def take_down(interface: str) -> None:
    """Take a network interface of this host down, as `ip link set INTERFACE down` does. Raises OSError where there is
    no such interface, or no right to do it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = interface.encode()
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sh14x", name, 0))
        flags = struct.unpack("16sh14x", answer)[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", name, flags & ~_UP))
