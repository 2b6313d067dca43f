"""What traces need of a model, against float64 brute force: recorded rows, seeded tail draws, gathered ids."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from evalgate import core
from evalgate.core import Window
from evalgate.traces import condense
from serve import wire
from serve.api.routes.record import encode
from serve.engine.pair import ScoreWindow
from serve.engine.record import GatherJob, RecordJob, RowsJob
from serve.engine.rowjob import Arrays, RowJob
from serve.engine.runtime import ModelRuntime
from serve.engine.tail import draw, uniforms
from serve.errors import BadRequest, ScoringFailed
from tests.serve.architectures import VOCABULARY, built, own_logits, runtime, tokens

WINDOWS = [ScoreWindow(tokens(n, seed=n), tuple(range(first, n))) for n, first in ((40, 1), (2, 1), (23, 11), (31, 1))]
INDICES = [7, 3, 12, 5]
NAMES = ("llama", "gemma3", "gpt2", "mixtral")


def finish(job: RowJob) -> Arrays:
    job.validate()
    while not job.finished:
        job.advance()
    return job.columns()


def record(model: ModelRuntime, windows: Any = WINDOWS, *, indices: Any = INDICES, **changes: Any) -> Arrays:
    given = {"top_k": 12, "tail_samples": 6, "seed": 4, **changes}
    return finish(RecordJob(model, windows, lambda _: None, indices=indices, **given))


def expected(model: Any, *, full: bool = False) -> Any:
    """evalgate's slow float64 condenser on the model's own logits."""
    logits, places = [], []
    for index, (ids, positions) in zip(INDICES, WINDOWS, strict=True):
        rows = own_logits(model, ids).numpy()
        window = Window(index, "d", "", ids, 1, len(ids), (1,) * len(ids))
        logits += [rows[i - 1] for i in positions]
        places += [(window, i) for i in positions]
    return condense(np.array(logits), places, top_k=12, tail_samples=6, seed=4, full=full)


@pytest.mark.parametrize("name", NAMES)
def test_recorded_rows_are_those_of_the_float64_condenser(name: str) -> None:
    got, want = record(runtime(built(name)), full=True), expected(built(name), full=True)
    assert [INDICES[w] for w in got["window"]] == want.window.tolist()
    assert got["position"].tolist() == want.position.tolist()
    for column in ("logprob", "entropy", "top_logprobs", "tail_mass"):
        np.testing.assert_allclose(got[column], getattr(want, column), atol=2e-5, rtol=1e-4, err_msg=column)
    for column in ("rank", "top_ids"):
        assert np.mean(got[column] == getattr(want, column)) > 0.99, column  # equal but for last-bit ties
    same = (got["tail_ids"] == want.tail_ids).mean()
    assert same > 0.99  # the same numbers through the same inverse CDF
    at = np.take_along_axis(got["shifted"].astype(np.float64) - got["lse"][:, None], got["top_ids"], 1)
    np.testing.assert_allclose(at, got["top_logprobs"], atol=2e-2)
    np.testing.assert_allclose(got["lse"], want.lse, atol=1e-5)


def test_draws_depend_on_seed_window_and_position_alone() -> None:
    model = runtime(built("llama"))
    whole = record(model)
    for at, window in enumerate(WINDOWS):
        alone = record(model, [window], indices=[INDICES[at]])
        np.testing.assert_array_equal(alone["tail_ids"], whole["tail_ids"][whole["window"] == at])
    turned = record(model, WINDOWS[::-1], indices=INDICES[::-1])
    np.testing.assert_array_equal(
        turned["tail_ids"][turned["window"] == 0], whole["tail_ids"][whole["window"] == len(WINDOWS) - 1]
    )
    assert (record(model, seed=5)["tail_ids"] != whole["tail_ids"]).mean() > 0.5
    assert (record(model, indices=[1, 2, 3, 4])["tail_ids"] != whole["tail_ids"]).mean() > 0.5


def test_draws_have_the_tails_distribution() -> None:
    """Chi-square of 40,000 draws from one row, over blocks and inside them; never an id of the top list."""
    generator = torch.Generator().manual_seed(1)
    row = torch.randn(1, 1500, generator=generator) * 2
    top = torch.topk(row, 20).indices
    lse = torch.logsumexp(row.double(), 1)
    numbers = torch.from_numpy(uniforms(3, [(0, 1)], 40_000))
    tail = draw(row.clone(), top, lse, numbers)
    p = torch.softmax(row.double(), 1)[0]
    p[top[0]] = 0
    assert float(tail.mass[0]) == pytest.approx(float(p.sum()), rel=1e-6)
    counts = torch.bincount(tail.ids[0], minlength=1500).double()
    assert counts[top[0]].sum() == 0
    want = p / p.sum() * 40_000
    often = want > 5
    statistic = float(((counts - want)[often] ** 2 / want[often]).sum())
    freedom = int(often.sum())
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_an_empty_tail_has_no_draws_and_the_whole_vocabulary_has_none() -> None:
    row = torch.full((2, 700), -torch.inf)
    row[:, :3] = torch.tensor([1.0, 0.5, 0.2])
    row[1, 600] = -3.0
    lse = torch.logsumexp(row.double(), 1)
    tail = draw(
        row.clone(), torch.tensor([[0, 1, 2], [0, 1, 2]]), lse, torch.full((2, 4), 0.999999, dtype=torch.float64)
    )
    assert float(tail.mass[0]) == 0 and tail.ids[0].tolist() == [-1] * 4
    assert tail.ids[1].tolist() == [600] * 4
    whole = record(runtime(built("llama")), top_k=VOCABULARY, tail_samples=0)
    assert whole["tail_ids"].shape == (len(whole["window"]), 0)
    assert (whole["tail_mass"] == 0).all()
    assert pa.ipc.open_stream(io.BytesIO(encode(whole))).read_all().num_rows == len(whole["window"])


@pytest.mark.parametrize("name", NAMES)
def test_gathered_ids_and_own_columns_agree_with_float64(name: str) -> None:
    rng = np.random.default_rng(0)
    wanted = [rng.integers(-1, VOCABULARY, (len(w.positions), 9)).astype(np.int32) for w in WINDOWS]
    got = finish(GatherJob(runtime(built(name)), WINDOWS, lambda _: None, wanted=wanted, top_k=10))
    ids = np.concatenate(wanted)
    row = 0
    for window in WINDOWS:
        logits = own_logits(built(name), window.ids).double()
        for i in window.positions:
            logprobs = torch.log_softmax(logits[i - 1], 0).numpy()
            order = sorted(range(VOCABULARY), key=lambda v: (-float(logits[i - 1, v]), v))
            want = np.where(ids[row] >= 0, logprobs[ids[row]], -np.inf)
            np.testing.assert_allclose(got["logprobs"][row], want, atol=2e-5)
            assert got["nll"][row] == pytest.approx(-logprobs[window.ids[i]], abs=2e-5)
            assert got["entropy"][row] == pytest.approx(-(np.exp(logprobs) * logprobs).sum(), abs=2e-5)
            assert got["margin"][row] == pytest.approx(logprobs[order[0]] - logprobs[order[1]], abs=2e-5)
            assert got["top1"][row] == order[0] == got["top_ids"][row, 0]
            np.testing.assert_allclose(got["top_logprobs"][row], logprobs[order[:10]], atol=2e-5)
            row += 1
    assert got["logprobs"].dtype == np.float32 and got["top_ids"].shape == (row, 10)


def test_whole_rows_are_the_models_logits() -> None:
    got = finish(RowsJob(runtime(built("llama")), WINDOWS, lambda _: None))
    want = np.concatenate([own_logits(built("llama"), w.ids).numpy()[[p - 1 for p in w.positions]] for w in WINDOWS])
    np.testing.assert_allclose(got["logits"], want, atol=2e-5)


def test_the_same_bits_alone_in_a_batch_and_in_a_partial_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of columns are as wide as a tile has few rows, so sums of a partial tile would differ."""
    monkeypatch.setattr("serve.engine.reduce._CPU_BLOCK", 1024)
    model = runtime(built("gemma3"), deterministic=True)
    rng = np.random.default_rng(1)
    wanted = [rng.integers(-1, VOCABULARY, (len(w.positions), 5)).astype(np.int32) for w in WINDOWS]

    def jobs(at: list[int]) -> list[Arrays]:
        windows = [WINDOWS[i] for i in at]
        named = [wanted[i] for i in at]
        recorded = record(model, windows, indices=[INDICES[i] for i in at], full=True)
        gathered = finish(GatherJob(model, windows, lambda _: None, wanted=named, top_k=7))
        return [recorded, gathered, finish(RowsJob(model, windows, lambda _: None))]

    together = jobs([0, 1, 2, 3])
    for order in ([1], [2, 0], [3, 1, 2], [3, 2, 1, 0]):
        for whole, part in zip(together, jobs(order), strict=True):
            assert set(whole) == set(part)
            for at, index in enumerate(order):
                for name in set(whole) - {"window"}:
                    want, got = whole[name][whole["window"] == index], part[name][part["window"] == at]
                    assert got.tobytes() == want.tobytes(), (order, index, name)


