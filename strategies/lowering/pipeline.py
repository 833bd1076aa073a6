"""Pipeline parallelism: which stage every operator belongs to, the graph and plan of every stage, and their programs.

A value that later stages use becomes an input of each stage up to the last that uses it; the stages between forward it.
It is sent in one layout of the mesh that all stages share, without partial sums, from each rank to the rank of the same
number in the next stage. Invariant: the stages' operators are those of the unsplit graph, each once and under its own
plan, none in an earlier stage than one whose result it uses, so results and gradients are the same. A parameter that
several stages use is a source of each; stages of one group of ranks that use the same parameter leave its gradient open
over the same axes, so that their gradients can be added on the spot and over the ranks once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, islice
from typing import Literal

from strategies.core.errors import StrategyError, closest
from strategies.core.graph import Operator, OperatorGraph, Ref, Source, fresh, modules_around, with_refs
from strategies.core.layout import Layout
from strategies.core.plan import OperatorPlan, Plan, Recompute
from strategies.core.program import LoweringOptions, Program
from strategies.lowering.lowering import lower
from strategies.lowering.pipeline_schedule import stages_of
from strategies.rules import rule_of, share_rules

Cuts = Literal["auto"] | Mapping[str, int]
EVEN = 1.25
"""A heaviest stage of at most this many times the mean is balanced enough to leave modules uncut."""


@dataclass(frozen=True)
class Stage:
    """`graph` has the batch and then the values in `receives` (ids) as inputs, and returns what the next stage receives
    in the layouts `sends`, or the results of the unsplit graph. `holders` gives, for each trainable parameter here that
    other stages use too, all stages that do. `ordinals` numbers random operators as in the unsplit graph; `returning`
    are the outputs to which a gradient comes back."""

    number: int
    graph: OperatorGraph
    plan: Plan
    receives: tuple[str, ...]
    sends: tuple[Layout, ...]
    holders: Mapping[str, tuple[int, ...]]
    ordinals: Mapping[str, int]
    returning: tuple[Ref, ...]

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Which of the received values a gradient goes back to."""
        return tuple(source.trainable for id in self.receives if isinstance(source := self.graph.by_id[id], Source))


def cut(graph: OperatorGraph, plan: Plan, placed: Mapping[str, int], ordinals: Mapping[str, int]) -> tuple[Stage, ...]:
    """The stages of a training graph, whose operators are `placed` by id. Raises StrategyError where a stage could not
    train or a buffer is written in one stage and used in another."""
    cutting = _Cutting(graph, plan, placed, ordinals, max(placed.values()) + 1)
    cutting.check()
    return cutting.stages()


def cut_evaluation(
    graph: OperatorGraph, plan: Plan, stages: Sequence[Stage], ordinals: Mapping[str, int]
) -> tuple[Stage, ...]:
    """An evaluation graph in the `stages` of training. The last one returns all results, wherever they are made.
    Raises StrategyError where an operator has no stage with the parameters and buffers that it uses."""
    try:
        placed = as_trained(graph, stages)
    except StrategyError:
        graph, plan = _sending_buffers(graph, plan, stages)
        placed = as_trained(graph, stages)
    return _Cutting(graph, plan, placed, ordinals, len(stages)).stages()


def _sending_buffers(graph: OperatorGraph, plan: Plan, stages: Sequence[Stage]) -> tuple[OperatorGraph, Plan]:
    """An evaluation graph in which a copy of a buffer is sent to the stages that have none: in training they use what
    an earlier stage writes into it."""
    named = {operator.name: stage.number for stage in stages for operator in stage.graph.operators}
    taken, names, operators = set(graph.by_id), set(plan.operators), dict(plan.operators)
    renamed: dict[str, dict[Ref, Ref]] = {}
    """By id of an operator."""
    copies: dict[str, list[Operator]] = {}
    """By id of the operator before which they are made."""
    for source in graph.of_kind("buffer"):
        holders = [stage.number for stage in stages if source.name in stage.plan.tensors]
        users = [user for user, _ in graph.users[Ref(source.id)] if named.get(user.name, -1) > min(holders, default=0)]
        if users := [user for user in users if named[user.name] not in holders]:
            id, module = fresh(f"{source.id}_sent", taken), source.name.rpartition(".")[0]
            name = fresh(f"{module}.clone".lstrip("."), names)
            target, operand = "aten.clone.default", Ref(source.id)
            copy = Operator(id, name, module, "clone", target, (operand,), (), (source.spec,), False, "", (module,))
            operators[name] = OperatorPlan({}, "default")
            copies.setdefault(users[0].id, []).append(copy)
            for user in users:
                renamed.setdefault(user.id, {})[operand] = Ref(id)
    made = [
        one
        for operator in graph.operators
        for one in (*copies.get(operator.id, ()), _renamed(operator, renamed.get(operator.id, {})))
    ]
    return replace(graph, operators=tuple(made)), replace(plan, operators=operators)


