"""The compiled reductions against torch's and against float64, and what they leave to torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine import kernels, reduce
from serve.errors import LoadFailed
from tests.serve.engine.test_reduce import LOGITS, logprobs

if kernels.kernels() is None:
    pytest.skip("numba does not compile here, so that torch does the work", allow_module_level=True)

NAN, INF = float("nan"), float("inf")


def torch_marginal(logits: torch.Tensor, k: int) -> reduce.Marginal:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "usable", lambda *_: False)
        return reduce.marginal(logits, k)


def near_pair(rows: int, vocabulary: int, noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits as models give them, and the same with noise: few likely ids, a long tail, an offset."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn((rows, vocabulary), generator=generator) * 3 - 4
    p[:, ::997] += 9
    return p, p + noise * torch.randn((rows, vocabulary), generator=generator)


@given(LOGITS, st.integers(1, 45))
@settings(max_examples=200)
def test_lists_and_sums_are_those_of_torch(x: np.ndarray, k: int) -> None:
    logits = torch.from_numpy(x)
    ours, theirs = reduce.marginal(logits, k), torch_marginal(logits, k)
    assert torch.equal(ours.top.ids, theirs.top.ids) and torch.equal(ours.top.values, theirs.top.values)
    torch.testing.assert_close(ours.lse, theirs.lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.entropy, theirs.entropy, rtol=1e-5, atol=1e-5)


@given(LOGITS, st.sampled_from([0.0, 1e-4, 0.1, 5.0]), st.integers(0, 99))
@settings(max_examples=200)
def test_divergences_are_those_of_torch(x: np.ndarray, noise: float, seed: int) -> None:
    y = x + np.float32(noise) * np.random.default_rng(seed).normal(size=x.shape).astype(np.float32)
    p, q = torch.from_numpy(x), torch.from_numpy(y)
    p_lse, q_lse = reduce.marginal(p, 1).lse, reduce.marginal(q, 1).lse
    ours, theirs = reduce.divergences(p, q, p_lse, q_lse), reduce.torch_divergences(p, q, p_lse, q_lse)
    for one, two in zip(ours, theirs, strict=True):  # torch's own rounding is relative to the difference of logits
        torch.testing.assert_close(one, two, rtol=2e-6, atol=1e-6 * noise)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.05, 2.0])
def test_large_rows_keep_the_digits_of_float64(noise: float) -> None:
    p, q = near_pair(6, 50_257, noise)
    p_side, q_side = reduce.marginal(p, 20), reduce.marginal(q, 20)
    lp, lq = logprobs(p.numpy()), logprobs(q.numpy())
    np.testing.assert_allclose(-p_side.lse + p[:, 0].double(), lp[:, 0], rtol=1e-6)
    np.testing.assert_allclose(p_side.entropy, -(np.exp(lp) * lp).sum(1), rtol=1e-6)
    found = reduce.divergences(p, q, p_side.lse, q_side.lse)
    middle = np.logaddexp(lp, lq) - np.log(2)
    kl = (np.exp(lp) * (lp - lq)).sum(1)
    reverse = (np.exp(lq) * (lq - lp)).sum(1)
    js = (np.exp(lp) * (lp - middle) + np.exp(lq) * (lq - middle)).sum(1) / 2
    tv = np.abs(np.exp(lp) - np.exp(lq)).sum(1) / 2
    for ours, exact in zip(found[:3], (kl, reverse, js), strict=True):
        np.testing.assert_allclose(ours, exact, rtol=3e-6, atol=1e-14)
    np.testing.assert_allclose(found.tv, tv, rtol=3e-6, atol=3e-8)  # it feels the log-sum-exps' last digit
    assert (found.kl.numpy() == 0).all() == (noise == 0)


@pytest.mark.parametrize("value", [NAN, INF, -INF, -1e30, -1e4])
@pytest.mark.parametrize("side", ["reference", "candidate", "both"])
def test_what_is_no_logit_comes_out_as_it_does_with_torch(value: float, side: str) -> None:
    p, q = near_pair(3, 700, 0.1)
    for name, logits in (("reference", p), ("candidate", q)):
        if side in (name, "both"):
            logits[1, 123] = value
    ours, theirs = (reduce.marginal(p, 5), reduce.marginal(q, 5)), (torch_marginal(p, 5), torch_marginal(q, 5))
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.lse, two.lse, rtol=1e-6, atol=0, equal_nan=True)
        torch.testing.assert_close(one.entropy, two.entropy, rtol=1e-5, atol=0, equal_nan=True)
        if value == value:
            assert torch.equal(one.top.ids, two.top.ids)
    arguments = (p, q, theirs[0].lse, theirs[1].lse)
    for one, two in zip(reduce.divergences(*arguments), reduce.torch_divergences(*arguments), strict=True):
        torch.testing.assert_close(one, two, rtol=4e-6, atol=0, equal_nan=True)


def test_rows_of_nothing_but_nan_or_ruled_out_ids_end_in_nan() -> None:
    for value in (NAN, -INF, INF):
        logits = torch.full((2, 300), value)
        found = reduce.marginal(logits, 4)
        assert found.lse.isnan().all() and found.entropy.isnan().all()


@pytest.mark.parametrize("k", [1, 2, 7, 40, 300, 699, 700])
@pytest.mark.parametrize("kinds", [1, 2, 5])
def test_ties_are_listed_by_id_at_any_cut(k: int, kinds: int) -> None:
    rng = np.random.default_rng(k * 10 + kinds)
    x = rng.integers(0, kinds, (4, 700)).astype(np.float32)
    found = reduce.top_k(torch.from_numpy(x), k)
    for row in range(4):
        expected = sorted(range(700), key=lambda v: (-x[row, v], v))[:k]
        assert found.ids[row].tolist() == expected
        assert found.values[row].tolist() == x[row, expected].tolist()


def test_a_row_is_the_same_bits_in_any_batch_and_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    p, q = near_pair(33, 5_003, 0.1)
    whole = reduce.marginal(p, 20)
    q_lse = reduce.marginal(q, 1).lse
    pair = reduce.divergences(p, q, whole.lse, q_lse)

    def same(rows: slice) -> None:
        part = reduce.marginal(p[rows], 20)
        assert torch.equal(part.lse, whole.lse[rows]) and torch.equal(part.entropy, whole.entropy[rows])
        for one, all_rows in zip(reduce.divergences(p[rows], q[rows], part.lse, q_lse[rows]), pair, strict=True):
            assert torch.equal(one, all_rows[rows])

    for rows in (slice(0, 1), slice(7, 9), slice(5, 33), slice(3, 30, 4)):
        same(rows)
    monkeypatch.setattr(kernels, "_ALONE", 1)
    for threads in (1, 2, 3, 50):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        same(slice(0, 33))


def test_the_variable_chooses_torch_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros((1, 4))
    try:
        for value, usable in (("torch", False), ("auto", True)):
            monkeypatch.setenv(kernels.VARIABLE, value)
            kernels.kernels.cache_clear()
            assert kernels.usable(logits) is usable
        monkeypatch.setenv(kernels.VARIABLE, "fast")
        kernels.kernels.cache_clear()
        with pytest.raises(LoadFailed, match="EVALGATE_KERNELS is 'fast': use one of auto, torch"):
            kernels.kernels()
    finally:
        monkeypatch.delenv(kernels.VARIABLE)
        kernels.kernels.cache_clear()


def test_without_numba_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> kernels.Kernels:
        raise ModuleNotFoundError("No module named 'numba'")

    monkeypatch.setattr(kernels, "_compiled", missing)
    kernels.kernels.cache_clear()
    try:
        assert not kernels.usable(torch.zeros((1, 4)))
        assert kernels.why_not() == "ModuleNotFoundError: No module named 'numba'"
        assert reduce.marginal(torch.zeros((1, 4)), 2).top.ids.tolist() == [[0, 1]]
    finally:
        kernels.kernels.cache_clear()
