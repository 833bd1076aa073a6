"""What every page has around its content: the head, the style, and drawings of a stated size."""

from __future__ import annotations

from runner.report.page.markup import Markup, element
from runner.report.page.style import CSS


def shell(title: str, *body: Markup) -> str:
    """A whole file of HTML."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(CSS)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, element('body', *body), lang='en')}\n"


def section(title: str, *children: Markup) -> Markup:
    """A part of a page under a heading."""
    return element("section", element("h2", title), *children)


def drawing(width: float, height: float, *children: Markup, title: str) -> Markup:
    """An SVG of so many pixels, at least one."""
    return element(
        "svg",
        element("title", title),
        *children,
        viewBox=f"0 0 {max(width, 1):g} {max(height, 1):g}",
        width=f"{max(width, 1):g}",
        height=f"{max(height, 1):g}",
        role="img",
        class_="picture",
    )
