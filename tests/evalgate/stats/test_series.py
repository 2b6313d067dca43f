"""Data of plots: what each function returns is held against a slow computation over the table's columns."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest

from evalgate.errors import UsageError
from evalgate.metrics import Scores, mean, split_candidates
from evalgate.stats import series
from evalgate.stats.intervals import Sample
from evalgate.stats.series.calibration import PROBABILITY_EDGES
from evalgate.stats.series.distribution import LEAST
from evalgate.stats.slices import slice_metric
from evalgate.summary import Noise, StoredFigure
from tests.evalgate.sample_run import source, summary, token_table
from tests.evalgate.score_tables import columns, make_case, replaced, table

CASE = make_case(5, windows_per_document=(2, 1, 3, 2, 1, 1))
DATA = columns(CASE)
TABLE = table(DATA)
KL = np.array(DATA["kl"], np.float32).astype(float)
TEXTS = dict(enumerate([" the", "12", "foo_bar", ",", "\n", " мир", "don't", "{", "3.5", "camelCase", "é"]))


def scores_of(whole: pa.Table = TABLE) -> Scores:
    (found,) = split_candidates(whole, noise_floor=0.0)
    return found


def with_kl(values: list[float], **more: list[float]) -> Scores:
    return scores_of(replaced(TABLE, "kl", kl=values, **more))


def test_a_distribution_counts_every_value_once():
    values = KL.copy()
    values[:4] = [0.0, 1e-10, LEAST, 1.0]
    found = series.distribution(with_kl(values.tolist()))
    assert (found.scale, found.series, found.exactness, found.unit) == ("log", "value", "exact", "nats")
    assert found.below == 3 and found.n == len(values)
    assert sum(one.count for one in found.bins) + found.below == found.n
    assert sum(one.share for one in found.bins) == pytest.approx(1 - 3 / found.n)
    assert sum(one.mass for one in found.bins) == pytest.approx(1.0)
    assert found.largest == pytest.approx(values.max())
    stored = values.astype(np.float32).astype(float)
    for one in found.bins:
        inside = (stored >= one.low) & (stored < one.high) & (stored > LEAST)
        assert one.count == inside.sum()
        assert one.mass == pytest.approx(stored[inside].sum() / stored.sum(), rel=1e-5)
    assert all(a.high == b.low for a, b in pairwise(found.bins))
    assert all(one.high / one.low == pytest.approx(10**0.2) for one in found.bins)
    assert found.bins[0].count and found.bins[-1].count


def test_values_on_the_edges_are_counted_where_their_bin_says():
    values = np.float32([10.0 ** (k / 5) for k in range(-20, -20 + len(KL))])
    values = np.minimum(values, 100.0).astype(np.float32).astype(float)
    found = series.distribution(with_kl(values.tolist()))
    assert sum(one.count for one in found.bins) == len(values)
    assert [one.count for one in found.bins] == [((values >= b.low) & (values < b.high)).sum() for b in found.bins]


def test_the_share_that_holds_half_of_the_sum():
    values = [0.0] * (len(KL) - 4) + [6.0, 2.0, 2.0, 1.0]
    assert series.distribution(with_kl(values)).half == pytest.approx(1 / len(KL))
    assert series.distribution(with_kl([1.0] * len(KL))).half == pytest.approx(0.5, abs=1 / len(KL))
    assert series.distribution(with_kl([0.0] * len(KL))).half is None
    assert series.distribution(with_kl([-1.0, 3.0] + [0.0] * (len(KL) - 2))).half is None


def test_equal_models_have_no_bins():
    found = series.distribution(with_kl([0.0] * len(KL)))
    assert found.bins == () and found.below == found.n and found.largest == 0.0


def test_negative_estimates_lie_below_the_axis():
    values = KL.copy()
    values[:2] = [-0.01, -0.02]
    found = series.distribution(with_kl(values.tolist(), kl_se=[0.01] * len(KL)))
    assert found.exactness == "estimated" and found.below == 2


def test_bounds_have_a_distribution_for_each_end():
    low = scores_of(replaced(TABLE, "kl", kl_low=KL / 2))
    assert series.ends_of(low, "kl") == ("low",)
    assert series.distribution(low).series == "low"
    both = scores_of(replaced(TABLE, "kl", kl_low=KL / 2, kl_high=KL * 2))
    assert series.ends_of(both, "kl") == ("low", "high")
    found = series.distribution(both, series="high")
    assert (found.series, found.exactness) == ("high", "bounded")
    assert found.largest == pytest.approx(2 * KL.max())
    with pytest.raises(UsageError, match="has no series 'value'"):
        series.distribution(both, series="value")


def test_delta_p_has_both_signs():
    found = series.delta_p_distribution(scores_of())
    delta = np.exp(-np.float32(DATA["cand_nll"]).astype(float)) - np.exp(-np.float32(DATA["ref_nll"]).astype(float))
    assert found.scale == "signed log" and found.n == len(delta)
    assert sum(one.count for one in found.bins) == len(delta)
    assert [one.low for one in found.bins] == sorted(one.low for one in found.bins)
    for one in found.bins:
        assert one.count == ((delta >= one.low) & (delta < one.high)).sum()
    assert sum(one.count for one in found.bins if one.high < 0) == (delta < -(10**-4)).sum()


@pytest.mark.parametrize("by", ["domain", "position", "entropy", "token", "document"])
def test_a_profile_is_the_cut_that_slices_prints(by):
    found = series.profile(scores_of(), by, token_texts=TEXTS, confidence=0.9)
    cut = slice_metric(scores_of(), "kl", by=by, token_texts=TEXTS, confidence=0.9)
    assert [(part.name, part.documents, part.share, part.figure) for part in found.parts] == [
        (one.name, one.documents, one.share, one.figure) for one in cut.slices
    ]
    assert found.overall.value == pytest.approx(KL.mean())
    assert found.overall.low < found.overall.value < found.overall.high
    assert sum(part.figure.n for part in found.parts) == len(KL)


@pytest.mark.parametrize(("metric", "sign"), [("kl", -1), ("top1_agreement", 1), ("greedy_match_length", 1)])
def test_the_worst_documents_are_the_worst_parts_by_document(metric, sign):
    found = series.worst_documents(scores_of(), metric, most=3)
    every = slice_metric(scores_of(), metric, by="document").slices
    expected = sorted(every, key=lambda one: sign * one.figure.value)[:3]
    assert [(p.name, p.documents, p.share, p.figure) for p in found.parts] == [
        (one.name, one.documents, one.share, one.figure) for one in expected
    ]
    assert len(series.worst_documents(scores_of(), metric).parts) == len(every)


def test_long_documents_share_the_error_rate():
    windows = np.repeat(np.arange(160), 5)
    document = ["a"] * 400 + ["b"] * 400
    keys = {"candidate": ["c"] * 800, "domain": ["d"] * 800, "document": document}
    places = {"window": windows, "position": np.tile(np.arange(1, 6), 160)}
    kl = np.random.default_rng(1).lognormal(size=800)
    scores = scores_of(pa.table({**keys, **places, "kl": pa.array(kl, pa.float32())}))
    found = {part.name: part.figure for part in series.worst_documents(scores).parts}
    for one in slice_metric(scores, "kl", by="document").slices:
        assert found[one.name] == one.figure and one.figure.interval.closed


def test_parts_of_a_profile_span_their_axis():
    positions = series.profile(scores_of(), "position").parts
    assert [(part.low, part.high) for part in positions][:3] == [(1, 1), (2, 3), (4, 7)]
    entropies = series.profile(scores_of(), "entropy").parts
    assert all(part.high is None or part.low < part.high for part in entropies)
    assert all(part.low is None and part.high is None for part in series.profile(scores_of(), "domain").parts)


def test_profiles_carry_the_exactness_of_their_figures():
    estimated = with_kl(KL.tolist(), kl_se=[0.01] * len(KL), kl_low=(KL / 2).tolist())
    found = series.profile(estimated, "domain")
    assert found.exactness == "estimated" and {part.figure.exactness for part in found.parts} == {"estimated"}
    bounded = scores_of(replaced(TABLE, "kl", kl_low=KL / 2))
    found = series.profile(bounded, "domain")
    assert (found.series, found.exactness) == ("low", "bounded")
    assert found.overall.value == pytest.approx(KL.mean() / 2, rel=1e-6)


def test_what_can_be_cut():
    assert series.cuts_of(scores_of(), TEXTS) == ("domain", "position", "entropy", "token", "document")
    assert series.cuts_of(scores_of()) == ("domain", "position", "entropy", "document")
    assert "token" not in series.cuts_of(scores_of(), {0: "a"})
    bare = scores_of(TABLE.drop_columns(["ref_entropy", "cand_entropy"]))
    assert series.cuts_of(bare, TEXTS) == ("domain", "position", "token", "document")


@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_entropy_calibration_holds_loss_against_entropy(side):
    column = {"reference": "ref", "candidate": "cand"}[side]
    entropy, nll = (np.float32(DATA[f"{column}_{name}"]).astype(float) for name in ("entropy", "nll"))
    found = series.entropy_calibration(scores_of(), side)
    assert sum(one.actual.n for one in found.bins) == len(nll)
    assert found.gap.value == pytest.approx((nll - entropy).mean())
    total = sum(one.actual.n * one.actual.known for one in found.bins)
    assert total == pytest.approx(nll.sum())
    assert all(one.low <= one.stated <= one.high for one in found.bins)
    assert [one.stated for one in found.bins] == sorted(one.stated for one in found.bins)
    counts = [one.actual.n for one in found.bins]
    assert max(counts) - min(counts) <= 2


def test_a_model_that_draws_from_itself_is_calibrated():
    """Texts drawn from a model's own distributions: its loss is its entropy, within the interval."""
    random = np.random.default_rng(3)
    n = 20_000
    p = random.dirichlet(np.ones(8), size=n)
    drawn = (p.cumsum(axis=1) > random.random((n, 1))).argmax(axis=1)
    nll, entropy = -np.log(p[np.arange(n), drawn]), -(p * np.log(p)).sum(axis=1)
    columns = {"cand_nll": nll, "cand_entropy": entropy}
    keys = {"candidate": ["m"] * n, "domain": ["d"] * n, "document": [f"d{i % 50}" for i in range(n)]}
    places = {"window": np.arange(n) // 100, "position": np.arange(n) % 100 + 1}
    found = series.entropy_calibration(scores_of(pa.table({**keys, **places, **columns})), "candidate")
    assert len(found.bins) == 12
    assert found.gap.low < 0 < found.gap.high
    assert all(one.actual.low < one.stated < one.actual.high for one in found.bins)


def test_probability_calibration_holds_the_candidate_against_the_reference():
    found = series.probability_calibration(scores_of())
    p, q = (np.exp(-np.float32(DATA[f"{side}_nll"]).astype(float)) for side in ("ref", "cand"))
    assert found.gap.value == pytest.approx((q - p).mean())
    for one in found.bins:
        inside = (p >= one.low) & (p < one.high)
        assert one.actual.n == inside.sum()
        assert one.stated == pytest.approx(p[inside].mean()) and one.actual.value == pytest.approx(q[inside].mean())
        assert one.low in PROBABILITY_EDGES
        assert one.actual.low is None or 0 <= one.actual.low <= one.actual.high <= 1


def test_calibration_needs_its_columns():
    without = scores_of(TABLE.drop_columns(["ref_entropy"]))
    with pytest.raises(UsageError, match="no ref_entropy"):
        series.entropy_calibration(without, "reference")


def test_a_constant_entropy_is_one_bin():
    flat = replaced(TABLE, "cand_entropy", cand_entropy=np.full(len(KL), 1.5))
    found = series.entropy_calibration(scores_of(flat), "candidate")
    (one,) = found.bins
    assert one.stated == 1.5 and one.actual.n == len(KL)


def test_the_running_mean_ends_at_the_figure_itself():
    found = series.running(scores_of())
    documents = np.array([CASE.document.index(name) for name in CASE.document])
    assert found.per == "documents" and [point.arrived for point in found.points] == [1, 2, 3, 4, 5, 6]
    names = list(dict.fromkeys(CASE.document))
    for point in found.points:
        rows = np.isin(CASE.document, names[: point.arrived])
        assert point.figure.value == pytest.approx(KL[rows].mean())
        assert point.figure.documents == point.arrived and point.figure.n == rows.sum()
    whole = Sample(series.known_series(scores_of(), "kl").series, documents, support=(0, np.inf)).figure(mean())
    last = found.points[-1].figure
    assert (last.low, last.high) == pytest.approx((whole.low, whole.high))
    assert not found.points[0].figure.interval.known


def test_one_document_runs_by_window():
    one = TABLE.set_column(2, "document", pa.array(["book"] * len(KL)).dictionary_encode())
    found = series.running(scores_of(one))
    assert found.per == "windows" and found.points[-1].arrived == len(set(CASE.window))
    assert found.points[-1].figure.value == pytest.approx(KL.mean())


def test_many_documents_have_few_points():
    many = token_table(("c",), documents=300)
    found = series.running(scores_of(many))
    assert len(found.points) <= 40 and found.points[0].arrived == 1 and found.points[-1].arrived == 300


def test_window_metrics_run_too():
    found = series.running(scores_of(), "greedy_match_length")
    assert found.points[-1].figure.n == len(set(CASE.window))


def test_the_noise_floor_is_what_was_measured_else_what_loading_saw():
    whole = summary(token_table(("c",)), reference=source("ref", kl_floor=1e-7))
    (comparison,) = whole.comparisons
    seen = series.noise_floor(whole, comparison)
    assert (seen.mean, seen.load_check, seen.measured) == (1e-7, 1e-7, {})
    assert "loaded" in seen.source
    figure = StoredFigure(value=2e-6, low=1e-6, high=3e-6, se=None, method="clustered-t")
    noise = Noise(conditions=[], windows=1, positions=1, figures={"kl": {"mean": figure}}, excess={})
    measured = series.noise_floor(whole, comparison.model_copy(update={"noise": noise}))
    assert measured.mean == 2e-6 and measured.measured["mean"].high == 3e-6 and "this run" in measured.source
    other = series.noise_floor(whole, comparison, "js")
    assert other.mean is None and other.source == ""
    bare = summary(token_table(("c",), pair=False), kind="ppl")
    assert series.noise_floor(bare, bare.comparisons[0]).mean is None


def test_perplexity_runs_have_series_of_their_loss():
    (scores,) = split_candidates(token_table(("c",), pair=False))
    assert series.distribution(scores, "nll").n == 120
    assert series.profile(scores, "domain", "nll").parts[0].figure.value > 0
    assert series.running(scores, "nll").points[-1].figure.n == 120
    assert series.ends_of(scores, "kl") == ()
    with pytest.raises(UsageError, match="no scores for kl"):
        series.distribution(scores)
