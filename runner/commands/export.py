"""`run export`: the plan for another trainer, without starting a rank."""

from __future__ import annotations

from pathlib import Path

from runner import home
from runner.config.schema import Config
from runner.errors import ConfigError


def run(config: Config, run_dir: Path) -> float | None:
    """Write the plan in the format of `export.target`, and plan.json. Returns the predicted seconds per step.

    Raises ConfigError where there is no plan, where the target cannot say it, and where the file cannot be written.
    """
    from runner.export.targets import exported, target_of
    from runner.planning.joint import prepare_decided
    from runner.report import plan_files, text
    from runner.report.units import shown_path

    prepared = prepare_decided(config, None)
    if prepared.plan is None or prepared.stages or prepared.plan.batch_rows:
        uneven = "slices of unequal rows (parallel.batch_rows, cluster.groups)"
        what = (
            "a pipeline"
            if prepared.stages
            else uneven
            if prepared.plan
            else f"parallel.mode = {config.parallel.mode!r}, which has no plan"
        )
        raise ConfigError("MW465", f"export: {config.export.target} has no word for {what}; choose another plan.")
    title = f"{config.model.target} on {prepared.world_size} ranks"
    target = target_of(config.export.target)
    code = exported(config.export.target, prepared, title, allow_changes=config.export.allow_changes)
    content = plan_files.write_plan(prepared, run_dir)
    assert content is not None
    file = run_dir / target.file if config.export.file is None else home.expanded(config.export.file)
    try:
        file.write_text(code, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "MW603", f"export.file = {str(file)!r} cannot be written ({error.strerror}); name another file."
        ) from error
    print(text.headline(prepared, run_dir))
    for change in target.changes(prepared):
        print(f"changed: {change}")
    print(f"exported: {shown_path(file)}")
    seconds: float = content["cost"]["total"]
    return seconds
