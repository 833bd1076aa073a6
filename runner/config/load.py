"""Validate a config composed by Hydra as a frozen `Config`, or one read from the file in the run folder.

Invariant: all errors of a config are raised as one `ConfigError`, a paragraph per fault that names the dotted key,
the value, the allowed values, the closest match and where the value came from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from pydantic import ValidationError

from runner.config import cluster, exclusive, launch
from runner.config.exclusive import shown
from runner.config.keys import unknown
from runner.config.origins import Origins
from runner.config.parallel import Mode
from runner.config.schema import Config
from runner.errors import ConfigError, allowed

# The project's messages for pydantic's error types; braces are filled from the error's context.
MEANINGS = {
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "int_parsing": "must be an integer",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "dict_type": "must be a mapping such as {{name: value}}",
    "model_type": "must be a mapping such as {{name: value}}",
    "tuple_type": "must be a list",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:.15g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:.15g}",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}

SCALARS = frozenset(("int_type", "int_parsing", "float_type", "float_parsing", "bool_type", "bool_parsing"))
"""pydantic's errors of a string where a number or a boolean belongs."""
NO_MODEL = (
    "there is nothing to run: choose a recipe, e.g. `run +recipe=quickstart` (`run recipes` lists them, `run --help` "
    "explains), or give your own with model.target=package.module.Class and data.target=package.module.Class."
)
KIND = re.compile(r"constrained-\w+|(tuple|list|dict)\[.*")
"""How pydantic names a kind of value in a union."""
NODES_AGAIN = ("cluster", "machine", "levels", "node", "size")
"""Where `cluster.nodes` stands a second time in the clusters that come with the package."""


def load(composed: DictConfig, origins: Origins) -> Config:
    """Validate a composed config (without its `hydra` node). Raises ConfigError."""
    if strangers := [str(key) for key in composed if key not in Config.model_fields]:
        raise ConfigError("MW201", *(unknown(key) + origins.sentence([key]) for key in strangers))
    try:
        values = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        if error.full_key == "model.target":
            raise ConfigError("MW203", NO_MODEL) from None
        raise ConfigError("MW202", _missing(error.full_key)) from None
    except OmegaConfBaseException as error:
        text = " ".join(str(error).splitlines()[0].split())
        raise ConfigError("MW206", f"{error.full_key}: {text}.{origins.sentence([str(error.full_key)])}") from None
    assert isinstance(values, dict)
    for rule in exclusive.SOURCES:
        if rule.breaks(values):
            raise ConfigError("MW205", rule.paragraph(values) + origins.sentence([rule.first, rule.second]))
    for name, replaced in (("cluster", cluster.from_file), ("launch", launch.from_files)):
        if isinstance(section := values.get(name), Mapping):
            values |= {name: replaced(section)}
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        values = _decoded(values, composed, error)
        config = validated(values, origins)
    ranks = config.launch.ranks or sum(group.devices for group in config.cluster.groups) or None
    if config.world_size is None and ranks is not None:
        config = validated(values | {"world_size": ranks}, origins)
    chosen = origins.choice("parallel")
    if chosen in get_args(Mode) and chosen != config.parallel.mode and not origins.overrides_key("parallel.mode"):
        raise ConfigError(
            "MW207",
            f"parallel = {chosen!r} has no effect, because parallel.mode = {config.parallel.mode!r} comes after it; "
            f"write parallel.mode={chosen}.{origins.sentence(['parallel.mode'])}",
        )
    return config


def _decoded(values: Any, composed: DictConfig, error: ValidationError) -> Any:
    """The values, with numbers and booleans for strings that references stand for (`${oc.env:NAME}` always is one),
    where the schema asks for them by `error`."""
    for place in [one["loc"] for one in error.errors() if one["type"] in SCALARS and isinstance(one["input"], str)]:
        section: Any = composed
        for count, key in enumerate(place):
            if not OmegaConf.is_config(section) or key not in section:
                break
            if OmegaConf.is_interpolation(section, key):
                values = _with_value(values, place[: count + 1], lambda text: OmegaConf.create(f"value: {text}").value)
                break
            section = section._get_node(key)
    return values


