"""The parts of the benchmark: each takes a device and a folder, and returns rows of figures.

Nothing here differs between devices but the sizes of models, so what a GPU will run is what the tests run on a CPU.
Commands are run as a user runs them, one process each; a part that fails returns the reason as a row.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import sides
from benchmarks.peers.cases import Case
from runner import launch
from runner.config.load import validated
from runner.config.origins import Origins
from runner.config.schema import Config
from runner.launch.orders import RankContext
from runner.planning.calibration import cores
from runner.planning.prepare import prepare

ONE = (
    "parallel=data_parallel parallel.mesh=null ~parallel.strategies +parallel.strategies={} "
    "parallel.dataset_strategy=data_parallel world_size=1 evaluate.metric=null evaluate.args={} train.epochs=null"
)
GPT = f"+recipe=gpt {ONE} train.steps=6 train.log_every=2 checkpoint.at_end=false"
HOST = "parallel.zero.stage=3 parallel.offload.optimizer=host parallel.offload.parameters=host"
COMMANDS: Mapping[str, str] = {
    "doctor": "doctor",
    "env": "env",
    "train": f"{GPT} data.workers=1",
    "verify": f"verify {GPT}",
    **{f"zero {stage}": f"{GPT} parallel.zero.stage={stage}" for stage in (1, 2, 3)},
    "states on host": f"{GPT} {HOST}",
    "states on disk": f"{GPT} parallel.zero.stage=3 parallel.offload.optimizer=disk model.args.width=512",
    "activations on host": f"{GPT} parallel.offload.activations.to=host",
    "recompute": f"{GPT} parallel.recompute=full",
    "compile": f"{GPT} train.compile=true",
    "bf16": f"{GPT} train.precision=bf16",
    "bf16_autocast": f"{GPT} train.precision=bf16_autocast",
    "fp16": f"{GPT} train.precision=fp16",
    "fp16, zero 2": f"{GPT} train.precision=fp16 parallel.zero.stage=2",
    "profiler": f"{GPT} train.callbacks=[profiler]",
    "resume": f"{GPT} checkpoint.at_end=true checkpoint.every=3",
    **{
        f"verify {name}": f"verify +recipe={name} {ONE} train.steps=2"
        for name in ("llama", "moe", "vit", "gpt_packed", "hf_llama")
    },
}
"""Words of `run`, by part. `resume` is run twice in one folder, the second time for two more steps."""
RECIPES = {
    "gpt": "model.args.width=1024 model.args.heads=16 model.args.layers=8 model.args.length=512 data.args.length=512",
    "llama": "model.args.width=1024 model.args.heads=16 model.args.kv_heads=8 model.args.hidden=2816 "
    "model.args.layers=8 model.args.length=512 data.args.length=512",
    "vit": "model.args.width=768 model.args.heads=12 model.args.layers=12 data.batch_size=256",
    "resnet": "model.args.width=64 data.batch_size=512 train.precision=fp32",
    "moe": "model.args.width=1024 model.args.hidden=4096 model.args.layers=4 model.args.length=256 "
    "data.args.length=256",
    "ffn_auto": "model.args.sizes=[784,4096,4096,4096,4096,10] data.batch_size=1024",
}
"""Models of the memory and of the step times: recipe, and the words that make it large enough for a GPU."""
MEMORY = {
    "gpt": "", "gpt, ZeRO 3": "parallel.zero.stage=3", "gpt, recompute": "parallel.recompute=full",
    "gpt, bf16": "train.precision=bf16", "llama": "", "vit": "", "resnet": "",
}  # fmt: skip
"""Plans whose memory is compared: recipe, and more words."""
RATIOS = tuple((precision, compiled) for precision in ("fp32", "bf16", "fp16") for compiled in (False, True))
ROUNDS, WARM, STEPS = {"cpu": 6, "cuda": 30}, 4, 24
LARGE, SMALL = Case("gpt", 1024, 8, 512, 16), Case("gpt", 128, 2, 64, 8)
GOALS = {"ratio": (1.02, 1.01), "allocated": 0.03, "reserved": 0.05, "step": 0.10}
"""Step time against the plain loop without and with compile; relative errors of memory and of predicted step times."""


@dataclass(frozen=True)
class Figures:
    """What a part measured: a row per name, of words and numbers, whether it ran without an error, and its seconds."""

    rows: dict[str, dict[str, Any]]
    seconds: float = 0.0

    @property
    def failed(self) -> list[str]:
        """The rows that ended with an error."""
        return [name for name, row in self.rows.items() if "error" in row]


Part = Callable[[str, Path], dict[str, dict[str, Any]]]


def run_command(words: str, device: str, folder: Path) -> tuple[int, str]:
    """The exit code and the output of `run WORDS` in a run folder. The output of one that fails is shown."""
    given = [*words.split(), *([] if words in ("doctor", "env") else [f"device={device}", f"hydra.run.dir={folder}"])]
    done = subprocess.run(
        [sys.executable, "-m", "runner", *given],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace", timeout=240,
    )  # fmt: skip
    if done.returncode:
        print(f"run {words}\n{done.stdout}", flush=True)
    return done.returncode, done.stdout


def command(name: str) -> Part:
    """The part that runs one command."""

    def part(device: str, folder: Path) -> dict[str, dict[str, Any]]:
        started = time.perf_counter()
        words = COMMANDS[name]
        code, output = run_command(words, device, folder / "run")
        if name == "resume" and not code:
            longer = words.replace("train.steps=6", "train.steps=8 train.resume=auto")
            code, output = run_command(longer, device, folder / "run")
        lines = [line for line in output.splitlines() if line.strip()]
        row = {"said": lines[-1] if lines else "", "seconds": time.perf_counter() - started}
        return {name: row | ({"error": " / ".join(lines[-4:])} if code else {})}

    return part


def ratio(device: str, folder: Path) -> dict[str, dict[str, Any]]:
    """A step of ours on one device against the plain loop, by precision, with and without torch.compile."""
    rows = {}
    for precision, compiled in RATIOS:
        name = f"{precision}{', compile' if compiled else ''}"
        case = LARGE if device == "cuda" else SMALL
        with _failing(rows, name):
            config = config_of(case, device, precision, compiled)
            place = folder / name.replace(", ", "_")
            place.mkdir()
            prepared = prepare(config, place, say=lambda line: None)
            rows[name] = launch.run_ranks(
                "benchmarks.gpu.parts:measure_ratio",
                {"comparison": sides.Comparison(case, prepared, place, 1), "rounds": ROUNDS[device]},
                world_size=1, run_dir=place, device=device, timeout=240, threads=1,
            )  # fmt: skip
    return rows


def config_of(case: Case, device: str, precision: str, compiled: bool) -> Config:
    """The config of a step of a case on one device."""
    sections = {
        "world_size": 1,
        "device": device,
        "model": case.model_section,
        "loss": case.loss_section,
        "data": {"target": "benchmarks.peers.cases.Rows", "args": vars(case), "batch_size": case.rows},
        "optimizer": {"target": "torch.optim.AdamW", "args": {"lr": sides.RATE}},
        "parallel": {"mode": "data_parallel"},
        "train": {"steps": 1, "precision": precision, "compile": compiled},
        "job": {"name": "train"},
    }
    return validated(sections, Origins())


def measure_ratio(rank: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """Medians of both sides, and how far their losses differ."""
    comparison = payload["comparison"]
    train = comparison.prepared.config.train
    steps = {
        "ours": sides.ours(comparison, rank),
        "plain": plain(comparison, rank, train.precision, train.compile),
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM + payload["rounds"]):
        for name in [*steps][:: 1 if number % 2 else -1]:
            _synchronize(rank.device)
            started = time.perf_counter()
            loss = steps[name]()
            _synchronize(rank.device)
            losses[name].append(loss.item())
            if number >= WARM:
                seconds[name].append(time.perf_counter() - started)
    ours, other = (statistics.median(seconds[name]) for name in ("ours", "plain"))
    gap = max(abs(a - b) / abs(b) for a, b in zip(losses["ours"], losses["plain"], strict=True))
    return {"ours": ours, "plain": other, "ratio": ours / other, "difference": gap}


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def plain(comparison: sides.Comparison, rank: RankContext, precision: str, compiled: bool) -> sides.Step:
    """The loop of torch's documentation; below fp32 with fp32 masters, in fp16 with GradScaler."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    model = sides.model_of(comparison).to(rank.device, dtype)
    parameters = [*model.parameters()]
    low = dtype != torch.float32
    masters = [nn.Parameter(one.detach().float()) for one in parameters] if low else parameters
    optimizer, loss = sides.adamw(masters), comparison.case.loss()
    scaler = torch.amp.GradScaler(torch.device(rank.device).type, init_scale=2.0**15, enabled=precision == "fp16")
    called = torch.compile(model) if compiled else model
    x, y = (one.to(rank.device) for one in comparison.case.batch())

    def step() -> Tensor:
        found: Tensor = loss(called(x), y)
        scaler.scale(found.float()).backward()
        if low:
            for one, master in zip(parameters, masters, strict=True):
                master.grad, one.grad = None if one.grad is None else one.grad.float(), None
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if low:
            with torch.no_grad():
                for one, master in zip(parameters, masters, strict=True):
                    one.copy_(master)
        return found.detach().double()

    return step


