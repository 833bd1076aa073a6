"""`run calibrate [FILE] [--force]`: measure this machine on `world_size` local ranks and write it down as a cluster.

The file is read with `cluster.file=FILE`, or, in a folder `cluster/` of `--config-dir DIR`, with `cluster=NAME`. It is
written when all is measured, at once or not at all. Invariant: without `--force` nothing is overwritten but what this
verb has written, which its first line says.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from runner import launch
from runner.command.folders import remove_if_unused
from runner.errors import ConfigError, RunFailed
from runner.schema import Config
from runner.training.timeline import begin

if TYPE_CHECKING:
    from runner.planning.calibration import Measured
    from strategies.cost.laws import Fit


MARK = "measured by `run calibrate`"
"""In the first line of what is written."""
STARTUP = 5.0
"""Seconds of the process before the verb that count, at most: a job of a sweep has no start of its own."""
ENDING = 1.0
"""Seconds for ranks to end and the file to be written."""


def run(config: Config, run_dir: Path) -> float | None:
    """Measure, fit, write the file, tell the constants. Returns the largest middle error of what was fitted.

    Raises RunFailed if the times do not fit the laws at all, and ConfigError for a file that cannot be written.
    """
    started = time.monotonic() - min(time.time() - begin()[0][1], STARTUP)
    with _written(Path(config.calibrate.file), config.calibrate.force) as partial:
        text, error = _measured(config, run_dir, started)
        partial.write_text(text, encoding="utf-8")
    print(text, end="")
    took = time.monotonic() - started
    if took > config.calibrate.seconds + ENDING:
        print(f"calibrate: the least there is to measure took {took:.0f} s, more than calibrate.seconds")
    print(f"calibrate: written to {config.calibrate.file}; price plans with cluster.file={config.calibrate.file}")
    return error


@contextmanager
def _written(name: Path, force: bool) -> Iterator[Path]:
    """A new file beside `name` that takes its place at the end of the block, if nothing of the user's is there: a link
    is followed, and only regular files are replaced. Raises ConfigError otherwise, before the block where it can."""
    what = f"calibrate.file = {str(name)!r}"
    file = Path(os.path.realpath(name))
    partial = file.with_name(f".{file.name}.{os.getpid()}.part")
    _check(name, file, what, force)
    try:
        partial.open("x", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError(f"{what} cannot be written there: {error.strerror}.") from None
    try:
        yield partial
        _check(name, file, what, force)  # it may have appeared since
        os.replace(partial, file)
    except OSError as error:
        raise ConfigError(f"{what} cannot be written there: {error.strerror}.") from None
    finally:
        partial.unlink(missing_ok=True)


def _check(name: Path, file: Path, what: str, force: bool) -> None:
    if not file.parent.is_dir() or file.is_dir():
        raise ConfigError(f"{what} cannot be written there; name a file in a folder.")
    if not file.exists():
        if name.is_symlink() and not force:
            raise ConfigError(f"{what} is a link to {file}, which does not exist; name another file, or add --force.")
        return
    if not stat.S_ISREG(file.stat().st_mode):
        raise ConfigError(f"{what} is no regular file; name another one.")
    if force:
        return
    try:
        with file.open(encoding="utf-8") as content:
            ours = MARK in content.readline(200)
    except (OSError, UnicodeDecodeError):
        ours = False
    if not ours:
        raise ConfigError(
            f"{what} exists already and was not written by `run calibrate`; name another file, or add --force to "
            "overwrite it."
        )


def _measured(config: Config, run_dir: Path, started: float) -> tuple[str, float]:
    """The content of the file, and the largest middle error."""
    launch.warm()
    from runner.planning.prepare import device_of
    from strategies.cost.laws import fit

    device, ranks = device_of(config)
    who = f"{ranks} rank{'s' * (ranks > 1)} on {device}"
    print(f"calibrate: {who}, about {config.calibrate.seconds:g} seconds", flush=True)
    try:
        measured = launch.run_ranks(
            "runner.planning.calibration:measure",
            {"until": started + config.calibrate.seconds - ENDING},
            world_size=ranks,
            run_dir=run_dir,
            device=device,
            timeout=config.launch.timeout,
            threads=config.launch.threads,
        )
    except KeyboardInterrupt:
        shutil.rmtree(run_dir / "ranks", ignore_errors=True)
        remove_if_unused(run_dir)
        raise
    try:
        found = fit(measured.products, measured.copies, measured.calls)
    except ValueError as error:
        raise RunFailed(f"calibrate: {error} (calibrate.seconds = {config.calibrate.seconds:g}).") from None
    text = described(Path(config.calibrate.file).stem, measured, found)
    return text, max(error.middle for error in found.errors.values())


def described(name: str, measured: Measured, found: Fit) -> str:
    """The content of the file: a cluster of one level, with the fit's errors as comments."""
    world, gpu = measured.world_size, measured.device == "cuda"
    links = dict(found.links)
    errors = {what: f"fitted within {one.middle:.0%}, at worst {one.worst:.0%}" for what, one in found.errors.items()}
    lines = [
        f"# {world} rank{'s' * (world > 1)} on {measured.device}, {MARK}: every number is that of",
        "# one rank while all are busy. Rates are bytes or flops per second and one way, times are seconds.",
        f"name: {name}",
        "nodes: null",
        "file: null",
        "machine:",
        "  levels:",
        f"    {'gpu' if gpu else 'process'}:",
        f"      size: {world}",
    ]
    first = links.get("all_reduce")
    lines += [f"      {line}" for line in _link(first.bandwidth, first.latency, first.call)] if first else [
        "      bandwidth: 1.0e+9  # nobody to talk to", "      latency: 0.0", "      call: 0.0"
    ]  # fmt: skip
    lines.append("      kinds:" if links else "      kinds: {}")
    for kind, link in links.items():
        lines.append(f"        {kind}:  # {errors[kind]}")
        lines += [f"          {line}" for line in _link(link.bandwidth, link.latency, link.call)]
    lines.append("  flops:")
    lines += [f"    {dtype}: {rate:.3e}  # {errors[f'matmul {dtype}']}" for dtype, rate in found.flops.items()]
    lines += [
        f"  memory: {measured.memory:.3e}",
        f"  memory_bandwidth: {found.memory_bandwidth:.3e}  # {errors['memory']}",
        "  achieved: {flops: 1.0, memory: 1.0, links: 1.0}  # measured, not peak",
        f"  launch: {measured.launch:.3e}",
        f"  view: {measured.view:.3e}",
        f"  overlap: {measured.overlap:.2f}",
        f"  algorithms: [{'ring, tree' if gpu else 'ring'}]",
    ]
    return "\n".join(lines) + "\n"


def _link(bandwidth: float, latency: float, call: float) -> list[str]:
    return [f"bandwidth: {bandwidth:.3e}", f"latency: {latency:.3e}", f"call: {call:.3e}"]
