"""Sampled positions and budgets."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalgate.core import Window
from evalgate.endpoints.budget import Budget, Purse, Spending, Spent, sample_positions
from evalgate.errors import UsageError


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


def test_budgets_are_read():
    assert Budget.parse("requests=5") == Budget(5, None)
    assert Budget.parse("seconds=1.5, requests=2") == Budget(2, 1.5)
    for text in ("", "5", "requests=0", "requests=1.5", "seconds=-1", "requests=1,requests=2", "tokens=3"):
        with pytest.raises(UsageError):
            Budget.parse(text)


def test_spending_ends():
    now = [0.0]
    spending = Spending(Budget(5, 10.0), clock=lambda: now[0])
    assert spending.begin(3)
    assert not spending.begin(3)
    assert spending.begin(2)
    assert spending.requests == 5
    assert spending.begin(0)
    spending.give_back(1)
    now[0] = 10.0
    assert not spending.begin(0)
    assert spending.take(1)  # of a window that has begun
    assert not spending.take(1)


def test_a_purse_pays_from_what_was_set_aside_and_then_from_the_rest():
    spending = Spending(Budget(requests=4))
    assert spending.begin(2)
    purse = Purse(spending, 2)
    for _ in range(4):
        purse.pay()
    with pytest.raises(Spent):
        purse.pay()
    purse.put_back()
    assert spending.requests == 4
    purse.close()
    assert spending.requests == 3
    purse.pay()
    assert spending.requests == 4
