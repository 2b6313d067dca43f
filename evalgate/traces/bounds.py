"""Intervals from ids scored on both sides: KL from below, TV and JS from both sides.

S are the known ids of a position, R is everything else, merged into one cell of mass p_R = 1 - p_S on one side and
q_R on the other. Merging cells never raises an f-divergence (log-sum inequality), which gives the lower ends; the
upper ends take the tails as disjoint. Masses are sums of rounded logprobs, so each may be off by `slack`.
Every interval narrows, or stays, as S grows. In nats, float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evalgate.errors import ScoreError
from evalgate.traces.batch import Bools, Float64
from evalgate.traces.estimate import head_terms

SLACK = 1e-6  # of a mass: a float32 log-softmax over a large vocabulary
LN2 = float(np.log(2.0))
WORST_EXCESS = 1e-3  # sum of probabilities over 1 that is a wrong answer, not rounding


@dataclass(frozen=True)
class Shared:
    """log_p and log_q [n, k] float64 of the same distinct ids on both sides; known [n, k] flags those that count.

    log_p or log_q may be -inf (probability 0).
    """

    log_p: Float64
    log_q: Float64
    known: Bools

    def check(self) -> None:
        """Raise ScoreError naming the first row with a NaN, or with probabilities that add up to more than 1."""
        for name, values in (("reference", self.log_p), ("candidate", self.log_q)):
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


@dataclass(frozen=True)
class Bounds:
    """Certain ends of a value at every position: low and high [n], both inclusive."""

    low: Float64
    high: Float64


def kl_lower(shared: Shared, *, slack: float = SLACK) -> Float64:
    """[n] sum_S p log(p/q) + p_R log(p_R/q_R), at least 0: KL(P||Q) is no less. There is no finite upper bound.

    inf where P gives a known id probability and Q gives it none.
    """
    log_p, log_q = (np.where(shared.known, v, -np.inf) for v in (shared.log_p, shared.log_q))
    infinite = np.isneginf(log_q) & ~np.isneginf(log_p)
    head = head_terms(log_p, np.where(infinite, log_p, log_q)).sum(axis=1)
    p, q = _closer(*shared.masses, slack)
    tail = np.where(p > 0, p * (np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(q, 1e-300))), 0.0) - p + q
    return np.where(infinite.any(axis=1), np.inf, head + np.maximum(tail, 0.0))


def tv_interval(shared: Shared, *, slack: float = SLACK) -> Bounds:
    """Total variation [n], within [0, 1]."""
    p, q = (np.where(shared.known, np.exp(v), 0.0) for v in (shared.log_p, shared.log_q))
    head = np.abs(p - q).sum(axis=1) / 2
    p_rest, q_rest = shared.masses
    low = head + np.maximum(np.abs(p_rest - q_rest) / 2 - slack, 0.0)
    return Bounds(np.minimum(low, 1.0), np.minimum(head + (p_rest + q_rest) / 2 + slack, 1.0))


def js_interval(shared: Shared, *, slack: float = SLACK) -> Bounds:
    """Jensen-Shannon divergence [n], within [0, ln 2]."""
    p, q = (np.where(shared.known, np.exp(v), 0.0) for v in (shared.log_p, shared.log_q))
    head = _js_terms(p, q).sum(axis=1)
    p_rest, q_rest = shared.masses
    low = head + _js_terms(*_closer(p_rest, q_rest, slack))
    return Bounds(np.minimum(low, LN2), np.minimum(head + LN2 * ((p_rest + q_rest) / 2 + slack), LN2))


def _mass(logprobs: Float64) -> Float64:
    total: Float64 = np.exp(logprobs).sum(axis=1)
    return total


def _closer(p: Float64, q: Float64, slack: float) -> tuple[Float64, Float64]:
    """The two masses moved towards each other by at most `slack` each: where a divergence is least."""
    step = np.clip((p - q) / 2, -slack, slack)
    return p - step, q + step


def _js_terms(p: Float64, q: Float64) -> Float64:
    """p/2 log(p/m) + q/2 log(q/m) with m = (p + q)/2, per id, at least 0."""
    middle = (p + q) / 2
    safe = np.where(middle > 0, middle, 1.0)

    def part(x: Float64) -> Float64:
        return np.where(x > 0, x / 2 * np.log(np.where(x > 0, x, safe) / safe), 0.0)

    return np.maximum(part(p) + part(q), 0.0)
