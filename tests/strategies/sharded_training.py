"""A small net with many special cases, its eager training, and the same training on real ranks under any plan.

The parent captures and plans; every rank runs `train`, several cases per start, because starting is
slow.
"""

from __future__ import annotations

import importlib
import os
import random
import time
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph, Ref, Source, refs
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import Compute, LoweringOptions, Program
from strategies.lowering.device_placement import on_host, place_on_host
from strategies.lowering.lowering import lower
from strategies.optimizer.buckets import predicted
from strategies.optimizer.stages import make_updates
from strategies.optimizer.updates import DEFAULT_BUCKETS, BucketLimits, Updates, axes_needed
from strategies.rules import rule_of
from strategies.runtime import gathering
from strategies.runtime.communicator import Communicator
from strategies.runtime.module_tree import COPIED, build
from strategies.runtime.offload import NO_OFFLOAD, Offload, OffloadTraffic
from strategies.runtime.simulate import assemble, shard
from strategies.runtime.slices import entries_of, slices_of

MESH = Mesh((("a", 2), ("b", 2)))
ALONE = Mesh((("a", 1),))
DATA_PARALLEL, FULLY_SLICED = -1, -2
"""Fixed plans: replicated parameters, and every parameter sharded over all ranks (no replicas anywhere)."""


class Net(nn.Module):
    """Tied weights, a frozen parameter, a parameter that is never used, a weight that another module uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)
        self.emb = nn.Embedding(16, 8)
        self.ln = nn.LayerNorm(8)
        self.dense1 = nn.Linear(8, 16)
        self.relu = nn.ReLU()
        self.dense2 = nn.Linear(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight
        nn.init.normal_(self.ln.bias).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        h = h + self.dense2(self.relu(self.dense1(self.ln(h))))
        h = h + F.linear(h, self.dense2.weight @ self.dense1.weight)
        return self.head(h).flatten(0, 1)


class Loss(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.float() if output.element_size() < 4 else output, target.flatten())


class Layers(nn.Module):
    """`count` square layers of one size, each a separate module."""

    def __init__(self, count: int = 8, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Experts(nn.Module):
    """Rows choose one of three by the sign of their first element: none chooses the last."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        chosen, out = (h[..., 0] > 0).long(), torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)
            if len(rows[0]):
                out[rows] = expert(h[rows])
        return out


class Choosing(nn.Module):
    """Tokens below 8 choose one expert, others another."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Experts()])
        self.head = nn.Linear(8, 16)
        with torch.no_grad():
            self.emb.weight[:, 0] = torch.tensor([9.0] * 8 + [-9.0] * 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for layer in self.layers:
            h = h + layer(h).tanh()
        return self.head(h).flatten(0, 1)


@dataclass(frozen=True)
class Task:
    """A captured net with its weights and the micro-batches of all steps (global tensors)."""

    graph: OperatorGraph
    evaluation: OperatorGraph
    tensors: dict[str, Tensor]
    batches: list[list[tuple[Tensor, Tensor]]]


@dataclass(frozen=True)
class Case:
    """One training under the plan of `seed`."""

    seed: int = 0
    stage: int = 0
    optimizer: str = "sgd"
    clip: float | None = None
    precision: str = "fp32"
    accumulate: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    cut: BucketLimits = DEFAULT_BUCKETS
    overlap: bool = False
    offload: Offload = NO_OFFLOAD
    place: tuple[str, ...] = ()
    loss_scale: float | None = 64.0
    engine: str = "deepspeed"
    chooses: bool = False


@dataclass(frozen=True)
class Result:
    """Results on rank 0: global tensors, assembled from all ranks. `gradients` are those of the first step."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    sent: int
    predicted: int
    replicas_equal: bool
    evaluated: list[Tensor] = field(default_factory=list)
    moved: dict[str, OffloadTraffic] = field(default_factory=dict)
    on_disk: int = 0
    copied: OffloadTraffic = field(default_factory=OffloadTraffic)


