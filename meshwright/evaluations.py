"""Evaluation in a loop of the user's own: the forward of evaluation mode, with the weights as training left them.

The graph of every kind of batch is captured at its first call from the planned module, follows the plan as
`run train` has it, and reads the slices that training writes. Invariant: every rank is given the same complete batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call

from runner.build.scores import Structure
from runner.errors import ConfigError
from runner.planning import lowering
from runner.planning.prepare import digest
from runner.training.agreement import different, gather
from runner.training.execution import Execution, gather_axes
from strategies.capture import Objective, capture, check_decided, check_kept, duplicate
from strategies.capture.shapes import pretend
from strategies.core.program import Program
from strategies.planner.planner import follow
from strategies.rules.random import mix
from strategies.runtime.module_tree import build
from strategies.runtime.slices import entries_of, slices_of

if TYPE_CHECKING:
    from meshwright.plans import Planned

SAME_BATCH = "In evaluation mode every rank is given the same complete batch, of any number of rows; each slices it."
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
        check: raises ConfigError where the weights are not those of the optimizer.
    """

    def __init__(
        self,
        planned: Planned,
        execution: Execution,
        device: str,
        weight: Callable[[str], Tensor],
        gathers: bool,
        check: Callable[[], None],
    ) -> None:
        self.decided: dict[str, Tensor] = {}
        """The values by which forwards have decided, by name."""
        self._planned, self._execution, self._device = planned, execution, device
        self._weight, self._gathers, self._check = weight, gathers, check
        self._forwards: dict[Kind, _Forward] = {}
        self._batches = 0

    @torch.no_grad()
    def run(self, entries: Sequence[Tensor], named: Mapping[str, Tensor]) -> Any:
        """The complete output for a global batch on every rank: the loss where the batch has its targets, else what the
        module returns; a dataclass that torch does not know is a dict. Collective: all ranks call it.

        Raises:
            ConfigError: the batch does not fit, ranks were given different ones, or the planned module has changed.
            StrategyError: the forward of evaluation mode cannot be captured.
        """
        batch = self._agreed(entries, named)
        kind = tuple((name, tuple(value.shape), value.dtype) for name, value in batch.items())
        if kind not in self._forwards:
            with torch.inference_mode(False), torch.no_grad():
                self._forwards[kind] = self._made({name: value.clone() for name, value in batch.items()})
        forward, communicator = self._forwards[kind], self._execution.communicator
        pieces = entries_of([*batch.values()], forward.program, communicator.rank)
        local: list[Any] = [one.to(self._device) for one in pieces]
        if forward.program.random:
            local.append(mix(self._planned.prepared.config.train.seed, 0, self._batches))  # training steps count from 1
        self._batches += 1
        results = functional_call(forward.module, self._weights(forward.module), tuple(local))
        return forward.structure.filled(results if isinstance(results, tuple) else [results])

    def _agreed(self, entries: Sequence[Tensor], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The entries of a batch by name. Raises ConfigError on all ranks where one of them refuses its batch, or has
        another one."""
        fault: ConfigError | None = None
        batch: dict[str, Tensor] = {}
        content = hashlib.blake2b(digest_size=8)
        try:
            self._check()
            batch = self._by_name(entries, named)
        except ConfigError as error:
            fault = error
        for name, value in batch.items():
            content.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            content.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        if self._execution.program.mesh.size > 1:
            answers = gather([content.hexdigest(), None if fault is None else str(fault)])
            refused = [(rank, text) for rank, (_, text) in enumerate(answers) if text is not None]
            if refused and fault is None:
                raise ConfigError("MW463", f"Rank {refused[0][0]} refuses its batch: {refused[0][1]}")
            self._require_same([{"the batch": own} for own, _ in answers] if fault is None else [], SAME_BATCH)
        if fault is not None:
            raise fault
        return batch

    def _by_name(self, entries: Sequence[Tensor], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        objective = self._planned.objective
        names = objective.names
        if len(entries) > len(names) or {*names[: len(entries)]} & named.keys():
            raise ConfigError("MW463", f"The batch has other entries than {', '.join(names)}, for which the plan is.")
        batch = dict(zip(names, entries, strict=False)) | dict(named)
        for name, value in batch.items():
            if name not in names or not isinstance(value, Tensor):
                raise ConfigError(
                    "MW463",
                    f"Entry {name} of the batch is {f'{value!r:.60}'}; the plan is for tensors as the entries "
                    f"{', '.join(names)}.",
                )
        given = objective.targets & batch.keys()
        lacking = [name for name in names if name in objective.targets and name not in batch]
        if not batch or (given and lacking):
            raise ConfigError(
                "MW463",
                f"The batch lacks {', '.join(lacking) or 'all entries'}; in evaluation mode give all of it for the "
                "loss, or leave out the targets for the output.",
            )
        return batch

    def _require_same(self, facts: Sequence[Mapping[str, str]], otherwise: str) -> None:
        """Raises ConfigError where ranks differ in their `facts`."""
        if found := different(range(len(facts)), facts):
            raise ConfigError("MW463", f"{found} {otherwise}")

    def _made(self, batch: Mapping[str, Tensor]) -> _Forward:
        """Capture and lower the forward for such a batch."""
        planned, communicator = self._planned, self._execution.communicator
        prepared, objective = planned.prepared, planned.objective
        assert prepared.graph is not None and prepared.plan is not None
        given = [value.detach().cpu() for value in batch.values()]
        targets = tuple(name for name in objective.targets if name in batch)
        loss = duplicate(objective.loss, parameters=False) if targets and objective.loss is not None else None
        own = Objective(planned.as_planned("sharded.eval()"), loss, [*batch], targets, objective.autocast)
        tensors = [*own.parameters(), *own.buffers()]
        if (fake := next((one for one in tensors if isinstance(one, FakeTensor)), None)) is not None:
            given = [FakeTensor(fake.fake_mode, value.to("meta"), torch.device("cpu")) for value in given]
        elif any(one.is_meta for one in tensors):  # the weights were let go
            given = pretend(own, given)
        structures: list[Structure] = []
        hook = own.register_forward_hook(lambda _, __, output: structures.append(Structure.of(output)))
        seen = capture(own, given, training=False, like=prepared.graph)
        hook.remove()
        check_kept(planned.captured.decided, seen.graph)
        self._check_decided(seen.decided)
        plan = follow(prepared.plan, seen.graph)
        program = lowering.evaluation_program(prepared.config, seen.graph, plan)
        if program.mesh.size > 1:
            made = digest(seen.graph.signature(), json.dumps(plan.to_json() | {"search": None}))
            self._require_same(gather({"the captured evaluation": made}), "Plan the same module on every rank.")
        communicator.prepare(program.axes)
        known = self._execution.tensors
        further = program.tensors.keys() - known.keys()
        slices = slices_of(seen.tensors, program, communicator.rank, self._device) if further else {}
        module = build(program, {**slices, **known}, communicator.sliced_as(program.mesh), self._device)
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
