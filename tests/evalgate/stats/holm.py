"""Holm's step-down correction: several p-values, one error rate (Holm 1979, Scand. J. Stat. 6)."""

from __future__ import annotations

from collections.abc import Mapping

from evalgate.errors import UsageError


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values by name, in the order given: reject those at or below the family's error rate.

    Valid under any dependence between the tests.

    Raises:
        UsageError: a p-value is not in [0, 1].
    """
    for name, p in p_values.items():
        if not 0 <= p <= 1:
            raise UsageError(f"the p-value of {name!r} must be in [0, 1], not {p}", name=name)
    order = sorted(p_values, key=lambda name: p_values[name])
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
