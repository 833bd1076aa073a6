"""A plan of Meshwright in plain torch: this file needs nothing else.

    mesh = make_mesh("cpu")  # or "cuda", under torchrun
    parallelize(module, mesh)  # in place; every rank has the same weights
    optimizer = torch.optim.AdamW(module.parameters())
    with running(mesh):
        output = module(*sliced(inputs, mesh))
        loss_function(output, *sliced(targets, mesh, first=len(inputs))).backward()
    optimizer.step()

Parameters are DTensors, laid out as PARAMETERS says; over the axes of SHARDED, `fully_shard` slices them, their
gradients and the optimizer's states (ZeRO 3), block by block. Modules receive and return what INPUTS and OUTPUTS say;
torch propagates layouts in between, and computes the operators of REPLICATED on complete tensors. A `*` in a name
stands for the number of a layer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial, reduce
from itertools import combinations, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, _redistribute, distribute_tensor
from torch.distributed.tensor._decompositions import DecompShardingStrategy
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
from torch.distributed.tensor._ops import _math_ops
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import implicit_replication, register_sharding
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

Placed = tuple[Placement, ...]
"""A placement for every axis of MESH."""

# The plan
MESH: dict[str, int] = {}
BATCH: tuple[Placed, ...] = ()
PARAMETERS: dict[str, Placed] = {}
INPUTS: dict[str, Placed] = {}
OUTPUTS: dict[str, Placed] = {}
SHARDED: tuple[str, ...] = ()
REPLICATED: tuple[str, ...] = ()
# The end of the plan


def _replicated(name: str) -> None:
    """Let DTensor (torch 2.13) compute an operator that it has no rule for on complete tensors."""
    function = attrgetter(name)(torch.ops)

    def placed(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        tensors = [one for one in tree_leaves(args) if hasattr(one, "placements")]
        return [([Replicate()] * len(function._schema.returns), [Replicate()] * len(tensors))]

    register_sharding(function)(placed)
    every = RuntimeSchemaInfo(1, needs_pytree=True)  # the shape of a result may depend on all that is no tensor
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[function] = every


def _corrected() -> None:
    """Correct rules of DTensor (torch 2.13) for partial sums, and choose the same on all ranks."""
    aten, propagator = torch.ops.aten, DTensor._op_dispatcher.sharding_propagator
    # gradients of norms and deviations fill zeros into partial sums in place, which DTensor refuses
    propagator.op_single_dim_strategy_funcs.pop(aten.masked_fill_.Scalar, None)  # would go before
    register_sharding(aten.masked_fill_.Scalar)(_filled)
    # what a rank fills an empty partial sum with would be added up
    propagator.op_strategy_funcs[aten.empty_like.default] = propagator.op_strategy_funcs[aten.zeros_like.default]
    # conjugates that are views of slices can be neither sent nor taken apart
    DTensor._op_dispatcher._custom_op_handlers[aten._conj.default] = _conjugate  # type: ignore[assignment]
    # gradients of products of reflections set triangles of partial sums to zero in place
    for function in (aten.tril_.default, aten.triu_.default):
        register_sharding(function)(_triangle)
    # views of slices that the new dims do not divide are of complete dims
    for function in (aten.view.default, aten._unsafe_view.default):
        viewed: Any = partial(_viewed, propagator.op_strategy_funcs[aten.reshape.default])
        propagator.op_strategy_funcs[function] = partial(viewed, propagator.op_strategy_funcs[function])
    # what has been sent is contiguous, whatever strides DTensor says
    DTensor._op_dispatcher._custom_op_handlers[aten.view.default] = _view_of_slices  # type: ignore[assignment]
    # no dims of a reduction mean all
    _math_ops._infer_reduction_dims = partial(_reduced, _math_ops._infer_reduction_dims)
    # numbers are those of complete tensors, not of a rank's slice (`float(x.max())`, `if mask.any()`)
    DTensor._op_dispatcher._custom_op_handlers[aten._local_scalar_dense.default] = _number_of  # type: ignore[assignment]
    # what torch tries comes from sets, whose order differs between processes
    tried: Any = DecompShardingStrategy._get_candidate_placements
    DecompShardingStrategy._get_candidate_placements = staticmethod(partial(_ordered, tried))  # type: ignore[method-assign]
    # a number divided by partial sums is none (torch 2.11 has no such rule)
    for function in (aten.div.Tensor, aten.div_.Tensor):
        found: Any = propagator.op_single_dim_strategy_funcs.get(function)
        if found is not None:
            propagator.op_single_dim_strategy_funcs[function] = replace(found, func=partial(_divided, found.func))
    # partial norms lose the sign of what they are multiplied by
    DTensor._op_dispatcher._custom_op_handlers[aten.linalg_vector_norm.default] = _norm  # type: ignore[assignment]
    # whether a dim is kept may be said by position
    propagator.op_strategy_funcs[aten.logsumexp.default] = partial(
        _kept, propagator.op_strategy_funcs[aten.logsumexp.default]
    )
    # slices that are added to partial sums in place (cells of recurrent layers), and partial means, become such by way
    # of complete tensors
    # collectives over several axes become one where `fully_shard` has flattened them, which stripes cannot
    joined: Any = _redistribute._optimize_transform_infos
    _redistribute._optimize_transform_infos = partial(_apart, joined)
    # of what other rules, or a mesh of another module, have decided
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _apart(joined: Any, steps: Any, *rest: Any) -> Any:
    steps = [part for step in steps for part in _by_way(step)]
    striped = any(isinstance(one, _StridedShard) for step in steps for one in step.src_dst_placements)
    return steps if striped else joined(steps, *rest)


def _by_way(step: Any) -> list[Any]:
    now, then = step.src_dst_placements
    if not then.is_partial() or now.is_replicate() or now == then:
        return [step]
    return [replace(step, src_dst_placements=pair) for pair in ((now, Replicate()), (Replicate(), then))]


def _ordered(tried: Any, schema: Any) -> list[Any]:
    """Placements of operands to try, those with partial sums last: with these first, a batch norm differed from one
    device."""
    return sorted(tried(schema), key=lambda one: (str(one).count("Partial"), str(one)))


def _filled(own: Any, mask: Any, value: Any) -> list[tuple[list[Any], list[Any]]]:
    def of_mask(one: Placement) -> Placement:
        dim = getattr(one, "dim", 0) - own.ndim + mask.ndim
        sliced = not (one.is_partial() or one.is_replicate()) and dim >= 0 and mask.shape[dim] > 1
        return _along(one, dim) if sliced else Replicate()

    kept = [one for one in dict.fromkeys((*own.placements, Replicate())) if value == 0 or not one.is_partial()]
    return [([one], [one, of_mask(one), None]) for one in kept]


def _triangle(own: Any, *diagonal: Any) -> list[tuple[list[Any], list[Any]]]:
    kept = [one for one in dict.fromkeys((*own.placements, Replicate())) if getattr(one, "dim", 0) < own.ndim - 2]
    return [([one], [one, *(None for _ in diagonal)]) for one in kept]


def _viewed(reshaped: Any, theirs: Any, schema: Any) -> Any:
    """The slices of a view: those along as many axes as leave every element on its rank; the others are gathered.
    DTensor refuses some of them, and takes stripes and slices that the new dims do not divide for those of others."""
    own, sizes = schema.args_schema
    shape = [size if size >= 0 else math.prod(own.shape) // -math.prod(sizes) for size in sizes]
    axes = range(own.mesh.ndim)
    fewer = [(reshaped, kept) for count in reversed(axes) for kept in combinations(axes, count)]
    for function, kept in ((theirs, axes), (reshaped, axes), *fewer):
        try:
            found = function(OpSchema(schema.op, (_sliced_along(kept, own), sizes), schema.kwargs_schema))
        except (RuntimeError, KeyError):
            continue
        pairs = [(one.input_specs[0].placements, one.output_specs.placements) for one in found.strategies]
        if all(_digits(own.shape, now, own.mesh) == _digits(shape, then, own.mesh) for now, then in pairs):
            break
    return found


def _sliced_along(axes: Sequence[int], strategy: Any) -> Any:
    """An operand that is complete along the other axes of the mesh."""
    if len(axes) == strategy.mesh.ndim:
        return strategy
    specs = [one.output_spec for one in strategy.strategies]
    placed = [
        tuple(one if axis in axes or one.is_partial() else Replicate() for axis, one in enumerate(spec.placements))
        for spec in specs
    ]
    pairs = zip(specs, placed, strict=True)
    return OpStrategy([OpSpec(DTensorSpec(spec.mesh, one, tensor_meta=spec.tensor_meta)) for spec, one in pairs])


def _digits(shape: Sequence[int], placed: Sequence[Placement], mesh: DeviceMesh) -> list[tuple[int, Any]]:
    """How the elements of a tensor, counted in order, are divided: sizes from the slowest to the fastest, whose product
    is their number, with the axis that slices there, or None; dims of unequal slices are one size each."""
    found: list[tuple[int, Any]] = []
    for dim, size in enumerate(shape):
        sliced = [(axis, one) for axis, one in enumerate(placed) if getattr(one, "dim", None) == dim]
        slices = [(axis, getattr(one, "split_factor", 1)) for axis, one in sliced]
        digits: Any = [(size, None)]
        for axis, stripes in slices:
            digits = digits and _cut(digits, stripes, mesh.shape[axis], axis)
        found += digits or [(size, tuple(slices))]
    merged: list[tuple[int, Any]] = []
    for size, axis in found:
        if merged and axis is None and merged[-1][1] is None:
            merged[-1] = merged[-1][0] * size, None
        elif size != 1:
            merged.append((size, axis))
    return merged


def _cut(digits: Sequence[tuple[int, Any]], stripes: int, ranks: int, axis: int) -> Any:
    """The digits of a dim of which ranks along an axis take every one of some stripes; None: unequal slices."""
    found: list[tuple[int, Any]] = []
    for at, (size, by) in enumerate(digits):
        if by is None and stripes % size:
            unit = stripes * ranks
            cut = [(stripes, None), (ranks, axis), (size // unit, None)]
            return None if size % unit else [*found, *cut, *digits[at + 1 :]]
        found.append((size, by))
        stripes //= size if by is None else 1
    return None if ranks > 1 else found


def _view_of_slices(function: Any, args: Any, kwargs: Any) -> Any:
    value, shape = args
    view = torch.ops.aten._unsafe_view.default
    try:
        return view(value, shape)
    except RuntimeError:
        return view(DTensor(value._local_tensor.contiguous(), value._spec, requires_grad=False), shape)  # type: ignore[no-untyped-call]


def _conjugate(function: Any, args: Any, kwargs: Any) -> Any:
    return torch.ops.aten.conj_physical.default(*args)


def _norm(function: Any, args: Any, kwargs: Any) -> Any:
    handlers = DTensor._op_dispatcher._custom_op_handlers
    own = handlers.pop(function)
    try:
        result = function(*args, **kwargs)
    finally:
        handlers[function] = own
    return _added_up(result)


def _number_of(function: Any, args: Any, kwargs: Any) -> Any:
    return function(args[0].full_tensor())


def _reduced(theirs: Any, dims: Any, ndim: int) -> Any:
    return [*range(ndim)] if dims in ([], ()) or ndim == 0 else theirs(dims, ndim)


def _kept(theirs: Any, schema: Any) -> Any:
    keepdim = (*schema.args_schema[2:3], schema.kwargs_schema.get("keepdim", False))[0]
    return theirs(OpSchema(schema.op, schema.args_schema[:2], {"keepdim": keepdim}))


def _divided(theirs: Any, function: Any, args: Any, kwargs: Any) -> Any:
    found = theirs(function, args, kwargs)
    return [one for one in found if hasattr(args[0], "shape") or not any(isinstance(at, Partial) for at in one)]


def make_mesh(device_type: str = "cuda") -> DeviceMesh:
    """The ranks of the default process group, which is made if there is none."""
    return init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Make the tensors of a module DTensors, and lay out what its modules receive and return; in place."""
    for name in REPLICATED:  # the module's own ones exist by now
        _replicated(name)
    _corrected()
    replicated = (Replicate(),) * mesh.ndim
    known: dict[int, tuple[Tensor, nn.Parameter]] = {}  # tied parameters stay tied
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in known:
                placed = placements_of(PARAMETERS, f"{path}.{name}".lstrip("."), replicated)
                local = distribute_tensor(parameter.detach(), mesh, placed, src_data_rank=None)
                known[id(parameter)] = parameter, nn.Parameter(local, parameter.requires_grad)
                if parameter.requires_grad and not SHARDED:
                    known[id(parameter)][1].register_hook(_complete(placed))  # type: ignore[no-untyped-call]
            part._parameters[name] = known[id(parameter)][1]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = distribute_tensor(buffer, mesh, replicated, src_data_rank=None)
        received, returned = placements_of(INPUTS, path, ()), placements_of(OUTPUTS, path, ())
        fused = [name for name, one in part._parameters.items() if _is_striped(getattr(one, "placements", ()))]
        if fused and _is_striped(returned) and not _is_striped(received):
            part.forward = _by_rank(part, fused, returned)
        if received:
            part.register_forward_pre_hook(_receiving(mesh, received))
        if returned:
            part.register_forward_hook(_returning(mesh, returned))
    if SHARDED:  # no stripes: those that `fully_shard` makes of rows are blocks in order, as it saves them
        _shard_fully(module, mesh)
    else:
        module.register_state_dict_post_hook(_complete_sections)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(_slice_sections)  # type: ignore[no-untyped-call]
    return module


