"""The callbacks of a run (`train.callbacks`) as objects with hooks; `runner.training.hooks` calls them."""

from __future__ import annotations

from typing import Any

from runner.build.targets import build, resolve
from runner.config.schema import CALLBACKS, Config
from runner.errors import ConfigError, allowed

HOOKS = (
    *("start", "before_step", "before_update", "after_step", "before_evaluation", "evaluation"),
    *("checkpoint", "exception", "end"),
)
"""Methods that a callback may have."""
RANKS = ("all", "first")
"""Values of a callback's attribute `ranks`."""


def followed(config: Config) -> dict[str, str]:
    """The results of evaluations that callbacks follow, by where the callbacks stand. Raises ConfigError as
    `callbacks`."""
    made = enumerate(callbacks(config).items())
    names = {f"train.callbacks[{n}] ({name})": getattr(one, "follows", None) for n, (name, one) in made}
    return {where: name for where, name in names.items() if name is not None}


def copies(config: Config) -> int:
    """How many copies of what the optimizer updates the callbacks keep. Raises ConfigError for an unknown target."""
    forms = enumerate(config.train.callbacks)
    made = (resolve(CALLBACKS.get(form.target, form.target), f"train.callbacks[{n}].target") for n, form in forms)
    return sum(getattr(one, "copies", 0) for one in made)


def callbacks(config: Config) -> dict[str, Any]:
    """The callbacks of a run by name, in the order of the config: `target`, with a number where it is there twice.

    Raises:
        ConfigError: a target that is not found or cannot be made, or an object that is no callback.
    """
    made: dict[str, Any] = {}
    for number, form in enumerate(config.train.callbacks):
        where = f"train.callbacks[{number}]"
        callback = build(CALLBACKS.get(form.target, form.target), form.args, where)
        if not any(callable(getattr(callback, hook, None)) for hook in HOOKS):
            public = [name for name in dir(callback) if not name.startswith("_") and callable(getattr(callback, name))]
            raise ConfigError(
                "MW840",
                f"{where}: {form.target} made a {type(callback).__name__}, which has none of the hooks of a callback "
                f"({'it has ' + ', '.join(public[:5]) if public else 'it has no methods'})."
                + allowed(public[0] if public else "", HOOKS),
            )
        if (ranks := getattr(callback, "ranks", "all")) not in RANKS:
            raise ConfigError("MW840", f"{where}: {form.target} has ranks = {ranks!r}.{allowed(str(ranks), RANKS)}")
        same = sum(name.partition("#")[0] == form.target for name in made)
        made[f"{form.target}#{same + 1}" if same else form.target] = callback
    return made
