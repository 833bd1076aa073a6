"""States and parameters on the host and on a disk: the same bits as without, and really where they should be.

A layer of 1100 x 1100 leaves 1.15 MiB to each of 4 ranks, more than the 1 MiB below which DeepSpeed leaves everything
in memory.
"""

import pytest
import torch

from strategies.engine.offload import Offload

WIDTH, COUNT, RANKS = 1100, 2, 4
PIECE = WIDTH * WIDTH // RANKS * 4


@pytest.fixture(scope="module")
def results(training, ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("offloaded")

    def case(stage, **where):
        return training.Case(
            training.DATA_PARALLEL, stage, "adamw", accumulate=1, offload=Offload(**where, folder=folder)
        )

    cases = {
        "plain": case(3),
        "states on the host": case(3, optimizer="host"),
        "everything on the host": case(3, optimizer="host", parameters="host"),
        "states on a disk": case(3, optimizer="disk"),
        "everything on a disk": case(3, optimizer="disk", parameters="disk"),
        "parameters on a disk": case(3, parameters="disk"),
    }
    task = training.layers_task(count=COUNT, width=WIDTH)
    done = ranks("train", [(task, case) for case in cases.values()], RANKS)
    assert list(folder.rglob("*.swp")) == []
    return dict(zip(cases, done, strict=True))


@pytest.mark.parametrize(
    "what",
    [
        "states on the host",
        "everything on the host",
        "states on a disk",
        "everything on a disk",
        "parameters on a disk",
    ],
)
def test_same_bits(results, what):
    plain, found = results["plain"], results[what]
    assert not isinstance(found, str), found
    print(
        found.moved,
        found.on_disk,
        [a - b for a, b in zip(found.losses, plain.losses)],
        [a - b for a, b in zip(found.norms, plain.norms)],
    )
    assert found.losses == plain.losses
    assert found.norms == pytest.approx(plain.norms, rel=1e-6)
    for name, weight in plain.weights.items():
        assert torch.equal(found.weights[name], weight), name
        assert torch.equal(found.gradients[name], plain.gradients[name]), name
    for one, other in zip(found.evaluated, plain.evaluated, strict=True):
        assert torch.equal(one, other)
