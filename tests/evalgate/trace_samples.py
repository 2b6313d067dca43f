"""Small references and candidates for the trace tests, and slow float64 definitions to check against."""

from __future__ import annotations

import numpy as np

from evalgate.core import SourceInfo, Window, WindowPolicy
from evalgate.traces import PositionBatch, TraceMeta, condense

RNG = np.random.default_rng


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = np.asarray(logits, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def zipf_logits(n: int, vocabulary: int, *, seed: int, exponent: float = 1.1) -> np.ndarray:
    """Rows like a language model's: Zipf ranks in shuffled order, with a noisy tail and a varying temperature."""
    rng = RNG(seed)
    base = -exponent * np.log(np.arange(1, vocabulary + 1))
    rows = [rng.permutation(base) * t + rng.normal(0, 0.5, vocabulary) for t in rng.uniform(0.9, 2.5, n)]
    return np.array(rows, np.float32)


def slow_kl(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    return np.array(
        [sum(np.exp(a) * (a - b) for a, b in zip(p, q, strict=True)) for p, q in zip(log_p, log_q, strict=True)]
    )


def slow_tv(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    return np.abs(np.exp(log_p) - np.exp(log_q)).sum(axis=1) / 2


def slow_js(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    p, q = np.exp(log_p), np.exp(log_q)
    m = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(p > 0, p * np.log(p / m), 0)
        right = np.where(q > 0, q * np.log(q / m), 0)
    return (left + right).sum(axis=1) / 2


def windows(count: int, length: int, vocabulary: int, *, documents: int = 2, first: int = 0, seed: int = 0):
    rng = RNG(seed)
    return [
        Window(
            index=first + i,
            document=f"doc{first + i * documents // count}",
            domain="prose",
            ids=tuple(rng.integers(0, vocabulary, length).tolist()),
            score_from=1,
            score_to=length,
            bytes_per_token=tuple(rng.integers(1, 6, length).tolist()),
            mask=() if i % 2 == 0 else tuple(j % 3 != 0 for j in range(length - 1)),
        )
        for i in range(count)
    ]


def meta(vocabulary: int, *, k: int = 8, m: int = 4, **changes) -> TraceMeta:
    source = SourceInfo("ref", "ref", "embedded", vocabulary, 512, weights_hash="w", tokenizer_hash="t")
    policy = WindowPolicy("disjoint", 512, 512)
    given = {"corpus": "text", "corpus_hash": "c", "top_k": k, "tail_samples": m, "versions": {"numpy": "2"}, **changes}
    return TraceMeta(source=source, policy=policy, **given)


def record(shown, *, vocabulary: int, k: int = 8, m: int = 4, seed: int = 0, full: bool = False) -> PositionBatch:
    places = [(w, i) for w in shown for i in w.positions]
    logits = zipf_logits(len(places), vocabulary, seed=1 + shown[0].index)
    return condense(logits, places, top_k=k, tail_samples=m, seed=seed, full=full)


def one_row_places(n: int, vocabulary: int, *, seed: int = 0):
    """n positions in windows of their own."""
    token = RNG(seed).integers(0, vocabulary, n).tolist()
    return [(Window(i, f"d{i % 20}", "", (0, t), 1, 2, (0, 1)), 1) for i, t in enumerate(token)]
