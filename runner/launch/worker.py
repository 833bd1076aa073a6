"""One rank: its process group, its device, and the function that it was started for.

`runner.launch` starts it; there is no command for it. Invariant: the default process group exists exactly while
the entry function runs, and ranks leave together: no rank closes its connections while another still needs them. Of
elastic ranks only rank 0 has a group, of one.
"""

from __future__ import annotations

import functools
import importlib
import mmap
import os
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from runner.errors import ConfigError
from runner.launch import network
from runner.launch.orders import OPEN_FILES, Orders, RankContext, flight_record_of
from strategies.runtime.flight_recorder import ALL, BARRIER, BROADCAST, EXCHANGE, GATHER, GROUP, SCATTER, SUM, recorder

PATIENCE = timedelta(days=7)
"""The time limit of collectives where the command watches all ranks: the library's clock runs on while a job is
suspended (SIGSTOP, a frozen container), the command's does not."""

OVER_ALL = {
    "barrier": BARRIER,
    "all_reduce": SUM,
    "reduce": SUM,
    "broadcast": BROADCAST,
    "broadcast_object_list": BROADCAST,
    "all_gather": GATHER,
    "all_gather_into_tensor": GATHER,
    "all_gather_object": GATHER,
    "gather": GATHER,
    "gather_object": GATHER,
    "scatter": SCATTER,
    "reduce_scatter_tensor": SCATTER,
    "all_to_all_single": EXCHANGE,
}
"""Functions of `torch.distributed` that all ranks call together, and their kinds."""


def watched(orders: Orders) -> bool:
    """Whether the command sees from the flight records of all ranks how long each waits. On a GPU calls return before
    they complete, and other hosts may show files late."""
    return orders.store is not None and orders.group.device == "cpu"


def work(orders: Orders) -> Any:
    """Join the process group, call the entry with (RankContext, payload), leave the group; return the entry's value.

    Raises:
        ConfigError: the entry cannot be found.
        Exception: any exception of the entry; the process group is then not destroyed.
    """
    group, context = orders.group, orders.context
    os.environ.update(  # by which libraries recognise a rank
        RANK=str(orders.rank),
        LOCAL_RANK=str(orders.local_rank),
        WORLD_SIZE=str(group.world_size),
        LOCAL_WORLD_SIZE=str(orders.local_world_size),
        LOCAL_SIZE=str(orders.local_world_size),
        MASTER_ADDR=orders.address,
        MASTER_PORT=str(orders.port),
    )
    recorder.attach(flight_record_of(group.run_dir, orders.rank))
    torch.set_num_threads(group.threads)
    if group.elastic and orders.rank:
        return _entry(group.entry)(context, _payload(orders.payload.number))
    timeout = PATIENCE if watched(orders) else timedelta(seconds=group.timeout)
    store = _store(orders, timeout)
    store.set_timeout(timeout)
    backend = "gloo"
    if context.device != "cpu":
        backend = "nccl"
        if not any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
            # 9.4 instead of 10.0 GB are reserved for the 8.9 GB of a Llama, 1.4 instead of 2.0 for the 1.2 of a ResNet
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        torch.cuda.set_device(context.device)
    for name, value in network.variables(orders.address).items():
        os.environ.setdefault(name, value)
    size = 1 if group.elastic else group.world_size
    recorder.know(ALL, range(size), ALL)
    recorder.among_all(
        "the start",
        BARRIER,
        dist.init_process_group,
        backend,
        store=store,
        rank=orders.rank,
        world_size=size,
        timeout=timeout,
    )
    if size > 1:
        _record_calls()
    value = _entry(group.entry)(context, _payload(orders.payload.number))
    if dist.is_initialized():  # an entry may have ended it itself
        dist.barrier()
        dist.destroy_process_group()
    return value


def _record_calls() -> None:
    """Show the flight recorder the calls of `torch.distributed` over all ranks, whoever makes them: this project, a
    callback or a module of the user's. Calls recorded elsewhere pass."""

    def recorded(name: str, kind: int, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any, **named: Any) -> Any:
            partial = named.get("group") is not None or any(isinstance(one, dist.ProcessGroup) for one in args)
            later = named.get("async_op", False) or any(one is True for one in args)
            aside = threading.current_thread() is not threading.main_thread()
            if partial or later or aside or recorder.cells[GROUP]:
                return call(*args, **named)
            return recorder.among_all(f"torch.distributed.{name}", kind, call, *args, **named)

        return run

    for name, kind in OVER_ALL.items():
        if hasattr(dist, name):
            setattr(dist, name, recorded(name, kind, getattr(dist, name)))


def _store(orders: Orders, timeout: timedelta) -> Any:
    """The rendezvous store. TCPStore answers any process that reaches its port, so it is used only for several
    hosts."""
    if orders.store is not None:
        path = f"{OPEN_FILES}/{orders.store.number}"
        return dist.FileStore(path, orders.group.world_size)  # type: ignore[attr-defined]
    # Whoever found the port has been listening on it ever since: two runs can never choose the same one.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        orders.address,
        orders.port,
        orders.group.world_size,
        is_master=orders.listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if orders.listener is None else orders.listener.number,
    )
    return dist.PrefixStore(orders.secret, store) if orders.secret else store  # type: ignore[attr-defined]


def _entry(name: str) -> Callable[[RankContext, Any], Any]:
    module_name, _, function = name.partition(":")
    entry: Callable[[RankContext, Any], Any] | None = getattr(importlib.import_module(module_name), function, None)
    if not callable(entry):
        raise ConfigError("MW717", f"The module {module_name} has no function {function!r} to run in the ranks.")
    return entry


def _payload(descriptor: int) -> Any:
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as content:
        payload = pickle.loads(content)
    os.close(descriptor)
    return payload
