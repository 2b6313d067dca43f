"""Terms of KL over ids, at least 0 each and without cancellation where both sides nearly agree.

With d = log p - log q, KL(P||Q) = sum_v p (d - 1 + exp(-d)), because both sides sum to 1. Nats, float64.
"""

from __future__ import annotations

import numpy as np

from evalgate.traces.batch import Float64


def excess(difference: Float64) -> Float64:
    """d - 1 + exp(-d) for d = log p - log q, at least 0, without cancellation near 0."""
    return np.maximum(difference + np.expm1(-difference), 0.0)


def head_terms(log_p: Float64, log_q: Float64) -> Float64:
    """p (d - 1 + exp(-d)) = p d - p + q per id, at least 0; q where p is 0. log_q is -inf only where log_p is."""
    p, q = np.exp(log_p), np.exp(log_q)
    with np.errstate(invalid="ignore"):  # -inf - -inf, replaced below
        difference = np.where(p > 0, log_p - log_q, 0.0)
    near = p * excess(np.clip(difference, -1.0, 1.0))
    return np.where(p > 0, np.where(np.abs(difference) < 1, near, np.maximum(p * difference - p + q, 0.0)), q)
