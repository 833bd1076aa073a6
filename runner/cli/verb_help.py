"""What `run VERB --help` tells of a verb's keys: their defaults and comments, as they are in `conf/`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files

FILES = {
    "": "config.yaml",
    "parallel.": "parallel/stand_alone.yaml",
    "cluster.": "cluster/auto.yaml",
    "launch.": "launch/local.yaml",
}
"""Where the defaults of the keys are that begin so."""
LINE = re.compile(r"(?P<indent> *)(?P<key>\w+):(?P<value>.*?)(?:\s+#\s*(?P<comment>.*))?")


def table(prefixes: Sequence[str]) -> str:
    """A line per key that is, or is below, one of `prefixes`: the key with its default, and what it means."""
    rows = [
        (f"{key}={value}", comment)
        for prefix in prefixes
        for key, value, comment in _keys()
        if key == prefix or key.startswith(f"{prefix}.")
    ]
    width = min(max((len(row) for row, _ in rows), default=0), 44)
    return "\n".join(f"  {row:<{width}}  {comment}".rstrip() for row, comment in rows)


def _keys() -> Iterator[tuple[str, str, str]]:
    for prefix, name in FILES.items():
        above: list[str] = []
        for line in (files("conf") / name).read_text(encoding="utf-8").splitlines():
            found = LINE.fullmatch(line)
            if found is None:
                continue
            above[len(found["indent"]) // 2 :] = [found["key"]]
            key, value, comment = prefix + ".".join(above), found["value"].strip(), found["comment"] or ""
            if above[0] in ("defaults", "hydra") or not (value or comment):
                continue
            yield key, value, comment
