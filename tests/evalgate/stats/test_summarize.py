from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from evalgate import metrics
from evalgate.errors import MismatchError, ScoreError, UsageError
from evalgate.stats.paired import same_positions
from evalgate.stats.summarize import summarize
from evalgate.summary import Group
from tests.evalgate.score_tables import columns, make_case, replaced, table

CASE = make_case(5, windows_per_document=(2, 1, 3, 2, 1, 1))
DATA = columns(CASE)
TABLE = table(DATA)


def overall(whole: pa.Table, **options) -> Group:
    arguments = {"kind": "kl", "noise_floor": 0.1, **options}
    ((_, group, _),) = summarize(whole, **arguments)
    return group


def values(group: Group, metric: str) -> dict[str, float]:
    return {name: figure.value for name, figure in group.metrics[metric].statistics.items()}


def test_figures_are_the_plain_ones():
    group = overall(TABLE)
    kl = np.array(DATA["kl"])
    found = values(group, "kl")
    assert found["mean"] == pytest.approx(math.fsum(kl) / len(kl), rel=1e-6)
    assert found["p99.9"] == pytest.approx(np.percentile(kl, 99.9), rel=1e-6)
    assert found["median"] == pytest.approx(np.median(kl), rel=1e-6)
    assert (found["max"], found["min"]) == pytest.approx((kl.max(), kl.min()), rel=1e-6)
    ref, cand = np.array(DATA["ref_nll"]), np.array(DATA["cand_nll"])
    perplexity = values(group, "perplexity")
    assert perplexity["candidate"] == pytest.approx(math.exp(cand.mean()), rel=1e-6)
    assert perplexity["reference"] == pytest.approx(math.exp(ref.mean()), rel=1e-6)
    assert perplexity["ratio"] == pytest.approx(math.exp(cand.mean() - ref.mean()), rel=1e-6)
    assert perplexity["log_ratio"] == pytest.approx(cand.mean() - ref.mean(), abs=1e-6)
    assert perplexity["correlation"] == pytest.approx(np.corrcoef(ref, cand)[0, 1], abs=1e-6)
    bits = cand.sum() / math.log(2) / sum(CASE.bytes)
    assert values(group, "bits_per_byte")["candidate"] == pytest.approx(bits, rel=1e-6)
    delta = np.exp(-cand) - np.exp(-ref)
    assert values(group, "delta_prob")["rms"] == pytest.approx(math.sqrt((delta**2).mean()), rel=1e-6)
    assert (group.positions, group.documents, group.windows) == (TABLE.num_rows, 6, 10)
    assert group.bytes == sum(CASE.bytes)


def test_ratio_is_the_paired_difference_through_exp():
    statistics = overall(TABLE).metrics["perplexity"].statistics
    ratio, log_ratio = statistics["ratio"], statistics["log_ratio"]
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(log_ratio.low), math.exp(log_ratio.high)))
    assert ratio.se == pytest.approx(ratio.value * log_ratio.se)


def test_every_metric_every_figure_is_well_formed():
    for kind in ("kl", "agree"):
        group = overall(TABLE, kind=kind)
        assert set(group.metrics) == {m.name for m in metrics.registry().values() if kind in m.kinds}
        for summary in group.metrics.values():
            assert summary.exactness == "exact"
            of_estimates = ("mean_low", "sampling_se")
            declared = [s.name for s in metrics.get(summary.metric).statistics if s.name not in of_estimates]
            assert list(summary.statistics) == declared
            for name, figure in summary.statistics.items():
                if name in ("min", "max"):
                    assert (figure.method, figure.low, figure.high, figure.se) == ("none", None, None, None)
                    continue
                assert figure.interval.known
                assert figure.low is None or figure.low <= figure.value, (summary.metric, name)
                assert figure.high is None or figure.high >= figure.value, (summary.metric, name)
                # Six documents do not say where the tails end.
                assert name not in ("p99.9", "p0.1") or not figure.interval.closed


def test_intervals_stay_inside_the_support():
    group = overall(TABLE, confidence=0.999)
    agreement = group.metrics["top1_agreement"].statistics["mean"]
    assert agreement.low >= 0 and agreement.high <= 1
    assert group.metrics["kl"].statistics["mean"].low >= 0


def test_domains_are_the_table_cut_down():
    ((_, _, domains),) = summarize(TABLE, kind="kl", noise_floor=0.1)
    assert [d.name for d in domains] == ["prose", "code"]
    for group in domains:
        rows = np.array(CASE.domain) == group.name
        alone = overall(TABLE.filter(rows))
        assert alone.model_copy(update={"name": group.name}) == group


def test_a_domain_that_writes_no_byte_has_no_bits_per_byte():
    """The token that ends a chat's reply can be all of a domain that is scored."""
    domain = np.array(CASE.domain)
    silent = table({**DATA, "bytes": np.where(domain == domain[0], 0, CASE.bytes).tolist()})
    ((_, _, domains),) = summarize(silent, kind="kl", noise_floor=0.1)
    found = {group.name: group.metrics["bits_per_byte"].statistics for group in domains}
    assert not found.pop(str(domain[0])) and all(found.values())
    made = next(group for group in domains if group.name == domain[0])
    assert made.bytes == 0 and made.metrics["perplexity"].statistics["candidate"].low is not None


