"""Common prefixes of token runs."""

from __future__ import annotations


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the longest common prefix of `a` and `b`; compares slices, so that long runs cost little."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n  # a[:low] == b[:low] and a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low
