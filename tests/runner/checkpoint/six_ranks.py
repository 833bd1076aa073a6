"""Six simulated ranks with two parameters, their checkpoints, and functions that damage the files."""

from dataclasses import replace

import torch

from runner import checkpoint as checkpoints
from runner.checkpoint import saving
from runner.run_folder.lineage import Lineage
from strategies.core.graph import Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.program import Program
from strategies.optimizer.replicated import BucketedUpdates
from strategies.runtime.communicator import Communicator

MESH = Mesh((("dp", 3), ("tp", 2)))
LAYOUTS = {"sliced": Layout((("tp",), ())), "complete": Layout.replicated(1)}
SHAPES = {"sliced": (8, 5), "complete": (7,)}


class Root(torch.nn.Module):
    def __init__(self, rank, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.complete = torch.nn.Parameter(torch.randn(7))
        half = torch.randn(8, 5)[4 * (rank % 2) :][:4].clone()
        self.sliced = torch.nn.Parameter(half)


def content(rank, seed=0):
    sources = tuple(
        Source(name, "parameter", name, TensorSpec(shape, "float32"), True) for name, shape in SHAPES.items()
    )
    outputs = tuple(Ref(name) for name in SHAPES)
    program = Program(MESH, sources, LAYOUTS, (), outputs, dict.fromkeys(SHAPES, ()), tuple(SHAPES), False)
    communicator = Communicator(MESH, rank)
    updates = BucketedUpdates(
        Root(rank, seed), program, communicator, lambda groups: torch.optim.SGD(groups, lr=0.1), [{"names": [*SHAPES]}]
    )
    config = {"world_size": 6, "train": {"seed": 0}}
    return checkpoints.Content(program, communicator, {}, updates, None, {}, config)


def save(folder, step, seed=0, metric=None, lineage=None, **wanted):
    """A checkpoint of all ranks, of the run with this `lineage`; `wanted` are `SaveOptions`."""
    for rank in reversed(range(6)):
        saver = saving.Saver()
        own = replace(content(rank, seed), lineage=lineage or Lineage())
        saver.save(folder, step, own, checkpoints.SaveOptions(**wanted), metric=metric)
        saver.wait()
    return folder / f"step-{step:08d}"


def weights(path, seed=9):
    """The weights of the six ranks after loading."""
    found = []
    for rank in range(6):
        mine = content(rank, seed)
        checkpoints.load(path, mine)
        found.append({name: mine.updates.weight(name).clone() for name in SHAPES})
    return found


def expected(seed=0):
    return [{name: content(rank, seed).updates.weight(name) for name in SHAPES} for rank in range(6)]


def equal(ours, truth):
    return all(torch.equal(one[name], other[name]) for one, other in zip(ours, truth, strict=True) for name in SHAPES)


def largest(path):
    """The largest rank file."""
    return max(path.glob("rank-*.safetensors"), key=lambda file: file.stat().st_size)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(bytes(content))


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])
