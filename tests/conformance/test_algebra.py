"""What another system's tests assert about layouts, groups, refinements and redistribution, checked with our algebra.

A case of `algebra.json` is a list of calls with their results, or one input with its result. Every call is either
checked by a function below or belongs to a kind for which `REASONS` says why there is nothing to compare. Tensor maps
count device axes from the right, -1 is not sliced; a dim may have several axes, major to minor.
"""

import json
import math
from pathlib import Path

import pytest
import torch

from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh, accumulate, common_refinement, differences
from strategies.core.steps import intersect, size_of
from strategies.resharding.path import path_elements, resharding_path
from strategies.runtime.simulate import carry, shard

CASES = json.loads((Path(__file__).parent / "algebra.json").read_text(encoding="utf-8"))
REASONS = {
    "_get_pipeline_operator_map": "moves slices between pipeline stages when a checkpoint changes its number of "
    "stages; one plan has one stage, and stages bring their own transfer",
    "_generate_transform_operator_stack": "the order in which a checkpoint is rewritten offline, operator by operator; "
    "a chain is already in order, and every rank runs it at once",
    "_construct_from_to_tensor_layout": "puts two checkpoints with different numbers of devices on one by repeating "
    "the smaller; here the two layouts of a redistribution always have the same mesh",
}


def refined_mesh(*matrices):
    sizes = common_refinement(*matrices)
    return Mesh(tuple((f"x{i}", size) for i, size in enumerate(sizes or ())))


