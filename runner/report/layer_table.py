"""The plan as text by kinds of layers: how they are sliced, what they cost, and what the whole promises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.report.layers import Kind, Row, Sums, kinds

CALLS = "operator calls"
"""The limit of operators that compute for less time than it takes to begin them."""
HEAD = ("layer", "number", "layouts", "compute", "communication", "sent", "parameters", "results")


def layer_table(content: dict[str, Any]) -> str:
    """A line per kind of layer with the sums over its layers, and below it a line per operator that holds parameters or
    sends something."""
    rows: list[tuple[str, ...]] = [HEAD]
    for kind in kinds(content["operators"]):
        shown = [row for row in kind.rows() if row.telling]
        alone = len(kind.rows()) == 1
        layouts = arrow(kind.rows()[0]) if alone else ""
        rows.append((kind.name, _times(kind), layouts, *_cells(kind.sums())))
        for row in shown if not alone else []:
            rows.append((f"  {row.name}", "", arrow(row), *_cells(row.sums())))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def arrow(row: Row) -> str:
    """The layouts of an operator's operands and results, and which kind of choice they are."""
    return f"{' '.join(row.first['in_layouts'])} -> {' '.join(row.first['out_layouts'])}"


def promise(content: dict[str, Any]) -> str:
    """Speed, the limit that binds, and what the next better thing would need."""
    told = content["prediction"]
    used = f"{told['ranks']} of {told['devices']}" if told["ranks"] < told["devices"] else str(told["ranks"])
    lines = [f"on {used} devices of {told['cluster']}: {shown_seconds(told['seconds'])} per step"]
    if told["seconds"]:
        lines[0] += f", {shown_rate(told['samples_per_second'])} samples/s"
        if told["tokens_per_second"]:
            lines[0] += f", {shown_rate(told['tokens_per_second'])} tokens/s"
        lines[0] += f", {shown_share(told['mfu'])} of peak flops (MFU)"
    total = sum(told["shares"].values())
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in told["shares"].items() if seconds)
    lines.append(f"limit that binds: {told['binding']} (time by limit: {shares})")
    return "\n".join([*lines, *next_better(content)])


def next_better(content: Mapping[str, Any]) -> list[str]:
    """What would make the plan fit or, if it does, faster; and that ranks are of no use, if they are not."""
    told, lines = content["prediction"], []
    useless = all(_whole(layout) for one in content["operators"] for layout in one["out_layouts"])
    if told["ranks"] > 1 and useless:
        lines.append("nothing is sliced: every rank computes the whole batch, and world_size=1 would be no slower")
    if told["memory"] > told["memory_limit"]:
        options = [
            f"{keys} would need {shown_bytes(needed)}{' and fit' if needed <= told['memory_limit'] else ''}"
            for keys, needed in told["shrunk"].items()
        ]
        asked = {word.partition("=")[0] for keys in told["shrunk"] for word in keys.split()}
        auto = " ".join(f"{key}=auto" for key in sorted(asked, reverse=True))
        if auto and min(told["shrunk"].values()) <= told["memory_limit"]:
            options.append(f"{auto} finds the fastest that fits")
        else:
            options.append(
                "take more ranks, smaller micro-batches (train.accumulate), sliced parameters (parallel.mode=auto), or "
                "keep less on a device (parallel.offload)"
            )
            if auto and told["ranks"] > 1:
                options.append(f"{auto} finds out what fits without that, if anything")
        lines.append(
            f"it does not fit: {shown_bytes(told['memory'])} per rank, and a device has "
            f"{shown_bytes(told['memory_limit'])}; {'; '.join(options)}"
        )
    elif told["seconds"]:
        gains = sorted(told["speedups"].items(), key=lambda entry: -entry[1])
        best = ", ".join(f"{_better(name)} {gain:.2f} times as fast" for name, gain in gains if gain > 1.005)
        room = shown_bytes(told["memory_limit"] - told["memory"])
        lines.append(f"next better: {best or 'no single rate helps'}; {room} of memory per device are free")
        if told["ranks"] < told["devices"] and not useless:
            lines[-1] += f", and {told['devices'] - told['ranks']} devices idle (world_size=null takes all)"
    return lines


def _whole(layout: str) -> bool:
    return not set(layout) - set("(-, )")


def _better(name: str) -> str:
    """What doubles a rate, in words; a link's bandwidth and latency are doubled and halved together."""
    if name == CALLS:
        return "calls that begin in half the time"
    return f"a {name} twice as fast" if name.endswith(" link") else f"twice the {name}"


def _times(kind: Kind) -> str:
    return f"x {kind.count}" if kind.count > 1 else ""


def _cells(found: Sums) -> tuple[str, ...]:
    seconds = shown_seconds(found.compute), shown_seconds(found.communication + found.gradients)
    return (*seconds, *map(shown_bytes, (found.sent, found.parameters, found.results)))


def shown_rate(rate: float) -> str:
    """Samples or tokens per second."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def shown_seconds(seconds: float) -> str:
    """Seconds in the unit in which they are read best."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= (0.1 if unit == "ms" else 1.0) * size:
            return f"{seconds / size:.2f} {unit}"
    if not seconds:
        return "0 ms"
    return f"{seconds * 1e6:.1f} us" if seconds >= 5e-8 else "<0.1 us"


def shown_share(share: float) -> str:
    """A share of a whole, such as MFU."""
    return f"{share:.1%}" if share >= 0.0005 else "<0.1%"


def shown_bytes(count: float) -> str:
    """Bytes in the unit in which they are read best."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
