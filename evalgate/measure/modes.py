"""What two load modes of one checkpoint say together: the error of its weights, and that of its activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from evalgate.measure.request import DEQUANTIZED

if TYPE_CHECKING:
    from evalgate.summary import MetricSummary, Ranking


def mode_notes(means: Mapping[str, MetricSummary], ranking: Ranking | None) -> list[str]:
    """A note for each candidate that was measured as it loads and with its weights unpacked.

    means: by candidate, the metric that candidates are ranked by. The difference is paired by document, at the
    confidence of the ranking.
    """
    notes = []
    for name in means:
        unpacked = f"{name}@{DEQUANTIZED}"
        if ranking is None or unpacked not in means:
            continue
        both = [means[one].statistics.get("mean") for one in (name, unpacked)]
        if both[0] is None or both[1] is None:
            continue
        native, weights = both[0].value, both[1].value
        pair = next((pair for pair in ranking.pairs if {pair.first, pair.second} == {name, unpacked}), None)
        said = ""
        if pair is not None and pair.difference is not None:
            low, high = pair.difference.low, pair.difference.high
            ends = (low, high) if pair.first == name else tuple(None if e is None else -e for e in (high, low))
            said = f" [{', '.join('open' if end is None else f'{end:.3g}' for end in ends)}]"
        metric = means[name].metric
        notes.append(
            f"{name}: mean {metric} {native:.3g} as it loads, {weights:.3g} with its weights unpacked: what it rounds "
            f"while it computes adds {native - weights:.3g}{said}"
        )
    return notes
