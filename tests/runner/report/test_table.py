"""Tables on the console: aligned, not truncated, and plain unless standard output is a terminal."""

from __future__ import annotations

from runner.report.units import text_table

ROWS = [("name", "bytes"), ("layers.[0-3]", "5"), ("[bold]x[/bold] :smile: " + 300 * "é", "12345")]


def test_columns_are_aligned_and_no_cell_is_cut_or_interpreted(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    lines = text_table(ROWS, numbers={1}).split("\n")
    assert len(lines) == 3 and {len(line) for line in lines} == {len(ROWS[2][0]) + 2 + 5}
    assert lines[0].startswith("name ") and lines[0].endswith("  bytes")
    assert lines[1].startswith("layers.[0-3] ") and lines[1].endswith(" 5")
    assert lines[2] == "  ".join(ROWS[2])


def test_trailing_blanks_are_left_out():
    assert text_table([("a", "b"), ("wide", ""), ("", "x")]) == "a     b\nwide\n      x"


def test_headings_are_bold_on_a_terminal_alone(monkeypatch):
    assert "\x1b" not in text_table(ROWS)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    head, *body = text_table(ROWS).split("\n")
    assert "\x1b[1m" in head and not any("\x1b" in line for line in body)