def _is_striped(placed: Placed) -> bool:
    """Whether a rank has a slice of every section, as of queries, keys and values in one weight."""
    return any(isinstance(one, _StridedShard) for one in placed)


def _by_rank(part: nn.Module, fused: Sequence[str], returned: Placed) -> Any:
    """Computes a layer of fused weights with stripes as if they were blocks: the order of its results does not matter
    to it, and DTensor (torch 2.13) gathers stripes over which backward adds up."""
    forward = part.forward

    def striped(*args: Any, **kwargs: Any) -> Any:
        own: dict[str, Any] = {name: part._parameters[name] for name in fused}
        try:
            part._parameters.update({name: _as(one, _in_blocks(one.placements)) for name, one in own.items()})
            result = laid_out(forward(*args, **kwargs), own[fused[0]].device_mesh, _in_blocks(returned))
        finally:
            part._parameters.update(own)
        return _as(result, returned)

    return striped


def _in_blocks(placed: Placed) -> Placed:
    return tuple(Shard(one.dim) if isinstance(one, _StridedShard) else one for one in placed)


def _as(value: Any, placed: Placed) -> Any:
    """The slices of a tensor under other placements; nothing is sent."""
    own, mesh = value.to_local(), value.device_mesh
    return DTensor.from_local(own, mesh, placed, run_check=False, shape=value.shape, stride=value.stride())


