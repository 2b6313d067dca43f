"""How many documents a limit needs for a verdict, from a pilot run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evalgate.errors import ScoreError, UsageError
from evalgate.stats.clustered import document_sums
from evalgate.stats.ratio import check_confidence, figure_skewness, ratio_interval, reach

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MAX_DOCUMENTS = 10**9
_SD_ASSURANCE = 0.8  # chance that the pilot's upper limit of the spread is not too low (Browne 1995)


@dataclass(frozen=True)
class SamplePlan:
    """What a verdict takes.

    verdict: the one that the pilot's figure points to ("pass" = below the limit). documents: how many give it with
    the asked-for power if the pilot's figure and spread are right; documents_high: the same with the spread at its
    80 % upper confidence limit. Both are None where the figure is too close to the limit for any corpus.
    """

    value: float
    limit: float
    verdict: str
    pilot_documents: int
    documents: int | None
    documents_high: int | None
    power: float
    confidence: float


def documents_needed(
    values: Floats,
    documents: Integers,
    *,
    limit: float,
    sizes: Floats | None = None,
    power: float = 0.9,
    confidence: float = 0.95,
) -> SamplePlan:
    """Documents needed until the interval of the mean lies wholly on one side of `limit`, with the given power.

    values, documents (codes >= 0), sizes (None = 1 each): [n], the pilot's positions. New documents are taken to be
    as long, as different and as skewed as the pilot's.

    Raises:
        ScoreError: the pilot has fewer than 2 documents. UsageError: limit, power or confidence make no sense.
    """
    check_confidence(confidence)
    if not 0 < power < 1:
        raise UsageError(f"power must be between 0 and 1, not {power}", power=power)
    if not np.isfinite(limit):
        raise UsageError(f"the limit must be a finite number, not {limit}", limit=limit)
    sums = document_sums(values, documents, sizes=sizes)
    pilot = ratio_interval(sums.totals, sums.sizes, confidence=confidence)
    if pilot.se is None or pilot.df is None:
        raise ScoreError("a pilot needs at least 2 documents to show how they differ: add documents")
    groups, value, df = len(sums.totals), pilot.value, pilot.df
    spread = pilot.se * groups**0.5
    residuals = sums.totals - value * sums.sizes
    shape = _Shape(
        skew=figure_skewness(residuals, sums.sizes) * groups**0.5,
        effective=(df + 1) / groups,
        side=1 if value < limit else 0,
        confidence=confidence,
        power=power,
    )
    distance = abs(limit - value)
    return SamplePlan(
        value=value,
        limit=limit,
        verdict="pass" if value < limit else "fail",
        pilot_documents=groups,
        documents=shape.documents(spread, distance),
        documents_high=shape.documents(spread * _sd_factor(df), distance),
        power=power,
        confidence=confidence,
    )


@dataclass(frozen=True)
class _Shape:
    """skew of a figure times the root of its documents; effective documents per document; side that faces the limit."""

    skew: float
    effective: float
    side: int
    confidence: float
    power: float

    def documents(self, spread: float, distance: float) -> int | None:
        """Smallest n with (reach + z_power) * spread / sqrt(n) <= distance; None above MAX_DOCUMENTS."""
        from scipy.special import ndtri

        if spread == 0 and distance > 0:
            return 2
        z = float(ndtri(self.power))

        def enough(n: int) -> bool:
            df = max(n * self.effective - 1, 1.0)
            far = reach(self.confidence, df=df, skew=self.skew / n**0.5, documents=n)[self.side]
            return bool((far + z) * spread <= distance * n**0.5)

        # Invariant: low is too few, high is enough.
        low, high = 1, 2
        while not enough(high):
            low, high = high, high * 2
            if high > MAX_DOCUMENTS:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high


def _sd_factor(df: float) -> float:
    from scipy.special import chdtri

    # chdtri(df, p) = x with P(chi2 > x) = p.
    return float(np.sqrt(df / chdtri(df, _SD_ASSURANCE)))
