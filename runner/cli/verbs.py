"""The table of verbs: what each does, an example, and the function that does it.

A composed verb works on a validated config: `run plan +recipe=x` is `job=plan` for Hydra, and its function is
`run(config, run_dir) -> float | None`. The other verbs need no config and come before Hydra: `run(words) -> exit code`.
Functions are named, not imported: the command must be able to refuse a bad config before torch is loaded.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong command or config, 130 interrupted, 143 stopped by SIGTERM (129 by SIGHUP)."
)
SETUP = ("world_size", "device", "model", "loss", "data")


@dataclass(frozen=True)
class Verb:
    """One verb of the command.

    Attributes:
        example: A command line that works on a fresh install.
        target: `module:function`.
        composed: Whether it needs a config.
        argument: The key of which a bare word behind the verb is the value; none: there is no such word.
        usage: What follows the verb, where that is not a recipe.
        keys: The config keys that `--help` shows, with all below them.
    """

    summary: str
    example: str
    target: str
    composed: bool = True
    argument: str = ""
    usage: str = ""
    keys: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The verb with what follows it."""
        name = self.target.rpartition(":")[0].rpartition(".")[2]
        return self.usage or f"run {name} +recipe=NAME [KEY=VALUE ...]"

    @property
    def help(self) -> str:
        """What `--help` prints about the verb."""
        from runner.config.keys import table  # not above: shells ask for the names of verbs at every TAB

        parts = [self.command, f"    {self.summary}", f"For example:\n    {self.example}"]
        if self.composed:
            parts.append(f"Keys and their defaults:\n{table(self.keys)}")
            parts.append("All keys, recipes and groups: run --help. The config of a recipe: run +recipe=NAME --cfg job")
        return "\n\n".join([*parts, EXIT_CODES])

    def function(self) -> Callable[..., Any]:
        """Import the module and return the function. Raises what the import raises."""
        function: Callable[..., Any] = pkgutil.resolve_name(self.target)
        return function


