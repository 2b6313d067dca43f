import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evalgate.core import Interval
from evalgate.reports._numbers import figure_text, plain
from evalgate.reports.terminal import INDISTINGUISHABLE, render
from evalgate.summary import MetricSummary, StoredFigure
from tests.evalgate.sample_run import source, summary, token_table


def figure(value: float, low: float | None = None, high: float | None = None) -> StoredFigure:
    return StoredFigure(value=value, low=low, high=high, se=None, method="none" if low is None else "clustered-t")


def rows(block: str, label: str) -> list[str]:
    return [line for line in block.splitlines() if line.startswith(label)]


@pytest.fixture(scope="module")
def compared():
    return summary(token_table(("demo@int8", "demo@bf16")), reference=source("demo"))


def with_metric(document, metric: MetricSummary):
    changed = document.model_copy(deep=True)
    changed.comparisons[0].overall.metrics[metric.metric] = metric
    return changed


def test_the_block_has_what_a_llama_perplexity_user_looks_for(compared):
    block = render(compared)
    labels = ["Perplexity, candidate", "Perplexity, reference", "Perplexity ratio", "Correlation", "Same top-1"]
    labels += [f"{name} KLD" for name in ("Mean", "Maximum", "99.9%", "99.0%", "95.0%", "90.0%", "Median", "10.0%")]
    labels += ["5.0% KLD", "1.0% KLD", "Minimum KLD", "Mean delta-p", "RMS delta-p", "5.0% delta-p"]
    labels += ["Flips above noise", "Mean regret", "Top-k overlap", "Mean JS", "Mean TV", "Mean reverse KLD"]
    for label in labels:
        assert len(rows(block, label)) == 2, label  # one block per candidate


def test_what_the_figures_rest_on_is_beside_them(compared):
    block = " ".join(render(compared).split())
    for text in (
        "builtin: 4 documents, 130 tokens, hash abcdef0123456789",
        "disjoint, context 512, stride 512",
        "prose/empty (empty)",
        "weights bfloat16, compute float32, logits float32, loaded as stored, backend packed",
        "noise floor 1.50e-06 nats",
        "120 positions in 4 windows of 4 documents, 480 bytes of text",
        "95 % over documents",
        "KL divergence (exact)",
        "a note that a reader must know",
    ):
        assert text in block


def test_values_and_intervals_are_the_summarys(compared):
    block = render(compared)
    for comparison, line in zip(compared.comparisons, rows(block, "Mean KLD"), strict=True):
        value, low, high = map(float, re.findall(r"\d+\.\d+", line))
        wanted = comparison.overall.metrics["kl"].statistics["mean"]
        decimals = len(str(value).split(".")[1])
        assert [value, low, high] == pytest.approx([wanted.value, wanted.low, wanted.high], abs=0.6 * 10**-decimals)
    share = compared.comparisons[0].overall.metrics["top1_agreement"].statistics["mean"].value
    assert rows(block, "Same top-1")[0].split()[2] == f"{100 * share:.1f}%"


def test_several_candidates_come_side_by_side_first(compared):
    block = render(compared)
    assert block.index("Candidates side by side") < block.index("====== Candidate demo@int8")
    alone = render(summary(token_table(("demo@int8",)), reference=source("demo")))
    assert "side by side" not in alone


def test_domains(compared):
    tail = render(compared).rsplit("By domain", 1)[1]
    assert [line.split()[0] for line in tail.splitlines() if line and not line.startswith((" ", "=", "-"))] == [
        "domain",
        "prose",
        "code",
        "all",
    ]


def test_agree_leads_with_agreement():
    block = render(summary(token_table(("c",)), kind="agree", reference=source("demo")))
    assert block.index("Agreement (") < block.index("Perplexity (")


def test_perplexity_alone():
    block = render(summary(token_table(("demo@int8",), pair=False), kind="ppl"))
    assert rows(block, "Perplexity ") and rows(block, "Bits per byte ") and rows(block, "Entropy ")
    assert "reference" not in block and "candidate" not in block


def test_one_document_has_unknown_intervals():
    block = render(summary(token_table(("c",), documents=1), reference=source("demo")))
    assert "unknown (1 document)" in rows(block, "Mean KLD")[0]
    assert "[" not in block


def test_figures_within_the_noise_floor_say_so():
    table = token_table(("c",))
    low = render(summary(table, reference=source("demo", kl_floor=10.0)))
    assert INDISTINGUISHABLE in low
    assert rows(low, "Mean KLD")[0].endswith("~0") and not rows(low, "Mean regret")[0].endswith("~0")
    assert not rows(low, "Perplexity, candidate")[0].endswith("~0")
    assert not rows(low, "Same top-1")[0].endswith("~0")
    assert rows(low, "  above the noise floor")[0].split()[-1] == "0"


