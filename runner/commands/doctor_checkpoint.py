"""`run doctor CHECKPOINT`: every file against its size and checksum, what was saved, and which ranks' files could be
lost without loss. Nothing is changed. For a plan without a checkpoint: which ranks will store the same.

A rank's files are redundant if all of their parts are also in other files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.checkpoint import branch, folder, reading
from runner.checkpoint import manifest as header
from runner.checkpoint.index import Index
from runner.checkpoint.manifest import Header
from runner.errors import ConfigError
from runner.run_folder import CONFIG_FILE
from runner.run_folder.plan_file import PLAN, read_content
from strategies.core.bounded_files import is_count, read_json
from strategies.core.layout import Layout, recoverable
from strategies.core.mesh import Mesh
from strategies.lowering.pipeline_schedule import owners_in


def run(path: Path) -> int:
    """Print a line about the checkpoint that `path` means and one per file. Returns the exit code: 1 if a file is
    damaged. Raises ConfigError if `path` is neither a checkpoint nor a plan."""
    if (planned := _planned(path)) is not None:
        print(planned, flush=True)
        return 0
    path = branch.locate(path, "doctor")
    try:
        found = header.read_header(path)
    except ConfigError as error:
        print(f"failed  {error}", flush=True)
        return 1
    print(f"checkpoint {path}: {described(found)}", flush=True)
    wrong = header.faults(path, found.files)
    for name, stamp in found.files.items():
        said = wrong.get(name, f"{stamp.bytes:,} bytes, sha256 {stamp.sha256[:12]}...")
        print(f"{'failed' if name in wrong else 'ok':<6}  {name:<24}  {said}", flush=True)
    if folder.INDEX not in wrong:
        with header.damaged(path):
            forms = reading.read_forms(path, found)
        for line in losses(found, forms, wrong):
            print(line, flush=True)
    return 1 if wrong else 0


def described(found: Header) -> str:
    """What was saved, in one line."""
    parallel = found.config.get("parallel", {})
    mesh = " ".join(f"{axis} {size}" for axis, size in found.plan.get("mesh", {}).items())
    plan = f"{parallel.get('mode', 'unknown mode')}{f', mesh {mesh}' if mesh else ''}"
    zero = f", ZeRO stage {stage}" if (stage := parallel.get("zero", {}).get("stage")) else ""
    ranks = f"{found.world_size} rank{'s' * (found.world_size > 1)}"
    total = sum(stamp.bytes for stamp in found.files.values())
    return f"step {found.step}, {found.form}, {ranks}, {plan}{zero}, {total:,} bytes in {len(found.files)} files"


def losses(found: Header, forms: Sequence[Index], wrong: Mapping[str, str]) -> list[str]:
    """The lost state, or else the ranks whose files are redundant."""
    if not _complete(found, forms, wrong):
        return ["lost: the content of the damaged files is in no other file; the checkpoint cannot be loaded"]
    lines = ["nothing is lost: other files hold the same"] if wrong else []
    ranks = [rank for rank in range(found.world_size) if _complete(found, forms, {**wrong, **_files(found, rank)})]
    listed = ", ".join(map(str, ranks)) or "none (checkpoint.copies=2 stores what replicas hold twice)"
    lines.append(f"ranks whose files could be lost, one at a time: {listed}")
    parallel = found.config.get("parallel", {})
    groups = replicas(found.plan, found.world_size, split=bool(parallel.get("zero", {}).get("stage")))
    return lines + ([f"ranks that hold the same parameters and states: {groups}"] if groups else [])


def _planned(path: Path) -> str | None:
    """Two lines about the plan in `path`, where nothing was saved. None where there is no plan, or a checkpoint.
    Raises ConfigError for a file that is no plan."""
    file = path / PLAN if path.is_dir() else path
    if not file.is_file() or (path.is_dir() and (branch.newest(path) or branch.newest(path / "checkpoints"))):
        return None
    plan, settings = read_content(file), file.parent / CONFIG_FILE
    try:
        parallel = read_json(settings)["parallel"] if settings.is_file() else {}
        sizes = [*plan["mesh"].values(), plan.get("pipeline", {}).get("stages", 1)]
        if not all(is_count(size, 1) for size in sizes):
            raise ValueError(f"sizes of a mesh are {sizes}")
        world_size = math.prod(sizes)
        groups = replicas(plan, world_size, split=bool(parallel.get("zero", {}).get("stage")))
    except (OSError, LookupError, ArithmeticError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            "MW604", f"doctor = {str(path)!r} is neither a checkpoint nor a plan.json ({reason})."
        ) from None
    mesh = " ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    ranks = f"{world_size} rank{'s' * (world_size > 1)}, mesh {mesh}"
    return (
        f"plan {file}: {ranks}; nothing has been saved here\n"
        f"ranks that hold the same parameters and states, so that any but one of them could be lost: {groups}"
    )


def replicas(plan: Mapping[str, Any], world_size: int, *, split: bool) -> str:
    """The groups of ranks that could restore one another from memory, as text; nothing where there is no plan, or where
    it does not say what the stages of its pipeline store. `split`: ZeRO gives every rank its own states."""
    tensors = {name: Layout(tuple(map(tuple, one["dims"]))) for name, one in plan.get("tensors", {}).items()}
    if not tensors:
        return ""
    mesh = Mesh(tuple(plan["mesh"].items()))
    stages = world_size // mesh.size
    stages_by_parameter = {name: one["stages"] for name, one in plan.get("parameters", {}).items() if "stages" in one}
    if stages > 1 and not stages_by_parameter:
        return ""
    owners = owners_in(plan["pipeline"]) if plan.get("pipeline") else range(stages)
    groups: dict[tuple[int, ...], None] = {}
    for stage in range(stages):
        own = [
            layout
            for name, layout in tensors.items()
            if stage in {owners[one] for one in stages_by_parameter.get(name, (stage,))}
        ]
        first = stage * mesh.size
        for rank in range(first, first + mesh.size):
            groups[recoverable(own, mesh, rank, stage=stage, split=split)] = None
    return " ".join(f"[{', '.join(map(str, group))}]" for group in groups)


def _files(found: Header, rank: int) -> dict[str, str]:
    return {name: "" for name in found.files if name.startswith(f"rank-{rank:05d}.")}


def _complete(found: Header, forms: Sequence[Index], lost: Mapping[str, str]) -> bool:
    """Whether the remaining files hold the complete state."""
    try:
        reading.available(found, forms, lost)
    except ValueError:
        return False
    return True
