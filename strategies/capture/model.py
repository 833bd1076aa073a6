"""Capture a torch module as an `OperatorGraph`, by torch.export on an example batch.

torch.export is used without `run_decompositions`, which loses no_grad regions and breaks batch-norm in training. What
the loss does not need is dropped. The module and the batch are left as they were.
"""

from __future__ import annotations

import inspect
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree

from strategies.capture.assigned_buffers import AssignedBuffers
from strategies.capture.autograd_functions import functions_as_operators
from strategies.capture.branches import REFUSED, Branches, NotChosen
from strategies.capture.changing_attributes import ChangingAttributes
from strategies.capture.constant_buffers import ConstantBuffers
from strategies.capture.conversions import Conversions
from strategies.capture.derivatives import derivatives_as_operators
from strategies.capture.drawing_functions import DrawingFunctions, DrawsIn
from strategies.capture.duplicate import duplicate
from strategies.capture.exported import check_constants, dtype_of, read
from strategies.capture.fixed_sizes import with_fixed_sizes, with_unknown_layers
from strategies.capture.indexed import by_places
from strategies.capture.logged_arrays import leaves_torch
from strategies.capture.masked import Selections
from strategies.capture.mean_weights import MeanWeights, WeighedMean
from strategies.capture.merged_dims import unmerged
from strategies.capture.nodes import forwards_wrapped, in_library, shaped_by_values, short, source_of
from strategies.capture.opaque_modules import NotOpaque, OpaqueModules
from strategies.capture.packed_sequences import packed_as_padded
from strategies.capture.packed_weights import packed, sections_of
from strategies.capture.repeated_modules import NotRepeated, RepeatedModules
from strategies.capture.sizes_as_numbers import with_unsliced_modules
from strategies.capture.sizes_of_batch import SizesOfBatch
from strategies.capture.strided import replace_strides
from strategies.capture.tracing import traceable
from strategies.capture.transforms import transforms_as_operators
from strategies.capture.unsupported import (
    check_dense,
    check_hooks,
    check_nodes,
    check_operands,
    check_scripted,
    refusing_unseen,
)
from strategies.core.errors import StrategyError
from strategies.core.graph import FusedSections, OperatorGraph
from strategies.rules.random import draws

UNKNOWN = (GuardOnDataDependentSymNode, DynamicOutputShapeException, DataDependentOutputException)
"""What export raises where a forward asks for values."""
ON_SLICES = {
    "transformers": with_fixed_sizes,
    "parallelize_module": with_fixed_sizes,
    "deepspeed": with_unsliced_modules,
}
"""By the trainers that run the code of modules on slices: what marks in a graph that which does not."""
ONE_AT_A_TIME = threading.RLock()
"""Exports replace functions of torch, for all threads."""


@dataclass(frozen=True)
class Captured:
    """A graph, and the model's own tensors by name (not copied): parameters, buffers and baked constants. The graph
    holds for the values `decided` of buffers and frozen parameters, by names as in a state dict."""

    graph: OperatorGraph
    tensors: dict[str, Tensor]
    decided: Mapping[str, Tensor] = field(default_factory=dict)


class UnseenMeans(StrategyError):
    """A forward computes `seen` means, not those that were to be weighed, or those of a layer that repeats stand for
    several."""

    def __init__(self, seen: int, weighed: int) -> None:
        super().__init__("MW901", f"{seen} means were seen in place of {weighed}")
        self.seen = seen


