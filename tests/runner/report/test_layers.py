"""Layers of a plan: which are equivalent, which are not, and that every operator is in one."""

from __future__ import annotations

from typing import Any

import pytest

from runner.report.layers import kinds, layer_of, relative


def entry(name: str, module: str = "", op: str = "linear", layout: str = "(dp, -)", **more: Any) -> dict[str, Any]:
    costs = {"forward": 1.0, "backward": 2.0, "communication": 0.5, "gradients": 0.25}
    costs |= {"sent": 100, "parameters": 10, "results": 1000}
    return {
        "name": name,
        "module": module,
        "op": op,
        "shapes": [[8, 4]],
        "in_strategy": [[2, 1]],
        "out_strategy": [[2, 1]],
        "in_layouts": [layout],
        "out_layouts": [layout],
        "predicted": costs,
    } | more


def net(layers: int, different: int | None = None) -> list[dict[str, Any]]:
    found = [entry("tokens", "tokens", "embedding")]
    for number in range(layers):
        layout = "(-, tp)" if number == different else "(dp, -)"
        found.append(entry(f"layers.{number}.mlp.up", f"layers.{number}.mlp.up"))
        found.append(entry(f"layers.{number}@0", f"layers.{number}", "add", layout))
    return [*found, entry("relu", op="relu")]


def test_repeated_layers_are_one_kind() -> None:
    found = kinds(net(4))
    assert [(kind.name, kind.count) for kind in found] == [("tokens", 1), ("layers.[0-3]", 4), ("relu", 1)]
    assert [row.name for row in found[1].rows] == ["mlp.up", "add@0"]
    assert [len(row.members) for row in found[1].rows] == [4, 4]
    total = found[1].sums
    assert (total.compute, total.communication, total.sent) == (8 * 3.0, 8 * 0.75, 800)
    assert total.seconds == 8 * 3.75


def test_a_layer_that_is_sliced_otherwise_is_its_own_kind() -> None:
    found = kinds(net(6, different=2))
    assert [kind.name for kind in found] == ["tokens", "layers.[0-1,3-5]", "layers.2", "relu"]
    assert sum(len(instance) for kind in found for instance in kind.instances) == len(net(6))


def test_layers_of_different_lists_stay_apart() -> None:
    found = kinds(
        [entry(f"{part}.{number}", f"{part}.{number}") for part in ("encoder", "decoder") for number in (0, 1)]
    )
    assert [kind.name for kind in found] == ["encoder.[0-1]", "decoder.[0-1]"]


def test_stages_of_a_pipeline_stay_apart() -> None:
    found = kinds([entry(f"layers.{number}", f"layers.{number}", stage=number // 2) for number in range(4)])
    assert [kind.name for kind in found] == ["layers.[0-1]", "layers.[2-3]"]


@pytest.mark.parametrize(
    ("module", "name", "layer", "below"),
    [
        ("layers.3.attention.q", "layers.3.attention.q", "layers.3", "attention.q"),
        ("layers.3", "layers.3@1", "layers.3", "add@1"),
        ("layers.3.experts.7", "layers.3.experts.7", "layers.3", "experts.7"),
        ("layer1.0.conv1", "layer1.0.conv1", "layer1.0", "conv1"),
        ("head", "head", "head", "add"),
        ("", "relu@0", "relu@0", "add"),
        ("0", "0", "0", "add"),
    ],
)
def test_the_layer_of_an_operator(module: str, name: str, layer: str, below: str) -> None:
    assert layer_of(module, name) == layer
    assert relative(entry(name, module, "add")) == below


def test_operators_with_parameters_or_communication_matter() -> None:
    quiet = {"predicted": entry("a")["predicted"] | {"sent": 0, "parameters": 0}}
    (first, second) = kinds([entry("a", "a"), entry("b", "b") | quiet])
    assert first.rows[0].matters and not second.rows[0].matters
