"""Weights and optimizer states under 20 plans, each loaded under 10 others: every rank ends with its shards of the
same values, bit for bit, and has read only those.

Ranks are simulated one after the other: saving and loading call no collective. Programs consist of sources alone, with
any layout, padding included; ZeRO's flat tensors are partitioned as DeepSpeed does, which other tests verify.
"""

import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from runner import checkpoint as checkpoints
from runner.checkpoint import saving
from strategies.core import layout as layouts_of_slices
from strategies.core.graph import FusedSections, Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.program import Program
from strategies.optimizer.replicated import BucketedUpdates
from strategies.optimizer.zero.state import ZeroState, parts
from strategies.runtime.communicator import Communicator
from strategies.runtime.shards import MODEL, OPTIMIZER

SHAPES = {
    "embedding": (13, 6),
    "matrix": (12, 10),
    "bias": (7,),
    "cube": (4, 6, 5),
    "long": (1, 33),
    "tied": (8, 8),
    "frozen": (9, 4),
    "scalar": (),
    "empty": (0, 3),
    "statistics": (11,),
}
PACKED = {
    "matrix": FusedSections(0, (6, 6)),
    "cube": FusedSections(1, (2, 4)),
    "tied": FusedSections(0, (4, 2, 2)),
    "frozen": FusedSections(1, (2, 2)),
}
FROZEN, BUFFER, TIED, ODD = {"frozen"}, {"statistics"}, {"tied"}, {"scalar", "empty"}
MESHES = [
    Mesh((("a", 2), ("b", 2))),
    Mesh((("a", 4),)),
    Mesh((("a", 1),)),
    Mesh((("a", 3),)),
    Mesh((("a", 2), ("b", 3))),
    Mesh((("a", 2), ("b", 1), ("c", 2))),
]
STATES = {"AdamW": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class RandomPlan:
    """A plan: one program per group of a pipeline, all on one mesh."""

    programs: tuple[Program, ...]
    stage: int
    dtype: str

    @property
    def ranks(self):
        size = self.programs[0].mesh.size
        return [(group, rank) for group in range(len(self.programs)) for rank in range(size)]


def random_plan(seed, odd):
    """A random plan: for all of `SHAPES` (`odd`), which stage 0 allows, or without the odd shapes, at any stage."""
    draw = random.Random(seed)
    mesh, stage = draw.choice(MESHES), 0 if odd else draw.choice([0, 0, 1, 2, 3])
    dtype = "float32" if stage else draw.choice(DTYPES)
    names = [name for name in SHAPES if odd or name not in ODD]
    groups = [names]
    if stage < 2 and draw.random() < 0.4:  # a pipeline: one parameter is in both groups
        own = [name for name in names if name not in TIED]
        groups = [[*own[::2], *TIED], [*own[1::2], *TIED]]
    layouts = {name: random_layout(SHAPES[name], mesh, draw) for name in names}
    return RandomPlan(tuple(program_of(group, layouts, mesh, dtype) for group in groups), stage, dtype)


def random_layout(shape, mesh, draw):
    dims = [()] * len(shape)
    for axis, size in mesh.axes:
        dim = draw.choice([*range(len(shape)), None])
        if dim is not None and shape[dim] >= size * mesh.product(dims[dim]):
            dims[dim] += (axis,)
    return Layout(tuple(dims))


def program_of(names, layouts, mesh, dtype):
    sources = tuple(
        Source(
            *(name, "buffer" if name in BUFFER else "parameter", name),
            TensorSpec(SHAPES[name], dtype, PACKED.get(name)),
            name not in FROZEN,
        )
        for name in names
    )
    stripes = {one.name: layouts_of_slices.stored(layouts[one.name], one.spec, mesh) for one in sources}
    learns = [name for name in names if name not in FROZEN | BUFFER]
    outputs = tuple(Ref(name) for name in learns)
    order, reductions = tuple(names), dict.fromkeys(learns, ())
    return Program(mesh, sources, stripes, (), outputs, reductions, order, False)


class Root(nn.Module):
    """A module with parameters alone."""

    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, name not in FROZEN))


class Peers:
    """The other groups of a pipeline, as one group sees them."""

    def __init__(self, group):
        self.copies = dict.fromkeys(TIED, 2)
        self.leads = frozenset(TIED) if group == 0 else frozenset()