def task(
    dtype: torch.dtype = torch.float32, steps: int = 3, accumulate: int = 2, *, chooses: bool = False
) -> tuple[nn.Module, Task]:
    """`Net`, or `Choosing` with a second step whose tokens choose one expert alone; so do those of the last micro-batch
    before it, and of the first behind it."""
    torch.manual_seed(0)
    net = (Choosing if chooses else Net)().to(dtype)
    draw = torch.Generator().manual_seed(1)
    lone = range(accumulate - 1, 2 * accumulate + 1) if chooses else ()
    below = [8 if number in lone else 16 for number in range(steps * accumulate)]
    every = [
        (torch.randint(0, tokens, (8, 8), generator=draw), torch.randint(0, 16, (8, 8), generator=draw))
        for tokens in below
    ]
    batches = [every[step * accumulate : (step + 1) * accumulate] for step in range(steps)]
    objective = Objective(net, Loss(), ("0", "1"), ("1",))
    captured = capture(objective, batches[0][0], training=True)
    evaluation = capture(Objective(net, None, ("0",), ()), batches[0][0][:1], training=False)
    tensors = {name: tensor.detach().clone() for name, tensor in {**evaluation.tensors, **captured.tensors}.items()}
    return net, Task(captured.graph, evaluation.graph, tensors, batches)


def layers_task(steps: int = 3, count: int = 8, width: int = 16, dtype: torch.dtype = torch.float32) -> Task:
    """`Layers` with a mean square loss; for evaluation its outputs."""
    torch.manual_seed(0)
    net = Layers(count, width).to(dtype)
    batches = [[(torch.randn(8, width, dtype=dtype), torch.randn(8, width, dtype=dtype))] for _ in range(steps)]
    captured = capture(Objective(net, nn.MSELoss(), ("0", "1"), ("1",)), batches[0][0], training=True)
    evaluation = capture(Objective(net, None, ("0",), ()), batches[0][0][:1], training=False)
    return Task(
        captured.graph, evaluation.graph, {name: t.detach().clone() for name, t in captured.tensors.items()}, batches
    )


def groups_of(program: Program) -> list[dict[str, Any]]:
    """Two torch groups, one of them with its own options."""
    names = program.trainable_names
    return [
        {"names": [name for name in names if not name.endswith("bias")]},
        {"names": [name for name in names if name.endswith("bias")], "lr": 0.05, "weight_decay": 0.0},
    ]


def factory(kind: str) -> Any:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if kind == "sgd":
            return torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
        if kind == "adagrad":
            return torch.optim.Adagrad(groups, lr=0.02, initial_accumulator_value=0.1)
        if kind == "adamw":
            return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
        return getattr(torch.optim, kind)(groups, lr=0.01)

    return make


def scheduler_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def eager(net: nn.Module, case: Case, batches: list[list[tuple[Tensor, Tensor]]], names: tuple[str, ...]) -> Result:
    """The same training by plain torch on one device, with the full batch."""
    parameters = dict(net.named_parameters())
    plain = [name for name in names if not name.endswith("bias")]
    biases = [name for name in names if name.endswith("bias")]
    optimizer = factory(case.optimizer)(
        [
            {"params": [parameters[name] for name in plain]},
            {"params": [parameters[name] for name in biases], "lr": 0.05, "weight_decay": 0.0},
        ]
    )
    scheduler, losses, norms, gradients, evaluated = scheduler_of(optimizer), [], [], {}, []
    for step, micro_batches in enumerate(batches):
        total = 0.0
        for x, y in micro_batches:
            loss = Loss()(net(x), y) / len(micro_batches)
            loss.backward()
            total += loss.item()
        if step == 0:
            gradients = {
                name: torch.zeros_like(p) if (p := parameters[name]).grad is None else p.grad.clone() for name in names
            }
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), case.clip or 1e9).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(total)
        with torch.no_grad():
            evaluated.append(net(micro_batches[0][0]).float())
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return Result(losses, norms, gradients, weights, 0, 0, True, evaluated)


