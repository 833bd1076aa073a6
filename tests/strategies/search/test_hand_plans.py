"""Manual plans send no fewer bytes than those that the search finds within the same memory."""

from __future__ import annotations

import pytest

from benchmarks.hand_plans import HANDS, Hand, pair, predicted, run

QUICK = ("data parallel", "pairs in a feed-forward net", "sliced vocabulary")


@pytest.mark.few(1)
@pytest.mark.parametrize("hand", [one for one in HANDS if one.name in QUICK], ids=lambda hand: hand.name)
def test_the_search_sends_no_more_in_as_much_memory(hand: Hand) -> None:
    """By prediction, which equals the counted bytes; on this cluster seconds are bytes."""
    written, found = (predicted(task, hand.ranks) for task in pair(hand))
    assert found.peak <= written.peak
    assert 0 < found.seconds <= written.seconds


@pytest.mark.slow
def test_it_sends_no_more_on_real_ranks() -> None:
    for one in run([hand for hand in HANDS if hand.name in QUICK]):
        assert 0 < one.sent[1] <= one.sent[0], one.hand.name
        assert one.peaks[1] <= one.peaks[0], one.hand.name
