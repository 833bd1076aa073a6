"""Compares a plan with the recorded case: strategies, parameter shards, communication between operators."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from strategies.core.errors import StrategyError
from strategies.core.graph import Operator, Ref
from strategies.core.layout import Layout
from strategies.core.plan import Plan
from strategies.core.program import Program
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, LOCAL, REDUCE_SCATTER
from strategies.planner.planner import make_plan
from strategies.rules import rule_of
from tests.conformance.bench import Bench, Differs
from tests.conformance.forms import Form, NotMapped, wanted
from tests.conformance.network import flat
from tests.conformance.operators import TABLE

COLLECTIVES = {
    "AllReduce": {ALL_REDUCE},
    "AllGather": {ALL_GATHER, ALL_TO_ALL, EXCHANGE},
    "ReduceScatter": {REDUCE_SCATTER},
    "AlltoAll": {ALL_TO_ALL, EXCHANGE},
}


def counts_of(bench: Bench, plan: Plan, operator: Operator) -> list[tuple[int, ...]]:
    layouts = rule_of(operator, bench.graph).operand_layouts(plan.operators[operator.name].assignment)
    return [layout.counts(plan.mesh) for layout in layouts]


def strategy_of(bench: Bench, plan: Plan, node: Mapping[str, Any]) -> list[list[int]]:
    """The slices of a node's operands as they are recorded."""
    operators = bench.operators(node)
    if not operators:
        raise NotMapped(f"{node['op']} as an operator (torch does not compute anything there)")
    return TABLE[node["op"]].read([counts_of(bench, plan, operator) for operator in operators])


def compare(bench: Bench, plan: Plan, program: Program) -> list[str]:
    """Raises Differs on a mismatch; returns notes on values that agree for another reason."""
    expected, notes = bench.case["expected"], []
    wrong = wrong_strategies(bench, plan, expected.get("strategies") or {})
    if wrong:
        notes.append(no_dearer(bench, plan, expected["strategies"], wrong))
    for name, shape in (expected.get("local_param_shapes") or {}).items():
        layout, global_shape = tensor_of(bench, plan, name)
        local = layout.local_shape(global_shape, plan.mesh)
        if list(local) != shape:
            raise Differs(f"parameter {name} has slices {list(local)}, not {shape}")
    for name, recorded in (expected.get("param_layouts") or {}).items():
        same_layout(bench, plan, name, recorded)
    for assertion in expected.get("graph_assertions") or []:
        if assertion["check"] in ("node_inputs_has", "node_inputs"):
            communicates(bench, program, assertion)
    return notes


def wrong_strategies(bench: Bench, plan: Plan, expected: Mapping[str, Any]) -> dict[str, str]:
    """The differences by operator type; a type that the network does not have is not compared."""
    wrong: dict[str, str] = {}
    for name, entries in by_type(expected).items():
        if name == "_VirtualDataset":
            chosen = [list(plan.inputs[s.name].counts(plan.mesh)) for s in bench.graph.of_kind("input")]
            if any(chosen != recorded for _, recorded in entries):
                wrong[name] = f"inputs {chosen}, not {entries[0][1]}"
            continue
        found = [parts_of(bench, plan, node, name) for node in bench.case["network"]]
        chosen = [strategy for strategy in found if strategy is not None]
        if name == "Reshape":  # has no strategy there: only what it slices is compared
            chosen = [[[n for n in counts if n > 1] for counts in strategy] for strategy in chosen]
            entries = [(n, [[k for k in counts if k > 1] for counts in given]) for n, given in entries if given]
        if chosen and entries and not any(agree(chosen, order) for order in orders(entries, len(chosen))):
            wrong[name] = f"{name} {chosen}, not {[recorded for _, recorded in entries]}"
    return wrong