def plan_of(graph: OperatorGraph, seed: int, mesh: Mesh = MESH) -> Plan:
    """DATA_PARALLEL, FULLY_SLICED, or a random plan: any assignment of axes to factors and any layout that divides."""
    draw, at_random = random.Random(seed), seed >= 0 and mesh.size > 1
    operators, layouts = {}, {}
    for operator in graph.operators:
        assignment = (
            _random_assignment(operator, graph, mesh, draw) if at_random else _over_batch(operator, graph, mesh)
        )
        operators[operator.name] = OperatorPlan(assignment, "configured")
    for source in graph.sources:
        dims = len(source.spec.shape)
        layouts[source.name] = _random_layout(source, mesh, draw) if at_random else Layout.replicated(dims)
        if seed == FULLY_SLICED and source.kind == "parameter":
            layouts[source.name] = Layout((mesh.sorted(mesh.names), *((),) * (dims - 1)))
    inputs = {source.name: layouts[source.name] for source in graph.of_kind("input")}
    tensors = {source.name: layouts[source.name] for source in graph.sources if source.kind != "input"}
    return Plan(mesh, operators, inputs, tensors)


def _random_layout(source: Source, mesh: Mesh, draw: random.Random) -> Layout:
    dims: list[tuple[str, ...]] = [()] * len(source.spec.shape)
    for axis, size in mesh.axes:
        dim = draw.choice([*range(len(dims)), None])
        if dim is not None and source.spec.shape[dim] % (size * mesh.product(dims[dim])) == 0:
            dims[dim] += (axis,)
    return Layout(tuple(dims))


def _random_assignment(
    operator: Any, graph: OperatorGraph, mesh: Mesh, draw: random.Random
) -> dict[str, tuple[str, ...]]:
    sharding = rule_of(operator, graph)
    assignment: dict[str, tuple[str, ...]] = {}
    for axis, size in mesh.axes:
        fits = [f for f in sharding.factors if sharding.divides(f, size * mesh.product(assignment.get(f, ())))]
        factor = draw.choice([*fits, None])
        if factor:
            assignment[factor] = (*assignment.get(factor, ()), axis)
    return assignment


