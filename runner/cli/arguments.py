"""Command-line arguments, preprocessed for Hydra.

Four things are ours and not Hydra's: verbs (`run plan +recipe=x` becomes `job=plan +recipe=x`), values that Hydra's
grammar cannot read (see `values`), mappings whose keys the user chooses (`model.args.width=8` needs no plus,
`parallel.strategies={}` empties, a mesh replaces another mesh, arguments in braces those of another target), and the
refusal to run under another launcher, where every process would start all ranks.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.errors import HydraException

from runner.cli.recipes import catalogue
from runner.cli.verbs import VERBS
from runner.config.keys import enumerated, open_mappings
from runner.errors import ConfigError, allowed

# Options of Hydra that take the next word as their value.
OPTIONS_WITH_VALUE = frozenset(
    "--cfg -c --package -p --config-path -cp --config-name -cn --config-dir -cd --experimental-rerun --info -i".split()
)
# The variables in which launchers pass each process its rank and world size, and what `launch` calls them.
LAUNCHERS = {
    "OMPI_COMM_WORLD_RANK": ("OMPI_COMM_WORLD_SIZE", "mpirun"),
    "SLURM_PROCID": ("SLURM_NTASKS", "slurm"),
    "PMI_RANK": ("PMI_SIZE", "mpirun"),
    "RANK": ("WORLD_SIZE", "torchrun"),
}
GROUPS = ("recipe", "parallel", "cluster", "launch", "job")
NO_NAME = re.compile(r"[+-]?[\d._]+(e[+-]?\d+)?|null|true|false|nan|[+-]?inf", re.IGNORECASE)
"""What Hydra does not take for a name."""
TUPLE = re.compile(r"\s*\(.*,.*\)\s*", re.DOTALL)
DRY_RUN = "launch.dry_run=true"
BY_HAND = ("launch.rank=", "launch.host=")
"""The part of a command that is one of several for a run."""
SLICES = "explain.slices"
FLAGS = {("launch", "--dry-run"): DRY_RUN, ("calibrate", "--force"): "calibrate.force=true"}
"""Options of single verbs, and the overrides that they are."""
BY_PATH = ("parallel.strategies", "parallel.place", "parallel.pipeline.cuts")
"""Mappings whose keys are dotted paths: `~parallel.strategies.dense1.matmul` takes one of them away."""
REPLACED = ("parallel.mesh",)
"""Mappings that are one value: another one takes their place, whatever its keys are."""
NO_FILE = (
    "`run explain` explains the plan of a config, and {word!r} is a file or folder. `run explain +recipe=NAME "
    "parallel.plan=FILE` explains a saved plan of that recipe, `run diff FILE FILE` compares two, and report.html in a "
    "run folder shows its plan."
)


def split_verb(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The verb among the words (None if there is none) and the other words.

    Raises:
        ConfigError: A word is not a verb, option or override, or there are two verbs.
    """
    if "--diff" in words and "plan" in words:  # plans are compared without a config
        return "diff", [word for word in words if word not in ("--diff", "plan")]
    verb: str | None = None
    words, rest = _with_slices(words)
    previous = ""
    for word in words:
        bare = word and word[0] not in "-+~" and "=" not in word and previous not in OPTIONS_WITH_VALUE
        previous = word
        if not bare or (verb is not None and not VERBS[verb].composed):
            rest.append(word)
        elif verb is not None and VERBS[verb].argument and not any(VERBS[verb].argument in given for given in rest):
            if verb == "explain" and (os.sep in word or word.endswith(".json")):
                raise ConfigError("MW101", NO_FILE.format(word=word))
            rest.append(f"{VERBS[verb].argument}={quoted(word)}")
        elif word not in VERBS:
            raise ConfigError("MW101", _stranger(verb, word))
        elif verb is not None:
            raise ConfigError("MW101", f"two verbs are given, {verb!r} and {word!r}; a command has one.")
        else:
            verb = word
    if verb != "explain" and any(word.startswith(f"{SLICES}=") for word in rest):
        raise ConfigError("MW101", "--slices NAME is an option of `run explain`.")
    return verb, [FLAGS.get((verb or "", word), word) for word in rest]


