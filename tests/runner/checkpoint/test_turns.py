"""Replicas divide saving evenly by bytes, and every shard is stored once."""

from types import SimpleNamespace

from runner.checkpoint.content import first_replicas
from strategies.core.graph import Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh

MESH = Mesh((("dp", 4), ("tp", 2)))


def of(**shapes):
    """Content whose tensors are replicated, except that `sliced...` are sharded over tp."""
    sources = tuple(
        Source(name, "parameter", name, TensorSpec(shape, "float32"), True) for name, shape in shapes.items()
    )
    layouts = {
        name: Layout((("tp",), ())) if name.startswith("sliced") else Layout.replicated(len(shape))
        for name, shape in shapes.items()
    }
    return SimpleNamespace(program=SimpleNamespace(mesh=MESH, layouts=layouts), sources=sources)


def test_the_largest_come_first():
    found = first_replicas(of(small=(2, 2), a=(40, 4), b=(40, 4), c=(10, 4)))
    assert (found["a"], found["b"], found["c"], found["small"]) == (0, 1, 2, 3)


def test_replicas_end_up_with_about_as_much():
    shapes = {f"layer{number}": (number + 1, 4) for number in range(40)}
    found, stored = first_replicas(of(**shapes)), [0] * 8
    for name, (rows, columns) in shapes.items():
        stored[found[name]] += rows * columns
    assert sum(stored) == sum(rows * 4 for rows, _ in shapes.values())
    assert max(stored) <= 1.05 * sum(stored) / 8  # round-robin, one rank would store 1.17 times the mean


def test_each_group_of_replicas_counts_for_itself():
    found = first_replicas(of(complete=(9, 4), sliced1=(8, 4), sliced2=(8, 4), sliced3=(2, 4)))
    assert found["complete"] == 0
    assert [found[name] for name in ("sliced1", "sliced2", "sliced3")] == [0, 1, 2]
