"""What happens between a loss and the next weights, as one interface for every optimizer parallel.

Stage 0 (`replicated`) reduces gradients itself and replicates optimizer states; stages 1-3 are our own (`sharded`) or
DeepSpeed's (`zero`).
Invariant: after `reduce`, `gradients` are the true gradients of the global loss, each rank holding its own slices;
after `update`, all ranks that hold the same slice hold the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.core.errors import StrategyError
from strategies.core.graph import Source
from strategies.core.layout import Layout
from strategies.core.program import Program
from strategies.optimizer.loss_scale import LossScale
from strategies.optimizer.state import OptimizerScalars, States
from strategies.runtime.communicator import Communicator
from strategies.runtime.naming import parameters_by_name
from strategies.runtime.offload import OffloadTraffic
from strategies.runtime.peers import Peers
from strategies.runtime.shards import Shards

Precision = Literal["fp32", "fp64", "bf16", "fp16"]
"""The dtype of the parameters in the program."""
Engine = Literal["deepspeed", "native"]
"""Whose ZeRO: DeepSpeed's or our own."""
Groups = Sequence[Mapping[str, Any]]
"""Parameter groups: {"names": [full name, ...], option: value, ...}."""
OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
"""Parameter groups of torch ({"params": [...], option: value, ...}) -> optimizer."""

BY_SHAPE = frozenset({"Adafactor", "Muon"})
"""Optimizers whose update of an element depends on the shape of the unsharded parameter."""
UNFIT = {"LBFGS": "evaluates the loss several times in one step", "SparseAdam": "only takes sparse gradients"}


@dataclass(frozen=True)
class BucketLimits:
    """How gradients are cut into buckets: of `size` bytes at most or one larger gradient (None: 25 MiB), or at the
    positions `at` in the order in which backward completes them."""

    size: int | None = None
    at: tuple[int, ...] | None = None


DEFAULT_BUCKETS = BucketLimits()


class Updates(ABC):
    """One optimizer step: forward and `backward` per micro-batch, then `reduce`, then `update`. All ranks call it
    all. The communicator must have the groups of `axes_needed`.

    Args:
        module: built from `program`.
        program: the training program.
        communicator: between the ranks of the program.
        groups: parameter groups by name; every trainable parameter is in exactly one.
        clip: largest norm of the global gradient; None: no clipping.
        accumulate: micro-batches per step.
        evaluation: the evaluation program on the same parameters, or a ModuleDict of several; call it under
            torch.no_grad().
        short: the program of a short last micro-batch of an epoch, on the same parameters.
        peers: the other stages of a pipeline.
    """

    takes_changes = True
    """Whether the optimizer uses what a caller writes into `gradients`."""

    def __init__(
        self,
        module: nn.Module,
        program: Program,
        communicator: Communicator,
        groups: Groups,
        *,
        clip: float | None = None,
        accumulate: int = 1,
        evaluation: nn.Module | None = None,
        short: nn.Module | None = None,
        peers: Peers | None = None,
    ) -> None:
        if peers is None and not program.trainable_names:  # a stage of a pipeline may be frozen
            raise StrategyError(
                "MW321",
                "The loss depends on no trainable parameter: all are frozen or unused, so there is nothing to train.",
            )
        self._root, self._program, self._communicator = module, program, communicator
        self._clip, self._accumulate, self._short, self._peers = clip, accumulate, short, peers
        self.evaluation = evaluation
        named = parameters_by_name(module)
        self._parameters = {source.name: named[source.name] for source in program.parameters}
        self._groups = trainable_groups(program, groups)
        copies = {} if peers is None else peers.copies
        self._follows = frozenset() if peers is None else frozenset(copies.keys() - peers.leads)
        """Parameters that an earlier group of ranks of a pipeline saves and counts."""

    @property
    def module(self) -> Callable[..., Any]:
        """The training program; call this one."""
        return self._root

    def short(self, *args: Any, **kwargs: Any) -> Any:
        """The training program of a short last micro-batch, or that of all others where there is none."""
        return (self._short or self._root)(*args, **kwargs)

    @property
    @abstractmethod
    def optimizer(self) -> Optimizer:
        """The torch optimizer that does the updates: schedulers work on it."""

    @abstractmethod
    def backward(self, loss: Tensor, share: float | None = None, left: int | None = None) -> None:
        """Add the gradients of one micro-batch; its scalar `loss` is divided by the number of micro-batches here. Of a
        step whose micro-batches differ in rows or tokens, `share` is the part of them that this one has, and `left`
        more are to come."""

    @abstractmethod
    def collect(self) -> None:
        """Collect gradients where another has called `backward`: a pass of a pipeline stage (input-gradient,
        weight-gradient or backward) or of the user's loop has added its gradients, divided by the number of
        micro-batches, to `grad` of the parameters."""

    @abstractmethod
    def reduce(self) -> None:
        """Make the gradients complete; after the last micro-batch."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the gradient of this rank's slice of every trainable parameter, at least in fp32, zeros where there is
        none; after `reduce`, before `update`. Collective: every rank must go through all of it."""

    @abstractmethod
    def update(self, measure: bool = True) -> float | None:
        """Clip, step, forget the gradients. Returns the norm of the global gradient before clipping; None if it was not
        needed for clipping and `measure` is false."""

    def step(self, measure: bool = True) -> float | None:
        """`reduce` and `update`."""
        self.reduce()
        return self.update(measure)

    @abstractmethod
    def weight(self, name: str) -> Tensor:
        """This rank's slice of a parameter, not to be written. Collective over its replicas."""

    @abstractmethod
    def pieces(self, write: bool = False) -> Iterator[Shards]:
        """Everything of parameters and optimizer states that this rank holds, in batches: each is valid until the next
        one. With `write` the views may be overwritten, after `begin` and before `loaded`."""

    @abstractmethod
    def plain(self) -> OptimizerScalars:
        """The optimizer state that is not a tensor, for all parameters of which this rank holds a slice."""

    @abstractmethod
    def begin(self, states: States, plain: OptimizerScalars) -> None:
        """Give the optimizer the states of a checkpoint, made of zeros, and its options and scalars."""

    @abstractmethod
    def loaded(self) -> None:
        """Recompute the derived values once all views are overwritten. Collective."""

    def marks(self) -> list[tuple[int, int]]:
        """Numbers that change where a caller writes or replaces a tensor, of which the optimizer or the module has a
        copy that would not follow, as `pieces` and `loaded` make it do."""
        return []

    @property
    @abstractmethod
    def loss_scale(self) -> LossScale | None:
        """The loss scale in fp16; None in other precisions."""

    @property
    def moved(self) -> Mapping[str, OffloadTraffic]:
        """What was offloaded so far: `optimizer` and `parameters`, where they are."""
        return {}

    def hosted(self) -> list[Tensor]:
        """The tensors kept in host memory between updates, and the host buffers that gradients are copied to."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Release hooks and buffers; the object cannot be used afterwards."""


