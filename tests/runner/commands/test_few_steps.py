"""The steps that verify compares and tune measures."""

from runner.commands.few_steps import few_steps
from runner.config.schema import Config
from tests.runner.composing import compose_config

PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"


def test_what_follows_evaluations_is_left_out():
    """`run verify` refused every recipe with early stopping, since nothing is evaluated there."""
    config = compose_config(
        *("+recipe=data_parallel", "evaluate.every=5", "train.callbacks=[monitor, early_stopping, ema]"),
        f"optimizer.scheduler.target={PLATEAU}",
    )
    made = Config.model_validate(few_steps(config, 3, 1))
    assert [one.target for one in made.train.callbacks] == ["monitor", "ema"]
    assert made.optimizer.scheduler.target is None and not made.evaluate.wanted and made.train.steps == 3
    kept = compose_config("+recipe=data_parallel", "optimizer.scheduler.target=torch.optim.lr_scheduler.ConstantLR")
    assert few_steps(kept, 3, 1)["optimizer"] == kept.model_dump()["optimizer"]
