"""The command: `run [VERB] +recipe=NAME KEY=VALUE ...`.

Words → Hydra composes → pydantic validates → a run folder with `config.json` → the verb's job. A config is refused
before torch is imported and before the folder exists. Exit codes: 0 done, 1 failed, 2 wrong command or config,
130 interrupted, 143 stopped by SIGTERM. Whatever ends a run, the user gets one paragraph; tracebacks go to `error.txt`
in the run folder, or to the terminal with MESHWRIGHT_TRACEBACK=1.
"""

from __future__ import annotations

import copy
import os
import secrets
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from runner import config, recipes, stopping, words
from runner.errors import ConfigError, RunFailed, Stopped, Terminated
from runner.folders import CONFIG_FILE, remove_if_unused
from runner.origins import Origins, given
from runner.rewording import reword
from runner.verbs import VERBS

ERROR_FILE = "error.txt"
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, YAMLError)
TRACEBACK_VARIABLES = ("MESHWRIGHT_TRACEBACK", "HYDRA_FULL_ERROR")


class SweepFailed(Exception):
    """A job of a sweep failed and has said so; the other jobs go on."""


@dataclass(frozen=True)
class Failure:
    """What a user is told about an exception.

    Attributes:
        paragraphs: what to print.
        code: the exit code.
        traceback: where it came from, for an exception that nobody expected; else nothing.
    """

    paragraphs: tuple[str, ...]
    code: int
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        if isinstance(error, ConfigError):
            return cls(tuple(map(str, error.args)), 2)
        if _is_strategy_error(error):
            return cls((str(error),), 2)
        if isinstance(error, RunFailed):
            return cls((str(error),), 1)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        where = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
        summary = f"an unexpected {type(error).__name__} ended the command: {text} ({where})."
        return cls((summary,), 1, "".join(traceback.format_exception(error)))


def main() -> None:
    """The console script `run`. Always leaves through SystemExit, except after a job that went well."""
    # Settled before Hydra starts, because one of these variables is set below for another reason.
    tracebacks = any(os.environ.get(name) == "1" for name in TRACEBACK_VARIABLES)
    os.environ["MESHWRIGHT_TRACEBACK"] = str(int(tracebacks))
    typed = sys.argv[1:]
    try:
        _command(typed)
    except SweepFailed:
        sys.exit(1)
    except Terminated:
        _leave(("terminated.",), stopping.EXIT_CODE)
    except KeyboardInterrupt:
        _leave(("interrupted.",), 130)
    except COMPOSITION_ERRORS as error:
        _tell_traceback(error)
        _leave(tuple(map(str, reword(error, typed).args)), 2)
    except Exception as error:
        _tell_traceback(error)
        failure = Failure.of(error)
        hint = " MESHWRIGHT_TRACEBACK=1 shows the traceback." if failure.traceback else ""
        _leave((*failure.paragraphs[:-1], failure.paragraphs[-1] + hint), failure.code)


def _command(typed: Sequence[str]) -> None:
    if line := os.environ.get("COMP_LINE"):  # the shell asks for completions of this line
        os.environ["COMP_LINE"], verbs = words.complete(line)
        print("\n".join(verbs))
    verb, rest = words.split_verb(typed)
    if verb is not None and not VERBS[verb].composed:
        sys.exit(VERBS[verb].function()(rest))
    if not {"--help", "-h", "--hydra-help", "--shell-completion", "-sc"} & set(rest):
        words.refuse_launcher()
    words.check_options(rest)
    sys.argv[1:] = words.for_hydra(verb, rest)
    _register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach `main` instead of Hydra's printer
    _job()


