"""`run schema`: the JSON Schema of recipes, with which editors complete keys and show what they mean."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from runner.config.generate import json_schema
from runner.errors import ConfigError


def run(words: Sequence[str]) -> int:
    """Print the schema; or write it to the file that is named, and print the comment that a recipe begins with.

    Returns:
        The exit code 0.

    Raises:
        ConfigError: There are more arguments, or the file cannot be written.
    """
    if len(words) > 1:
        raise ConfigError("MW112", f"schema takes one file or nothing, but got {' '.join(words)!r}.")
    text = json.dumps(json_schema(), indent=1)
    if not words:
        print(text)
        return 0
    file = Path(words[0])
    try:
        file.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError("MW603", f"schema: {file} cannot be written: {error.strerror}; give another file.") from None
    print("Begin a recipe with these two lines, and an editor with a YAML language server completes its keys:")
    print(f"# @package _global_\n# yaml-language-server: $schema={file.absolute().as_uri()}")
    return 0
