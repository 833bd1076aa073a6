"""The learning rate of every parameter group and the norm of the gradient, at every step."""

from __future__ import annotations

from runner.training.hooks import Callback, TrainingState


class Monitor(Callback):
    """Logs `lr_GROUP` of every parameter group (the step's own, before a scheduler changes it), `grad_norm` before
    clipping, and `clipped`, by what clipping has multiplied the gradient."""

    ranks = "first"
    measures_norm = True

    def before_update(self, state: TrainingState) -> None:
        groups = enumerate(state.optimizer.param_groups)
        state.log(**{f"lr_{n}": float(group["lr"]) for n, group in groups if "lr" in group})

    def after_step(self, state: TrainingState) -> None:
        if state.grad_norm is None:
            return
        state.log(grad_norm=state.grad_norm)
        if (clip := state.config.train.clip) is not None:
            state.log(clipped=min(1.0, clip / (state.grad_norm + 1e-6)))
