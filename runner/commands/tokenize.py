"""`run tokenize [INPUT ...] vocabulary=N out=FOLDER`: train a tokenizer on local text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from runner import home
from runner.errors import ConfigError, allowed
from runner.report.units import shown_path

KEYS = ("vocabulary", "out", "pattern", "field", "separator", "limit")
USAGE = "write `run tokenize INPUT vocabulary=8192 out=FOLDER`"


def run(words: Sequence[str]) -> int:
    """Train on the training part of the documents of all inputs, of the standard library without one. Returns 0.

    Raises:
        ConfigError: Wrong arguments, inputs that cannot be read, or a folder that holds files or cannot be written.
    """
    inputs = [word for word in words if word.partition("=")[0] not in KEYS]
    if strangers := [word for word in inputs if "=" in word]:
        key = strangers[0].partition("=")[0]
        raise ConfigError("MW112", f"tokenize takes no {key!r}.{allowed(key, KEYS)}")
    given = dict(word.split("=", 1) for word in words if word not in inputs and "=" in word)
    if missing := [key for key in KEYS[:2] if not given.get(key)]:
        raise ConfigError("MW112", f"tokenize needs {' and '.join(f'{key}=' for key in missing)}; {USAGE}.")
    vocabulary, limit = (_count(given, key) for key in ("vocabulary", "limit"))
    out = home.expanded(given["out"])
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError("MW832", f"tokenize: {out} holds files already; give a new folder.")
    from runner.data import tokenizer
    from runner.data.documents import Documents

    pattern, separator = given.get("pattern"), given.get("separator")
    options = (pattern, given.get("field", "text"), _unescaped(separator), True, limit)
    documents = [Documents(path, *options) for path in inputs] or [Documents(None, *options)]
    assert vocabulary is not None
    made = tokenizer.trained(chain.from_iterable(documents), vocabulary)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError("MW603", f"tokenize: {out} cannot be written: {error.strerror}.") from error
    size = tokenizer.load(str(out / "tokenizer.json")).vocabulary
    print(f"{shown_path(out)}/ holds a tokenizer of {size} tokens. Train with it:")
    print(f"    run +recipe=gpt_packed data.args.tokenizer={out} model.args.vocabulary={size}")
    return 0


def _count(given: dict[str, str], key: str) -> int | None:
    text = given.get(key)
    if text is not None and not text.isdecimal():
        raise ConfigError("MW112", f"tokenize: {key} = {text!r} must be a number, 1 or more.")
    return None if text is None else int(text)


def _unescaped(separator: str | None) -> str | None:
    """Replace \\n by a line break, which nobody types."""
    return None if separator is None else separator.replace("\\n", "\n")
