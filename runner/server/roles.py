"""What each rank of mode parameter_server does: rank 0 coordinates, some serve, the others work."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from runner.build import optimizers
from runner.launch.launchers.connection import SECRET_FILE
from runner.launch.orders import RankContext
from runner.planning.slices import sliced
from runner.server.coordinator import Coordinator
from runner.server.fleet import OVER, PLACE, over
from runner.server.links import BROKEN, ServerLink, connect
from runner.server.partition import partition
from runner.server.store import Store
from runner.server.worker import Worker
from runner.training.fault_injection import Faults
from runner.training.trainer import TrainingJob, groups_of
from strategies.core.mesh import Mesh
from strategies.runtime.communicator import Communicator

LOOK = 0.05
"""Seconds between two looks for the coordinator."""


def train(rank: RankContext, job: TrainingJob) -> dict[str, Any] | None:
    """Train on this rank; the entry of every rank. Returns the result of `Trainer.run` on rank 0."""
    if rank.rank == 0:
        return Coordinator(rank, job).run()
    try:
        if (found := _coordinator(job)) is not None:
            role = _serve if rank.rank in job.prepared.config.server_ranks else _work
            role(rank, job, *found)
    except BROKEN as error:
        if not _is_over(job):
            raise ConnectionError(f"connection closed by the coordinator: {error}") from error
    return None


def _is_over(job: TrainingJob) -> bool:
    place = job.folder / PLACE
    return place.exists() and place.read_text(encoding="utf-8") == over(job.attempt)


def _work(rank: RankContext, job: TrainingJob, link: ServerLink, secret: bytes) -> None:
    """Compute slices until the coordinator has enough."""
    worker = Worker(rank, job, link, secret)
    link.send("worker", address=worker.address, **_process(rank, job))
    worker.run()


def _process(rank: RankContext, job: TrainingJob) -> dict[str, Any]:
    """The rank, the host and the number of this process."""
    return {"rank": rank.rank, "host": job.prepared.config.launch.host_of(rank.rank), "process": os.getpid()}


def _coordinator(job: TrainingJob) -> tuple[ServerLink, bytes] | None:
    """A connection to the coordinator, and the secret; None where all is done. Waits for it without a limit: the
    command ends all ranks where rank 0 has ended or hangs."""
    while True:
        try:
            place = (job.folder / PLACE).read_text(encoding="utf-8")
            if place == over(job.attempt):
                return None
            if place.startswith(OVER):  # of the attempt before
                time.sleep(LOOK)
                continue
            secret = (job.folder / SECRET_FILE).read_bytes()
            address, port = place.split()
            return connect((address, int(port)), secret, job.prepared.config.launch.timeout), secret
        except BROKEN:
            time.sleep(LOOK)


def _serve(rank: RankContext, job: TrainingJob, link: ServerLink, secret: bytes) -> None:
    """Hold shards until the coordinator closes the connection; raises ConnectionError where that is too soon."""
    prepared, config = job.prepared, job.prepared.config
    assert prepared.step is not None and prepared.graph is not None
    of_slice = sliced(config, *prepared.step)
    store = Store(
        partition(of_slice.elements, of_slice.widths, config.parallel.server.servers),
        groups_of(prepared.graph.sources, config),
        optimizers.optimizer_factory(config.optimizer),
        getattr(torch, of_slice.program.tensors[next(iter(of_slice.elements))].spec.dtype),
        secret,
        config.launch.timeout,
        rank.address,
        Faults(config, rank, (), Communicator(Mesh((("world", 1),)), 0)),
    )
    server = config.server_ranks.index(rank.rank)
    link.send("server", server=server, address=store.address, **_process(rank, job))
    store.wait(link)
    if not _is_over(job):
        raise ConnectionError("it has ended")
