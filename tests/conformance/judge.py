"""What our planner and engine make of one recorded case, beside what is recorded.

A case passes if the strategies chosen, the slices of parameters and the communication between operators are the
recorded ones, if the strategy is refused for the recorded reason, or if the network is planned and lowered; and, where
it is small enough to be run on simulated ranks, if its loss and gradients are those of the network itself. A plan that
differs from the recorded one passes if it is no dearer by our own cost model; both costs are told. A strategy that is
refused there and right here differs by design, once a run has proved it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from strategies.capture import Objective, capture
from strategies.cost.estimate import GPU, seconds
from strategies.describe import communication
from strategies.engine.program import Options, Program, lower
from strategies.engine.simulate import Simulation
from strategies.errors import StrategyError
from strategies.graph import Operator, OperatorGraph, Ref
from strategies.layout import Layout
from strategies.plan import Plan
from strategies.planner import make_plan
from strategies.redistribution import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, LOCAL, REDUCE_SCATTER
from strategies.request import Request
from strategies.rules import rule_of
from tests.conformance.network import Built, Case, build, flat, name_of, request_of
from tests.conformance.operators import TABLE, Form, NotMapped, wanted
from tests.strategies.whole_model import Model

Kind = Literal["passed", "differs", "not mapped", "failed"]
RUN_RANKS = 16
"""The most ranks that are simulated."""
TOLERANCE = 1e-10
SMALLEST = 1e-6
"""Below this size differences are absolute."""
PROOF = 2**22
"""Elements of the largest tensor of a network that is run to prove that a strategy need not be refused."""

MESSAGES: Mapping[str, str] = {
    "strategy_count": r"gives \d+ operands|has no entry",
    "strategy_rank": r"has \d+ dims",
    "layout_rank": r"has \d+ dims",
    "strategy_value": r"a count is at least 1",
    "axis_split_forbidden": r"must stay whole",
    "norm_axis_split_forbidden": r"must stay whole",
    "sliced_dim_split_rule": r"must stay whole|cannot be cut",
    "pool_spatial_split_rule": r"must stay whole|cannot be cut",
    "shape_not_divisible": r"cannot be cut|must stay whole",
    "elementwise_layout_mismatch": r"same loop",
    "elementwise_mismatch": r"same loop",
    "contraction_mismatch": r"same loop",
    "too_many_devices": r"do not divide the \d+ devices|no unused axes",
    "gather_param_and_index_split_rule": r"do not divide the \d+ devices|must stay whole",
    "out_layout_rule": r"gives \d+ results|has no unused axes|cannot be cut",
    "shared_parameter_layout_conflict": r"used by two operators",
    "dataset_strategy": r"dataset_strategy",
}
"""What our message must say, by the recorded rule."""

BY_DESIGN: Mapping[str, str] = {
    "out_layout_rule": "a result may be handed on in any layout; a redistribution carries it there",
    "strategy_count": "an operand needs no entry if the other operands name all its loops",
    "gather_param_and_index_split_rule": "rows and indices are two loops of a lookup; both may be sliced",
    "sliced_dim_split_rule": "dims that are taken whole may be sliced, however the range is written",
    "axis_split_forbidden": "the rule computes this operator over slices of the dim",
    "norm_axis_split_forbidden": "the rule adds the statistics over the slices",
    "pool_spatial_split_rule": "the rule computes windows over the ends of slices",
    "shape_not_divisible": "slices need not be equal here; the last one is padded",
    "not_power_of_two": "any number of slices that fits is legal",
}

COLLECTIVES = {
    "AllReduce": {ALL_REDUCE},
    "AllGather": {ALL_GATHER, ALL_TO_ALL, EXCHANGE},
    "ReduceScatter": {REDUCE_SCATTER},
    "AlltoAll": {ALL_TO_ALL, EXCHANGE},
}


@dataclass(frozen=True)
class Verdict:
    """`ran`: on simulated ranks, equal to the network itself."""

    kind: Kind
    reason: str = ""
    ran: bool = False


class Differs(Exception):
    """Something is not as recorded; the text says what."""


def judge(case: Case, most: int) -> Verdict:
    """The verdict on one case. Networks whose tensors all have at most `most` elements are run."""
    try:
        bench = Bench(case, most)
        expected = case["expected"]
        if "error" in expected:
            return refusal(bench, expected["error"])
        plan, program = bench.lowered(bench.request)
        notes = compare(bench, plan, program)
        return Verdict("passed", "; ".join(notes), bench.run(plan))
    except NotMapped as missing:
        return Verdict("not mapped", str(missing))
    except StrategyError as error:
        return Verdict("failed", f"refused: {error}")
    except Differs as difference:
        return Verdict("failed", str(difference))


class Bench:
    """A case's network, captured; with real numbers where it is small enough to be run."""

    def __init__(self, case: Case, most: int) -> None:
        self.case = case
        self.built: Built = build(case, real=False)
        names = tuple(str(i) for i in range(len(self.built.batch)))
        objective = Objective(self.built.network, None, names, ())
        self.graph: OperatorGraph = capture(objective, self.built.batch, training=True).graph
        self.request = request_of(case, self.graph, self.built)
        context = case.get("context") or {}
        self.options = Options(sharded_optimizer=bool(context.get("enable_parallel_optimizer")))
        largest = max(spec.elements for spec in self.graph.specs.values())
        limit = max(most, PROOF) if "error" in case["expected"] else most
        self.runs = largest <= limit and self.request.world_size <= RUN_RANKS

    def lowered(self, request: Request) -> tuple[Plan, Program]:
        plan = make_plan(self.graph, request)
        return plan, lower(self.graph, plan, self.options)

    def run(self, plan: Plan) -> bool:
        """Whether the network was run; raises Differs if a gradient or the loss is not the network's own."""
        if not self.runs:
            return False
        real = build(self.case, real=True)
        model = Model(real.network, None, real.batch)
        simulation = Simulation(lower(self.graph, plan, self.options), model.values)
        (losses,) = simulation.run()
        simulation.backward(losses)
        averaged = plan.mesh.size if self.options.sharded_optimizer else 1
        gaps = {"the loss": max(relative(loss.detach(), model.loss) for loss in losses)}
        for name, found in simulation.gradients().items():
            gaps[f"the gradient of {name}"] = relative(found / averaged, model.gradients[name])
        worst = max(gaps, key=lambda name: gaps[name])
        if not gaps[worst] <= TOLERANCE:
            raise Differs(f"{worst} differs from the network's own by {gaps[worst]:.1e}")
        return True

    def operators(self, node: Mapping[str, Any]) -> tuple[Operator, ...]:
        return tuple(o for o in self.graph.operators if o.module == name_of(node))

    def cost(self, plan: Plan) -> float:
        """Microseconds of a step by our cost model."""
        program = lower(self.graph, plan)
        return 1e6 * seconds(self.graph, plan, program, communication(program, stage=0), GPU)["total"]


