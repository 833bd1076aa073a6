"""Rank functions that these tests run instead of plain training."""

import pickle
from dataclasses import replace

import torch

from runner.commands.entries import train_prepared
from runner.training import agreement
from strategies.core.mesh import Mesh
from strategies.runtime.communicator import Communicator


def with_another_plan(rank, payload):
    return train_prepared(rank, _changed(rank, payload, lambda prepared: replace(prepared, digest="another")))


def with_another_config(rank, payload):
    def change(prepared):
        optimizer = prepared.config.optimizer.model_copy(update={"args": {"lr": 0.5}})
        return replace(prepared, config=prepared.config.model_copy(update={"optimizer": optimizer}))

    return train_prepared(rank, _changed(rank, payload, change))


def with_another_torch(rank, payload):
    if rank.rank == 2:
        torch.__version__ = "0.1"
    return train_prepared(rank, payload)


def with_other_code(rank, payload):
    plain = agreement.digest
    if rank.rank == 2:  # as another version of the package would lower the same plan
        agreement.digest = lambda text: plain(text.replace("aten", "other"))
    return train_prepared(rank, payload)


def _changed(rank, payload, change):
    if rank.rank != 2:
        return payload
    return {**payload, "prepared": pickle.dumps(change(pickle.loads(payload["prepared"])))}


def deadlock(rank, way):
    """Two ranks wait in different collectives."""
    mesh = Mesh((("a", 2),))
    communicator = Communicator(mesh, rank.rank, [("a",)])
    other = communicator.own_group(("a",)) if way == "each other" else communicator.group(("a",))
    if rank.rank == 0:
        communicator.sum(torch.ones(4), communicator.group(("a",)))
    elif way == "each other":
        communicator.sum(torch.ones(4), other)
    else:
        communicator.gather(torch.empty(8), torch.ones(4), other)
