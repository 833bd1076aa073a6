"""`run explain`: the plan as a table, operator by operator, with its communication; or why operators have their
strategies, or which slice of a tensor every rank holds."""

from __future__ import annotations

from pathlib import Path

from runner.config.schema import Config


def run(config: Config, run_dir: Path) -> float | None:
    """Print the table, or why the operators of `explain.operator` have their strategy and which slices of the tensors
    of `explain.slices` the ranks have. Returns None."""
    from runner.planning.joint import prepare_decided
    from runner.report import plan_files, text
    from runner.report.explanation import explanations, slices

    prepared = prepare_decided(config, None)
    patterns = ((config.explain.operator, explanations), (config.explain.slices, slices))
    details = [explain(prepared, pattern) for pattern, explain in patterns if pattern is not None and prepared.plan]
    content = plan_files.write_plan(prepared, run_dir)
    print(text.headline(prepared, run_dir))
    if content is None:
        print(f"parallel.mode={config.parallel.mode} has no plan: the model runs as it is written.")
        return None
    plan_files.write_page(content, prepared, run_dir)
    if content["search"].get("decided") is not None:
        print(text.decision_table(content["search"]["decided"]))
    if details:
        print("\n\n".join(details))
        return None
    print(text.operator_table(content))
    print(text.totals(content))
    return None
