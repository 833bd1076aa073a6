"""Callbacks of a run: what they are, what they see, and when they are called.

`train.callbacks` names classes or functions; each makes an object of which the methods with the names of hooks are
called. Invariant: without callbacks nothing here is called in a step, and a callback that asks for nothing changes no
number of the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from runner.build.callbacks import HOOKS
from runner.config.schema import Config
from runner.training.agreement import gather
from strategies.core.errors import CodedError
from strategies.core.program import Program
from strategies.optimizer.updates import Updates
from strategies.runtime.shards import MODEL, Shard, Shards

WRITING = frozenset({"start", "before_step", "before_update", "after_step", "checkpoint"})
"""Hooks after which training goes on from the weights; those of an evaluation may bring others for a while."""
HOLLOW = "refers to a single memory location"
"""What torch says where a parameter is written that stands for no values, as all do that stage 3 has to gather."""


@dataclass
class TrainingState:
    """What a callback sees of a run, on one rank. What it may change are `stop`, `log`, the options of `optimizer`,
    such as the learning rate, `gradients` and `weights`; then in the same way on all ranks.

    Attributes:
        config: the config of the run.
        run_dir: the run folder.
        rank: the number of this rank among all `world_size`.
        device: where this rank computes, such as `cpu` or `cuda:0`.
        first: the first step of this run, 1 unless it is resumed.
        last: the last step.
        module: the program of this rank; its parameters are this rank's slices, under ZeRO 3 only while it runs.
        program: the layout of every tensor.
        updates: gradients and weights in slices (`gradients`, `pieces`), and what updates them.
        operators: where each operator of the model is written, by its name in the plan.
        repeat: computes loss and gradients of the current step once more; collective, for callbacks with `repeats`.
        say: prints a line on rank 0.
        step: the current step, counted from 1.
        loss: its mean loss over the global batch, the same on all ranks; nan before it is known.
        grad_norm: the norm of all gradients before clipping, where it was measured: at every step if a callback has
            `measures_norm = True`.
        samples: rows of the step's global batch.
        evaluation: the results of the last evaluation by name, the same on all ranks.
        evaluated: the step after which that was; 0 before the first one.
        regular: whether a longer run has that evaluation too; not if it is made because the run ends.
    """

    config: Config
    run_dir: Path
    rank: int
    world_size: int
    device: str
    first: int
    last: int
    module: nn.Module
    program: Program
    updates: Updates
    operators: Mapping[str, str]
    repeat: Callable[[], Any]
    say: Callable[[str], None] = lambda text: None
    step: int = 0
    loss: float = math.nan
    grad_norm: float | None = None
    samples: int = 0
    evaluation: Mapping[str, float] = field(default_factory=dict)
    evaluated: int = 0
    regular: bool = True
    logged: dict[str, float] = field(default_factory=dict)
    reason: str | None = None
    marks: list[tuple[int, int]] = field(default_factory=list)
    """Of the weights, as callbacks may leave them."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; the options of its `param_groups` may be changed."""
        return self.updates.optimizer

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and gradient of this rank's slice of every trainable parameter; in `before_update` alone. The
        optimizer uses values written into them in place, on all ranks in the same way. Collective: all ranks must go
        through all of it.

        Raises:
            TypeError: one was written, and DeepSpeed or servers do the update, which would not use it.
        """
        for name, gradient in self.updates.gradients():
            version = gradient._version
            yield name, gradient
            if gradient._version != version and not self.updates.takes_changes:
                raise TypeError(
                    f"the gradient of {name} was written in place, which the update by DeepSpeed or by parameter "
                    "servers would not use; set parallel.zero.engine=native, or write an optimizer that does so in its "
                    "step"
                )

    def parts(self) -> Iterator[tuple[str, list[Shard]]]:
        """This rank's parts of every trained parameter, as its optimizer holds them."""
        trained = set(self.program.trainable_names)
        for batch in self.updates.pieces(write=True):
            for key, shards in batch.items():
                if key.startswith(MODEL) and (name := key.removeprefix(MODEL)) in trained:
                    yield name, list(shards)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Name and values of this rank's part of every trained parameter, as the optimizer holds them: slices, blocks
        of these under ZeRO, in fp32 where weights have fewer bits. Training goes on from values written into them in
        place, on all ranks in the same way. Collective: all ranks must go through all of it."""
        for name, shards in self.parts():
            yield from ((name, one.view.detach()) for one in shards)
        with torch.no_grad():
            self.updates.loaded()
        self.marks = self.updates.marks()

    def stop(self, reason: str) -> None:
        """End training after the current step on all ranks, as after the last step; one rank's call is enough."""
        self.reason = self.reason or reason

    def log(self, **values: float) -> None:
        """Add numbers to the record of this step in metrics.jsonl (below `callbacks`) and in the loggers. Rank 0's
        count."""
        self.logged |= {name: float(value) for name, value in values.items()}