class Objective(nn.Module):
    """The model and its loss as one module: flat batch tensors in, the loss (training) or the outputs (evaluation) out.

    With a loss the last entry of a tuple batch is the target; of a dict batch, whatever `forward` does not take by
    name. With `autocast` both run under torch.autocast of that dtype, on the device of the batch. `sections` says
    which fused weights are sliced section by section, None: all. A graph for a target of `ON_SLICES` says what of the
    model does not run on slices. The weights of `weighed_means` means of the loss, scalars, follow the entries.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | None,
        names: Sequence[str],
        targets: Sequence[str],
        autocast: torch.dtype | None = None,
        *,
        sections: Mapping[str, FusedSections] | None = None,
        target: str | None = None,
        weighed_means: int = 0,
    ) -> None:
        super().__init__()
        self.sections, self.target, self.weighed_means = sections, target, weighed_means
        if weighed_means:
            self.mean_weights = WeighedMean()
        self.model, self.loss, self.autocast = model, loss, autocast
        self.names, self.targets = tuple(names), frozenset(targets)

    def weighed(self, means: int) -> Objective:
        """The same model and loss, each of whose `means` means takes a weight."""
        given = self.model, self.loss, self.names, [*self.targets], self.autocast
        return Objective(*given, sections=self.sections, weighed_means=means)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of what forward takes."""
        return (*self.names, *(f"mean_weight_{number}" for number in range(self.weighed_means)))

    def forward(self, *tensors: Tensor) -> Any:
        if not self.weighed_means:
            return self._in_precision(*tensors)
        count = len(self.names)
        with MeanWeights(self.mean_weights, tensors[count:]) as seen:
            output = self._in_precision(*tensors[:count])
        if torch.is_grad_enabled() and len(seen.means) != self.weighed_means:  # means have gradients
            raise UnseenMeans(len(seen.means), self.weighed_means)
        return output

    def _in_precision(self, *tensors: Tensor) -> Any:
        if self.autocast is None:
            return self._run(*tensors)
        with torch.autocast(tensors[0].device.type, self.autocast):
            return self._run(*tensors)

    def _run(self, *tensors: Tensor) -> Any:
        batch = dict(zip(self.names, tensors, strict=True))
        inputs = {name: value for name, value in batch.items() if name not in self.targets}
        if all(name.isdigit() for name in self.names):
            output = self.model(*inputs.values())
        else:
            output = self.model(**inputs)
        targets = (batch[name] for name in self.names if name in self.targets)
        return output if self.loss is None else self._loss_of(output, *targets)

    def _loss_of(self, *given: Any) -> Any:
        assert self.loss is not None
        return self.loss(*given)


OF_LOSS = Objective._loss_of.__code__


def _check_calls(objective: Objective) -> None:
    """Raises StrategyError where the model or its loss does not take what it is called with."""
    inputs = [name for name in objective.names if name not in objective.targets]
    targets = [name for name in objective.names if name in objective.targets]
    positional = all(name.isdigit() for name in objective.names)
    given = (tuple(inputs), {}) if positional else ((), dict.fromkeys(inputs))
    _check_call("The model's forward", objective.model.forward, *given, _listed(inputs, "the entries"))
    if objective.loss is not None:
        loss, keywords = objective.loss.forward, {}
        if isinstance(objective.loss, LossFunction):
            loss, keywords = objective.loss.function, objective.loss.keywords
        what = f"the model's output and {_listed(targets, 'the targets')}"
        _check_call("The loss", loss, ("output", *targets), keywords, what)


def _check_call(who: str, called: Any, args: tuple[str, ...], keywords: Mapping[str, Any], what: str) -> None:
    try:
        signature = inspect.signature(called, follow_wrapped=False)  # a wrapper may take more
    except (TypeError, ValueError):  # of a builtin, which says nothing before it is called
        return
    try:
        bound = signature.bind(*args, **keywords).arguments
    except TypeError as error:
        taken = ", ".join(str(one.replace(annotation=one.empty)) for one in signature.parameters.values())
        raise StrategyError(
            "MW901",
            f"{who} takes ({taken}), but is called with {what}: {error}. What forward takes by name is the model's, "
            "the rest of a sample the loss's; without a loss all of it is the model's.",
        ) from error
    for name, given in bound.items():
        if name in args[1:] and given in args[1:] and given != name:
            raise StrategyError(
                "MW901",
                f"{who} would get {given} of a sample as its {name}: it is called with {what}, in this order. Give the "
                "entries of a sample in the order in which it takes them, or name its parameters otherwise.",
            )


