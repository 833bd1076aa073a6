"""A plan as a file of torch's own styles of modules, for `parallelize_module`: the plan, in front of the functions of
`plain_styles`.

Styles slice linear layers and tables over one axis, and hand on local tensors; the rows of the batch are up to the
loop. Source: torch.distributed.tensor.parallel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from runner.export.changes import Change, of_optimizer
from runner.export.tensor_parallel import of_rows, of_styles, styles_of, with_tied
from runner.export.torch_program import filled
from runner.planning.prepare import Prepared
from strategies.planner.module_styles import OF_TORCH, axes_of, numberless

SKELETON = Path(__file__).with_name("plain_styles.py")
COLUMNS, ROWS = "ColwiseParallel({})", "RowwiseParallel({})"
WORDS = {
    "colwise": COLUMNS.format(""),
    "colwise_gather_output": COLUMNS.format("output_layouts=Replicate()"),
    "embedding_colwise": COLUMNS.format("output_layouts=Replicate()"),
    "embedding_rowwise": ROWS.format("input_layouts=Replicate()"),
    "rowwise": ROWS.format(""),
    "rowwise_split_input": ROWS.format("input_layouts=Replicate()"),
}
"""The styles of transformers in torch's words."""
SUMMED = "replicated_with_grad_allreduce"


def changes(prepared: Prepared) -> list[Change]:
    """What the file lays out otherwise."""
    assert prepared.plan is not None
    copies = prepared.plan.mesh.others(axes_of(prepared.plan))
    of_zero = of_optimizer(prepared, {0, 3}, copies)
    return [*of_styles(prepared, OF_TORCH), *of_rows(prepared), *_of_sums(prepared), *of_zero]


def _of_sums(prepared: Prepared) -> Iterator[Change]:
    """Parameters whose gradients the ranks of tp add up, which `fully_shard` takes before."""
    if prepared.config.parallel.zero.known == 3:
        for path in _summed(prepared, _styles(prepared)):
            yield Change("operator", path, "gradients added up over tp", "gradients of a rank's slices", 0, 0.0)


def _styles(prepared: Prepared) -> dict[str, str]:
    """The styles of modules by globs."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    axes = axes_of(plan)
    return with_tied(styles_of(graph, plan, OF_TORCH, axes), graph) if axes else {}


def _summed(prepared: Prepared, styles: Mapping[str, str]) -> list[str]:
    """The globs of modules whose parameters the ranks of tp use for slices; a module may have buffers alone."""
    assert prepared.graph is not None
    trained = (source.name for source in prepared.graph.of_kind("parameter") if source.trainable)
    modules = {numberless(name.rpartition(".")[0]) for name in trained}
    return [path for path, style in styles.items() if style == SUMMED and path in modules]


def program(prepared: Prepared, title: str) -> str:
    """The file."""
    plan, styles = prepared.plan, _styles(prepared)
    assert plan is not None
    sliced = plan.mesh.product(axes_of(plan))
    entries = [f'    "{path}": {WORDS[style]},' for path, style in styles.items() if style in WORDS]
    summed = tuple(f"{path}.*" for path in _summed(prepared, styles))
    tables = (
        f'MESH: dict[str, int] = {{"dp": {plan.mesh.size // sliced}, "tp": {sliced}}}',
        "\n".join(["PLAN: dict[str, ParallelStyle] = {", *entries, "}"]),
        f"SUMMED: tuple[str, ...] = {summed!r}".replace("'", '"'),
        f"SHARDED = {prepared.config.parallel.zero.known == 3}",
    )
    return filled(SKELETON, '"""A plan of Meshwright', f'"""{title},', tables)
