"""The loops of `serve.engine.kernels`, in the part of Python that numba compiles. Importing this imports numba.

Sums may be reordered (`_sums`), which is what lets a processor add eight numbers at once. Nothing else may: with
(p - q) - s written as p - (q + s), two nearly equal models would lose half of the digits of their difference. So the
formulas stand in functions of their own, which are put into the loops as they are (`_formula`).
"""

# mypy: ignore-errors
# (numba's decorators have no types, and its arithmetic is not that of numpy's annotations)

from __future__ import annotations

from typing import Any

import numba
import numpy as np

_formula: Any = numba.njit(fastmath={"contract", "nsz"}, forceinline=True, error_model="numpy")
_sums: Any = numba.njit(fastmath={"contract", "nsz", "reassoc"}, nogil=True, cache=True, error_model="numpy")
_no_nan: Any = numba.njit(fastmath={"nnan", "nsz"}, forceinline=True)
_BLOCK = 256
_GROUP, _LEAST_GROUPS = 128, 64  # elements of a group in a search for the largest; groups at least

f = np.float32  # numba computes in float32 only where every constant is one
_LEAST = f(-87.0)  # the exponent of the smallest normal number: below it exp is 0 for us
_LOG2E = f(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = f(0.693359375), f(-2.12194440e-4)


@_formula
def _exp_parts(x: Any) -> Any:
    """(expm1(r) - r, r, 2**n) with exp(x) = 2**n exp(r), for x in [-87, 88]; r is x itself where |x| is below 0.34."""
    n = np.floor(x * _LOG2E + f(0.5))
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    s = f(1.9875691500e-4)
    s = s * r + f(1.3981999507e-3)
    s = s * r + f(8.3334519073e-3)
    s = s * r + f(4.1665795894e-2)
    s = s * r + f(1.6666665459e-1)
    s = s * r + f(5.0000001201e-1)
    # 2**n by its bits. The sum is made in float32: numba's integers are 64 bits wide, and half as many fit a register.
    return s * (r * r), r, np.int32((n + f(127.0)) * f(8388608.0)).view(np.float32)


@_formula
def _mass(logit: Any, peak: Any) -> Any:
    """exp(logit - peak), that times (logit - peak), and 1 where the difference is not a number up to 0."""
    below = logit - peak
    odd = f(0.0) if below <= f(0.0) else f(1.0)
    below = max(below, _LEAST)
    part, r, scale = _exp_parts(below)
    mass = scale + scale * (part + r)
    return mass, mass * below, odd


@_formula
def _terms(p: Any, q: Any, p_shift: Any, q_shift: Any, shift: Any, limit: Any) -> Any:
    """One id's summands, as `reduce.divergences` defines them, and 1 where the two are too far apart to be compared."""
    d = (p - q) - shift
    x = abs(d)
    odd = f(0.0) if x <= limit else f(1.0)
    part, r, scale = _exp_parts(min(max(max(p - p_shift, q - q_shift), _LEAST), f(1.0)))
    a = scale + scale * (part + r)
    part, r, scale = _exp_parts(max(-x, _LEAST))
    e = scale * (part + r) + (scale - f(1.0))
    # x + e is about x**2 / 2: where x is small it is what _exp_parts left beside r, with all its digits
    w = part if scale == f(1.0) else x + e
    # log1p(e / 2) - e / 2 in the same way, by log1p(h) = 2 atanh(u), u = h / (2 + h), |u| <= 1 / 3
    h = f(0.5) * e
    u = h / (f(2.0) + h)
    u2 = u * u
    s = f(1.0 / 13)
    s = s * u2 + f(1.0 / 11)
    s = s * u2 + f(1.0 / 9)
    s = s * u2 + f(1.0 / 7)
    s = s * u2 + f(1.0 / 5)
    s = s * u2 + f(1.0 / 3)
    v = f(2.0) * (u * u2 * s) - h * u
    ae = a * e
    up = a * w  # KL(larger || smaller)
    down = -(up + ae * x)  # KL(smaller || larger)
    js = a * (((f(2.0) + e) * v - h * e) + (f(1.0) + e) * w)
    larger = (f(1.0) if d > f(0.0) else f(0.0)) * (up - down)
    return down + larger, up - larger, js, ae, odd


@_no_nan
def _larger(x: Any, y: Any) -> Any:
    """The larger of two; one instruction for eight pairs, as long as nobody asks what becomes of a NaN."""
    return x if x > y else y


@_sums
def side(logits: Any, peaks: Any, out: Any, first: int, last: int) -> None:
    """See `kernels.Kernels`."""
    columns = logits.shape[1]
    for row in range(first, last):
        peak = peaks[row]
        total, weighted, odd = 0.0, 0.0, 0.0
        for low in range(0, columns, _BLOCK):
            mass, times, strange = f(0.0), f(0.0), f(0.0)
            for j in range(low, min(low + _BLOCK, columns)):
                one, two, three = _mass(logits[row, j], peak)
                mass += one
                times += two
                strange += three
            total += mass
            weighted += times
            odd += strange
        log_total = np.log(total)
        out[row, 0] = np.nan if odd > 0 else peak + log_total
        out[row, 1] = np.nan if odd > 0 else log_total - weighted / total


@_sums
def pair(p: Any, q: Any, p_lse: Any, q_lse: Any, limit: float, out: Any, first: int, last: int) -> None:
    """See `kernels.Kernels`."""
    columns = p.shape[1]
    most = f(limit)
    for row in range(first, last):
        p_shift, q_shift, shift = f(p_lse[row]), f(q_lse[row]), f(p_lse[row] - q_lse[row])
        kl, reverse, js, tv, odd = 0.0, 0.0, 0.0, 0.0, 0.0
        for low in range(0, columns, _BLOCK):
            s0, s1, s2, s3, s4 = f(0.0), f(0.0), f(0.0), f(0.0), f(0.0)
            for j in range(low, min(low + _BLOCK, columns)):
                t0, t1, t2, t3, t4 = _terms(p[row, j], q[row, j], p_shift, q_shift, shift, most)
                s0 += t0
                s1 += t1
                s2 += t2
                s3 += t3
                s4 += t4
            kl += s0
            reverse += s1
            js += s2
            tv += s3
            odd += s4
        out[row, 0], out[row, 1], out[row, 2], out[row, 3], out[row, 4] = kl, reverse, js, tv, odd


@_sums
def top(logits: Any, k: int, ids: Any, values: Any, first: int, last: int) -> None:
    """See `kernels.Kernels`.

    Ids that are equal modulo `groups` are a group, so that eight groups' largest are found at once. The k-th largest
    of these is a floor that at least k elements reach, and only the groups that reach it are looked through.
    """
    columns = logits.shape[1]
    groups = min(columns, max(_LEAST_GROUPS, columns // _GROUP))
    largest = np.empty(groups, np.float32)
    for row in range(first, last):
        largest[:] = logits[row, :groups]
        for low in range(groups, columns, groups):
            for g in range(min(groups, columns - low)):
                largest[g] = _larger(logits[row, low + g], largest[g])
        floor = np.partition(largest, groups - k)[groups - k] if k <= groups else f(-np.inf)
        count = 0
        for g in range(groups):
            if largest[g] >= floor:
                for j in range(g, columns, groups):
                    count += logits[row, j] >= floor
        if count < k:  # a NaN is no larger and no smaller than anything
            ids[row, 0] = -1
            continue
        where = np.empty(count, np.int64)
        at = 0
        for g in range(groups):
            if largest[g] >= floor:
                for j in range(g, columns, groups):
                    if logits[row, j] >= floor:
                        where[at] = j
                        at += 1
        where.sort()
        found = np.empty(count, np.float32)
        for place in range(count):
            found[place] = -logits[row, where[place]]
        order = np.argsort(found, kind="mergesort")  # stable: equal values stay in the order of their ids
        for place in range(k):
            values[row, place] = -found[order[place]]
            ids[row, place] = where[order[place]]


@_sums
def marginal(logits: Any, k: int, ids: Any, values: Any, out: Any, first: int, last: int) -> None:
    """See `kernels.Kernels`. Row by row, so that the sums find in the cache what the list was read from."""
    for row in range(first, last):
        top(logits, k, ids, values, row, row + 1)
        if ids[row, 0] < 0:
            out[row, :] = np.nan
        else:
            side(logits, values[:, 0], out, row, row + 1)
