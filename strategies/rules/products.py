"""Sums of products beyond the lines of `table`: contractions that say themselves which dims belong together, and the
grouped products of experts.

In a contraction every index is a factor. An index that the result lacks is summed over; one that the result has may
have padded slices, because padding of an index that passes meets nothing but itself. An index that one operand has
twice (a diagonal) stays replicated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.registry import local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, numbered, sharding


def contraction(
    operator: Operator, specs: Sequence[TensorSpec], inputs: Sequence[Sequence[str]], output: Sequence[str]
) -> Sharding:
    """The sharding of a sum of products whose operands carry the indices `inputs`.

    A dim of size 1 is broadcast against a larger one of the same index, and stays replicated.
    """
    sizes: dict[str, int] = {}
    for indices, spec in zip(inputs, specs, strict=False):
        for index, size in zip(indices, spec.shape, strict=True):
            sizes[index] = max(size, sizes.get(index, 1))
    blocked = {index for indices in inputs for index, count in Counter(indices).items() if count > 1}

    def dims(indices: Sequence[str], spec: TensorSpec) -> Dims:
        return tuple(
            None if index in blocked or size != sizes[index] else index
            for index, size in zip(indices, spec.shape, strict=True)
        )

    return sharding(
        operator,
        specs,
        [dims(indices, spec) for indices, spec in zip(inputs, specs, strict=True)],
        [dims(output, operator.results[0])],
        sums=[index for index in sizes if index not in blocked and index not in output],
        flops=2.0 * prod(sizes.values()),
        padded=[index for index in output if index not in blocked],
    )


def _parse(equation: str, ranks: Sequence[int]) -> tuple[list[list[str]], list[str]]:
    """The indices of every operand and of the result. The dims of an ellipsis are named ".0", ".1", ... from the left
    of the longest one."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    named = [len(term.replace("...", "")) for term in terms]
    most = max((rank - count for rank, count in zip(ranks, named, strict=True)), default=0)

    def expanded(term: str, rank: int) -> list[str]:
        before, dots, after = term.partition("...")
        skip = most - (rank - len(before) - len(after)) if dots else most
        return [*before, *(f".{i}" for i in range(skip, most)), *after]

    inputs = [expanded(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    if arrow:
        return inputs, expanded(right, most + len(right.replace("...", "")))
    counts = Counter(index for indices in inputs for index in indices)
    alone = sorted(index for index, count in counts.items() if count == 1 and not index.startswith("."))
    return inputs, [*(f".{i}" for i in range(most)), *alone]


@rule("einsum")
def einsum(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """einsum(equation, operands), with an explicit result or in the short form."""
    equation = operator.args[0]
    if not isinstance(equation, str):
        return None
    inputs, output = _parse(equation, [len(spec.shape) for spec in specs])
    return contraction(operator, specs, inputs, output)


@rule("tensordot")
def tensordot(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """tensordot(x, y, dims of x, dims of y): the named dims are contracted in pairs."""
    left, right = ([f"{side}{i}" for i in range(len(spec.shape))] for side, spec in zip("xy", specs, strict=True))
    for a, b in zip(*operator.args[2:], strict=True):
        right[b] = left[a]
    output = [index for index in (*left, *right) if (index in left) != (index in right)]
    return contraction(operator, specs, [left, right], output)


@rule("chain_matmul", "linalg_multi_dot")
def chain(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """A product of matrices; the first and the last may be vectors."""
    inputs = [[f"k{i}", f"k{i + 1}"] for i in range(len(specs))]
    inputs[0] = inputs[0][2 - len(specs[0].shape) :]
    inputs[-1] = inputs[-1][: len(specs[-1].shape)]
    return contraction(operator, specs, inputs, [*inputs[0][:-1], *inputs[-1][1:]])


@rule("kron")
def kron(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [a, ...], y [b, ...] -> [a * b, ...]: every block of the result is an element of x times all of y, so the
    dims of x that are sliced slice the result."""
    x, y = (spec.shape for spec in specs)
    if len(x) < len(y):
        return None
    names = numbered(len(x))
    sizes = {f"d{i}": size for i, size in enumerate(x)}
    return sharding(operator, specs, [names, (None,) * len(y)], [names], sizes=sizes)


@local_function
def expert_products(x: Tensor, weights: Tensor, ends: Tensor, first_row: int, first_expert: int) -> Tensor:
    """The rows of the experts in `weights`, of the rows in `x`; zeros for the other rows.

    x [t/slices, k] holds the rows from `first_row` on, weights [e/slices, k, n] the experts from `first_expert` on;
    `ends` [e] are those of all experts. Experts past the end of `ends` have no rows.
    """
    bounds = [0, *ends.tolist()][first_expert : first_expert + len(weights) + 1]
    inside = [min(max(bound - first_row, 0), len(x)) for bound in bounds]
    sizes = [inside[0], *(stop - start for start, stop in pairwise(inside)), len(x) - inside[-1]]
    before, *parts = torch.split(x, sizes)
    *own, after = parts
    products = [rows @ matrix for rows, matrix in zip(own, weights.unbind(0), strict=False)]
    columns = weights.shape[2]
    return torch.cat((x.new_zeros(len(before), columns), *products, x.new_zeros(len(after), columns)))


def _experts(operator: Operator, local: Local) -> Ref:
    if operator.op == "_grouped_mm" and local.slices("t", "k", "n", "e") == 1:
        return local.itself()
    x, weights, ends = local.args[:3] if len(local.args) > 2 else (*local.args, local.kwargs["offs"])
    first_row = local.position("t", local.operand_shape(0)[0])
    first_expert = local.position("e", local.operand_shape(1)[0])
    return local.call("local.expert_products", x, weights, ends, first_row, first_expert)


@rule("_grouped_mm", "transformers::grouped_mm_fallback")
def grouped_mm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Rows x [t, k] sorted by expert, weights [e, k, n], end offsets of each expert's rows [e] -> [t, n].

    A slice of the rows takes its part of every expert's range; a slice of the experts computes the rows of its experts
    and leaves zeros elsewhere: a partial sum. torch's product, and the one that Hugging Face models bring along (a rank
    need not know it: it always runs `expert_products`).
    """
    if [len(spec.shape) for spec in specs] != [2, 3, 1] or operator.results[0].dtype != specs[0].dtype:
        return None  # groups of columns, a bias, or a product in another dtype
    (rows, inner), columns = specs[0].shape, specs[1].shape[2]
    return sharding(
        operator,
        specs,
        [("t", "k"), ("e", "k", "n"), (None,)],
        [("t", "n")],
        sums=("k", "e"),
        local=_experts,
        flops=2.0 * rows * inner * columns,
        padded=("t", "n", "e"),
    )
