"""Plans of modules in memory: made, shown, stored, read again, and turned into what a rank runs.

The arguments of `plan` are keys of a config; everything from there on is what `run plan` and `run train` do with one.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from meshwright.paths import path_of
from runner.build.modules import DTYPES, check_complete, export_target, sections_of, target_names
from runner.config.load import load as load_config
from runner.config.load import validated
from runner.config.origins import Origins
from runner.config.schema import Config
from runner.config.section import MOST_RANKS
from runner.data.loader import flatten_batch
from runner.errors import ConfigError, allowed
from runner.export.changes import Change
from runner.export.targets import exported, target_of
from runner.planning.clusters import cluster_of, shipped
from runner.planning.given import prepare_given
from runner.planning.prepare import Prepared
from runner.report import text
from runner.report.page import plan_page
from runner.report.plan_files import plan_content, plan_text
from runner.report.plan_form import check_shown
from runner.run_folder.plan_file import read_content
from strategies.capture import ON_SLICES, Captured, LossFunction, Objective, check_decided, duplicate
from strategies.capture.shapes import pretend
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan as OperatorPlans
from strategies.planner.plan_file import check_form

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright.ranks import ShardedModule, ShardedOptimizer

Batch = Tensor | Sequence[Tensor] | Mapping[str, Tensor]
"""A global batch: dim 0 of every entry counts the rows."""
Loss = nn.Module | Callable[..., Tensor]
Signature = Mapping[str, tuple[tuple[int, ...], torch.dtype, bool, str | None]]
"""Shape, dtype and `requires_grad` of every parameter and buffer by name."""

MODES = ("auto", "semi_auto", "data_parallel")
"""In which a rank runs one program."""
OF_RUNS = ("batch_rows", "comm_overlap", "dump_ir", "offload", "server")
"""Keys of the section `parallel` that only `run train` carries out."""

_log = logging.getLogger("meshwright")


@dataclass(frozen=True)
class Planned:
    """What a plan was made of: the preparation, names and targets of the batch (`objective`, whose tensors may have
    shapes alone), what was captured, the tensors, plain attributes, parts and ties of the module, the loss, and the
    batch."""

    prepared: Prepared
    objective: Objective
    captured: Captured
    signature: Signature
    settings: Mapping[str, Any]
    parts: Mapping[str, str]
    ties: Mapping[str, str]
    loss: nn.Module | None
    batch: tuple[Tensor, ...]

    def prepared_for(self, target: str) -> Prepared:
        """The preparation, whose graph says all that an export asks it for."""
        graph = self.prepared.graph
        if graph is None or target not in ON_SLICES or self.objective.target == target:
            return self.prepared
        make = partial(ON_SLICES[target], graph, self.objective, self.batch)
        return replace(self.prepared, graph=graph.once(("for", target), make))

    def as_planned(self, what: str) -> nn.Module:
        """A copy of the planned module, on the same parameters, with the plain attributes that it had. Raises
        ConfigError, for the call `what`, where it has other parts or tensors by now."""
        module = duplicate(self.objective.model, parameters=False)
        then, now = (
            {**parts, **{name: [*entry[:2]] for name, entry in signature.items()}}
            for parts, signature in ((self.parts, self.signature), (_parts_of(module), signature_of(module)))
        )
        for name in dict.fromkeys([*then, *now]):
            if then.get(name) != now.get(name):
                raise ConfigError(
                    "MW464",
                    f"{what}: {name} of the planned module was {then.get(name)!s:.60} and is {now.get(name)!s:.60}, "
                    "but the first batch of each shape is captured from it. Change a copy of the module, or plan the "
                    "changed one.",
                )
        for name, first in self.ties.items():  # a module that moves to another device unties its tensors
            _put(module, name, _tensors_of(module)[first])
        for path, part in module.named_modules():
            for name in vars(part):
                if (key := f"{path}.{name}".lstrip(".")) in self.settings:
                    setattr(part, name, self.settings[key])
        return module

    def step_of(self, module: nn.Module) -> Objective:
        """Another module with the loss of the plan."""
        return Objective(module, self.loss, self.objective.names, tuple(self.objective.targets))


class Plan:
    """How a module is trained on several ranks. Made by `plan` or `load`.

    Attributes:
        content: that of plan.json.
    """

    def __init__(self, content: dict[str, Any], planned: Planned | None = None) -> None:
        self.content = content
        self._planned = planned
        self._sharded: ShardedModule | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no module of a rank, which has process groups."""
        return self.__dict__ | {"_sharded": None}

    @property
    def mesh(self) -> dict[str, int]:
        """Size of every mesh axis by name, outermost first."""
        return dict(self.content["mesh"])

    @property
    def cost(self) -> float:
        """Predicted seconds of a training step."""
        return float(self.content["cost"]["total"])

    @property
    def memory(self) -> int:
        """Predicted bytes of a rank at the peak of a step."""
        return int(self.content["memory"]["peak"])

    @property
    def gap(self) -> float | None:
        """The optimality gap, as a share of the lower bound; None without a certificate."""
        gap: float | None = self.content["search"].get("gap")
        return gap

    def __str__(self) -> str:
        content = self.content
        mesh = " x ".join(f"{axis} {size}" for axis, size in content["mesh"].items())
        certificate = "" if self.gap is None else f"; optimality gap {text.shown_gap(self.gap)}"
        lines = [f"plan: mesh {mesh}; {len(content['operators'])} operators; {text.source(content['search'])}"]
        lines[0] += certificate
        lines += text.search_lines(content["search"])
        lines += [text.layer_table(content), text.totals(content), text.prediction_lines(content)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Plan on {self.mesh}: {self.cost:.4g} s per step, {self.memory:,} bytes per rank>"

    def report(self, file: str | Path) -> Path:
        """Write the plan as one page of HTML that needs no network. Returns its path."""
        return _written(file, plan_page(self.content, self.content.get("title", "plan")), "plan.report")

    def save(self, file: str | Path) -> Path:
        """Write the plan as plan.json, with the config that it was made with. Returns its path."""
        return _written(file, plan_text(self.content), "plan.save")

    def apply(self, module: nn.Module, device_mesh: DeviceMesh | None = None) -> ShardedModule:
        """What this rank trains. Collective: every rank of the process group calls it.

        torch.distributed must be initialised; its default group has as many ranks as the plan. The weights are those of
        `module`, of which slices are copied, so it can be dropped afterwards.

        Args:
            module: on the CPU, with parameters and buffers of the same names and shapes as the planned one. Numbers
                that are attributes, such as a dropout rate, are those of the planned one; a warning says where they
                differ.
            device_mesh: the ranks 0, 1, ... of the default group in any grid; None: all of them, on the device that the
                plan is for.

        Raises:
            ConfigError: the mesh, the module or its device does not fit; nothing has been changed then.
        """
        from meshwright.ranks import ShardedModule

        planned = self.planned("apply")
        if isinstance(module, ShardedModule):
            raise ConfigError("MW464", "plan.apply: this module is a rank's already; give the unsharded one.")
        check_signature(planned.signature, module, "plan.apply")
        own = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
        check_decided(planned.captured.decided, own, "plan.apply: the module")
        _warn_of_settings(planned.settings, module)
        self._sharded = ShardedModule(planned, module, device_mesh)
        return self._sharded

    def optimizer(
        self,
        factory: Callable[..., torch.optim.Optimizer],
        *,
        clip: float | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> ShardedOptimizer:
        """The optimizer of the module that `apply` made last. Collective.

        Args:
            factory: a class such as torch.optim.AdamW.
            clip: the largest norm of the global gradient.
            groups: parameters with options of their own, by names or globs, such as `[{"params": ["*.bias"],
                "weight_decay": 0.0}]`: the first match counts. All others are the first of `param_groups`.
            **options: arguments of `factory`, such as lr.

        Returns:
            A torch optimizer. `step` first adds up gradients over the ranks that hold the same parameter; at ZeRO
            stages 1 to 3 each rank updates its part of them.

        Raises:
            ConfigError: there is no module yet, or `factory` makes no optimizer with these options.
        """
        if self._sharded is None:
            raise ConfigError(
                "MW464", "plan.optimizer: there is no module of this rank yet; call plan.apply(module, device_mesh)."
            )
        return self._sharded.optimizer(factory, clip=clip, groups=groups, **options)

    def expressible(self, target: str, *, collectives: bool = False) -> list[Change]:
        """What a target would lay out otherwise than this plan, with what that costs; empty where it says all of it.

        Args:
            target: `torch`, `parallelize_module`, `torchtitan`, `autoparallel`, `transformers` or `deepspeed`.
            collectives: of `torch` also the kinds of collectives of which a step of the exported program sends other
                bytes, as DTensor decides: in a fork, a step runs on tensors without numbers. The bytes of these changes
                and those of the plan are what the program sends. They do not keep a plan from being exported.

        Raises:
            ConfigError: collectives of another target than `torch`.
            RunFailed: the exported program does not run.
        """
        planned = self.planned("expressible")
        found = target_of(target).changes(planned.prepared_for(target))
        return [*found, *self._collectives(target, planned)] if collectives else found

    def _collectives(self, target: str, planned: Planned) -> list[Change]:
        from runner.export import dry_run

        if target != "torch":
            raise ConfigError(
                "MW886",
                f"plan.expressible: the collectives of the target {target!r} are decided by another library; leave out "
                "collectives=True, or ask for the target 'torch'.",
            )
        prepared = planned.prepared
        code = exported(target, prepared, "", allow_changes=True)
        calls = dry_run.calls_of(code, planned.objective, planned.batch, prepared.device)
        cluster = cluster_of(prepared.config, prepared.device, prepared.world_size)
        return dry_run.collectives(self.content, calls, Mesh(tuple(self.mesh.items())), cluster)

    def export(self, target: str, file: str | Path, *, allow_changes: bool = False) -> Path:
        """Write the plan for another trainer. Returns the path of the file.

        Args:
            target: `torch`: a Python file of plain torch, which lays out the parameters of the module as DTensors;
                `parallelize_module`: a short one of torch's own styles, for plans that slice modules alone;
                `torchtitan`: a Python file with a `ShardingConfig` for every module; `autoparallel`: the JSON that its
                `save_placements` writes;
                `transformers`: the JSON of a `DistributedConfig`, for `from_pretrained(distributed_config=...)`;
                `deepspeed`: the JSON of its config, with ZeRO and AutoTP.
            file: to write.
            allow_changes: also where `expressible` lists something.

        Raises:
            ConfigError: the target cannot say the plan; nothing is written.
        """
        prepared = self.planned("export").prepared_for(target)
        content = exported(target, prepared, self.content["title"], allow_changes=allow_changes)
        return _written(file, content, "plan.export")

    def planned(self, what: str) -> Planned:
        """What the plan was made of. Raises ConfigError, for the call `what`, where it was read from a file alone."""
        if self._planned is None:
            raise ConfigError(
                "MW464",
                f"plan.{what}: the plan was read from a file alone, which does not hold the module's operators; read "
                "it with meshwright.load(file, module, batch, loss=loss).",
            )
        return self._planned


def loss_module(loss: Loss | None) -> nn.Module | None:
    """The loss as a module."""
    return loss if loss is None or isinstance(loss, nn.Module) else LossFunction(loss, {})


def require_module(given: object, what: str) -> None:
    """Raises ConfigError unless it is a module."""
    if not isinstance(given, nn.Module):
        made = " (make one: it is a class)" if isinstance(given, type) else ""
        raise ConfigError("MW204", f"{what}: module = {given!r} is no torch.nn.Module{made}.")


def entries_of(batch: Batch, what: str, order: Sequence[str] | None = None) -> tuple[tuple[str, ...], list[Tensor]]:
    """The names and tensors of a batch, as `flatten_batch`. Raises ConfigError for what is no tensor."""
    entries = [*batch.values()] if isinstance(batch, Mapping) else [batch]
    entries = [*batch] if isinstance(batch, tuple | list) else entries
    for one in entries:
        if not isinstance(one, Tensor):
            raise ConfigError(
                "MW312",
                f"{what}: the batch has a {type(one).__name__}; give tensors (torch.as_tensor makes them of arrays), "
                "alone, as a tuple, or as a dict by argument of forward.",
            )
    return flatten_batch(batch, order)


def require_plan(given: object, what: str) -> None:
    """Raises ConfigError unless it is a plan."""
    if not isinstance(given, Plan):
        raise ConfigError(
            "MW204", f"{what}: {given!r} is no plan; give one of meshwright.plan, or of meshwright.load with a module."
        )


def _written(file: str | Path, content: str, what: str) -> Path:
    """The path of a file that was written. Raises ConfigError where it cannot be."""
    path = path_of(file, what)
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "MW603", f"{what}: {str(file)!r} cannot be written ({error.strerror}); name another file."
        ) from None
    return path


def plan(
    module: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    mesh: int | Mapping[str, int] | str | Path | None = None,
    cluster: str | Path | None = None,
    search: str = "dynamic_programming",
    strategies: Mapping[str, Any] | None = None,
    memory_limit: int | str | None = None,
    zero: int | str = 0,
    optimizer: type[torch.optim.Optimizer] | str = "torch.optim.AdamW",
    seed: int = 0,
    device: str | torch.device = "auto",
    **parallel: Any,
) -> Plan:
    """Plan a training step of a module: how every operator is sliced over the ranks.

    Args:
        module: on the CPU, or on the device `meta`: then its plan can be made where its weights do not fit.
        batch: an example with the global number of rows: tensors, or a dict of them by argument of `forward`. With a
            loss the last tensor is its target, or in a dict whatever `forward` does not take.
        loss: called with output and target; None: the module returns its loss.
        mesh: the number of ranks, whose mesh is searched; the mesh {axis: size}, outermost first; or a cluster, all of
            whose devices are used. None: as many as devices here.
        cluster: the machine whose costs are predicted: a name such as `dgx_h100`, or the file that `run calibrate`
            writes. None: this kind of machine.
        search: `dynamic_programming`, `recursive_programming` or `sharding_propagation`.
        strategies: configured operators, {operator path: [[2, 4], [4, 1]]}.
        memory_limit: bytes per rank, also as "80GB".
        zero: the stage of ZeRO, 0 to 3, or "auto".
        optimizer: of which the plan counts the states and the time: a class or its dotted name.
        seed: of random operators.
        device: `cpu`, `cuda`, or `auto`: cuda if this machine has a GPU for every rank.
        **parallel: further keys of the section `parallel` of a config, such as recompute="auto".

    Returns:
        The plan; deterministic, so that ranks that plan for themselves have the same.

    Raises:
        ConfigError, StrategyError: one paragraph and a code; docs/troubleshooting.md lists all.
    """
    names, tensors = entries_of(batch, "meshwright.plan")
    _check_device(module, "meshwright.plan")
    _check_modes(module)
    if not isinstance(strategies, Mapping | None):
        raise ConfigError(
            "MW204",
            f"meshwright.plan: strategies = {strategies!r} is no mapping; give one of operator paths, such as "
            "{'layers.0.matmul': [[2, 4], [4, 1]]}.",
        )
    if isinstance(zero, bool | float) or zero is None:
        raise ConfigError("MW204", f'meshwright.plan: zero = {zero!r}; give the stage, 0 to 3, or "auto".')
    options = {"search": search, "strategies": dict(strategies or {}), "memory_limit": memory_limit, "zero": zero}
    config = config_of(module, tensors, loss, mesh, cluster, optimizer, seed, device, options | parallel)
    return planned(config, module, names, tensors, loss)


def _check_modes(module: nn.Module) -> None:
    """Raises ConfigError for parts in evaluation mode, which steps would train, unless `train()` leaves them in it.
    Warns of those that `train()` would put into it."""
    if not module.training:
        _log.warning("meshwright.plan: the module is in evaluation mode; it is planned and trained in training mode.")
        return
    parts = dict(module.named_modules())
    if all(part.training and type(part).train is nn.Module.train for part in parts.values()):
        return
    by_name = dict(duplicate(module).train().named_modules())
    if left := [name for name, part in parts.items() if part.training and not by_name[name].training]:
        _log.warning(
            "meshwright.plan: %s will be in evaluation mode, as train() of the module leaves it; call train() of it.",
            ", ".join(left),
        )
    if changed := [name for name, part in parts.items() if not part.training and by_name[name].training]:
        more = f" and {len(changed) - 1} more are" if len(changed) > 1 else " is"
        raise ConfigError(
            "MW464",
            f"meshwright.plan: {changed[0]}{more} in evaluation mode, but the module in training mode, in which all of "
            "it is planned. Override train() of the module so that it leaves them as they are, as frozen batch norms "
            "do, or call train() of the module.",
        )


def config_of(
    module: nn.Module,
    tensors: Sequence[Tensor],
    loss: Loss | None,
    mesh: int | Mapping[str, int] | str | Path | None,
    cluster: str | Path | None,
    optimizer: type[torch.optim.Optimizer] | str,
    seed: int,
    device: str | torch.device,
    parallel: Mapping[str, Any],
) -> Config:
    """The config of a step: the arguments of `plan`, with all that belong into the section `parallel` as a mapping.

    Raises:
        ConfigError: a key that only `run train` carries out, or a value that the config refuses.
    """
    if isinstance(loss, type) or not (loss is None or callable(loss)):
        what = "a class (make one)" if isinstance(loss, type) else "not callable"
        raise ConfigError("MW204", f"meshwright.plan: loss = {loss!r} is {what}; give a function or module, or None.")
    if not isinstance(mesh, int | Mapping | str | Path | None):
        raise ConfigError(
            "MW204",
            f"meshwright.plan: mesh = {mesh!r} must be a number of ranks, a mesh such as {{'dp': 2, 'tp': 4}}, or a "
            "cluster.",
        )
    sizes = mesh.values() if isinstance(mesh, Mapping) else [mesh] if isinstance(mesh, int) else [1]
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise ConfigError("MW204", f"meshwright.plan: mesh = {mesh!r}; a size is a number of ranks, at least 1.")
    if math.prod(sizes) > MOST_RANKS:
        raise ConfigError(
            "MW204",
            f"meshwright.plan: mesh = {mesh!r} has {math.prod(sizes)} ranks; plans are for {MOST_RANKS} at most.",
        )
    if not isinstance(optimizer, str) and (isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)):
        raise ConfigError(
            "MW204",
            f"meshwright.plan: optimizer is an object of the class {_name(type(optimizer))}; give the class of an "
            "optimizer, such as torch.optim.AdamW, or its dotted name.",
        )
    if left := [name for name in parallel if name in OF_RUNS]:
        raise ConfigError(
            "MW464",
            f"meshwright.plan: {left[0]} has no effect in a loop of your own; leave it out, or use `run train` with "
            f"parallel.{left[0]}.",
        )
    sections: dict[str, Any] = {
        "world_size": mesh if isinstance(mesh, int) else None,
        "device": str(device),
        "optimizer": {"target": optimizer if isinstance(optimizer, str) else _name(optimizer), "args": {}},
        "train": {"seed": seed, "precision": _precision(module)},
        "parallel": {
            "mode": "auto",
            "comm_overlap": False,  # gradients are added up when the optimizer steps
            **parallel,
        },
    }
    if isinstance(mesh, Mapping):
        sections["world_size"], sections["parallel"]["mesh"] = math.prod(mesh.values()), dict(mesh)
    elif isinstance(mesh, str | Path):
        cluster = cluster or mesh
    if cluster is not None:
        path_of(cluster, "meshwright.plan: cluster")
        sections["cluster"] = {"file": str(_described(cluster)), "nodes": _nodes(cluster, sections["world_size"])}
    sections |= {
        "model": {"target": _name(type(module))},
        "loss": {"target": None if loss is None else _name(type(loss) if isinstance(loss, nn.Module) else loss)},
        "data": {"target": "meshwright.batch", "batch_size": len(tensors[0])},
        "job": {"name": "plan"},
    }
    return load_config(OmegaConf.create(sections), Origins())


