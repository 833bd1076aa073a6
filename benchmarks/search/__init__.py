"""The claims about the searches, measured by one command: `python -m benchmarks.search`.

Every part is a module with a `TITLE` and a function `measure(Setting) -> Outcome`; an outcome is written as JSON, and
docs/search.md is made from these alone, so a part can be measured again without the others.
"""
