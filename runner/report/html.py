"""Pages of one file that need no network, from the templates of this folder. Does not import torch.

Jinja escapes whatever names hold.
"""

from __future__ import annotations

from typing import Any

from runner.report.units import shown_bytes, shown_seconds

COLOURS = ("#3b7dd8", "#e07b39", "#3a9e6f", "#b455c0", "#c9a227", "#d64562", "#4bb3c4", "#8a6d5a", "#7b7fd4", "#6a9a2d")


def render(template: str, **values: Any) -> str:
    """The page that a template of `runner/report/templates` makes of `values`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # takes long to import: most commands make no page

    environment = Environment(
        loader=PackageLoader("runner.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"seconds": shown_seconds, "bytes": shown_bytes}
    return environment.get_template(template).render(**values)