def test_the_label_follows_the_larger_floor_at_its_edge(compared):
    mean = compared.comparisons[0].overall.metrics["kl"].statistics["mean"].value
    for floor, marked in ((mean, True), (math.nextafter(mean, 0), False)):
        document = compared.model_copy(update={"reference": source("demo", kl_floor=floor)})
        assert rows(render(document), "Mean KLD")[0].endswith("~0") is marked


def test_an_unmeasured_floor_labels_nothing(compared):
    document = compared.model_copy(deep=True)
    for side in (document.reference, *(c.candidate for c in document.comparisons)):
        object.__setattr__(side, "noise_floor", None)
    block = render(document)
    assert "noise floor not measured" in " ".join(block.split())
    assert INDISTINGUISHABLE not in block


def test_bounds_are_never_a_point(compared):
    bounds = {"mean_low": figure(0.25, 0.2, 0.3)}
    metric = MetricSummary(metric="kl", unit="nats", exactness="bounded", statistics=bounds)
    block = render(with_metric(compared, metric))
    assert "KL divergence (bounded)" in block
    assert "0.250" in rows(block, "Mean KLD, lower bound")[0]
    assert "none known" in rows(block, "Mean KLD, upper bound")[0]
    assert ">= 0.250" in block  # in the table of candidates
    both = metric.model_copy(update={"statistics": {**bounds, "mean_high": figure(0.5, 0.4, 0.6)}})
    assert "0.500" in rows(render(with_metric(compared, both)), "Mean KLD, upper bound")[0]


def test_an_unknown_metric_and_statistic_get_rows(compared):
    statistics = {"mean": figure(1.5), "wobble": figure(0.25)}
    metric = MetricSummary(metric="novelty", unit="nats", exactness="estimated", statistics=statistics)
    block = render(with_metric(compared, metric))
    assert "Other metrics (estimated)" in block
    assert rows(block, "Mean novelty") and rows(block, "Novelty, wobble")


def test_mixed_exactness_is_said_by_row(compared):
    metric = MetricSummary(metric="tv", unit="fraction", exactness="estimated", statistics={"mean": figure(0.5)})
    block = render(with_metric(compared, metric))
    assert "Other figures (exactness by row)" in block
    assert rows(block, "TV ")[0].endswith("estimated")


def test_a_metric_that_is_absent_leaves_no_row(compared):
    document = compared.model_copy(deep=True)
    for comparison in document.comparisons:
        for group in (comparison.overall, *comparison.domains):
            del group.metrics["kl"]
    assert "KLD" not in render(document).replace("reverse KLD", "")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_asked(compared, width):
    document = compared.model_copy(update={"notes": ["x" * 300, "word " * 60], "reference": source("/long" * 40)})
    block = render(document, width=width)
    assert max(map(len, block.splitlines())) <= width
    assert "\x1b" not in block
    assert not any(line != line.rstrip() for line in block.splitlines())


def test_color_only_when_asked_and_names_cannot_steer_the_terminal(compared, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    document = compared.model_copy(update={"notes": ["\x1b[2J[bold]gone"]})
    assert "\x1b" not in render(document)
    assert "\\u001b[2J[bold]gone" in render(document)
    assert "\x1b[1m" in render(document, color=True)


finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(finite, st.floats(1e-9, 1e3), st.floats(1e-9, 1e3))
def test_printed_numbers_are_within_rounding(value, below, above):
    low, high = value - below, value + above
    text = figure_text(value, Interval(low, high), unit="nats", documents=5)
    shown = [float(t.replace(",", "")) for t in [text.value, *text.interval.strip("[]").split(", ")]]
    room = max((high - low) / 2 * 0.06, 1e-9)  # two significant digits of the half-width
    for got, wanted in zip(shown, (value, low, high), strict=True):
        assert abs(got - wanted) <= room * 1.0001


@given(finite)
def test_plain_numbers_keep_five_digits(value):
    assert float(plain(value).replace(",", "")) == pytest.approx(value, rel=6e-3 if abs(value) < 1e-5 else 1e-4)


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        ((15.1261, 14.2, 16.1), ("15.13", "[14.20, 16.10]")),
        ((0.00214, 0.0019, 0.0024), ("0.00214", "[0.00190, 0.00240]")),
        ((1.00043, 0.99981, 1.00105), ("1.00043", "[0.99981, 1.00105]")),
        ((3e-7, 1e-7, 5e-7), ("3.00e-07", "[1.00e-07, 5.00e-07]")),
        ((0.0, 0.0, 0.0), ("0", "[0, 0]")),
        ((0.5, None, None), ("0.50000", "")),
    ],
)
def test_digits(args, shown):
    assert tuple(figure_text(args[0], Interval(*args[1:]), unit="nats", documents=9)) == shown
