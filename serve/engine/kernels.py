"""The reductions as compiled loops for a CPU: each row of logits is read once, while it is in the cache.

torch goes over a block of columns once for every step of a formula; here all steps of an element are done in registers.
`serve.engine.reduce` says what is computed and is the reference: it computes the same itself for other devices, where
numba is missing, with EVALGATE_KERNELS=torch, and for the few rows that are marked here as out of the ordinary.

A row's sums depend on nothing but the row. They run in float32 over short blocks, and in float64 across them. Compiled
code is kept between runs, beside this file or, where that cannot be written, in the user's cache.

exp is that of the Cephes library (Moshier): exp(x) = 2**n exp(r) with |r| <= log(2) / 2, a polynomial of degree 7. It
is off by at most 1e-7 of itself, as are expm1 and log1p made of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from serve.errors import LoadFailed

VARIABLE = "EVALGATE_KERNELS"
_CHOICES = ("auto", "torch")
_ALONE = 1 << 20  # elements that are not worth a second thread
_SMALL, _SHORT = 4096, 256  # a vocabulary whose rows are sorted in no time; ids of a vocabulary to one of a list

_failures: list[str] = []


class Kernels(NamedTuple):
    """Compiled loops over rows [low, high) of C-ordered arrays.

    side(logits, peaks [rows], out [rows, 2], low, high): log-sum-exp and entropy (nats) of each row, whose largest
    logit is given; NaN where the row has a NaN or +inf, or nothing but -inf.

    pair(p, q, p_lse, q_lse, limit, out [rows, 5], low, high): KL, reverse KL, the sums of JS and TV before they are
    scaled, and how many ids are further apart than `limit` nats or not to be compared.

    top(logits, k, ids [rows, k], values [rows, k], low, high): the k largest, value descending, then id ascending; -1
    as the first id where NaNs leave fewer than k.

    marginal(logits, k, ids, values, out, low, high): `top` and `side`.
    """

    side: Callable[..., None]
    pair: Callable[..., None]
    top: Callable[..., None]
    marginal: Callable[..., None]


def usable(*logits: torch.Tensor) -> bool:
    """Whether the loops can run over these tensors [rows, vocabulary]."""
    ordinary = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in logits)
    return ordinary and all(len(x) for x in logits) and kernels() is not None


@cache
def kernels() -> Kernels | None:
    """The loops; None where numba is not installed or does not work here, or was not wanted.

    Raises LoadFailed where EVALGATE_KERNELS is neither auto nor torch.
    """
    wanted = os.environ.get(VARIABLE, "auto")
    if wanted not in _CHOICES:
        raise LoadFailed(f"{VARIABLE} is '{wanted}': use one of {', '.join(_CHOICES)}")
    if wanted == "torch":
        return None
    try:
        made = _compiled()
        _try(made)
    except Exception as error:  # no numba, or one that cannot compile on this machine: the reference does the work
        _failures[:] = [f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
        return None
    return made


def why_not() -> str:
    """Why numba, though it is installed, compiles nothing here; "" where it does, is missing, or is not wanted."""
    if importlib.util.find_spec("numba") is None or kernels() is not None:
        return ""
    return _failures[0] if _failures else ""


def lists(k: int, vocabulary: int) -> bool:
    """Whether a list of k is short enough for `top`: a longer one is a sort, which torch does faster."""
    return k >= 1 and (vocabulary <= _SMALL or k <= vocabulary // _SHORT)


def run(name: str, logits: torch.Tensor, *arguments: Any) -> None:
    """Run a kernel over all rows of `logits`, on as many threads as torch has."""
    made = kernels()
    if made is None:
        raise RuntimeError("there are no compiled kernels here")
    kernel: Callable[..., None] = getattr(made, name)
    given: list[Any] = [x.contiguous().numpy() if isinstance(x, torch.Tensor) else x for x in (logits, *arguments)]
    rows = logits.shape[0]
    threads = min(torch.get_num_threads(), rows, max(1, logits.numel() // _ALONE))
    if threads <= 1:
        kernel(*given, 0, rows)
        return
    ends = [rows * part // threads for part in range(threads + 1)]
    pool = _pool(os.getpid())
    waiting = [pool.submit(kernel, *given, low, high) for low, high in pairwise(ends[1:])]
    kernel(*given, 0, ends[1])
    for each in waiting:
        each.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Threads of this process; a fork has none of its parent's."""
    return ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="reduce")


def _try(made: Kernels) -> None:
    """Compile, or read what was compiled before, on the smallest arrays; whatever goes wrong goes wrong here."""
    logits, out = np.zeros((1, 2), np.float32), np.empty((1, 5))
    ids, values = np.empty((1, 2), np.int64), np.empty((1, 2), np.float32)
    lse = np.zeros(1)
    made.marginal(logits, 2, ids, values, out[:, :2].copy(), 0, 1)
    made.top(logits, 2, ids, values, 0, 1)
    made.side(logits, values[:, 0].copy(), out[:, :2].copy(), 0, 1)
    made.pair(logits, logits, lse, lse, 1.0, out, 0, 1)


def _compiled() -> Kernels:
    _use_wide_registers()
    from serve.engine import loops

    return Kernels(loops.side, loops.pair, loops.top, loops.marginal)


def _use_wide_registers() -> None:
    """Let numba use the whole registers of a processor with AVX-512.

    LLVM halves them on Intel's, because a few wide instructions lower the clock of all others. These loops are nothing
    but such instructions: the divergences take half of the time. NUMBA_CPU_FEATURES goes before.
    """
    settings: Any = importlib.import_module("numba").config
    features: Any = importlib.import_module("llvmlite.binding").get_host_cpu_features()
    if settings.CPU_FEATURES is None and features.get("avx512f"):
        settings.CPU_FEATURES = f"{features.flatten()},-prefer-256-bit"
