"""Calls on gloo ranks, as an exported program runs them, with operands of given placements."""

from __future__ import annotations

import copy
import datetime
import logging
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from runner.export import plain_torch
from tests.dtensor.samples.calls import Sample

Placed = dict[str, tuple[str, ...]]
Job = tuple[Sample, tuple[str, ...], Placed]
"""A sample, the operators that its program computes on complete tensors, and the placements of its operands."""
PATIENCE = 30.0
"""Seconds for one call, and for the ranks to begin."""
TOLERANCE = 1e-10


def outcomes(jobs: Sequence[Job], mesh: tuple[int, ...]) -> Iterator[str]:
    """What became of each job: "" if results and gradients are those of one device, what differs, or an error, which
    begins with "!"."""
    at = 0
    while at < len(jobs):
        for found in _started(jobs[at:], mesh):
            yield found
            at += 1


def _started(jobs: Sequence[Job], mesh: tuple[int, ...]) -> Iterator[str]:
    """The outcomes of jobs until one after which the ranks are of no use any more."""
    context, ranks = multiprocessing.get_context("fork"), []
    world = torch.Size(mesh).numel()
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, mesh, f"{folder}/store", jobs, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            for _ in jobs:
                found = _answers(ranks)
                yield found[0] if len({*found}) == 1 else _joined(found)
                if any(one.startswith("!") for one in found):  # collectives of other ranks may be under way
                    if len({*found}) > 1:
                        return
                for _, pipe in ranks:
                    pipe.send(True)
        finally:
            for process, pipe in ranks:
                process.kill()
                process.join()
                pipe.close()


def _answers(ranks: Sequence[tuple[BaseProcess, Connection]]) -> list[str]:
    """What each rank says of its call; once one has failed, the others have two seconds."""
    deadline, found = time.monotonic() + PATIENCE, []
    for process, pipe in ranks:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            found.append("! waits for ever")
        else:
            try:
                found.append(pipe.recv())
            except EOFError:
                process.join()
                found.append(f"! ended with {process.exitcode}")
        if found[-1].startswith("!"):
            deadline = min(deadline, time.monotonic() + 2)
    return found


def _joined(found: Sequence[str]) -> str:
    errors = any(one.startswith("!") for one in found)
    return ("! ranks differ: " if errors else "") + " | ".join(dict.fromkeys(one or "exact" for one in found))


def _rank(rank: int, mesh: tuple[int, ...], store: str, jobs: Sequence[Job], pipe: Connection) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # DTensor warns of slow redistributions
    given = dist.FileStore(store, torch.Size(mesh).numel())
    wait = datetime.timedelta(seconds=PATIENCE)
    dist.init_process_group("gloo", store=given, rank=rank, world_size=torch.Size(mesh).numel(), timeout=wait)
    plain_torch.MESH = dict(zip("ab", mesh, strict=False))
    devices = plain_torch.make_mesh("cpu")
    for sample, replicated, placed in jobs:
        try:
            pipe.send(_run(sample, replicated, placed, devices))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:160]
            pipe.send(f"! {type(error).__name__}: {text} ({place.filename.rpartition('/')[2]}:{place.lineno})")
        pipe.recv()


def _run(sample: Sample, replicated: tuple[str, ...], placed: Placed, devices: DeviceMesh) -> str:
    call = copy.deepcopy(sample.call)
    of = {name: tuple(map(_placement, words)) for name, words in placed.items()}
    plain_torch.REPLICATED, plain_torch.PARAMETERS = replicated, of
    plain_torch.BATCH = ((Shard(0), *(Replicate(),) * (devices.ndim - 1)),)
    plain_torch.parallelize(call, devices)
    for name, value in list(call.named_buffers()):
        call._buffers[name] = value.redistribute(placements=of[name])  # type: ignore[operator]
    with plain_torch.running(devices):
        loss = call(*plain_torch.sliced([torch.ones(4)], devices))
        loss.backward()
    worst = _gap(_complete(loss.detach()), sample.loss)
    problems = [f"loss {worst:.1e}"] if worst > TOLERANCE else []
    for name, parameter in call.named_parameters():
        want = sample.gradients.get(name)
        if want is None and parameter.grad is None:
            continue
        got = torch.zeros_like(want) if parameter.grad is None else _complete(parameter.grad)  # type: ignore[arg-type]
        worst = _gap(got, torch.zeros_like(got) if want is None else want)
        if worst > TOLERANCE:
            problems.append(f"gradient of {name} {worst:.1e}")
    for name, buffer in call.named_buffers():
        worst = _gap(_complete(buffer).double(), sample.buffers[name].double())
        if worst > TOLERANCE:
            problems.append(f"buffer {name} {worst:.1e}")
    return ", ".join(problems)


def _placement(word: str) -> Placement:
    return Replicate() if word == "R" else Shard(int(word))


def _complete(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _gap(got: Tensor, want: Tensor) -> float:
    """The largest difference, relative to the largest element where that is above 1."""
    if got.shape != want.shape or not torch.equal(got.isfinite(), want.isfinite()):
        return float("inf")
    finite = want.isfinite()
    got, want = got[finite], want[finite]
    return float((got - want).abs().max() / want.abs().max().clamp_min(1.0)) if want.numel() else 0.0