class Flat:
    """The attributes of DeepSpeed's optimizer that `ZeroState` reads, with made-up values."""

    def __init__(self, program, rank, stage, found, kind):
        self.members = grouped(program)
        flats = [nn.Parameter(torch.full((parts(program, rank, stage, names)[1],), -1.0)) for names in self.members]
        self.optimizer = make(kind, [{"params": [flat]} for flat in flats])
        lists = [[found[name] for name in names] for names in self.members]
        self.fp32_partitioned_groups_flat = self.single_partition_of_fp32_groups = [flat.data for flat in flats]
        self.fp16_groups = self.round_robin_bit16_groups = lists
        self.optimizer.state = {flat: {} for flat in self.single_partition_of_fp32_groups}
        self.sub_group_to_group_id = [*range(len(flats))]
        self.refreshed = 0
        if stage == 3:
            for source in program.sources:
                if source.kind == "parameter":
                    split(program, source, rank, found[source.name])

    def update_lp_params(self):
        self.refreshed += 1


def grouped(program):
    """The trainable parameters by replica group: each group shares a flat tensor."""
    layouts = {source.name: program.layouts[source.id] for source in program.sources}
    found = {}
    for name in program.trainable_names:
        found.setdefault(layouts[name].replica_axes(program.mesh), []).append(name)
    return list(found.values())