VERBS = {
    "init": Verb(
        "make a project that trains at once: recipe, model, data, test, Makefile",
        "run init mine",
        "runner.commands.init:run",
        composed=False,
        usage="run init NAME",
    ),
    "train": Verb(
        "train the model in parallel (also when no verb is given)",
        "run train +recipe=ffn_auto parallel.search=sharding_propagation",
        "runner.commands.train:run",
        keys=(*SETUP, "optimizer", "train", "evaluate", "checkpoint", "parallel", "launch", "report", "run"),
    ),
    "launch": Verb(
        "train with a launcher of your site, or print its commands (--dry-run)",
        "run launch --dry-run +recipe=quickstart launch=torchrun",
        "runner.commands.launch:run",
        usage="run launch [--dry-run] +recipe=NAME "
        "launch=torchrun|mpirun|slurm|deepspeed|rank_table|kubernetes|skypilot [KEY=VALUE ...]",
        keys=("launch", "world_size", "device"),
    ),
    "plan": Verb(
        "find the parallel plan and write plan.json, without training",
        "run plan +recipe=quickstart",
        "runner.commands.plan:run",
        keys=("parallel", "cluster", *SETUP, "train.precision", "train.accumulate"),
    ),
    "tune": Verb(
        "train a few steps with each of the best plans of the search and keep the fastest",
        "run tune +recipe=quickstart parallel.search=dynamic_programming tune.plans=2",
        "runner.commands.tune:run",
        keys=("tune", "parallel", "cluster", *SETUP, "train.precision", "train.accumulate"),
    ),
    "verify": Verb(
        "train in parallel and on one process side by side and compare",
        "run verify +recipe=quickstart train.precision=fp64",
        "runner.commands.verify:run",
        keys=("verify", *SETUP, "train.seed", "train.precision", "train.random", "parallel"),
    ),
    "explain": Verb(
        "print the plan as a table: every operator, its slices, its communication; why one is sliced so; or every "
        "rank's slice of a tensor (--slices NAME); or what the code of an error means",
        "run explain matmul2 +recipe=semi_auto_redistribution",
        "runner.commands.explain:run",
        argument="explain.operator",
        usage="run explain [OPERATOR] [--slices NAME] +recipe=NAME [KEY=VALUE ...]\nrun explain CODE",
        keys=("explain", "parallel", "cluster", *SETUP),
    ),
    "export": Verb(
        "write the plan for another trainer, such as a file of plain torch, or a config of transformers or DeepSpeed",
        "run export torch +recipe=quickstart",
        "runner.commands.export:run",
        argument="export.target",
        usage="run export TARGET +recipe=NAME [export.file=FILE] [KEY=VALUE ...]\n"
        "    TARGET: torch, parallelize_module, torchtitan, autoparallel, transformers, deepspeed",
        keys=("export", "parallel", "cluster", *SETUP),
    ),
    "predict": Verb(
        "run a trained model on rows of a dataset or a file and write what it returns",
        "run predict +recipe=quickstart checkpoint=runs/mine",
        "runner.commands.predict:run",
        argument="predict.checkpoint",
        usage="run predict +recipe=NAME checkpoint=PATH [KEY=VALUE ...]",
        keys=("predict", "model.weights", "world_size", "device", "train.precision", "parallel"),
    ),
    "calibrate": Verb(
        "measure this machine and write it down as a cluster",
        "run calibrate cluster.yaml",
        "runner.commands.calibrate:run",
        argument="calibrate.file",
        usage="run calibrate [FILE] [--force] [KEY=VALUE ...]",
        keys=("calibrate", "world_size", "device", "launch.timeout", "launch.threads"),
    ),
    "tokenize": Verb(
        "train a tokenizer on local text: files, folders or addresses, without any the standard library",
        "run tokenize vocabulary=1024 out=tokenizer limit=2000000",
        "runner.commands.tokenize:run",
        composed=False,
        usage="run tokenize [INPUT ...] vocabulary=N out=FOLDER [pattern=GLOB] [field=NAME] [separator=TEXT] "
        "[limit=CHARACTERS]",
    ),
    "diff": Verb(
        "compare two plans: operators with other layouts, and what that changes",
        "run diff runs/a/plan.json runs/b",
        "runner.commands.diff:run",
        composed=False,
        usage="run diff A B    (each a plan.json, or the folder of a run)",
    ),
    "convert": Verb(
        "write a checkpoint in another form or for another plan; also weights of torch and DeepSpeed",
        "run convert runs/mine merged",
        "runner.commands.convert:run",
        composed=False,
        usage="run convert FROM TO [form=merged|sharded] [plan=FILE] [average=ema]",
    ),
    "doctor": Verb(
        "check that this machine and installation can run; or every file of a checkpoint, and what could be lost",
        "run doctor",
        "runner.commands.doctor:run",
        composed=False,
        usage="run doctor [CHECKPOINT or PLAN]    (a file, or the folder of a run)",
    ),
    "recipes": Verb(
        "list the recipes, or print one, or copy it into ./recipes to change it",
        "run recipes quickstart",
        "runner.commands.recipes:run",
        composed=False,
        usage="run recipes [NAME] [--copy]",
    ),
    "schema": Verb(
        "print or write the JSON Schema of recipes, with which editors complete keys",
        "run schema config.schema.json",
        "runner.commands.schema:run",
        composed=False,
        usage="run schema [FILE]",
    ),
    "completion": Verb(
        "print the completion of bash, zsh or fish, or install it for new shells (--install)",
        "run completion bash",
        "runner.commands.completion:run",
        composed=False,
        usage="run completion [bash|zsh|fish] [--install]",
    ),
    "env": Verb(
        "print versions, hardware and settings as a block for an issue report",
        "run env",
        "runner.commands.env:run",
        composed=False,
        usage="run env",
    ),
}


def page() -> str:
    """The reference page of the command line, in Markdown."""
    parts = [
        "# Command line\n\n`run [VERB] +recipe=NAME [KEY=VALUE ...]`; without a verb it trains. `run --help` lists "
        "verbs, recipes and\ngroups, `run VERB --help` the keys of a verb with their defaults, `run +recipe=NAME --cfg "
        "job` the config of a recipe.\n`-m` runs one job for each of several values; `run completion --install` "
        "sets up completion.\n\n"
        f"{EXIT_CODES}\n"
    ]
    for name, verb in VERBS.items():
        summary = f"{verb.summary[:1].upper()}{verb.summary[1:]}."
        parts.append(f"## run {name}\n\n{summary}\n\n```text\n{verb.command}\n```\n")
        parts.append(f"For example:\n\n```text\n{verb.example}\n```\n")
        if verb.keys:
            parts.append(f"Its keys: {', '.join(f'`{key}`' for key in verb.keys)}.\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
