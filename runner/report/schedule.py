"""The timeline of a pipeline's schedule, as text and as a picture, from `pipeline` in plan.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runner.report.units import shown_seconds
from strategies.lowering.pipeline_schedule import BACKWARD, FORWARD, INPUT, LETTERS, WEIGHT, from_text
from strategies.lowering.pipeline_timeline import Span, StageTimes, timeline

COLUMNS = 96
"""Characters of a line."""
WIDTH, HEIGHT, LEFT = 880, 22, 70
COLOURS = {FORWARD: "#3b7dd8", BACKWARD: "#3a9e6f", INPUT: "#6a9a2d", WEIGHT: "#c9a227"}
NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "input gradients", WEIGHT: "weight gradients"}


def spans_of(pipeline: Mapping[str, Any]) -> Sequence[Sequence[Span]]:
    """The passes of every group of ranks; as if all took equally long where nothing is predicted."""
    times = [StageTimes(**one) for one in pipeline["seconds"]]
    if not any(one.total for one in times):
        times = [StageTimes(1.0, 1.0, 1.0)] * len(times)
    return timeline(tuple(map(from_text, pipeline["actions"])), times)


def lines(pipeline: Mapping[str, Any]) -> list[str]:
    """A line per group: the letter of the pass that runs at each moment, a dot where it waits."""
    spans = spans_of(pipeline)
    scale = COLUMNS / max(own[-1].end for own in spans)
    timelines = []
    for group, own in enumerate(spans):
        letters = ["."] * COLUMNS
        for span in own:
            for column in range(round(span.begin * scale), round(span.end * scale)):
                letters[column] = LETTERS[span.action.computation]
        timelines.append(f"  group {group}: {''.join(letters)}")
    return timelines


def drawing(spans: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """A row per group, with a bar per pass; its micro-batch is written where there is room."""
    scale = WIDTH / max(own[-1].end for own in spans)
    bars = [
        {
            "x": round(LEFT + span.begin * scale, 2),
            "y": 4 + group * (HEIGHT + 6),
            "width": round((span.end - span.begin) * scale, 2),
            "colour": COLOURS[span.action.computation],
            "label": str(span.action.micro_batch) if (span.end - span.begin) * scale > 14 else "",
            "title": f"{NAMES[span.action.computation]} of micro-batch {span.action.micro_batch} in stage "
            f"{span.action.stage}: {shown_seconds(span.begin)} to {shown_seconds(span.end)}",
        }
        for group, own in enumerate(spans)
        for span in own
    ]
    return {
        "width": LEFT + WIDTH + 4,
        "height": 8 + len(spans) * (HEIGHT + 6),
        "bar_height": HEIGHT,
        "bars": bars,
        "groups": [{"name": f"group {group}", "y": 19 + group * (HEIGHT + 6)} for group in range(len(spans))],
        "legend": [(NAMES[computation], colour) for computation, colour in COLOURS.items()],
    }
