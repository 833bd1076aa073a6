"""A plan as the placements file of AutoParallel: the placements of parameters, buffers and the entries of a batch.

The format is that of `save_placements` (autoparallel.serialization): the mesh, and by the name of a node `output` and
`inputs`, each a placement per mesh axis (`RS(0)`). Nodes are those that every joint graph of torch has for a model,
`primals_1` and so on. AutoParallel decomposes operators, and its `load_placements` refuses names that its graph lacks,
so the file has none of the plan's: its optimizer places operators between what the file says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.errors import ConfigError
from runner.export.torch_program import placed, replicas
from runner.planning.prepare import Prepared
from strategies.core.graph import OperatorGraph, Source
from strategies.core.layout import Layout
from strategies.core.plan import Plan

ONE = re.compile(r"R|_?S\((\d+)(?:, *\d+)?\)|P(?:\(\w+\))?")
"""A placement as torch prints it; a slice with its dim."""


def content(prepared: Prepared, title: str) -> str:
    """The JSON."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    nodes: dict[str, dict[str, Any]] = {}
    for number, source in enumerate(primals(graph, prepared.names, prepared.targets), 1):
        if source is None:
            continue
        layout = (plan.inputs if source.kind == "input" else plan.tensors)[source.name]
        if source.kind == "parameter" and prepared.config.parallel.zero.known == 3:
            layout = _sliced(layout, source, graph, plan)
        text = "".join(map(str, placed(prepared, layout, source.spec)))
        nodes[f"primals_{number}"] = {"output": text, "inputs": [text]}
    names, sizes = zip(*plan.mesh.axes, strict=True)
    return (
        json.dumps({"version": 1, "mesh_shape": sizes, "mesh_dim_names": names, "placements": nodes}, indent=2) + "\n"
    )


def primals(graph: OperatorGraph, names: Sequence[str], targets: Iterable[str]) -> list[Source | None]:
    """What a joint graph of the model takes: its parameters, buffers, and the entries of a batch without targets; None
    for what no operator uses."""
    entries, known = ({s.name: s for s in graph.sources if (s.kind == "input") is fed} for fed in (True, False))
    own = [known.get(name) for name in graph.parameter_order]
    buffers = [source for source in own if source is not None and source.kind == "buffer"]
    inputs = [entries.get(name) for name in names if name not in {*targets}]
    return [*(source for source in own if source not in buffers), *buffers, *inputs]


def read(file: Path) -> tuple[dict[str, int], dict[str, Layout], frozenset[str]]:
    """The mesh of a placements file, the layout of every node's result that is one tensor, and the nodes of which a
    rank has a slice of every section.

    Raises:
        ConfigError: the file cannot be read, or is none.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        sizes: Sequence[int] = content["mesh_shape"]
        names = content["mesh_dim_names"] or [f"d{number}" for number in range(len(sizes))]
        nodes: Mapping[str, Any] = content["placements"]
        layouts = {name: _layout(entry["output"], names) for name, entry in nodes.items()}
        if content["version"] != 1 or len(sizes) != len(names):
            raise ValueError(f"version {content['version']}, {len(sizes)} sizes and {len(names)} names of axes")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "MW884",
            f"meshwright.from_autoparallel: {str(file)!r} is no placements file ({type(error).__name__}: {error}); "
            "give one that AutoParallel's save_placements or `run export autoparallel` has written.",
        ) from error
    found = {name: one for name, one in layouts.items() if one is not None}
    striped = frozenset(name for name in found if "_S" in nodes[name]["output"])
    return dict(zip(names, sizes, strict=True)), found, striped


def _layout(text: str, names: Sequence[str]) -> Layout | None:
    """The layout of a result; None for several. As many dims as are sliced. Raises ValueError for another text."""
    if text.startswith("(") or text == "None":
        return None
    words = list(ONE.finditer(text))
    if "".join(word.group() for word in words) != text or len(words) != len(names):
        raise ValueError(f"{text!r} is no placement on {len(names)} axes")
    dims: list[tuple[str, ...]] = []
    for axis, word in zip(names, words, strict=True):
        if word.group(1) is not None:
            dims += [()] * (int(word.group(1)) + 1 - len(dims))
            dims[int(word.group(1))] += (axis,)
    return Layout(tuple(dims))


def _sliced(layout: Layout, source: Source, graph: OperatorGraph, plan: Plan) -> Layout:
    """The layout of a parameter under ZeRO 3: also sliced over replicas, along the first dim that they divide."""
    over = replicas(graph, plan)
    for dim, size in enumerate(source.spec.shape):
        axes = plan.mesh.sorted((*layout.dims[dim], *over))
        if size % plan.mesh.product(axes) == 0:
            return Layout((*layout.dims[:dim], axes, *layout.dims[dim + 1 :]))
    return layout
