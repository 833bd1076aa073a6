"""Tensors made from nothing, or from another one's dtype alone."""

from __future__ import annotations

import torch

from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool

DOUBLE = {"dtype": torch.float64, "device": torch.device("cpu"), "pin_memory": False}


@draws("zeros", "ones", "full")
def filled(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.shape(), *((0.75,) if op == "full" else ()), **DOUBLE)


@draws("arange")
def arange(pool: Pool, op: str) -> None:
    size = pool.rng.randint(1, 12)
    form = pool.rng.choice(("default", "start", "start_step"))
    arguments = {"default": (size,), "start": (-2, size), "start_step": (-1.5, size, 0.5)}[form]
    pool.emit(f"aten.arange.{form}", *arguments, **DOUBLE)


@draws("linspace", "logspace")
def spaced(pool: Pool, op: str) -> None:
    base = (2.0,) if op == "logspace" else ()
    pool.emit(f"aten.{op}.default", -1.0, 2.0, pool.rng.randint(1, 12), *base, **DOUBLE)


@draws("eye")
def eye(pool: Pool, op: str) -> None:
    pool.emit("aten.eye.default", pool.rng.randint(1, 8), **DOUBLE)


@draws("scalar_tensor")
def scalar_tensor(pool: Pool, op: str) -> None:
    pool.emit("aten.scalar_tensor.default", 0.75, **DOUBLE)


@draws("new_zeros", "new_ones", "new_full")
def new(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.tensor(), pool.shape(), *((0.75,) if op == "new_full" else ()))


@draws("tril_indices", "triu_indices")
def triangle_indices(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.rng.randint(1, 6), pool.rng.randint(1, 6), device=torch.device("cpu"))


@draws("bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window")
def window(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.rng.randint(2, 12), **DOUBLE)


@draws("fft_fftfreq", "fft_rfftfreq")
def frequencies(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.rng.randint(1, 12), 0.5, **DOUBLE)