def _complete_sections(_: nn.Module, state_dict: dict[str, Any], *others: Any) -> None:
    """State dicts hold fused weights complete: torch.distributed.checkpoint (torch 2.13) has one block per rank."""
    for name, value in state_dict.items():
        state_dict[name] = value.full_tensor() if _is_striped(getattr(value, "placements", ())) else value


def _slice_sections(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    for name, own in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        if isinstance(own, DTensor) and _is_striped(own.placements) and not isinstance(value, DTensor | None):
            state_dict[prefix + name] = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)


def _shard_fully(module: nn.Module, mesh: DeviceMesh) -> None:
    """ZeRO 3 over SHARDED: the blocks of lists of layers one by one, and the rest of the module."""
    try:
        from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
    except ImportError as error:
        raise ImportError("SHARDED needs torch 2.13: fully_shard of this one takes no axes of a mesh") from error
    axes, (parts, complete) = DataParallelMeshDims(shard=SHARDED), _sharded_at_once(module)
    for one in complete:
        if one.requires_grad:
            one.register_hook(_complete(one.placements))
    for path, inside in parts.items():
        part: Any = fully_shard(module.get_submodule(path), mesh=mesh, dp_mesh_dims=axes, ignored_params=complete)
        part.set_gradient_divide_factor(1.0)  # the loss is a mean over all rows already
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other sum
        own = {
            (layer, name): placements_of(PARAMETERS, f"{one}.{name}".lstrip("."), (Replicate(),) * mesh.ndim)
            for one, layer in inside.items()
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.requires_grad and parameter not in complete
        }
        part.register_forward_pre_hook(_hooking(mesh, own))


def _sharded_at_once(module: nn.Module) -> tuple[dict[str, dict[str, nn.Module]], set[Any]]:
    """The modules whose parameters are gathered at once, by the path of one around them, inner ones first; and the
    parameters that stay complete. `fully_shard` takes one dtype at once, so layers of another one are apart (norms in
    fp32), but not the parameters of a module with others in it; and no parameters without dims."""
    paths = [
        path
        for path, part in module.named_modules()
        if re.fullmatch(r"([^.]*[^.\d][^.]*\.)*\d+", path) and type(part).forward is not nn.Module.forward
    ]
    left, parts = dict(module.named_modules()), {}
    complete: set[Any] = {one for one in module.parameters() if one.ndim == 0}
    for path in (*paths, ""):
        inside = {one: left.pop(one) for one in [*left] if f"{one}.".startswith(f"{path}.") or not path}
        own = {
            one: [each for each in part.parameters(recurse=False) if each.requires_grad and each.ndim]
            for one, part in inside.items()
        }
        sizes = Counter[torch.dtype]()
        for each in (each for found in own.values() for each in found):
            sizes[each.dtype] += each.numel()
        usual = max(sizes, key=lambda one: sizes[one], default=None)
        for one, found in own.items():
            others = [each for each in found if each.dtype != usual]
            if others and len({each.dtype for each in found}) == 1 and not [*inside[one].children()]:
                parts[one] = {one: inside.pop(one)}
            else:
                complete.update(others)
        parts[path] = inside
    return parts, complete


def _hooking(mesh: DeviceMesh, own: Mapping[tuple[nn.Module, str], Placed]) -> Any:
    """Lets gradients of gathered parameters be partial sums over SHARDED, which `fully_shard` adds. All of a part are
    gathered when it is called; of modules in it perhaps the weights alone are used (nn.MultiheadAttention)."""

    def hook(_: nn.Module, __: Any) -> None:
        for (part, name), placed in own.items():
            parameter = getattr(part, name)
            if not getattr(parameter, "_is_partial_later", False):
                parameter.register_hook(_partial(mesh, placed))
                parameter._is_partial_later = True

    return hook


def _partial(mesh: DeviceMesh, placed: Placed) -> Any:
    names = mesh.mesh_dim_names or ()

    def hook(gradient: Any) -> Any:
        if gradient is None:  # the operator has none
            return None
        now = zip(names, gradient.placements, placed, strict=True)
        added = [have if axis in SHARDED and have.is_partial() else want for axis, have, want in now]
        gradient = gradient.redistribute(placements=added)
        same = [
            mesh[axis].size()
            for axis, have in zip(names, added, strict=True)
            if axis in SHARDED and not have.is_partial()
        ]
        return gradient / math.prod(same) if same else gradient

    return hook


def sliced(batch: Sequence[Tensor], mesh: DeviceMesh, first: int = 0) -> list[Tensor]:
    """Entries of the global batch, from the `first` on, as DTensors; nothing is sent."""
    return [laid_out(entry, mesh, placed) for entry, placed in zip(batch, BATCH[first:], strict=False)]


@contextmanager
def running(mesh: DeviceMesh) -> Iterator[None]:
    """Run forward and backward within this context: tensors that the model makes itself are the same on all ranks,
    attention is made of products where torch has no sharded kernel (on CPUs), convolutions and experts run on slices,
    fused weights are taken apart where every rank has a slice of each section, signs and angles have gradients, running
    sums and quantiles are those of complete dims, assignments arrive, and losses are means over all slices."""
    attention = sdpa_kernel(SDPBackend.MATH) if mesh.device_type == "cpu" else nullcontext()
    modes = _Means(), _Sections(), _Convolutions(), _Experts(), _Instead(), _Recurrent(), _Complete(), _InPlace()
    with ExitStack() as entered:
        for one in (implicit_replication(), attention, *modes):
            entered.enter_context(one)
        yield


