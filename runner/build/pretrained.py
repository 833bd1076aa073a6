"""Pretrained weights: where each tensor of the model is stored in the files of `model.weights`.

Nothing is read here but headers; the ranks read their blocks. The invariant: every parameter and every persistent
buffer of the model is found under one of its names, with its shape, and every name in the files is used, or the run is
rejected. What `model.new` names is not read, nor a tensor to which `model.rename` gives an empty name. Keys that the
model class declares optional (`_keys_to_ignore_on_load_missing`, `..._unexpected`) may be missing or left over.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from runner import checkpoint as checkpoints
from runner import home
from runner.build import adapters, huggingface
from runner.config.schema import Model
from runner.errors import ConfigError
from strategies.core.errors import StrategyError, closest
from strategies.runtime.tensor_files import StoredTensor, TensorReader

SHOWN = 3
Rename = tuple[str, str]


@dataclass(frozen=True)
class Wanted:
    """A tensor of the model with all its names (several where weights are tied), of which the first is the one that the
    project uses; `shape` is that of the full tensor."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    floating: bool
    persistent: bool


def locate(model: Model, module: nn.Module) -> dict[str, StoredTensor]:
    """Locate the tensors of `module`, which `model` describes, in its files: the place of each by name.

    A model of transformers whose files hold other names or layouts loads them here; the ranks then read nothing. Raises
    ConfigError for files that do not fit.
    """
    assert model.weights is not None
    where = f"model.weights = {model.weights!r}"
    path = home.expanded(model.weights)
    try:
        files = checkpoints.weights(path)
    except StrategyError as error:
        raise ConfigError("MW308", f"{where}: {error}") from error
    every = list(_wanted(module))
    matched = _new(model.new, [name for one in every for name in one.names])
    wanted = [one for one in every if not matched & set(one.names)]
    new = {name for one in every if matched & set(one.names) for name in one.names}
    renamed = _renamed(files, model.rename, where)
    stored_tensors = {name: stored for name, stored in renamed.items() if name not in new}
    missing, unexpected = _unmatched(wanted, stored_tensors, module)
    if missing or unexpected:
        if not model.rename and (left := huggingface.load(module, home.expanded(model.weights), new)) is not None:
            missing, unexpected = left
            if not missing and not unexpected:
                return {}
        raise ConfigError("MW307", f"{where}: {_mismatch(missing, unexpected, wanted, stored_tensors, module)}")
    derived = adapters.made_of_base(module)
    if derived and (lacking := sorted(adapters.adapter_names(module) - stored_tensors.keys())):
        raise ConfigError(
            "MW307",
            f"{where}: by {derived}, peft makes {lacking[0]} of the base's weights when it builds the model, which is "
            "before these are read. Let the base load its own, with a target such as "
            "transformers.AutoModelForCausalLM.from_pretrained in place of model.weights, or choose adapters that "
            "begin at random: init_lora_weights=true or gaussian.",
        )
    found = {}
    for one in wanted:
        stored = [stored_tensors[name] for name in one.names if name in stored_tensors]
        if stored and one.persistent:
            _check(one, stored, where)
            found[one.names[0]] = stored[0]
    return found


def _new(globs: Sequence[str], names: Sequence[str]) -> set[str]:
    """The names that `model.new` means. Raises ConfigError for a glob that matches none."""
    found: set[str] = set()
    for number, glob in enumerate(globs):
        matched = [name for name in names if fnmatch.fnmatchcase(name, glob)]
        if not matched:
            raise ConfigError(
                "MW211",
                f"model.new[{number}] = {glob!r} matches no parameter or buffer of the model.{closest(glob, names)}",
            )
        found.update(matched)
    return found


def _renamed(files: Mapping[str, StoredTensor], rename: Sequence[Rename], where: str) -> dict[str, StoredTensor]:
    """The tensors by the names that `model.rename` gives them, without those that get an empty one. Raises ConfigError
    where two get one name."""
    stored_tensors: dict[str, StoredTensor] = {}
    for name, stored in files.items():
        new = _new_name(name, rename)
        if not new:
            continue
        if new in stored_tensors:
            raise ConfigError(
                "MW307", f"{where}: model.rename gives {stored_tensors[new].key} and {stored.key} the same name, {new}."
            )
        stored_tensors[new] = stored
    return stored_tensors


def _new_name(name: str, rename: Sequence[Rename]) -> str:
    for pattern, replacement in rename:
        name = re.sub(pattern, replacement, name)
    return name