def relative(found: Tensor, truth: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((found - truth).abs().max() / truth.abs().max().clamp_min(SMALLEST))


def refusal(bench: Bench, error: Mapping[str, Any]) -> Verdict:
    rules = list(dict.fromkeys(trigger["rule"] for trigger in error.get("trigger") or []))
    try:
        plan, _ = bench.lowered(bench.request)
    except StrategyError as refused:
        about = "|".join(MESSAGES[rule] for rule in rules if rule in MESSAGES)
        if re.search(about, str(refused)):
            return Verdict("passed")
        return Verdict("failed", f"refused for another reason than {', '.join(rules)}: {refused}")
    text = next((BY_DESIGN[rule] for rule in rules if rule in BY_DESIGN), None)
    if text is None or not bench.run(plan):
        return Verdict("failed", f"accepted, although {', '.join(rules)} should refuse it")
    return Verdict("differs", f"{text} (run on simulated ranks: right)", True)


# what a plan says


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
    """Raises Differs; returns notes on what is right for another reason."""
    expected, notes = bench.case["expected"], []
    wrong = wrong_strategies(bench, plan, expected.get("strategies") or {})
    if wrong:
        notes.append(no_dearer(bench, plan, expected["strategies"], wrong))
    for name, shape in (expected.get("local_param_shapes") or {}).items():
        layout, whole = tensor_of(bench, plan, name)
        local = layout.local_shape(whole, plan.mesh)
        if list(local) != shape:
            raise Differs(f"parameter {name} has slices {list(local)}, not {shape}")
    for name, recorded in (expected.get("param_layouts") or {}).items():
        same_layout(bench, plan, name, recorded)
    for assertion in expected.get("graph_assertions") or []:
        if assertion["check"] in ("node_inputs_has", "node_inputs"):
            communicates(bench, program, assertion)
    return notes


def wrong_strategies(bench: Bench, plan: Plan, expected: Mapping[str, Any]) -> list[str]:
    """What differs, told; an operator type that the network does not have is not compared."""
    wrong = []
    for name, entries in by_type(expected).items():
        if name == "_VirtualDataset":
            chosen = [list(plan.inputs[s.name].counts(plan.mesh)) for s in bench.graph.of_kind("input")]
            wrong += [f"inputs {chosen}, not {recorded}" for _, recorded in entries if chosen != recorded]
            continue
        found = [parts_of(bench, plan, node, name) for node in bench.case["network"]]
        chosen = [strategy for strategy in found if strategy is not None]
        if name == "Reshape":  # has no strategy of its own there: only what it slices is compared
            chosen = [[[n for n in counts if n > 1] for counts in strategy] for strategy in chosen]
            entries = [(n, [[k for k in counts if k > 1] for counts in recorded]) for n, recorded in entries if recorded]
        if chosen and entries and not any(agree(chosen, order) for order in orders(entries, len(chosen))):
            wrong.append(f"{name} {chosen}, not {[recorded for _, recorded in entries]}")
    return wrong


def parts_of(bench: Bench, plan: Plan, node: Mapping[str, Any], name: str) -> list[list[int]] | None:
    """The strategy of the node if it is an operator `name`, or has one as a part."""
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
    """For every operator of a type what is recorded of it (None: nothing). Numbers are given there in an order of their
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


def no_dearer(bench: Bench, plan: Plan, expected: Mapping[str, Any], wrong: Sequence[str]) -> str:
    """The recorded strategies, configured (in the cheapest order that their numbers allow), cost at least as much as
    ours by our own model. Raises Differs if not."""
    costs, refused = [], ""
    for told in itertools.islice(readings(bench, expected), 64):
        strategies = dict(bench.request.strategies)
        for node in bench.case["network"]:
            if told.get(node["id"]) and bench.operators(node):
                forms = [Form(tuple(operand)) for operand in told[node["id"]]]
                strategies[bench.operators(node)[-1].name] = wanted(forms)
        try:
            theirs = make_plan(bench.graph, replace(bench.request, mode="semi_auto", strategies=strategies))
            costs.append(bench.cost(theirs))
        except StrategyError as error:
            refused = str(error)
    text = "; ".join(wrong)
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
            (i * whole // count, (i + 1) * whole // count) for i, whole, count in zip(at, shape, sizes, strict=True)
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
                raise Differs(f"no {text.partition('-')[0]} before {assertion['node']} ({', '.join(kinds) or 'nothing'})")
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
