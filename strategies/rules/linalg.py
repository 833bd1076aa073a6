"""Factorizations, inverses and solutions of matrices: the last two dims stay whole, the dims of the batch pass.

They have no padded slices, because what padding holds may be singular.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, TensorSpec
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Sharding, sharding


@rule(
    *"""
cholesky cholesky_solve det inverse linalg_cholesky linalg_det linalg_eigh linalg_eigvalsh linalg_inv linalg_matrix_exp
linalg_matrix_power linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_triangular linalg_svd linalg_svdvals
logdet matrix_exp matrix_power pinverse slogdet
""".split()
)
def matrices(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [..., n, m] -> matrices, vectors or numbers [...]; further operands are matrices [..., n, k] or vectors
    [..., n]."""
    batch = specs[0].shape[:-2]
    names: Dims = tuple(f"b{i}" for i in range(len(batch)))
    if any(spec.shape[: len(batch)] != batch or len(spec.shape) - len(batch) not in (1, 2) for spec in specs[1:]):
        return None  # batches that broadcast
    results: list[Dims] = [(*names, *(None for _ in spec.shape[len(batch) :])) for spec in operator.results]
    operands: list[Dims] = [(*names, *(None for _ in spec.shape[len(batch) :])) for spec in specs]
    return sharding(operands, results, specs, operator.results)
