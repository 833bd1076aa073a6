"""The planner: a plan from an operator graph and a request, by rules, configured strategies, mesh, search, parameter
layouts and checks."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from strategies.core.addressing import in_module
from strategies.core.errors import StrategyError, closest
from strategies.core.graph import Operator, OperatorGraph, Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh_refinement import Axes, Meshing, merged, meshing
from strategies.core.plan import OperatorPlan, Origin, Plan
from strategies.core.request import NamedDims, Operand, Request, check, operands, without_idle_axes
from strategies.cost.cluster import Cluster, one_level
from strategies.cost.problem import Problem
from strategies.cost.styled_modules import ModuleLayouts
from strategies.lowering.recompute import recomputed
from strategies.memory.estimate import plan_bytes
from strategies.planner.by_module import MODULES, ROWS, beyond_borders, by_module, sliced_modules, violated
from strategies.planner.configured_strategies import Configured, configured
from strategies.planner.default_strategies import as_shown, batch_parallel, divisors, largest_fit
from strategies.planner.step_certificate import Evaluated, StepEvaluation, cheapest_step, compared_meshes, step_bounds
from strategies.rules import rule_of
from strategies.rules.packed import taken_apart, unsliced_dims
from strategies.rules.sharding import Assignment, Sharding
from strategies.rules.traits import traits
from strategies.search.algorithms import ALGORITHMS, Searched, Solve, certificate
from strategies.search.deferral import deferred
from strategies.search.sharding_propagation import PlanSeconds, Propagated, sharding_propagation
from strategies.search.solution import Solution

EXACT = "dynamic_programming"
"""The search that bounds what it finds."""


def make_plan(
    graph: OperatorGraph, request: Request, cluster: Cluster | None = None, step_cost: StepEvaluation | None = None
) -> Plan:
    """Choose the plan of a training graph.

    Args:
        graph: the operator graph of a training step (`capture_model`).
        request: mode, mesh, configured strategies and search.
        cluster: speeds by which searches compare plans; None: one level of fast devices.
        step_cost: cost of a complete step, by which the best of the plans that a search returns is chosen; None: the
            search's own sum of seconds.

    Returns:
        Assignments and layouts of all operators and tensors, on one mesh of `request.world_size` ranks.

    Raises:
        StrategyError: strategies do not fit the mode, the model, the mesh or one another.
        TooLarge: no plan fits into `request.memory_limit`.
    """
    planning = planning_of(graph, request, cluster or one_level(request.world_size), step_cost)
    return planning.plan(request.zero_stage, request.memory_limit)


def planning_of(
    graph: OperatorGraph, request: Request, cluster: Cluster, step_cost: StepEvaluation | None = None
) -> Planning | SlicedModules:
    """What makes the plans of one graph for a request; as `make_plan`."""
    open_mesh = request.by_module and request.mesh is None
    return (SlicedModules if open_mesh else Planning)(graph, request, cluster, step_cost)


def _unpriced(assignments: Mapping[str, Assignment]) -> Solution:
    """A plan whose cost is unknown."""
    return Solution(assignments, math.inf, math.inf)


class Planning:
    """Plans of one graph, as one request wants them, for one stage of ZeRO and limit of memory after another."""

    def __init__(
        self, graph: OperatorGraph, request: Request, cluster: Cluster, step_cost: StepEvaluation | None = None
    ) -> None:
        check(request)
        request = without_idle_axes(request)
        self.graph, self.request, self.cluster, self.step_cost = graph, request, cluster, step_cost
        self.shardings = {
            one.id: _unsliced(rule_of(one, graph), one, graph.operand_specs(one), request) for one in graph.operators
        }
        self.configured = configured(graph, self.shardings, request.strategies)
        self.marked = self._marked()
        self.meshing = self._meshing()
        self.mesh = self.meshing.mesh
        self.inputs = self._inputs()
        self.solving: dict[int, Solve] = {}
        """Indexed by ZeRO stage."""

    @cached_property
    def problem(self) -> Problem:
        """The configured assignments, and the open ones."""
        fixed: dict[str, Assignment] = {}
        for id, entry in self.configured.items():
            if entry.wanted.inputs is not None:
                fixed[id] = self._fixed(self._operator(id), entry, fixed)
        bare = Problem(self.graph, self.mesh, self.shardings, self.inputs, fixed, {})
        for operator in self.marked:
            fixed.setdefault(operator.id, batch_parallel(bare, self.meshing, operator))
        outputs = {
            id: found for id, entry in self.configured.items() if (found := self._outputs(id, entry, fixed)) is not None
        }
        request = self.request
        return replace(
            bare,
            engine=request.zero_engine,
            optimizer_state_factor=request.optimizer_state_factor,
            optimizer_bytes=request.optimizer_bytes,
            overlaps=request.overlap_gradients,
            micro_batches=request.micro_batches,
            fixed=fixed,
            outputs=outputs,
            styled=self._styled,
            ring=request.ring,
        )

    @cached_property
    def _modules(self) -> Axes:
        """The axes that slice modules, where plans are made of styles."""
        return self.meshing.named["parallel.mesh"].get(MODULES, ()) if self.request.by_module else ()

    @cached_property
    def _styled(self) -> ModuleLayouts | None:
        if not self.request.by_module:
            return None
        found = sliced_modules(self.graph, self.mesh, self._modules, self.inputs, self.request.styles, self.shardings)
        for operator in self.graph.operators:
            sizes = self.shardings[operator.id].sizes
            if any(sizes[factor] % self.mesh.product(used) for factor, used in found.rows[operator.id].items()):
                raise StrategyError(
                    "MW412",
                    f"parallel.for_target slices the batch over {self.mesh.product(self.mesh.others(self._modules))} "
                    f"ranks, but {operator.where} is computed on complete rows there; use a mesh of the axis tp alone, "
                    "or another target.",
                )
        return found

    def _at(self, stage: int) -> Problem:
        return self.problem.once(("stage", stage), lambda: replace(self.problem, stage=stage))

    def _solve(self, stage: int, memory: float | None) -> Searched:
        if stage not in self.solving:
            self.solving[stage] = ALGORITHMS[self.request.search](self._at(stage), self.cluster, self._axes())
        return self.solving[stage](memory)

    def plan(self, stage: int, memory: float | None) -> Plan:
        """The plan at this stage of ZeRO within `memory` bytes of a rank. Raises StrategyError as `make_plan` does."""
        started = time.perf_counter()
        problem = self._at(stage).within(memory)
        search: dict[str, Any] = {"cost": None, "lower_bound": None}
        reached: Collection[str] = ()
        if self.request.mode == "auto" and self.request.search in ALGORITHMS:
            searched = self._solve(stage, memory)
            if self.step_cost is not None:
                searched = self._as_it_runs(problem, searched, self.step_cost)
            search |= searched.search
            solution, reached = searched.solution, searched.solution.assignments
        elif self.request.mode == "auto":
            seconds = None if self.step_cost is None else lambda one: self._seconds(problem, one)
            propagated = self._propagated(problem, seconds)
            solution, reached = propagated.solution, propagated.reached
            search |= {"propagation": propagated.to_json()}
        else:
            solution = _unpriced(self._defaults(problem))
        algorithm = self.request.search if self.request.mode == "auto" else self.request.mode
        search = {"algorithm": algorithm, "seconds": round(time.perf_counter() - started, 4), **search}
        return replace(self._made(problem, solution, reached), search=search)

    def _made(self, problem: Problem, solution: Solution, reached: Collection[str] = ()) -> Plan:
        """The plan of assignments; `reached` are the operators that a search decided."""
        operators = {
            operator.name: OperatorPlan(
                solution.assignments[operator.id],
                self._origin(operator, operator.id in reached),
                problem.outputs.get(operator.id),
            )
            for operator in self.graph.operators
        }
        tensors = self._tensors(operators)
        tensors |= {
            source.name: solution.tensors[ref]
            for source in self.graph.sources
            if (ref := Ref(source.id)) in solution.tensors
        }
        wanted = self.request.recompute
        recompute = None if wanted is None else recomputed(self.graph, self.shardings, wanted)
        plan = merged(Plan(self.mesh, operators, self.inputs, tensors), self.meshing.boundaries())
        if self.request.by_module:
            plan = by_module(self.graph, plan, self.request.styles)
        return replace(plan, recompute=recompute)

    def _seconds(self, problem: Problem, solution: Solution) -> float:
        """Seconds of a step as it runs; infinite where it cannot run, such as with an uneven batch split."""
        assert self.step_cost is not None
        try:
            plan = self._made(problem, solution)
            if self._violated(plan) or not self._fits(problem, plan):
                return math.inf
            return self.step_cost.seconds(plan)
        except StrategyError:
            return math.inf

    def _fits(self, problem: Problem, plan: Plan) -> bool:
        """Whether a plan keeps the memory, which another one that modules mean in place of it may not."""
        if problem.memory is None or not self.request.by_module:
            return True
        chosen = {one.id: plan.operators[one.name].assignment for one in self.graph.operators}
        return plan_bytes(replace(problem, mesh=plan.mesh), chosen) <= problem.memory

    def _violated(self, plan: Plan) -> bool:
        """Whether the trainer that a plan is for would lay out something otherwise."""
        if self.request.borders:
            return any(beyond_borders(self.graph, plan, self.request.unsliced))
        return self.request.styles is not None and any(violated(self.graph, plan, self.request.styles))

    def _as_it_runs(self, problem: Problem, searched: Searched, step: StepEvaluation) -> Searched:
        """The cheapest of what was found and of other plans that keep the memory, as a step runs. An exact search takes
        no dearer one than the other searches have."""
        exact = self.request.search == EXACT
        axes = self.meshing.fixed if self.meshing.named else None

        def fits(one: Solution) -> bool:
            return problem.memory is None or plan_bytes(problem, one.assignments) <= problem.memory

        def others() -> Iterator[Solution]:
            if searched.second is not None:
                yield searched.second
            for other in self._others(problem, axes) if exact else ():
                if fits(other):
                    yield other

        def further() -> Iterator[Solution]:
            """The best plan where nothing hides gradient reductions: what a search believes to be hidden may not be.
            Not within a limit, for which many plans are searched."""
            if exact and problem.hiding and problem.memory is None:
                yield ALGORITHMS[EXACT](replace(problem, overlaps=False), self.cluster, axes)(None).solution

        def bounds() -> Iterator[tuple[float, Solution | None]]:
            if step.floor:
                yield step.floor, None
            if step.savings is not None and searched.search.get("lower_bound") is not None:
                for bound, one in step_bounds(problem, self.cluster, axes, step.savings):
                    yield bound, one if one is not None and fits(one) else None

        first = Evaluated(searched.solution, self._seconds(problem, searched.solution))
        seconds = partial(self._seconds, problem)
        every, bound = cheapest_step(first, bounds() if exact else iter(()), others(), further(), seconds)
        best = every[0]
        if math.isinf(best.seconds):
            step.seconds(plan := self._made(problem, searched.solution))  # raises the reason
            if self._violated(plan):
                raise StrategyError(
                    "MW465",
                    "No plan that was found is one that parallel.for_target can say; give a mesh whose axis tp has "
                    "fewer ranks, more memory (parallel.memory_limit), or leave parallel.for_target out.",
                )
        search = dict(searched.search) | (certificate(best.seconds, bound) if exact else {"cost": best.seconds})
        if best is not first:
            search["bytes"] = plan_bytes(problem, best.solution.assignments)
        if "mesh" in search:
            search |= compared_meshes(problem, every)
        return Searched(best.solution, search)

    def _others(self, problem: Problem, axes: tuple[Axes, ...] | None) -> Iterator[Solution]:
        """The plans of the other searches."""
        for name, algorithm in ALGORITHMS.items():
            if name != self.request.search:
                try:
                    searched = algorithm(problem, self.cluster, axes)(problem.memory)
                except StrategyError:
                    continue  # it found nothing that keeps the memory
                yield searched.solution
                if searched.second is not None:
                    yield searched.second
        if problem.styled is not None:
            yield _unpriced(problem.styled.rows)  # no module is sliced
        elif problem.fixed:
            yield from self._propagated(problem).both

    def _propagated(self, problem: Problem, seconds: PlanSeconds | None = None) -> Propagated:
        default = partial(batch_parallel, problem, self.meshing)
        return sharding_propagation(problem, self.cluster, self.meshing.fixed, default, seconds)

    def _operator(self, id: str) -> Operator:
        node = self.graph.by_id[id]
        assert isinstance(node, Operator)
        return node

    def _marked(self) -> list[Operator]:
        for pattern in self.request.set_data_parallel:
            if not any(in_module(pattern, operator) for operator in self.graph.operators):
                modules = {operator.module for operator in self.graph.operators if operator.module}
                raise StrategyError(
                    "MW211",
                    f"parallel.set_data_parallel: {pattern!r} matches no module of the "
                    f"model.{closest(pattern, sorted(modules))}",
                )
        return [
            o for o in self.graph.operators if any(in_module(pattern, o) for pattern in self.request.set_data_parallel)
        ]

    def _meshing(self) -> Meshing:
        """The mesh with every device matrix that counts ask for; configured ones first, then those of defaults."""
        world = self.request.world_size
        matrices = []
        for id, entry in self.configured.items():
            counts = [count for count in entry.factors.values() if isinstance(count, int)]
            slices = math.prod(counts)
            if world % slices:
                raise StrategyError(
                    "MW403",
                    f"parallel.strategies.{entry.path}: {entry.wanted} on {self._operator(id).where} needs {slices} "
                    "slices, "
                    f"which do not divide the {world} devices.",
                )
            if len(counts) == len(entry.factors) and slices > 1:
                matrices.append(counts)
        dataset = self.request.dataset_strategy
        for operand in dataset if isinstance(dataset, tuple) else ():
            if not isinstance(operand, NamedDims):
                matrices.append(list(operand))
        if self.request.mode == "auto":
            matrices += [[units] for units in self.cluster.units(world)]
        sizes = {size for sharding in self.shardings.values() for size in sharding.sizes.values()}
        matrices += [[largest_fit(size, world)] for size in sorted(sizes, reverse=True)]
        used = {operand.layout for _, operand in operands(self.request) if isinstance(operand, NamedDims)}
        layouts = {name: matrix for name, matrix in self.request.layouts.items() if name in used}
        spare = "dp" if self.request.mode == "data_parallel" else "d"
        return meshing(
            world, self.request.mesh, layouts, [matrix for matrix in matrices if world % math.prod(matrix) == 0], spare
        )

    def _fixed(self, operator: Operator, entry: Configured, fixed: Mapping[str, Assignment]) -> Assignment:
        """The axes of a configured operator's factors."""
        where = f"parallel.strategies.{entry.path}: {entry.wanted} on {operator.where}"
        named = {f: self._named(s[0], s[1]) for f, s in entry.factors.items() if not isinstance(s, int)}
        taken = [axis for axes in named.values() for axis in axes]
        if len(set(taken)) != len(taken):
            raise StrategyError("MW404", f"{where}: a mesh axis slices two different loops of the operator.")
        counted = {factor: slicing for factor, slicing in entry.factors.items() if isinstance(slicing, int)}
        named |= self._as_stored(operator, counted, taken, fixed)
        rest = {factor: count for factor, count in counted.items() if factor not in named}
        taken = [axis for axes in named.values() for axis in axes]
        placed = dict(zip(rest, self.meshing.place(list(rest.values()), taken, where), strict=True))
        assignment = {factor: (named | placed)[factor] for factor in entry.factors if (named | placed)[factor]}
        sharding = self.shardings[operator.id]
        for factor, axes in assignment.items():
            if not sharding.fits(factor, self.mesh.product(axes)):
                fitting = [str(n) for n in divisors(self.mesh.size) if sharding.fits(factor, n)]
                raise StrategyError(
                    "MW402",
                    f"{where}: a dim of size {sharding.size_of(factor)} cannot be cut into {self.mesh.product(axes)} "
                    f"equal slices; {', '.join(fitting)} would fit.",
                )
        return assignment

    def _as_stored(
        self, operator: Operator, counted: Mapping[str, int], taken: Sequence[str], fixed: Mapping[str, Assignment]
    ) -> dict[str, Axes]:
        """Counts do not say which ranks: a parameter that an operator configured before slices into as many pieces
        keeps its axes."""
        axes_of: dict[str, Axes] = {}
        for position, ref in enumerate(operator.operands):
            source = self.graph.by_id[ref.id]
            if not isinstance(source, Source) or source.kind != "parameter":
                continue
            for user, at in self.graph.users[ref]:
                if user.id in fixed:
                    stored = self.shardings[user.id].operand_layouts(fixed[user.id])[at].dims
                    pairs = zip(self.shardings[operator.id].operands[position], stored, strict=True)
                    same = {factor: axes for factor, axes in pairs if factor is not None and axes}
                    wanted = {factor: self.mesh.product(axes) for factor, axes in same.items()}
                    if all(counted.get(factor) == count for factor, count in wanted.items()) and not _flat(same) & {
                        *taken,
                        *_flat(axes_of),
                    }:
                        axes_of |= same
                    break
        return axes_of

    def _named(self, layout: str, names: tuple[str, ...]) -> Axes:
        return tuple(axis for name in names for axis in self.meshing.named[layout][name])

    def _layout(self, operand: Operand, spec: TensorSpec, where: str, natural: Layout | None = None) -> Layout:
        """The layout that an operand form asks for; counts first keep the axes of `natural`."""
        entries = operand.dims if isinstance(operand, NamedDims) else operand
        if len(entries) != len(spec.shape):
            raise StrategyError(
                "MW401",
                f"{where}: {operand} has {len(entries)} entries, the tensor of shape {spec.shape} has "
                f"{len(spec.shape)} dims.",
            )
        if isinstance(operand, NamedDims):
            layout = Layout(tuple(self._named(operand.layout, dim) for dim in operand.dims))
        elif natural is None:
            layout = Layout(self.meshing.place(list(operand), where=where))
        else:
            layout = self._keeping(operand, natural, where)
        for dim, (size, count) in enumerate(zip(spec.shape, layout.counts(self.mesh), strict=True)):
            if size % count:
                raise StrategyError(
                    "MW402",
                    f"{where}: dim {dim} of shape {spec.shape} cannot be cut into {count} equal slices; take a count "
                    "that divides it, or 1.",
                )
        return layout

    def _keeping(self, counts: tuple[int, ...], natural: Layout, where: str) -> Layout:
        """Counts of a result: a dim keeps its axes as far as the count goes, and takes more from those that are
        partial, else from those that are free."""
        dims = []
        for have, count in zip(natural.dims, counts, strict=True):
            keep = next(have[:end] for end in range(len(have), -1, -1) if count % self.mesh.product(have[:end]) == 0)
            dims.append(keep)
        for dim, count in enumerate(counts):
            used = {axis for axes in dims for axis in axes}
            more = count // self.mesh.product(dims[dim])
            axes = self.meshing.run(more, set(self.mesh.names) - natural.partial | used) or self.meshing.run(more, used)
            if axes is None:
                raise StrategyError(
                    "MW403",
                    f"{where}: the mesh of {self.mesh.size} devices has no unused axes for the {count} slices of dim "
                    f"{dim} of the result.",
                )
            dims[dim] += axes
        return Layout(tuple(dims))

    def _inputs(self) -> dict[str, Layout]:
        sources, wanted = self.graph.of_kind("input"), self.request.dataset_strategy
        if isinstance(wanted, tuple):
            if len(wanted) != len(sources):
                names = ", ".join(source.name for source in sources)
                raise StrategyError(
                    "MW409",
                    f"parallel.dataset_strategy gives {len(wanted)} entries, the batch has {len(sources)} ({names}).",
                )
            return {
                s.name: self._layout(o, s.spec, f"parallel.dataset_strategy for batch entry {s.name!r}")
                for s, o in zip(sources, wanted, strict=True)
            }
        layouts = {}
        if self.request.by_module:
            return self._rows_of_batch(sources)
        world, every = self.request.world_size, self.request.mode == "data_parallel"
        for source in sources:
            rank = len(source.spec.shape)
            count = 1 if wanted == "full_batch" or rank == 0 else largest_fit(source.spec.shape[0], world)
            if rank and wanted != "full_batch" and every and count != world:
                if source.name not in self.request.unbatched:
                    raise StrategyError(
                        "MW412",
                        f"parallel.mode = data_parallel slices the batch over all {world} devices, but a micro-batch "
                        f"has {source.spec.shape[0]} samples (data.batch_size / train.accumulate); take a multiple of "
                        f"{world}.",
                    )
                count = 1
            (axes,) = self.meshing.place([count])
            layouts[source.name] = Layout(((axes,) + ((),) * rank)[:rank])
        return layouts

    def _rows_of_batch(self, sources: Sequence[Source]) -> dict[str, Layout]:
        """Batch entries in slices of rows over all axes that slice no module."""
        layouts, axes = {}, self.mesh.others(self._modules)
        for source in sources:
            rank, fits = len(source.spec.shape), not any(n % self.mesh.product(axes) for n in source.spec.shape[:1])
            if not fits and source.name not in self.request.unbatched:
                raise StrategyError(
                    "MW412",
                    f"parallel.for_target slices the batch over {self.mesh.product(axes)} ranks, but a micro-batch has "
                    f"{source.spec.shape[0]} rows of {source.name!r}; take a multiple, or a larger axis tp.",
                )
            layouts[source.name] = Layout(((axes if fits else (),) + ((),) * rank)[:rank])
        return layouts

    def _outputs(self, id: str, entry: Configured, fixed: Mapping[str, Assignment]) -> tuple[Layout, ...] | None:
        if entry.wanted.outputs is None:
            return None
        operator, sharding = self._operator(id), self.shardings[id]
        where = f"parallel.strategies.{entry.path}: {entry.wanted} on {operator.where}"
        if len(entry.wanted.outputs) != len(operator.results):
            raise StrategyError(
                "MW401",
                f"{where}: it gives {len(entry.wanted.outputs)} results, the operator has {len(operator.results)}.",
            )
        if id not in fixed:
            raise StrategyError(
                "MW404", f"{where}: an output strategy needs the input strategy beside it (in: ..., out: ...)."
            )
        carried = {factor for dims in sharding.operands for factor in dims} - sharding.sums
        if {None, *carried}.issuperset(factor for dims in sharding.results for factor in dims) and not sharding.sums:
            raise StrategyError(
                "MW404",
                f"{where}: the slices of the result of {operator.op} follow from its operands, so there is no output "
                "strategy to choose; give the slices to the operators that use the result.",
            )
        natural = sharding.result_layouts(fixed[id])
        return tuple(
            self._layout(operand, spec, where, layout)
            for operand, spec, layout in zip(entry.wanted.outputs, operator.results, natural, strict=True)
        )

    def _defaults(self, problem: Problem) -> dict[str, Assignment]:
        assignments: dict[str, Assignment] = {}
        for operator in self.graph.operators:
            assignment = problem.fixed.get(operator.id)
            if assignment is None:
                assignment = batch_parallel(problem, self.meshing, operator)
                shown = self.graph.by_id[operator.operands[0].id] if self._shows(operator) else None
                if isinstance(shown, Operator):
                    have = problem.result_layout(operator.operands[0], assignments[shown.id])
                    assignment = as_shown(problem, operator, have, assignment)
            assignments[operator.id] = assignment
        return deferred(problem, self.cluster, assignments)

    def _shows(self, operator: Operator) -> bool:
        """Whether an operator is a view, or takes sections apart without being one, as `glu` does."""
        if traits(operator.op).view:
            return True
        specs = self.graph.operand_specs(operator)
        packed = specs[0].packed if specs else None
        return packed is not None and taken_apart(operator, specs, packed) is not None

    def _axes(self) -> tuple[Axes, ...] | None:
        """The axes that a user named; None where the mesh is to be chosen, with its runner-up."""
        certain = self.request.search == EXACT and not self.request.runner_up
        return self.meshing.fixed if self.meshing.named or certain else None

    def _origin(self, operator: Operator, reached: bool) -> Origin:
        if not self.shardings[operator.id].known:
            return "no rule"
        if operator.id in self.configured:
            return "configured"
        if operator in self.marked:
            return "data_parallel"
        searched: Origin = "propagated" if self.request.search == "sharding_propagation" else "searched"
        return searched if reached else "default"

    def _tensors(self, operators: Mapping[str, OperatorPlan]) -> dict[str, Layout]:
        """A parameter has the layout that its first configured user needs, else its first user. Raises StrategyError
        where configured users disagree. Buffers and constants are replicated."""
        layouts = {}
        for source in self.graph.sources:
            if source.kind == "input":
                continue
            rank = len(source.spec.shape)
            layouts[source.name] = Layout.replicated(rank)
            if source.kind != "parameter":
                continue
            uses = [(o, self._operand(o, i, operators)) for o, i in self.graph.users[Ref(source.id)]]
            configured_uses = [
                (o, layout)
                for o, layout in uses
                if o.id in self.configured and self.configured[o.id].wanted.inputs is not None
            ]
            for operator, layout in configured_uses[1:]:
                first, wanted = configured_uses[0]
                if layout != wanted:
                    texts = [layout.counts(self.mesh) for layout in (wanted, layout)]
                    needs = texts if texts[0] != texts[1] else (wanted, layout)  # as many slices, on other ranks
                    raise StrategyError(
                        "MW406",
                        f"Parameter {source.name} is used by two operators whose strategies slice it differently: "
                        f"{first.where} has "
                        f"{self.configured[first.id].wanted} and needs {needs[0]}, {operator.where} has "
                        f"{self.configured[operator.id].wanted} and needs {needs[1]}. Give both the same slices of it, "
                        "or leave one of "
                        "them without a strategy.",
                    )
            if configured_uses or uses:
                layouts[source.name] = (configured_uses or uses)[0][1]
        return layouts

    def _operand(self, operator: Operator, position: int, operators: Mapping[str, OperatorPlan]) -> Layout:
        sharding: Sharding = self.shardings[operator.id]
        return sharding.operand_layouts(operators[operator.name].assignment)[position]


