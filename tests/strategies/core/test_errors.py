"""Suggestions of messages."""

from strategies.core.errors import closest


def test_what_is_within_a_name_comes_before_what_is_near() -> None:
    known = ["gru.packed_network", "gru.zeros", "head.linear"]
    assert closest("gru", known).endswith(" gru has gru.packed_network, gru.zeros.")
    assert closest("head.liner", known).endswith(" Did you mean 'head.linear'?")
    assert closest("gru", []) == ""
