"""What every plan is sure to cost: the prices of a search without what overlap may hide and joined calls may save.

A step costs less than the sum of its parts where a redistribution runs beside computing, where several become one call,
and where gradients are added during backward. So a search whose prices leave out as much as that can be bounds the cost
of every plan from below. Two sets of prices do; neither is always the better one:

* `apart`: some redistributions cost what they cost, all others nothing, and nor does an operator that can run beside
  one of the former: one that neither makes the value nor needs what its user makes. For these are sent one after the
  other, and what is computed meanwhile is left out. Of calls that are joined at most one is among them: the value of
  another would be made beside it.
* `shared`: every redistribution costs the share of its time that cannot be hidden, without what a call takes whatever
  it carries.

Of adding gradients either a share can be hidden, or as much as backward takes: every mixture of both is a bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from strategies.core.graph import Operator, Ref
from strategies.core.mesh import Mesh
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.roofline import operator_work
from strategies.search.own import Own
from strategies.search.problem import Problem, Sure

SHARE, BACKWARD = 1.0, 0.0
"""Mixtures of what hides adding gradients: only the share of it, only backward."""
LITTLE, MOST = 0.02, 64
"""Of all work of the graph: what operators may have that are left out of a bound; and how many for one value."""
ALMOST = 1e-3
"""Of a cost: a bound that is so near is good enough."""


@dataclass(frozen=True)
class Relaxed:
    """A problem and a cluster for an exact search whose bound, times the turns of a step, with `more` seconds is one of
    a step."""

    problem: Problem
    cluster: Cluster
    more: float


@dataclass(frozen=True)
class Running:
    """How a step runs, as far as it may cost less than its parts: redistributions `beside` computing, some `joined`,
    gradients added in calls of at most `bucket` bytes (None: as many as are chosen, 0: any number); and the seconds
    that are the same for every plan (`constant`)."""

    beside: bool = True
    joined: bool = True
    bucket: int | None = None
    moved: float | None = None
    """Bytes that the optimizer reads and writes for an element; None: as the problem has it."""
    constant: float = 0.0


def apart(problem: Problem, cluster: Cluster, running: Running, mixture: float, parted: Parted) -> Relaxed:
    """See above."""
    made = _sure(problem, cluster, running, mixture, parted.sent, parted.free)
    # copies may hide behind other calls
    return Relaxed(made, replace(cluster, launch=1e-12, memory_bandwidth=1e30), -(1 - mixture) * parted.backward)


def shared(problem: Problem, cluster: Cluster, running: Running, mixture: float) -> Relaxed:
    """See above."""
    left = 1 - cluster.overlap * running.beside

    def link(one: Link) -> Link:
        calls = 0.0 if running.joined else left
        return Link(one.bandwidth / max(left, 1e-9), one.latency * calls, one.call * calls)

    def level(one: Level) -> Level:
        return replace(one, link=link(one.link), kinds={kind: link(own) for kind, own in one.kinds.items()})

    relaxed = replace(cluster, levels=tuple(map(level, cluster.levels)))
    return Relaxed(_sure(problem, cluster, running, mixture, None, frozenset()), relaxed, 0.0)


def _sure(
    problem: Problem,
    cluster: Cluster,
    running: Running,
    mixture: float,
    sent: frozenset[Ref] | None,
    free: frozenset[str],
) -> Problem:
    hidden = cluster.overlap * mixture if problem.overlaps else 0.0
    beside = (1 - mixture) / problem.turns if problem.overlaps and problem.stage == 0 else 0.0
    sure = Sure(cluster, sent, free, 1 - beside, 1 - hidden, running.bucket)
    moved = problem.moved if running.moved is None else running.moved
    return replace(problem, sure=sure, moved=moved)


@dataclass(frozen=True)
class Parted:
    """Values whose redistribution is priced, the operators (by id) that can run beside one of those, and the seconds of
    backward of these at most."""

    sent: frozenset[Ref]
    free: frozenset[str]
    backward: float


def parted(problem: Problem, cluster: Cluster) -> Parted:
    """What `apart` needs. Values come in the order of what can run beside them; from `LITTLE` on none is. One
    result of an operator and one batch entry at most are among them, and nothing that a `free` operator makes."""
    graph, whole = problem.graph, Mesh((("alone", 1),))
    place = {operator.id: number for number, operator in enumerate(graph.operators)}
    works = [
        operator_work(problem.shardings[operator.id], {}, operator, graph, whole, cluster)
        for operator in graph.operators
    ]
    every, before, after = (1 << len(place)) - 1, [0] * len(place), [0] * len(place)
    for number, operator in enumerate(graph.operators):
        before[number] = 1 << number
        for ref in operator.operands:
            if ref.id in place:
                before[number] |= before[place[ref.id]]
    for number in reversed(range(len(graph.operators))):
        after[number] |= 1 << number
        for ref in graph.operators[number].operands:
            if ref.id in place:
                after[place[ref.id]] |= after[number]

    def weight(some: int) -> float:
        found = 0.0
        while some:
            last = some.bit_length() - 1
            found += works[last].forward + works[last].backward
            some ^= 1 << last
        return found

    own, limit, windows = Own(problem, cluster), LITTLE * weight(every), []
    known: dict[tuple[int, tuple[int, ...]], bool] = {}

    def waits(user: Operator, ref: Ref) -> bool:
        places = tuple([at for at, other in enumerate(user.operands) if other == ref])
        key = graph.looks[user.id], places
        if key not in known:
            known[key] = own.waits(user, ref)
        return known[key]

    for ref, users in graph.users.items():
        if len(users) != 1 or (ref.id not in place and graph.by_id[ref.id].kind != "input"):  # type: ignore[union-attr]
            continue
        user = users[0][0]
        window = every & ~(before[place[ref.id]] if ref.id in place else 0) & ~after[place[user.id]]
        if window.bit_count() <= MOST and (seconds := weight(window)) <= limit and waits(user, ref):
            windows.append((seconds, ref, window))
    sent: list[Ref] = []
    free = made = 0
    for _, ref, window in sorted(windows, key=lambda one: one[0]):
        mine = 1 << place[ref.id] if ref.id in place else 0
        if ref.id in place:
            twice = bool(mine & made)
        else:
            twice = any(other.id not in place for other in sent)
        if twice or (window | free) & (made | mine) or weight(window | free) > limit:
            continue
        sent, free, made = [*sent, ref], free | window, made | mine
    ids = [operator.id for operator in graph.operators if free >> place[operator.id] & 1]
    return Parted(frozenset(sent), frozenset(ids), sum(works[place[id]].backward for id in ids))
