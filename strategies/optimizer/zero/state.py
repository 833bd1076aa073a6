"""The fp32 weights and optimizer states under ZeRO, which DeepSpeed keeps in flat tensors, as pieces of parameters.

Invariant: of every parameter that learns a rank's pieces are the ranges of `parts`, found in its flat tensors
without communication; replicas never hold the same element. Flat tensors on a disk are fetched one after the other.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.core.errors import StrategyError
from strategies.core.program import Program
from strategies.optimizer.state import OptimizerScalars, States, check_shape, groups_of, is_scalar, placed, set_groups
from strategies.optimizer.zero.partition import Range, parts
from strategies.runtime.shards import MODEL, OPTIMIZER, Blocks, Shard, Shards, of_range, of_slice


class ZeroState:
    """`zero` is DeepSpeed's optimizer, `members` are the parameters of every group of torch's. `follows` names
    parameters that an earlier group of a pipeline saves; with `on_disk` large flat tensors are swapped."""

    def __init__(
        self,
        zero: Any,
        stage: int,
        program: Program,
        rank: int,
        found: Mapping[str, nn.Parameter],
        members: Sequence[Sequence[str]],
        *,
        follows: frozenset[str] = frozenset(),
        on_disk: bool = False,
    ) -> None:
        self._zero, self._stage, self._program, self._rank = zero, stage, program, rank
        self._found, self._members, self._follows, self._on_disk = found, members, follows, on_disk
        self._sources = {source.name: source for source in program.parameters}
        self._learning = {name for names in members for name in names}

    @property
    def optimizer(self) -> Optimizer:
        found: Optimizer = self._zero.optimizer
        return found

    def masters(self) -> list[Tensor]:
        """The flat fp32 tensors on which the optimizer works: this rank's part of every group."""
        found: list[Tensor] = (
            self._zero.fp32_partitioned_groups_flat if self._stage == 3 else self._zero.single_partition_of_fp32_groups
        )
        return found

    def group_of(self, index: int) -> int:
        """The torch group of a flat tensor; stage 3 may cut a group into several."""
        return int(self._zero.sub_group_to_group_id[index]) if self._stage == 3 else index

    def swapped(self, index: int) -> bool:
        """Whether a flat tensor and its states are on the disk between updates."""
        return self._on_disk and bool(self._zero._swappable_optimizer_subgroup(index))

    @contextmanager
    def fetched(self, index: int, *, write: bool) -> Iterator[None]:
        """A flat tensor and its states, in buffers that may be used again afterwards."""
        if not self.swapped(index):
            yield
            return
        self._zero._optimizer_states_and_gradient_swap_in(index)
        yield
        (self._zero._optimizer_states_and_gradient_swap_out if write else self._zero._release_swap_buffers)(index)

    def names(self, index: int) -> list[str]:
        """The parameters of a flat tensor, in its order."""
        lists = self._zero.fp16_groups if self._stage == 3 else self._zero.round_robin_bit16_groups
        by_id = {id(parameter): name for name, parameter in self._found.items()}
        return [by_id[id(parameter)] for parameter in lists[index]]

    @property
    def offloaded(self) -> bool:
        """Whether gradients and states are on the host or on a disk."""
        return bool(self._zero.offload_optimizer if self._stage == 3 else self._zero.cpu_offload)

    def forget_gradient(self, name: str) -> None:
        """Forget a gradient of the step before: at stage 3, and where gradients are offloaded, a micro-batch after the
        first adds to what was left by the step before if none before it has a gradient of a parameter."""
        if self._stage == 3:
            parts = self._zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
            parts[self._found[name].ds_id].zero_()  # type: ignore[attr-defined]
        elif self.offloaded:
            left = self._zero.accumulated_grads_in_cpu.get(self._zero.get_param_id(self._found[name]))
            if left is not None:
                left.zero_()

    def of_names(self, names: Container[str]) -> list[Tensor]:
        """The flat tensors that hold nothing but these parameters."""
        return [flat for index, flat in enumerate(self.masters()) if all(name in names for name in self.names(index))]

    def ranges(self, index: int) -> list[tuple[str, Range]]:
        """What a flat tensor holds. Raises StrategyError where DeepSpeed has cut in another way."""
        names, flat = self.names(index), self.masters()[index]
        found, size = parts(self._program, self._rank, self._stage, names)
        if size != flat.numel():
            raise StrategyError(
                "MW609",
                f"DeepSpeed keeps {flat.numel()} elements of {names[0]} and others on rank {self._rank}, not {size}; "
                "its options cut parameters in a way that checkpoints do not know.",
            )
        return found

    def pieces(self, write: bool) -> Iterator[Shards]:
        """See `Updates.pieces`. At stage 3 what does not learn is in pieces too."""
        for index, flat in enumerate(self.masters()):
            with self.fetched(index, write=write):
                found: dict[str, list[Shard]] = {}
                stored = {MODEL: flat} | {f"{OPTIMIZER}{state}/": value for state, value in self._states(flat)}
                for name, part in self.ranges(index):
                    if write or name not in self._follows:
                        for prefix, value in stored.items():
                            made = of_range(*self._place(name), part.first, part.of(value))
                            found[prefix + name] = [replace(one, lasting=not self.swapped(index)) for one in made]
                yield found
        for name in self._found:
            if name not in self._learning:
                yield from self._frozen(name, write)

    def _states(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        for state, value in self.optimizer.state.get(flat, {}).items():
            if not is_scalar(value, flat):
                check_shape(self.optimizer, state, value, "the parameters", value.shape == flat.shape)
                yield state, value

    def _frozen(self, name: str, write: bool) -> Iterator[Shards]:
        """A parameter that does not learn, and so is in no flat tensor."""
        parameter: Any = self._found[name]
        shape, blocks, local = self._place(name)
        if self._stage < 3:
            yield {MODEL + name: of_slice(shape, blocks, parameter.view(local))}
            return
        part = parameter.ds_tensor
        first = parameter.ds_zero_partition_rank * part.ds_numel
        count = max(min(part.ds_numel, parameter.ds_numel - first), 0)
        with _located(parameter, write):
            made = of_range(shape, blocks, local, first, part.data.view(-1)[:count])
            yield {MODEL + name: [replace(one, lasting=part.final_location != "nvme") for one in made]}

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """What this rank holds of the gradient of every parameter at stage 1, without padding: on the host in one piece
        where the optimizer is, else in pieces that DeepSpeed joins later, of which not all padding is marked."""
        for index, master in enumerate(self.masters()):
            ranges = self.ranges(index)
            if self.offloaded:
                assert master.grad is not None
                yield from ((name, part.of(master.grad)) for name, part in ranges)
                continue
            names, position = {part.position: name for name, part in ranges}, 0
            for piece in self._zero.averaged_gradients[index]:
                if position in names:
                    yield names[position], piece
                position += piece.numel()

    def plain(self) -> OptimizerScalars:
        """See `Updates.plain`."""
        plain = OptimizerScalars(groups_of(self.optimizer, self._members))
        for index, flat in enumerate(self.masters()):
            state = self.optimizer.state.get(flat, {})
            scalars = {key: value for key, value in state.items() if is_scalar(value, flat)}
            plain.scalars.update({name: scalars for name in self.names(index)})
        return plain

    def begin(self, states: States, plain: OptimizerScalars) -> None:
        """See `Updates.begin`."""
        set_groups(self.optimizer, self._members, plain)
        for index, flat in enumerate(self.masters()):
            names = self.names(index)
            known = next((plain.scalars[name] for name in names if plain.scalars.get(name)), {})
            with self.fetched(index, write=True):
                group = self.optimizer.param_groups[self.group_of(index)]
                found = {key: placed(key, value, flat, group) for key, value in known.items()}
                for key, entries in states.items():
                    stored = [entries[name] for name in names if name in entries]
                    if stored:
                        dtype = flat.dtype if stored[0].like_weights else stored[0].dtype
                        found[key] = torch.zeros_like(flat, dtype=dtype)
                self.optimizer.state[flat] = found
                if self.swapped(index):
                    self._announce_states(flat)

    def loaded(self) -> None:
        """See `Updates.loaded`."""
        if self._stage < 3:
            self._zero.update_lp_params()
            return
        for index, flat in enumerate(self.masters()):
            with self.fetched(index, write=False):
                for name, part in self.ranges(index):
                    parameter: Any = self._found[name]
                    with _located(parameter, True):
                        parameter.ds_tensor.data.view(-1)[: part.count].copy_(part.of(flat.detach()))
        gathered: list[Any] = [one for one in self._found.values() if one.numel() == one.ds_numel]  # type: ignore[attr-defined]
        if gathered:  # kept so by the user's option, or after an evaluation
            gathered[0].partition(param_list=gathered, has_been_updated=False)
            gathered[0].all_gather(gathered)

    def _announce_states(self, flat: Any) -> None:
        """The swapper notices new states of a flat tensor if it believes that there were none."""
        info = self._zero.optimizer_swapper.swap_params_info[flat.ds_id]
        info.tensors, info.has_state_tensors = info.tensors[:1], False

    def _place(self, name: str) -> tuple[tuple[int, ...], Blocks, tuple[int, ...]]:
        """The global shape, this rank's blocks, and the shape of its slice with padding."""
        source, mesh = self._sources[name], self._program.mesh
        shape, layout = source.spec.shape, self._program.layouts[source.id]
        return shape, layout.blocks(shape, mesh, self._rank), layout.local_shape(shape, mesh)


@contextmanager
def _located(parameter: Any, write: bool) -> Iterator[None]:
    """This rank's part of a parameter, in memory."""
    on_disk = parameter.ds_tensor.final_location == "nvme"
    if on_disk:
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    yield
    if on_disk and write:
        parameter.nvme_swapper.swap_out_and_release([parameter])
    elif on_disk:
        parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])
