"""Reductions against float64, on random and adversarial logits."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.engine import reduce
from serve.engine.rows import score_rows

# few distinct values, so that ties are common, beside a wide range
LOGITS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 4), st.integers(2, 40)),
    elements=st.one_of(
        st.sampled_from([-3.0, 0.0, 0.5, 2.0]),
        st.floats(-30, 30, width=32, allow_nan=False),
    ),
)


def logprobs(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    peak = x.max(1, keepdims=True)
    return x - peak - np.log(np.exp(x - peak).sum(1, keepdims=True))


def order(row: np.ndarray) -> list[int]:
    return sorted(range(len(row)), key=lambda v: (-row[v], v))


@given(LOGITS, st.integers(1, 45))
@settings(max_examples=200, deadline=None)
def test_top_k_is_value_descending_then_id_ascending(x: np.ndarray, k: int) -> None:
    got = reduce.top_k(torch.from_numpy(x), k)
    for row in range(len(x)):
        expected = order(x[row])[:k]
        assert got.ids[row].tolist() == expected
        assert got.values[row].tolist() == x[row][expected].tolist()


@given(LOGITS, st.data())
@settings(max_examples=200, deadline=None)
def test_rows_are_listed_at_their_own_width_and_scored_as_if_alone(x: np.ndarray, data: st.DataObject) -> None:
    rows, vocabulary = x.shape
    where = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=6))
    tokens = [data.draw(st.integers(0, vocabulary - 1)) for _ in where]
    ks = [data.draw(st.sampled_from([0, 1, 3, 33, 36, vocabulary])) for _ in where]
    logits = torch.from_numpy(x)
    got = score_rows(logits, tokens, ks, None, where)
    expected = logprobs(x)
    for row, token, k, scores in zip(where, tokens, ks, got, strict=True):
        ordered = order(x[row])
        assert (scores.token, scores.rank) == (token, ordered.index(token) + 1)
        assert scores.top_ids == tuple(ordered[:k])
        assert scores.top_logprobs == pytest.approx(expected[row][ordered[:k]], abs=1e-5)
        assert scores.logprob == pytest.approx(expected[row, token], abs=1e-5)
        if token in scores.top_ids:
            assert scores.logprob == scores.top_logprobs[scores.top_ids.index(token)]


@given(LOGITS)
@settings(max_examples=100, deadline=None)
def test_the_log_sum_exp_alone_has_the_bits_of_the_marginal(x: np.ndarray) -> None:
    of = reduce.marginal(torch.from_numpy(x), 2)
    assert torch.equal(reduce.log_sum_exp(torch.from_numpy(x), of.top.values[:, :1]), of.lse)


@given(LOGITS, st.data())
@settings(max_examples=200, deadline=None)
def test_rank_counts_larger_logits_and_equal_ones_with_a_smaller_id(x: np.ndarray, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, x.shape[1] - 1))
    k = data.draw(st.integers(1, x.shape[1]))
    logits = torch.from_numpy(x)
    got = reduce.ranks(logits, torch.full((len(x),), token), reduce.top_k(logits, k))
    assert got.tolist() == [order(row).index(token) + 1 for row in x]
    assert (reduce.ahead(logits, torch.full((len(x),), token)) + 1).tolist() == got.tolist()


@given(LOGITS)
@settings(max_examples=200, deadline=None)
def test_marginal_agrees_with_float64(x: np.ndarray) -> None:
    of = reduce.marginal(torch.from_numpy(x), 1)
    lp = logprobs(x)
    expected = x.astype(np.float64) - lp
    np.testing.assert_allclose(of.lse.numpy(), expected[:, 0], atol=2e-6)
    np.testing.assert_allclose(of.entropy.numpy(), -(np.exp(lp) * lp).sum(1), atol=2e-6)


@given(LOGITS, st.data())
@settings(max_examples=200, deadline=None)
def test_divergences_agree_with_float64_and_are_never_negative(x: np.ndarray, data: st.DataObject) -> None:
    scale = data.draw(st.sampled_from([1e-4, 1e-2, 1.0, 10.0]))
    noise = data.draw(hnp.arrays(np.float32, x.shape, elements=st.floats(-1, 1, width=32)))
    y = (x + np.float32(scale) * noise).astype(np.float32)
    p, q = torch.from_numpy(x), torch.from_numpy(y)
    got = reduce.divergences(p, q, reduce.marginal(p, 1).lse, reduce.marginal(q, 1).lse)
    lp, lq = logprobs(x), logprobs(y)
    wp, wq = np.exp(lp), np.exp(lq)
    lm = np.logaddexp(lp, lq) - math.log(2)
    expected = {
        "kl": (wp * (lp - lq)).sum(1),
        "reverse_kl": (wq * (lq - lp)).sum(1),
        "js": 0.5 * (wp * (lp - lm) + wq * (lq - lm)).sum(1),
        "tv": 0.5 * np.abs(wp - wq).sum(1),
    }
    for name, values in expected.items():
        ours = getattr(got, name).numpy()
        assert (ours >= 0).all()
        np.testing.assert_allclose(ours, values, atol=1e-6, rtol=2e-5, err_msg=name)


def test_a_tiny_divergence_keeps_its_relative_precision() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn((8, 5000), generator=generator) * 3
    q = p + 1e-4 * torch.randn((8, 5000), generator=generator)
    got = reduce.divergences(p, q, reduce.marginal(p, 1).lse, reduce.marginal(q, 1).lse)
    lp, lq = logprobs(p.numpy()), logprobs(q.numpy())
    expected = (np.exp(lp) * (lp - lq)).sum(1)
    assert expected.max() < 1e-7
    np.testing.assert_allclose(got.kl.numpy(), expected, rtol=5e-2)


def test_mass_where_the_other_side_has_none_is_not_lost() -> None:
    p, q = torch.tensor([[0.0, -300.0, -300.0]]), torch.tensor([[-300.0, 0.0, -300.0]])
    got = reduce.divergences(p, q, reduce.marginal(p, 1).lse, reduce.marginal(q, 1).lse)
    assert got.kl.item() == pytest.approx(300)
    assert got.reverse_kl.item() == pytest.approx(300)
    assert got.js.item() == pytest.approx(math.log(2), abs=1e-6)
    assert got.tv.item() == pytest.approx(1)


@pytest.mark.parametrize("mask", (-1e30, -65504.0, -1e4, torch.finfo(torch.float32).min))
def test_what_one_side_masks_and_the_other_finds_possible_is_infinite(mask: float) -> None:
    """-1e30 in one logit of the candidate gave KL 4e29, and with a likelihood of 1e-31 there, any small number."""
    for other in (0.0, -71.0):
        p, q = torch.zeros((3, 50)), torch.zeros((3, 50))
        p[1, 7], q[1, 7] = other, mask
        got = reduce.divergences(p, q, reduce.marginal(p, 1).lse, reduce.marginal(q, 1).lse)
        back = reduce.divergences(q, p, reduce.marginal(q, 1).lse, reduce.marginal(p, 1).lse)
        for ends in ((got.kl, got.reverse_kl), (back.reverse_kl, back.kl)):
            assert reduce.unscorable(ends[0]).tolist() == [False, True, False]
            assert not reduce.unscorable(ends[1]).any()


def test_what_both_sides_mask_does_not_count() -> None:
    p = torch.randn((2, 50), generator=torch.Generator().manual_seed(1))
    q = p + 0.1 * torch.randn((2, 50), generator=torch.Generator().manual_seed(2))
    got = reduce.divergences(p, q, reduce.marginal(p, 1).lse, reduce.marginal(q, 1).lse)
    masks = torch.full((2, 5), -1e30)
    wide = [torch.cat([x, masks], 1) for x in (p, q)]
    again = reduce.divergences(*wide, *(reduce.marginal(x, 1).lse for x in wide))
    np.testing.assert_allclose(again.kl, got.kl, rtol=1e-6)
    np.testing.assert_allclose(again.js, got.js, rtol=1e-6)


def test_equal_logits_give_exactly_zero() -> None:
    p = torch.randn((4, 1000), generator=torch.Generator().manual_seed(1)) * 10
    of = reduce.marginal(p, 1)
    got = reduce.divergences(p, p.clone(), of.lse, reduce.marginal(p.clone(), 1).lse)
    assert all(values.tolist() == [0] * 4 for values in got)


@pytest.mark.parametrize("block", (1, 7, 64, 1 << 18))
def test_blocks_of_columns_do_not_matter_beyond_rounding(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    p = torch.randn((3, 700), generator=torch.Generator().manual_seed(2)) * 4
    q = p + torch.randn((3, 700), generator=torch.Generator().manual_seed(3)) * 0.1
    whole = reduce.divergences(p, q, reduce.marginal(p, 1).lse, reduce.marginal(q, 1).lse)
    monkeypatch.setattr(reduce, "_CPU_BLOCK", block)
    cut = reduce.divergences(p, q, reduce.marginal(p, 1).lse, reduce.marginal(q, 1).lse)
    for ours, theirs in zip(whole, cut, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)