class _Means(TorchFunctionMode):
    """Averages losses one by one. DTensor (torch 2.13) averages the means of slices: for these losses with gradients
    that are too large by the number of slices, for those of classes whatever targets are ignored in each, or weigh."""

    LOSSES = (
        functional.binary_cross_entropy,
        functional.huber_loss,
        functional.mse_loss,
        functional.smooth_l1_loss,
        functional.soft_margin_loss,
    )
    OF_CLASSES = functional.cross_entropy, functional.nll_loss
    WEIGHTED = functional.binary_cross_entropy, *OF_CLASSES

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        older = [given[name] for name in ("size_average", "reduce") if given.get(name) is not None]
        averaged = all(older) if older else given.get("reduction", "mean") == "mean"
        mean = averaged and len(args) == 2 and func in (*self.LOSSES, *self.OF_CLASSES)
        weighted = given.get("weight") is not None
        if not mean or not isinstance(args[0], DTensor) or (weighted and func not in self.WEIGHTED):
            return func(*args, **given)
        given = {name: one for name, one in given.items() if name not in ("size_average", "reduce")}
        losses = func(*args, **{**given, "reduction": "none"})
        if func not in self.OF_CLASSES or args[1].is_floating_point():
            return losses.mean()
        ignored = given.get("ignore_index", -100)
        if not weighted:
            return losses.sum() / (args[1] != ignored).sum()
        ones = -torch.ones_like(args[0]).detach()
        weights = functional.nll_loss(ones, args[1], given["weight"], ignore_index=ignored, reduction="none")
        return losses.sum() / weights.sum()


class _Complete(TorchFunctionMode):
    """Runs on a rank's slices what needs some dims, or all of a tensor, complete. Of dims that are counted from the
    last, DTensor (torch 2.13) adds up every slice for itself, products end in an error in backward, as do quantiles,
    shifts return shifted values, gradients of adaptive pools have the sizes of slices, fewer places than a tensor
    has rows are sliced as these, the places of extremes in stripes end in an error, as do counts of values,
    repeats, spectra of windows, and losses of alignments."""

    SCANS = torch.cumprod, torch.cumsum, torch.logcumsumexp, Tensor.cumprod, Tensor.cumsum, Tensor.logcumsumexp
    POOLS: Mapping[Any, int] = {
        functional.adaptive_avg_pool1d: 1,
        functional.adaptive_avg_pool2d: 2,
        functional.adaptive_avg_pool3d: 3,
    }
    PLACES = tuple(
        getattr(of, name) for of in (torch, Tensor) for name in ("gather", "scatter", "scatter_add", "scatter_reduce")
    )
    EXTREMES = torch.argmax, torch.argmin, Tensor.argmax, Tensor.argmin
    OTHERS = (
        *(torch.quantile, torch.nanquantile, Tensor.quantile, Tensor.nanquantile),
        *(torch.bitwise_left_shift, torch.bitwise_right_shift, Tensor.bitwise_left_shift, Tensor.bitwise_right_shift),
        *(Tensor.__lshift__, Tensor.__rshift__, torch.mvlgamma, Tensor.mvlgamma, torch.fft.ihfft),
        *(torch.linalg.householder_product, torch.linalg.ldl_solve, torch.linalg.solve_triangular),
        *(torch.select_scatter, torch.slice_scatter, Tensor.select_scatter, Tensor.slice_scatter),
        *(torch.bincount, Tensor.bincount, torch.combinations),
        *(torch.stft, Tensor.stft, torch.istft, Tensor.istft, functional.ctc_loss),
    )
    REPEATS = torch.repeat_interleave, Tensor.repeat_interleave

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is Tensor.tolist and isinstance(args[0], DTensor):
            return args[0].full_tensor().tolist()
        repeats = given.get("repeats", (*args[1:2], *args, None)[0])
        repeated = func in self.REPEATS and isinstance(repeats, Tensor)
        if not repeated and func not in (*self.SCANS, *self.POOLS, *self.PLACES, *self.EXTREMES, *self.OTHERS):
            return func(*args, **given)
        args = args or (given.pop("input"),)
        value = next((one for one in args if isinstance(one, DTensor)), None)
        placed_well = func in self.PLACES and _is_aligned(*args, **given)
        if value is None or placed_well or (func in self.EXTREMES and not _is_striped(value.placements)):
            return func(*args, **given)
        mesh, dims = value.device_mesh, value.ndim
        gathered = {*range(dims)}
        if func in self.SCANS and dims:
            gathered = {(args[1] if len(args) > 1 else given["dim" if "dim" in given else "axis"]) % dims}
        elif func in self.POOLS:
            gathered = {*range(dims - self.POOLS[func], dims)}
        placed = _complete_along(value, gathered)

        def local(one: Any) -> Any:
            if not isinstance(one, DTensor):
                return one
            return laid_out(one, mesh, placed).to_local(grad_placements=placed)  # type: ignore[attr-defined]

        made = func(*map(local, args), **{name: local(one) for name, one in given.items()})
        if all(map(Placement.is_replicate, placed)):
            return DTensor.from_local(made, mesh, placed, run_check=False)
        shape = torch.Size(made.shape[dim] if dim in gathered else size for dim, size in enumerate(value.shape))
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(made.contiguous(), mesh, placed, run_check=False, shape=shape, stride=strides)


def _complete_along(value: Any, dims: Iterable[int]) -> Placed:
    """The placements of a tensor without partial sums and slices of some dims."""
    gathered = [one.is_partial() or getattr(one, "dim", None) in {*dims} for one in value.placements]
    return tuple(Replicate() if moved else one for moved, one in zip(gathered, value.placements, strict=True))


def _is_aligned(input: Tensor, dim: int, index: Tensor, *_: Any, **__: Any) -> bool:
    """Whether slices of an index are those of the tensor."""
    sizes = zip(input.shape, index.shape, strict=False)
    return all(size == own for at, (size, own) in enumerate(sizes) if at != dim % input.ndim)