def _listed(names: Sequence[str], title: str) -> str:
    """`names` of a batch behind a title; those of a tuple are numbers."""
    return f"{title} {', '.join(names)} of a sample"


class LossFunction(nn.Module):
    """A plain function as a module, so that its operators are named `loss`."""

    def __init__(self, function: Any, keywords: dict[str, Any]) -> None:
        super().__init__()
        self.function, self.keywords = function, keywords

    def forward(self, *args: Tensor) -> Tensor:
        result: Tensor = self.function(*args, **self.keywords)
        return result


def capture(
    objective: Objective, batch: Sequence[Tensor], *, training: bool, like: OperatorGraph | None = None
) -> Captured:
    """Capture the operator graph of an objective.

    Args:
        objective: model and loss.
        batch: batch entries with their global shapes.
        training: the only output is the scalar loss; otherwise the outputs are all tensors that the module returns.
        like: another graph of the same model, whose slices of parameters this one takes.

    Raises:
        StrategyError: the module does not run, cannot be captured, or does not return a scalar loss.
    """
    with ONE_AT_A_TIME:
        return _capture(objective, batch, training, like)


def _capture(objective: Objective, batch: Sequence[Tensor], training: bool, like: OperatorGraph | None) -> Captured:
    _check_calls(objective)
    check_scripted(objective)
    written = frozenset() if like is None else {like.by_id[buffer].name for buffer, _ in like.updates}
    constant, sizes = ConstantBuffers(objective, written), SizesOfBatch(objective, batch)
    selections = Selections()
    while True:
        deciding = _Deciding(objective, constant, sizes, selections)
        try:
            return _chosen(objective, batch, training, like, deciding)
        except StrategyError as error:
            unknown = isinstance(error.__cause__, UNKNOWN) or error.code == "MW902"
            if not (unknown or deciding.opaque.chosen or deciding.branches.chosen) or not deciding.widen():
                raise


