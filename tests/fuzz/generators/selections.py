"""Selecting, ordering and scanning along one dim."""

from __future__ import annotations

from strategies.core.graph import Ref
from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool, Rejected


def _sized(pool: Pool, least: int = 2) -> tuple[Ref, int, int]:
    """A value, one of its dims with at least `least` elements, and its size."""
    x = pool.tensor(least=1)
    dims = [dim for dim, size in enumerate(pool.shape_of(x)) if size >= least]
    if not dims:
        raise Rejected
    dim = pool.rng.choice(dims)
    return x, dim - len(pool.shape_of(x)) if pool.rng.random() < 0.3 else dim, pool.shape_of(x)[dim]


@draws("cumsum", "logcumsumexp")
def scan(pool: Pool, op: str) -> None:
    x, dim, _ = _sized(pool, 1)
    pool.emit(f"aten.{op}.default", x, dim)


@draws("cumprod")
def cumprod(pool: Pool, op: str) -> None:
    x, dim, _ = _sized(pool, 1)
    pool.emit("aten.cumprod.default", pool.within(x, 0.5, 1.5), dim)


@draws("cummax", "cummin")
def running_extremum(pool: Pool, op: str) -> None:
    x, dim, _ = _sized(pool, 1)
    pool.apart(x)
    pool.call(f"aten.{op}.default", x, dim)


@draws("diff")
def diff(pool: Pool, op: str) -> None:
    x, dim, _ = _sized(pool)
    pool.emit("aten.diff.default", x, 1, dim)


@draws("sort", "argsort", "topk")
def ordered(pool: Pool, op: str) -> None:
    x, dim, size = _sized(pool, 1)
    pool.apart(x)
    if op == "topk":
        pool.call("aten.topk.default", x, pool.rng.randint(1, size), dim)
    elif op == "sort":
        pool.call("aten.sort.default", x, dim, pool.rng.random() < 0.5)
    else:
        pool.emit("aten.argsort.default", x, dim, pool.rng.random() < 0.5)


@draws("kthvalue")
def kthvalue(pool: Pool, op: str) -> None:
    x, dim, size = _sized(pool, 1)
    pool.apart(x)
    pool.call("aten.kthvalue.default", x, pool.rng.randint(1, size), dim)


@draws("narrow")
def narrow(pool: Pool, op: str) -> None:
    x, dim, size = _sized(pool)
    start = pool.rng.randrange(size)
    pool.emit("aten.narrow.default", x, dim, start, pool.rng.randint(1, size - start))


