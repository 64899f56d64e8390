"""benchmarks/sharding.py: what several GPUs would give, against sums by hand."""

from __future__ import annotations

import pytest

from benchmarks.sharding import Sizes, several


def test_steps_of_several_ranks() -> None:
    runs = {"no group, recorded": 70.0, "group, recorded": 72.0, "group, launched": 90.0}
    ranks = {"runs": {way: {"milliseconds": took} for way, took in runs.items()}}
    rows = several(Sizes("made up", 90_000_000, 1, 10_000_000), ranks)
    found = {(row.world, row.way): row for row in rows}
    assert list(found) == [(8, "recorded"), (8, "launched"), (64, "recorded"), (64, "launched")]
    # Bytes that are received: features of 128 pairs of every other rank, twice that for their gradients.
    features = {8: 3 * 7 * 2 * 128 * 4 * 512 / 450e9, 64: 3 * 63 * 2 * 128 * 4 * 512 / 50e9}
    gradients = {8: 2 * 7 / 8 * 4e8 / 450e9, 64: 2 * 63 / 64 * 4e8 / 50e9}
    for world in (8, 64):
        recorded, launched = found[world, "recorded"], found[world, "launched"]
        assert launched.sent == pytest.approx(1000 * features[world])
        assert recorded.sent == pytest.approx(1000 * (features[world] + gradients[world]))
        assert recorded.times == pytest.approx(world * 70 / (72 + recorded.sent))
        assert launched.times == pytest.approx(world * 70 / (90 + launched.sent))
