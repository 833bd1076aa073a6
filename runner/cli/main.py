"""The command: `run [VERB] +recipe=NAME KEY=VALUE ...`.

Words → Hydra composes → pydantic validates → a run folder with `config.json` → the verb's job. A config is refused
before torch is imported and before the folder exists. Exit codes: 0 done, 1 failed, 2 wrong command or config,
130 interrupted, 143 and 129 stopped by SIGTERM and SIGHUP. Whatever ends a run, the user gets one paragraph; tracebacks
go to `error.txt` in the run folder, or to the terminal with MESHWRIGHT_TRACEBACK=1.
"""

from __future__ import annotations

import copy
import io
import os
import secrets
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from runner import packages, refusals
from runner.cli import arguments as words
from runner.cli import recipes
from runner.cli.composed_once import composed_once, sources_copied_once
from runner.cli.hydra_errors import COMPOSITION_ERRORS, reword
from runner.cli.jobs import alone, carried_out, occupying
from runner.cli.libyaml import read_by_libyaml
from runner.cli.run_folders import check_files, remove_if_unused, require_working_directory, require_writable
from runner.cli.verbs import VERBS
from runner.config import load as config
from runner.config.origins import Origins, given
from runner.errors import ConfigError, RunFailed, Stopped, Terminated
from runner.launch.failure import UNWRITABLE
from runner.launch.interrupts import Interrupts, error_of
from runner.launch.logs import keep_open
from runner.report.units import shown_path
from runner.run_folder import CONFIG_FILE
from runner.run_folder.metrics import records
from runner.sweep.job import EXCLUDED, Status, SweepJob, folder_of, typed
from runner.sweep.results import Sweep, mark_of
from strategies.core.errors import CodedError

ERROR_FILE = "error.txt"
READER_GONE = 128 + signal.SIGPIPE
"""As of a program that the signal ends, of which Python makes an exception."""
TARGETS = (
    *("model.target", "loss.target", "data.target", "data.collate", "optimizer.target", "optimizer.scheduler.target"),
    *("evaluate.metric", "predict.data.target", "predict.data.collate", "verify.reference.target"),
)
"""Keys whose values are dotted names of python."""
TRACEBACK_VARIABLES = ("MESHWRIGHT_TRACEBACK", "HYDRA_FULL_ERROR")


class SweepFailed(Exception):
    """Some jobs of a sweep failed and have reported it; all others have run."""


@dataclass(frozen=True)
class CommandFailure:
    """The user-visible form of an exception: what to print, the exit code, and the traceback of an unexpected one."""

    paragraphs: tuple[str, ...]
    code: int
    traceback: str = ""

    @classmethod
    def of(cls, error: Exception) -> CommandFailure:
        if isinstance(error, CodedError):
            return cls(error.marked, 1 if isinstance(error, RunFailed) else 2)
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return cls(("nobody reads what the command prints any more, which ended it.",), READER_GONE)
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            named = f" {error.filename}" if error.filename else " what the command needs"
            text = f"{error.strerror}: writing{named} failed; free some space, or choose another folder."
            return cls(RunFailed("MW720", text).marked, 1)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())
        where = f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
        summary = f"an unexpected {type(error).__name__} ended the command: {text} ({where})."
        return cls((summary,), 1, "".join(traceback.format_exception(error)))

    def leave(self, hint: str) -> NoReturn:
        """Print and exit, with a `hint` at a traceback."""
        if self.code == READER_GONE:  # `run recipes | head -1`: nothing but terminal output is lost
            sys.exit(self.code)
        _leave((*self.paragraphs[:-1], self.paragraphs[-1] + (f" {hint}" if self.traceback else "")), self.code)