class SlicedModules:
    """Plans by module on an open mesh: the last axis slices modules, one before it the rows of the batch."""

    def __init__(
        self, graph: OperatorGraph, request: Request, cluster: Cluster, step_cost: StepEvaluation | None = None
    ) -> None:
        rows = [source.spec.shape[0] for source in graph.of_kind("input") if source.spec.shape]
        sizes = [
            (size, request.world_size // size)
            for size in divisors(request.world_size)
            if all(count % size == 0 for count in rows)
        ]
        meshes = [{ROWS: copies, MODULES: sliced} for copies, sliced in sizes]
        self.every = [
            Planning(graph, replace(request, mesh=tuple(mesh.items())), cluster, step_cost) for mesh in meshes
        ]

    def plan(self, stage: int, memory: float | None) -> Plan:
        """The best plan of all meshes, as `Planning.plan` finds it for one; its lower bound is that of all of them."""
        found: list[Plan] = []
        refused: list[StrategyError] = []
        for one in self.every:
            try:
                found.append(one.plan(stage, memory))
            except StrategyError as error:
                refused.append(error)
        if not found:
            raise refused[0]
        best, *others = sorted(found, key=lambda plan: float(plan.search["cost"]))
        bounds = [plan.search["lower_bound"] for plan in found]
        bound = 0.0 if None in bounds else min(bounds)
        seconds = sum(plan.search["seconds"] for plan in found)
        compared = [
            {"mesh": [size for _, size in plan.mesh.axes], "seconds": plan.search["cost"]}
            for plan in (best, *others[:1])
        ]
        search = {**best.search, "seconds": round(seconds, 4), **certificate(best.search["cost"], bound)}
        search |= {"mesh": compared[0], "runner_up": compared[1] if others else None, "meshes": len(found)}
        return replace(best, search={**search, "left_out": len(refused)})


def _unsliced(sharding: Sharding, operator: Operator, specs: Sequence[TensorSpec], request: Request) -> Sharding:
    """The rule of an operator, where no slice is allowed of the dims that the request wants replicated. What slices
    modules reduces gradients where it returns them."""
    sharding = replace(sharding, defers=sharding.defers and not request.by_module)
    wanted = request.unsliced.get(operator.label, ())
    every = enumerate(sharding.operands)
    factors = {dims[dim] for place, dims in every for dim in unsliced_dims(operator, specs, place, wanted)} - {None}
    if not factors:
        return sharding
    sizes = {factor: 1 if factor in factors else size for factor, size in sharding.sizes.items()}
    return replace(sharding, sizes=sizes, padded=sharding.padded - factors)


def _flat(dims: Mapping[str, Axes]) -> set[str]:
    return {axis for axes in dims.values() for axis in axes}


def follow(plan: Plan, graph: OperatorGraph) -> Plan:
    """The plan of another graph of the same model (evaluation): operators take the strategy of the operator of the same
    name where it is legal, others are replicated; parameters keep the layouts of `plan`, and so do batch entries that
    divide evenly; the others are replicated."""
    operators, shardings = {}, {operator.name: rule_of(operator, graph) for operator in graph.operators}
    for operator in graph.operators:
        sharding = shardings[operator.name]
        # a module that counts its batches in training holds one operator more there, so names are longer
        model = plan.operators.get(operator.name) or plan.operators.get(f"{operator.module}.{operator.label}")
        legal = model is not None and sharding.legal(model.assignment, plan.mesh)
        operators[operator.name] = (
            replace(model, outputs=None) if model is not None and legal else OperatorPlan({}, "default")
        )
    inputs = {}
    for source in graph.of_kind("input"):
        layout = plan.inputs.get(source.name, Layout.replicated(len(source.spec.shape)))
        fits = len(layout.dims) == len(source.spec.shape) and all(
            size % count == 0 for size, count in zip(source.spec.shape, layout.counts(plan.mesh), strict=True)
        )
        inputs[source.name] = layout if fits else Layout.replicated(len(source.spec.shape))
    tensors = {
        source.name: plan.tensors.get(source.name, Layout.replicated(len(source.spec.shape)))
        for source in graph.sources
        if source.kind != "input"
    }
    return Plan(plan.mesh, operators, inputs, tensors, plan.search)