def _renamed(operator: Operator, names: Mapping[Ref, Ref]) -> Operator:
    return with_refs(operator, lambda ref: names.get(ref, ref)) if names else operator


def recompute_in(operators: Sequence[Operator], chosen: Recompute | None) -> Recompute | None:
    """What a stage with these operators recomputes. A module that is cut is recomputed in each of its
    stages."""
    if chosen is None:
        return None
    paths = {path for operator in operators for path in modules_around(operator.path)}
    names = {operator.name for operator in operators}
    modules = tuple(path for path in chosen.modules if path in paths)
    kept = tuple(name for name in chosen.kept if name in names)
    return replace(chosen, modules=modules, kept=kept) if modules else None


class _Cutting:
    def __init__(
        self, graph: OperatorGraph, plan: Plan, placed: Mapping[str, int], ordinals: Mapping[str, int], count: int
    ) -> None:
        self.graph, self.plan, self.placed, self.ordinals, self.count = graph, plan, placed, ordinals, count
        self.used = {ref: {placed[operator.id] for operator, _ in users} for ref, users in graph.users.items()}
        for _, ref in graph.updates:
            self.used[ref].add(self._writes(ref))
        for ref in graph.outputs:
            self.used[ref].add(count - 1)
        self.nearest, near = dict[str, int](), 0
        """By id of a source, the stage of the last source up to it that has users."""
        for source in graph.sources:
            near = min(self._users(source), default=near) if source.kind != "input" else near
            self.nearest[source.id] = near
        crossing = [ref for ref in graph.specs if ref.id in placed and max(self.used[ref], default=0) > placed[ref.id]]
        self.layouts = {ref: self._layout(ref) for ref in crossing}
        behind = (operator.operands for operator in graph.operators if operator.id in graph.returning)
        self.gradients = graph.trained & {*graph.outputs, *chain.from_iterable(behind)}
        taken = set(graph.by_id)
        self.inputs = {
            ref: Source(
                fresh(f"{ref.id}_{ref.index}_received" if ref.index else f"{ref.id}_received", taken),
                "input",
                f"{graph.by_id[ref.id].name}[{ref.index}]",
                graph.specs[ref],
                ref in self.gradients,
            )
            for ref in crossing
        }

    def stages(self) -> tuple[Stage, ...]:
        return tuple(self._stage(number) for number in range(self.count))

    def check(self) -> None:
        (loss,) = self.graph.outputs
        if self.placed.get(loss.id) != self.count - 1:
            raise StrategyError(
                "MW430", "parallel.pipeline.cuts: the loss must come from the last stage; no cut may follow it."
            )
        written = {id for id, _ in self.graph.updates}
        for source in self.graph.sources:
            holders = self._stages_of(source)
            if source.id in written and len(holders) > 1:
                raise StrategyError(
                    "MW430",
                    f"parallel.pipeline: buffer {source.name} is written in the step and used by stages "
                    f"{', '.join(map(str, holders))}; put all modules that use it into one stage with "
                    "parallel.pipeline.cuts.",
                )
        for source in self.graph.sources:
            trained = self._trained_in(source)
            if 0 < len(trained) < len(self._stages_of(source)):
                raise StrategyError(
                    "MW430",
                    f"parallel.pipeline: parameter {source.name} learns in stage {min(trained)} and is only looked at "
                    "(without a gradient) in another one; put both uses into one stage with parallel.pipeline.cuts.",
                )
        for number in range(self.count):
            if not any(number in self._stages_of(source) for source in self.graph.of_kind("parameter")):
                raise StrategyError(
                    "MW430",
                    f"parallel.pipeline: stage {number} of {self.count} has no parameter; cut elsewhere with "
                    "parallel.pipeline.cuts, or take fewer stages.",
                )

    def _stage(self, number: int) -> Stage:
        received = [ref for ref in self.inputs if self.placed[ref.id] < number <= max(self.used[ref])]
        sent = [ref for ref in self.inputs if self.placed[ref.id] <= number < max(self.used[ref])]
        renamed = {ref: Ref(self.inputs[ref].id) for ref in received}

        def there(ref: Ref) -> Ref:
            return renamed.get(ref, ref)

        operators = tuple(
            _renamed(operator, {} if renamed.keys().isdisjoint(operator.operands) else renamed)
            for operator in self.graph.operators
            if self.placed[operator.id] == number
        )
        others = [s for s in self.graph.sources if s.kind != "input" and number in self._stages_of(s)]
        sources = (*self.graph.of_kind("input"), *(self.inputs[ref] for ref in received), *others)
        last = number == self.count - 1
        leaving = self.graph.outputs if last else tuple(sent)
        updates = tuple((id, there(ref)) for id, ref in self.graph.updates if self._writes(ref) == number)
        plan = Plan(
            self.plan.mesh,
            {operator.name: self.plan.operators[operator.name] for operator in operators},
            {**self.plan.inputs, **{self.inputs[ref].name: self.layouts[ref] for ref in received}},
            {source.name: self.plan.tensors[source.name] for source in others},
            self.plan.search,
            recompute_in(operators, self.plan.recompute),
        )
        graph = OperatorGraph(sources, operators, tuple(map(there, leaving)), self.graph.parameter_order, updates)
        share_rules(graph, self.graph)
        return Stage(
            number,
            graph,
            plan,
            tuple(self.inputs[ref].id for ref in received),
            () if last else tuple(self.layouts[ref] for ref in sent),
            {s.name: holders for s in others if self._trained_in(s) and len(holders := self._stages_of(s)) > 1},
            {operator.id: self.ordinals[operator.id] for operator in operators if operator.id in self.ordinals},
            tuple(there(ref) for ref in leaving if ref in self.gradients),
        )

    def _trained_in(self, source: Source) -> set[int]:
        """The stages from which a gradient comes back to a parameter."""
        users = self.graph.users[Ref(source.id)] if source.trainable else ()
        return {self.placed[operator.id] for operator, _ in users if operator.id in self.graph.returning}

    def _writes(self, ref: Ref) -> int:
        """The stage that computes the new value of a buffer."""
        return self.placed.get(ref.id, 0)

    def _stages_of(self, source: Source) -> tuple[int, ...]:
        """The stages that hold a parameter, buffer or constant; what nothing uses, as a head of evaluation alone, is
        where what comes before it is."""
        return tuple(sorted(self._users(source))) or (self.nearest[source.id],)

    def _users(self, source: Source) -> set[int]:
        return self.used[Ref(source.id)] | {self._writes(ref) for id, ref in self.graph.updates if id == source.id}

    def _layout(self, ref: Ref) -> Layout:
        """The layout in which a value is sent: that of its producer or of its first later user, whichever slice is
        smaller."""
        producer, operators = self.graph.by_id[ref.id], self.plan.operators
        assert isinstance(producer, Operator)
        own = operators[producer.name]
        have = (own.outputs or rule_of(producer, self.graph).result_layouts(own.assignment))[ref.index]
        later = ((user, at) for user, at in self.graph.users[ref] if self.placed[user.id] > self.placed[ref.id])
        layouts = [
            rule_of(user, self.graph).operand_layouts(operators[user.name].assignment)[position].reduced
            for user, position in islice(later, 1)
        ]
        if not have.partial or not layouts:
            layouts.append(have.reduced)
        shape = self.graph.specs[ref].shape
        return min(layouts, key=lambda layout: math.prod(layout.local_shape(shape, self.plan.mesh)))


