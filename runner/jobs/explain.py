"""`run explain`: the plan as a table, operator by operator, with what is sent and why."""

from __future__ import annotations

from pathlib import Path

from runner.schema import Config


def run(config: Config, run_dir: Path) -> float | None:
    """Print the table. Returns None."""
    from runner import report
    from runner.prepare import prepare

    prepared = prepare(config, None)
    content = report.write_plan(prepared, run_dir)
    print(report.headline(prepared, run_dir))
    if content is not None:
        print(report.table(content))
        print(report.totals(content))
    return None