def parts_of(bench: Bench, plan: Plan, node: Mapping[str, Any], name: str) -> list[list[int]] | None:
    """The strategy of the node if it is an operator `name` or contains one."""
    if node["op"] == name:
        return strategy_of(bench, plan, node)
    if node["op"] == f"nn.{name}" or (node["op"].startswith("nn.Softmax") and name == "OneHot"):
        kind = "where" if name == "OneHot" else "cross_entropy_loss"
        for operator in bench.operators(node):
            if operator.op == kind:
                counts = [list(operand) for operand in counts_of(bench, plan, operator)]
                return [counts[0], [], []] if name == "OneHot" else counts
    return None


def orders(entries: Sequence[tuple[int | None, Any]], count: int) -> list[list[Any]]:
    """The record of every operator of a type (None: nothing). Numbers are given there in an order of their
    own, so both directions count, and any choice of the operators; without a number all are meant."""
    if any(number is None for number, _ in entries):
        return [[recorded] * count for _, recorded in entries]
    ordered = [recorded for _, recorded in sorted(entries, key=lambda entry: entry[0] or 0)]
    found = []
    for places in itertools.combinations(range(count), min(len(ordered), count)):
        for direction in (ordered, ordered[::-1]):
            at = dict(zip(places, direction, strict=False))
            found.append([at.get(i) for i in range(count)])
    return found


def agree(chosen: Sequence[Any], recorded: Sequence[Any]) -> bool:
    return all(want is None or plain(have) == plain(want) for have, want in zip(chosen, recorded, strict=True))


def plain(strategy: Sequence[Sequence[int]]) -> list[list[int]]:
    """Without the entries of numbers."""
    return [list(operand) for operand in strategy if operand]


def no_dearer(bench: Bench, plan: Plan, expected: Mapping[str, Any], wrong: Mapping[str, str]) -> str:
    """The recorded strategies, configured (in the cheapest order that their numbers allow), cost at least as much as
    ours by our own model. Raises Differs if not."""
    text = "; ".join(wrong.values())
    free = {node["op"] for node in bench.case["network"] if not node.get("in_strategy")}
    if not wrong.keys() <= free:  # these were configured, not searched
        raise Differs(text)
    costs, refused = [], ""
    for strategies in itertools.islice(readings(bench, expected), 64):
        strategies = dict(bench.request.strategies)
        for node in bench.case["network"]:
            if strategies.get(node["id"]) and bench.operators(node):
                forms = [Form(tuple(operand)) for operand in strategies[node["id"]]]
                strategies[bench.operators(node)[-1].name] = wanted(forms)
        try:
            theirs = make_plan(
                bench.graph, replace(bench.request, mode="semi_auto", strategies=strategies), bench.machine
            )
            costs.append(bench.cost(theirs))
        except StrategyError as error:
            refused = str(error)
    if not costs:
        raise Differs(f"{text}; as strategies: {refused}")
    ours = bench.cost(plan)
    if ours > min(costs) * (1 + 1e-9):
        raise Differs(f"{text}; ours costs {ours:.4g} us, the recorded plan {min(costs):.4g} us")
    return f"{text}: ours costs {ours:.4g} us, the recorded plan {min(costs):.4g} us"


def readings(bench: Bench, expected: Mapping[str, Any]) -> Iterator[dict[int, Any]]:
    """What the recorded strategies may say of each node that has none: one dict per order of their numbers."""
    choices = []
    for name, entries in by_type(expected).items():
        nodes = [node["id"] for node in bench.case["network"] if node["op"] == name and not node.get("in_strategy")]
        if nodes:
            choices.append([dict(zip(nodes, order, strict=True)) for order in orders(entries, len(nodes))])
    for chosen in itertools.product(*choices):
        yield {node: recorded for part in chosen for node, recorded in part.items()}


def by_type(expected: Mapping[str, Any]) -> dict[str, list[tuple[int | None, Any]]]:
    """`Default/network-Net/MatMul-op2` is number 2 of the type MatMul; without a number all are meant."""
    found: dict[str, list[tuple[int | None, Any]]] = {}
    for pattern, recorded in expected.items():
        name, _, number = pattern.rpartition("/")[2].partition("-op")
        found.setdefault(name, []).append((int(number) if number else None, recorded))
    return found


