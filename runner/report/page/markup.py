"""HTML and SVG as values: text is escaped when it is put into an element, so that pages are well-formed whatever names
they show."""

from __future__ import annotations

from html import escape

VOID = frozenset({"meta", "br", "rect", "line", "path", "circle"})
"""Elements that are written without an end tag (those of SVG close themselves)."""


class Markup(str):
    """Text that is HTML already."""


def element(tag: str, /, *children: str | None, **attributes: object) -> Markup:
    """An element; children that are not `Markup` are text, None is left out. Attributes: `class_` is class, `a_b` is
    a-b, None is left out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if tag in VOID:
        return Markup(f"<{tag}{given}/>" if tag not in ("meta", "br") else f"<{tag}{given}>")
    inner = "".join(child if isinstance(child, Markup) else escape(child) for child in children if child is not None)
    return Markup(f"<{tag}{given}>{inner}</{tag}>")


def joined(*parts: str) -> Markup:
    """Several elements and texts after one another."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))
