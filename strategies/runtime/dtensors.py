"""Layouts as placements of torch's DTensor.

DTensor slices a tensor once per mesh axis, from the first axis to the last, and keeps no padding; `_StridedShard` says
that an axis slices what later ones have sliced. A dim that several axes slice into unequal parts is no DTensor. Stripes
of sections of one size over one axis are `_StridedShard`, too, which torch.distributed.checkpoint (torch 2.13) takes
for one block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.core.experts import GROUPED
from strategies.core.graph import Operator, OperatorGraph, Ref, rewrite
from strategies.core.layout import Layout, Stripes, indices
from strategies.core.mesh import Mesh
from strategies.rules.registry import resolve

GATHERED: dict[str, tuple[int | str, ...]] = {
    "scaled_dot_product_attention": (-2,),
    "cross_entropy_loss": (1,),
    "conv1d": (-1,),
    "conv2d": (-2, -1),
    "conv3d": (-3, -2, -1),
    "rms_norm": (-1,),
    **{name.rpartition("::")[2]: ("rows",) for name in GROUPED},
    **dict.fromkeys(("chunk", "glu", "narrow", "slice", "split", "split_with_sizes"), ("part",)),
    **dict.fromkeys(("quantile", "nanquantile", "mvlgamma", "fft_ihfft", "select_scatter", "slice_scatter"), ("all",)),
    **dict.fromkeys(("linalg_householder_product", "linalg_ldl_solve", "linalg_solve_triangular"), ("all",)),
    **dict.fromkeys(("__lshift__", "__rshift__", "bitwise_left_shift", "bitwise_right_shift"), ("all",)),
}
"""Dims that the plan may slice and DTensor replicates, by operator; see `unsliced_dims`. Rows are sorted by expert
there, and DTensor sorts them complete. Exported programs compute those of `all` on complete tensors, since DTensor
computes them wrongly."""
FAULTY = ("aten.native_group_norm_backward.default",)
"""Operators that DTensor (torch 2.13) takes apart with sizes that are not those of a slice."""
WRITTEN_OUT = "batch_norm", "batch_norm_training"
"""Operators that exported programs compute by sums and products."""
OPAQUE = ("called_module", "drawn_function", "meshwright::packed_network", "meshwright::ctc")
"""Operators that run code of the user, or what of torch makes as many elements as values say."""


def gathered(graph: OperatorGraph, device: str) -> Mapping[str, tuple[int | str, ...]]:
    """Dims that DTensor replicates, by label of an operator: those of `GATHERED`, and all of what it does not know."""
    return GATHERED | dict.fromkeys(unknown(graph, device), ("all",))


def unknown(graph: OperatorGraph, device: str) -> dict[str, frozenset[str]]:
    """What DTensor has no rule for: the names of torch's operators, by the label of the operator of a graph that calls
    them, forward or backward.

    Args:
        graph: of a step of training.
        device: the type of the devices that run it.
    """
    found: dict[str, frozenset[str]] = {}
    tried: set[object] = set()
    for operator in graph.operators:
        specs = graph.operand_specs(operator)
        trained = [ref in graph.trained for ref in operator.operands]
        call = operator.target, *trained, *((one.shape, one.dtype) for one in specs)
        if operator.op in (*OPAQUE, *GROUPED, *WRITTEN_OUT) or call in tried:
            continue
        tried.add(call)
        names: set[str] = set()
        with FakeTensorMode(allow_non_fake_inputs=True), attention_of(device), _Unknown() as mode:
            values = {
                ref: torch.empty(one.shape, dtype=getattr(torch, one.dtype), device=device).requires_grad_(learns)
                for ref, one, learns in zip(operator.operands, specs, trained, strict=True)
            }
            try:
                _call(operator, values)
            except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
                names.add(str(error.func))  # DTensor needs the shape of a result, too
        names |= {str(func) for func, *given in mode.calls if not _decomposed(func, *given)}
        if names:
            found[operator.label] = found.get(operator.label, frozenset()) | names
    return found


def attention_of(device: str) -> AbstractContextManager[None]:
    """Attention made of products where torch has no sharded kernel: on CPUs."""
    return sdpa_kernel(SDPBackend.MATH) if device == "cpu" else nullcontext()


def _call(operator: Operator, values: Mapping[Ref, Tensor]) -> None:
    """One call, and its backward."""

    def value(leaf: Any) -> Any:
        return values[leaf] if isinstance(leaf, Ref) else leaf

    def result() -> Any:
        return resolve(operator.target)(*rewrite(operator.args, value), **rewrite(operator.keywords, value))

    try:
        results = result()
    except RuntimeError:  # targets have no derivative, though they may be computed from what has one
        for ref in operator.operands[1:]:
            values[ref].requires_grad_(False)
        results = result()
    trained = [one for one in tree_leaves(results) if isinstance(one, Tensor) and one.requires_grad]
    torch.autograd.backward(trained, [torch.empty_like(one) for one in trained])


class _Unknown(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the calls on tensors that DTensor has no rule for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        rules = DTensor._op_dispatcher.sharding_propagator
        handled = DTensor._op_dispatcher._custom_op_handlers
        self.tables = rules.op_strategy_funcs, rules.op_single_dim_strategy_funcs, rules.op_to_rules, handled
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given, made = (
            [one for one in tree_leaves(some) if isinstance(one, Tensor)] for some in ((args, kwargs), results)
        )
        if given and made and not any(func in table for table in self.tables):
            self.calls.append((func, args, kwargs or {}))
        return results


def _decomposed(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether DTensor takes an operator without a rule apart into others that have one, where rows are sliced."""
    if str(func) in FAULTY or not DecompShardingStrategy.has_decomp(func):
        return False
    mesh = DeviceMesh("cpu", torch.arange(1), _init_backend=False, _rank=0)
    rows = max(one.shape[:1] for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor))

    def spec(value: Tensor) -> DTensorSpec:
        placed = (Shard(0) if value.ndim and value.shape[:1] == rows else Replicate(),)
        return DTensorSpec(mesh, placed, TensorMeta(value.shape, value.stride(), value.dtype))

    schema = OpSchema(func, tree_map_only(Tensor, spec, args), tree_map_only(Tensor, spec, kwargs))
    try:
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached(schema)
    except NotImplementedError:
        return False
    return True