def memory(device: str, folder: Path) -> dict[str, dict[str, Any]]:
    """The predicted peak against what CUDA's allocator has allocated and reserved."""
    rows: dict[str, dict[str, Any]] = {}

    def train(name: str) -> None:
        place = folder / name.replace(", ", "_").replace(" ", "_")
        _train(_words(name.partition(",")[0], device), f"{MEMORY[name]} train.measure_memory=true", device, place)

    with ThreadPoolExecutor(TOGETHER) as pool:
        trained = {name: pool.submit(train, name) for name in MEMORY}
    for name, done in trained.items():
        with _failing(rows, name):
            done.result()
            place = folder / name.replace(", ", "_").replace(" ", "_")
            content = json.loads((place / "memory.json").read_text(encoding="utf-8"))
            measured = content["measured"][0]
            predicted = content["predicted"]["peak"]
            rows[name] = {"predicted": predicted, "allocated": measured["peak"], "reserved": measured.get("reserved")}
    return rows


def calibrate(device: str, folder: Path) -> dict[str, dict[str, Any]]:
    """`run calibrate`, and then predicted against measured seconds of a step of six models. All batches are read while
    the first step begins: the small pictures are read more slowly than a GPU trains on them."""
    rows: dict[str, dict[str, Any]] = {}
    file = folder / "machine.yaml"
    seconds = 60 if device == "cuda" else 20
    code, output = run_command(
        f"calibrate {file} calibrate.seconds={seconds} world_size=1", device, folder / "calibrate"
    )
    if code:
        return {"calibrate": {"error": output[-400:]}}
    for name in RECIPES:
        with _failing(rows, name):
            _train(
                _words(name, device),
                f"cluster.file={file} train.steps={STEPS} data.workers={READERS} data.prefetch={AHEAD}",
                device,
                folder / name,
            )
            plan = json.loads((folder / name / "plan.json").read_text(encoding="utf-8"))
            lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            steps = [one["seconds"] for one in map(json.loads, lines) if "seconds" in one][2 * WARM :]
            rows[name] = {"predicted": plan["cost"]["total"], "measured": statistics.median(steps)}
    return rows