class _Deciding:
    """What a capture knows, and has chosen, where a forward decides by values."""

    def __init__(
        self, objective: Objective, constant: ConstantBuffers, sizes: SizesOfBatch, selections: Selections
    ) -> None:
        self.constant, self.sizes, self.selections = constant, sizes, selections
        self.opaque, self.drawing = OpaqueModules(objective), DrawingFunctions(objective)
        self.branches, self.conversions = Branches(objective, selections), Conversions()

    def widen(self) -> bool:
        """Know more values from now on; False where there are none."""
        return self.constant.widen() or self.selections.widen() or self.sizes.widen()

    def choose(self, cause: BaseException) -> bool:
        """Choose what is to be an operator or a branch, after an error; False where there is nothing."""
        running, guard = _running(cause), isinstance(cause, GuardOnDataDependentSymNode)
        branching = guard and (self.conversions.choose(cause) or self.branches.choose(running))
        return branching or self.drawing.choose(cause) or self.opaque.choose(running)

    @property
    def values_are_read(self) -> bool:
        """Whether every layer is traced: what these read is not seen where one layer stands for others."""
        return bool(self.opaque.chosen or self.drawing.chosen or self.branches.chosen or self.sizes.known)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Export within this context."""
        with (
            self.constant.known(),
            self.opaque.as_nodes(),
            self.drawing.as_nodes(),
            self.branches.as_choices(),
            self.conversions.as_symbols(),
            self.sizes.read(),
        ):
            yield


def _chosen(
    objective: Objective,
    batch: Sequence[Tensor],
    training: bool,
    like: OperatorGraph | None,
    deciding: _Deciding,
) -> Captured:
    """The captured objective, where what decides by values is chosen to be an operator, or a branch."""
    while True:
        try:
            if (captured := _captured(objective, batch, training, deciding)) is not None:
                given = objective.sections if like is None else sections_of(like)
                graph = with_unknown_layers(packed(captured.graph, given), objective)
                if objective.target in ON_SLICES:
                    graph = ON_SLICES[objective.target](graph, objective, batch)
                return replace(captured, graph=graph)
        except DrawsIn as error:
            deciding.drawing.chosen.add(error.name)
        except NotOpaque as error:
            deciding.opaque.refuse(error.owner)
        except NotChosen as error:
            deciding.branches.refuse(error.owner, error.why)
        except StrategyError as error:
            cause = error.__cause__
            if cause is None or not (isinstance(cause, UNKNOWN) or leaves_torch(cause)) or not deciding.choose(cause):
                raise


def _captured(
    objective: Objective,
    batch: Sequence[Tensor],
    training: bool,
    deciding: _Deciding,
) -> Captured | None:
    """The captured objective; None where other modules must be one node, other buffers are no constants, or other
    branches cannot be captured."""
    modes = {module: module.training for module in objective.modules()}
    objective.train(training)
    if training:
        check_hooks(objective)
    hook = objective.register_forward_hook(_checked_loss if training else lambda _, __, output: plain_outputs(output))
    repeated, assigned = RepeatedModules(objective), AssignedBuffers(objective)
    changing = ChangingAttributes(objective)
    try:
        with (
            traceable(objective) as stand_ins,
            assigned.written(),
            changing.watched(),
            refusing_unseen(training),
            packed_as_padded(),
            functions_as_operators(training),
            derivatives_as_operators(),
            transforms_as_operators(stand_ins),
            deciding.traced(),
            forwards_wrapped([Objective], partial(by_places, selections=deciding.selections)),
            warnings.catch_warnings(),
        ):
            # recurrent layers store their weights anew under export, which does no harm
            warnings.filterwarnings("ignore", message="The tensor attribute", category=UserWarning)
            # as torch does its own formulas of forward-mode derivatives
            warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
            export = partial(torch.export.export, objective, tuple(map(_copied, batch)), strict=False)
            try:
                if deciding.values_are_read:
                    raise NotRepeated
                try:
                    with repeated.traced_once():
                        exported = export()
                except UnseenMeans:
                    raise NotRepeated from None
                repeated.expand(exported)
                if repeated.lists and assigned.names:  # the writes of layers that were not traced are missing
                    raise NotRepeated
            except NotRepeated:
                assigned.restore()
                changing.restore()
                exported = export()
    except (StrategyError, NotOpaque):
        raise
    except Exception as error:  # whatever the user's forward raises, reported as one paragraph
        raise StrategyError("MW901", _capture_failure(error, deciding.branches.why)) from error
    finally:
        hook.remove()
        for module, mode in modes.items():
            module.training = mode
    if deciding.branches.refuse_others(exported, training):
        return None
    around = _shaped_by_values(objective, exported.graph)
    lines = {source_of(node) for node in exported.graph.nodes if shaped_by_values(node)} | stand_ins.transforms
    assigned.copy_old_values(exported)
    replace_strides(exported.graph)
    check_nodes(exported.graph, training)
    try:
        graph, tensors = read(exported, objective, objective.inputs, "training" if training else "evaluation")
    except StrategyError:
        if deciding.opaque.choose(around):
            return None
        raise
    if deciding.constant.are_written(graph, tensors, assigned.names):
        return None
    buffers = objective.named_buffers(remove_duplicate=False)
    taken = {name for name, buffer in buffers if id(buffer) in stand_ins.taken}
    check_constants(graph, tensors, taken, assigned.names)
    check_operands(graph)
    graph = replace(unmerged(_needed(graph)), rewritten=frozenset(lines - {""}))
    try:
        changing.check(graph, tensors, batch, training, bool(deciding.opaque.chosen))
    except StrategyError:
        raise
    except Exception as error:  # as above, on the example batch
        raise StrategyError("MW901", _capture_failure(error)) from error
    return Captured(graph, tensors, deciding.constant.decided)


def _running(error: BaseException) -> list[nn.Module]:
    """The modules whose forward raised an error, innermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "forward"]
    owners = [frame.f_locals.get(name) for frame in reversed(frames) for name in frame.f_code.co_varnames[:1]]
    return [owner for owner in owners if isinstance(owner, nn.Module)]