def layout_of(matrix, tensor_map, mesh):
    """The layout of a tensor map on a device matrix, over the refined mesh."""
    ends = accumulate([size for _, size in mesh.axes])

    def run(number):
        """The refined axes of the device axis with this number, counted from the right."""
        place = len(matrix) - 1 - number
        stop = math.prod(matrix[: place + 1])
        return [axis for axis, end in zip(mesh.names, ends, strict=True) if stop // matrix[place] < end <= stop]

    numbers = [entry if isinstance(entry, list) else [entry] for entry in tensor_map]
    return Layout(tuple(tuple(axis for number in dim if number >= 0 for axis in run(number)) for dim in numbers))


def both(source, target):
    """Mesh, layouts and shape of two (device matrix, tensor map, shape) triples."""
    mesh = refined_mesh(source[0], target[0])
    return mesh, layout_of(source[0], source[1], mesh), layout_of(target[0], target[1], mesh), tuple(source[2])


def upstream(operators, shape):
    """Elements that every rank sends in a list of operators, and the shape in which they leave a slice of `shape`."""
    sent, now = 0, list(shape)
    for name, numbers in operators:
        if name == "Reshape":
            assert math.prod(now) == math.prod(numbers)
            now = list(numbers)
        elif name == "AllConcat":
            *ranks, dim = numbers
            sent += math.prod(now) * (len(ranks) - 1)
            now[dim] *= len(ranks)
        else:
            assert name == "StridedSlice"
            begin, end = numbers[: len(now)], numbers[len(now) : 2 * len(now)]
            now = [b - a for a, b in zip(begin, end, strict=True)]
    return sent, tuple(now)


def check_chain(source, target, chains):
    """Our resharding path ends in the target layout, and sends no more than any of the recorded ones."""
    mesh, before, after, shape = both(source, target)
    steps = resharding_path(before, after, shape, mesh)
    tensor = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    for got, want in zip(*carry([steps], [shard(tensor, before, mesh)], mesh), shard(tensor, after, mesh), strict=True):
        assert torch.equal(got, want)
    for operators in chains:
        sent, ended = upstream(operators, before.local_shape(shape, mesh))
        assert path_elements(steps, mesh) <= sent
        assert ended == after.local_shape(shape, mesh)


def transform_tensor(arguments, call, _):
    source, target, _, _ = arguments
    check_chain(source, target, [call["equals"]])


def resharding_map(arguments, call, _):
    """Per rank that feeds the destination: its operators."""
    source, target, _ = arguments
    check_chain(source[:3], target[:3], call["equals"].values())


def transform_map(arguments, call, _):
    source, target, _, _ = arguments
    if "path" not in call:
        check_chain(source, target, call["equals"].values())
        return
    assert call["path"] == ".len"
    check_chain(source, target, [])
    assert len(needed(source, target, arguments[3])) == call["equals"]


def needed(source, target, rank):
    """The ranks of the lowest replicas that hold something of `rank`'s slice under the target."""
    mesh, before, after, shape = both(source, target)
    wanted, found = after.block(shape, mesh, rank), {}
    for peer in range(mesh.size):
        block = before.block(shape, mesh, peer)
        if all(stop > start for start, stop in intersect(block, wanted)) and size_of(block):
            found.setdefault(block, peer)
    return sorted(found.values())


def needed_ranks(arguments, call, _):
    """Their list is closed over the groups of their gathers; ours is what the slice itself consists of."""
    source, target, _, rank = arguments
    ours = needed(source, target, rank)
    assert set(ours) <= set(call["equals"])
    mesh, before, _, shape = both(source, target)
    groups = sorted({peer for one in ours for peer in range(mesh.size) if same_rows(before, shape, mesh, one, peer)})
    assert groups == call["equals"]


def same_rows(layout, shape, mesh, one, peer):
    """Whether two ranks hold the same shard of dim 0: gathers of the other dims collect all of these."""
    return layout.block(shape, mesh, one)[0] == layout.block(shape, mesh, peer)[0]


def first_dim_sharded(arguments, call, _):
    """The ranks that a checkpoint of a rank's first device axes consists of: a group over the last axes."""
    matrix, number, rank = arguments
    mesh = Mesh(tuple((f"x{i}", size) for i, size in enumerate(matrix)))
    assert list(mesh.group(rank, mesh.names[-number:])) == call["equals"]


def optimizer_shard(arguments, call, case):
    """A weight whose replicas keep a part each: theirs gains leading dims, ours gains replica axes on dim 0."""
    matrix, tensor_map, _, size, shape = arguments
    if call["out"]:
        return  # the three parts of one answer are checked together
    same = [other["equals"] for other in case["expected"]["calls"] if other["args"] == arguments]
    new_matrix, new_map, new_shape = same
    mesh = refined_mesh(matrix, new_matrix)
    plain, theirs = layout_of(matrix, tensor_map, mesh), layout_of(new_matrix, new_map, mesh)
    lead = len(new_shape) - len(shape) + 1
    ours = Layout((tuple(axis for dim in theirs.dims[:lead] for axis in dim), *theirs.dims[lead:]))
    kept = ours.dims[0][len(plain.dims[0]) :]
    assert ours.dims == (plain.dims[0] + kept, *plain.dims[1:])
    assert set(kept) <= set(plain.replica_axes(mesh))
    assert mesh.product(kept) == (size if size > 0 else mesh.product(plain.replica_axes(mesh)))
    if any(n % count for n, count in zip(new_shape, theirs.counts(mesh), strict=True)):
        with pytest.raises(StrategyError, match="cannot be cut"):  # recorded unchecked; 32 rows are not 64 slices
            ours.check_even(shape, mesh)
        return
    rows = (
        shape[0],
        1,
    )  # the other dims are sliced in the same way: a column of row numbers shows which rank has which rows
    column = torch.arange(shape[0]).reshape([*new_shape[:lead], 1])
    mine = shard(torch.arange(shape[0]).reshape(rows), Layout((ours.dims[0], ())), mesh)
    other = shard(column, Layout((*theirs.dims[:lead], ())), mesh)
    for got, want in zip(mine, other, strict=True):
        assert torch.equal(got.flatten(), want.flatten())


CHECKS = {
    "_transform_tensor_by_layout": transform_tensor,
    "_get_resharding_operator_map": resharding_map,
    "_get_needed_rank_transform_operator_map_by_layouts": transform_map,
    "_get_needed_rank_list_by_layouts": needed_ranks,
    "_get_param_list_when_first_dim_sharded": first_dim_sharded,
    "_construct_tensor_layout_for_opt_shard": optimizer_shard,
    "_construct_tensor_layout_for_opt_shard_by_layout": optimizer_shard,
}


def from_the_right(function):
    """The same on reversed lists: products accumulate from the last dim."""
    return lambda *lists: function(*(numbers[::-1] for numbers in lists))[::-1]


def unify(a, b):
    """Two lists of accumulated products on their common refinement."""
    return accumulate(common_refinement(differences(a), differences(b)))


SHAPES = {
    "ShapeToAccumulateProduct": accumulate,
    "ShapeToAccumulateProductReverse": from_the_right(accumulate),
    "AccumulateProductToShape": differences,
    "AccumulateProductReverseToShape": from_the_right(differences),
    "UnifyAccumulateProduct": unify,
    "UnifyShape": common_refinement,
    "ExpandAccumulateProduct": from_the_right(unify),
    "ExpandShape": from_the_right(common_refinement),
}
CHAINS = {"TestInferRedistribution1": 128 * 512, "TestInferRedistribution2": 512 * 1024 // 16 * 15}
"""Elements that the recorded names of operators send: a slice, then a gather over 2; a gather over 16."""


def kind_of(case):
    """`..._test_cc_UnifyShape_2_` -> UnifyShape."""
    return case["id"].partition("_test_cc_")[2].removeprefix("TestTensorRedistribution_").split("_")[0]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_algebra(case):
    kind, given, expected = kind_of(case), case.get("input"), case["expected"]
    if kind in SHAPES:
        assert list(SHAPES[kind](*given.values())) == expected["result"]
    elif kind in CHAINS:
        source, target = (
            (given[name]["device_matrix"], given[name]["tensor_map"], given["tensor_shape"])
            for name in ("from_layout", "to_layout")
        )
        check_chain(source, target, [])
        mesh, before, after, shape = both(source, target)
        assert path_elements(resharding_path(before, after, shape, mesh), mesh) <= CHAINS[kind]
    else:
        for call in expected["calls"]:
            if call["fn"] in CHECKS:
                CHECKS[call["fn"]](call["args"], call, case)


def test_every_case_is_checked_or_has_a_reason():
    assert len(CASES) == 49
    for case in CASES:
        if kind_of(case) in SHAPES or kind_of(case) in CHAINS:
            continue
        functions = {call["fn"] for call in case["expected"]["calls"]}
        assert functions
        assert functions <= CHECKS.keys() | REASONS.keys()
    called = {call["fn"] for case in CASES for call in case["expected"].get("calls", [])}
    assert called == CHECKS.keys() | REASONS.keys()
    assert not CHECKS.keys() & REASONS.keys()
    assert all(len(reason.split()) > 10 for reason in REASONS.values())


def test_most_cases_are_checked():
    checked = [
        case
        for case in CASES
        if {call["fn"] for call in case["expected"].get("calls", [])} - REASONS.keys() or "input" in case
    ]
    assert len(checked) == 42
