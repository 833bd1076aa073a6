"""`run calibrate [FILE]`: measure this machine on `world_size` local ranks and write it down as a cluster.

The file is read with `cluster.file=FILE`, or, in a folder `cluster/` of `--config-dir DIR`, with `cluster=NAME`. It is
written when all is measured, at once or not at all.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from runner import launch
from runner.command.folders import remove_if_unused
from runner.errors import ConfigError, RunFailed
from runner.schema import Config

if TYPE_CHECKING:
    from runner.planning.calibration import Measured
    from strategies.cost.laws import Fit


def run(config: Config, run_dir: Path) -> float | None:
    """Measure, fit, write the file, tell the constants. Returns the largest middle error of what was fitted.

    Raises RunFailed if the times do not fit the laws at all, and ConfigError for a file that cannot be written.
    """
    file = Path(config.calibrate.file).absolute()
    if not file.parent.is_dir() or file.is_dir():
        raise ConfigError(
            f"calibrate.file = {config.calibrate.file!r} cannot be written there; name a file in a folder."
        )
    launch.warm()
    from runner.planning.prepare import device_of
    from strategies.cost.laws import fit

    device, ranks = device_of(config)
    who = f"{ranks} rank{'s' * (ranks > 1)} on {device}"
    print(f"calibrate: {who}, about {config.calibrate.seconds:g} seconds", flush=True)
    try:
        measured = launch.run_ranks(
            "runner.planning.calibration:measure",
            {"seconds": config.calibrate.seconds},
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
    text = described(file.stem, measured, found)
    partial = file.with_name(f".{file.name}.part")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
    print(text, end="")
    print(f"calibrate: written to {config.calibrate.file}; price plans with cluster.file={config.calibrate.file}")
    return max(error.middle for error in found.errors.values())


def described(name: str, measured: Measured, found: Fit) -> str:
    """The content of the file: a cluster of one level, with the fit's errors as comments."""
    world, gpu = measured.world_size, measured.device == "cuda"
    links = dict(found.links)
    errors = {what: f"fitted within {one.middle:.0%}, at worst {one.worst:.0%}" for what, one in found.errors.items()}
    lines = [
        f"# {world} rank{'s' * (world > 1)} on {measured.device}, measured by `run calibrate`: every number is that of",
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