@draws("chunk", "tensor_split", "split", "split_with_sizes", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes")
def parts(pool: Pool, op: str) -> None:
    x, dim, size = _sized(pool)
    first = pool.rng.randint(1, size - 1)
    if op.endswith("split_with_sizes"):
        pool.call(f"aten.{op}.default", x, (first, size - first), dim)
    elif op.endswith("chunk"):
        pool.call(f"aten.{op}.default", x, pool.rng.randint(1, 4), dim)
    elif op != "tensor_split":
        pool.call(f"aten.{op}.Tensor", x, first, dim)
    else:
        pool.call("aten.tensor_split.sections", x, pool.rng.randint(1, min(3, size)), dim)


@draws("slice")
def slice_(pool: Pool, op: str) -> None:
    x, dim, size = _sized(pool, 1)
    if pool.rng.random() < 0.15:
        pool.emit("aten.slice.Tensor", x, dim, 0, 9223372036854775807)
        return
    steps = [step for step in (2, 3, 4) if size % step == 0]
    if steps and pool.rng.random() < 0.3:  # may be sliced along the dim
        step = pool.rng.choice(steps)
        pool.emit("aten.slice.Tensor", x, dim, pool.rng.randrange(step), size, step)
        return
    start = pool.rng.randrange(size)
    pool.emit("aten.slice.Tensor", x, dim, start, pool.rng.randint(start + 1, size), pool.rng.choice((1, 1, 2)))


@draws("select")
def select(pool: Pool, op: str) -> None:
    x, dim, size = _sized(pool, 1)
    pool.emit("aten.select.int", x, dim, pool.rng.randrange(-size, size))


@draws("unbind")
def unbind(pool: Pool, op: str) -> None:
    x, dim, size = _sized(pool, 1)
    if size > 4:
        raise Rejected
    pool.call("aten.unbind.int", x, dim)


@draws("tril", "triu")
def triangle(pool: Pool, op: str) -> None:
    x = pool.tensor(least=2)
    pool.emit(f"aten.{op}.default", x, *((pool.rng.randint(-2, 2),) if pool.rng.random() < 0.6 else ()))


@draws("flip")
def flip(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    rank = len(pool.shape_of(x))
    pool.emit("aten.flip.default", x, tuple(pool.rng.sample(range(rank), pool.rng.randint(1, rank))))


@draws("roll")
def roll(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    if pool.rng.random() < 0.2:
        pool.emit("aten.roll.default", x, (pool.rng.randint(-3, 3),))
        return
    rank = len(pool.shape_of(x))
    dims = pool.rng.sample(range(rank), pool.rng.randint(1, min(2, rank)))
    pool.emit("aten.roll.default", x, tuple(pool.rng.randint(-3, 3) for _ in dims), tuple(dims))


@draws("pad", "constant_pad_nd")
def pad(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1, accept=lambda value: value.numel() < 200)
    rank = len(pool.shape_of(x))
    widths = tuple(pool.rng.choice((0, 0, 1, 2, -1)) for _ in range(2 * pool.rng.randint(1, min(rank, 2))))
    if op == "constant_pad_nd":
        pool.emit("aten.constant_pad_nd.default", x, widths, 0.5)
        return
    mode = pool.rng.choice(("constant", "constant", "reflect", "replicate", "circular"))
    if mode == "constant":
        pool.emit("aten.pad.default", x, widths, "constant", 0.5)
        return
    widths = tuple(map(abs, widths))
    if rank < 3 or min(pool.shape_of(x)[-2:]) < 3:
        raise Rejected
    pool.emit("aten.pad.default", x, widths[:2] if rank == 3 else (*widths, 0, 0, 0, 0)[:4], mode)


@draws("diagonal")
def diagonal(pool: Pool, op: str) -> None:
    x = pool.tensor(least=2)
    rank = len(pool.shape_of(x))
    first, second = pool.rng.sample(range(rank), 2)
    pool.emit("aten.diagonal.default", x, pool.rng.randint(-1, 1), first, second)


@draws("unfold")
def unfold(pool: Pool, op: str) -> None:
    x, dim, size = _sized(pool)
    width = pool.rng.randint(1, size)
    pool.emit("aten.unfold.default", x, dim, width, pool.rng.randint(1, 3))


@draws("repeat_interleave")
def repeat_interleave(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1, accept=lambda value: value.numel() < 200)
    dim = (pool.dim(x),) if pool.rng.random() < 0.8 else ()
    pool.emit("aten.repeat_interleave.self_int", x, pool.rng.randint(1, 3), *dim)


@draws("tile")
def tile(pool: Pool, op: str) -> None:
    x = pool.tensor(most=3, accept=lambda value: value.numel() < 150)
    pool.emit("aten.tile.default", x, tuple(pool.rng.choice((1, 2)) for _ in range(pool.rng.randint(1, 3))))


@draws("diag_embed")
def diag_embed(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1, most=3, accept=lambda value: value.shape[-1] <= 8)
    pool.emit("aten.diag_embed.default", x, *((pool.rng.randint(-1, 1),) if pool.rng.random() < 0.4 else ()))


@draws("fliplr", "flipud", "rot90")
def turned(pool: Pool, op: str) -> None:
    x = pool.tensor(least=2)
    pool.emit(f"aten.{op}.default", x, *((pool.rng.randint(0, 3), (0, 1)) if op == "rot90" else ()))


@draws("msort")
def msort(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    pool.apart(x)
    pool.emit("aten.msort.default", x)


@draws("glu")
def glu(pool: Pool, op: str) -> None:
    x, dim, size = _sized(pool)
    if size % 2:
        raise Rejected
    pool.emit("aten.glu.default", x, dim)


@draws("hsplit", "vsplit", "dsplit")
def named_split(pool: Pool, op: str) -> None:
    least = {"hsplit": 1, "vsplit": 2, "dsplit": 3}[op]
    x = pool.tensor(least=least)
    shape = pool.shape_of(x)
    size = shape[{"hsplit": min(len(shape) - 1, 1), "vsplit": 0, "dsplit": 2}[op]]
    pool.call(f"aten.{op}.int", x, pool.rng.choice([d for d in (1, 2, 3) if size % d == 0]))
