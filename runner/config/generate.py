"""`python -m runner.config.generate [--check]`: write the files generated from the schema, or name those that are out
of date.

From `runner.config.schema` follow the defaults in `conf/` below the line MARK, the reference page, the JSON Schema
with which editors complete recipes, and the words with which shells complete commands.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runner.config import exclusive, keys
from runner.config.parallel import SHORT
from runner.config.schema import Config
from runner.config.section import Section

ROOT = Path(__file__).resolve().parents[2]
MARK = "# Generated from runner/config below this line; change it there and run `make generate`."
GROUPS = {
    "parallel": "conf/parallel/stand_alone.yaml",
    "cluster": "conf/cluster/auto.yaml",
    "launch": "conf/launch/local.yaml",
    "job": "conf/job/train.yaml",
}
"""Sections that Hydra chooses as groups, and the file with their defaults; the others are in conf/config.yaml."""
WIDTH, COLUMN = 120, 24
"""Of lines, and where comments begin at the latest."""
INTRODUCTION = """# Config keys

Every key with its type, default and meaning. Set one in a recipe or on the command line (`run +recipe=NAME KEY=VALUE`);
`run +recipe=NAME --cfg job` prints the values of a recipe. [config.schema.json](config.schema.json) describes recipes
for editors: `run schema FILE` writes it and says which comment in the second line of a recipe makes an editor complete
its keys.

"""
EXCLUSIVE = """# Keys that exclude each other

A config in which both keys of a row have such values is refused with the code MW205, before anything starts. "Given" is
any value but `null`, `false` and an empty list or mapping.

"""
WITHOUT_EFFECT = """
## Keys without effect

Where both keys of a row have such values, the first one changes nothing; the command says so and goes on.

"""


def files() -> dict[Path, str]:
    """The content of every generated file."""
    generated = {ROOT / file: _defaults(ROOT / file, group) for group, file in GROUPS.items()}
    generated[ROOT / "conf/config.yaml"] = _defaults(ROOT / "conf/config.yaml", "")
    schema = json_schema()
    generated[ROOT / "runner/cli/words.json"] = words()
    generated[ROOT / "docs/reference/config.md"] = reference_page(schema)
    generated[ROOT / "docs/reference/exclusive_keys.md"] = exclusive_page()
    generated[ROOT / "docs/reference/config.schema.json"] = json.dumps(schema, indent=1) + "\n"
    return generated


def json_schema() -> dict[str, Any]:
    """The JSON Schema of recipes: no key is required, because a recipe may add to another or to the command line."""
    schema = Config.model_json_schema()
    for one in (schema, *schema["$defs"].values()):
        one.pop("required", None)
        for name, value in one.get("properties", {}).items():
            value.pop("title", None)
            if one.get("title") == "Parallel" and name in SHORT:
                reference = value.pop("$ref")
                inside = schema["$defs"][reference.rpartition("/")[2]]
                value["anyOf"] = [{"$ref": reference}, *inside["properties"][SHORT[name]]["anyOf"]]
    strategies = schema["$defs"]["Parallel"]["properties"]["strategies"]
    mapping = {key: strategies.pop(key) for key in ("additionalProperties", "type")}
    strategies["anyOf"] = [mapping, {"type": "null"}]  # which removes those of another recipe
    schema["properties"] |= {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def words() -> str:
    """JSON with a line for every key that can be typed, and its values where they are enumerated; keys that hold keys
    of the user's end in a dot."""
    mappings = keys.open_mappings()
    paths = [key.path for key in keys.walk() if key.section is None]
    typed = {f"{path}." if path in mappings else path: list(keys.enumerated(path)) for path in paths}
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(values)}" for key, values in typed.items()) + "\n}\n"


def reference_page(schema: Mapping[str, Any]) -> str:
    """The page of all keys: a table per section."""
    everything = list(keys.walk())
    page = INTRODUCTION + "## Top level\n\n" + _table("", Config, schema)
    for key in everything:
        if key.section is not None and (rows := _table(f"{key.path}.", key.section, schema)):
            page += f"\n## `{key.path}`\n\n{key.info.description}.\n\n{rows}"
    shown = {key.section for key in everything}
    others = {section.__name__: section for section in _below(Section) if section not in shown}
    for name in schema["$defs"]:
        if name in others and (rows := _table("", others[name], schema)):
            page += f"\n## {name}\n\n{rows}"
    return page


def exclusive_page() -> str:
    """The page of mutually exclusive keys."""
    return (
        EXCLUSIVE + _rules((*exclusive.RULES, *exclusive.SOURCES)) + WITHOUT_EFFECT + _rules(exclusive.WITHOUT_EFFECT)
    )


