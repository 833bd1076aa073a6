"""The memory of workers and servers, from that of a rank of data parallelism that computes the same slice."""

from __future__ import annotations

from dataclasses import replace

from strategies.cost.server import Servers
from strategies.memory.parts import Memory


def of_worker(alone: Memory, servers: Servers) -> Memory:
    """A worker: the parameters that it pulls and keeps, one gradient of them that stays from step to step, two more of
    what it keeps (of its slice, and of all), and optimizer states (and masters) of what it keeps alone. With 16 bits
    the gradients of a micro-batch stay, too."""
    trained = servers.served + servers.kept
    parameters = alone.parameters - servers.served // (1 + servers.halves) + servers.pull
    gradients = servers.push + 3 * servers.kept + servers.halves * (servers.pull + servers.kept // 2)
    optimizer = alone.optimizer * servers.kept // trained
    persistent = parameters + gradients + optimizer + alone.buffers
    moving = {phase: peak - alone.persistent for phase, peak in alone.peaks.items() if phase != "update"}
    moving["backward"] -= min(alone.gradients, moving["backward"])
    return replace(
        alone,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        persistent=persistent,
        peaks={phase: persistent + most for phase, most in moving.items()} | {"update": persistent},
    )


def of_server(alone: Memory, servers: Servers) -> int:
    """Bytes of a server: its shards with their optimizer states and the gradient of a step, its own and replicas of
    others; and the gradients of the slices that have arrived. Masters are among what a rank has as states."""
    states = alone.optimizer * servers.served // (servers.served + servers.kept)
    values = 0 if servers.halves else servers.served
    arrived = servers.workers * servers.push if servers.sync else servers.push
    return ((1 + servers.replicas) * (values + states + servers.summed) + arrived) // servers.servers
