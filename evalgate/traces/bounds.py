"""Intervals from ids scored on both sides: KL from below, TV and JS from both sides.

S are the known ids of a position, R is everything else, merged into one cell of mass p_R = 1 - p_S on one side and
q_R on the other. Merging cells never raises an f-divergence (log-sum inequality), which gives the lower ends; the
upper ends take the tails as disjoint. Masses are sums of rounded logprobs, so each may be off by `slack`.
Every interval narrows, or stays, as S grows. In nats, float64.

Where a server prints rounded logprobs, each true p lies in [p exp(-h), p exp(h)] and the ends hold for every such P and
Q. Term by term a divergence is least where p and q are closest, which gives the lower ends. Moving mass from a known id
to the tail never lowers an upper end (TV: 1 - sum_S min(p, q); JS falls by log((p + q) / p) / 2 for each unit of p), so
the upper ends are those of the smallest p and q.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evalgate.errors import ScoreError
from evalgate.traces.batch import Bools, Float64
from evalgate.traces.terms import head_terms

SLACK = 1e-6  # of a mass: a float32 log-softmax over a large vocabulary
LN2 = float(np.log(2.0))
WORST_EXCESS = 1e-3  # sum of probabilities over 1 that is a wrong answer, not rounding


@dataclass(frozen=True)
class Shared:
    """log_p and log_q [n, k] float64 of the same distinct ids on both sides; known [n, k] flags those that count.

    log_p or log_q may be -inf (probability 0). off_p, off_q [n, k]: most nats that each may be off, finite and at
    least 0; None = none.
    """

    log_p: Float64
    log_q: Float64
    known: Bools
    off_p: Float64 | None = None
    off_q: Float64 | None = None

    def check(self) -> None:
        """Raise ScoreError naming the first row with a NaN, or with probabilities that add up to more than 1."""
        lowest = self.lowest
        for name, values in (("reference", lowest.log_p), ("candidate", lowest.log_q)):
            wrong = (self.known & (np.isnan(values) | (values > WORST_EXCESS))).any(axis=1)
            wrong |= _mass(np.where(self.known, values, -np.inf)) > 1 + WORST_EXCESS
            if wrong.any():
                raise ScoreError(
                    f"row {int(np.argmax(wrong))}: the {name}'s logprobs are not those of one distribution: "
                    "ask for raw logprobs, before temperature and truncation",
                    row=int(np.argmax(wrong)),
                )

    @property
    def masses(self) -> tuple[Float64, Float64]:
        """p_R and q_R [n]: what the known ids leave, at least 0."""
        p, q = (np.where(self.known, v, -np.inf) for v in (self.log_p, self.log_q))
        return np.maximum(1 - _mass(p), 0.0), np.maximum(1 - _mass(q), 0.0)

    @property
    def lowest(self) -> Shared:
        """The smallest probabilities that the logprobs stand for, without doubt of their own."""
        p, q = (v if off is None else v - off for v, off in self._sides)
        return Shared(p, q, self.known)

    @property
    def closest(self) -> Shared:
        """Logprobs moved towards each other as far as each may be off: where a divergence is least."""
        if self.off_p is None and self.off_q is None:
            return self
        off_p, off_q = (np.zeros(v.shape) if off is None else off for v, off in self._sides)
        finite = self.known & np.isfinite(self.log_p) & np.isfinite(self.log_q)
        p, q = closer(np.where(finite, self.log_p, 0.0), np.where(finite, self.log_q, 0.0), off_p, off_q)
        return Shared(np.where(finite, p, self.log_p), np.where(finite, q, self.log_q), self.known)

    @property
    def doubts(self) -> tuple[Float64, Float64]:
        """Most that each tail mass [n] may be off because of off_p and off_q."""
        zeros = np.zeros(len(self.log_p))
        p, q = (
            zeros if off is None else np.where(self.known, np.exp(v) * np.expm1(off), 0.0).sum(axis=1)
            for v, off in self._sides
        )
        return p, q

    @property
    def _sides(self) -> tuple[tuple[Float64, Float64 | None], tuple[Float64, Float64 | None]]:
        return (self.log_p, self.off_p), (self.log_q, self.off_q)


@dataclass(frozen=True)
class Bounds:
    """Certain ends of a value at every position: low and high [n], both inclusive."""

    low: Float64
    high: Float64


def kl_lower(shared: Shared, *, slack: float = SLACK) -> Float64:
    """[n] sum_S p log(p/q) + p_R log(p_R/q_R), at least 0: KL(P||Q) is no less. There is no finite upper bound.

    inf where P gives a known id probability and Q gives it none.
    """
    near = shared.closest
    log_p, log_q = (np.where(shared.known, v, -np.inf) for v in (near.log_p, near.log_q))
    infinite = np.isneginf(log_q) & ~np.isneginf(log_p)
    head = head_terms(log_p, np.where(infinite, log_p, log_q)).sum(axis=1)
    p, q = _closest_tails(shared, slack)
    tail = np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(q, 1e-300))), 0.0) - p + q
    return np.where(infinite.any(axis=1), np.inf, head + np.maximum(tail, 0.0))


def tv_interval(shared: Shared, *, slack: float = SLACK) -> Bounds:
    """Total variation [n], within [0, 1]."""
    p, q = _probabilities(shared.closest)
    p_rest, q_rest = shared.masses
    p_doubt, q_doubt = shared.doubts
    low = np.abs(p - q).sum(axis=1) / 2
    low = low + np.maximum(np.abs(p_rest - q_rest) / 2 - (slack + (p_doubt + q_doubt) / 2), 0.0)
    p, q = _probabilities(shared.lowest)
    p_rest, q_rest = shared.lowest.masses
    high = np.abs(p - q).sum(axis=1) / 2 + (p_rest + q_rest) / 2 + slack
    return Bounds(np.minimum(low, 1.0), np.minimum(high, 1.0))


def js_interval(shared: Shared, *, slack: float = SLACK) -> Bounds:
    """Jensen-Shannon divergence [n], within [0, ln 2]."""
    low = _js_terms(*_probabilities(shared.closest)).sum(axis=1) + _js_terms(*_closest_tails(shared, slack))
    p_rest, q_rest = shared.lowest.masses
    high = _js_terms(*_probabilities(shared.lowest)).sum(axis=1) + LN2 * ((p_rest + q_rest) / 2 + slack)
    return Bounds(np.minimum(low, LN2), np.minimum(high, LN2))


def closer(a: Float64, b: Float64, most_a: Float64, most_b: Float64) -> tuple[Float64, Float64]:
    """a and b moved towards each other by at most `most_a` and `most_b`; they meet where they can."""
    apart = a - b
    step_b = np.clip(apart - np.clip(apart / 2, -most_a, most_a), -most_b, most_b)
    return a - np.clip(apart - step_b, -most_a, most_a), b + step_b


def _closest_tails(shared: Shared, slack: float) -> tuple[Float64, Float64]:
    """p_R and q_R [n] as close to each other as they may be."""
    p_doubt, q_doubt = shared.doubts
    return closer(*shared.masses, slack + p_doubt, slack + q_doubt)


def _probabilities(shared: Shared) -> tuple[Float64, Float64]:
    p, q = (np.where(shared.known, np.exp(v), 0.0) for v in (shared.log_p, shared.log_q))
    return p, q


def _mass(logprobs: Float64) -> Float64:
    total: Float64 = np.exp(logprobs).sum(axis=1)
    return total


def _js_terms(p: Float64, q: Float64) -> Float64:
    """p/2 log(p/m) + q/2 log(q/m) with m = (p + q)/2, per id, at least 0."""
    middle = (p + q) / 2
    safe = np.where(middle > 0, middle, 1.0)

    def part(x: Float64) -> Float64:
        return np.where(x > 0, x / 2 * np.log(np.where(x > 0, x, safe) / safe), 0.0)

    return np.maximum(part(p) + part(q), 0.0)
