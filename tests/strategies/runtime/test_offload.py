"""States and parameters on the host and on disk: bitwise equal to no offload, and really where they should be.

A layer of 1100 x 1100 leaves 1.15 MiB to each of 4 ranks, more than the 1 MiB below which DeepSpeed leaves everything
in memory.
"""

from types import SimpleNamespace

import pytest
import torch

from strategies.optimizer.zero import swap_files as swapping
from strategies.runtime.offload import Offload, OffloadTraffic

WIDTH, COUNT, STEPS, RANKS = 1100, 2, 2, 4
PIECE = WIDTH * WIDTH // RANKS * 4
"""Bytes of a layer's weight in fp32 that a rank holds."""
DISK = {"optimizer": "disk", "parameters": "disk"}
WHERE = {
    "states on the host": {"optimizer": "host"},
    "all on the host": {"optimizer": "host", "parameters": "host"},
    "states on a disk": {"optimizer": "disk"},
    "all on a disk": DISK,
    "parameters on a disk": {"parameters": "disk"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("offloaded")


@pytest.fixture(scope="module")
def case(training, folder):
    def made(where, clip=None, precision="fp32", stage=3, optimizer="adamw"):
        offload = Offload(**where, folder=folder)
        return training.Case(training.DATA_PARALLEL, stage, optimizer, clip, precision, 1, offload=offload)

    return made


@pytest.fixture(scope="module")
def results(training, ranks, case, folder):
    wide = training.layers_task(STEPS, COUNT, WIDTH)
    bf16 = training.layers_task(STEPS, COUNT, WIDTH, torch.bfloat16)
    cases = {"nothing": (wide, case({}))}
    cases |= {what: (wide, case(where)) for what, where in WHERE.items()}
    cases |= {"clipped": (wide, case({}, 0.1)), "clipped, all on a disk": (wide, case(DISK, 0.1))}
    cases |= {"bf16": (bf16, case({}, None, "bf16")), "bf16, states": (bf16, case({"optimizer": "disk"}, None, "bf16"))}
    return dict(zip(cases, ranks("train", list(cases.values()), RANKS), strict=True)), folder


@pytest.mark.slow
@pytest.mark.parametrize("what", WHERE)
def test_the_same_bits(results, what):
    same_bits(results[0]["nothing"], results[0][what])


@pytest.mark.slow
def test_bf16_too(results):
    same_bits(results[0]["bf16"], results[0]["bf16, states"])


def same_bits(plain, found):
    assert found.losses == plain.losses
    assert found.norms == pytest.approx(plain.norms, rel=1e-6)
    for name, weight in plain.weights.items():
        assert torch.equal(found.weights[name], weight), name
        assert torch.equal(found.gradients[name], plain.gradients[name]), name
    for one, other in zip(found.evaluated, plain.evaluated, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_clipping_too(results):
    """The norm is added in another order, so the last bits may differ."""
    plain, found = results[0]["clipped"], results[0]["clipped, all on a disk"]
    assert plain.norms[0] > 0.2, "clipping has something to do"
    assert found.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, weight in plain.weights.items():
        assert torch.allclose(found.weights[name], weight, rtol=1e-6, atol=1e-7), name


@pytest.mark.slow
def test_tensors_reported_on_the_disk_are_there(results):
    """Both weights, their fp32 masters and two moments each; biases stay in memory. The files are unlinked."""
    found, folder = results
    masters, moments = COUNT * PIECE, 2 * COUNT * PIECE
    states, pieces = found["states on a disk"], found["parameters on a disk"]
    padding = 1024  # bytes to which each piece is filled up
    assert 0 <= states.moved["optimizer"].stored - masters - moments < 3 * padding
    assert set(states.moved) == {"optimizer"} and set(pieces.moved) == {"parameters"}
    assert 0 <= pieces.moved["parameters"].stored - COUNT * PIECE < COUNT * padding
    for what, tensors in (("states on a disk", 3), ("parameters on a disk", 1), ("all on a disk", 4)):
        assert 0 <= found[what].on_disk - tensors * COUNT * PIECE < 16 * 4096, what
    assert found["nothing"].on_disk == found["all on the host"].on_disk == 0
    assert [path for path in folder.rglob("*") if path.is_file()] == []


@pytest.mark.slow
def test_offloaded_bytes_are_counted(results):
    moved = results[0]["all on the host"].moved
    elements = COUNT * (WIDTH * WIDTH + WIDTH) // RANKS
    assert moved["parameters"] == OffloadTraffic(STEPS * 4 * elements, STEPS * 2 * 4 * elements, 4 * elements)
    assert moved["optimizer"].out == moved["optimizer"].back == STEPS * 4 * elements
    assert moved["optimizer"].stored == 3 * 4 * elements + 2 * 4, "masters, two moments, the steps of two groups"


@pytest.mark.slow
def test_refused(training, ranks, case):
    small = training.layers_task(1)
    states, pieces, adagrad = ranks(
        "train",
        [
            (small, case({"optimizer": "disk"})),
            (small, case({"parameters": "disk"})),
            (small, case({"optimizer": "disk"}, optimizer="adagrad")),
        ],
        RANKS,
    )
    assert "parallel.offload.optimizer = 'disk': DeepSpeed never writes pieces below 1 MiB" in states
    assert "parallel.offload.parameters = 'disk': DeepSpeed never writes pieces below 1 MiB" in pieces
    assert "cannot be used with Adagrad" in adagrad


def test_gradients_kept_for_the_step_are_copies():
    """DeepSpeed reuses the memory of a gradient for the next bucket."""
    info = SimpleNamespace(unswapped_gradients={})
    swapper = SimpleNamespace(swap_params_info={7: info}, parameter_id=lambda parameter: parameter)
    bucket = torch.arange(6.0)
    swapping.keep_gradients(swapper, 7, [0, 3], [bucket[:3], bucket[3:]])
    bucket.zero_()
    assert {offset: kept.tolist() for offset, kept in info.unswapped_gradients.items()} == {0: [0, 1, 2], 3: [3, 4, 5]}
