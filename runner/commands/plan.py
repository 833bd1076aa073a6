"""`run plan`: the plan and its predicted cost, without starting a rank."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from runner.config.schema import Config


def run(config: Config, run_dir: Path) -> float | None:
    """Write plan.json (and the IR with parallel.dump_ir), print a summary. Returns the predicted seconds per step."""
    from runner.report.earlier import Reports
    from runner.report.units import shown_path
    from strategies.core.gc_paused import gc_paused

    reports = Reports(config, run_dir)
    if (report := reports.find()) is not None:
        return report.give(run_dir)
    first = "torch" not in sys.modules
    with gc_paused():  # imports alone take a tenth more with it
        from runner.planning.joint import prepare_decided
        from runner.report import plan_files, text

        prepared = prepare_decided(config, None, reports.say, earlier=reports.captures)
        content = plan_files.write_plan(prepared, run_dir)
        print(text.headline(prepared, run_dir))
        if content is None:
            print(f"parallel.mode={config.parallel.mode} has no plan: the model runs as it is written.")
            return None
        tables = "\n".join((text.layer_table(content), text.totals(content), text.prediction_lines(content)))
        print(tables)
        print(f"report: {shown_path(plan_files.write_page(content, prepared, run_dir))}")
        reports.keep(prepared, content, tables)
        if first:
            gc.freeze()  # else the collector would go through all that was imported as soon as it goes on
    seconds: float = content["cost"]["total"]
    return seconds
