"""The names by which a config means operators and modules, with globs per dotted segment.

An operator answers to its plan name `module.path[.label][@k]`, to `module.path.label` in any case, and to both without
`@k` (then all of them are meant). `dense1.matmul` is the product of a linear operator as MindSpore writes it: x [m, k],
w [k, n].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from strategies.core.graph import Operator


def addresses(operator: Operator) -> tuple[str, ...]:
    """Every name that means this operator, without `@k`."""
    plain = operator.name.partition("@")[0]
    full = f"{operator.module}.{operator.label}" if operator.module else operator.label
    product = (f"{operator.module}.matmul",) if operator.op == "linear" and operator.module else ()
    return tuple(dict.fromkeys((plain, full, *product)))


def matches(pattern: str, operator: Operator) -> str | None:
    """The address by which `pattern` (globs per segment) means `operator`, or None."""
    number = operator.name.partition("@")[2]
    for address in addresses(operator):
        for name in (address, f"{address}@{number}") if number else (address,):
            if segments_match(pattern, name):
                return address
    return None


def meant(pattern: str, operators: Iterable[Operator]) -> list[tuple[Operator, str]]:
    """The operators that `pattern` means, each with the address by which it does."""
    hits = [(operator, address) for operator in operators if (address := matches(pattern, operator))]
    multiplying = {operator.module for operator, _ in hits if operator.op == "matmul"}
    return [
        (operator, address)
        for operator, address in hits
        if operator.op != "linear" or operator.module not in multiplying or address != f"{operator.module}.matmul"
    ]


def segments_match(pattern: str, name: str) -> bool:
    """Whether the dotted segments of `name` match the globs of `pattern`, one by one; `**` stands for any number."""
    return _match(pattern.split("."), name.split("."))


def _match(globs: Sequence[str], words: Sequence[str]) -> bool:
    if "**" in globs:
        first = globs.index("**")
        ends = range(first, len(words) + 1)
        return _match(globs[:first], words[:first]) and any(_match(globs[first + 1 :], words[end:]) for end in ends)
    return len(globs) == len(words) and all(fnmatchcase(word, glob) for glob, word in zip(globs, words, strict=True))


def in_module(pattern: str, operator: Operator) -> bool:
    """Whether `pattern` means the operator or a module around it."""
    return matches(pattern, operator) is not None or means_module(pattern, operator.module)


def means_module(pattern: str, path: str) -> bool:
    """Whether `pattern` means the module at `path` or one around it."""
    words = path.split(".") if path else []
    around = [".".join(words[: i + 1]) for i in range(len(words))]
    return any(segments_match(pattern, module) for module in around)