def _shaped_by_values(objective: Objective, graph: fx.Graph) -> list[nn.Module]:
    """The modules around the first tensor whose shape depends on values, innermost first."""
    modules = dict(objective.named_modules())
    for node in graph.nodes:
        if shaped_by_values(node):
            return [modules[path] for path, _ in reversed((node.meta.get("nn_module_stack") or {}).values())]
    return []


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def run_once(objective: Objective, batch: Sequence[Tensor], *, backward: bool = False) -> None:
    """Run a copy of `objective` eagerly on `batch`, for what `capture` would find wrong where nothing need be captured;
    with `backward` its gradients too.

    Raises StrategyError if the module does not run, has sparse gradients, or does not return a scalar loss that depends
    on a parameter.
    """
    check_dense(objective)
    try:
        output = duplicate(objective).train()(*(tensor.detach().clone() for tensor in batch))
        loss = _checked_loss(objective, None, output)
        if backward:
            loss.backward()  # type: ignore[no-untyped-call]
    except StrategyError:
        raise
    except Exception as error:  # as above
        raise StrategyError("MW901", _capture_failure(error)) from error


def loss_in(output: object) -> object:
    """The loss in what a module returns: the first entry of a tuple or list, the entry `loss` of a dict or object,
    or all of it; a scalar where it is a tensor of one element, from which torch starts backward too."""
    candidate = output[0] if isinstance(output, (tuple, list)) and output else output
    if isinstance(candidate, Mapping):
        candidate = candidate.get("loss", candidate)
    loss = getattr(candidate, "loss", candidate)
    return loss.reshape(()) if isinstance(loss, Tensor) and loss.dim() and loss.numel() == 1 else loss


def _checked_loss(objective: nn.Module, _: Any, output: Any) -> Tensor:
    """The scalar loss in `output`. Raises StrategyError if there is none, or nothing to train."""
    assert isinstance(objective, Objective)
    own, loss = objective.loss is None, loss_in(output)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        who = "The model (loss.target is null, so it must return its loss)" if own else "The loss"
        raise StrategyError(
            "MW320",
            f"{who} returned {_described(output)}; training needs one floating-point scalar (alone, first in a tuple, "
            "or under the name loss). A reduction such as .mean() is missing?",
        )
    if not loss.requires_grad:
        raise StrategyError(
            "MW321",
            "The loss depends on no trainable parameter (all are frozen, unused or behind no_grad): nothing to train.",
        )
    return loss


def plain_outputs(output: Any) -> Any:
    """What an evaluation returns, as torch.export takes it: a dataclass that it does not know becomes a dict, and a
    cache of keys and values, which transformers' models return by default, None."""
    if is_dataclass(output) and not isinstance(output, type) and type(output) not in _pytree.SUPPORTED_NODES:
        output = {field.name: value for field in fields(output) if (value := getattr(output, field.name)) is not None}
    leaves, structure = _pytree.tree_flatten(output, _is_cache)
    if any(map(_is_cache, leaves)):
        output = _pytree.tree_unflatten([None if _is_cache(leaf) else leaf for leaf in leaves], structure)
    return output


def _is_cache(value: object) -> bool:
    return any(f"{one.__module__}.{one.__name__}" == "transformers.cache_utils.Cache" for one in type(value).__mro__)