def in_stages(
    graph: OperatorGraph, stages: int, cuts: Cuts, virtual: int = 1, seconds: Sequence[Sequence[float]] = ()
) -> dict[str, int]:
    """The stage of every operator by id; there are `stages` times `virtual` of them. With `cuts` (module path ->
    stage), the longest path that leads to an operator counts; operators that no path names go with what they use, or,
    where that is nothing of the batch, with what uses them first.
    Stages are balanced by flops; where the devices of their ranks differ, by the `seconds` of every operator on those
    of each stage. Raises StrategyError for cuts that cannot be."""
    count = f"parallel.pipeline.stages = {stages}"
    if virtual > 1:
        count = f"parallel.pipeline.stages x virtual_stages = {stages} x {virtual} = {stages * virtual}"
    if cuts == "auto":
        learns = {ref.id for ref in graph.trained}  # backward takes twice as long as forward
        flops = [
            float(rule_of(operator, graph).flops) * (3 if operator.id in learns else 1) + 1.0
            for operator in graph.operators
        ]
        return _balanced(graph, seconds or [flops] * (stages * virtual), count)
    return _as_configured(graph, stages * virtual, cuts, count)


def as_trained(graph: OperatorGraph, stages: Sequence[Stage]) -> dict[str, int]:
    """The stage of every operator of an evaluation graph by id: that of its namesake in training or else the first one
    that has what it uses, but none behind a stage in which its results are used. Raises StrategyError for a parameter
    or buffer that is only elsewhere."""
    named = {operator.name: stage.number for stage in stages for operator in stage.graph.operators}
    stages_by_parameter: dict[str, set[int]] = {}
    for stage in stages:
        for source in stage.graph.of_kind("parameter", "buffer"):
            stages_by_parameter.setdefault(source.name, set()).add(stage.number)

    def owned(operator: Operator) -> list[Source]:
        nodes = (graph.by_id[ref.id] for ref in operator.operands)
        return [node for node in nodes if isinstance(node, Source) and node.name in stages_by_parameter]

    every = range(len(stages))
    allowed = {
        operator.id: set(every).intersection(*(stages_by_parameter[source.name] for source in owned(operator)))
        for operator in graph.operators
    }
    latest: dict[str, int] = {}
    for operator in reversed(graph.operators):
        results = (Ref(operator.id, index) for index in range(len(operator.results)))
        used = min((latest[user.id] for ref in results for user, _ in graph.users[ref]), default=len(stages) - 1)
        latest[operator.id] = max((number for number in allowed[operator.id] if number <= used), default=used)
    found: dict[str, int] = {}
    for operator in graph.operators:
        producers = (graph.by_id[ref.id] for ref in operator.operands)
        least = max((found[node.id] for node in producers if isinstance(node, Operator)), default=0)
        wanted = named.get(operator.name, named.get(f"{operator.module}.{operator.label}", least))
        possible = [number for number in sorted(allowed[operator.id]) if least <= number <= latest[operator.id]]
        if not possible:
            raise StrategyError(
                "MW430",
                f"parallel.pipeline.cuts: in evaluation {operator.where} uses "
                f"{', '.join(source.name for source in owned(operator))} behind a result of stage {least}, but in "
                "training no such stage holds it; cut the model elsewhere, or leave evaluation out "
                "(evaluate.metric=null and every=null).",
            )
        found[operator.id] = min(possible, key=lambda number: (abs(number - wanted), number))
    return found