def _with_value(values: Any, place: tuple[Any, ...], change: Callable[[str], Any]) -> Any:
    """Nested dicts with the value at one place changed."""
    if not place:
        return change(values)
    return {**values, place[0]: _with_value(values[place[0]], place[1:], change)}


def read(file: Path) -> Config:
    """The config of a run folder's `config.json`. Raises ConfigError if it is missing or does not validate."""
    from strategies.core.bounded_files import read_bytes  # no part of the front end needs it

    try:
        return Config.model_validate_json(read_bytes(file))
    except OSError as error:
        raise ConfigError("MW208", f"{file} cannot be read: {error.strerror}.") from None
    except ValidationError as error:
        raise ConfigError("MW208", *(f"{file}: {_paragraph(e, Origins())}" for e in error.errors())) from None
    except ValueError as error:
        raise ConfigError("MW208", f"{file} cannot be read: {error}.") from None


def validated(values: Any, origins: Origins) -> Config:
    """The config with these plain values. Raises ConfigError as `load`."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        found = _one_each(_without_kinds(error.errors()))
        if any(one["loc"] == ("cluster", "nodes") for one in found):
            found = [one for one in found if one["loc"] != NODES_AGAIN]
        raise ConfigError.of((_code(e), _paragraph(e, origins)) for e in found) from None


def _without_kinds(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The errors without the kinds of value of a union that pydantic puts into their places; where all kinds have one,
    that of the kind that the value has."""
    by_place: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in errors:
        place = tuple(part for part in one["loc"] if not KIND.fullmatch(str(part)))
        by_place.setdefault(place, []).append({**one, "loc": place, "kind": place != one["loc"]})
    return [
        one
        for found in by_place.values()
        for one in found
        if not one["kind"] or one is next((e for e in found if not e["type"].endswith("_type")), found[0])
    ]


def _one_each(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge the errors of an enumeration and another type, a union, into one: that of the other type, with `words`."""
    words = {one["loc"][:-1]: one for one in errors if "".join(map(str, one["loc"][-1:])).startswith("literal[")}
    found: list[Mapping[str, Any]] = []
    for one in errors:
        place = next((place for place in words if one["loc"][: len(place)] == place and one is not words[place]), None)
        if place is not None:
            loc = place + one["loc"][len(place) + 1 :]
            found.append({**one, "loc": loc, "words": words[place]["ctx"]["expected"]})
        elif all(one is not other for other in words.values()):
            found.append(one)
    return found


def _paragraph(error: Mapping[str, Any], origins: Origins) -> str:
    dotted = ".".join(str(part) for part in error["loc"] if part != "[key]")
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    concerned: Sequence[str] = [dotted]
    if kind == "refusal":
        text, concerned = str(context["text"]), context["keys"]
    elif kind == "extra_forbidden":
        text = unknown(dotted)
    elif kind == "missing":
        text, concerned = _missing(dotted), []
    elif kind == "literal_error":
        options = _words(context["expected"])
        text = f"{dotted} = {shown(value)} is not allowed.{allowed(str(value), (o.lower() for o in options))}"
    elif kind == "value_error":
        text = f"{dotted} = {shown(value)} {context['error']}".rstrip(".")
        text += "" if text.endswith("?") else "."
    elif kind in MEANINGS:
        text = f"{dotted} = {shown(value)}: {MEANINGS[kind].format(**context)}."
    else:
        text = f"{dotted} = {shown(value)}: {error['msg'][:1].lower()}{error['msg'][1:]}."
    if kind != "refusal" and "words" in error:
        text += allowed(str(value), _words(error["words"])).replace(" Allowed:", " Allowed too:")
    if value in ("None", "none"):
        text += " No value is written null."
    return text + origins.sentence(concerned)


def _code(error: Mapping[str, Any]) -> str:
    if error["type"] == "refusal":
        return str(error["ctx"]["code"])
    return {"extra_forbidden": "MW201", "missing": "MW202"}.get(error["type"], "MW204")


def _words(expected: str) -> list[str]:
    """The values in the list of a message such as `'none', 'full' or 'auto'`."""
    return re.findall(r"[\w-]+", expected.replace(" or ", ", "))


def _missing(dotted: str | None) -> str:
    return f"{dotted} has no value and no default; set it with {dotted}=VALUE."
