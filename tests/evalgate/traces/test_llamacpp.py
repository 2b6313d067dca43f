from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evalgate.errors import InputError, MismatchError, ScoreError, UsageError
from evalgate.traces import llamacpp_kl, llamacpp_kl_interval, read_logits_file, write_logits_file
from evalgate.traces.llamacpp_logits import encode_rows
from tests.evalgate.trace_samples import log_softmax, slow_kl

F = np.float32


def slow_row(logits: np.ndarray) -> bytes:
    """One row as perplexity.cpp writes it, one scalar operation at a time."""
    largest, smallest = F(max(logits)), F(min(logits))
    smallest = max(smallest, F(largest - F(16)))
    total = 0.0
    for x in logits:
        total += float(F(np.exp(np.float64(F(x - largest)))))
    least = F(F(smallest - largest) - F(np.log(total)))
    scale = F(F(largest - smallest) / F(65535))
    codes = [0] * len(logits)
    if scale:
        inverse = F(F(1) / scale)
        for i, x in enumerate(logits):
            if x > smallest:
                val = F(F(inverse * F(x - smallest)) + F(12582912))
                codes[i] = (struct.unpack("<i", struct.pack("<f", val))[0] & 0x007FFFFF) - 0x00400000
    padded = codes + [0] * (len(codes) % 2)
    return struct.pack("<ff", scale, least) + struct.pack(f"<{len(padded)}H", *padded)