def _described(output: object) -> str:
    """A short description of a returned value."""
    if isinstance(output, Tensor):
        return f"a tensor {dtype_of(output)}{list(output.shape)}"
    if isinstance(output, (tuple, list)):
        return f"{type(output).__name__} of {', '.join(map(_described, output)) or 'nothing'}"
    if isinstance(output, Mapping):
        entries = [f"{key}: {_described(value)}" for key, value in output.items()]
        return f"{type(output).__name__} of {', '.join(entries) or 'nothing'}"
    return "None" if output is None else f"a {type(output).__name__}"


def _needed(graph: OperatorGraph) -> OperatorGraph:
    """The graph without operators whose results neither an output nor a buffer needs. Those that draw random numbers
    or compare the batch stay."""
    wanted, kept = {ref.id for ref in (*graph.outputs, *(value for _, value in graph.updates))}, []
    for operator in reversed(graph.operators):
        if operator.id in wanted or draws(operator) or operator.op == "compared":
            kept.append(operator)
            wanted.update(ref.id for ref in operator.operands)
    return replace(graph, operators=tuple(reversed(kept)))


def _capture_failure(error: BaseException, why: str = REFUSED) -> str:
    """One paragraph of an error of a forward; `why` a branch is not captured."""
    lines = [text.strip().rstrip(".") for text in str(error).splitlines() if text.strip()]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not in_library(frame.filename)
        and frame.name != "__torch_function__"  # which only passes on
        and "/triton/" not in frame.filename
    ]
    where = f" at {short(frames[-1].filename)}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    if isinstance(error, GuardOnDataDependentSymNode) and "ctc_loss(" in where:
        return (
            f"The model's forward gives CTC targets that are concatenated, as many as values say{where}, so it is not "
            "one graph. Give them padded, one row per sample, with their lengths: "
            "ctc_loss(log_probs, labels.clamp(min=0), input_lengths, (labels >= 0).sum(-1))."
        )
    if isinstance(error, GuardOnDataDependentSymNode):
        return (
            f"The model's forward takes a branch or a shape from the values of a tensor{where}, so it is not one "
            f"graph: {why}."
        )
    if leaves_torch(error):
        return (
            f"The model's forward leaves torch{where}: what numpy or scipy computes there is unknown to a capture, as "
            "tensors have no values. Compute it with torch; in the loss (loss.target) or a child module that takes and "
            "returns tensors of fixed shapes, which is one operator; or in a function of torch.library.custom_op with "
            "register_fake, which is one, too."
        )
    if any(frame.f_code.co_name == "deepcopy" for frame, _ in traceback.walk_tb(error.__traceback__)):
        return (
            f"The model's forward copies tensors (copy.deepcopy){where}, which have no numbers in a capture. Make the "
            "copy in the constructor; for a tensor that forward computes, use clone()."
        )
    if any(words in str(error) for words in ("Cannot access data pointer", "active drivers")):  # torch's and Triton's
        return (
            f"The model's forward launches a kernel{where}, which takes no tensors without numbers, as a capture has. "
            "Make it an operator of its own: torch.library.triton_op with wrap_triton for a Triton kernel, or "
            "custom_op, with register_fake, and register_autograd for its backward."
        )
    if "found a fake tensor in the exported program constant" in str(error):
        return (
            "The model's forward reads `.data` of a tensor, or keeps a tensor from an earlier forward, which a graph "
            "cannot do; use `.detach()`, and register the tensor as a buffer."
        )
    if isinstance(error, (DynamicOutputShapeException, DataDependentOutputException)):
        return (
            f"The model's forward calls {error.func}{where}, whose result depends on the values of tensors in its "
            "shape, so it is not one graph; compute it outside of the model, or with an operator of fixed shape."
        )
    what = f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
    given = [frame.f_locals["given"] for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is OF_LOSS]
    if given:
        output, *targets = map(_described, given[-1])
        beside = f" and {', '.join(targets)}" if targets else ""
        return f"The loss failed on the model's output, {output},{beside}{where} ({what})."
    return f"The model failed on the example batch{where} ({what})."
