"""`run plan`: the plan and its predicted cost, without starting a rank."""

from __future__ import annotations

from pathlib import Path

from runner.config.schema import Config


def run(config: Config, run_dir: Path) -> float | None:
    """Write plan.json (and the IR with parallel.dump_ir), print a summary. Returns the predicted seconds per step."""
    from runner.planning.joint import prepare_decided
    from runner.report import report
    from runner.report.layer_table import layer_table, promise

    prepared = prepare_decided(config, None)
    content = report.write_plan(prepared, run_dir)
    print(report.headline(prepared, run_dir))
    if content is None:
        print(f"parallel.mode={config.parallel.mode} has no plan: the model runs as it is written.")
        return None
    print(layer_table(content))
    print(report.totals(content))
    print(promise(content))
    print(f"report: {report.shown(report.write_page(content, prepared, run_dir))}")
    seconds: float = content["cost"]["total"]
    return seconds
