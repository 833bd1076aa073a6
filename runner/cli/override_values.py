"""Override values as typed by users, quoted for Hydra's grammar.

Hydra reads unquoted text only if it consists of ASCII letters, digits, spaces and a few signs. Whatever else is typed
in a value (`~`, `é`, `#`, another `=`) is quoted here, word by word, so that lists, mappings and sweeps keep their
meaning. Invariant: text that Hydra can parse is unchanged.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

CALL = re.compile(r"\s*(choice|range|interval|glob|sort|shuffle|tag|extend_list|int|float|str|bool|json_str)\(")
"""How a call of Hydra's grammar begins."""
ESCAPED = r"\\([\\()\[\]{}:=, \t])"
INTERPOLATION = r"\$\{[^{}]*\}"
READABLE = re.compile(rf"(?:{INTERPOLATION}|[\w/\-+.$%*@?|: \t]|{ESCAPED})*", re.ASCII)
QUOTED = re.compile(r"""\s*(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")\s*(?=[,\]})]|$)""", re.DOTALL)


def readable(value: str) -> str:
    """`value` with quotes around every word that Hydra cannot read; `~` is null and `~/x` is below the home folder."""
    return "".join(_pieces(value))


def quoted(text: str) -> str:
    """`text` as a quoted string of Hydra's grammar, where backslashes count only before a quote."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + (found[2] and "\\'"), text) + "'"


def _pieces(value: str) -> Iterator[str]:
    inside: list[str] = []  # brackets that are open
    key, begins = False, True  # whether a key of a mapping comes next; whether a word begins here
    position = 0
    calls = "()" if CALL.match(value) else ""
    while position < len(value):
        ends = ("[]{}:," if key else "[]{}," if inside else ",") + calls
        sign = value[position]
        if begins and sign.isspace():
            yield sign
            position += 1
        elif found := QUOTED.match(value, position):
            yield found[0]
            position, begins = found.end(), False
        elif sign in ends or (begins and sign in "[{"):
            if sign in "[{(":
                inside.append(sign)
            elif sign in "]})" and inside:
                inside.pop()
            key = sign in "{," and inside[-1:] == ["{"]
            yield sign
            position, begins = position + 1, sign not in "]})"
        else:
            found = re.compile(rf"(?:{INTERPOLATION}|\\.|[^{re.escape(ends)}])+", re.DOTALL).match(value, position)
            assert found is not None
            yield found[0] if key else _word(found[0])
            position, begins = found.end(), False


def _word(text: str) -> str:
    bare = text.strip()
    if bare == "~":
        return "null"
    if READABLE.fullmatch(text) or bare[0] in "'\"":  # a quote that is not closed is for Hydra to refuse
        return text
    bare = re.sub(ESCAPED, r"\1", bare)
    return quoted(os.path.expanduser(bare) if bare.startswith("~") else bare)
