"""A restart resumes its own run, whatever else is in the folder."""

import json

from disturbed import RESTARTS, faults, stored
from small import ALONE, SMALL

WORDS = (*SMALL, *ALONE, "optimizer.target=torch.optim.AdamW", "checkpoint.every=2", "train.log_every=1")


def resumed(folder):
    return [json.loads(line)["resume"] for line in (folder / "restarts.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_restart_takes_only_checkpoints_of_its_own_run(start):
    """First in the folder of a longer run; then from an earlier step of it given by path, before a new save."""
    expected = stored(start(*WORDS, "train.steps=4", "train.seed=1", folder="truth").folder)
    longer = start(*WORDS, "train.steps=8").folder
    killed = "{kind: kill, rank: 0, step: 2, phase: data}"
    assert start(*WORDS, *RESTARTS, "train.steps=4", "train.seed=1", faults(killed)).folder == longer
    assert stored(longer) == expected
    assert resumed(longer) == [None]
    given = longer / "checkpoints" / "step-00000002"
    killed = "{kind: kill, rank: 0, step: 3, phase: data}"
    start(*WORDS, *RESTARTS, "train.steps=4", "train.seed=1", f"train.resume={given}", faults(killed))
    assert stored(longer) == expected
    assert resumed(longer)[1:] == [str(given)]
    assert (longer / "checkpoints" / "step-00000008").is_dir()
