"""ZeRO stage 1 inside a group of ranks of a pipeline: the group as DeepSpeed needs it, and the norm over them all.

To DeepSpeed the group is the data-parallel world; it never hears of the others. Invariant: the norm by which it clips
counts every slice of every parameter once, and is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.optimizer.zero.state import ZeroState
from strategies.runtime.communicator import Communicator
from strategies.runtime.peers import Peers


class Group:
    """The model-parallel unit that DeepSpeed asks for the ranks over which it averages. Collective in the group."""

    def __init__(self, communicator: Communicator) -> None:
        first, size = communicator.world_rank - communicator.rank, communicator.mesh.size
        self._ranks, self._rank = list(range(first, first + size)), communicator.rank
        if size > 1:
            self._group = communicator.group(communicator.mesh.names)
        else:
            self._group = dist.new_group(self._ranks, use_local_synchronization=True)

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self._ranks

    def get_data_parallel_world_size(self) -> int:
        return len(self._ranks)

    def get_data_parallel_rank(self) -> int:
        return self._rank

    def get_model_parallel_group(self) -> None:
        """There is none: slices are known as those of experts."""

    get_tensor_model_parallel_group = get_model_parallel_group

    def get_model_parallel_world_size(self) -> int:
        return 1

    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_model_parallel_rank = get_model_parallel_rank


def norm_over_groups(zero: Any, state: ZeroState, peers: Peers, follows: frozenset[str]) -> Tensor:
    """The 2-norm of the global gradient for `zero`, DeepSpeed's optimizer of stage 1, which calls it in place of its
    own (that one talks once per parameter group, of which every stage has another number); -1, as there, if it is no
    number. `follows` are the parameters that an earlier group counts."""
    total = torch.zeros((), dtype=torch.float64, device=zero.device)
    for index in range(len(state.masters())):
        for name, gradient in _gradients(zero, state, index):
            if name not in follows:
                norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)
                total += norm.square().to(total.device)
    peers.add_over_all(total)
    norm = total.sqrt().float()
    return norm if torch.isfinite(norm) else torch.full_like(norm, -1.0)


def _gradients(zero: Any, state: ZeroState, index: int) -> Iterator[tuple[str, Tensor]]:
    """What this rank holds of the gradient of every parameter in a flat tensor, without padding: on the host in one
    piece where the optimizer is, else in pieces that DeepSpeed joins later, of which not all padding is marked."""
    ranges = state.ranges(index)
    if zero.cpu_offload:
        flat = state.masters()[index].grad
        assert flat is not None
        yield from ((name, flat[one.position : one.position + one.count]) for name, one in ranges)
        return
    begins, position = {one.position: name for name, one in ranges}, 0
    for piece in zero.averaged_gradients[index]:
        if position in begins:
            yield begins[position], piece
        position += piece.numel()