def split(program, source, rank, parameter):
    replicas = program.layouts[source.id].replica_axes(program.mesh)
    count, size = program.mesh.product(replicas), parameter.numel()
    part = -(-size // count)
    index = program.mesh.index(rank, replicas)
    own = torch.zeros(part * count)
    own[:size] = parameter.detach().reshape(-1)
    parameter.ds_tensor = own[index * part : (index + 1) * part].clone()
    parameter.ds_tensor.ds_numel, parameter.ds_tensor.final_location = part, None
    parameter.ds_numel, parameter.ds_zero_partition_rank = size, index
    parameter.data = torch.empty(0)


class Sharded:
    """`Updates` of stages 1 to 3 around `Flat`, with the interface that checkpoints use."""

    def __init__(self, program, rank, stage, module, kind, peers):
        found = dict(module.named_parameters())
        self.zero = Flat(program, rank, stage, found, kind)
        follows = frozenset() if peers is None else frozenset(peers.copies.keys() - peers.leads)
        self.zero_state = ZeroState(self.zero, stage, program, rank, found, self.zero.members, follows=follows)
        self.pieces, self.plain, self.begin, self.loaded = (
            lambda write=False: self.zero_state.pieces(write),
            self.zero_state.plain,
            self.zero_state.begin,
            self.zero_state.loaded,
        )


def make(kind, groups):
    return torch.optim.AdamW(groups, lr=0.1) if kind == "AdamW" else torch.optim.SGD(groups, lr=0.1, momentum=0.9)


class Simulated:
    """One rank under a plan, with rank-specific values until a checkpoint is loaded."""

    def __init__(self, plan, group, rank, kind):
        program = plan.programs[group]
        self.communicator = Communicator(program.mesh, rank, (), stage=group, stages=len(plan.programs))
        sizes = {s.name: program.layouts[s.id].local_shape(s.spec.shape, program.mesh) for s in program.sources}
        dtype = getattr(torch, plan.dtype)
        tensors = {name: torch.full(size, -1.0, dtype=dtype) for name, size in sizes.items()}
        self.buffers = {name: tensors.pop(name) for name in BUFFER if name in tensors}
        peers = Peers(group) if len(plan.programs) > 1 else None
        module = Root(tensors)
        if plan.stage == 0:
            self.communicator.group = lambda axes: None
            groups = [{"names": list(tensors)[:2]}, {"names": list(tensors)[2:], "lr": 0.5}]
            self.updates = BucketedUpdates(
                module, program, self.communicator, lambda given: make(kind, given), groups, peers=peers
            )
        else:
            self.updates = Sharded(program, rank, plan.stage, module, kind, peers)
        self.module, self.program, self.stage = module, program, plan.stage
        self.parameters = dict(module.named_parameters())
        config = {"world_size": self.communicator.world, "train": {"seed": 1}, "optimizer": {"target": kind}}
        identity = {"plan": {"mesh": dict(program.mesh.axes)}, "config": config}
        self.content = checkpoints.Content(
            program, self.communicator, self.buffers, self.updates, None, **identity, fingerprint=""
        )

    def zero_refreshed(self):
        """Whether the program's weights were refreshed from the optimizer's master weights."""
        return self.updates.zero.refreshed == 1 if self.stage < 3 else self._parts_are_new()

    def _parts_are_new(self):
        state = self.updates.zero_state
        for index, flat in enumerate(state.masters()):
            for name, part in state.ranges(index):
                ours = self.parameters[name].ds_tensor[: part.count]
                if not torch.equal(ours, flat[part.position : part.position + part.count]):
                    return False
        return True

    def views(self):
        """All shards of this rank, by key."""
        for batch in self.updates.pieces(write=True):
            yield from ((key, piece) for key, pieces in batch.items() for piece in pieces)
        yield from ((key, piece) for key, pieces in self.content.buffers().items() for piece in pieces)


def truth(kind):
    """Full tensors by key, and one number per parameter."""
    torch.manual_seed(5)
    found = {MODEL + name: torch.randn(shape) for name, shape in SHAPES.items()}
    for state in STATES[kind]:
        found |= {
            f"{OPTIMIZER}{state}/{name}": torch.randn(shape)
            for name, shape in SHAPES.items()
            if name not in FROZEN | BUFFER | {"scalar"}
        }
    return found


def block_of(tensor, block):
    return tensor[tuple(slice(*bounds) for bounds in block)]


def fill(simulated, values, kind):
    """Set the true values on a rank, as if it had trained."""
    states = {
        state: {
            name: SimpleNamespace(shape=SHAPES[name], dtype=torch.float32, like_weights=True)
            for name in SHAPES
            if f"{OPTIMIZER}{state}/{name}" in values
        }
        for state in STATES[kind]
    }
    plain = simulated.updates.plain()
    counts = {"step": torch.tensor(7.0)} if kind == "AdamW" else {}
    plain.scalars = {name: dict(counts) for name in simulated.program.trainable_names}
    simulated.updates.begin(states, plain)
    for key, piece in simulated.views():
        piece.view.copy_(block_of(values[key], piece.block))
    simulated.updates.loaded()


def saved(plan, kind, values, folder):
    for group, rank in reversed(plan.ranks):  # rank 0 finishes the checkpoint
        simulated = Simulated(plan, group, rank, kind)
        fill(simulated, values, kind)
        saver = saving.Saver()
        saver.save(folder, 7, simulated.content)
        saver.wait()
    return folder / "step-00000007"


def check(simulated, kind, values, restored, stored):
    """Assert that the rank has its shards of the true values, in its dtype, and has read no more than those."""
    wanted = 0
    for key, piece in simulated.views():
        assert torch.equal(piece.view, block_of(values[key], piece.block).to(piece.view.dtype)), key
        if piece.view.numel():
            wanted += piece.view.numel() * getattr(torch, stored[key].dtype).itemsize
    assert restored.bytes_read == wanted
    if kind == "AdamW":
        names = simulated.program.trainable_names
        scalars = simulated.updates.plain().scalars
        assert {name: scalars[name]["step"].item() for name in names} == dict.fromkeys(names, 7.0)
    if isinstance(simulated.updates, Sharded):
        return simulated.zero_refreshed()
    mesh, rank = simulated.program.mesh, simulated.communicator.rank
    for name, parameter in simulated.module.named_parameters():
        tensor, layout = values[MODEL + name], simulated.program.layouts[name]
        for block, place in layout.blocks(tensor.shape, mesh, rank):
            assert torch.equal(block_of(parameter.detach(), place), block_of(tensor, block).to(parameter.dtype)), name
    return True


SAVED, QUICK, LOADED = 20, 8, 10


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "number", [*range(QUICK), *(pytest.param(number, marks=pytest.mark.slow) for number in range(QUICK, SAVED))]
)
def test_two_hundred_moves(tmp_path, number):
    kind, odd = list(STATES)[number % 2], number % 5 == 4
    plan, values = random_plan(number, odd), truth(kind)
    if plan.dtype == "bfloat16":  # frozen parameters have no fp32 master copy
        cast = [key for key in values if key.removeprefix(MODEL) in FROZEN | BUFFER]
        values |= {key: values[key].bfloat16().float() for key in cast}
    path = saved(plan, kind, values, tmp_path)
    stored = checkpoints.read(path).tensors
    for seed in range(100 + LOADED * number, 100 + LOADED * (number + 1)):
        other = random_plan(seed, odd)
        for group, rank in other.ranks:
            simulated = Simulated(other, group, rank, kind)
            restored = checkpoints.load(path, simulated.content)
            assert check(simulated, kind, values, restored, stored)
