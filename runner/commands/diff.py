"""`run diff A B`: two plans side by side. A and B are files plan.json, or the folders of runs that wrote one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.errors import ConfigError
from runner.report.layers import NUMBER
from runner.report.units import shown_bytes, shown_seconds
from runner.run_folder.plan_file import read_content

Content = Mapping[str, Any]


def run(words: Sequence[str]) -> int:
    """Print the differences. Returns 0.

    Raises:
        ConfigError: There are not two plans.
    """
    if len(words) != 2:
        raise ConfigError(
            "MW112",
            f"diff compares two plans, but got {len(words)}; write `run diff A B` with two plan.json files or run "
            "folders.",
        )
    one, other = (_plan(word) for word in words)
    print(differences(one, other))
    return 0


def _plan(word: str) -> Content:
    """The content of a plan. Raises ConfigError for a file that could not even be compared with itself."""
    content: Content = read_content(Path(word))
    try:
        differences(content, content)
    except KeyError as error:
        raise ConfigError("MW420", f"{word!r} is no plan.json: it has no {error.args[0]!r}.") from None
    except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise ConfigError("MW420", f"{word!r} is no plan.json ({error}).") from None
    return content


def differences(one: Content, other: Content) -> str:
    """The report as text. Raises KeyError and TypeError if an argument is not the content of a plan.json."""
    lines = [f"mesh: {_mesh(one)}" + ("" if one["mesh"] == other["mesh"] else f"  ->  {_mesh(other)}")]
    ours, theirs = ({entry["name"]: entry for entry in content["operators"]} for content in (one, other))
    alone = {"first": [name for name in ours if name not in theirs], "second": [n for n in theirs if n not in ours]}
    for which, names in alone.items():
        if names:
            lines.append(f"only in the {which}: {', '.join(dict.fromkeys(map(_pattern, names)))}")
    both = [name for name in ours if name in theirs]
    described = _by_layout if one["mesh"] == other["mesh"] else _by_slices
    pairs = ((_pattern(name), described(ours[name]), described(theirs[name])) for name in both)
    changed = Counter(pair for pair in pairs if pair[1] != pair[2])
    count = changed.total()
    summary = f"{count} of {len(both)} have other layouts" if count else f"all {len(both)} have equal layouts"
    lines.append(f"operators: {summary}")
    for (name, before, after), number in changed.items():
        times = f" (x {number})" if number > 1 else ""
        lines += [f"  {name}{times}", f"    first   {before.strip()}", f"    second  {after.strip()}"]
    for title, show in (("cost", shown_seconds), ("communication", shown_bytes), ("memory", shown_bytes)):
        lines += _amounts(title, _flat(one[title]), _flat(other[title]), show)
    return "\n".join(lines)


def _amounts(
    title: str, one: Mapping[str, float], other: Mapping[str, float], show: Callable[[float], str]
) -> list[str]:
    lines = [f"{title}:"]
    for name in dict.fromkeys((*one, *other)):
        before, after = one.get(name, 0), other.get(name, 0)
        if before == after:
            lines.append(f"  {name:<22} {show(before)}")
        else:
            change = f" ({(after - before) / before:+.1%})" if before else ""
            lines.append(f"  {name:<22} {show(before)}  ->  {show(after)}{change}")
    return lines


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers by dotted name; strings are left out."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            numbers |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            numbers[prefix + name] = value
    return numbers


def _mesh(content: Content) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in content["mesh"].items())


def _by_layout(entry: Content) -> str:
    return f"{' '.join(entry['in_layouts'])} -> {' '.join(entry['out_layouts'])}"


def _by_slices(entry: Content) -> str:
    ins, outs = (" ".join(f"({','.join(map(str, o))})" for o in entry[key]) for key in ("in_strategy", "out_strategy"))
    return f"{ins} -> {outs}"


def _pattern(name: str) -> str:
    """A name with a star for the place in a list."""
    words = [word.partition("@") for word in name.split(".")]
    return ".".join("*" + at + number if NUMBER.fullmatch(word) else word + at + number for word, at, number in words)
