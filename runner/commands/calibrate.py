"""`run calibrate [FILE] [--force]`: measure this machine on `world_size` local ranks and write it down as a cluster.

The file is read with `cluster.file=FILE`, or, in a folder `cluster/` of `--config-dir DIR`, with `cluster=NAME`. It is
written atomically when all is measured. Invariant: without `--force` nothing is overwritten but what this verb has
written, which its first line says.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from runner import launch
from runner.cli.run_folders import remove_if_unused
from runner.config.schema import Config
from runner.errors import ConfigError, RunFailed
from runner.launch.startup import begin

if TYPE_CHECKING:
    from runner.launch.orders import RankContext
    from runner.planning.calibration import Measured
    from strategies.cost.calibration_fit import Fit
    from strategies.cost.cluster import Cluster, Link

T = TypeVar("T")
MARK = "measured by `run calibrate`"
"""In the first line of a file that calibrate writes."""
PRELOAD = (
    *("torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes"),
    *("runner.launch.worker", "runner.commands.calibrate", "runner.planning.calibration"),
)
"""What its ranks need, backward too: much less than those that train, which leaves more time to measure."""
ENDING = 1.7
"""Seconds that are left for the ranks to end, the file to be written, and this process to end."""


def run(config: Config, run_dir: Path) -> float | None:
    """Measure, fit, write the file, print the constants. Returns the largest median error of what was fitted.

    Raises:
        RunFailed: There was no time to measure anything.
        ConfigError: The file cannot be written.
    """
    started = time.monotonic() - (time.time() - begin()[0][1])
    with _written(Path(config.calibrate.file), config.calibrate.force) as partial:
        text, error = _measured(config, run_dir, started)
        partial.write_text(text, encoding="utf-8")
    print(text, end="")
    if (took := time.monotonic() - started) > config.calibrate.seconds:
        print(f"calibrate: took {took:.1f} seconds, because the machine is busy")
    print(f"calibrate: written to {config.calibrate.file}; price plans with cluster.file={config.calibrate.file}")
    return error


@contextmanager
def _written(name: Path, force: bool) -> Iterator[Path]:
    """A new file beside `name` that takes its place at the end of the block, unless a file of the user is there: a link
    is followed, and only regular files are replaced. Raises ConfigError otherwise, before the block where it can."""
    what = f"calibrate.file = {str(name)!r}"
    file = Path(os.path.realpath(name))
    partial = file.with_name(f".{file.name}.{os.getpid()}.part")
    _check(name, file, what, force)
    try:
        partial.open("x", encoding="utf-8").close()
    except OSError as error:
        raise ConfigError("MW806", f"{what} cannot be written there: {error.strerror}.") from None
    try:
        yield partial
        _check(name, file, what, force)  # it may have appeared since
        os.replace(partial, file)
    except OSError as error:
        raise ConfigError("MW806", f"{what} cannot be written there: {error.strerror}.") from None
    finally:
        partial.unlink(missing_ok=True)


def _check(name: Path, file: Path, what: str, force: bool) -> None:
    fault = None
    if not file.parent.is_dir() or file.is_dir():
        fault = "cannot be written there; name a file in a folder."
    elif not file.exists():
        if name.is_symlink() and not force:
            fault = f"is a link to {file}, which does not exist; name another file, or add --force."
    elif not file.is_file():
        fault = "is no regular file; name another one."
    elif not force and not _is_ours(file):
        fault = (
            "exists already and was not written by `run calibrate`; name another file, or add --force to overwrite it."
        )
    if fault is not None:
        raise ConfigError("MW806", f"{what} {fault}")


def _is_ours(file: Path) -> bool:
    try:
        with file.open(encoding="utf-8") as content:
            return MARK in content.readline(200)
    except (OSError, UnicodeDecodeError):
        return False


def _measured(config: Config, run_dir: Path, started: float) -> tuple[str, float]:
    """The content of the file, and the largest median error."""
    launch.warm(PRELOAD)
    content = {"config": config.model_dump_json(), "until": started + config.calibrate.seconds - ENDING}
    run_here = partial(launch.run_ranks, timeout=config.launch.timeout, threads=config.launch.threads)
    try:
        with tempfile.TemporaryDirectory() as folder:  # an error leaves no files behind
            where, name = "runner.commands.calibrate:place", "the preparation"
            device, ranks = run_here(where, content, world_size=1, device="cpu", run_dir=Path(folder), name=name)
        who = f"{ranks} rank{'s' * (ranks > 1)} on {device}"
        print(f"calibrate: {who}, {config.calibrate.seconds:g} seconds", flush=True)
        where = "runner.commands.calibrate:describe"
        text, error = run_here(where, content, world_size=ranks, device=device, run_dir=run_dir)
    except KeyboardInterrupt:
        shutil.rmtree(run_dir / "ranks", ignore_errors=True)
        remove_if_unused(run_dir)
        raise
    if error is None:
        raise RunFailed(
            "MW732",
            f"calibrate: {who} are too slow to measure anything within calibrate.seconds = "
            f"{config.calibrate.seconds:g}; give it more seconds, or a quieter machine.",
        )
    return text, error


def place(rank: RankContext, payload: Mapping[str, Any]) -> tuple[str, int]:
    """The device and the number of ranks, which takes a fork that has torch. Raises ConfigError."""
    from runner.planning.clusters import device_of

    return device_of(Config.model_validate_json(payload["config"]))


def describe(rank: RankContext, payload: Mapping[str, Any]) -> tuple[str, float | None] | None:
    """What each rank runs: measure until `payload["until"]`. Rank 0 returns the content of the file and the largest
    median error, None where nothing was measured."""
    import torch

    from runner.planning.calibration import measure
    from runner.planning.clusters import cluster_of
    from strategies.cost.calibration_fit import fit

    measured = measure(rank.rank, rank.world_size, torch.device(rank.device), payload["until"])
    if rank.rank > 0:
        return None
    config = Config.model_validate_json(payload["config"])
    assumed = cluster_of(config, measured.device, rank.world_size)
    fitted = fit(
        *(measured.products, measured.copies, measured.calls, measured.operators),
        *(assumed.launch if measured.launch is None else measured.launch, measured.view or 0.0),
    )
    text, missing = described(Path(config.calibrate.file).stem, measured, fitted, assumed)
    if missing and fitted.errors:
        print(f"calibrate: no time to measure {', '.join(missing)}, which are as in {assumed.name}", flush=True)
    return text, max((error.middle for error in fitted.errors.values()), default=None)


def described(name: str, measured: Measured, found: Fit, assumed: Cluster) -> tuple[str, tuple[str, ...]]:
    """The content of the file, a cluster of one level with the fit's errors as comments; and which of its constants
    were not measured, and are those of the innermost level of `assumed`."""
    from runner.planning.calibration import KINDS, SIDES, cores
    from strategies.cost.sample_operators import STACK

    world, gpu, level = measured.world_size, measured.device == "cuda", assumed.levels[-1]
    comments = {
        what: f"  # fitted within {one.middle:.0%}, at worst {one.worst:.0%}" for what, one in found.errors.items()
    }
    missing: list[str] = []

    def known(key: str, value: T | None, otherwise: T, error: str = "") -> tuple[T, str]:
        if value is not None:
            return value, comments.get(error, "")
        missing.append(key)
        return otherwise, f"  # not measured: as in {assumed.name}"

    links = {kind: known(f"kinds.{kind}", found.links.get(kind), level.of(kind), kind) for kind in KINDS if world > 1}
    flops = {
        dtype: known(f"flops.{dtype}", found.flops.get(dtype), assumed.peak(dtype), f"matmul {dtype}")
        for dtype in SIDES[measured.device]
    }
    bandwidth, comment = known("memory_bandwidth", found.memory_bandwidth, assumed.memory_bandwidth, "memory")
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
    lines += [f"      {line}" for line in _link(links[KINDS[0]][0])] if links else [
        "      bandwidth: 1.0e+9  # nobody to talk to", "      latency: 0.0", "      call: 0.0"
    ]  # fmt: skip
    lines.append("      kinds:" if links else "      kinds: {}")
    for kind, (link, known_as) in links.items():
        lines.append(f"        {kind}:{known_as}")
        lines += [f"          {line}" for line in _link(link)]
    lines.append("  flops:")
    lines += [f"    {dtype}: {rate:.3e}{known_as}" for dtype, (rate, known_as) in flops.items()]
    lines += [
        f"  memory: {measured.memory:.3e}",
        f"  memory_bandwidth: {bandwidth:.3e}{comment}",
        f"  achieved: {{flops: {found.achieved:.3f}, memory: {found.achieved:.3f}, links: 1.0}}"
        f"  # a {STACK} by the sum of their operators{comments.get(STACK, '').replace('  #', ',')}",
        "  launch: {:.3e}{}".format(*known("launch", measured.launch, assumed.launch)),
        "  view: {:.3e}{}".format(*known("view", measured.view, assumed.view)),
        "  overlap: {:.2f}{}".format(*known("overlap", measured.overlap, assumed.overlap)),
        f"  algorithms: [{'ring, tree' if gpu else 'ring'}]",
        *_operators(found),
        *([] if gpu else [f"  cores: {min(cores(), world)}  # that these ranks share"]),
    ]
    if missing:
        lines.insert(2, f"# Not measured, for lack of time, and as in {assumed.name}: {', '.join(missing)}.")
    return "\n".join(lines) + "\n", tuple(missing)


def _operators(found: Fit) -> list[str]:
    if not found.operators:
        return []
    lines = ["  operators:  # beside flops and memory_bandwidth"]
    for op, paces in found.operators.items():
        lines.append(f"    {op}:")
        for direction, one in zip(("forward", "backward"), paces, strict=True):
            error = found.errors[f"{op} {direction}"]
            known_as = f"  # fitted within {error.middle:.0%}, at worst {error.worst:.0%}"
            lines.append(f"      {direction}: {{call: {one.call:.3e}, factor: {one.factor:.3f}}}{known_as}")
    return lines


def _link(link: Link) -> list[str]:
    return [f"bandwidth: {link.bandwidth:.3e}", f"latency: {link.latency:.3e}", f"call: {link.call:.3e}"]
