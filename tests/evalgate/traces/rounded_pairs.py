"""Pairs of distributions of a given KL, and the ways in which servers round what they print; seeded, float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from evalgate.probe.quantum import Quantum
from evalgate.traces import Shared, js_interval, kl_lower, tv_interval
from tests.evalgate.trace_samples import log_softmax

GRIDS = {
    "6 decimals": Quantum("decimal", 6),
    "5 decimals": Quantum("decimal", 5),
    "4 decimals": Quantum("decimal", 4),
    "float16": Quantum("float16"),
    "bfloat16": Quantum("bfloat16"),
}
MORE, LESS = 1 + 1e-12, 1 - 1e-12  # room for the rounding of the float64 truth itself, as at JS = ln 2


def printed(logprobs: np.ndarray, grid: str) -> np.ndarray:
    """What a server shows of these logprobs; bfloat16 rounds to even on float32's own bits."""
    if "decimals" in grid:
        return np.round(logprobs, int(grid[0]))
    if grid == "float16":
        return logprobs.astype(np.float16).astype(np.float64)
    bits = logprobs.astype(np.float32).view(np.uint32)
    even = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return even.view(np.float32).astype(np.float64)


@dataclass(frozen=True)
class Truth:
    """Whole log-distributions [n, vocabulary] and their divergences [n], nats."""

    log_p: np.ndarray
    log_q: np.ndarray
    kl: np.ndarray
    tv: np.ndarray
    js: np.ndarray


def truths(n: int, *, kl: float, seed: int, vocabulary: int = 256, chunk: int = 2000) -> Iterator[Truth]:
    """n positions in chunks, flat to peaked, each within a few percent of the KL asked for."""
    rng = np.random.default_rng(seed)
    for at in range(0, n, chunk):
        shape = (min(chunk, n - at), vocabulary)
        log_p = log_softmax(rng.normal(size=shape) * rng.uniform(1, 5, (shape[0], 1)))
        p, noise = np.exp(log_p), rng.normal(size=shape)
        spread = (p * noise**2).sum(axis=1) - (p * noise).sum(axis=1) ** 2
        log_q = log_softmax(log_p + noise * np.sqrt(2 * kl / spread)[:, None])
        q = np.exp(log_q)
        log_m = np.log((p + q) / 2)
        js = ((p * (log_p - log_m)).sum(axis=1) + (q * (log_q - log_m)).sum(axis=1)) / 2
        yield Truth(log_p, log_q, (p * (log_p - log_q)).sum(axis=1), np.abs(p - q).sum(axis=1) / 2, js)


@dataclass(frozen=True)
class Violations:
    """Positions at which a certain end was wrong, with rounding counted and not, and mean ends with it counted."""

    positions: int
    kl: int
    tv: int
    js: int
    kl_uncounted: int
    kl_low: float
    tv_width: float


def violations(n: int, *, kl: float, k: int, seed: int) -> dict[str, Violations]:
    """By grid: both sides print the reference's k likeliest ids, rounded; the ends that follow against the truth."""
    wrong = {grid: np.zeros(4, int) for grid in GRIDS}
    sums = {grid: np.zeros(2) for grid in GRIDS}
    for truth in truths(n, kl=kl, seed=seed):
        top = np.argpartition(-truth.log_p, k, axis=1)[:, :k]
        exact = [np.take_along_axis(v, top, axis=1) for v in (truth.log_p, truth.log_q)]
        for grid, quantum in GRIDS.items():
            p, q = (printed(v, grid) for v in exact)
            known = np.ones(p.shape, bool)
            shared = Shared(p, q, known, quantum.doubts(p), quantum.doubts(q))
            shared.check()
            low, tv, js = kl_lower(shared), tv_interval(shared), js_interval(shared)
            wrong[grid] += [
                (low > truth.kl * MORE).sum(),
                ((tv.low > truth.tv * MORE) | (tv.high < truth.tv * LESS)).sum(),
                ((js.low > truth.js * MORE) | (js.high < truth.js * LESS)).sum(),
                (kl_lower(Shared(p, q, known)) > truth.kl * MORE).sum(),
            ]
            sums[grid] += [low.sum(), (tv.high - tv.low).sum()]
    return {g: Violations(n, *(int(w) for w in wrong[g]), *(float(s) / n for s in sums[g])) for g in GRIDS}