def load(
    file: str | Path, module: nn.Module | None = None, batch: Batch | None = None, *, loss: Loss | None = None
) -> Plan:
    """Read a plan.json: of `Plan.save`, or of a run.

    Args:
        file: or the folder of a run.
        module: the one that the plan was made for. Without it and its batch the plan can be looked at, but neither
            verified nor applied.
        batch: as for `plan`.
        loss: as for `plan`.

    Raises:
        ConfigError, StrategyError: the file is no plan, or one of another module.
    """
    place = path_of(file, "meshwright.load")
    if (module is None) != (batch is None):
        raise ConfigError(
            "MW204", "meshwright.load: a plan is used with its module and a batch of it; give both, or only the file."
        )
    content = read_content(place)
    name = f"the plan {str(file)!r}"
    if module is None or batch is None:
        check_shown(content, name)
        return Plan(content)
    check_form(content, name)
    _check_device(module, "meshwright.load")
    names, tensors = entries_of(batch, "meshwright.load")
    sections = content.get("config") or {
        "world_size": math.prod(content["mesh"].values()),
        "model": {"target": _name(type(module))},
        "loss": {"target": None if loss is None else _name(type(loss) if isinstance(loss, nn.Module) else loss)},
        "data": {"target": "meshwright.batch"},
        "parallel": {"mode": "auto", "comm_overlap": False},
        "train": {"precision": _precision(module)},
        "job": {"name": "plan"},
    }
    sections["parallel"] |= {"plan": str(place.absolute()), "memory_limit": None}
    sections["data"] |= {"batch_size": len(tensors[0])}
    found = planned(validated(sections, Origins()), module, names, tensors, loss)
    with suppress(StrategyError):  # a file may hold no more than the layouts
        check_shown(content, name)
        if math.isclose(found.cost, content["cost"]["total"], rel_tol=1e-9):
            found.content["search"] = content["search"]  # its certificate is for these costs
    return found


