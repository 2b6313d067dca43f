"""Corpora drawn from a known truth: what the intervals' coverage is measured on, here and in benchmarks/coverage.py.

Positions of a document share an effect with 30 % of the variance; the rest is AR(1) with 0.6 inside the document.
The latent value of a position is standard normal; every statistic's truth follows from its distribution exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.signal import lfilter
from scipy.special import ndtr, ndtri

SHARED, CORRELATION = 0.3, 0.6
LENGTH, LENGTH_SD = 100, 1.5
_WARM_UP = 16  # positions of AR(1) before a document begins: 0.6^16 is 3e-4
DELTA = 0.1  # standard deviation of delta-p where KL is 1
RATIO = 0.02  # mean log perplexity ratio
REFERENCE_SD = 0.9  # log s.d. of the reference's nll


@dataclass(frozen=True)
class Corpus:
    """documents [n]: codes. latent, noise, own [n]: standard normal; `own` is one draw per document, repeated."""

    documents: np.ndarray
    latent: np.ndarray
    noise: np.ndarray
    own: np.ndarray

    def kl(self, sd: float) -> np.ndarray:
        """Log-normal with mean 1 and this log s.d."""
        return np.exp(sd * self.latent - sd * sd / 2)

    def pareto(self, tail: float) -> np.ndarray:
        """Pareto with this tail index, mean 1: the variance is infinite up to 2."""
        return ndtr(-self.latent) ** (-1 / tail) * (tail - 1) / tail

    def agreement(self, rate: float) -> np.ndarray:
        """1 where the top-1 agrees; disagreements cluster as the latent value does."""
        return (self.latent <= ndtri(rate)).astype(float)

    def delta_prob(self, sd: float) -> np.ndarray:
        """Mean 0, mean square DELTA^2 1.09."""
        return DELTA * np.sqrt(self.kl(sd)) * (self.noise + 0.3 * self.own)

    def log_ratio(self, sd: float) -> np.ndarray:
        """nll difference with mean RATIO, as where the candidate's log-odds are normal: variance twice the mean."""
        kl = RATIO * self.kl(sd)
        return kl + self.noise * np.sqrt(2 * kl)


def lengths(rng: np.random.Generator, groups: int, kind: str) -> np.ndarray:
    """Document lengths [groups], 100 on average: all `equal`, or `lognormal` with log s.d. 1.5."""
    if kind == "equal":
        return np.full(groups, LENGTH)
    middle = math.log(LENGTH) - LENGTH_SD**2 / 2
    return np.maximum(1, np.round(np.exp(rng.normal(middle, LENGTH_SD, groups)))).astype(int)


def corpus(rng: np.random.Generator, groups: int, kind: str) -> Corpus:
    """Draw documents and their positions."""
    sizes = lengths(rng, groups, kind)
    return Corpus(
        documents=np.repeat(np.arange(groups), sizes),
        latent=latent(rng, sizes),
        noise=rng.standard_normal(sizes.sum()),
        own=np.repeat(rng.standard_normal(groups), sizes),
    )


def latent(rng: np.random.Generator, sizes: np.ndarray) -> np.ndarray:
    """Standard normal values [sum(sizes)] of documents with these sizes."""
    ends = np.cumsum(sizes + _WARM_UP)
    steps = rng.standard_normal(ends[-1]) * math.sqrt(1 - CORRELATION**2)
    path = lfilter([1.0], [1.0, -CORRELATION], steps)
    keep = np.ones(ends[-1], dtype=bool)
    for start in ends - sizes - _WARM_UP:
        keep[start : start + _WARM_UP] = False
    shared = np.repeat(rng.standard_normal(len(sizes)), sizes)
    return math.sqrt(1 - SHARED) * path[keep] + math.sqrt(SHARED) * shared


def reference_nll(rng: np.random.Generator, sizes: np.ndarray) -> np.ndarray:
    """The reference's nll of the same documents, independent of how far the candidate is off."""
    return np.exp(REFERENCE_SD * latent(rng, sizes))


def true_correlation(sd: float) -> float:
    """Of the reference's nll with that plus `log_ratio`, which is independent of it."""
    reference = math.expm1(REFERENCE_SD**2) * math.exp(REFERENCE_SD**2)
    difference = 2 * RATIO + math.expm1(sd * sd) * RATIO**2
    return math.sqrt(reference / (reference + difference))


def one_text(rng: np.random.Generator, windows: int, between: str, *, length: int = 50, sd: float = 1.5) -> np.ndarray:
    """KL [windows, length] of one long text with mean 1; `between` says how windows' shared effects hang together.

    0.5, 0.8: AR(1) of the windows' effects; `long`: fractional noise with d = 0.4, whose correlation never dies out.
    """
    if between == "long":
        frequency = np.fft.rfftfreq(4 * windows)
        frequency[0] = frequency[1]
        gain = np.abs(2 * np.sin(np.pi * frequency)) ** -0.4
        draw = gain * (rng.standard_normal(len(gain)) + 1j * rng.standard_normal(len(gain)))
        # The variance of a path with these gains, so that every window's effect is standard normal.
        weight = np.full(len(gain), 4.0)
        weight[[0, -1]] = 1.0
        effect = np.fft.irfft(draw, 4 * windows)[:windows] * 4 * windows / math.sqrt(float(weight @ gain**2))
    else:
        rho = float(between)
        steps = rng.standard_normal(windows + 100) * math.sqrt(1 - rho * rho)
        effect = lfilter([1.0], [1.0, -rho], steps)[100:]
    inside = lfilter(
        [1.0], [1.0, -CORRELATION], rng.standard_normal(windows * length + 100) * math.sqrt(1 - CORRELATION**2)
    )[100:].reshape(windows, length)
    return np.exp(sd * (math.sqrt(1 - SHARED) * inside + math.sqrt(SHARED) * effect[:, None]) - sd * sd / 2)