def _words(recipe: str, device: str) -> str:
    epoch = "" if recipe in ("vit", "resnet", "ffn_auto") else "data.batch_size=16"
    large = RECIPES[recipe] if device == "cuda" else ""
    precision = "train.precision=fp32" if recipe == "resnet" else ""
    return f"+recipe={recipe} {ONE} {epoch} {large} {precision} train.steps=4 checkpoint.at_end=false"


def _train(words: str, more: str, device: str, folder: Path) -> None:
    """Run a training. Raises RuntimeError with the end of its output where it fails."""
    keys = {word.partition("=")[0] for word in more.split()}
    kept = [word for word in words.split() if word.partition("=")[0] not in keys]
    code, output = run_command(" ".join([*kept, more]), device, folder)
    if code:
        raise RuntimeError(" / ".join(output.splitlines()[-4:]))


@contextlib.contextmanager
def _failing(rows: dict[str, dict[str, Any]], name: str) -> Iterator[None]:
    """A row of a part may fail, with its reason in the page, and the others go on."""
    try:
        yield
    except Exception as error:
        rows[name] = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:400]}


def capture(device: str, folder: Path) -> dict[str, dict[str, Any]]:
    """A model on the device and one on the CPU have the same graph."""
    row = launch.run_ranks(
        "benchmarks.gpu.parts:measure_capture", None,
        world_size=1, run_dir=folder, device=device, timeout=240, threads=1,
    )  # fmt: skip
    return {"capture": row | ({} if row["equal"] else {"error": "the graphs differ"})}


