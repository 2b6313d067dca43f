"""Sampled positions."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalgate.core import Window
from evalgate.errors import UsageError
from evalgate.measure.sampling import sample_positions


def windows_of(sizes):
    """One document per entry, cut into windows of at most 8 tokens."""
    found = []
    for d, size in enumerate(sizes):
        for start in range(0, size, 7):
            n = min(7, size - start) + 1
            found.append(Window(len(found), f"d{d}", "x", tuple(range(n)), 1, n, (1,) * n))
    return found


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 80), st.integers(0, 5))
def test_every_document_has_its_share(sizes, count, seed):
    windows = windows_of(sizes)
    sampled = sample_positions(windows, count, seed=seed)
    assert sampled == sample_positions(windows, count, seed=seed)
    places = [(w.document, w.index, p) for w in sampled for p in w.positions]
    everything = {(w.document, w.index, p) for w in windows for p in w.positions}
    assert len(set(places)) == len(places) == min(count, sum(sizes))
    assert set(places) <= everything
    each = Counter(document for document, _, _ in places)
    for d, size in enumerate(sizes):
        assert abs(each[f"d{d}"] - min(count, sum(sizes)) * size / sum(sizes)) < 1
    assert [w.index for w in sampled] == sorted({w.index for w in sampled})


def test_each_position_is_as_likely():
    windows = windows_of([21, 7])
    hits = Counter(
        p for seed in range(400) for w in sample_positions(windows, 8, seed=seed) for p in [(w.index, w.positions)]
    )
    counted = Counter()
    for (index, positions), times in hits.items():
        for p in positions:
            counted[index, p] += times
    assert len(counted) == 28
    assert all(70 < times < 165 for times in counted.values())  # 400 * 8 / 28 = 114, sd 9


def test_masks_of_chat_windows_are_kept():
    window = Window(0, "d", "x", tuple(range(6)), 1, 6, (1,) * 6, mask=(True, False, True, False, True))
    (sampled,) = sample_positions([window], 2, seed=0)
    assert set(sampled.positions) < {1, 3, 5}


def test_nothing_to_sample():
    with pytest.raises(UsageError):
        sample_positions(windows_of([3]), 0, seed=0)