def _wanted(module: nn.Module) -> Iterator[Wanted]:
    persistent = module.state_dict().keys()
    tensors: dict[int, tuple[list[str], Tensor]] = {}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        tensors.setdefault(id(tensor), ([], tensor))[0].append(name)
    within = adapters.base_names(module)
    for names, tensor in tensors.values():
        names += [within[name] for name in names if name in within]
        shape = tuple(getattr(tensor, "global_shape", tensor.shape))  # a hybrid module declares its slices
        yield Wanted(tuple(names), shape, tensor.is_floating_point(), any(name in persistent for name in names))


def _unmatched(
    wanted: Sequence[Wanted], stored_tensors: Iterable[str], module: nn.Module
) -> tuple[list[str], list[str]]:
    """Names that the model needs and the files lack, and names that the files have and the model does not know."""
    stored_tensors = set(stored_tensors)
    known = {name for one in wanted for name in one.names}
    lacking = [one.names[0] for one in wanted if one.persistent and not stored_tensors & set(one.names)]
    new = adapters.adapter_names(module)
    missing = [name for name in lacking if name not in new and not _dispensable(name, module, "missing")]
    left = [name for name in stored_tensors if name not in known and not name.endswith("_extra_state")]
    return missing, sorted(name for name in left if not _dispensable(name, module, "unexpected"))


def _dispensable(name: str, module: nn.Module, when: str) -> bool:
    patterns = getattr(module, f"_keys_to_ignore_on_load_{when}", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def _check(one: Wanted, stored: Sequence[StoredTensor], where: str) -> None:
    """Raise ConfigError unless shape and kind of number are right, and tied weights are one tensor in the files too."""
    for candidate in stored:
        if candidate.shape != one.shape:
            raise ConfigError(
                "MW307",
                f"{where}: {candidate.key} has shape {list(candidate.shape)} there, but {one.names[0]} of the model "
                f"has {list(one.shape)}; model.args or model.config describe another model.",
            )
        if ("float" in candidate.dtype) != one.floating:
            kind = "floating-point" if one.floating else "integer"
            raise ConfigError(
                "MW307", f"{where}: {candidate.key} is stored as {candidate.dtype}; the model holds {kind} numbers."
            )
    first, *others = stored
    reader = TensorReader()
    for other in others:
        if not reader.block(first).equal(reader.block(other)):
            raise ConfigError(
                "MW307",
                f"{where}: the model has one tensor for {' and '.join(one.names)} (tied weights), but {first.key} and "
                f"{other.key} differ there; build the model without tying them.",
            )


def _mismatch(
    missing: Sequence[str],
    unexpected: Sequence[str],
    wanted: Sequence[Wanted],
    stored_tensors: Iterable[str],
    module: nn.Module,
) -> str:
    """The mismatched names, the closest matches, and the fix if only a prefix differs."""
    parts = []
    if missing:
        parts.append(f"the files do not have {listed(missing)}, which the model needs")
    if unexpected:
        parts.append(f"the files have {listed(unexpected)}, which the model does not know")
    text = f"{' and '.join(parts)}."
    cure = next(_cures(missing, unexpected, wanted, list(stored_tensors), module), None)
    if cure is not None:
        return f"{text} Only a prefix differs: set model.rename=[['{cure[0]}', '{cure[1]}']]."
    name, options = (
        (missing[0], unexpected or sorted(stored_tensors))
        if missing
        else (unexpected[0], [n for one in wanted for n in one.names])
    )
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if near:
        text += f" Nearest to {name} is {near[0]}; model.rename can change names."
    return text + (" model.new names what the files need not have, such as a new head." if missing else "")


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" ({more} more)" if more > 0 else "")


def _cures(
    missing: Sequence[str],
    unexpected: Sequence[str],
    wanted: Sequence[Wanted],
    stored_tensors: Sequence[str],
    module: nn.Module,
) -> Iterator[Rename]:
    """Prefix changes after which everything matches."""
    heads = "|".join(sorted({re.escape(name.partition(".")[0]) for name in unexpected}))
    for name in unexpected[:1]:
        for before, after in dict.fromkeys(_prefixes(name, target) for target in missing):
            rename = (f"^{before.replace('.', '[.]') or f'(?=({heads})[.])'}", after)
            if not any(_unmatched(wanted, [_new_name(other, [rename]) for other in stored_tensors], module)):
                yield rename


def _prefixes(first: str, second: str) -> tuple[str, str]:
    """What stands before the longest common end of two dotted names."""
    one, two = first.split("."), second.split(".")
    while one and two and one[-1] == two[-1]:
        one, two = one[:-1], two[:-1]
    return "".join(f"{word}." for word in one), "".join(f"{word}." for word in two)
