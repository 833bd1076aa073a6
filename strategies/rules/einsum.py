"""Contractions that say themselves which dims belong together: every index is a factor.

An index that the result lacks is summed over; one that the result has may have padded slices, because padding of an
index that passes meets nothing but itself. An index that one operand has twice (a diagonal) stays replicated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from strategies.core.graph import Operator, TensorSpec
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Sharding, sharding


def contraction(
    inputs: Sequence[Sequence[str]],
    output: Sequence[str],
    specs: Sequence[TensorSpec],
    operator: Operator,
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

    operands = [dims(indices, spec) for indices, spec in zip(inputs, specs, strict=True)]
    (result,) = operator.results
    return sharding(
        operands,
        [dims(output, result)],
        specs,
        operator.results,
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
    return contraction(inputs, output, specs, operator)


@rule("tensordot")
def tensordot(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """tensordot(x, y, dims of x, dims of y): the named dims are contracted in pairs."""
    left, right = ([f"{side}{i}" for i in range(len(spec.shape))] for side, spec in zip("xy", specs, strict=True))
    for a, b in zip(*operator.args[2:], strict=True):
        right[b] = left[a]
    output = [index for index in (*left, *right) if (index in left) != (index in right)]
    return contraction([left, right], output, specs, operator)


@rule("chain_matmul", "linalg_multi_dot")
def chain(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """A product of matrices; the first and the last may be vectors."""
    inputs = [[f"k{i}", f"k{i + 1}"] for i in range(len(specs))]
    inputs[0] = inputs[0][2 - len(specs[0].shape) :]
    inputs[-1] = inputs[-1][: len(specs[-1].shape)]
    first, last = (inputs[0][0] if len(inputs[0]) == 2 else ""), (inputs[-1][-1] if len(inputs[-1]) == 2 else "")
    return contraction(inputs, [index for index in (first, last) if index], specs, operator)


@rule("kron")
def kron(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [a, ...], y [b, ...] -> [a * b, ...]: every block of the result is an element of x times all of y, so the
    dims of x that are sliced slice the result."""
    x, y = (spec.shape for spec in specs)
    if len(x) < len(y):
        return None
    names = tuple(f"d{i}" for i in range(len(x)))
    sizes = dict(zip(names, x, strict=True))
    return sharding([names, (None,) * len(y)], [names], specs, operator.results, sizes=sizes)