def _with_slices(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words without `--slices NAME`, and what it means. Raises ConfigError without a name."""
    others: list[str] = []
    names: list[str] = []
    remaining = iter(words)
    for word in remaining:
        option, equals, name = word.partition("=")
        if option != "--slices":
            others.append(word)
            continue
        name = name if equals else next(remaining, "")
        if not name or name.startswith("+") or "=" in name:
            raise ConfigError(
                "MW101", "--slices needs the name of a parameter, batch entry or operator, such as --slices '*'."
            )
        names.append(f"{SLICES}={quoted(name)}")
    return others, names


def for_hydra(verb: str | None, words: Iterable[str]) -> list[str]:
    """The words as Hydra understands them: first the overrides, then the options, between which its parser stops."""
    overrides = [] if verb is None else [f"job={verb}"]
    options: list[str] = []
    mappings, previous = open_mappings(), ""
    for word in words:
        is_value = previous in OPTIONS_WITH_VALUE and not (previous in ("--info", "-i") and "=" in word)
        previous = word
        if is_value or word.startswith("-"):
            options.append(word)
        else:
            overrides += _opened(_readable(_meant(verb, word)), mappings)
    return _cleared(overrides, mappings) + overrides + options


def check_options(words: Sequence[str]) -> str | None:
    """The value of `--config-dir`. Raises ConfigError for an option that does not exist or lacks its value."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            given = get_args_parser().parse_args(list(words))
        if given.config_path is not None:
            raise ConfigError(
                "MW101",
                f"--config-path {given.config_path} would replace the config of run itself; --config-dir "
                f"{given.config_path} adds a folder with configs of your own (recipe/NAME.yaml is +recipe=NAME).",
            )
        config_dir: str | None = given.config_dir
        return config_dir
    except SystemExit as exit_:
        if exit_.code:
            reason = printed.getvalue().strip().rpartition("error: ")[2]
            raise ConfigError("MW101", f"{reason}; `run --help` shows what can be given.") from None
        raise


def complete(line: str) -> tuple[str, list[str]]:
    """A line to complete in Hydra's syntax, and the verbs that match the word being typed."""
    command, *before, typing = line.split(" ") if " " in line else (line, "")
    before = [word for word in before if word]
    if before and before[0] in VERBS:
        return " ".join([command, f"job={before[0]}", *before[1:], typing]), []
    return line, [] if before else [verb for verb in VERBS if verb.startswith(typing)]


def values(line: str) -> list[str]:
    """The completions of the word being typed, for keys with a fixed set of values."""
    key, equals, start = line.rpartition(" ")[2].partition("=")
    options = enumerated(key.lstrip("+")) if equals else ()
    return [f"{key}={option}" for option in options if option.startswith(start)]


def refuse_launcher(typed: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if another launcher started this process as one of several, unless it names its part."""
    if any(word.startswith(BY_HAND) for word in typed):
        return
    for rank, (size, launcher) in LAUNCHERS.items():
        if rank in environment and environment.get(size) != "1":
            ranks = f"world_size={environment[size]} " if environment.get(size, "").isdecimal() else ""
            raise ConfigError(
                "MW102",
                f"run starts its own ranks, but it was itself started as one of several processes ({rank} = "
                f"{environment[rank]} is set, as torchrun, srun and mpirun do); start it once, without a launcher, "
                f"sweeps (-m) too: `run {ranks}launch={launcher} ...` starts ranks with {launcher}. Or unset {rank} "
                "if it is a leftover.",
            )


def again(typed: Sequence[str], key: str, folder: Path) -> str:
    """The command line that continues in `folder`, the value of `key`."""
    place = str(folder) if re.fullmatch(r"[\w./+:-]+", str(folder)) else repr(str(folder))
    new = (f"{key}={place}", "train.resume=auto")
    keys = tuple(word.partition("=")[0] for word in new)
    return shlex.join(["run", *(word for word in typed if word.lstrip("+").partition("=")[0] not in keys), *new])


def _stranger(verb: str | None, word: str) -> str:
    """The error message for a word that is neither a verb nor an override."""
    names = list(catalogue())
    if word in names or (not get_close_matches(word, VERBS) and (near := get_close_matches(word, names, n=1))):
        name = word if word in names else near[0]
        command = " ".join(["run", *([verb] if verb else []), f"+recipe={name}"])
        return f"{word!r} is neither a verb nor KEY=VALUE. A recipe is chosen with a plus: `{command}`."
    return f"{word!r} is neither a verb nor KEY=VALUE.{allowed(word, VERBS)}"


def _meant(verb: str | None, word: str) -> str:
    """`run predict checkpoint=PATH` names the checkpoint to predict with, not how training saves them."""
    named = verb == "predict" and word.startswith("checkpoint=") and not word.startswith("checkpoint={")
    return f"predict.{word}" if named else word


def _readable(word: str) -> str:
    key, equals, value = word.partition("=")
    if not key.strip("+~ "):
        raise ConfigError("MW103", f"{word!r} names no key; overrides are KEY=VALUE.")
    if TUPLE.fullmatch(value):
        lists = value.strip().replace("(", "[").replace(")", "]")
        raise ConfigError("MW103", f"{word!r}: lists are written with square brackets: '{key}={lists}'.")
    if key.lstrip("+") in GROUPS and NO_NAME.fullmatch(value):
        return key + equals + quoted(value)
    return key + equals + readable(value)


def _cleared(overrides: Sequence[str], mappings: Mapping[str, bool]) -> list[str]:
    """Overrides, to come first, that remove arguments of a recipe which were for another target: those of every section
    for which `overrides` give a target, and arguments in braces."""
    given = {path for word in overrides for path in _given(word)}
    sections = (mapping.removesuffix(".args") for mapping in mappings if mapping.endswith(".args"))
    return [f"++{section}.args=null" for section in sections if {f"{section}.target", f"{section}.args"} <= given]


def _given(word: str) -> Iterator[str]:
    """The dotted keys that an override gives a value, those of mappings in its braces included."""
    key, _, value = word.lstrip("+").partition("=")
    if key.endswith(".target"):
        yield key
    if value.startswith("{"):
        with contextlib.suppress(HydraException):  # which reports the error when it composes
            parsed = OverridesParser.create().parse_override(word)._value
            for choice in parsed.list if isinstance(parsed, ChoiceSweep) else [parsed]:
                yield from _below(key, choice)


def _below(key: str, value: object) -> Iterator[str]:
    yield key
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield from _below(f"{key}.{name}", inner)


def _opened(word: str, mappings: Mapping[str, bool]) -> list[str]:
    """The overrides that apply `word` to open mappings; Hydra alone would merge mappings in braces."""
    key, equals, value = word.partition("=")
    name = key.lstrip("+~")
    if key.startswith("~"):
        for mapping in BY_PATH:
            if name.startswith(f"{mapping}."):
                return [f"++{mapping}={{-{name.removeprefix(mapping + '.')}: null}}"]
        if name in mappings:
            return [f"++{name}=null"] if mappings[name] else [f"++{name}=null", f"++{name}={{}}"]
    if name in mappings and (value == "{}" or (name in REPLACED and value.startswith("{"))):
        return [f"++{name}=null", f"++{name}={value}"]
    inside = any(key == mapping or key.startswith(f"{mapping}.") for mapping in mappings)
    # a section in braces may hold such a mapping: optimizer.scheduler={target: ..., args: {step_size: 2}}
    around = value.startswith("{") and any(mapping.startswith(f"{key}.") for mapping in mappings)
    return [f"++{word}" if equals and (inside or around) else word]


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
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + (found[2] and "\\'"), text) + "'"


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
