"""The places of the code that behave otherwise on a GPU, and which part of the benchmark runs them.

Invariant: every file of the packages that asks for the kind of device stands in `PATHS` (a test compares).
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGES = ("meshwright", "models", "runner", "strategies")
NAMES = {"cuda", "is_cuda", "pin_memory"}
KINDS = ("cuda", "nccl")
NOT_HERE = "needs two GPUs"
"""In place of a part: one device does not run it."""
NO_PART = "none yet"
"""In place of a part: no model of the benchmark comes there."""

PATHS = {
    "meshwright/plans.py": ("A module on a GPU is refused", "library"),
    "meshwright/ranks.py": ("A rank of a loop of your own takes the current GPU", "library"),
    "runner/build/modules.py": ("No operator is refused in fp16", "fp16"),
    "runner/checkpoint/rng_state.py": ("The generator of the GPU is saved and restored", "resume"),
    "runner/checkpoint/saving.py": ("A snapshot is copied to pinned memory on a stream of its own", "resume"),
    "runner/checkpoint/shared_buffers.py": ("Memory shared with the process that writes files is pinned", "resume"),
    "runner/commands/calibrate.py": ("Constants of a GPU are written", "calibrate"),
    "runner/commands/doctor.py": ("GPUs and nccl are reported", "doctor"),
    "runner/commands/env.py": ("GPUs, CUDA and nccl are reported", "env"),
    "runner/config/exclusive.py": ("Parameter servers refuse GPUs", "refusal"),
    "runner/config/schema.py": ("`device`", "train"),
    "runner/data/reading.py": ("Batches are read into pinned memory", "train"),
    "runner/export/dry_run.py": ("Blocks that DTensor exchanges are counted as nccl sends them", NOT_HERE),
    "runner/export/plain_styles.py": ("Modules in torch's own styles on nccl", NOT_HERE),
    "runner/export/plain_torch.py": ("An exported program on nccl, with torch's own attention", "library"),
    "runner/launch/launchers/commands.py": ("Jobs ask a cluster for GPUs", NOT_HERE),
    "runner/launch/local.py": ("Ranks that wait for a GPU are not taken for idle ones", "train"),
    "runner/launch/orders.py": ("Rank r takes GPU r", "train"),
    "runner/launch/worker.py": ("The process group is nccl's", "train"),
    "runner/planning/calibration.py": ("Larger products, copies and messages; kernels are waited for", "calibrate"),
    "runner/planning/capacity.py": ("The memory of the host is not checked for what a GPU holds", "train"),
    "runner/planning/clusters.py": ("GPUs are counted; plans are for a DGX H100 by default", "train"),
    "runner/planning/lowering.py": ("Values below fp32 are reduced as they are", NOT_HERE),
    "runner/training/agreement.py": ("Ranks compare fingerprints over nccl", NOT_HERE),
    "runner/training/callbacks/profiler.py": ("Kernels are traced", "profiler"),
    "runner/training/evaluate.py": ("Batches of an evaluation are read into pinned memory", "train"),
    "runner/training/metering.py": ("Bytes are those of CUDA's allocator", "memory"),
    "runner/training/trainer.py": ("Batches are copied from pinned memory while the GPU computes", "train"),
    "strategies/capture/repeated_modules.py": ("Autocast on a GPU is part of what repeated modules share", "capture"),
    "strategies/capture/tracing.py": ("Autocast on a GPU is captured", "capture"),
    "strategies/capture/unsupported.py": ("A forward that seeds the generators of GPUs is refused", NO_PART),
    "strategies/memory/sharded.py": ("The states of our own ZeRO's optimizer", NOT_HERE),
    "strategies/memory/trace.py": ("What the workspaces of products hold", "memory"),
    "strategies/memory/zero.py": ("ZeRO 3 keeps bf16 parameters in bf16", "zero 3"),
    "strategies/optimizer/kernels.py": ("A fused kernel updates all parameters of a group", "train"),
    "strategies/optimizer/settings.py": ("Time and memory of an update are those of fused kernels", "calibrate"),
    "strategies/optimizer/sharded.py": ("Gradients are reduce-scattered by nccl", NOT_HERE),
    "strategies/optimizer/zero/engine.py": ("DeepSpeed's accelerator is CUDA", "zero 1"),
    "strategies/optimizer/zero/swap_files.py": ("Buffers of files are pinned", "states on disk"),
    "strategies/rules/attention.py": ("Groups of heads are repeated in fp32", "calibrate"),
    "strategies/rules/indexing.py": ("Indices out of range are left for the GPU to find", "train"),
    "strategies/rules/module_calls.py": ("The state of the GPU's generator shows that a module draws", NO_PART),
    "strategies/rules/random.py": ("The generator of the GPU is forked", "train"),
    "strategies/rules/ring_attention.py": ("Blocks are computed by the kernels of a GPU", NOT_HERE),
    "strategies/runtime/activation_offload.py": ("Activations go to pinned memory on a stream", "activations on host"),
    "strategies/runtime/communicator.py": ("Parameters are gathered by nccl", NOT_HERE),
    "strategies/runtime/compiled.py": ("Programs are compiled for triton", "compile"),
    "strategies/runtime/dtensors.py": ("Attention of an exported program takes a GPU's own kernels", NO_PART),
    "strategies/runtime/live_tensors.py": ("The copies that convolutions make are counted", "memory"),
}
"""By file: what happens there on a GPU alone, and the part of the benchmark that does it."""


def lines(file: Path) -> list[int]:
    """The lines of a file that ask for the kind of a device or name what only a GPU has."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in NAMES:
            found.add(node.lineno)
        elif isinstance(node, ast.keyword) and node.arg in NAMES:
            found.add(node.value.lineno)
        elif isinstance(node, ast.Constant) and str(node.value).partition(":")[0] in KINDS:
            found.add(node.lineno)
        elif isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            if any(isinstance(side, ast.Constant) and side.value == "cpu" for side in sides):
                found.add(node.lineno)
    return sorted(found)


@cache
def in_code(root: Path) -> dict[str, list[int]]:
    """The lines by file, relative to `root`."""
    files = [file for package in PACKAGES for file in sorted((root / package).rglob("*.py"))]
    return {file.relative_to(root).as_posix(): found for file in files if (found := lines(file))}
