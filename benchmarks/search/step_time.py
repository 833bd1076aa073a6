"""Predicted against measured seconds of a step, on 8 ranks of this machine after it has been calibrated."""

from __future__ import annotations

from benchmarks.search import charts
from benchmarks.search.outcome import Claim, Outcome, Setting
from benchmarks.step_time import correlation, of_best, run

TITLE = "Seconds of a step, predicted and measured"
MODELS = ("ffn", "gpt", "llama")
NEAR = 0.15


def measure(setting: Setting) -> Outcome:
    """Eight plans of each model; a quick run takes one model on two ranks."""
    models = MODELS[:1] if setting.quick else MODELS
    results = run(models, 2 if setting.quick else 8, 2 if setting.quick else 4, 10 if setting.quick else 60, None)
    by_model = {model: [one for one in results if one.model == model] for model in models}
    charts.against(
        setting.pictures / "step_time.svg",
        {model: [(1e3 * one.seconds, 1e3 * one.predicted.total) for one in found] for model, found in by_model.items()},
        "ms",
    )
    together = correlation(results)
    claims = [
        Claim(
            f"{len(results)} plans of {len(models)} models: Spearman at least 0.9", f"{together:.3f}", together >= 0.9
        )
    ]
    ratios = sorted(one.predicted.total / one.seconds for one in results)
    near = sum(abs(ratio - 1) <= NEAR for ratio in ratios)
    claims.append(
        Claim(
            f"{len(results)} plans within {NEAR:.0%} of measured",
            f"{near}, {ratios[0]:.2f} to {ratios[-1]:.2f}",
            near == len(ratios),
        )
    )
    for model, found in by_model.items():
        ratio = of_best(found)
        claims.append(Claim(f"{model}: best predicted within 5 % of best measured", f"{ratio:.3f}", ratio <= 1.05))
    rows = [
        (one.model, one.wish.name, f"{1e3 * one.predicted.total:.1f}", f"{1e3 * one.seconds:.1f}") for one in results
    ]
    head = ("model", "plan: data x tensor", "predicted, ms", "measured, ms")
    return Outcome(tuple(claims), head, tuple(rows), ("search/step_time.svg",))