def planned(
    config: Config,
    module: nn.Module,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    loss: Loss | None,
    plan_of: Callable[[OperatorGraph], tuple[OperatorGraph, OperatorPlans]] | None = None,
) -> Plan:
    """The plan of a step: that of `plan_of` for its graph, or the one that the config asks for."""
    mode, stages = config.parallel.mode, config.parallel.pipeline.stages
    if stages is not None or mode not in MODES:
        raise ConfigError(
            "MW464",
            f"meshwright.plan: parallel.mode = {mode!r} with parallel.pipeline.stages = {stages} is not one module per "
            f"rank that a loop can call; use `run train`, or one of the modes {', '.join(MODES)} without a pipeline.",
        )
    planned_module, given = module, list(tensors)
    function = original = loss_module(loss)
    shapes_alone = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    if shapes_alone:
        planned_module, function = duplicate(module), copy.deepcopy(function)
    targets = target_names(config, planned_module, function, names)
    objective = Objective(
        planned_module, function, names, targets, sections=sections_of(config), target=export_target(config)
    )
    if shapes_alone:
        given = pretend(objective, given)
    prepared, captured = prepare_given(config, objective, given, _log.info, plan_of)
    if prepared.plan is not None and prepared.plan.batch_rows:
        raise ConfigError(
            "MW464",
            "meshwright.plan: the cluster has groups of devices of unequal speed, whose ranks take unequal rows; only "
            "`run train` slices batches so. Describe it without cluster.groups.",
        )
    content, _ = plan_content(prepared)
    content |= {
        "title": f"{config.model.target} on {prepared.world_size} ranks",
        "config": prepared.config.model_dump(mode="json"),
    }
    return Plan(
        content,
        Planned(
            prepared,
            objective,
            captured,
            signature_of(module),
            _settings_of(module),
            _parts_of(module),
            _ties_of(module),
            original,
            tuple(given),
        ),
    )


