"""Tables on the console."""

from __future__ import annotations

from collections.abc import Collection, Sequence

UNLIMITED = 1_000_000
"""Columns of the console: no cell is cut or wrapped, whatever the terminal, so that pipes and logs hold complete
rows."""


def text_table(rows: Sequence[Sequence[str]], *, numbers: Collection[int] = ()) -> str:
    """Rows in aligned columns; the first one is the heading, which is bold on a terminal.

    Args:
        rows: cells, equally many in every row.
        numbers: the columns that are aligned to the right.

    Returns:
        Text without control characters unless standard output is a terminal.
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
