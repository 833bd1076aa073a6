"""Consistency checks between ranks, which name the ranks that differ.

Every rank contributes a few short strings (versions, hashes); they are all-gathered, so each rank can report which
ranks differ in which. Invariant: either all ranks of a group return, or all raise.
"""

from __future__ import annotations

import ast
import hashlib
import json
import mmap
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule

from runner.config.schema import Config
from runner.data.description import described
from runner.data.loader import Collate, MapDataset
from runner.errors import ConfigError
from runner.planning.prepare import WEIGHTS, Prepared, digest

TOKEN = ".shared"

LETTERS = str.maketrans("0123456789", "abcdefghij")
"""For numbers in names that stay."""


def agree_on_program(prepared: Prepared, folder: Path) -> None:
    """Check that all ranks received the same preparation, and run the same versions (collective). Manually started
    hosts prepare independently: their results must be identical, including the initial weights in `folder`. Raises
    RuntimeError."""
    config = json.loads(prepared.config.model_dump_json(exclude={"launch": {"host", "rank"}}))
    sections = gather({name: digest(json.dumps(section)) for name, section in config.items()})
    unequal = {name for name in config if len({of_rank[name] for of_rank in sections}) > 1}
    facts = {
        "torch": torch.__version__,
        **_flat({name: section for name, section in config.items() if name in unequal}),
        "the captured model and its plan": prepared.digest,
    }
    if prepared.config.launch.by_hand:
        with (folder / WEIGHTS).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            facts["the initial weights"] = hashlib.sha256(content).hexdigest()[:12]
    agree(facts, "The ranks were not given the same; start them from one run folder, with one installation.")


def _flat(section: Mapping[str, Any], path: str = "") -> dict[str, str]:
    """The values of a section of the config as JSON, by the paths of their keys."""
    found: dict[str, str] = {}
    for key, value in section.items():
        found |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": json.dumps(value)}
    return found


def agree_on_data(
    prepared: Prepared, training: MapDataset, evaluating: MapDataset | None, collate: Collate | None
) -> None:
    """Check that all ranks see the same data as the preparation (collective). Raises RuntimeError."""
    expected, seed = prepared.data, prepared.config.train.seed
    facts = described(training, evaluating, collate, row=expected.row, shapes=prepared.shapes, seed=seed).facts
    facts = {name: fact for name, fact in facts.items() if name in expected.facts}
    otherwise = "Every rank must read the same data: the same files, on whatever host and at whatever time."
    agree(facts, otherwise)
    for name, fact in facts.items():
        if fact != (was := expected.facts[name]):
            raise RuntimeError(f"The ranks find {fact} as {name}, the run was prepared for {was}. {otherwise}")


def agree_on_code(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Check that the ranks of a group, which run one program, generated the same code for it (collective). Raises
    RuntimeError. Numbers and the names of values and tensors are left out: offsets differ from rank to rank, and with
    them which units share the code that was generated for the first of them."""
    codes = {unit.code for unit in module.modules() if isinstance(unit, GraphModule)}
    text = "\n".join(sorted(set(map(_without_names, codes))))
    agree({"the generated code": digest(text)}, "The ranks were started with different versions of the program.", group)


def _without_names(code: str) -> str:
    """Generated code with # for every number, and its local names in the order in which they are first used, as are
    those of what modules own."""
    tree = ast.parse(code)
    owners = {node.args.args[0].arg for node in tree.body if isinstance(node, ast.FunctionDef)}
    owned: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in owners:
            node.attr = owned.setdefault(node.attr, f"o{len(owned)}".translate(LETTERS))
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Name, ast.arg))]
    local = {node.arg for node in nodes if isinstance(node, ast.arg)}
    local |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.arg):
            node.arg = names.setdefault(node.arg, f"v{len(names)}".translate(LETTERS))
        elif node.id in local:
            node.id = names.setdefault(node.id, f"v{len(names)}".translate(LETTERS))
    return re.sub(r"\d+", "#", ast.unparse(tree))


def agree(facts: Mapping[str, str], otherwise: str, group: dist.ProcessGroup | None = None) -> None:
    """Check that every rank of a group, by default all, has the same `facts` (collective). Raises RuntimeError, which
    names the ranks that differ from most and in what, and ends with `otherwise`."""
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if differences := different(ranks, gather(dict(facts), group)):
        raise RuntimeError(f"{differences} {otherwise}")


def different(ranks: Sequence[int], facts: Sequence[Mapping[str, str]]) -> str:
    """Which `ranks` differ from most of them in which of their `facts`; nothing where all agree."""
    differences = []
    for name in dict.fromkeys(name for of_rank in facts for name in of_rank):
        values = [of_rank.get(name, "nothing") for of_rank in facts]
        usual = Counter(values).most_common(1)[0][0]
        others = [rank for rank, value in zip(ranks, values, strict=True) if value != usual]
        if others:
            who = f"Rank {others[0]} differs" if len(others) == 1 else f"Ranks {', '.join(map(str, others))} differ"
            odd = next(value for value in values if value != usual)
            differences.append(f"{who} in {name}: {odd} instead of {usual}.")
    return " ".join(differences)


def require_shared(config: Config, run_dir: Path) -> None:
    """Raise ConfigError, on all ranks, where checkpoints are to be saved and a rank has another run folder than rank 0
    (collective)."""
    wanted = config.checkpoint
    if not (wanted.at_end or wanted.every or wanted.minutes or wanted.best):
        return
    file, first = run_dir / TOKEN, dist.get_rank() == 0
    token = secrets.token_hex(8) if first else ""
    if first:
        file.write_text(token, encoding="utf-8")
    token = gather(token)[0]
    shared = gather(file.is_file() and file.read_text(encoding="utf-8") == token)
    if first:
        file.unlink()
    if not all(shared):
        raise ConfigError(
            "MW706",
            f"rank {shared.index(False)} has another run folder than rank 0, so checkpoints would lack its slices; "
            "give all hosts one shared hydra.run.dir, or checkpoint.at_end=false and no other checkpoints.",
        )


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of every rank of a group, by default all, in the order of the ranks (collective): numbers, strings,
    lists and dicts with strings as keys."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    content = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device), group=group)
    largest = max(int(size) for size in sizes)
    padded = torch.zeros(largest, dtype=torch.uint8, device=device)
    padded[: len(content)] = content
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded, group=group)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]
