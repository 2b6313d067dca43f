"""The sentence that opens every report says no more than the run supports."""

import json
from pathlib import Path

import pytest

from evalgate.reports._headline import NOISE, headline
from evalgate.summary import Group, MetricSummary, Noise, StoredFigure, Summary
from tests.evalgate.sample_run import source, summary, token_table


def figure(value, low=None, high=None, *, known=True):
    return StoredFigure(value=value, low=low, high=high, se=None, method="clustered-t" if known else "none")


def metric(name, unit, exactness="exact", **statistics):
    return MetricSummary(metric=name, unit=unit, exactness=exactness, statistics=statistics)


def run(kl=None, *, ratio=None, same=None, domains=None, floor=None, noise=None, kind="kl", **metrics):
    """A run of one candidate with these figures alone. domains: name -> figure of the run's main metric."""
    base = summary(token_table(("cand",)), kind=kind, reference=source("demo", kl_floor=floor))
    found = {}
    if kl is not None:
        found["kl"] = kl if isinstance(kl, MetricSummary) else metric("kl", "nats", mean=kl)
    if same is not None:
        found["top1_agreement"] = metric("top1_agreement", "fraction", mean=same)
    if ratio is not None:
        found["perplexity"] = metric("perplexity", "perplexity", ratio=ratio)
    found |= metrics
    shape = {"positions": 100, "documents": 24, "windows": 24, "bytes": 400}
    main = next(iter(found))
    parts = [
        Group(name=name, **shape, metrics={main: one if isinstance(one, MetricSummary) else metric(main, "", mean=one)})
        for name, one in (domains or {}).items()
    ]
    comparison = base.comparisons[0].model_copy(
        update={
            "candidate": source("cand", kl_floor=floor),
            "overall": Group(name="overall", **shape, metrics=found),
            "domains": parts,
            "noise": noise,
        }
    )
    return base.model_copy(update={"comparisons": [comparison]})


def said(*args, **kwargs):
    document = run(*args, **kwargs)
    return headline(document, document.comparisons[0])


KL = figure(0.00351, 0.00322, 0.00394)


def test_the_whole_sentence():
    text = said(
        KL,
        same=figure(0.9691, 0.9643, 0.9751),
        ratio=figure(1.0019, 0.999, 1.0048),
        domains={"prose": figure(0.002, 0.0018, 0.0022), "code": figure(0.004, 0.0036, 0.0044)},
        floor=0.0000877,
    )
    assert text == (
        "mean KL 0.0035 [0.0032, 0.0039]: about 40 times the noise floor; picks the reference's token 96.9 % of the "
        "time; perplexity cannot tell the two apart; worst domain code"
    )


@pytest.mark.parametrize(
    ("floor", "clause"),
    [
        (None, ""),
        (0.0, ""),
        (1e-9, ": more than 1,000 times the noise floor"),
        (0.002, ": about 1.8 times the noise floor"),
        (0.0033, f": {NOISE}"),
        (0.01, f": {NOISE}"),
    ],
)
def test_kl_beside_the_noise_floor(floor, clause):
    assert said(KL, floor=floor) == f"mean KL 0.0035 [0.0032, 0.0039]{clause}"


def test_a_floor_of_one_side_is_not_the_floor():
    document = run(KL, floor=0.0001)
    one = document.model_copy(update={"reference": source("demo")})
    assert "noise" not in headline(one, one.comparisons[0])


def test_a_measured_floor_counts_with_its_own_interval():
    def measured(excess):
        return Noise(
            conditions=["demo: restarted"],
            windows=4,
            positions=100,
            figures={"kl": {"mean": figure(0.0001, 0.00005, 0.0002)}},
            excess={"kl": {"mean": excess}},
        )

    assert "about 35 times the noise floor" in said(KL, noise=measured(figure(0.0034, 0.003, 0.0038)), floor=1e-12)
    assert NOISE in said(KL, noise=measured(figure(0.0034, -0.0001, 0.0068)), floor=1e-12)


def test_models_that_repeat_themselves_have_no_noise():
    """A floor of 0 everywhere has no spread, and so an open end: KL is no noise for that."""
    noise = Noise(
        conditions=["demo: restarted"],
        windows=4,
        positions=100,
        figures={"kl": {"mean": figure(0.0, 0.0, None)}},
        excess={"kl": {"mean": figure(0.0035, None, 0.0039)}},
    )
    assert said(KL, noise=noise, floor=1e-12) == "mean KL 0.0035 [0.0032, 0.0039]"


def test_figures_that_may_be_noise_name_no_domain():
    domains = {"prose": figure(0.002, 0.0018, 0.0022), "code": figure(0.004, 0.0036, 0.0044)}
    assert "domain" not in said(KL, domains=domains, floor=0.01)


def test_one_document_has_no_interval_and_says_so():
    text = said(
        figure(0.0035123, known=False),
        same=figure(0.9691, known=False),
        ratio=figure(1.2, known=False),
        domains={"a": figure(1.0, known=False), "b": figure(2.0, known=False)},
    )
    assert text == ("mean KL 0.00351 (no interval: 1 document); picks the reference's token 96.9 % of the time")


def test_open_ends_are_open():
    assert said(figure(0.01, 0.008, None), ratio=figure(1.01, 1.001, None)) == (
        "mean KL 0.010 [0.008, open); perplexity is 1.0 % higher"
    )
    assert said(KL, ratio=figure(1.01, None, None)).endswith("perplexity cannot tell the two apart")


