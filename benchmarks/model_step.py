"""Time of a training step of the captured program on one device against the plain training loop, as a ratio.

    python benchmarks/model_step.py [--model gpt|llama] [--device cpu|cuda] [--dtype float32|bfloat16] [--width 256]
                                    [--layers 4] [--sequence 128] [--batch 8] [--repetitions 20]

This is the overhead of capture, lowering and generated code in a step without collectives: both versions have
the same weights, batch, loss and optimizer (AdamW) and take one step each in turn in one process; the ratio of the
medians is printed. Goal: at most 1.01.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time

import torch
from torch import nn

from models.gpt import GPT
from models.llama import Llama
from strategies.capture import Objective, capture
from strategies.core.program import LoweringOptions
from strategies.core.request import Request
from strategies.lowering.lowering import lower
from strategies.optimizer.stages import make_updates
from strategies.planner.planner import make_plan
from strategies.runtime.communicator import Communicator
from strategies.runtime.module_tree import build

VOCABULARY = 256


class NextToken(nn.Module):
    """Cross-entropy of logits [b, s, v] and tokens [b, s]."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def model_of(options: argparse.Namespace) -> nn.Module:
    width, layers, length = options.width, options.layers, options.sequence
    heads = max(1, width // 64)
    if options.model == "gpt":
        return GPT(VOCABULARY, length, width, layers, heads)
    return Llama(VOCABULARY, length, width, layers, heads, heads, 4 * width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt", "llama"), default="gpt")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    for name, value in (("width", 256), ("layers", 4), ("sequence", 128), ("batch", 8), ("repetitions", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    plain = model_of(options).to(dtype)
    loss = NextToken()
    tokens, labels = (torch.randint(VOCABULARY, (options.batch, options.sequence)) for _ in range(2))
    objective = Objective(copy.deepcopy(plain), loss, ("0", "1"), ("1",))
    captured = capture(objective, (tokens, labels), training=True)
    program = lower(
        captured.graph, make_plan(captured.graph, Request("data_parallel", 1)), LoweringOptions(partial_loss=True)
    )
    plain, tokens, labels = plain.to(device), tokens.to(device), labels.to(device)
    communicator = Communicator(program.mesh, 0)
    tensors = {}
    for source in captured.graph.sources:
        if source.kind != "input":
            tensor = captured.tensors[source.name].detach().clone().to(device)
            tensors[source.name] = nn.Parameter(tensor) if source.kind == "parameter" else tensor
    module = build(program, tensors, communicator, device)
    names = [source.name for source in captured.graph.of_kind("parameter")]
    updates = make_updates(
        0, module, program, communicator, lambda groups: torch.optim.AdamW(groups, lr=1e-3), [{"names": names}]
    )
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)

    def by_hand() -> torch.Tensor:
        found = loss(plain(tokens), labels)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    def ours() -> torch.Tensor:
        found: torch.Tensor = module(tokens, labels)
        updates.backward(found)
        updates.step(measure=False)
        return found.detach()

    times: dict[str, list[float]] = {"ours": [], "hand-written": []}
    steps, worst = [("ours", ours), ("hand-written", by_hand)], 0.0
    for _ in range(options.repetitions):
        steps.reverse()  # the second one finds warmer caches
        losses = []
        for name, step in steps:
            started = time.perf_counter()
            losses.append(step())
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - started)
        worst = max(worst, (losses[0] - losses[1]).abs().item())
    own, other = (statistics.median(times[name][3:]) * 1e3 for name in ("ours", "hand-written"))
    print(f"{options.model} on {device}: ours {own:.2f} ms, plain loop {other:.2f} ms, ratio {own / other:.3f}")
    print(f"largest difference of the losses in {options.repetitions} steps: {worst:.1e}")


if __name__ == "__main__":
    main()
