"""A scheduler's state under another plan, which may have other parameter groups; it keeps lists with one entry each.

Invariant: a group of parameters goes on with the entries of the group in which its parameters were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
"""Entries of the states of torch's schedulers that have one element per group."""


def regrouped(parts: Sequence[Mapping[str, Any]], members: Sequence[Sequence[str]]) -> dict[str, Any]:
    """The scheduler's state for groups with the given `members`. `parts` have "groups" (each with "names") and
    "scheduler", and are of the groups of a pipeline; what is not per group is the same in all of them."""
    places = [
        next(
            ((part, number) for part in parts for number, group in enumerate(part["groups"])
             if set(names) & set(group["names"])),
            None,
        )
        for names in members
    ]  # fmt: skip
    first: dict[str, Any] = parts[0]["scheduler"]
    if any(place is None for place in places):
        return first
    held = [(part["scheduler"], number) for part, number in (place for place in places if place is not None)]
    return _state(first, held)


def _state(like: Mapping[str, Any], held: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in like.items():
        if key in PER_GROUP and isinstance(value, list):
            found[key] = [state[key][number] for state, number in held]
        elif key == "_schedulers":
            found[key] = [
                _state(one, [(state[key][place], number) for state, number in held]) for place, one in enumerate(value)
            ]
        else:
            found[key] = value
    return found