class _InPlace(TorchFunctionMode):
    """Assigns to an index or the diagonal of a complete tensor, and computes out of place what changes shapes or what
    DTensor (torch 2.13) cannot compute in place. Views across slices are copies, so what it writes there would be lost:
    that is an error, except in `x[...] *= y`, which assigns next."""

    WRITES = re.compile(r"[a-z](\w*[^_])?_|__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor)__|__setitem__")
    LOST = "DTensor cannot write into {}; make a new tensor, or assign to x[...]."
    MOVED = "in-place operations that require placement changes are not supported"
    RULELESS: Mapping[Any, Any] = {
        getattr(Tensor, f"{name}_"): getattr(Tensor, name)
        for name in (
            *("addbmm", "addmv", "addr", "cumprod", "cumsum", "floor_divide", "put", "renorm", "tril", "triu"),
            *("index_add", "index_copy", "index_fill", "index_put", "index_reduce"),
            *("masked_fill", "masked_scatter", "scatter", "scatter_add", "scatter_reduce"),
        )
    }
    RESHAPES: Mapping[Any, Any] = {
        getattr(Tensor, f"{name}_"): getattr(Tensor, name)
        for name in ("squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze")
    }

    def __init__(self) -> None:
        super().__init__()
        self.assigned: Any = None  # next, to an index

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, assigns, name = kwargs or {}, func is Tensor.__setitem__, getattr(func, "__name__", "")
        awaited, self.assigned = self.assigned, None
        if awaited is not None and not (assigns and args[2] is awaited):
            raise NotImplementedError(self.LOST.format("a view across slices"))
        if not args or func is Tensor.requires_grad_ or not self.WRITES.fullmatch(name):
            return func(*args, **given)
        value = args[0]
        if assigns and not isinstance(value, DTensor) and isinstance(args[2], DTensor):
            raise NotImplementedError(self.LOST.format("a tensor that is none (`x.new_zeros` makes one)"))
        if not isinstance(value, DTensor):
            return func(*args, **given)
        copied = _is_copy(value)
        if (copied and assigns) or any(hasattr(one, "of_reshaped_view") for one in (value, value._base)):
            raise NotImplementedError(self.LOST.format("a view across slices"))
        if func in self.RESHAPES:
            return self._reshaped(value, self.RESHAPES[func](value.clone(), *args[1:], **given))
        if assigns:
            _write(value, _of_complete(_assign, *args))
            return None
        written = value.clone() if copied else value
        if func is Tensor.fill_diagonal_:
            _write(written, _of_complete(func, value, *args[1:], **given))
        elif func in self.RULELESS:
            _write(written, self.RULELESS[func](value.clone(), *args[1:], **given))
        else:
            try:
                written = func(written, *args[1:], **given)
            except RuntimeError as error:
                if self.MOVED not in str(error):
                    raise
                _write(written, _out_of_place(name)(value.clone(), *args[1:], **given))
        self.assigned = written if copied else None
        return written

    def _reshaped(self, value: Any, other: Any) -> Any:
        """Gives a tensor, whose shape DTensor cannot change in place, the place of another one."""
        is_view = value._base is not None
        try:
            torch.utils.swap_tensors(value, other)  # type: ignore[no-untyped-call]
        except RuntimeError:
            lost = "the shape of what a view, or a gradient, needs; reshape out of place."
            raise NotImplementedError(f"DTensor cannot change {lost}") from None
        if is_view:  # writes to it would not reach its base
            for one in (value, value._base):
                one.of_reshaped_view = True
        return value


def _is_copy(value: Any) -> bool:
    """Whether a view does not share the memory of its base."""
    storages = [one.to_local().untyped_storage()._cdata for one in (value, value._base) if isinstance(one, DTensor)]
    return len({*storages}) > 1


def _write(into: Any, value: Any) -> None:
    """Copies; torch (2.13) makes no partial sums of slices."""
    placed = tuple(Replicate() if one.is_partial() else one for one in into.placements)
    into.copy_(laid_out(value, into.device_mesh, placed))


def _out_of_place(name: str) -> Any:
    """The function that computes what one of this name writes in place."""
    plain = f"__{name[3:]}" if name.startswith("__i") else name[:-1]
    return getattr(Tensor, plain, None) or getattr(functional, plain)


def _assign(value: Tensor, index: Any, part: Any) -> None:
    value[index] = part


def _of_complete(function: Any, value: Any, *args: Any, **given: Any) -> Tensor:
    """A complete copy of a tensor, to which a function has written."""
    mesh, replicated = value.device_mesh, (Replicate(),) * value.device_mesh.ndim

    def local(one: Any) -> Any:
        if not isinstance(one, DTensor):
            return one
        return laid_out(one, mesh, replicated).to_local(grad_placements=replicated)  # type: ignore[attr-defined]

    made = local(value).clone()
    function(made, *tree_map(local, args), **given)
    return DTensor.from_local(made, mesh, replicated, run_check=False)


class _Convolutions(TorchFunctionMode):
    """Runs convolutions on slices of rows, channels or groups. DTensor (torch 2.13) slices rows over one axis of the
    mesh alone, and takes weights for replicated."""

    NAMES = tuple(f"{kind}{dims}d" for kind in ("conv", "conv_transpose") for dims in (1, 2, 3))
    FUNCTIONS = tuple(getattr(functional, name) for name in NAMES)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sliced = func in self.FUNCTIONS and any(isinstance(one, DTensor) for one in (*args, *(kwargs or {}).values()))
        return (partial(_convolved, func) if sliced else func)(*args, **(kwargs or {}))