def main() -> None:
    """The console script `run`. Always leaves through SystemExit, except after a job that went well."""
    # Decided before Hydra starts, because one of these variables is set below for another reason.
    tracebacks = any(os.environ.get(name) == "1" for name in TRACEBACK_VARIABLES)
    os.environ["MESHWRIGHT_TRACEBACK"] = str(int(tracebacks))
    _prepare_streams()
    typed = sys.argv[1:]
    try:
        with Interrupts():
            _command(typed)
        sys.stdout.flush()  # while a reader that has gone can still be answered for
    except SweepFailed:
        sys.exit(1)
    except Terminated as terminated:
        _leave(("terminated.",), 128 + terminated.number)
    except KeyboardInterrupt:
        _leave(("interrupted.",), 130)
    except COMPOSITION_ERRORS as error:
        _print_traceback(error)
        _leave(reword(error, typed).marked, 2)
    except Exception as error:
        _print_traceback(error)
        CommandFailure.of(error).leave("MESHWRIGHT_TRACEBACK=1 shows the traceback.")


def _command(typed: list[str]) -> None:
    if line := os.environ.get("COMP_LINE"):  # the shell asks for completions of this line
        if values := words.values(line):
            print("\n".join(values))
            return
        os.environ["COMP_LINE"], verbs = words.complete(line)
        print("\n".join(verbs))
    require_working_directory()
    recipes.search(None)
    if len(typed) == 2 and typed[0] == "explain" and (code := refusals.code_in(typed[1])):
        print(refusals.explanation(code))
        return
    verb, rest = words.split_verb(typed)
    if verb is None and "--version" in rest:
        print(f"meshwright {version('meshwright')}")
        return
    if verb is not None and {"--help", "-h"} & set(rest):
        print(VERBS[verb].help)
        return
    if verb is not None and not VERBS[verb].composed:
        code = VERBS[verb].function()(rest)
        sys.stdout.flush()
        sys.exit(code)
    if not {"--help", "-h", "--hydra-help", "--shell-completion", "-sc"} & set(rest):
        words.refuse_launcher(typed)
    sys.argv[1:] = words.for_hydra(verb, rest)
    config_dir = words.check_options(sys.argv[1:])
    recipes.search(config_dir)
    _register()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach `main` instead of Hydra's printer
    CheckConfig.sweep, CheckConfig.typed = None, tuple(typed)
    try:
        once = sources_copied_once() if {"--help", "-h"} & set(rest) else composed_once()
        with once, read_by_libyaml():
            _job()
    except KeyboardInterrupt:
        if (sweep := CheckConfig.sweep) is not None:
            sweep.end()
            _print([f"the sweep goes on with: {words.again(typed, 'hydra.sweep.dir', sweep.folder)}"])
        raise
    except Exception as error:
        Interrupts.again()
        if CheckConfig.sweep is None or CheckConfig.sweep.end():
            raise
        raise SweepFailed from error  # a sweeper may give up where too many jobs have failed
    if CheckConfig.sweep is not None and not CheckConfig.sweep.end():
        raise SweepFailed


def _register() -> None:
    """What Hydra and the files in `conf/` need to know of this package."""
    recipes.register()
    OmegaConf.register_new_resolver("run.unique", lambda: secrets.token_hex(2), use_cache=True, replace=True)
    # of a sweep's first config, whatever its jobs choose
    OmegaConf.register_new_resolver("run.first", lambda value: value, use_cache=True, replace=True)
    for name, resolver in (("folder", folder_of), ("recipes", recipes.table), ("verbs", _verb_table)):
        OmegaConf.register_new_resolver(f"run.{name}", resolver, replace=True)


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def _job(composed: DictConfig) -> float | None:
    """One job, in its run folder, which exists by now. The value, its last loss, lets a sweeper compare jobs."""
    with Interrupts():
        return _run_job(composed)


