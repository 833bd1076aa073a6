"""`run convert FROM TO [form=merged|sharded] [plan=FILE] [average=ema]`: a checkpoint in another form, with averaged
weights or for another plan, without a run and without holding the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner import home
from runner.errors import ConfigError, allowed

FORMS = ("merged", "sharded")
KEYS = ("form", "plan", "average")
USAGE = "write `run convert FROM TO [form=merged|sharded] [plan=FILE] [average=ema]`"


def run(words: Sequence[str]) -> int:
    """Convert and print a summary. Returns 0.

    Raises:
        ConfigError: Wrong arguments, or files that are damaged or cannot be converted.
    """
    source, target, form, plan, average = _read(words)
    from runner.checkpoint import ADAPTER_DESCRIPTION, Checkpoint
    from runner.conversion.convert import cut_of, opened, write

    holding, what = opened(source)
    if average is not None:
        if not isinstance(holding, Checkpoint):
            raise ConfigError("MW112", f"convert: average={average} is for a checkpoint, but {source} is none.")
        holding, what = holding.averaged(average), f"the average of {average} in {what}"
    cut = None if plan is None else cut_of(plan, holding.tensors)
    try:
        write(holding, target, cut)
    except OSError as error:
        raise ConfigError("MW603", f"convert: {target} cannot be written: {error.strerror}.") from error
    count = len(holding.tensors)
    size = sum(file.stat().st_size for file in target.iterdir())
    shown = form if cut is None else f"{form} for {cut.ranks} ranks"
    if isinstance(holding, Checkpoint) and ADAPTER_DESCRIPTION in holding.header.files:
        print("convert: the files of the adapter are left out; a run writes them with checkpoint.form=merged or both")
    print(f"converted: {what}, {count} tensors, to {target} ({shown}, {size:,} bytes)")
    return 0


def _read(words: Sequence[str]) -> tuple[Path, Path, str, Path | None, str | None]:
    paths = [word for word in words if "=" not in word]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    if strangers := [key for key in given if key not in KEYS]:
        raise ConfigError("MW112", f"convert takes no {strangers[0]!r}.{allowed(strangers[0], KEYS)}")
    if len(paths) != 2:
        raise ConfigError("MW112", f"convert needs a source and a target, but got {len(paths)} paths; {USAGE}.")
    plan = given.get("plan")
    form = given.get("form", "merged" if plan is None else "sharded")
    if form not in FORMS:
        raise ConfigError("MW112", f"form = {form!r} is not allowed.{allowed(form, FORMS)}")
    if form == "sharded" and plan is None:
        raise ConfigError(
            "MW112", "form=sharded needs to know for whom: add plan=FILE, a plan.json, a run or a checkpoint."
        )
    if form == "merged" and plan is not None:
        raise ConfigError("MW112", f"form=merged is for no plan, so plan={plan} would be ignored; drop one of them.")
    source, target = home.expanded(paths[0]), home.expanded(paths[1])
    if not source.exists():
        raise ConfigError("MW610", f"convert: {source} does not exist.")
    if target.exists() or target.is_symlink():
        raise ConfigError(
            "MW610", f"convert: {target} exists already; give a new folder, which becomes the checkpoint."
        )
    return source, target, form, None if plan is None else home.expanded(plan), given.get("average")
