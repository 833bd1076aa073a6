"""Predicted and measured memory of a rank, for models and plans of many kinds, on real ranks.

    python -m benchmarks.memory [--only WORD] [--out docs/memory.md]

Every pair is trained for four steps with train.measure_memory=true; the prediction is in its plan.json. Goals: mean
difference of the peaks at most 5 %, no prediction more than 3 % under; recompute and offload lower the peak by the
predicted bytes within 5 %.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from runner import launch
from runner.cli.jobs import composed
from runner.commands import train

PLAIN = "parallel=data_parallel parallel.mesh=null ~parallel.strategies +parallel.strategies={} world_size=2"
OTHER = f"{PLAIN} parallel.dataset_strategy=data_parallel"
GPT = f"+recipe=gpt {PLAIN}"
COLUMNS, ROWS = "[[2,1,1],[1,2]]", "[[2,1,2],[2,1]]"
SLICED = {
    **{f"layers.*.attention.{name}_proj.matmul": COLUMNS for name in "qkv"},
    "layers.*.attention.o_proj.matmul": ROWS,
    "layers.*.feed_forward.up_proj.matmul": COLUMNS,
    "layers.*.feed_forward.down_proj.matmul": ROWS,
}
MODELS = {
    "gpt": f"{GPT} model.args.width=128",
    "gpt, sliced 2 x 2": "+recipe=gpt world_size=4 model.args.width=128 parallel.mesh={dp:2,tp:2} ~parallel.strategies "
    f"+parallel.strategies={{{','.join(f'{path}:{slices}' for path, slices in SLICED.items())}}}",
    "gpt, deep": f"{GPT} model.args.layers=6",
    "gpt, wide": f"{GPT} model.args.width=384 model.args.heads=6 data.batch_size=4",
    "llama": f"+recipe=llama {OTHER}",
    "vit": f"+recipe=vit {OTHER}",
    "gpt_offload_disk": "+recipe=gpt_offload_disk",
    "resnet": f"+recipe=resnet {OTHER} data.batch_size=32",
}
STEPS = "train.epochs=null checkpoint.at_end=false evaluate.metric=null evaluate.every=null"
ZERO = [f"parallel.zero.stage={stage}" for stage in range(4)]
HOST, DISK = "parallel.offload.activations.to=host", "parallel.offload.activations.to=disk"
FULL, CHEAP = "parallel.recompute=full", "parallel.recompute=selective"
STATES = "parallel.offload.optimizer=host"
PAIRS: list[tuple[str, str]] = [
    *(("gpt", zero) for zero in ZERO),
    *(("gpt", f"{zero} train.precision=bf16") for zero in ZERO),
    *(("gpt", f"{zero} train.accumulate=4") for zero in ZERO),
    *(("gpt", words) for words in (FULL, CHEAP, "parallel.recompute.operators=[gelu,layer_norm]")),
    *(("gpt", f"{FULL} {zero}") for zero in ZERO[1:]),
    ("gpt", f"{FULL} train.precision=bf16"),
    ("gpt", "parallel.recompute.operators=full parallel.recompute.communication=keep"),
    *(("gpt", words) for words in (HOST, DISK, f"{HOST} parallel.offload.activations.modules=[layers.*]")),
    ("gpt", f"{FULL} {HOST}"),
    ("gpt", f"{ZERO[3]} {HOST}"),
    *(("gpt", f"{zero} {STATES}") for zero in ZERO[1:]),
    ("gpt", f"{ZERO[3]} {STATES} parallel.offload.parameters=host"),
    ("gpt", "optimizer.target=torch.optim.SGD"),
    ("gpt", "parallel.comm_overlap=false"),
    ("gpt", f"{FULL} +parallel.place={{layers.*.feed_forward:host}}"),
    *(("gpt, sliced 2 x 2", zero) for zero in ZERO),
    ("gpt, sliced 2 x 2", FULL),
    ("gpt, sliced 2 x 2", "parallel.recompute.operators=full parallel.recompute.slice_inputs=true"),
    *(("gpt, deep", words) for words in (ZERO[0], FULL, CHEAP, HOST, DISK, ZERO[3])),
    *(("gpt, wide", words) for words in (*ZERO, f"{ZERO[3]} {STATES}")),
    *(("llama", words) for words in (ZERO[0], ZERO[2], FULL)),
    *(("vit", words) for words in (ZERO[0], ZERO[1])),
    ("gpt_offload_disk", "parallel.zero.stage=3"),
    *(("resnet", words) for words in (ZERO[0], HOST)),
]
"""Model and the words of the plan."""
FEW, MANY, NOISE = 4, 12, 0.01
"""Steps of a pair, and of one that differs by more than NOISE: on a busy machine threads of gloo hold what was sent
over complete steps."""

LOWER = ("recompute", "activations.to", "offload.optimizer")
"""What a plan has whose peak is compared with that of the same plan without it."""


@dataclass(frozen=True)
class Result:
    model: str
    words: str
    predicted: dict[str, Any]
    measured: dict[str, Any]

    @property
    def difference(self) -> float:
        """The difference of the peaks, relative to the measured one."""
        return (int(self.predicted["peak"]) - int(self.measured["peak"])) / int(self.measured["peak"])


def measure(model: str, words: str, steps: int = FEW) -> Result:
    """Train for `steps` steps; the measured rank is the one with the highest peak."""
    own = "train.measure_memory=true", f"train.steps={steps}"
    checked = composed([*MODELS[model].split(), *STEPS.split(), *words.split(), *own])
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        train.run(checked, Path(folder))
        content = json.loads((Path(folder) / "memory.json").read_text(encoding="utf-8"))
    return Result(model, words, content["predicted"], max(content["measured"], key=lambda one: one["peak"]))


def without(words: str) -> str:
    """The same plan, without recompute and offload."""
    return " ".join(word for word in words.split() if not any(name in word for name in (*LOWER, "offload", "place")))


def table(results: list[Result]) -> str:
    """The page, in markdown."""
    errors = [abs(one.difference) for one in results]
    lines = [
        "# Memory of a rank: predicted and measured",
        "",
        "`python -m benchmarks.memory` trains each pair for four steps on real ranks (CPU, gloo) and counts the",
        "tensors that are alive. Bytes of the fullest rank at the fullest moment of a step (the median of the steps",
        "after the first: threads of gloo now and then hold what was sent a moment longer; where more than 1 % is",
        "missing, of 12 steps); what offload moves counts as the host's.",
        f"{len(results)} pairs: mean difference {sum(errors) / len(errors):.2%}, most over "
        f"{max(one.difference for one in results):+.2%}, most under {min(one.difference for one in results):+.2%}.",
        "",
        "| model | plan | predicted | measured | difference | in | host predicted | measured |",
        "|---|---|---:|---:|---:|---|---:|---:|",
    ]
    for one in results:
        words = one.words.replace("parallel.", "")
        cells = [
            one.model, f"`{words}`", f"{one.predicted['peak']:,}", f"{one.measured['peak']:,}",
            f"{one.difference:+.2%}", one.measured["peak_in"],
            f"{one.predicted['host']:,}", f"{one.measured['host']:,}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "What recompute and offload take off the peak:", ""]
    lines += ["| model | plan | predicted less | measured less | difference |", "|---|---|---:|---:|---:|"]
    known = {(one.model, one.words): one for one in results}
    for one in results:
        base = known.get((one.model, without(one.words) or ZERO[0]))
        if base is None or base is one or not any(name in one.words for name in LOWER):
            continue
        predicted = base.predicted["peak"] - one.predicted["peak"]
        measured = base.measured["peak"] - one.measured["peak"]
        lines.append(
            f"| {one.model} | `{one.words.replace('parallel.', '')}` | {predicted:,} | {measured:,} | "
            f"{(predicted - measured) / measured:+.2%} |"
        )
    return "\n".join(lines) + "\n"


def run(out: Path | None = None, only: str = "") -> list[Result]:
    """Measure the pairs whose model or plan contains `only`, and write the page to `out`."""
    launch.warm()
    results = []
    for model, words in PAIRS:
        if only in f"{model} {words}":
            one = measure(model, words)
            if abs(one.difference) > NOISE:
                one = measure(model, words, MANY)
            results.append(one)
            print(f"{one.difference:+7.2%}  {one.measured['peak']:>12,}  {model}: {words}", flush=True)
    if out is not None:
        out.write_text(table(results), encoding="utf-8")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="pairs whose model or plan holds this text")
    parser.add_argument("--out", type=Path, help="where to write the page")
    options = parser.parse_args()
    print(table(run(options.out, options.only)))


if __name__ == "__main__":
    main()