def _as_configured(graph: OperatorGraph, stages: int, cuts: Mapping[str, int], count: str) -> dict[str, int]:
    modules = {
        ".".join(words[: i + 1]) for o in graph.operators for words in [o.module.split(".")] for i in range(len(words))
    }
    for path, stage in cuts.items():
        if path not in modules:
            raise StrategyError(
                "MW211",
                f"parallel.pipeline.cuts: {path!r} is no module of the model.{closest(path, sorted(modules - {''}))}",
            )
        if not 0 <= stage < stages:
            raise StrategyError(
                "MW430", f"parallel.pipeline.cuts: {path} = {stage}, but {count} has the stages 0 to {stages - 1}."
            )
    found: dict[str, int] = {}
    rootless: set[str] = set()  # what no path names and no batch entry leads to: in the first stage that uses it
    for operator in graph.operators:
        producers = [graph.by_id[ref.id] for ref in operator.operands]
        latest = max((one for one in producers if isinstance(one, Operator)), key=lambda o: found[o.id], default=None)
        least = 0 if latest is None else found[latest.id]
        paths = [path for path in cuts if f"{operator.module}.".startswith(f"{path}.")]
        wanted = cuts[max(paths, key=len)] if paths else least
        if wanted < least:
            assert latest is not None
            raise StrategyError(
                "MW430",
                f"parallel.pipeline.cuts: {max(paths, key=len)} = {wanted} comes before what it uses: {operator.where} "
                f"needs the result of {latest.where}, which is in stage {least}. A stage can only use earlier ones; "
                f"give it stage {least} or later.",
            )
        found[operator.id] = wanted
        if not paths and all(
            node.id in rootless if isinstance(node, Operator) else node.kind != "input"
            for node in (graph.by_id[ref.id] for ref in operator.operands)
        ):
            rootless.add(operator.id)
    for operator in reversed(graph.operators):
        if operator.id in rootless:
            results = (Ref(operator.id, index) for index in range(len(operator.results)))
            users = [found[user.id] for ref in results for user, _ in graph.users[ref]]
            found[operator.id] = min(users, default=found[operator.id])
    for stage in sorted(set(range(stages)) - set(found.values())):
        raise StrategyError(
            "MW430",
            f"parallel.pipeline.cuts leave stage {stage} of {count} without an operator; give it a module, or take "
            "fewer stages.",
        )
    return found


