"""Rank functions of the checkpoint tests: train, save, be killed, resume."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sharded_training import ALONE, MESH, Case, Setup, Task

from runner import checkpoint as checkpoints
from runner.checkpoint import Content
from runner.errors import ConfigError
from strategies.core.errors import StrategyError

HALF = 3


def content(setup: Setup, case: Case) -> Content:
    config = {
        "world_size": setup.mesh.size,
        "parallel": {"mode": "auto", "zero": {"stage": case.stage}},
        "train": {"precision": case.precision},
        "optimizer": {"target": case.optimizer, "args": {"lr": 0.1}},
    }
    buffers = {name: tensor for name, tensor in setup.tensors.items() if not isinstance(tensor, torch.nn.Parameter)}
    return Content(
        setup.program,
        setup.communicator,
        buffers,
        setup.updates,
        setup.scheduler,
        setup.plan.to_json(),
        config,
        "a hash",
    )


def throughout(rank: Any, payload: tuple[Task, list[Case], Path]) -> list[dict[str, torch.Tensor]]:
    """Train all steps and save halfway. Returns the full weights at the end."""
    task, cases, folder = payload
    found = []
    for number, case in enumerate(cases):
        torch.manual_seed(number)
        setup = Setup(task, case, rank.rank)
        for step, micro_batches in enumerate(task.batches, start=1):
            setup.step(micro_batches)
            torch.rand(2)
            if step == HALF:
                checkpoints.Saver(background=False).save(folder / str(number), step, content(setup, case))
        found.append(finished(setup))
    return found


def continued(rank: Any, payload: tuple[Task, list[Case], Path]) -> list[dict[str, torch.Tensor]]:
    """Train the second half from the checkpoint."""
    task, cases, folder = payload
    found = []
    for number, case in enumerate(cases):
        torch.manual_seed(99)
        setup = Setup(task, case, rank.rank)
        setup.step(task.batches[-1])  # state from before loading must not matter
        found_path = checkpoints.newest(folder / str(number))
        assert found_path is not None
        done = checkpoints.load(found_path, content(setup, case)).step
        for micro_batches in task.batches[done:]:
            setup.step(micro_batches)
            torch.rand(2)
        found.append(finished(setup))
    return found


def finished(setup: Setup) -> dict[str, torch.Tensor]:
    """Full weights, and the learning rate and the next random numbers of rank 0."""
    weights, _ = setup.gathered(setup.weights())
    setup.updates.close()
    rate = setup.updates.optimizer.param_groups[0]["lr"]
    return {**weights, "learning rate": torch.tensor(rate), "random numbers": torch.rand(4)}


def refused(rank: Any, payload: tuple[Task, list[tuple[Case, str]], Path]) -> list[str]:
    """The errors of other runs that resume from the checkpoint of case 0: (another case, how its config differs)."""
    task, others, folder = payload
    said = []
    for case, change in others:
        setup = Setup(task, case, rank.rank)
        wanted = content(setup, case)
        if change:
            key, _, value = change.partition("=")
            wanted = replace(wanted, **{key: value}) if key == "fingerprint" else changed(wanted, key, value)
        try:
            checkpoints.load(folder / "0" / f"step-{HALF:08d}", wanted)
            said.append("")
        except (StrategyError, ConfigError) as error:
            said.append(f"{type(error).__name__}: {error}")
        setup.updates.close()
    return said


def changed(given: Content, key: str, value: Any) -> Content:
    section, _, name = key.partition(".")
    return replace(given, config={**given.config, section: {**given.config[section], name: value}})


def killed(rank: Any, payload: tuple[Task, Case, Path, float]) -> None:
    """Save after every step until the last rank is killed at a random time."""
    task, case, folder, seconds = payload
    setup = Setup(task, case, rank.rank, MESH if rank.world_size > 1 else ALONE)
    step = 1
    while True:
        setup.step(task.batches[0])
        checkpoints.Saver(background=False).save(folder, step, content(setup, case), checkpoints.SaveOptions(keep=2))
        if step == 1 and rank.rank == rank.world_size - 1:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        step += 1