@pytest.mark.parametrize(
    ("ratio", "clause"),
    [
        (figure(1.58, 1.4, 1.7), "perplexity is 58 % higher"),
        (figure(0.9912, 0.985, 0.998), "perplexity is 0.9 % lower"),
        (figure(7.31, 5.0, 9.0), "perplexity is 7 times the reference's"),
        (figure(1.0, 1.0, 1.0), "perplexity cannot tell the two apart"),
    ],
)
def test_perplexity(ratio, clause):
    assert said(KL, ratio=ratio).endswith(f"; {clause}")


def test_estimates_are_called_that():
    assert said(metric("kl", "nats", "estimated", mean=KL)) == "mean KL 0.0035 [0.0032, 0.0039], estimated"


def test_bounds_are_never_a_point():
    low, high = figure(0.012, 0.01, 0.014), figure(0.034, 0.031, 0.037)
    one = metric("kl", "nats", "bounded", mean_low=low)
    both = metric("kl", "nats", "bounded", mean_low=low, mean_high=high)
    assert said(one) == "mean KL at least 0.012 [0.0100, open)"
    assert said(both) == "mean KL at least 0.012, at most 0.034 [0.0100, 0.0370]"
    assert said(one, floor=0.0003) == "mean KL at least 0.012 [0.0100, open): at least 33 times the noise floor"
    assert said(one, floor=0.011) == said(one)  # the bound does not say on which side of the floor KL lies
    assert NOISE in said(both, floor=0.04)
    alone = metric("kl", "nats", "bounded", mean_low=figure(0.012345, known=False))
    assert said(alone) == "mean KL at least 0.0123 (no interval: 1 document)"


def test_bounded_domains_stand_out_only_beyond_the_others_upper_bounds():
    def domain(low, high):
        ends = {"mean_low": figure(low, low * 0.9, low * 1.1)}
        ends |= {} if high is None else {"mean_high": figure(high, high * 0.9, high * 1.1)}
        return metric("kl", "nats", "bounded", **ends)

    whole = metric("kl", "nats", "bounded", mean_low=figure(0.012, 0.01, 0.014))
    assert "worst domain b" in said(whole, domains={"a": domain(0.01, 0.02), "b": domain(0.05, None)})
    assert "domain" not in said(whole, domains={"a": domain(0.01, None), "b": domain(0.05, 0.06)})
    assert "no domain stands out" in said(whole, domains={"a": domain(0.01, 0.055), "b": domain(0.05, 0.06)})


def test_domains_whose_intervals_overlap_do_not_stand_out():
    domains = {"a": figure(0.003, 0.0025, 0.0037), "b": figure(0.004, 0.0036, 0.0044)}
    assert said(KL, domains=domains).endswith("; no domain stands out")
    assert "domain" not in said(KL, domains={"a": figure(0.003, 0.0025, 0.0037)})


def test_a_part_is_never_the_whole():
    assert "100.00 %" not in said(KL, same=figure(0.99996, 0.98, 1.0))
    assert "99.996 %" in said(KL, same=figure(0.99996, 0.98, 1.0))
    assert "token 100 % of the time" in said(KL, same=figure(1.0, 0.94, 1.0))


def test_agreement():
    parts = {
        "top1_agreement": metric("top1_agreement", "fraction", mean=figure(0.9691, 0.9643, 0.9751)),
        "regret": metric("regret", "nats", mean=figure(0.00326, 0.0025, 0.0051)),
        "flip": metric("flip", "fraction", mean=figure(0.03, 0.02, 0.04)),
    }
    domains = {"prose": figure(0.98, 0.975, 0.985), "code": figure(0.95, 0.94, 0.96)}
    assert said(kind="agree", domains=domains, **parts) == (
        "picks the reference's token 96.9 % [96.4, 97.5] of the time; its picks cost 0.0033 [0.0025, 0.0051] nats a "
        "token under the reference; worst domain code"
    )
    tied = parts | {"flip": metric("flip", "fraction", mean=figure(0.0, 0.0, 0.01))}
    assert f"of the time: every other pick is a tie, {NOISE};" in said(kind="agree", **tied)


def test_perplexity_runs():
    document = summary(token_table(("c",), pair=False, documents=24), kind="ppl")
    text = headline(document, document.comparisons[0])
    assert text.startswith("perplexity ") and " bits per byte; no domain stands out" in text
    assert "reference" not in text


def test_hostile_names_are_inert():
    name = "co\x1b[2Jde\nmean KL 0" + "x" * 100
    domains = {"prose": figure(0.002, 0.0018, 0.0022), name: figure(0.004, 0.0036, 0.0044)}
    text = said(KL, domains=domains)
    assert "\x1b" not in text and "\n" not in text and len(text) < 120


@pytest.mark.parametrize("folder", ["demo", "presets"])
def test_published_runs_have_one(folder):
    path = Path(__file__).parents[3] / "reports" / folder / "summary.json"
    document = Summary.model_validate(json.loads(path.read_text()))
    for comparison in document.comparisons:
        kl = comparison.overall.metrics["kl"].statistics["mean"].value
        text = headline(document, comparison)
        assert float(text.split()[2]) == pytest.approx(kl, rel=0.05)