def _over_batch(operator: Any, graph: OperatorGraph, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Shard the first factor that divides: for these nets the batch, if there is one."""
    sharding = rule_of(operator, graph)
    fits = [factor for factor, size in sharding.sizes.items() if size % mesh.size == 0]
    return {fits[0]: mesh.names} if fits and mesh.size > 1 else {}


class Setup:
    """One case on one rank: program, module and updates."""

    def __init__(self, task: Task, case: Case, rank: int, mesh: Mesh = MESH) -> None:
        self.plan = plan_of(task.graph, case.seed, mesh)
        program = lower(task.graph, self.plan, LoweringOptions(sharded_optimizer=case.stage > 0, partial_loss=True))
        self.program = place_on_host(program, on_host(task.graph, case.place))
        layouts = {source.name: program.layouts[source.id] for source in program.sources}
        evaluation_plan = plan_of(task.evaluation, case.seed, mesh)
        evaluation_plan = replace(evaluation_plan, tensors={**evaluation_plan.tensors, **self.plan.tensors})
        self.evaluation = lower(task.evaluation, evaluation_plan)
        self.rank, self.mesh, self.layouts = rank, mesh, layouts
        used = [*self.program.axes, *self.evaluation.axes, *axes_needed(self.program)]
        self.communicator = Communicator(mesh, rank, used)
        self.tensors = slices_of(task.tensors, self.program, rank)
        module = build(self.program, self.tensors, self.communicator, "cpu")
        self.copied: OffloadTraffic = module.meta[COPIED]
        shared = {**slices_of(task.tensors, self.evaluation, rank), **self.tensors}
        evaluation = build(self.evaluation, shared, self.communicator, "cpu")
        self.updates: Updates = make_updates(
            case.stage,
            module,
            self.program,
            self.communicator,
            factory(case.optimizer),
            groups_of(self.program),
            clip=case.clip,
            accumulate=case.accumulate,
            precision=case.precision,
            evaluation=evaluation,
            zero_options=case.options,
            cut=case.cut,
            overlap=case.overlap,
            offload=case.offload,
            loss_scale=case.loss_scale,
            engine=case.engine,
        )
        self.scheduler = scheduler_of(self.updates.optimizer)

    def batch(self, program: Program, *tensors: Tensor) -> list[Tensor]:
        return entries_of(tensors, program, self.rank)

    def micro(self, x: Tensor, y: Tensor) -> float:
        loss = self.updates.module(*self.batch(self.program, x, y))
        self.updates.backward(loss)
        total = loss.detach().double()
        if self.program.loss_axes:
            dist.all_reduce(total, group=self.communicator.group(self.program.loss_axes))
        return float(total)

    def evaluate(self, x: Tensor) -> Tensor:
        assert self.updates.evaluation is not None
        with torch.no_grad():
            return self.updates.evaluation(*self.batch(self.evaluation, x)).float()

    def step(self, micro_batches: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
        loss = sum(self.micro(x, y) for x, y in micro_batches) / len(micro_batches)
        norm = self.updates.step()
        self.scheduler.step()
        assert norm is not None
        return loss, norm

    def weights(self) -> dict[str, Tensor]:
        return {s.name: self.updates.weight(s.name).clone() for s in self.program.parameters}

    def gathered(self, slices: dict[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
        """Global tensors on rank 0, and whether replicas are bitwise equal."""
        received: list[Any] = [None] * self.mesh.size
        dist.gather_object(slices, received if self.rank == 0 else None)
        if self.rank:
            return {}, True
        shapes = {source.name: source.spec.shape for source in self.program.sources}
        found, equal = {}, True
        for name in slices:
            layout, pieces = self.layouts[name], [one[name] for one in received]
            found[name] = assemble(pieces, layout, shapes[name], self.mesh)
            expected = shard(found[name], layout, self.mesh)
            equal = equal and all(torch.equal(a, b) for a, b in zip(pieces, expected, strict=True))
        return found, equal


def train(rank: Any, payload: list[tuple[Task, Case]]) -> list[Result | str]:
    """Run every case; a rejected case returns its error message."""
    return [_train(rank.rank, task, case) for task, case in payload]


def train_alone(rank: Any, payload: tuple[Task, list[Case]]) -> list[Result | str]:
    """Like `train`, on a mesh of one rank."""
    task, cases = payload
    return [_train(rank.rank, task, case, ALONE) for case in cases]


def _train(rank: int, task: Task, case: Case, mesh: Mesh = MESH) -> Result | str:
    try:
        setup = Setup(task, case, rank, mesh)
    except StrategyError as error:
        return str(error)
    losses, norms, gradients, evaluated = [], [], {}, []
    sent = 0
    for number, micro_batches in enumerate(task.batches):
        losses.append(sum(setup.micro(x, y) for x, y in micro_batches) / len(micro_batches))
        before = setup.communicator.sent["all_reduce"]
        setup.updates.reduce()
        if number == 0:
            gradients = {name: gradient.clone() for name, gradient in setup.updates.gradients()}
        norm = setup.updates.update()
        sent = setup.communicator.sent["all_reduce"] - before
        assert norm is not None
        norms.append(norm)
        setup.scheduler.step()
        evaluated.append(setup.evaluate(micro_batches[0][0]))
    full_gradients, same = setup.gathered(gradients)
    weights, equal = setup.gathered(setup.weights())
    moved, on_disk = dict(setup.updates.moved), _on_disk(case.offload)
    setup.updates.close()
    expected = predicted(setup.program).get("all_reduce", 0)
    same = same and equal
    return Result(losses, norms, full_gradients, weights, sent, expected, same, evaluated, moved, on_disk, setup.copied)


def refs_of(instruction: Compute) -> list[Ref]:
    """Every value that an instruction uses."""
    return list(refs((instruction.args, tuple(value for _, value in instruction.kwargs))))


def _on_disk(offload: Offload) -> int:
    """Bytes of the nameless files that this process has open in the folder for offloading."""
    found = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    mine = [fd for fd in found if fd.is_symlink() and str(fd.readlink()).startswith(f"{offload.folder}/")]
    assert all(str(fd.readlink()).endswith("(deleted)") for fd in mine)
    return sum(fd.stat().st_blocks * 512 for fd in mine)


def overlapped(rank: Any, payload: list[tuple[Task, Case]]) -> list[tuple[bool, list[int], list[int], bool]]:
    """Every case with buckets reduced during backward and after it: whether gradients, norms and weights are bitwise
    equal; all-reduces by micro-batch of a step, with and without overlap; whether as many bytes are sent."""
    found = []
    for task, case in payload:
        during, after = [Setup(task, replace(case, overlap=overlap), rank.rank) for overlap in (True, False)]
        same, calls = True, ([], [])
        for micro_batches in task.batches:
            for setup, counts in zip((during, after), calls, strict=True):
                counts.clear()
                for x, y in micro_batches:
                    before = setup.communicator.calls["all_reduce"]
                    setup.micro(x, y)
                    counts.append(setup.communicator.calls["all_reduce"] - before)
                setup.updates.reduce()
            pairs = zip(during.updates.gradients(), after.updates.gradients(), strict=True)
            same = same and all(torch.equal(a, b) for (_, a), (_, b) in pairs)
            same = same and during.updates.update() == after.updates.update()
        weights = zip(during.weights().values(), after.weights().values(), strict=True)
        same = same and all(torch.equal(a, b) for a, b in weights)
        found.append((same, *calls, during.communicator.sent == after.communicator.sent))
        during.updates.close()
    return found


def reductions(rank: Any, payload: list[tuple[Task, Case]]) -> list[list[int]]:
    """Of every unsharded case: the number of gradient reductions, by micro-batch and then in the update."""
    counted = [0]

    def counting(call: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            counted[0] += any(value.numel() > 1 for value in given)  # no norm, no flag
            return call(*args, **kwargs)

        return run

    names = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter", "reduce")
    kept = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    found = []
    for task, case in payload:
        setup = Setup(task, case, rank.rank)
        try:
            for name, call in kept.items():
                setattr(dist, name, counting(call))
            counts = []
            for x, y in task.batches[0]:
                counted[0] = 0
                setup.updates.backward(setup.updates.module(*setup.batch(setup.program, x, y)))
                counts.append(counted[0])
            counted[0] = 0
            setup.updates.step()
            found.append([*counts, counted[0]])
        finally:
            for name, call in kept.items():
                setattr(dist, name, call)
        setup.updates.close()
    return found


def most_live(rank: Any, task: Task) -> tuple[int, int, bool]:
    """ZeRO-3 over two ranks: the most parameter elements that were gathered at once, in training and in evaluation;
    and whether torch's own functions were left alone."""
    linear, apply = F.linear, nn.Module.apply
    mesh = Mesh((("a", 2),))
    setup = Setup(task, Case(DATA_PARALLEL, 3, accumulate=1), rank.rank, mesh)
    coordinator = importlib.import_module(
        "deepspeed.runtime.zero.partitioned_param_coordinator"
    ).PartitionedParameterCoordinator
    fetch, live = coordinator.fetch_sub_module, [0]

    def count(self: Any, *args: Any, **kwargs: Any) -> None:
        fetch(self, *args, **kwargs)
        live.append(sum(parameter.numel() for parameter in setup.updates.module.parameters()))

    coordinator.fetch_sub_module = count
    for micro_batches in task.batches:
        setup.step(micro_batches)
    trained = max(live)
    live[:] = [0]
    for micro_batches in task.batches:
        setup.evaluate(micro_batches[0][0])
    return trained, max(live), F.linear is linear and nn.Module.apply is apply


def most_gathered(rank: Any, task: Task) -> tuple[int, int, int, int]:
    """The native stage 3 over two ranks, a layer per bucket: the most elements in complete tensors that were alive, in
    training, between forward and backward and in evaluation; and those that were left behind."""
    layer = 4 * (16 * 16 + 16)
    case = Case(DATA_PARALLEL, 3, accumulate=1, engine="native", options={"reduce_bucket_size": layer // 4})
    setup = Setup(task, case, rank.rank, Mesh((("a", 2),)))
    point, flats, live = gathering.GatheredParameters._point, list[weakref.ref[Tensor]](), [0]

    def now() -> int:
        alive = (one() for one in flats)
        return sum(one.numel() for one in alive if one is not None)

    def count(self: Any, flat: Tensor) -> None:
        flats.append(weakref.ref(flat))
        live.append(now())
        point(self, flat)

    gathering.GatheredParameters._point = count  # type: ignore[method-assign]
    for micro_batches in task.batches:
        loss = setup.updates.module(*setup.batch(setup.program, *micro_batches[0]))
        time.sleep(0.2)
        between = now()
        setup.updates.backward(loss)
        setup.updates.step()
    trained = max(live)
    live[:] = [0]
    for micro_batches in task.batches:
        setup.evaluate(micro_batches[0][0])
    time.sleep(0.2)
    return trained, between, max(live), now()