def tensor_of(bench: Bench, plan: Plan, name: str) -> tuple[Layout, tuple[int, ...]]:
    """Layout and shape of a parameter by the end of its recorded name; of the first if there is none of that name."""
    short = name.rpartition(".")[2]
    parameters = [s for s in bench.graph.of_kind("parameter") if not s.name.endswith("gain")]
    for source in parameters:
        if source.name.rpartition(".")[2] == short:
            return plan.tensors[source.name], source.spec.shape
    if not parameters or name.count(".") == 0:
        raise Differs(f"there is no parameter {name}")
    return plan.tensors[parameters[0].name], parameters[0].spec.shape


def same_layout(bench: Bench, plan: Plan, name: str, recorded: Mapping[str, Any]) -> None:
    """Every rank holds the recorded block. A name that is no parameter is an input, in order."""
    matrix, tensor_map = recorded["device_matrix"], recorded["tensor_map"]
    names = {s.name.rpartition(".")[2] for s in bench.graph.of_kind("parameter")}
    if name.rpartition(".")[2] not in names and "." not in name:
        source = bench.graph.of_kind("input")[0]
        layout, shape = plan.inputs[source.name], source.spec.shape
    else:
        layout, shape = tensor_of(bench, plan, name)
    for rank in range(plan.mesh.size):
        place, left = [], rank
        for size in reversed(matrix):
            left, index = divmod(left, size)
            place.append(index)  # counted from the right, as the map does
        sizes = [matrix[::-1][axis] if axis >= 0 else 1 for axis in tensor_map]
        at = [place[axis] if axis >= 0 else 0 for axis in tensor_map]
        block = tuple(
            (i * size // count, (i + 1) * size // count) for i, size, count in zip(at, shape, sizes, strict=True)
        )
        if layout.block(shape, plan.mesh, rank) != block:
            have = layout.block(shape, plan.mesh, rank)
            raise Differs(f"rank {rank} holds {have} of {name}, not {block}")


def communicates(bench: Bench, program: Program, assertion: Mapping[str, Any]) -> None:
    """A collective that is recorded before an operator is there, and none between operators that are neighbours."""
    node = numbered(bench, assertion["node"])
    if node is None:
        return
    names = {operator.name for operator in bench.operators(node)}
    before = [r for r in program.redistributions if r.operator in names and r.operand >= 0]
    kinds = {step.kind for r in before for step in r.forward}
    for text in assertion["inputs"]:
        if not isinstance(text, str):
            continue
        collective = COLLECTIVES.get(text.partition("-")[0])
        if collective is not None:
            if not kinds & collective:
                found = ", ".join(sorted(kinds)) or "nothing is sent"
                raise Differs(f"no {text.partition('-')[0]} before {assertion['node']} ({found})")
            continue
        feeding = numbered(bench, text if "-" in text else f"{text}-0")
        if feeding is not None and any("node" in item and item["node"] == feeding["id"] for item in flat(node["in"])):
            results = {Ref(o.id, i) for o in bench.operators(feeding) for i in range(len(o.results))}
            operators = [bench.graph.by_name[name] for name in names]
            direct = {(o.name, i) for o in operators for i, ref in enumerate(o.operands) if ref in results}
            sent = [r for r in before if (r.operator, r.operand) in direct]
            if any(step.kind not in LOCAL for r in sent for step in r.forward):
                raise Differs(f"something is sent between {text} and {assertion['node']}")


def numbered(bench: Bench, text: str) -> Mapping[str, Any] | None:
    """`Add-0` is the first node of that type."""
    name, _, number = text.partition("-")
    nodes = [node for node in bench.case["network"] if node["op"] == name]
    return nodes[int(number)] if number.isdigit() and int(number) < len(nodes) else None
