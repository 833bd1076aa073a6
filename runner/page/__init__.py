"""report.html: the plan as one file that needs nothing else: no network, no scripts, no fonts from elsewhere."""

from runner.page.document import page

__all__ = ["page"]
