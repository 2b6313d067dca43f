"""A figure as the gate judges it: the summary's interval, and for a pass a bound that holds whatever the tails.

A pass needs both inside the limit: the interval, and the bets of `stats.clipped` on documents that count only so far
beyond it. A percentile is held by the share of positions beyond its limit. A fail rests on the interval alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Figure, Limits, Verdict
from evalgate.gate.measures import verdict_of
from evalgate.metrics import Statistic
from evalgate.stats.clipped import Side, default_clip, largest_share, sides
from evalgate.stats.clustered import DocumentSums, document_sums
from evalgate.stats.intervals import Sample
from evalgate.stats.rare import RareEvents
from evalgate.stats.scale import linear
from evalgate.stats.units import Units

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Guarded:
    """One statistic of a sample.

    ideal: the mean, before the statistic's scale, of a candidate that is its reference. clip: how many distances from
    there to the limit a document counts at most; None = `clipped.default_clip`. share: whether the mean is the share of
    positions beyond a percentile's limit.
    """

    sample: Sample
    statistic: Statistic
    ideal: float = 0.0
    clip: float | None = None
    share: bool = False

    def figure(self, limits: Limits, *, confidence: float) -> Figure:
        """The statistic with the summary's interval.

        Raises:
            ScoreError: no positions, or a figure that overflows.
        """
        return self.sample.figure(self.statistic, confidence=confidence, rare=RareEvents(limits, self.clip))

    def settled(self, limits: Limits, *, confidence: float) -> bool:
        """Whether the bets rule out that the clipped figure is beyond a limit."""
        return all(
            side.beaten(sums.totals, sums.sizes, error=(1 - confidence) / 2) for side, sums in self._held(limits)
        )

    def verdict(self, limits: Limits, *, confidence: float) -> Verdict:
        """The gate's verdict."""
        return verdict_of(self, limits, self.figure(limits, confidence=confidence))

    def reservation(self, limits: Limits, *, confidence: float) -> str:
        """How much of a document counts, how many were cut and may be, and how far the clipped mean may be."""
        error = (1 - confidence) / 2
        said = [self._reservation(side, sums, error=error) for side, sums in self._held(limits)]
        return "; ".join(one for one in said if one)

    def _reservation(self, side: Side, sums: DocumentSums, *, error: float) -> str:
        word, share = ("most" if side.sign == 1 else "least"), self.statistic.kind == "percentile"
        said = []
        if side.cuts(sums.sizes):
            end = side.limit + side.sign * side.reach
            reach = f"{end:.3g} of its positions beyond the limit" if share else f"{self._shown(end):.4g}"
            cut = side.cut(sums.totals, sums.sizes)
            most = largest_share(cut, len(sums.totals), error=error)
            said.append(
                f"a document of average length counts as at {word} {reach} ({cut} cut, at most {most:.1%} of documents)"
            )
        if not side.beaten(sums.totals, sums.sizes, error=error):
            end = side.bound(sums.totals, sums.sizes, error=error)
            what = "share of positions beyond the limit" if share else "mean"
            said.append(f"by documents alone the {what} could be {end if share else self._shown(end):.4g}")
        return ", and ".join(said)

    def _held(self, limits: Limits) -> list[tuple[Side, DocumentSums]]:
        return self._shares(limits) if self.statistic.kind == "percentile" else self._losses(limits)

    def _losses(self, limits: Limits) -> list[tuple[Side, DocumentSums]]:
        """The limits of a mean as sides, with the documents' sums."""
        scale, series = self.statistic.scale, self.sample.series
        low, high = (None if x is None else linear(x, scale) for x in (limits.low, limits.high))
        known = [x for x in (low, high) if x is not None]
        if not known or not all(isfinite(x) for x in known):
            return []
        units = self._units
        if units is None:
            return []
        sums = document_sums(series.values, units, sizes=series.sizes)
        spread = float(np.sqrt(np.square(sums.totals - known[-1] * sums.sizes).mean()) / sums.sizes.mean())
        support = self.sample.support if scale == "identity" else (0.0 if scale == "sqrt" else -inf, inf)
        clip = self.clip or default_clip(len(sums.totals), share=self.share)
        held = sides(low, high, ideal=self.ideal, clip=clip, support=support, spread=spread)
        return [(side, sums) for side in held]

    def _shares(self, limits: Limits) -> list[tuple[Side, DocumentSums]]:
        """Each limit of a percentile as one on the share of positions beyond it."""
        level, series = self.statistic.level / 100, self.sample.series
        noise, units = (0.0 if series.se is None else series.se), self._units
        if units is None:
            return []
        found = []
        for limit, sign, allowed in ((limits.high, 1, 1 - level), (limits.low, -1, level)):
            if limit is None:
                continue
            beyond = sign * (series.values - limit) + noise > 0
            sums = document_sums(beyond.astype(np.float64), units)
            clip = self.clip or default_clip(len(sums.totals), share=True)
            (side,) = sides(None, allowed, ideal=0.0, clip=clip, support=(0.0, 1.0))
            found.append((side, sums))
        return found

    @property
    def _units(self) -> Integers | None:
        """Documents, or of one text its batches of about four windows; None where there is no interval either."""
        codes = Units.of(self.sample.documents, self.sample.windows).codes
        return codes[min(1, len(codes) - 1)] if codes else None

    def _shown(self, mean: float) -> float:
        """A mean on the scale on which it is reported."""
        if self.statistic.scale == "sqrt":
            return sqrt(max(mean, 0.0))
        if self.statistic.scale == "exp":
            return exp(mean) if mean < 709 else inf
        return min(max(mean, self.sample.support[0]), self.sample.support[1])
