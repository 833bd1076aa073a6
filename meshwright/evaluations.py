"""Evaluation in a loop of the user's own: the forward of evaluation mode, with the weights as training left them.

The graph of every kind of batch is captured at its first call from the planned module, follows the plan as
`run train` has it, and reads the slices that training writes. Invariant: every rank is given the same complete batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call

from runner.build.scores import Structure
from runner.errors import ConfigError
from runner.planning import lowering
from runner.training.agreement import different, gather
from runner.training.execution import Execution, gather_axes
from strategies.capture import Objective, capture, check_decided, check_kept
from strategies.core.program import Program
from strategies.planner.planner import follow
from strategies.rules.random import mix
from strategies.runtime.module_tree import build
from strategies.runtime.slices import entries_of, slices_of

if TYPE_CHECKING:
    from meshwright.plans import Planned

Kind = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
"""Name, shape and dtype of every entry of a batch."""


@dataclass(frozen=True)
class _Forward:
    """The program of one kind of batch, the module that runs it, and how the output is made of its results."""

    program: Program
    module: nn.Module
    structure: Structure


class Evaluations:
    """What a rank runs in evaluation mode.

    Args:
        weight: this rank's slice of a parameter or buffer, by name (collective at ZeRO stage 3).
        gathers: whether parameters have no elements between steps, as at ZeRO stage 3.
    """

    def __init__(
        self, planned: Planned, execution: Execution, device: str, weight: Callable[[str], Tensor], gathers: bool
    ) -> None:
        self.decided: dict[str, Tensor] = {}
        """The values by which forwards have decided, by name."""
        self._planned, self._execution, self._device = planned, execution, device
        self._weight, self._gathers = weight, gathers
        self._forwards: dict[Kind, _Forward] = {}
        self._batches = 0

    @torch.no_grad()
    def run(self, entries: Mapping[str, Tensor]) -> Any:
        """The complete output for a global batch on every rank: the loss where the batch has its targets, else what the
        module returns; a dataclass that torch does not know is a dict. Collective.

        Raises:
            ConfigError: the batch does not fit, or ranks were given different ones.
            StrategyError: the forward of evaluation mode cannot be captured.
        """
        self._check(entries)
        kind = tuple((name, tuple(value.shape), value.dtype) for name, value in entries.items())
        if kind not in self._forwards:
            self._forwards[kind] = self._made(entries)
        forward, communicator = self._forwards[kind], self._execution.communicator
        pieces = entries_of([*entries.values()], forward.program, communicator.rank)
        local: list[Any] = [one.to(self._device) for one in pieces]
        if forward.program.random:
            local.append(mix(self._planned.prepared.config.train.seed, 0, self._batches))  # training steps count from 1
        self._batches += 1
        results = functional_call(forward.module, self._weights(forward.module), tuple(local))
        return forward.structure.filled(results if isinstance(results, tuple) else [results])

    def _check(self, entries: Mapping[str, Tensor]) -> None:
        objective, digest = self._planned.objective, hashlib.blake2b(digest_size=8)
        for name, value in entries.items():
            if name not in objective.names or not isinstance(value, Tensor):
                raise ConfigError(
                    "MW463",
                    f"Entry {name} of the batch is {f'{value!r:.60}'}; the plan is for tensors as the entries "
                    f"{', '.join(objective.names)}.",
                )
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        given = objective.targets & entries.keys()
        lacking = [name for name in objective.names if name in objective.targets and name not in entries]
        if not entries or (given and lacking):
            raise ConfigError(
                "MW463",
                f"The batch lacks {', '.join(lacking) or 'all entries'}; in evaluation mode give all of it for the "
                "loss, or leave out the targets for the output.",
            )
        if self._execution.program.mesh.size > 1:
            found = different(range(dist.get_world_size()), gather({"the batch": digest.hexdigest()}))
            if found:
                raise ConfigError(
                    "MW463",
                    f"{found} In evaluation mode every rank is given the same complete batch, of any number of rows; "
                    "each computes its slices of it.",
                )

    def _made(self, entries: Mapping[str, Tensor]) -> _Forward:
        """Capture and lower the forward for such entries."""
        planned, communicator = self._planned, self._execution.communicator
        prepared, objective = planned.prepared, planned.objective
        assert prepared.graph is not None and prepared.plan is not None
        given = [value.detach().cpu() for value in entries.values()]
        if isinstance(planned.batch[0], FakeTensor):  # planned from shapes alone
            mode = planned.batch[0].fake_mode
            given = [FakeTensor(mode, value.to("meta"), torch.device("cpu")) for value in given]
        targets = tuple(name for name in objective.targets if name in entries)
        own = Objective(objective.model, objective.loss if targets else None, [*entries], targets, objective.autocast)
        structures: list[Structure] = []
        own.register_forward_hook(lambda _, __, output: structures.append(Structure.of(output)))
        seen = capture(own, given, training=False, like=prepared.graph)
        check_kept(planned.captured.decided, seen.graph)
        self._check_decided(seen.decided)
        program = lowering.evaluation_program(prepared.config, seen.graph, follow(prepared.plan, seen.graph))
        communicator.prepare(program.axes)
        tensors = self._execution.tensors
        further = {name: one for name, one in program.tensors.items() if name not in tensors}
        made = slices_of(seen.tensors, program, communicator.rank, self._device) if further else {}
        module = build(program, {**made, **tensors}, communicator.sliced_as(program.mesh), self._device)
        return _Forward(program, module, structures[-1])

    def _check_decided(self, decided: Mapping[str, Tensor]) -> None:
        """Raises ConfigError where the rank's module has other values than those by which a forward has decided."""
        execution = self._execution
        sources = [one for name, one in execution.program.tensors.items() if name in decided]
        execution.communicator.prepare(gather_axes(execution.program, sources))
        values = {one.name: execution.full_tensor(one, self._weight(one.name)) for one in sources}
        check_decided(decided, values, "The module of this rank")
        self.decided |= decided

    def _weights(self, module: nn.Module) -> dict[str, Tensor]:
        """The parameters of a module by the keys in it, where they have no elements otherwise."""
        if not self._gathers:
            return {}
        names = {id(tensor): name for name, tensor in self._execution.tensors.items()}
        every = [*module.named_parameters(remove_duplicate=False)]
        gathered = {name: self._weight(name) for name in dict.fromkeys(names[id(one)] for _, one in every)}
        return {key: gathered[names[id(one)]] for key, one in every}


def positional(names: Sequence[str], entries: Sequence[Tensor], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a batch by name. Raises ConfigError where there are more than the plan knows, or one twice."""
    if len(entries) > len(names) or {*names[: len(entries)]} & named.keys():
        raise ConfigError("MW463", f"The batch has other entries than {', '.join(names)}, for which the plan is.")
    return dict(zip(names, entries, strict=False)) | dict(named)
