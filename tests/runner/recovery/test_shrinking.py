"""Which hosts and ranks a run goes on with when some are gone."""

from runner.recovery.shrinking import hosts_left

HOSTS = [
    {"name": name, "ranks": ranks, "devices": [0, 1]} for name, ranks in (("a", [0, 3]), ("b", [1, 4]), ("c", [2, 5]))
]


def test_ranks_keep_their_order():
    assert hosts_left(HOSTS, 4, ["b"]) == [
        {"name": "a", "ranks": (0, 2), "devices": (0, 1)},
        {"name": "c", "ranks": (1, 3), "devices": (0, 1)},
    ]


def test_what_is_too_many_is_left_out():
    assert hosts_left(HOSTS, 1, ["a"]) == [{"name": "b", "ranks": (0,), "devices": (0,)}]
    assert hosts_left(HOSTS, 2, ["b", "c"]) == [{"name": "a", "ranks": (0, 1), "devices": (0, 1)}]