def _convolved(func: Any, input: Tensor, weight: Tensor, bias: Any = None, *options: Any, **named: Any) -> Tensor:
    """Convolve with a DTensor: where the weight is sliced along an axis, the input follows; elsewhere rows stay
    sliced."""
    given, transposed = dict(zip(("stride", "padding"), options, strict=False)) | named, "transpose" in func.__name__
    names = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")
    given |= dict(zip(names, options[2:], strict=False))
    groups = given.get("groups", 1)
    into, out = (0, 0) if groups > 1 else (0, 1) if transposed else (1, 0)  # dims of the weight
    mesh = next(one for one in (input, weight) if isinstance(one, DTensor)).device_mesh
    replicated = (Replicate(),) * mesh.ndim
    ours, theirs = (getattr(one, "placements", replicated) for one in (input, weight))
    slices = math.prod(size for size, own in zip(mesh.shape, theirs, strict=True) if own == Shard(0))
    rows = input.ndim == weight.ndim  # else it is one picture
    if not rows or (groups > 1 and groups % slices):
        theirs = replicated
    elif groups > 1:
        given["groups"] = groups // slices
    placed: list[tuple[Placement, ...]] = []  # input, weight, bias, result; gradients of the first three
    shares = 1
    for have, own, size in zip(ours, theirs, mesh.shape, strict=True):
        if own == Shard(out):
            its = Shard(1) if groups > 1 else Replicate()
            placed.append((its, own, Shard(0), Shard(1), its if groups > 1 else Partial(), own, Shard(0)))
        elif own == Shard(into):
            placed.append((Shard(1), own, Replicate(), Partial(), Shard(1), own, Partial()))
            shares *= size  # of the bias
        elif have == Shard(0) and rows:
            placed.append((have, Replicate(), Replicate(), have, have, Partial(), Partial()))
        else:
            placed.append((Replicate(),) * 7)
    of_input, of_weight, of_bias, result, *gradients = zip(*placed, strict=True)

    def local(value: Tensor, at: Placed, gradient: Placed) -> Tensor:
        return laid_out(value, mesh, at).to_local(grad_placements=gradient)  # type: ignore[attr-defined, no-any-return]

    own_bias = None if bias is None else local(bias, of_bias, gradients[2]) / shares
    made = func(local(input, of_input, gradients[0]), local(weight, of_weight, gradients[1]), own_bias, **given)
    shape = (weight.shape[1] * groups if transposed else weight.shape[0], *made.shape[2 - weight.ndim :])
    shape = (*input.shape[: int(rows)], *shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(made, mesh, result, run_check=False, shape=torch.Size(shape), stride=stride)


class _Experts(TorchFunctionMode):
    """Multiplies rows, sorted by expert, by the matrices of their experts: torch's grouped product, and the one that
    transformers brings along. DTensor (torch 2.13) has the former in bf16 alone, and neither on slices of the experts.
    """

    NAMES = "_grouped_mm", "grouped_mm_fallback"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        sliced = getattr(func, "__name__", "") in self.NAMES and any(isinstance(one, DTensor) for one in args)
        return _multiplied(func, *args, **given) if sliced else func(*args, **given)


def _multiplied(func: Any, rows: Tensor, matrices: Tensor, offs: Any = None, **given: Any) -> Tensor:
    """Multiply rows by experts' matrices: where these are sliced along an axis, the rows follow; elsewhere they are
    complete."""
    if rows.ndim != 2 or matrices.ndim != 3 or any(one is not None for one in given.values()):
        return func(rows, matrices, offs=offs, **given)  # type: ignore[no-any-return]
    mesh = next(one for one in (rows, matrices) if isinstance(one, DTensor)).device_mesh
    theirs = getattr(matrices, "placements", (Replicate(),) * mesh.ndim)
    of_rows, of_matrices, of_ends, result, *gradients = zip(*map(_of_experts, theirs), strict=True)
    starts, ends = (
        laid_out(one, mesh, of_ends).to_local()  # type: ignore[attr-defined]
        for one in (functional.pad(offs[:-1], (1, 0)), offs)
    )
    x, own = (
        laid_out(one, mesh, placed).to_local(grad_placements=gradient)  # type: ignore[attr-defined]
        for one, placed, gradient in zip((rows, matrices), (of_rows, of_matrices), gradients, strict=True)
    )
    made = _products(func if all(map(Placement.is_replicate, of_matrices)) else None, x, own, starts, ends)
    shape = torch.Size((len(rows), matrices.shape[2]))
    return DTensor.from_local(made, mesh, result, run_check=False, shape=shape, stride=(shape[1], 1))


def _of_experts(placed: Placement) -> tuple[Placement, ...]:
    """The placements of rows [rows, inputs], matrices, ends [experts] and the result for a placement of matrices
    [experts, inputs, outputs]; and of the gradients of rows and matrices."""

    replicated, added = Replicate(), Partial()
    match getattr(placed, "dim", None):
        case 0:
            return replicated, placed, _along(placed, 0), added, added, placed
        case 1:
            return _along(placed, 1), placed, replicated, added, _along(placed, 1), placed
        case 2:
            return replicated, placed, replicated, _along(placed, 1), added, placed
    return (replicated,) * 6


def _along(placed: Any, dim: int) -> Placement:
    """The slices of a dim, along another one."""
    return _StridedShard(dim, split_factor=placed.split_factor) if isinstance(placed, _StridedShard) else Shard(dim)


def _products(func: Any, rows: Tensor, matrices: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """The rows of the experts at hand, which `func` multiplies if it is given; zeros for those of others."""
    if func is not None:
        return func(rows, matrices, offs=ends)  # type: ignore[no-any-return]
    if not len(ends):
        return rows @ matrices.sum(0)
    bounds = [*starts[:1].tolist(), *ends.tolist()]
    sizes = [bounds[0], *(stop - start for start, stop in pairwise(bounds)), len(rows) - bounds[-1]]
    before, *parts, after = torch.split(rows, sizes)
    own = [part @ matrix for part, matrix in zip(parts, matrices.unbind(0), strict=True)]
    zeros = [rows.new_zeros(len(others), matrices.shape[2]) for others in (before, after)]
    return torch.cat([zeros[0], *own, zeros[1]])


def _sign(x: Tensor) -> Tensor:
    return x.sgn() if x.is_complex() else x.sign()


def _angle(x: Tensor) -> Tensor:
    return torch.atan2(x.imag, x.real) if x.is_complex() else x.angle()


def _polar(abs: Tensor, angle: Tensor) -> Tensor:
    return torch.complex(abs * angle.cos(), abs * angle.sin())


def _selected(input: Tensor, dim: int, index: Any) -> Tensor:
    return input.select(dim % input.ndim, index)


def _strided(input: Any, size: Sequence[int], stride: Sequence[int], storage_offset: Any = None) -> Tensor:
    """Reads the memory that one device would have. Slices of dims that the result has as well stay; others are
    gathered."""
    if storage_offset and input._base is not None:
        raise NotImplementedError("DTensor does not know where a view begins; take as_strided of x.clone().")
    mesh, offset, sizes, result_shape = input.device_mesh, storage_offset or 0, [*size], torch.Size(size)
    own, wanted = ([*zip(*some, strict=True)] for some in ((input.shape, input.stride()), (size, stride)))
    kept = {dim: wanted.index(one) for dim, one in enumerate(own) if one in wanted and _stays(one, own, wanted, offset)}
    placed = _complete_along(input, {*range(input.ndim)} - {*kept})
    value = laid_out(input, mesh, placed).to_local(grad_placements=placed)  # type: ignore[attr-defined]
    strides, reads = input.stride(), stride
    for dim in sorted(kept, key=strides.__getitem__):  # shorter dims bring those outside nearer
        count, inner = value.shape[dim], strides[dim]
        outer, sizes[kept[dim]] = input.shape[dim] * inner, count
        strides, reads, (offset,) = (
            [one // outer * count * inner + one % outer for one in some] for some in (strides, reads, (offset,))
        )
    made = value.new_empty_strided(value.shape, strides).copy_(value).as_strided(sizes, reads, offset).contiguous()
    along = [_along(one, kept[one.dim]) if hasattr(one, "dim") else one for one in placed]
    dense = torch.empty(result_shape, device="meta").stride()
    found = DTensor.from_local(made, mesh, along, run_check=False, shape=result_shape, stride=dense)
    found.of_reshaped_view = True  # type: ignore[attr-defined]  # writes to it would not reach the operand
    return found


def _stays(dim: tuple[int, int], own: Sequence[Any], wanted: Sequence[Any], offset: int) -> bool:
    """Whether the place along a dim of this size and stride is a digit of all addresses, which nothing else changes."""
    inner, outer = dim[1], max(math.prod(dim), 1)
    others, steps = (
        [one for at, one in enumerate(some) if at != some.index(dim) and one[0] > 1] for some in (own, wanted)
    )
    within = offset % outer + sum((count - 1) * by for count, by in steps if by < inner)
    return within < inner and all(by < inner or by % outer == 0 for _, by in (*others, *steps))


def _unbound(input: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(input.select(dim % input.ndim, at) for at in range(input.shape[dim]))


def _product(input: Tensor, other: Tensor) -> Tensor:
    return (input[None] @ other)[..., 0, :] if input.ndim == 1 < other.ndim else input @ other


def _concatenated(function: Any, tensors: Any, *dim: Any, **given: Any) -> Tensor:
    """Without tensors of shape [0], which torch takes beside any others, and DTensor slices along dims that they lack:
    caches of keys and values begin so."""
    full = [one for one in tensors if tuple(one.shape) != (0,)]
    if len(full) in (0, len(tensors)):
        return _joined(function, tensors, *dim, **given)
    dtype = reduce(torch.promote_types, (one.dtype for one in tensors))
    return _joined(function, [one.to(dtype) for one in full], *dim, **given)


def _joined(function: Any, tensors: Any, *dim: Any, **given: Any) -> Tensor:
    if len({getattr(one, "placements", ()) for one in tensors}) > 1:
        tensors = [_added_up(one) for one in tensors]
    return function(tensors, *dim, **given)  # type: ignore[no-any-return]


def _added_up(value: Any) -> Any:
    return laid_out(value, value.device_mesh, _complete_along(value, ())) if isinstance(value, DTensor) else value


def _quotient(input: Any, other: Any, **given: Any) -> Tensor:
    return torch.div(input, _added_up(other), **given)


def _rms_norm(input: Any, normalized_shape: Any, *weight: Any, **given: Any) -> Tensor:
    if isinstance(input, DTensor):
        placed = _complete_along(input, range(input.ndim - len(normalized_shape), input.ndim))
        input = laid_out(input, input.device_mesh, placed)
    return functional.rms_norm(input, normalized_shape, *weight, **given)


def _normalized(input: Tensor, *dims: Any, out: Any = None, **given: Any) -> Tensor:
    result = functional.normalize(input, *dims, **given)
    return result if out is None else out.copy_(result)


def _batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    x = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
    shape = [1, -1, *(1 for _ in range(x.ndim - 2))]
    mean, variance = running_mean, running_var
    if training or running_mean is None:
        count, dims = x.numel() // x.shape[1], [dim for dim in range(x.ndim) if dim != 1]
        mean = x.sum(dims) / count
        variance = (x - mean.view(shape)).square().sum(dims) / count
    if training and running_mean is not None:
        found = mean.detach(), variance.detach() * (count / (count - 1))
        for running, new in zip((running_mean, running_var), found, strict=True):
            running.copy_(running * (1 - momentum) + new * momentum)
    made = (x - mean.view(shape)) * (variance + eps).rsqrt().view(shape)
    made = made if weight is None else made * weight.view(shape)
    made = made if bias is None else made + bias.view(shape)
    return made.to(input.dtype)  # type: ignore[no-any-return]


def _looked_up(
    input: Any,
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    theirs = getattr(weight, "placements", ())
    if Shard(0) not in theirs or max_norm is not None or scale_grad_by_freq or sparse:
        return functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    mesh, of_ids, result, gradient = weight.device_mesh, [], [], []
    for own, at in zip(theirs, getattr(input, "placements", (Replicate(),) * weight.device_mesh.ndim), strict=True):
        follows = own == Replicate() and not at.is_partial()  # a rank looks up its own ids
        of_ids.append(at if follows else Replicate())
        result.append(Partial() if own == Shard(0) else at if follows else Shard(input.ndim))
        gradient.append(Partial() if follows and at != Replicate() else own)
    table = weight.to_local(grad_placements=gradient)
    ids = laid_out(input, mesh, tuple(of_ids)).to_local()  # type: ignore[attr-defined]
    of_rows = tuple(one if one == Shard(0) else Replicate() for one in theirs)
    first = laid_out(torch.arange(len(weight)), mesh, of_rows).to_local()[:1].sum()  # type: ignore[attr-defined]
    count, places = len(table), ids - first
    table = table if count else functional.pad(table, (0, 0, 0, 1))  # the gradient of no rows
    rows = functional.embedding(places.clamp(0, max(count - 1, 0)), table)
    if padding_idx is not None:
        rows = torch.where((ids == padding_idx % len(weight))[..., None], rows.detach(), rows)
    rows = torch.where(((places >= 0) & (places < count))[..., None], rows, 0.0)
    shape = torch.Size((*input.shape, weight.shape[1]))
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, mesh, result, run_check=False, shape=shape, stride=strides)


def _picked(input: Any, dim: int, index: Any, **given: Any) -> Tensor:
    sliced = [axis for axis, one in enumerate(input.placements) if getattr(one, "dim", None) == dim % input.ndim]
    placed = tuple(Replicate() if axis in sliced[1:] else one for axis, one in enumerate(input.placements))
    return torch.gather(laid_out(input, input.device_mesh, placed), dim, index, **given)


def _bag(
    input: Tensor,
    weight: Tensor,
    offsets: Any = None,
    max_norm: Any = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: Any = None,
) -> Tensor:
    alone = input.ndim == 2 and input.numel() and offsets is None and max_norm is None
    if not alone or scale_grad_by_freq or sparse or (per_sample_weights is not None and mode != "sum"):
        given = offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights
        return functional.embedding_bag(input, weight, *given, include_last_offset, padding_idx)
    rows, used = _looked_up(input, weight), torch.ones_like(input)[..., None] > 0
    if padding_idx is not None:
        used = (input != padding_idx % len(weight))[..., None]
        rows = torch.where(used, rows, -torch.inf if mode == "max" else 0.0)
    if mode == "max":
        return torch.where(used.any(1), rows.max(1).values, 0.0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[..., None]
    return rows.sum(1) if mode == "sum" else rows.sum(1) / used.sum(1).clamp(min=1)


def _loss_of_product(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Any = None,
    ignore_index: Any = None,
    options: Any = None,
    **given: Any,
) -> Tensor:
    logits = functional.linear(input, linear_weight, linear_bias)
    return functional.cross_entropy(
        logits, target, ignore_index=-100 if ignore_index is None else ignore_index, **given
    )


_INSTEAD: dict[Any, Any] = {
    **{torch.sgn: _sign, Tensor.sgn: _sign, torch.angle: _angle, Tensor.angle: _angle, torch.polar: _polar},
    **{torch.as_strided: _strided, Tensor.as_strided: _strided},
    **{torch.select: _selected, Tensor.select: _selected, torch.unbind: _unbound, Tensor.unbind: _unbound},
    getattr(functional, "linear_cross_entropy", None): _loss_of_product,  # of torch 2.13
    **dict.fromkeys((torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.__truediv__), _quotient),
    **{functional.batch_norm: _batch_norm, functional.embedding: _looked_up, functional.embedding_bag: _bag},
    **{functional.normalize: _normalized, functional.rms_norm: _rms_norm, torch.rms_norm: _rms_norm},
    **{function: partial(_concatenated, function) for function in (torch.cat, torch.concat)},
    torch.stack: partial(_joined, torch.stack),
    **{torch.gather: _picked, Tensor.gather: _picked},
    **{torch.matmul: _product, Tensor.matmul: _product, Tensor.__matmul__: _product},
}


class _Instead(TorchFunctionMode):
    """Computes by other functions what DTensor (torch 2.13) computes wrongly or refuses: the gradient of `sgn` is none,
    those of `polar` and `angle` multiply by a complex number, a part is taken along another dim where that is counted
    from the last, parts of a sliced dim and RMS norms along it are refused, as are strides of memory, a vector times
    slices of a matrix has the strides of a matrix, lookups in slices are masked once for all axes and where sums have
    other dims, bags of rows of a table have no rule, slices and partial sums cannot be joined, batch norms lose what
    they write to statistics of slices, and norms written to a given tensor (spectral norm) are bounded in place."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sliced = func in _INSTEAD and any(isinstance(one, DTensor) for one in tree_leaves(args))
        return (_INSTEAD[func] if sliced else func)(*args, **(kwargs or {}))


class _Recurrent(TorchFunctionMode):
    """Recurrent layers and cells, of which rows alone are sliced: torch takes their steps apart, which DTensor (torch
    2.13) refuses along a sliced dim, and writes gates in place, which it refuses for partial sums. Where rows come
    first, torch transposes results in place, and a DTensor has the old strides."""

    NAMES = "gru", "lstm", "rnn_relu", "rnn_tanh"
    CELLS = "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        dense = name in self.NAMES and isinstance(args[3], bool)  # no packed sequence
        if not (dense or name in self.CELLS) or not isinstance(args[0], DTensor):
            return func(*args, **(kwargs or {}))
        mesh = args[0].device_mesh
        if name in self.CELLS:
            rows, replicated = _complete_along(args[0], {1}), (Replicate(),) * mesh.ndim
            values = tree_map_only(Tensor, lambda one: laid_out(one, mesh, rows), args[:2])
            weights = tree_map_only(Tensor, lambda one: laid_out(one, mesh, replicated), args[2:])
            return func(*values, *weights, **(kwargs or {}))
        value, states, weights, *options, rows_first = args
        others = {*range(value.ndim)} - ({0 if rows_first else 1} if value.ndim > 2 else set())
        value = laid_out(value, mesh, _complete_along(value, others))
        weights = [laid_out(one, mesh, (Replicate(),) * mesh.ndim) for one in weights]
        if not rows_first:
            return func(value, states, weights, *options, False, **(kwargs or {}))
        result, *states = func(value.transpose(0, 1), states, weights, *options, False)
        return (result.transpose(0, 1), *states)


class _Sections(TorchFunctionMode):
    """Takes apart what holds several sections of one size along a dim (queries, keys and values), of which every rank
    has a slice of each (`_StridedShard`): nothing is sent. DTensor (torch 2.13) gathers them for all but views."""

    APART: tuple[Any, ...] = (
        *(torch.chunk, torch.narrow, torch.split, functional.glu),
        *(Tensor.chunk, Tensor.narrow, Tensor.split, Tensor.__getitem__),
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        striped = args[0].placements if func in self.APART and args and isinstance(args[0], DTensor) else ()
        found = {(one.dim, one.split_factor) for one in striped if isinstance(one, _StridedShard)}
        by = args[1] if len(args) > 1 and isinstance(args[1], tuple) else args[1:]
        if len(found) != 1 or any(isinstance(one, Tensor) for one in by):
            return func(*args, **given)
        ((dim, count),) = found
        sections = args[0].unflatten(dim, (count, -1)).unbind(dim)
        if func is functional.glu:
            gated = functional.glu(torch.empty(args[0].shape, device="meta"), *args[1:], **given)
            fits = count == 2 and gated.shape == sections[0].shape
            return sections[0] * sections[1].sigmoid() if fits else func(*args, **given)
        shape = [-1 if one == dim else 1 for one in range(args[0].ndim)]
        places = torch.arange(args[0].shape[dim]).view(shape).expand(args[0].shape)
        taken = func(places, *args[1:], **given)  # where each part begins and ends
        numbers = [_number(one, dim, sections[0]) for one in ([taken] if isinstance(taken, Tensor) else taken)]
        if None in numbers:
            return func(*args, **given)
        own = [sections[number] for number in numbers]
        return own[0] if isinstance(taken, Tensor) else tuple(own)


def _number(places: Tensor, dim: int, section: Tensor) -> Any:
    """Which section a part is, by the places of its elements along `dim`; None if it is none."""
    if places.shape != section.shape:
        return None
    along = places[tuple(slice(None) if one == dim else 0 for one in range(places.ndim))]
    first, last = int(along[0]), int(along[-1])
    return first // len(along) if first % len(along) == 0 and last - first == len(along) - 1 else None


def laid_out(value: Tensor, mesh: DeviceMesh, placed: Placed) -> Tensor:
    """A tensor in a layout; one that is no DTensor is the same on all ranks."""
    if not isinstance(value, DTensor):
        if torch._C._functorch.is_gradtrackingtensor(value):
            raise NotImplementedError(
                "torch.func derives (grad, vjp, jvp, ...) through a module that the plan lays out, unlike DTensor; "
                "leave modules within the derivative replicated, or train with meshwright's own programs."
            )
        value = DTensor.from_local(value, mesh, (Replicate(),) * mesh.ndim, run_check=False)
    now = value.placements
    if any(not have.is_partial() and have != want for have, want in zip(now, placed, strict=True)):
        complete = [Replicate() if have.is_partial() else have for have in now]  # add up before anything else moves
        value = value.redistribute(placements=complete)
    return value.redistribute(placements=placed)


def placements_of(table: Mapping[str, Placed], name: str, otherwise: Any) -> Any:
    """The entry of a tensor or module, or that of its layers."""
    return table.get(name, table.get(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), otherwise))


def _receiving(mesh: DeviceMesh, placed: Placed) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        value = args[0] if args else None  # what comes by keyword stays as torch lays it out
        if not isinstance(value, Tensor) or (isinstance(value, DTensor) and value.placements == placed):
            return args  # its gradient is added up once for all uses, where it was returned
        return (laid_out(value, mesh, placed), *args[1:])

    return hook


def _returning(mesh: DeviceMesh, placed: Placed) -> Any:
    def hook(_: nn.Module, __: Any, result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        found = laid_out(result, mesh, placed)
        of_rows = any(type(one) is not Partial and one.is_partial() for one in getattr(result, "placements", ()))
        if of_rows and found.requires_grad:  # DTensor does not take partial sums for the gradient of an embedding's
            found.register_hook(_complete(placed))  # type: ignore[no-untyped-call]
        return found

    return hook


def _complete(placed: Placed) -> Any:
    """Adds up the gradient of a parameter over the ranks that hold it."""
    return lambda gradient: None if gradient is None else gradient.redistribute(placements=placed)
