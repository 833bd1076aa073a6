"""`run explain`: the plan as a table, operator by operator, with what is sent; or why some operators are sliced so."""

from __future__ import annotations

from pathlib import Path

from runner.schema import Config


def run(config: Config, run_dir: Path) -> float | None:
    """Print the table, or what is to be said of the operators of `explain.operator`. Returns None."""
    from runner.planning.deciding import prepare_decided
    from runner.reporting import report
    from runner.reporting.decision_table import decision_table
    from runner.reporting.explanation import explanations

    prepared, wanted = prepare_decided(config, None), config.explain.operator
    told = None if wanted is None or prepared.plan is None else explanations(prepared, wanted)
    content = report.write_plan(prepared, run_dir)
    print(report.headline(prepared, run_dir))
    if content is None:
        print(f"parallel.mode={config.parallel.mode} has no plan: the model runs as it is written.")
        return None
    report.write_page(content, prepared, run_dir)
    if content["search"].get("decided") is not None:
        print(decision_table(content["search"]["decided"]))
    if told is not None:
        print(told)
        return None
    print(report.table(content))
    print(report.totals(content))
    return None
