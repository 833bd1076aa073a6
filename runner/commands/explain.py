"""`run explain`: the plan as a table, operator by operator, with what is sent; or why some operators are sliced so, or
which slice of some tensors every rank holds."""

from __future__ import annotations

from pathlib import Path

from runner.config.schema import Config


def run(config: Config, run_dir: Path) -> float | None:
    """Print the table, or what is to be said of the operators of `explain.operator` and the tensors of
    `explain.slices`. Returns None."""
    from runner.planning.joint import prepare_decided
    from runner.report import report
    from runner.report.decision_table import decision_table
    from runner.report.explanation import explanations
    from runner.report.slices import slices

    prepared = prepare_decided(config, None)
    asked = ((config.explain.operator, explanations), (config.explain.slices, slices))
    told = [] if prepared.plan is None else [show(prepared, name) for name, show in asked if name is not None]
    content = report.write_plan(prepared, run_dir)
    print(report.headline(prepared, run_dir))
    if content is None:
        print(f"parallel.mode={config.parallel.mode} has no plan: the model runs as it is written.")
        return None
    report.write_page(content, prepared, run_dir)
    if content["search"].get("decided") is not None:
        print(decision_table(content["search"]["decided"]))
    if told:
        print("\n\n".join(told))
        return None
    print(report.table(content))
    print(report.totals(content))
    return None