def _run_job(composed: DictConfig) -> float | None:
    context = HydraConfig.get()
    run_dir, overrides = Path(context.runtime.output_dir), _overrides()
    if context.mode == RunMode.MULTIRUN:
        return _swept(composed, Path(context.sweep.dir), run_dir, context.job.num, overrides)
    known = (run_dir / CONFIG_FILE).exists()
    try:
        checked = config.load(composed, Origins(overrides))
        with occupying(checked, run_dir, _recipe()):
            value = alone(checked, run_dir)
            if checked.job.name == "train":
                (run_dir / ERROR_FILE).unlink(missing_ok=True)  # of a run before it in this folder
            return value
    except Stopped as stopped:
        again = words.again(CheckConfig.typed, "hydra.run.dir", run_dir)
        _leave((f"{stopped}{f' It goes on with: {again}' if stopped.saved else ''}",), 128 + stopped.number)
    except Exception as error:
        Interrupts.again()
        _print_traceback(error)
        failure = CommandFailure.of(error)
        if failure.code == 2 and not known:
            remove_if_unused(run_dir)
        elif failure.code not in (2, READER_GONE):
            _record(failure, run_dir)
        failure.leave(f"The traceback is in {run_dir / ERROR_FILE}.")


def _swept(composed: DictConfig, sweep: Path, run_dir: Path, number: int, overrides: tuple[str, ...]) -> float | None:
    """One job of a sweep, in whichever process; one that is done already is not run again. A job that fails reports the
    error, records it in its folder and returns None, so the others run however the launcher handles exceptions."""
    job = SweepJob(number, typed(overrides), str(composed.job.name), mark_of(sweep))
    name = f"job #{number} ({' '.join(job.overrides)})"
    (run_dir / ERROR_FILE).unlink(missing_ok=True)
    start = time.monotonic()
    try:
        checked = config.load(composed, Origins(overrides))
        if (done := job.finished_before(run_dir, checked.model_dump_json())) is not None:
            done.write(run_dir)
            print(f"{name}: done before", flush=True)
            return done.value
        with occupying(checked, run_dir, _recipe()):
            check_files(run_dir)
            job.write(run_dir)
            value = carried_out(checked, run_dir)
    except Stopped as stopped:
        _print([f"{name}: {stopped}"])
        replace(job, status="stopped", seconds=time.monotonic() - start).write(run_dir)
        raise error_of(stopped.number) from None  # and with it the sweep
    except Exception as error:
        Interrupts.again()
        _print_traceback(error)
        failure = CommandFailure.of(error)
        _record(failure, run_dir)
        _print([f"{name}: {paragraph}" for paragraph in failure.paragraphs])
        seconds = time.monotonic() - start
        status: Status = "excluded" if isinstance(error, ConfigError) and {*error.codes} == {EXCLUDED} else "failed"
        replace(job, status=status, error=failure.paragraphs[0].splitlines()[0], seconds=seconds).write(run_dir)
        return None
    measured = [one["evaluation"] for one in records(run_dir) if "evaluation" in one]
    evaluation = measured[-1] if measured else None
    replace(job, status="done", value=value, evaluation=evaluation, seconds=time.monotonic() - start).write(run_dir)
    return value


def _recipe() -> str | None:
    recipe = HydraConfig.get().runtime.choices.get("recipe")
    return None if recipe is None else str(recipe)


def _overrides() -> tuple[str, ...]:
    composed = HydraConfig.instance().cfg
    return given(composed) if isinstance(composed, DictConfig) else ()