def mark(tensor: Tensor) -> tuple[int, int]:
    """Changes where a tensor is written or gets other memory."""
    return tensor._version, tensor.data_ptr()


def axes_needed(program: Program) -> list[tuple[str, ...]]:
    """The sets of mesh axes over which an optimizer parallel of any stage communicates; for `Communicator`.

    Returns:
        Axis names in mesh order; each set once.
    """
    mesh = program.mesh
    needed = [mesh.sorted(mesh.names), *(mesh.sorted(axes) for axes in program.reductions.values())]
    for source in program.parameters:
        replicas = program.layouts[source.id].replica_axes(mesh)
        needed += [replicas, mesh.others(replicas)]
    return [axes for axes in dict.fromkeys(needed) if axes]


def layout_of(program: Program, name: str) -> Layout:
    """The layout of the tensor called `name`."""
    return program.layouts[program.tensors[name].id]


def local_elements(program: Program, source: Source) -> int:
    """The number of elements of a rank's slice of `source`."""
    return math.prod(program.layouts[source.id].local_shape(source.spec.shape, program.mesh))


def trainable_groups(program: Program, groups: Groups) -> list[tuple[list[str], dict[str, Any]]]:
    """`groups` without frozen parameters: (names, options). Those of which a stage of a pipeline has no parameter stay,
    empty, since schedulers may have an entry for each group.

    Raises:
        StrategyError: a trainable parameter is in no group or in two.
    """
    trainable = program.trainable_names
    given = Counter(name for group in groups for name in group["names"])
    for name in trainable:
        if given[name] != 1:
            raise StrategyError(
                "MW323",
                f"Parameter {name} is in {given[name]} groups of the optimizer; it must be in exactly one.",
            )
    return [
        (
            [name for name in group["names"] if name in trainable],
            {key: value for key, value in group.items() if key != "names"},
        )
        for group in groups
    ]


def updated_together(program: Program, names: Sequence[str]) -> list[list[str]]:
    """The names of a group, cut into what one tensor of an optimizer may hold: parameters that a step may leave without
    a gradient are by themselves."""
    together = [name for name in names if name not in program.optional_names]
    return [one for one in (together, *([name] for name in names if name in program.optional_names)) if one]


def check_kind(optimizer: Optimizer) -> None:
    """Raises StrategyError for an optimizer that no plan can use."""
    if kind := kind_of(optimizer, UNFIT):
        raise StrategyError(
            "MW323",
            f"Optimizer {kind} cannot be used here: it {UNFIT[kind]}. torch.optim.AdamW and SGD are the usual choices.",
        )
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise StrategyError(
            "MW323",
            f"Optimizer {type(optimizer).__name__} is schedule-free: after its eval() the model has other weights, "
            "which are those to evaluate and to save, and no run or checkpoint here would have them. Use the optimizer "
            "that it extends, such as torch.optim.AdamW, with an average of the weights: train.callbacks=[ema].",
        )


def check_optimizer(optimizer: Optimizer, program: Program, stage: int) -> None:
    """Raises StrategyError if the optimizer cannot do the same on shards as on global parameters."""
    check_kind(optimizer)
    sliced = [source.name for source in program.parameters if program.layouts[source.id].axes]
    if (kind := kind_of(optimizer, BY_SHAPE)) and (stage or sliced):
        what = f"ZeRO stage {stage} flattens them" if stage else f"this plan slices {sliced[0]}"
        raise StrategyError(
            "MW323",
            f"Optimizer {kind} treats every parameter as one matrix, but {what}: the updates would differ from "
            "training on one device. Use an elementwise optimizer such as torch.optim.AdamW, or data_parallel with "
            "parallel.zero.stage=0.",
        )


def kind_of(optimizer: Optimizer, known: Container[str]) -> str:
    """Which of the `known` classes the optimizer is, or ""."""
    return next((base.__name__ for base in type(optimizer).__mro__ if base.__name__ in known), "")