def _balanced(graph: OperatorGraph, work: Sequence[Sequence[float]], count: str) -> dict[str, int]:
    """Consecutive stages whose heaviest is as light as possible, cut between modules as far up the tree as is even,
    and not where a stage would need the buffer of another; `work` is that of every operator, by stage. Each stage
    has a parameter, where there are any."""
    stages, found = len(work), None
    parameters = {source.id for source in graph.of_kind("parameter")}
    users = [any(ref.id in parameters for ref in one.operands) for one in graph.operators]
    even = 1 / sum(1 / sum(own) for own in work)  # of every stage, if operators could be divided
    spans = _spans_of_one_stage(graph)
    deepest = max(len(operator.path) for operator in graph.operators)
    for kept in (spans, ()):  # where none is left to cut, `check` names the obstacle
        for depth in range(1, deepest + 2) if found is None else ():
            units = _units(graph, depth, kept)
            if len(units) < stages:
                continue
            sums = [[sum(own[i] for i in unit) for unit in units] for own in work]
            ends = _lightest(sums, [not any(users) or any(users[i] for i in unit) for unit in units])
            if not ends:
                continue
            heaviest = max(sum(own[a:b]) for own, a, b in zip(sums, (0, *ends), ends, strict=False))
            if found is None or heaviest < found[0] / EVEN:
                found = heaviest, units, ends
            if found[0] <= EVEN * even:
                break
    if found is None:
        few = f"{len(graph.operators)} operators"
        if len(graph.operators) >= stages:
            few = f"{sum(users)} operators with a parameter, of which every stage needs one"
        raise StrategyError("MW431", f"{count}, but the model has only {few}; take fewer stages.")
    _, units, ends = found
    return {
        graph.operators[i].id: sum(number >= end for end in ends) for number, unit in enumerate(units) for i in unit
    }