def make(tmp_path, *, n_ctx=9, n_vocab=21, chunks=3, scale=6.0, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, n_vocab, (chunks, n_ctx))
    logits = rng.normal(0, scale, (chunks, n_ctx - 1 - n_ctx // 2, n_vocab)).astype(F)
    path = tmp_path / "base.kld"
    write_logits_file(path, tokens, logits, n_vocab=n_vocab)
    return path, tokens, logits


@pytest.mark.parametrize(("n_ctx", "n_vocab", "scale"), [(9, 21, 6.0), (8, 20, 0.5), (3, 2, 3.0), (16, 33, 40.0)])
def test_written_byte_for_byte(tmp_path, n_ctx, n_vocab, scale):
    path, tokens, logits = make(tmp_path, n_ctx=n_ctx, n_vocab=n_vocab, scale=scale)
    want = b"_logits_" + struct.pack("<iii", n_ctx, n_vocab, 3) + tokens.astype("<i4").tobytes()
    want += b"".join(slow_row(row) for chunk in logits for row in chunk)
    assert path.read_bytes() == want
    assert [p.name for p in tmp_path.iterdir()] == ["base.kld"]


def test_constant_and_masked_rows():
    rows = np.array([[2, 2, 2], [5, -np.inf, 4], [100, 84, 83]], F)
    cells = encode_rows(rows)
    for row, cell in zip(rows, cells, strict=True):
        assert cell.tobytes() == slow_row(row)


def test_read_back(tmp_path):
    path, tokens, logits = make(tmp_path)
    file = read_logits_file(path)
    assert (file.n_ctx, file.n_vocab, len(file.tokens)) == (9, 21, 3)
    windows = file.windows(bos_id=2)
    assert [w.ids for w in windows] == [(2, *chunk[1:].tolist()) for chunk in tokens]
    assert [w.ids for w in file.windows(bos_id=None)] == [tuple(chunk.tolist()) for chunk in tokens]
    assert windows[0].positions == (5, 6, 7, 8)
    assert len({w.document for w in windows}) == 1
    for window in windows:
        rows = file.rows(window.index)
        assert rows.logprobs.dtype == np.float32 and rows.logprobs.shape == (len(window.positions), 21)
        log_p = log_softmax(logits[window.index])
        off = np.abs(rows.logprobs - log_p)
        assert (off <= rows.rounding)[~rows.censored].all()
        far = logits[window.index].max(axis=1, keepdims=True) - logits[window.index] > 16.001
        assert (rows.censored | ~far).all() and rows.censored.any()
        assert (np.where(rows.censored, np.exp(log_p), 0).sum(axis=1) <= rows.hidden).all()


def test_ids_so_near_the_likeliest_that_they_share_its_code(tmp_path):
    logits = np.array([[4, 4 - 1e-4, 4 - 5e-5, 1, -14]] * 4, F)
    path = tmp_path / "l"
    write_logits_file(path, np.zeros((1, 9), int), [logits], n_vocab=5)
    rows = read_logits_file(path).rows(0)
    assert (np.abs(rows.logprobs - log_softmax(logits)) <= rows.rounding)[~rows.censored].all()
    interval = llamacpp_kl_interval(rows, logits)
    assert (interval.low == 0).all() and (interval.high > 0).all()
    alone = np.array([[4, 1, 1, 1, -14]] * 4, F)
    write_logits_file(path, np.zeros((1, 9), int), [alone], n_vocab=5)
    assert (read_logits_file(path).rows(0).rounding[:, 0] < 1e-5).all()


def test_a_row_inside_the_floor_is_not_censored(tmp_path):
    path, _, logits = make(tmp_path, scale=0.5)
    rows = read_logits_file(path).rows(0)
    assert not rows.censored.any() and (rows.hidden == 0).all()
    np.testing.assert_allclose(rows.logprobs, log_softmax(logits[0]), atol=1e-4)


def slow_llamacpp_kl(rows: np.ndarray, logits: np.ndarray) -> list[float]:
    out = []
    for base, x in zip(rows, logits, strict=True):
        largest = F(max(x))
        total = sum(float(F(np.exp(F(v - largest)))) for v in x)
        normaliser = F(largest + F(np.log(total)))
        kept = [(b, v) for b, v in zip(base, x, strict=True) if b > F(-16)]
        out.append(sum(float(F(np.exp(b)) * F(F(b - v) + normaliser)) for b, v in kept))
    return out


def test_kl_as_llamacpp_prints_it(tmp_path):
    path, _, logits = make(tmp_path, scale=4.0)
    other = logits + np.random.default_rng(1).normal(0, 0.1, logits.shape).astype(F)
    file = read_logits_file(path)
    for number in range(3):
        rows = file.rows(number)
        got = llamacpp_kl(rows, other[number])
        np.testing.assert_allclose(got, slow_llamacpp_kl(rows.logprobs, other[number]), rtol=1e-5, atol=1e-7)
        exact = slow_kl(log_softmax(logits[number]), log_softmax(other[number]))
        np.testing.assert_allclose(got, exact, atol=2e-4)


@given(st.integers(0, 10**6), st.sampled_from([0.3, 3.0, 8.0, 30.0]), st.sampled_from([0.0, 0.05, 1.0, 10.0]))
@settings(max_examples=80, deadline=None)
def test_the_exact_kl_lies_in_the_interval(tmp_path_factory, seed, scale, noise):
    path, _, logits = make(tmp_path_factory.mktemp("l"), scale=scale, seed=seed, n_vocab=80, chunks=1)
    other = logits[0] + np.random.default_rng(seed).normal(0, noise, logits[0].shape).astype(F)
    interval = llamacpp_kl_interval(read_logits_file(path).rows(0), other)
    exact = slow_kl(log_softmax(logits[0]), log_softmax(other))
    assert (interval.low <= exact + 1e-12).all() and (interval.high >= exact - 1e-12).all()
    assert (interval.low >= 0).all()


@pytest.mark.parametrize(("exponent", "width"), [(1.5, 0.02), (3.0, 8.0)])
def test_only_censoring_makes_the_interval_wide(tmp_path, exponent, width):
    rng = np.random.default_rng(0)
    logits = (-exponent * np.log(1 + rng.permuted(np.tile(np.arange(5000), (4, 1)), axis=1))).astype(F)
    other = logits + rng.normal(0, 0.06, logits.shape).astype(F)
    path = tmp_path / "l"
    write_logits_file(path, np.zeros((1, 9), int), [logits], n_vocab=5000)
    rows = read_logits_file(path).rows(0)
    interval = llamacpp_kl_interval(rows, other)
    exact = slow_kl(log_softmax(logits), log_softmax(other))
    assert rows.censored.any() == (exponent == 3.0)
    assert (interval.high - interval.low < width * exact).all()


def test_files_that_are_not_whole(tmp_path):
    path, _, _ = make(tmp_path)
    whole = path.read_bytes()
    for data, what in (
        (whole[:-1], "was cut"),
        (whole[:100], "was cut"),
        (whole[:15], "inside its header"),
        (whole + b"x", "something after"),
        (b"_logitz_" + whole[8:], "does not start with"),
        (b"", "does not start with"),
        (whole[:8] + struct.pack("<iii", -9, 21, 3) + whole[20:], "impossible sizes"),
        (whole[:8] + struct.pack("<iii", 9, 22, 3) + whole[20:], "was cut|after its rows|outside its vocabulary"),
        (whole[:20] + struct.pack("<i", 21) + whole[24:], "token 21 at chunk 0, place 0"),
    ):
        path.write_bytes(data)
        if what.startswith("was cut|"):  # 21 and 22 ids take the same room: nothing tells them apart
            assert read_logits_file(path).n_vocab == 22
            continue
        with pytest.raises(InputError, match=what) as caught:
            read_logits_file(path)
        assert "base.kld" in caught.value.message
    with pytest.raises(InputError, match="cannot read"):
        read_logits_file(tmp_path / "none")
    start = 20 + 4 * 27
    for scale in (np.nan, np.inf, 1.0, 3e38, 0.0):  # the likeliest of 21 ids has a probability of 1/21 to 1
        path.write_bytes(whole[:start] + struct.pack("<f", scale) + whole[start + 4 :])
        with pytest.raises(InputError, match="window 0, row 0"):
            read_logits_file(path).rows(0)


def test_what_cannot_be_written(tmp_path):
    tokens, good = np.zeros((1, 5), int), np.zeros((1, 2, 7), F)
    for wrong in (good[:, :1], good[:, :, :6], np.zeros((2, 2, 7), F), good[:0]):
        with pytest.raises(UsageError):
            write_logits_file(tmp_path / "l", tokens, wrong, n_vocab=7)
    with pytest.raises(UsageError):
        write_logits_file(tmp_path / "l", tokens + 7, good, n_vocab=7)
    bad = good.copy()
    bad[0, 1, 3] = np.nan
    with pytest.raises(ScoreError, match="chunk 0, row 1"):
        write_logits_file(tmp_path / "l", tokens, bad, n_vocab=7)
    assert not list(tmp_path.iterdir())


def test_candidates_that_do_not_fit(tmp_path):
    path, _, logits = make(tmp_path)
    rows = read_logits_file(path).rows(0)
    for measure in (llamacpp_kl, llamacpp_kl_interval):
        with pytest.raises(MismatchError):
            measure(rows, logits[0][:, :-1])
        bad = logits[0].copy()
        bad[2, 0] = np.inf
        with pytest.raises(ScoreError, match="row 2"):
            measure(rows, bad)
