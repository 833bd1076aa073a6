"""Resolve dotted names of the config to objects, and build them with their arguments.

Models, losses, datasets, optimizers, schedulers, metrics and collate functions are resolved only here. The invariant:
any error in a name, its arguments or the code behind them is raised as one `ConfigError` paragraph that starts with the
config key; no other exception leaves this file.

The user's working directory is searched last, so that a file there can never hide an installed package;
`runner.packages` resolves names that the user's and this project's packages share.
Nothing here imports torch; the named module may.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from runner import packages
from runner.errors import ConfigError, text_of
from strategies.core.errors import closest

EXTRAS = {"datasets": "data", "peft": "lora", "torchmetrics": "metrics", "transformers": "hf"}
"""Packages that the project knows but does not need, with the extra that installs each."""
OWN = tuple(str(Path(__file__).parents[2] / name) + os.sep for name in ("meshwright", "runner", "strategies"))
"""Folders whose lines do not help a user."""
HYDRA_TARGET = "_target_"
HYDRA_KEYS = (HYDRA_TARGET, "_args_", "_partial_", "_recursive_", "_convert_")
CONVERSIONS = ("none", "partial", "object", "all")
"""Values of `_convert_`, which change nothing: lists and mappings are Python's own."""
Completion = Callable[[Callable[..., Any]], Callable[..., Any]]


def resolve(target: str, what: str) -> Callable[..., Any]:
    """The class or function that the dotted name `target` means, e.g. `torch.nn.MSELoss`.

    Args:
        what: The full config key that holds the name (`model.target`, `data.collate`); errors start with it.

    Raises:
        ConfigError: Not a dotted name, no such module or attribute, a module that fails while it is imported, or
            something that cannot be called.
    """
    words = target.split(".")
    if not _is_dotted(target):
        raise ConfigError("MW301", f"{what} = {target!r} is not a dotted name; write it as package.module.Name.")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
        importlib.invalidate_caches()
    packages.add_theirs()
    meant: Any = _top_level(words[0], target, what)
    for position, word in enumerate(words[1:], start=1):
        meant = _member(meant, ".".join(words[:position]), word, target, what)
    if isinstance(meant, ModuleType):
        inside = [name for name, value in vars(meant).items() if callable(value) and not name.startswith("_")]
        raise ConfigError(
            "MW301", f"{what} = {target!r} is a module; name a class or function in it.{closest('', inside)}"
        )
    if not callable(meant):
        raise ConfigError("MW301", f"{what} = {target!r} is a {type(meant).__name__}; a class or function is needed.")
    function: Callable[..., Any] = meant
    return function


def build(target: str, args: Mapping[str, Any], what: str) -> Any:
    """What the class or function named `target` returns for the keyword arguments `args`.

    Args:
        what: The config section that holds both (`model`, `data`); errors name `what.target` or `what.args`.

    Raises:
        ConfigError: As `resolve`, for arguments that do not fit the signature, and for any exception of the call, with
            the line that raised it.
    """
    return call(resolve(target, f"{what}.target"), args, target, what)


def call(
    function: Callable[..., Any], args: Mapping[str, Any], target: str, what: str, complete: Completion | None = None
) -> Any:
    """`build` for a function that is resolved already; `target` is its dotted name, for the messages.

    Args:
        complete: Applied to the functions of nested objects before they are called, e.g. to pass schedulers their
            optimizer.
    """
    made = _each_nested(args, f"{what}.args", complete)
    _refuse_unknown(function, made, target, f"{what}.args")
    _refuse_lacking(function, made, target, f"{what}.args")
    try:
        with _default_dtype():
            return function(**made)
    except ConfigError:
        raise
    except ImportError as error:
        raise ConfigError("MW802", f"{what}: {target} lacks a package: {describe(error)}.") from error
    except Exception as error:
        raise ConfigError("MW304", f"{what}: {target} cannot be made with {what}.args: {describe(error)}.") from error


