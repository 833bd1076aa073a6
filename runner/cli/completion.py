"""What may follow on a command line that is being typed: verbs, recipes, keys and values.

Every TAB is a process, so this module reads files and imports neither Hydra nor the schema: keys and their values are
in `words.json`, which is generated from the schema. Below keys whose own keys a recipe chooses (`model.args.`) only the
composed config knows what may follow; that is left to Hydra's own completion.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from runner.cli.verbs import VERBS
from runner.packages import ROOT

QUERY = "--complete"
"""`COMP_LINE='run plan +rec' run --complete` prints completions."""
SHELLS = ("bash", "zsh", "fish")
WORDS = Path(__file__).with_name("words.json")
OPTIONS = {
    "": ("--help", "--version", "--multirun", "--cfg"),
    "launch": ("--dry-run",),
    "calibrate": ("--force",),
    "explain": ("--slices",),
    "plan": ("--diff",),
    "recipes": ("--copy",),
    "completion": ("--install",),
}
"""Options of the command, and those of single verbs."""
GROUPS = ("parallel", "cluster", "launch")


def offers(line: str) -> list[str] | None:
    """The completions of the last word of `line`, each complete, or one that ends in `=` or `.` where more follows.
    None: Hydra knows them. An empty list: a shell offers files."""
    before, typing = line.split(" ")[1:-1], line.rpartition(" ")[2]
    verb = next((word for word in before if word in VERBS), "")
    if typing.startswith("-"):
        return _beginning(typing, (*OPTIONS[""], *(OPTIONS.get(verb, ()) if verb else ())))
    if verb and not VERBS[verb].composed:
        return _beginning(typing, {"recipes": _recipes(), "completion": SHELLS}.get(verb, ()))
    key, equals, start = typing.partition("=")
    name = key.lstrip("+~")
    sign = key[: len(key) - len(name)]
    if equals:
        return [f"{key}={value}" for value in _beginning(start, _values(name))]
    words = [*VERBS] if not (sign or any(word in VERBS for word in before)) else []
    if not any("recipe=" in word for word in before) and sign != "~":
        words.append("+recipe=")
    keys = [one.rstrip("=") if sign == "~" else one for one in _next(name)]
    found = _beginning(typing, words) + [f"{sign}{one}" for one in dict.fromkeys(keys) if one.startswith(name)]
    return None if not found and "." in name else found


def _beginning(start: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(start)]


def _keys() -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(WORDS.read_text(encoding="utf-8"))
    return found


def _next(name: str) -> list[str]:
    """Sections and keys one dot below: `parallel.se` leads to `parallel.search=` and `parallel.server.`"""
    parent = name.rpartition(".")[0]
    below = len(f"{parent}.") if parent else 0
    found: dict[str, None] = {}
    for key in _keys():
        if key.startswith(f"{parent}." if parent else ""):
            inner, dot, _ = key[below:].partition(".")
            found[key[:below] + inner + (dot or "=")] = None
    return [*(f"{group}=" for group in GROUPS if not parent), *found]


def _values(name: str) -> list[str]:
    if name == "recipe":
        return _recipes()
    chosen = sorted(file.stem for file in (ROOT / "conf" / name).glob("*.yaml")) if name in GROUPS else []
    return chosen + _keys().get(name, [])


def _recipes() -> list[str]:
    """The names of the user's recipes and of those that ship."""
    folders = dict.fromkeys((Path("recipes").absolute(), ROOT / "recipes"))
    return sorted({file.relative_to(one).with_suffix("").as_posix() for one in folders for file in one.rglob("*.yaml")})


BASH = """_meshwright() {
    local line=${COMP_LINE:0:COMP_POINT} current=${COMP_WORDS[COMP_CWORD]} word IFS=$'\\n'
    word=${line##* }
    [[ $current == [=:] ]] && current=
    local typed=${word%"$current"} found
    COMPREPLY=()
    for found in $(COMP_LINE=$line "${COMP_WORDS[0]}" --complete 2>/dev/null); do
        [[ $found == *[=.] ]] || found+=" "
        COMPREPLY+=("${found#"$typed"}")
    done
}
complete -o nospace -o bashdefault -o default -F _meshwright run meshwright
"""
ZSH = """(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_meshwright() {
    local -a found more
    found=(${(f)"$(COMP_LINE="${(j: :)words[1,CURRENT]}" ${words[1]} --complete 2>/dev/null)"})
    more=(${(M)found:#*[=.]})
    found=(${found:#*[=.]})
    (( $#found + $#more )) || { _files; return }
    compadd -- $found
    compadd -S '' -- $more
}
compdef _meshwright run meshwright
"""
FISH = """function __meshwright_complete
    set -lx COMP_LINE (commandline -cp)
    set -l words (commandline -opc)
    $words[1] --complete 2>/dev/null
end
complete -c run -a '(__meshwright_complete)'
complete -c meshwright -a '(__meshwright_complete)'
"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