def _units(graph: OperatorGraph, depth: int, spans: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The numbers of consecutive operators of one module, `depth` calls down; below that, of single operators. Those
    from the first to the last of each of the `spans` are in one unit."""
    paths = [(*operator.path, operator.id)[:depth] for operator in graph.operators]
    units: list[list[int]] = []
    for _, run in groupby(range(len(paths)), lambda i: paths[i]):
        unit = list(run)
        if any(first < unit[0] <= last for first, last in spans):
            units[-1] += unit
        else:
            units.append(unit)
    return units


def _spans_of_one_stage(graph: OperatorGraph) -> list[tuple[int, int]]:
    """The numbers of the first and the last of the operators that use a buffer which the step writes, or compute its
    new value, and of those that use a parameter of which some let no gradient through."""
    number = {operator.id: i for i, operator in enumerate(graph.operators)}
    written = {id: number[value.id] for id, value in graph.updates if value.id in number}
    found = []
    for source in graph.sources:
        users = [user.id for user, _ in graph.users[Ref(source.id)]]
        own = [number[id] for id in users]
        if source.id in written:
            own.append(written[source.id])
        elif not source.trainable or len({id in graph.returning for id in users}) < 2:
            continue
        found.append((min(own), max(own)))
    return found


def _lightest(work: Sequence[Sequence[float]], needed: Sequence[bool]) -> tuple[int, ...]:
    """The ends of consecutive parts, each with a unit that is `needed`, whose heaviest is as light as possible; `work`
    is that of every unit, by part. Nothing where there are no such parts."""
    first, *others = [(0.0, *accumulate(own)) for own in work]
    before = (0, *accumulate(needed))
    none: tuple[float, tuple[int, ...]] = float("inf"), ()
    best = [(first[end], (end,)) if before[end] else none for end in range(len(first))]
    for sums in others:
        best = [
            min(
                (
                    (max(best[cut][0], sums[end] - sums[cut]), (*best[cut][1], end))
                    for cut in range(end)
                    if best[cut][1] and before[cut] < before[end]
                ),
                default=none,
            )
            for end in range(len(sums))
        ]
    return best[-1][1]


def stage_programs(
    stages: Sequence[Stage], owners: Sequence[int], options: LoweringOptions, lower: Callable[..., Program] = lower
) -> tuple[Program, ...]:
    """The program of every stage; `owners` gives the group of ranks that runs it."""

    def lowered(stage: Stage, open_axes: dict[str, tuple[str, ...]]) -> Program:
        given = {"outputs": stage.sends, "ordinals": stage.ordinals, "open_axes": open_axes}
        return lower(stage.graph, stage.plan, options, **given)

    alone = [lowered(stage, {}) for stage in stages]
    found = []
    for stage, program in zip(stages, alone, strict=True):
        others = [alone[number] for number in stages_of(owners[stage.number], owners)]
        wanted = {
            name: program.mesh.sorted({axis for other in others for axis in other.reductions.get(name, ())})
            for name in program.reductions
        }
        found.append(program if wanted == program.reductions else lowered(stage, wanted))
    for number in reversed(range(len(found) - 1)):
        pairs = zip(found[number].outputs, stages[number + 1].receives, strict=True)
        optional = frozenset(here for here, there in pairs if there in found[number + 1].optional)
        if optional:
            found[number] = replace(found[number], optional_outputs=optional)
    return tuple(found)


def joined(stages: Sequence[Stage], programs: Sequence[Program]) -> Program:
    """What the stages of one group hold and communicate, as one program: for weights, gradients and checkpoints, not to
    be run. Its outputs are those to which gradients come back."""
    first = programs[0]
    sources = {source.id: (source, program) for program in programs for source in program.sources}
    outputs = []
    for stage, program in zip(stages, programs, strict=True):
        pairs = zip(stage.graph.outputs, program.outputs, strict=True)
        outputs += [here for ref, here in pairs if ref in stage.returning]
    return Program(
        first.mesh,
        tuple(source for source, _ in sources.values()),
        {id: program.layouts[id] for id, (_, program) in sources.items()},
        tuple(instruction for program in programs for instruction in program.instructions),
        tuple(outputs),
        {name: axes for program in programs for name, axes in program.reductions.items()},
        first.parameter_order,
        any(program.random for program in programs),
        programs[-1].loss_axes,
        tuple(update for program in programs for update in program.updates),
        optional_outputs=frozenset[Ref]().union(*(program.optional_outputs for program in programs)),
        without_gradient=frozenset(
            name
            for name in frozenset[str]().union(*(program.without_gradient for program in programs))
            if all(name in program.without_gradient for program in programs if name in program.reductions)
        ),
    )