def test_refusals_name_what_is_wrong() -> None:
    model = runtime(built("llama"))

    def gather(windows: Any, wanted: Any, k: int = 10) -> GatherJob:
        return GatherJob(model, windows, lambda _: None, wanted=wanted, top_k=k)

    one = [ScoreWindow((1, 2, 3), (1, 2))]
    for job, words in (
        (RecordJob(model, one, lambda _: None, top_k=1, tail_samples=2, seed=0, indices=[0]), "top_k"),
        (RecordJob(model, one, lambda _: None, top_k=VOCABULARY, tail_samples=2, seed=0, indices=[0]), "no tail"),
        (
            RecordJob(
                model,
                [ScoreWindow((1, VOCABULARY), (1,))],
                lambda _: None,
                top_k=4,
                tail_samples=2,
                seed=0,
                indices=[0],
            ),
            "window 0",
        ),
        (gather(one, [np.zeros((1, 3), np.int32)]), "2 positions and wanted ids for 1"),
        (gather(one, [np.full((2, 3), VOCABULARY, np.int32)]), f"token id {VOCABULARY}"),
        (gather(one, [np.zeros((2, 3), np.int32)], VOCABULARY + 1), "top_k"),
        (gather([ScoreWindow((1, 2), (2,))], [np.zeros((1, 3), np.int32)]), "window 0"),
    ):
        with pytest.raises(BadRequest, match=words):
            job.validate()
    many = [ScoreWindow((1,) * 100, tuple(range(1, 100)))] * 9000
    with pytest.raises(BadRequest, match="ask for fewer"):
        RowsJob(model, many, lambda _: None).validate()


