"""Every column of the traits, for every operator with a rule, against torch itself.

The calls are those of the fuzzer's generators: random shapes, arguments and forms of call. Autograd's saved-tensor
hooks observe what torch saves; storages show which results alias operands.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from strategies.core.graph import Ref, rewrite
from strategies.rules import RULES, rule_of
from strategies.rules.random import draws
from strategies.rules.registry import resolve
from strategies.rules.traits import ROWS, TRAITS, Traits, traits
from tests.fuzz.generators import WITHOUT
from tests.strategies.rules.random_calls import OPERATORS, Call, calls

LISTS = {"gru", "lstm", "rnn_tanh", "rnn_relu"}
"""Operators whose weights are in a list: which of them are saved depends on the number of layers."""
WRITES = {"batch_norm"}
"""Operators that write running statistics, which graphs do not contain."""
UNFUSED = {"scaled_dot_product_attention"}
"""Where no fused kernel fits the call, attention saves scaled copies, and not all of them where
some have no gradient."""


@dataclass(frozen=True)
class Outcome:
    operands: list[Tensor]
    results: list[Tensor]
    saved: list[Tensor]

    @property
    def trained(self) -> bool:
        return any(result.requires_grad for result in self.results)


def differentiable(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def run(call: Call, learns: Sequence[int] = (), transposed: bool = False) -> Outcome:
    """The call on copies of its operands, of which those at `learns` require a gradient."""
    operands = [value.detach().clone().requires_grad_(i in learns) for i, value in enumerate(call.values)]
    if transposed:
        operands = [value.mT.contiguous().mT if value.dim() > 1 else value for value in operands]
    leaves = iter(operands)
    place = lambda leaf: next(leaves) if isinstance(leaf, Ref) else leaf  # noqa: E731
    args, kwargs = rewrite(call.operator.args, place), rewrite(call.operator.keywords, place)
    saved: list[Tensor] = []
    keep = lambda tensor: (saved.append(tensor), tensor)[1]  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        results = resolve(call.operator.target)(*args, **kwargs)
    return Outcome(operands, list(results) if isinstance(results, (tuple, list)) else [results], saved)


def learners(call: Call) -> Iterator[tuple[int, ...]]:
    """Each differentiable operand of the call alone, and all of them together."""
    alone = []
    for position, value in enumerate(call.values):
        if not differentiable(value):
            continue
        try:
            if run(call, [position]).trained:
                alone.append(position)
        except RuntimeError:  # no derivative with respect to this operand
            continue
    yield from ((position,) for position in alone)
    if len(alone) > 1:
        yield tuple(alone)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def aliased(outcome: Outcome) -> bool:
    own = {storage(operand) for operand in outcome.operands}
    return bool(outcome.results) and all(storage(result) in own for result in outcome.results)


def test_every_operator_with_a_rule_is_generated_or_excluded():
    own = {name for name in RULES if "::" not in name or name in WITHOUT}  # other tests register operators of libraries
    assert own - set(OPERATORS) == set(WITHOUT)


def test_an_operator_has_one_row():
    names = [name for _, row in ROWS for name in row.split()]
    assert len(names) == len(set(names)) == len(TRAITS)
    assert traits("no such operator") == Traits()


@pytest.mark.slow
def test_views_share_memory_with_their_operands():
    wrong: dict[str, str] = {}
    for name in OPERATORS:
        seen = {aliased(run(call)) for call in calls(name) if call.values}
        kind = traits(name).result
        if traits(name).view and seen != {True}:
            wrong[name] = f"{kind}, but a result has memory of its own"
        if kind == "new" and True in seen:
            wrong[name] = "new, but a result is in the memory of an operand"
    assert not wrong


def test_permutations_are_views_whatever_the_strides():
    for name in OPERATORS:
        if traits(name).result == "permutation":
            assert all(aliased(run(call, transposed=True)) for call in calls(name)), name


def parts(operand: Tensor) -> set[complex]:
    numbers = torch.view_as_real(operand).flatten() if operand.is_complex() else operand.flatten()
    return set(map(complex, numbers))


VIEWS: dict[str, Callable[[Tensor, list[Tensor]], bool]] = {
    "identity": lambda x, results: [result.shape for result in results] == [x.shape],
    "permutation": lambda x, results: sorted(results[0].shape) == sorted(x.shape),
    "reshape": lambda x, results: results[0].numel() == x.numel() and torch.equal(results[0].flatten(), x.flatten()),
    "expansion": lambda x, results: results[0].numel() >= x.numel(),
    "split": lambda x, results: sum(result.numel() for result in results) == x.numel(),
    "part": lambda x, results: all(set(map(complex, result.flatten())) <= parts(x) for result in results),
}
"""Kind of view -> whether results are one of a tensor."""


@pytest.mark.slow
def test_the_kind_of_a_view():
    """By the shapes and elements of the viewed tensor."""
    wrong: list[str] = []
    for name in OPERATORS:
        for call in calls(name):
            (operand, *_), results = call.values or (torch.empty(0),), run(call).results
            right = VIEWS.get(traits(name).result)
            if right and not right(operand, results):
                wrong.append(name)
    assert not wrong


def observed(call: Call, learn: tuple[int, ...]) -> tuple[set[str], set[str]]:
    """What torch saves, as the table names it: for sure, and perhaps, because a tensor as large is saved in place of
    it."""
    outcome = run(call, learn)
    operands = {storage(operand): f"{i}" for i, operand in enumerate(outcome.operands)}
    results = {storage(result): f"r{i}" for i, result in enumerate(outcome.results) if storage(result) not in operands}
    names = results | operands
    sure = {names[storage(tensor)] for tensor in outcome.saved if storage(tensor) in names}
    others = [tensor for tensor in outcome.saved if storage(tensor) not in names]
    largest = max((tensor.numel() for tensor in others), default=0)
    candidates = {
        *(f"{i}" for i, operand in enumerate(outcome.operands) if operand.numel() <= largest),
        *(f"r{i}" for i, result in enumerate(outcome.results) if result.numel() <= largest),
    }
    return sure, candidates


def reported(call: Call, learn: tuple[int, ...]) -> set[str]:
    row, count = traits(call.operator.op), len(call.values)
    learns = [i in learn for i in range(count)]
    return {
        *(f"{i}" for i in range(count) if row.saves_operand(i, learns)),
        *(f"r{i}" for i in range(len(call.operator.results)) if row.saves_result(i)),
    }


@pytest.mark.slow
def test_what_autograd_saves():
    """Everything that it saves is in the table, and everything in the table is saved in some call."""
    wrong: dict[str, str] = {}
    for name in OPERATORS:
        if name in LISTS | WRITES:
            continue
        unseen: set[str] | None = None
        for call in calls(name):
            for learn in learners(call):
                sure, candidates = observed(call, learn)
                says = reported(call, learn)
                if not sure <= says:
                    wrong[name] = f"saves {sorted(sure - says)} too where {learn} have gradients"
                if traits(name).certain and not (name in UNFUSED and len(learn) < 3):
                    lacking = {one for one in says - sure - candidates if not one.startswith("r")}
                    if lacking:
                        wrong[name] = f"{sorted(lacking)} are not certain where {learn} have gradients"
                rest = says - sure - candidates
                unseen = rest if unseen is None else unseen & rest
        if unseen and name not in wrong:
            wrong[name] = f"never saves {sorted(unseen)}"
    assert not wrong


def test_operators_that_backward_does_not_reread_save_no_operands():
    for name in OPERATORS:
        if not traits(name).rereads:
            for call in calls(name):
                for learn in learners(call):
                    sure, _ = observed(call, learn)
                    assert not {at for at in sure if differentiable(call.values[int(at)])}, name


def test_equal_operators_return_their_operand_and_its_gradient():
    """`lift_fresh`, of constants in exported graphs, is generated nowhere."""
    equal = {name for name, row in TRAITS.items() if row.equal}
    assert equal - set(OPERATORS) == {"lift_fresh"}
    for call in (call for name in equal - {"lift_fresh"} for call in calls(name)):
        for learn in ((), *learners(call)):
            outcome = run(call, learn)
            ((operand,), (result,)) = outcome.operands, outcome.results
            assert torch.equal(operand, result) and operand.dtype == result.dtype
            if learn:
                weights = torch.rand_like(result)
                assert torch.equal(torch.autograd.grad(result, operand, weights)[0], weights)


def test_sums_leave_partial_results():
    for name in OPERATORS:
        if traits(name).sums:
            assert any(rule_of(call.operator, call.graph).sums for call in calls(name)), name


def test_sizes_are_arguments():
    """As integers that torch allows to be symbolic."""
    for name in OPERATORS:
        if traits(name).sized:
            schemas = [resolve(call.operator.target)._schema for call in calls(name)]
            assert all("SymInt" in str(schema) for schema in schemas), name


def test_random_operators_read_the_generator():
    for name in OPERATORS:
        row = traits(name)
        if row.fills or row.draws_rows:
            overloads = [resolve(call.operator.target) for call in calls(name)]
            assert all(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads), name
        if row.fills:
            for call in calls(name):
                shape = torch.broadcast_shapes(*(value.shape for value in call.values))
                assert run(call).results[0].shape == shape, name


def repeats(call: Call) -> bool:
    first, second = run(call).results, run(call).results
    return all(torch.equal(a, b) or bool((a != a).any()) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_operators_without_random_numbers_are_deterministic():
    for name in OPERATORS:
        if not name.startswith(("empty", "new_empty")):
            assert all(repeats(call) for call in calls(name)[:3] if not draws(call.operator)), name


def test_flops_are_those_of_torch():
    """For the operators that torch's counter supports. For chained products it counts the cheapest order."""
    counted: set[str] = set()
    wrong: dict[str, Any] = {}
    for name in OPERATORS:
        if not traits(name).sums and traits(name).backward_products is None:
            continue
        for call in calls(name)[:4]:
            with FlopCounterMode(display=False) as counter:
                run(call)
            total, rule = counter.get_total_flops(), rule_of(call.operator, call.graph)
            if total and rule.known:
                counted.add(name)
                exact = len(call.values) < 3 or not all(value.dim() == 2 for value in call.values)
                if rule.flops < total or (exact and rule.flops > total):
                    wrong[name] = (rule.flops, total, [tuple(value.shape) for value in call.values])
    assert not wrong
    assert counted >= {"mm", "linear", "bmm", "baddbmm", "matmul", "einsum", "conv1d", "conv2d", "conv3d"}


def test_flops_of_a_fused_backward_are_those_of_torch():
    fused = {name: row.backward_products for name, row in TRAITS.items() if row.backward_products is not None}
    shape = (2, 3, 8, 16)
    backward, forward = sdpa_backward_flop_count(shape, shape, shape, shape), sdpa_flop_count(shape, shape, shape)
    assert fused == {"scaled_dot_product_attention": backward / forward}