def _rules(rules: Iterable[exclusive.Rule]) -> str:
    page = "| key | with | why | what to do |\n|---|---|---|---|\n"
    for rule in rules:
        (first, *others) = ((rule.first, rule.of_first), (rule.second, rule.of_second), *rule.where)
        cells = [f"`{first[0]}` {first[1].text}", ", ".join(f"`{key}` {kind.text}" for key, kind in others)]
        page += f"| {' | '.join([*cells, _escaped(rule.why), _escaped(rule.remedy)])} |\n"
    return page


def _escaped(text: str) -> str:
    """Text for a table of Markdown, outside of code."""
    return re.sub(r"(?<!\w)([\[{|*])", r"\\\1", text)


def yaml_lines(block: Iterable[keys.Key], group: str) -> Iterator[str]:
    """Lines of YAML with the defaults of keys, and their meaning as comments behind them, or above if too long."""
    rows = [(_row(key, group), key.meaning) for key in block]
    column = min(max(len(row) for row, _ in rows), COLUMN)
    for row, meaning in rows:
        line = f"{row:<{column}}  # {meaning}"
        if len(line) <= WIDTH:
            yield line
        else:
            yield f"{row[: len(row) - len(row.lstrip())]}# {meaning}"
            yield row


def _row(key: keys.Key, group: str) -> str:
    """A key with its default, as a line of the file of its group."""
    indent = "  " * (key.path.count(".") - bool(group))
    return f"{indent}{key.name}:" + ("" if key.section else f" {keys.flow(keys.default(key))}")


def _defaults(file: Path, group: str) -> str:
    """A file of `conf/`: the text above the mark, and the defaults of a group or of all other sections."""
    head, mark, _ = file.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"{file} lacks the line {MARK!r}.")
    blocks: list[list[keys.Key]] = [[]]
    for key in keys.walk():
        if group != _group(key.path) or key.path == group:
            continue
        if not group and key.section and "." not in key.path:  # a blank line before each section
            blocks.append([])
        blocks[-1].append(key)
    return f"{head}{MARK}\n" + "\n\n".join("\n".join(yaml_lines(block, group)) for block in blocks) + "\n"


def _group(path: str) -> str:
    top = path.partition(".")[0]
    return top if top in GROUPS else ""


def _below(section: type[Section]) -> Iterator[type[Section]]:
    """All subclasses."""
    for one in section.__subclasses__():
        yield one
        yield from _below(one)


def _table(prefix: str, section: type[Section], schema: Mapping[str, Any]) -> str:
    """The rows of a section's own keys, or nothing where it has none; sections of `Config` have tables of their own."""
    properties = (schema if section is Config else schema["$defs"][section.__name__]).get("properties", {})
    rows = ""
    for key in keys.walk(section):
        inner = key.section is not None and (section is Config or prefix)
        if inner or "." in key.path or key.path not in properties:
            continue
        default, unit = keys.flow(keys.default(key)), f" [{key.unit}]" if key.unit else ""
        default = "required" if default == "???" else f"`{default}`"
        meaning = _escaped(f"{key.info.description}{unit}")
        rows += f"| `{prefix}{key.path}` | {_type(properties[key.path], schema)} | {default} | {meaning} |\n"
    return rows and f"| key | type | default | meaning |\n|---|---|---|---|\n{rows}"


def _type(node: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """A type of JSON Schema in words."""
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_type(one, schema) for one in node["anyOf"]))
    if "$ref" in node:
        inside = schema["$defs"][node["$ref"].rpartition("/")[2]]
        name = inside.get("title", "")
        return f"[{name}](#{name.lower()})" if "properties" in inside else _type(inside, schema)
    if "enum" in node or "const" in node:
        return ", ".join(f"`{keys.flow(value)}`" for value in node.get("enum", [node.get("const")]))
    kind = node.get("type", "any")
    if kind == "array":
        inner = node.get("items") or (node.get("prefixItems") or [{}])[0]
        return f"list of {_type(inner, schema)}" if inner else "list"
    if kind == "object":
        inner = node.get("additionalProperties")
        return f"mapping to {_type(inner, schema)}" if isinstance(inner, dict) and inner else "mapping"
    words = {
        "minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"
    }  # fmt: skip
    limits = [text.format(node[name]) for name, text in words.items() if name in node]
    return " ".join([{"boolean": "`true` or `false`", "null": "`null`"}.get(kind, kind), *limits])


def main(words: list[str]) -> int:
    """Write the files, or with `--check` only name those that differ. Returns the exit code."""
    check, code = "--check" in words, 0
    for file, text in files().items():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            print(f"{file.relative_to(ROOT)} {'differs from the schema' if check else 'written'}")
            code = int(check)
            if not check:
                file.write_text(text, encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
