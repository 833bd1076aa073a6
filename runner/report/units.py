"""Human-readable numbers and paths."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path


def shown_seconds(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    if seconds >= 1e-4:
        return f"{seconds * 1e3:.2f} ms"
    return f"{seconds * 1e6:.1f} us" if seconds >= 5e-8 else "<0.1 us" if seconds else "0 ms"


def shown_time(seconds: float) -> str:
    """The time of a training, in the unit that suits it."""
    for limit, size, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400:,.3g} days" if seconds < 8.64e7 else f"{seconds / 86_400:,.0f} days"


def shown_bytes(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def shown_rate(rate: float) -> str:
    """Samples or tokens per second."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def shown_share(share: float) -> str:
    """A share, such as MFU."""
    return f"{share:.1%}" if share >= 0.0005 else "<0.1%"


def shown_path(path: Path) -> str:
    """A path relative to the working directory, if it is below that."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


UNLIMITED = 1_000_000
"""Columns of the console: no cell is cut or wrapped, whatever the terminal, so that pipes and logs hold complete
rows."""


def text_table(rows: Sequence[Sequence[str]], *, numbers: Collection[int] = ()) -> str:
    """Rows of equally many cells in aligned columns; the first one is the heading, which is bold on a terminal.

    Args:
        numbers: The columns that are aligned to the right.
    """
    from rich.console import Console  # takes long to import, which commands without a table need not wait for
    from rich.table import Table

    console = Console(width=UNLIMITED, markup=False, highlight=False, emoji=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column, title in enumerate(rows[0]):
        table.add_column(title, no_wrap=True, justify="right" if column in numbers else "left")
    for row in rows[1:]:
        table.add_row(*row)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