def test_identical_models_give_zero_exactly_and_never_a_width_of_zero():
    same = make_case(1)
    data = columns(type(same)(**{**vars(same), "q": same.p}))
    group = overall(table(data))
    most = 1 - 0.025 ** (1 / group.documents)
    for name, statistic, high in (
        ("kl", "mean", None),
        ("tv", "mean", most),
        ("flip", "mean", most),
        ("delta_prob", "rms", math.sqrt(most)),
    ):
        figure = group.metrics[name].statistics[statistic]
        assert (figure.low, figure.value) == (0.0, 0.0)
        assert figure.high == (None if high is None else pytest.approx(high, rel=0.3))
    ratio = group.metrics["perplexity"].statistics["ratio"]
    assert (ratio.low, ratio.value, ratio.high) == (None, 1.0, None)
    agreement = group.metrics["top1_agreement"].statistics["mean"]
    assert agreement.value == agreement.high == 1.0 and agreement.low < 1.0


def test_a_bounded_metric_never_prints_a_point():
    low, high = [x / 2 for x in DATA["tv"]], [x * 1.5 for x in DATA["tv"]]
    whole = replaced(TABLE, "tv", tv_low=low, tv_high=high)
    whole = replaced(whole, "kl", kl_low=DATA["kl"], kl_high=[None] * TABLE.num_rows)
    group = overall(whole)
    tv = group.metrics["tv"]
    assert tv.exactness == "bounded"
    assert all(name.endswith(("_low", "_high")) for name in tv.statistics)
    assert tv.statistics["mean_low"].value == pytest.approx(np.mean(low), rel=1e-6)
    assert tv.statistics["p99_high"].value == pytest.approx(np.percentile(high, 99), rel=1e-6)
    assert all(name.endswith("_low") for name in group.metrics["kl"].statistics)


def test_an_estimated_metric_says_so():
    whole = replaced(TABLE, "kl", kl=DATA["kl"], kl_se=[0.01] * TABLE.num_rows)
    assert overall(whole).metrics["kl"].exactness == "estimated"


def test_one_document_has_figures_without_intervals():
    group = overall(TABLE.filter(np.array(CASE.document) == "doc0"))
    for summary in group.metrics.values():
        for figure in summary.statistics.values():
            assert (figure.low, figure.high, figure.se) == (None, None, None)


def test_a_run_of_one_model_has_its_own_metrics():
    alone = table(DATA, pair=False)
    group = overall(alone, kind="ppl", noise_floor=None)
    assert set(group.metrics) == {"nll", "perplexity", "bits_per_byte", "entropy"}
    assert set(values(group, "perplexity")) == {"candidate"}
    assert set(values(group, "entropy")) == {"candidate"}


def test_what_a_source_does_not_give_is_left_out_but_never_the_headline():
    names = overall(TABLE.drop_columns(["ref_entropy", "cand_entropy", "regret"]), noise_floor=None).metrics
    assert not {"entropy", "regret", "flip"} & set(names)
    with pytest.raises(ScoreError, match="no scores for kl"):
        overall(TABLE.drop_columns(["kl"]))
    with pytest.raises(ScoreError, match="no scores for top1_agreement"):
        overall(TABLE.drop_columns(["cand_top1"]), kind="agree")
    with pytest.raises(UsageError, match="noise floor"):
        overall(TABLE, noise_floor=math.nan)


def test_shards_with_their_own_dictionaries_are_one_table():
    shards = [TABLE.slice(i, 9) for i in range(0, TABLE.num_rows, 9)]
    recoded = []
    for shard in reversed(shards):
        data = shard.to_pydict()
        recoded.append(table(data))
    assert overall(pa.concat_tables(recoded)) == overall(TABLE)


def test_candidates_come_in_order():
    other = columns(make_case(6, windows_per_document=(2, 1, 3, 2, 1, 1)), candidate="second")
    both = pa.concat_tables([table(other), TABLE])
    assert [name for name, _, _ in summarize(both, kind="kl", noise_floor=0.1)] == ["second", "cand"]


def test_two_sides_pair_on_the_same_tokens_alone():
    other = columns(make_case(6, windows_per_document=(2, 1, 3, 2, 1, 1)), candidate="second")
    for name in ("token", "bytes"):
        other[name] = DATA[name]

    def sides():
        return list(metrics.split_candidates(pa.concat_tables([table(other), TABLE])))

    same_positions(*sides())
    with pytest.raises(MismatchError, match="score both"):
        same_positions(*metrics.split_candidates(pa.concat_tables([table(other).slice(1), TABLE])))
    other["token"] = [t + 1 for t in other["token"]]
    with pytest.raises(MismatchError, match="not the same token"):
        same_positions(*sides())


def test_intervals_stay_in_the_range_of_their_figure():
    """Two documents that differ widely have wide intervals; below 0 nats there is nothing."""
    data = columns(make_case(2, windows_per_document=(1, 1)))
    heavy = np.array(data["document"]) == data["document"][0]
    for side in ("ref", "cand"):
        data[f"{side}_nll"] = np.where(heavy, 9.0, 0.1).tolist()
        data[f"{side}_entropy"] = np.where(heavy, 9.0, 0.1).tolist()
    group = overall(table(data))
    for name, statistics, least in (
        ("nll", ("mean", "reference"), 0),
        ("entropy", ("candidate", "reference"), 0),
        ("bits_per_byte", ("candidate", "reference"), 0),
        ("perplexity", ("candidate", "reference"), 1),
    ):
        for statistic in statistics:
            figure = group.metrics[name].statistics[statistic]
            assert figure.low == least <= figure.value, (name, statistic)
    assert metrics.get("nll").support_of("difference") == (-math.inf, math.inf)