def signature_of(module: nn.Module) -> Signature:
    """What two modules of one plan have in common."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    tied = {name: first.setdefault(id(parameter), name) for name, parameter in parameters}
    return {
        name: (tuple(one.shape), one.dtype, one.requires_grad, None if tied.get(name, name) == name else tied[name])
        for name, one in tensors
    }


def check_signature(planned: Signature, module: nn.Module, what: str) -> None:
    """Raises ConfigError where a module is not on the CPU, or has other parameters or buffers than the planned one."""
    _check_device(module, what, holds_numbers=True)
    given = signature_of(module)
    for name in dict.fromkeys([*planned, *given]):
        if planned.get(name) == given.get(name):
            continue
        there, here = (_described_tensor(signature.get(name)) for signature in (planned, given))
        raise ConfigError(
            "MW462",
            f"{what}: {name} is {there} in the planned module and {here} in this one; give a module that is built in "
            "the same way, or plan this one.",
        )


def _settings_of(module: nn.Module) -> dict[str, Any]:
    """The numbers, texts and booleans that a module and its parts have as attributes, which a program holds."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, bool | int | float | str) and name != "training" and not name.startswith("_")
    }


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer, by all its names."""
    parameters, buffers = (named(remove_duplicate=False) for named in (module.named_parameters, module.named_buffers))
    return {**dict(parameters), **dict(buffers)}


def _ties_of(module: nn.Module) -> dict[str, str]:
    """The first name of every tensor that has several, by the others."""
    tensors = _tensors_of(module)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: first[id(tensor)] for name, tensor in tensors.items() if first[id(tensor)] != name}


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    part = module.get_submodule(path)
    table: dict[str, Any] = part._parameters if leaf in part._parameters else part._buffers
    table[leaf] = tensor


def _parts_of(module: nn.Module) -> dict[str, str]:
    """The class of every part of a module, by its path; the module itself is called `module`."""
    return {path or "module": _name(type(part)) for path, part in module.named_modules()}


def _warn_of_settings(planned: Mapping[str, Any], module: nn.Module) -> None:
    """A line about the first attribute that differs. What a module merely counts or caches may differ, too."""
    for name, here in _settings_of(module).items():
        if name in planned and repr(planned[name]) != repr(here):
            _log.warning(
                "plan.apply: %s is %r in the planned module and %r in this one; ranks compute with what was planned.",
                name,
                planned[name],
                here,
            )
            return


def _described_tensor(entry: tuple[tuple[int, ...], torch.dtype, bool, str | None] | None) -> str:
    if entry is None:
        return "missing"
    shape, dtype, trained, tied = entry
    how = "" if trained else " without gradient"
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{how if tied is None else f' tied to {tied}'}"


def _check_device(module: nn.Module, what: str, *, holds_numbers: bool = False) -> None:
    """Raises ConfigError unless it is a module, and for tensors that are neither on the CPU nor, unless it
    `holds_numbers`, on `meta`."""
    require_module(module, what)
    check_complete(module, f"{what}: the module")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device.type != "cpu" and (holds_numbers or not tensor.is_meta):
            other = "" if holds_numbers else ", or build it under torch.device('meta')"
            raise ConfigError(
                "MW807",
                f"{what}: {name} is on the device {tensor.device}; give a module on the CPU (module.cpu()){other}. "
                "Each rank moves its slices to the device of the mesh.",
            )


def _precision(module: nn.Module) -> str:
    """The precision of training by the parameters. Raises ConfigError for one that needs a scaled loss."""
    dtypes = {str(dtype): name for name, dtype in DTYPES.items() if name != "bf16_autocast"}
    floating = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    floating.sort(key=lambda dtype: -torch.finfo(dtype).eps)  # where they are mixed, the coarsest decides
    precision = dtypes.get(str(floating[0]), "") if floating else "fp32"
    if precision not in ("fp32", "fp64", "bf16"):
        raise ConfigError(
            "MW464",
            f"meshwright.plan: the module has parameters of {floating[0]}; a loop of your own trains in float32, "
            "float64 or bfloat16. float16 needs a scaled loss: `run train` with train.precision=fp16 has one.",
        )
    return precision


def _name(function: Any) -> str:
    """A dotted name for messages."""
    word = str(getattr(function, "__name__", type(function).__name__))
    return f"{getattr(function, '__module__', 'torch')}.{word.strip('<>')}"  # a method of a builtin class has none


def _described(cluster: str | Path) -> Path:
    """The file that describes a cluster. Raises ConfigError for an unknown name."""
    folder = Path(str(files("conf"))) / "cluster"
    own = Path(cluster)
    if own.suffix in (".yaml", ".yml"):
        return own
    names = sorted(file.stem for file in folder.glob("*.yaml") if file.stem != "auto")
    if str(cluster) not in names:
        raise ConfigError(
            "MW106",
            f"cluster = {str(cluster)!r} is no cluster that comes with the package.{allowed(str(cluster), names)} A "
            "file of your own ends with .yaml.",
        )
    return folder / f"{cluster}.yaml"


def _nodes(cluster: str | Path, ranks: int | None) -> int | None:
    """The number of nodes of a cluster that comes with the package: as many as the ranks need; None where its
    description says it."""
    if ranks is None or Path(cluster).suffix:
        return None
    machine = shipped(str(cluster))
    return None if "node" not in machine.levels else max(1, -(-ranks // machine.devices))