@contextmanager
def _default_dtype() -> Iterator[None]:
    """A constructor that sets torch's default dtype sets it for itself: the other objects and ranks do without it."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_default_dtype()
    try:
        yield
    finally:
        if torch is not None:
            torch.set_default_dtype(before)


def nested(value: Any, what: str, complete: Completion | None = None) -> Any:
    """A value of `args` with every object in it made, innermost first, wherever it stands in mappings and lists.

    An object is a mapping {target: package.module.Name, args: {...}}, whose args may be left out, or, as
    `hydra.utils.instantiate` has it, {_target_: package.module.Name, NAME: VALUE, ...}, with `_args_` for positional
    arguments, `_partial_: true` for the function itself with these arguments, and `_recursive_: false` for arguments
    that are data in any case. All other values are plain data.

    Args:
        what: The full config key of the value; errors start with it. Raises ConfigError as `build`.
        complete: See `call`.
    """
    if isinstance(value, list | tuple):
        return type(value)(nested(inner, f"{what}[{number}]", complete) for number, inner in enumerate(value))
    if not isinstance(value, Mapping):
        return value
    key = HYDRA_TARGET if value.get(HYDRA_TARGET) is not None else "target"
    name, args = value.get(key), value.get("args", {})
    if key == HYDRA_TARGET:
        args = {str(key): inner for key, inner in value.items() if key not in HYDRA_KEYS}
    if key == "target" and set(value) == {"target", "args"} and _is_dotted(name) and isinstance(args, list | tuple):
        raise ConfigError(
            "MW303", f"{what}.args = {list(args)}: arguments are given by their names, such as {{NAME: VALUE}}."
        )
    if key == HYDRA_TARGET or (set(value) <= {"target", "args"} and isinstance(args, Mapping) and _is_dotted(name)):
        function = resolve(str(name), f"{what}.{key}")
        if (conversion := value.get("_convert_", "none")) not in CONVERSIONS:
            raise ConfigError(
                "MW303", f"{what}._convert_ = {conversion!r} is none of {', '.join(CONVERSIONS)}; leave it out."
            )
        positional = value.get("_args_", [])
        if value.get("_recursive_", True):
            positional = nested(positional, f"{what}._args_", complete)
        else:
            function, args = functools.partial(function, **args), {}
        function = functools.partial(complete(function) if complete else function, *positional)
        if value.get("_partial_"):
            return functools.partial(function, **_each_nested(args, what, complete))
        return call(function, args, str(name), what, complete)
    return _each_nested(value, what, complete)


def _each_nested(values: Mapping[str, Any], what: str, complete: Completion | None) -> dict[str, Any]:
    """Arguments by name, one of which may have the name `target`."""
    return {key: nested(inner, f"{what}.{key}", complete) for key, inner in values.items()}


def _is_dotted(name: object) -> bool:
    words = name.split(".") if isinstance(name, str) else []
    return len(words) > 1 and all(word.isidentifier() for word in words)


def bound(target: str, args: Mapping[str, Any], what: str) -> Callable[..., Any]:
    """The function `target` of one argument, with the others given once and for all; `what` is the full config key.

    Raises ConfigError: as `resolve`, and for `args` that do not fit the signature, as `{what}_args`.
    """
    function = resolve(target, what)
    if not args:
        return function
    _refuse_unknown(function, args, target, f"{what}_args")
    return functools.partial(function, **nested(args, f"{what}_args"))


def names(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` has a parameter of that name, which it does not only take among its **kwargs."""
    parameter = (_parameters(function) or {}).get(name)
    return parameter is not None and parameter.kind is not parameter.VAR_KEYWORD


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` takes the keyword argument `name`; true where its signature is not known."""
    parameters = _parameters(function)
    kinds = {one.kind for one in (parameters or {}).values()}
    return parameters is None or name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _top_level(name: str, target: str, what: str) -> ModuleType:
    if name in sys.modules or importlib.util.find_spec(name):
        return _import(name, target, what)
    installed = {module.name for module in pkgutil.iter_modules()} | sys.stdlib_module_names
    near = difflib.get_close_matches(name, sorted(installed), n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    if Path("src", name).is_dir() or Path("src", f"{name}.py").is_file():
        guess = f" It is in src: install it (pip install -e .), set PYTHONPATH=src, or write src.{target}."
    if name in EXTRAS:
        guess = f' It is an optional part: pip install "meshwright[{EXTRAS[name]}]".'
    raise ConfigError(
        "MW301",
        f"{what} = {target!r}: there is no module {name!r}, neither installed nor in the working directory.{guess}",
    )


def _import(name: str, target: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a script without a main guard may exit
        text = describe(error)
        raise ConfigError("MW302", f"{what} = {target!r}: importing the module {name} fails: {text}.") from error


def _member(owner: Any, path: str, word: str, target: str, what: str) -> Any:
    """The attribute `word` of `owner`, which was reached by `path`, or else its submodule of that name."""
    try:
        return getattr(owner, word)
    except AttributeError:
        pass
    except Exception as error:  # lazy packages import only now
        raise ConfigError(
            "MW302", f"{what} = {target!r}: looking up {path}.{word} fails: {describe(error)}."
        ) from error
    options = [name for name in dir(owner) if not name.startswith("_")]
    if hasattr(owner, "__path__"):
        name = f"{owner.__name__}.{word}"
        if importlib.util.find_spec(name):
            return _import(name, target, what)
        options += [module.name for module in pkgutil.iter_modules(owner.__path__)]
    text = f"{path} has no {word!r}.{_hidden(f'{path}.{word}', owner)}{closest(word, sorted(set(options)))}"
    raise ConfigError("MW301", f"{what} = {target!r}: {text}")


def _hidden(dotted: str, owner: Any) -> str:
    """A sentence for the user whose own `./xml/net.py` or `./xml.py` is behind an installed package `xml`."""
    here = Path.cwd()
    stem, top = here.joinpath(*dotted.split(".")), dotted.partition(".")[0]
    places = (stem.with_suffix(".py"), stem / "__init__.py", here / f"{top}.py")
    mine = next((path for path in places if path.is_file()), None)
    loaded = getattr(owner, "__file__", None)
    if mine is None or loaded is None or here in Path(loaded).resolve().parents:
        return ""
    return f" {mine.relative_to(here)} is not searched, because another package is called {top} too; rename yours."


def _refuse_unknown(function: Callable[..., Any], args: Mapping[str, Any], target: str, where: str) -> None:
    for name in args:
        if not accepts(function, name):
            options = closest(name, _parameters(function) or ()) or " It takes no arguments."
            leave_out = f" '~{where}.{name}' on the command line leaves out what a recipe gives."
            raise ConfigError("MW303", f"{where}: {target} takes no argument {name!r}.{options}{leave_out}")


def _refuse_lacking(function: Callable[..., Any], args: Mapping[str, Any], target: str, where: str) -> None:
    parameters = (_parameters(function) or {}).values()
    needed = (one.name for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD)
    if lacking := [name for name in needed if name not in args]:
        names = " and ".join(map(repr, lacking))
        raise ConfigError("MW303", f"{where}: {target} needs {names}; set {where}.{lacking[0]}=VALUE.")


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    """The parameters that a keyword argument can reach, or None if Python has no signature."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):  # written in C
        return None
    beyond = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    return {name: one for name, one in signature.parameters.items() if one.kind not in beyond}


def describe(error: BaseException) -> str:
    """The exception in words, with the innermost line that is not of an installed library."""
    text = " ".join(text_of(error).split()).rstrip(".")
    summary = f"{type(error).__name__}: {text}" if text else type(error).__name__
    foreign = ("<", *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")), *OWN)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = frame.filename
        if not file.startswith(foreign):
            own = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
            return f"{summary} ({own}, line {frame.lineno})"
    return summary