def test_a_broken_model_is_named_by_window_and_position() -> None:
    model = runtime(built("llama"))
    job = RecordJob(model, WINDOWS, lambda _: None, top_k=4, tail_samples=2, seed=0, indices=INDICES)
    logits = torch.randn(2, VOCABULARY)
    logits[1, 5] = torch.nan
    with pytest.raises(ScoringFailed, match="window 2, position 11"):
        job.reduce_tile(logits, torch.tensor([0, 1]), [(0, 1), (2, 11)])


def test_masked_logits_are_refused_or_kept_as_no_probability() -> None:
    model = runtime(built("llama"))
    logits = torch.randn(2, VOCABULARY)
    logits[1, 5] = -1e30
    places = [(0, 1), (2, 11)]
    whole = RecordJob(model, WINDOWS, lambda _: None, top_k=VOCABULARY, tail_samples=0, seed=0, indices=INDICES)
    got = whole.reduce_tile(logits.clone(), torch.tensor([0, 1]), places)
    assert np.isneginf(got["top_logprobs"][1, -1]) and np.isfinite(got["top_logprobs"]).sum() == 2 * VOCABULARY - 1
    wanted = [np.zeros((len(w.positions), 1), np.int32) for w in WINDOWS]
    for job in (whole, GatherJob(model, WINDOWS, lambda _: None, wanted=wanted, top_k=4)):
        with pytest.raises(ScoringFailed, match=r"window 2, position 11 \(a logit is -inf or a mask\)"):
            job.reduce_tile(logits.clone(), torch.tensor([0, 5]), places)


def test_both_packages_have_one_limit_for_masks() -> None:
    assert wire.LEAST_LOGPROB == core.LEAST_LOGPROB