def placements(
    layout: Layout, shape: Sequence[int], mesh: Mesh, *, stripes: bool = False, any_order: bool = False
) -> tuple[Placement, ...] | None:
    """The placement on every axis of the mesh, outermost first; None where no DTensor has this layout.

    Args:
        layout: of a tensor.
        shape: the global one.
        mesh: the plan's.
        stripes: whether `_StridedShard` may say slices of every section.
        any_order: whether it may say that an axis slices what later ones have sliced, as `fully_shard` has it.
    """
    if isinstance(layout, Stripes) and not (stripes and len({*layout.packed.sizes}) == 1):
        return None
    found: dict[str, Placement] = {axis: Partial() for axis in layout.partial}
    for dim, (size, axes) in enumerate(zip(shape, layout.dims, strict=True)):
        slicing = tuple(axis for axis in axes if mesh.sizes[axis] > 1)
        uneven = size % mesh.product(slicing) != 0
        sections = len(layout.packed.sizes) if isinstance(layout, Stripes) and dim == layout.packed.dim else 0
        in_order = slicing == mesh.sorted(slicing)
        if not (in_order or any_order) or ((uneven or sections) and len(slicing) > 1):
            return None
        for number, axis in enumerate(slicing):
            later = [one for one in slicing[:number] if mesh.names.index(one) > mesh.names.index(axis)]
            factor = sections or mesh.product(later)
            found[axis] = _StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim)
    return tuple(found.get(axis, Replicate()) for axis in mesh.names)


def as_dtensor(
    local: Tensor, placed: Sequence[Placement], layout: Layout, shape: Sequence[int], mesh: Mesh, on: DeviceMesh
) -> DTensor:
    """This rank's slice as a DTensor on the same memory.

    Args:
        local: with padding.
        placed: the `placements` of `layout`.
        layout: that of the tensor.
        shape: the global shape.
        mesh: the plan's.
        on: the same grid of ranks; its current rank is that of `local`.
    """
    block = layout.block(shape, mesh, on.mesh.flatten().tolist().index(torch.distributed.get_rank()))
    strides = torch.empty(tuple(shape), device="meta").stride()
    own = local[indices(block, block)]
    # torch copies and pickles no DTensor that begins behind the first element of its memory, as parts of buckets do
    first = own.new_empty(()).expand(own.shape)
    dtensor = DTensor.from_local(first, on, placed, run_check=False, shape=torch.Size(shape), stride=strides)
    dtensor._local_tensor = own
    return dtensor


def global_tensor(value: Tensor) -> Tensor:
    """All of a tensor; collective for a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value