def _register() -> None:
    """What Hydra and the files in `conf/` need to know of this package."""
    recipes.register()
    OmegaConf.register_new_resolver("run.unique", lambda: secrets.token_hex(2), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("run.recipes", recipes.table, replace=True)
    OmegaConf.register_new_resolver("run.verbs", _verb_table, replace=True)


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def _job(composed: DictConfig) -> float | None:
    """One job, in its run folder, which exists by now. The value, its last loss, lets a sweeper compare jobs."""
    context = HydraConfig.get()
    run_dir, overrides = Path(context.runtime.output_dir), _overrides()
    before = (run_dir / CONFIG_FILE).read_text(encoding="utf-8") if (run_dir / CONFIG_FILE).exists() else None
    try:
        checked = config.load(composed, Origins(overrides))
        (run_dir / CONFIG_FILE).write_text(checked.model_dump_json(indent=2) + "\n", encoding="utf-8")
        result: float | None = VERBS[checked.job.name].function()(checked, run_dir)
        return result
    except Stopped as stopped:
        _leave((str(stopped),), stopping.EXIT_CODE)
    except Exception as error:
        _tell_traceback(error)
        failure = Failure.of(error)
        if context.mode == RunMode.MULTIRUN:
            job = f"job #{context.job.num} ({_shown(overrides)})"
            _record(failure, run_dir)
            _tell([f"{job}: {paragraph}" for paragraph in failure.paragraphs])
            raise SweepFailed(job) from error
        if failure.code == 2:
            if before is None:
                remove_if_unused(run_dir)
            else:  # the run that wanted to go on here is refused, and the folder is that of the run before
                (run_dir / CONFIG_FILE).write_text(before, encoding="utf-8")
        else:
            _record(failure, run_dir)
        hint = f" The traceback is in {run_dir / ERROR_FILE}." if failure.traceback else ""
        _leave((*failure.paragraphs[:-1], failure.paragraphs[-1] + hint), failure.code)


def _overrides() -> tuple[str, ...]:
    composed = HydraConfig.instance().cfg
    return given(composed) if isinstance(composed, DictConfig) else ()


def _shown(overrides: Sequence[str]) -> str:
    """Overrides as they are typed: `words.for_hydra` has put pluses before keys in open mappings."""
    return " ".join(override.removeprefix("++") for override in overrides)


class CheckConfig(Callback):
    """Validates before anything is created: the config of a run, or of every job of a grid sweep.

    Hydra turns the exceptions of callbacks into warnings, so this one leaves the process instead.
    """

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        HydraConfig.instance().set_config(config)
        if faults := _faults(config):
            _leave(faults, 2)

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        if not config.hydra.sweeper._target_.endswith(BasicSweeper.__name__):
            return  # other sweepers choose the values one by one; each job checks its own
        loader = GlobalHydra.instance().config_loader()
        swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        swept += given(config)
        (jobs,) = BasicSweeper.split_arguments(OverridesParser.create(loader).parse_overrides(swept), None)
        faults: list[str] = []
        for number, overrides in enumerate(jobs):
            try:
                found = _faults(loader.load_sweep_config(config, list(overrides)))
            except COMPOSITION_ERRORS as error:
                found = tuple(map(str, reword(error, list(overrides)).args))
            faults += [f"job #{number} ({_shown(overrides)}): {fault}" for fault in found]
        if faults:
            _leave(faults, 2)


def _faults(composed: DictConfig) -> tuple[str, ...]:
    """What is wrong with a composed config, a paragraph each."""
    ours = copy.deepcopy(composed)
    with open_dict(ours):
        del ours["hydra"]
    try:
        config.load(ours, Origins.of(composed))
    except ConfigError as error:
        return tuple(map(str, error.args))
    return ()


def _verb_table() -> str:
    width = max(map(len, VERBS))
    return "\n".join(
        f"  {name:<{width}}  {verb.summary}\n  {'':<{width}}    {verb.example}" for name, verb in VERBS.items()
    )


def _is_strategy_error(error: Exception) -> bool:
    # Asked of the module only if it is loaded: importing it here could import torch.
    module = sys.modules.get("strategies.errors")
    return module is not None and isinstance(error, module.StrategyError)


def _record(failure: Failure, run_dir: Path) -> None:
    text = "\n".join((*failure.paragraphs, failure.traceback)).rstrip() + "\n"
    (run_dir / ERROR_FILE).write_text(text, encoding="utf-8")


def _tell_traceback(error: Exception) -> None:
    if os.environ.get("MESHWRIGHT_TRACEBACK") == "1":
        traceback.print_exception(error)


def _tell(paragraphs: Sequence[str]) -> None:
    for paragraph in paragraphs:
        print(f"run: {paragraph}", file=sys.stderr, flush=True)


def _leave(paragraphs: Sequence[str], code: int) -> NoReturn:
    _tell(paragraphs)
    sys.exit(code)
