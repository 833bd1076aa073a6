"""Meshes with more axes than the tables of an exact search can hold: neighbouring axes are joined to a few, and what is
found on such a mesh is a plan of the whole one.

Invariants: a plan's layouts are the same on both meshes, so it is legal on both and keeps as many bytes; `least` is
below every plan of the whole mesh, joined or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from strategies.core.graph import Ref
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.mesh_refinement import Axes
from strategies.cost.cluster import Cluster
from strategies.cost.roofline import operator_seconds
from strategies.rules.sharding import Assignment
from strategies.search.finding import Found
from strategies.search.meshes import Factors, factorisations
from strategies.search.own import Own
from strategies.search.problem import Problem


@dataclass(frozen=True)
class Joined:
    """A problem on a mesh whose axes stand for runs of axes of another; each is called like the first of its run."""

    problem: Problem
    runs: Factors

    def whole(self, found: Found) -> Found:
        """A plan with the axes of the whole mesh."""
        assignments = {id: self.assignment(one) for id, one in found.assignments.items()}
        return replace(
            found, assignments=assignments, tensors={ref: self.layout(x) for ref, x in found.tensors.items()}
        )

    def assignment(self, found: Assignment) -> Assignment:
        """With the axes of the whole mesh."""
        return {factor: self._axes(axes) for factor, axes in found.items()}

    def layout(self, found: Layout) -> Layout:
        return Layout(tuple(map(self._axes, found.dims)), frozenset(self._axes(tuple(found.partial))))

    def _axes(self, axes: Axes) -> Axes:
        runs = {run[0]: run for run in self.runs}
        return tuple(one for axis in axes for one in runs[axis])


def joinings(problem: Problem, cluster: Cluster) -> Iterator[Joined]:
    """The problem on every mesh of few axes that end where levels end, as far as configured layouts allow it."""
    for runs in factorisations(problem.mesh, cluster):
        if len(runs) < len(problem.mesh.sorted(problem.mesh.names)) and (joined := on_runs(problem, runs)) is not None:
            yield joined


def on_runs(problem: Problem, runs: Factors) -> Joined | None:
    """The problem on the mesh of these axes; None where a configured layout tells axes of one run apart."""
    joined = _joined(problem, runs)
    return None if joined is None else Joined(joined, runs)


def _joined(problem: Problem, runs: Factors) -> Problem | None:
    mesh = Mesh(tuple((run[0], problem.mesh.product(run)) for run in runs))
    single = frozenset(axis for axis, size in problem.mesh.axes if size == 1)
    layouts = [*problem.inputs.values(), *(one for group in problem.outputs.values() for one in group)]
    asked = [axes for one in layouts for axes in (*one.dims, problem.mesh.sorted(one.partial))]
    asked += [axes for fixed in problem.fixed.values() for axes in fixed.values()]
    known: dict[Axes, Axes] = {}
    for axes in asked:
        found = _told(tuple(axis for axis in axes if axis not in single), runs)
        if found is None:
            return None
        known[axes] = found

    def layout(one: Layout) -> Layout:
        return Layout(tuple(known[axes] for axes in one.dims), frozenset(known[problem.mesh.sorted(one.partial)]))

    return replace(
        problem,
        mesh=mesh,
        inputs={name: layout(one) for name, one in problem.inputs.items()},
        outputs={id: tuple(map(layout, group)) for id, group in problem.outputs.items()},
        fixed={id: {factor: known[axes] for factor, axes in one.items()} for id, one in problem.fixed.items()},
    )


def _told(axes: Axes, runs: Factors) -> Axes | None:
    """The names of the runs that `axes` consist of."""
    found: list[str] = []
    while axes:
        run = next((run for run in runs if axes[: len(run)] == run), None)
        if run is None:
            return None
        found.append(run[0])
        axes = axes[len(run) :]
    return tuple(found)


def least(problem: Problem, cluster: Cluster) -> float:
    """Seconds below those of any plan: all work on one device that is as fast as all of them together, nothing sent;
    a configured operator takes its own time."""
    ranks, graph = problem.mesh.size, problem.graph
    flops = {dtype: rate * ranks for dtype, rate in cluster.flops.items()}
    fast = replace(cluster, flops=flops, memory_bandwidth=cluster.memory_bandwidth * ranks)
    seconds = 0.0
    for operator in graph.operators:
        fixed = problem.fixed.get(operator.id)
        sharding, machine = problem.shardings[operator.id], fast if fixed is None else cluster
        learns = operator.id in graph.returning
        seconds += operator_seconds(sharding, fixed or {}, operator, graph, problem.mesh, machine, learns)
    alone = Own(replace(problem, mesh=Mesh(()), sure=None), fast)
    for source in graph.of_kind("parameter"):
        if source.trainable and any(user.id in graph.returning for user, _ in graph.users[Ref(source.id)]):
            seconds += alone.parameter_seconds(Layout.replicated(len(source.spec.shape)), source.spec)
    return seconds
