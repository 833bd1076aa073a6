"""The catalogue of codes: what each error means and how to fix it.

The data is in `refusals.yaml`, from which `run explain CODE` prints and the page docs/troubleshooting.md is made.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

import yaml

from runner.errors import ConfigError, allowed

CODE = re.compile(r"MW\d+")
FILE = Path(__file__).with_name("refusals.yaml")
AREAS = {
    "1": "Command line and recipes",
    "2": "Config keys and values",
    "3": "Model, data, loss and optimizer",
    "4": "Strategies, meshes and plans",
    "5": "Memory",
    "6": "Checkpoints and run folders",
    "7": "Launch, hosts and ranks",
    "8": "Devices, installation and data workers",
    "9": "Capture of the model",
}
"""The first digit of a code."""


@dataclass(frozen=True)
class Refusal:
    """One kind of refusal, with a right example unless the remedy says it all."""

    code: str
    title: str
    cause: str
    remedy: str
    example: str = ""


@cache
def catalogue() -> dict[str, Refusal]:
    """Every refusal by its code, in the order of the codes."""
    entries = yaml.safe_load(FILE.read_text(encoding="utf-8")).items()
    return {code: Refusal(code, **{key: value.strip() for key, value in entry.items()}) for code, entry in entries}


def code_in(word: str) -> str | None:
    """The code that is typed as `MW501`, `mw501`, `501` or, copied from a message, `[MW501]`; None for other words."""
    digits = re.fullmatch(r"\[?(?:MW)?(\d+)\]?", word, re.IGNORECASE)
    return f"MW{digits[1]}" if digits else None


def explanation(code: str) -> str:
    """What `run explain CODE` prints. Raises ConfigError: there is no such code."""
    known = catalogue()
    if code not in known:
        raise ConfigError("MW112", f"explain: there is no code {code}.{allowed(code, known)}")
    refusal = known[code]
    example = "".join(f"\n    {line}" for line in refusal.example.splitlines())
    parts = [f"{code}: {refusal.title} ({AREAS[code[2]]})", refusal.cause, refusal.remedy]
    return "\n\n".join([*parts, f"For example:\n{example}"] if example else parts)


def page() -> str:
    """The page of all codes, in Markdown."""
    parts = [
        "# Troubleshooting\n\nA command that cannot run ends with one paragraph and a code, such as `[MW204]`. "
        "`run explain MW204` prints what stands here. Exit codes: 0 done, 1 failed, 2 wrong command or config, "
        "130 interrupted (Ctrl-C), 143 stopped by SIGTERM, 129 by SIGHUP. `MESHWRIGHT_TRACEBACK=1` shows tracebacks.\n"
    ]
    for area, refusals in groupby(catalogue().values(), lambda refusal: refusal.code[2]):
        parts.append(f"## {AREAS[area]}\n")
        for one in refusals:
            parts.append(f"### {one.code}: {one.title}\n\n{one.cause}\n\n{one.remedy}\n")
            parts += [f"```text\n{one.example}\n```\n"] if one.example else []
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