class CheckConfig(Callback):
    """Validates before anything is created: the config of a run, or of every job of a grid sweep.

    Hydra turns the exceptions of callbacks into warnings, so this one leaves the process instead. A launcher sends the
    callbacks to the processes where its jobs run, and this one brings what the files in `conf/` need there.
    """

    sweep: ClassVar[Sweep | None] = None
    """The sweep that this process has started."""
    typed: ClassVar[tuple[str, ...]] = ()
    """The words of the command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, ()

    def on_run_start(self, config: DictConfig, **_: object) -> None:
        HydraConfig.instance().set_config(config)
        _refuse(_faults(config) or _refusal(partial(require_writable, config.hydra.run.dir, "hydra.run.dir")))
        _print_notices(config)

    def on_multirun_start(self, config: DictConfig, **_: object) -> None:
        # other sweepers choose the values one by one; each job checks its own
        count = self._check_grid(config) if config.hydra.sweeper._target_.endswith(BasicSweeper.__name__) else None
        _refuse(_refusal(partial(require_writable, config.hydra.sweep.dir, "hydra.sweep.dir")))
        _print_notices(config)
        folder, recipe = Path(config.hydra.sweep.dir).absolute(), config.hydra.runtime.choices.get("recipe")
        try:
            CheckConfig.sweep = Sweep.begin(folder, count, recipe)
        except ConfigError as error:
            _leave(error.marked, 2)

    def _check_grid(self, config: DictConfig) -> int:
        """How many jobs a grid sweep has."""
        loader = GlobalHydra.instance().config_loader()
        swept = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
        swept += given(config)
        (jobs,) = BasicSweeper.split_arguments(OverridesParser.create(loader).parse_overrides(swept), None)
        faults: list[list[str]] = []
        for number, overrides in enumerate(jobs):
            try:
                found = _faults(loader.load_sweep_config(config, list(overrides)))
            except COMPOSITION_ERRORS as error:
                found = reword(error, list(overrides)).marked
            except ConfigError as error:
                found = error.marked
            faults.append([f"job #{number} ({' '.join(typed(overrides))}): {fault}" for fault in found])
        wrong = [found for found in faults if not all(f"[{EXCLUDED}]" in fault.splitlines()[0] for fault in found)]
        _refuse([*chain(*(faults if all(faults) else wrong))])  # the others leave excluded jobs out
        return len(jobs)


def _arrived() -> CheckConfig:
    _register()
    return CheckConfig()


def _faults(composed: DictConfig) -> tuple[str, ...]:
    """The errors in a composed config, one paragraph each."""
    ours = copy.deepcopy(composed)
    with open_dict(ours):
        del ours["hydra"]
    return _refusal(partial(config.load, ours, Origins.of(composed)))


def _refusal(check: Callable[[], object]) -> tuple[str, ...]:
    """The paragraphs of the ConfigError that a check raises; none where it passes."""
    try:
        check()
    except ConfigError as error:
        return error.marked
    return ()


def _refuse(faults: Sequence[str]) -> None:
    if faults:
        _leave(faults, 2)


def _print_notices(composed: DictConfig) -> None:
    """Report the user's recipes and modules that shadow shipped ones."""
    for notice in recipes.NOTICES:
        print(notice, flush=True)
    for key in TARGETS:
        name = OmegaConf.select(composed, key, throw_on_missing=False)
        if isinstance(name, str) and (file := packages.hidden(name)) is not None:
            notice = f"{name} is in {shown_path(file)}; the one that comes with Meshwright is meshwright.{name}"
            print(f"{key}: {notice}", flush=True)


def _verb_table() -> str:
    width = max(map(len, VERBS))
    return "\n".join(
        f"  {name:<{width}}  {verb.summary}\n  {'':<{width}}    {verb.example}" for name, verb in VERBS.items()
    )


def _record(failure: CommandFailure, run_dir: Path) -> None:
    text = "\n".join((*failure.paragraphs, failure.traceback)).rstrip() + "\n"
    with suppress(OSError):  # the terminal shows that a disk is full
        (run_dir / ERROR_FILE).write_text(text, encoding="utf-8", errors="backslashreplace")


def _nobody_reads() -> bool:
    """Whether stdout is a pipe without a reader; from then on output is dropped, else the interpreter's end fails."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    _drop(sys.stdout.fileno())
    return True


def _print_traceback(error: Exception) -> None:
    if os.environ.get("MESHWRIGHT_TRACEBACK") == "1":
        traceback.print_exception(error)


def _print(paragraphs: Sequence[str]) -> None:
    for paragraph in paragraphs:
        try:
            print(f"run: {paragraph}", file=sys.stderr, flush=True)
        except OSError:  # the terminal is closed
            _drop(2)


def _leave(paragraphs: Sequence[str], code: int) -> NoReturn:
    _print(paragraphs)
    sys.exit(code)


def _prepare_streams() -> None:
    """Redirect closed streams (`>&-`) to os.devnull, or the next files opened would take their descriptors and receive
    the output; characters that the terminal cannot encode are escaped, and no module closes what others print to."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it has the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
            keep_open(stream)


def _drop(number: int) -> None:
    """Discard writes to the descriptor, or the interpreter would fail at shutdown."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