class Callback:
    """What a callback may have; a class need not derive from this one, and may leave out any method.

    Attributes:
        ranks: "all", or "first" for one object on rank 0 alone, whose methods must not call collectives.
        measures_norm: whether `grad_norm` is needed at every step.
        repeats: whether it may call `state.repeat`, for which the batch of a step is kept.
        follows: the result of the evaluations that it needs; a run without it is refused.
        copies: how many copies it keeps of what the optimizer updates; predictions of memory count them.
    """

    follows: str | None = None
    copies = 0
    ranks = "all"
    measures_norm = False
    repeats = False

    def start(self, state: TrainingState) -> None:
        """Called before the first step, after a checkpoint was restored."""

    def before_step(self, state: TrainingState) -> None:
        """Called before a step computes anything."""

    def before_update(self, state: TrainingState) -> None:
        """Called after the gradients of a step are complete, before the optimizer uses them."""

    def after_step(self, state: TrainingState) -> None:
        """Called after the update; `loss` and `grad_norm` are those of the step."""

    def before_evaluation(self, state: TrainingState) -> None:
        """Called before an evaluation."""

    def evaluation(self, state: TrainingState) -> None:
        """Called after an evaluation, whose results are in `state.evaluation`."""

    def checkpoint(self, state: TrainingState) -> None:
        """Called before a checkpoint of the state after `state.step` is saved."""

    def exception(self, state: TrainingState, error: Exception) -> None:
        """Called after an error on this rank. Other ranks may be gone, so no collectives; but a FloatingPointError is
        raised by all ranks together."""

    def end(self, state: TrainingState) -> None:
        """Called after the last step, when everything is saved; not after an error."""

    def tensors(self, state: TrainingState) -> Shards:
        """Slices that a checkpoint keeps, by the name of the parameter of which they are."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, the same on all ranks: numbers, strings, tensors, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` has returned before."""


class CallbackFailed(CodedError):
    """A callback that raised an exception."""


class Hooks:
    """The callbacks of one rank.

    Args:
        callbacks: by name.
        state: what they see.
    """

    def __init__(self, callbacks: Mapping[str, Any], state: TrainingState) -> None:
        self.state, self._any = state, bool(callbacks)
        self.callbacks = {
            name: callback
            for name, callback in callbacks.items()
            if state.rank == 0 or getattr(callback, "ranks", "all") == "all"
        }
        self._calls = {
            hook: [
                (name, method) for name, callback in self.callbacks.items() if callable(method := _own(callback, hook))
            ]
            for hook in HOOKS
        }
        before = [name for name, _ in self._calls["before_evaluation"]]
        undo = [one for one in reversed(self._calls["evaluation"]) if one[0] in before]  # what they did, last first
        self._calls["evaluation"] = [undo.pop(0) if one[0] in before else one for one in self._calls["evaluation"]]
        self.measures_norm = any(getattr(callback, "measures_norm", False) for callback in callbacks.values())
        self.repeats = any(getattr(callback, "repeats", False) for callback in callbacks.values())

    def __bool__(self) -> bool:
        """Whether the run has callbacks, on any rank."""
        return self._any

    def call(self, hook: str, *args: Any) -> None:
        """Call this hook of all callbacks, in their order; `evaluation` of those with `before_evaluation` in reverse.

        Raises:
            CallbackFailed: one of them raised an exception; a CodedError is raised as it is.
        """
        for name, method in self._calls[hook]:
            if hook in WRITING:
                self.state.marks = self.state.updates.marks()
            try:
                method(self.state, *args)
            except CodedError:
                raise
            except (Exception, SystemExit) as error:
                text = " ".join(str(error).split())
                if HOLLOW in text:
                    text = "parameters have no values here under ZeRO 3; write into those of state.weights()"
                raise CallbackFailed(
                    "MW841",
                    f"train.callbacks: {name} fails in {hook} at step {self.state.step}: {type(error).__name__}"
                    f"{': ' if text else ''}{text}",
                ) from error
            if hook in WRITING and self.state.marks != self.state.updates.marks():
                raise CallbackFailed(
                    "MW841",
                    f"train.callbacks: {name} writes weights in {hook} at step {self.state.step}, of which there are "
                    "copies that would not follow, as in half precision and under ZeRO; write into those of "
                    "state.weights()",
                )

    def stopping(self) -> bool:
        """Whether a callback on any rank requests to stop (collective). Rank 0 prints why."""
        if not self._any:
            return False
        state = self.state
        reasons = [state.reason]
        if state.world_size > 1:
            flag = torch.tensor([int(state.reason is not None)], device=state.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            if not flag.item():
                return False
            reasons = gather(state.reason)
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is not None:
            state.say(f"stopped after step {state.step}: {reason}")
        return reason is not None

    def watching(self) -> Watching:
        """Call the hook `exception` for an error that leaves a block."""
        return Watching(self)

    def taken(self) -> dict[str, float]:
        """The numbers that were logged since the last call."""
        logged, self.state.logged = self.state.logged, {}
        return logged

    def tensors(self) -> Shards:
        """What callbacks keep of parameters, as CALLBACK/NAME."""
        return {
            f"{name}/{key}": shards
            for name, callback in self.callbacks.items()
            if (method := _own(callback, "tensors")) is not None
            for key, shards in method(self.state).items()
        }

    @property
    def stateful(self) -> dict[str, Any]:
        """The callbacks whose state a checkpoint keeps."""
        return {name: one for name, one in self.callbacks.items() if callable(_own(one, "state_dict"))}


class Watching:
    """A block whose errors callbacks see. No generator: its frames would be taken for the place of what they raise."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._hooks.call("exception", error)


def _own(callback: Any, name: str) -> Any:
    """The method `name` of a callback; None if it is that of `Callback`, which does nothing."""
    return None if getattr(type(callback), name, None) is getattr(Callback, name) else getattr(callback, name, None)
