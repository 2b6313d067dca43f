"""Pairs whose KL is known exactly, and how far estimates from a trace of them are off. For tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from evalgate.traces import PositionBatch, TopList, condense, estimate_kl, mean_standard_error, settled
from tests.evalgate.trace_samples import log_softmax, one_row_places, zipf_logits

PAIRS = ("quantized", "unrelated", "leaked token", "flat")
LEAK = 0.2  # of the candidate's probability
LISTED = 32  # of the candidate's likeliest ids


@dataclass(frozen=True)
class Quality:
    """Of the estimated mean over all positions, over several recordings of the same reference (nats).

    truth: the exact mean. bias: mean estimate minus truth, and its own standard error. rmse: root mean squared error.
    inside: share of recordings whose mean is within 2 of its stated errors of the truth. stated: the mean stated error.
    """

    truth: float
    bias: float
    bias_error: float
    rmse: float
    inside: float
    stated: float


def pair(kind: str, positions: int, vocabulary: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the reference and log-probabilities of the candidate, [positions, vocabulary] float64."""
    rng = np.random.default_rng([seed, PAIRS.index(kind)])
    logits = zipf_logits(positions, vocabulary, seed=seed).astype(np.float64)
    if kind == "quantized":
        return logits, log_softmax(logits + rng.normal(0, 0.06, logits.shape))
    if kind == "unrelated":
        return logits, log_softmax(zipf_logits(positions, vocabulary, seed=seed + 1))
    if kind == "flat":
        flat = rng.normal(0, 0.3, logits.shape)
        return flat, log_softmax(flat + rng.normal(0, 0.3, logits.shape))
    return logits, leaked(logits + rng.normal(0, 0.06, logits.shape))


def leaked(logits: np.ndarray, share: float = LEAK) -> np.ndarray:
    """log softmax(logits), but for `share` of it, which is given to the unlikeliest id."""
    q = np.exp(log_softmax(logits)) * (1 - share)
    np.put_along_axis(q, logits.argmin(axis=1)[:, None], share, axis=1)
    return np.log(q)


def exact(logits: np.ndarray, log_q: np.ndarray) -> float:
    """The mean KL over the positions, summed over whole rows in float64."""
    log_p = log_softmax(logits)
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean())


def estimated(rows: PositionBatch, log_q: np.ndarray, *, listed: int = LISTED) -> tuple[float, float]:
    """Mean KL and its stated error, as a run estimates them; `listed` of the candidate's likeliest ids are known."""
    best = np.argsort(-log_q, axis=1, kind="stable")[:, :listed]
    likeliest = TopList(best, np.take_along_axis(log_q, best, axis=1)) if listed else None
    found = settled(estimate_kl(rows, _at(log_q, rows.top_ids), _at(log_q, rows.tail_ids), likeliest))
    return float(found.kl.mean()), mean_standard_error(found.se)


def qualities(
    kind: str, *, k: int, draws: tuple[int, ...], positions: int, vocabulary: int, recordings: int, seed: int = 0
) -> dict[int, Quality]:
    """Draws a position -> how good the estimated mean is. Fewer draws are the first of the most."""
    logits, log_q = pair(kind, positions, vocabulary, seed=seed)
    truth, places, most = exact(logits, log_q), one_row_places(positions, vocabulary), max(draws)
    found: dict[int, list[tuple[float, float]]] = {m: [] for m in draws}
    for number in range(recordings):
        rows = condense(logits, places, top_k=k, tail_samples=most, seed=number)
        for m in draws:
            fewer = replace(rows, tail_ids=rows.tail_ids[:, :m], tail_logprobs=rows.tail_logprobs[:, :m])
            found[m].append(estimated(fewer, log_q))
    return {m: _quality(np.array(values), truth) for m, values in found.items()}


def _quality(found: np.ndarray, truth: float) -> Quality:
    off, stated = found[:, 0] - truth, found[:, 1]
    return Quality(
        truth=truth,
        bias=float(off.mean()),
        bias_error=float(off.std(ddof=1) / np.sqrt(len(off))),
        rmse=float(np.sqrt(np.square(off).mean())),
        inside=float((np.abs(off) <= 2 * stated + 1e-9).mean()),
        stated=float(stated.mean()),
    )


def _at(values: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.take_along_axis(values, np.maximum(ids, 0).astype(np.int64), axis=1)