def measure_capture(rank: RankContext, _: object) -> dict[str, Any]:
    from strategies.capture import Objective
    from strategies.capture import capture as captured
    from strategies.core.graph import rewrite

    def graph(device: str) -> Any:
        net, loss = SMALL.model().to(device), SMALL.loss().to(device)
        batch = [one.to(device) for one in SMALL.batch()]
        kind = torch.device(device).type
        with torch.autocast(kind, torch.bfloat16):
            return captured(Objective(net, loss, ("0", "1"), ("1",)), batch, training=True).graph

    def anywhere(leaf: Any) -> Any:
        return "device" if isinstance(leaf, torch.device) else leaf

    own, other = graph(rank.device), graph("cpu")
    equal = rewrite(own.signature(), anywhere) == rewrite(other.signature(), anywhere)
    return {"operators": len(own.operators), "equal": equal}


def library(device: str, folder: Path) -> dict[str, dict[str, Any]]:
    """`meshwright.plan`, `apply` and a step on the device, against one on the CPU; a module that is there already is
    refused; and the exported program."""
    row = launch.run_ranks(
        "benchmarks.gpu.parts:measure_library", str(folder),
        world_size=1, run_dir=folder, device=device, timeout=240, threads=1,
    )  # fmt: skip
    return {"library": row | ({} if row["difference"] < 1e-3 else {"error": "the losses differ"})}


def measure_library(rank: RankContext, folder: str) -> dict[str, Any]:
    import meshwright
    from runner.errors import ConfigError

    case = replace(SMALL, layers=1)
    torch.manual_seed(0)
    module, batch = case.model(), case.batch()
    kind = torch.device(rank.device).type
    plan = meshwright.plan(module, batch, loss=case.loss(), mesh=1, device=kind)
    refused = False
    if kind != "cpu":
        try:
            plan.apply(module.to(rank.device))
        except ConfigError:
            refused = True
        module = module.cpu()
    expected = case.loss()(module(batch[0]), batch[1]).item()
    from torch.distributed.device_mesh import init_device_mesh

    sharded = plan.apply(module, init_device_mesh(kind, (1,), mesh_dim_names=("dp",)))
    optimizer = plan.optimizer(torch.optim.AdamW, lr=1e-3)
    loss = sharded(*batch)
    loss.backward()
    optimizer.step()
    exported = sides.imported(plan.export("torch", Path(folder) / "exported.py", allow_changes=True))
    mesh = exported.make_mesh(kind)
    other = exported.parallelize(module.to(rank.device), mesh)
    with exported.running(mesh):
        x, y = (one.to(rank.device) for one in batch)
        again = case.loss()(other(*exported.sliced([x], mesh)), *exported.sliced([y], mesh, first=1))
    found = (loss.item(), again.full_tensor().item())
    return {"difference": max(abs(one - expected) / abs(expected) for one in found), "refused": refused}


def refusal(device: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Parameter servers refuse a GPU."""
    code, output = run_command("+recipe=parameter_server train.steps=2", device, folder / "run")
    wrong = device == "cuda" and code != 2
    return {"refusal": {"said": output.splitlines()[-1]} | ({"error": f"exit code {code}"} if wrong else {})}


PARTS: Mapping[str, Part] = {
    **{name: command(name) for name in COMMANDS},
    "refusal": refusal,
    "capture": capture,
    "library": library,
    "ratio": ratio,
    "memory": memory,
    "calibrate": calibrate,
}
"""By name, in the order in which they run."""
BESIDE = {*COMMANDS, "refusal"}
"""What may run beside others: processes of their own, in which nothing is timed."""
TOGETHER = max(1, min(6, cores() // 2))
"""How many run at the same time."""
READERS = min(6, cores() - 1)
"""Processes that read, so that no step of the small pictures waits for them."""
AHEAD = -(-STEPS // max(READERS, 1))
"""Batches that each reads ahead: together all of a training."""


def measured(name: str, device: str, folder: Path) -> Figures:
    """One part, with its seconds."""
    started = time.perf_counter()
    rows: dict[str, dict[str, Any]] = {}
    with _failing(rows, name):
        place = folder / name.replace(" ", "_").replace(",", "")
        place.mkdir()
        rows.update(PARTS[name](device, place))
    return Figures(rows, round(time.perf_counter() - started, 1))


def off(predicted: float, found: float | None) -> float:
    """The relative error of a prediction; nan where nothing was measured."""
    return predicted / found - 1 if found else math.nan
