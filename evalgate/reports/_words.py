"""What the reports call metrics and statistics, in which order and under which heading."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evalgate.summary import Group, MetricSummary

STATISTICS = {
    "mean": "Mean",
    "rms": "RMS",
    "max": "Maximum",
    "p99.9": "99.9%",
    "p99": "99.0%",
    "p95": "95.0%",
    "p90": "90.0%",
    "p75": "75.0%",
    "median": "Median",
    "p25": "25.0%",
    "p10": "10.0%",
    "p5": "5.0%",
    "p1": "1.0%",
    "p0.1": "0.1%",
    "min": "Minimum",
}
BOUNDS = {"_low": "lower bound", "_high": "upper bound"}
METRICS = {
    "nll": "NLL",
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "kl": "KLD",
    "reverse_kl": "reverse KLD",
    "js": "JS",
    "tv": "TV",
    "delta_logprob": "delta-logp",
    "delta_prob": "delta-p",
    "top1_agreement": "same top-1",
    "flip": "flips above noise",
    "regret": "regret",
    "topk_overlap": "top-k overlap",
    "entropy": "entropy",
    "greedy_match_length": "greedy match length",
}
SPECIAL = {
    ("perplexity", "reference"): "Perplexity, reference",
    ("perplexity", "candidate"): "Perplexity, candidate",
    ("perplexity", "ratio"): "Perplexity ratio",
    ("perplexity", "log_ratio"): "ln(perplexity ratio)",
    ("perplexity", "correlation"): "Correlation of log-probs",
    ("kl", "sampling_se"): "Mean KLD, sampling error",
}
SECTIONS = {
    "Perplexity": ("perplexity", "nll", "bits_per_byte"),
    "KL divergence": ("kl",),
    "Token probability": ("delta_prob",),
    "Agreement": ("top1_agreement", "flip", "regret", "topk_overlap", "greedy_match_length"),
    "Other figures": ("reverse_kl", "js", "tv", "delta_logprob", "entropy"),
}
OTHERS = "Other metrics"
DETAILED = frozenset({"kl", "delta_prob"})  # shown with every statistic; the others with these of the known ones
BRIEF = frozenset({"mean", "rms", "max", "p99", "median"})
LEADING = {"kl": "Perplexity", "ppl": "Perplexity", "agree": "Agreement"}

# (metric, statistic, heading) of the tables that put candidates or domains side by side.
HEADLINES = {
    "kl": (
        ("kl", "mean", "mean KLD"),
        ("kl", "p99", "99% KLD"),
        ("top1_agreement", "mean", "same top-1"),
        ("perplexity", "ratio", "PPL ratio"),
    ),
    "agree": (
        ("top1_agreement", "mean", "same top-1"),
        ("flip", "mean", "flips"),
        ("regret", "mean", "mean regret"),
        ("perplexity", "ratio", "PPL ratio"),
    ),
    "ppl": (("perplexity", "candidate", "perplexity"), ("bits_per_byte", "candidate", "bits per byte")),
}

# (metric, statistic, heading in two lines) of the five figures that people quote, the run's own first.
QUOTED = {
    "kl": (
        ("kl", "mean", "mean KLD"),
        ("kl", "p99", "99%\nKLD"),
        ("top1_agreement", "mean", "same\ntop-1"),
        ("delta_prob", "rms", "RMS\ndelta-p"),
        ("perplexity", "ratio", "PPL\nratio"),
    ),
    "agree": (
        ("top1_agreement", "mean", "same top-1"),
        ("flip", "mean", "flips"),
        ("regret", "mean", "mean\nregret"),
        ("topk_overlap", "mean", "top-k\noverlap"),
        ("perplexity", "ratio", "PPL\nratio"),
    ),
    "ppl": (
        ("perplexity", "candidate", "perplexity"),
        ("bits_per_byte", "candidate", "bits\nper byte"),
        ("nll", "mean", "mean\nNLL"),
        ("nll", "p99", "99%\nNLL"),
        ("entropy", "candidate", "entropy"),
    ),
}

# Divergences that a model has against itself under other kernels and batch shapes (js is at most half of kl there).
_DIVERGENCES = frozenset({"kl", "reverse_kl", "js"})


def sections(kind: str, group: Group) -> list[tuple[str, list[MetricSummary]]]:
    """Headings with the metrics at hand, the run's own first; metrics that no section names come last."""
    named = {name for names in SECTIONS.values() for name in names}
    layout = {**SECTIONS, OTHERS: tuple(name for name in group.metrics if name not in named)}
    order = sorted(layout, key=lambda title: title != LEADING[kind])
    found = [(title, [group.metrics[name] for name in layout[title] if name in group.metrics]) for title in order]
    return [(title, metrics) for title, metrics in found if metrics]


def ordered(metric: MetricSummary) -> list[str]:
    """The statistics that the block shows, in its order; those it does not know come last, in their own."""
    places = {name: place for place, name in enumerate(STATISTICS)}
    left_out = frozenset() if metric.metric in DETAILED else frozenset(places) - BRIEF
    shown = [name for name in metric.statistics if _unbounded(name) not in left_out]
    return sorted(shown, key=lambda name: places.get(_unbounded(name), len(places)))


def label(metric: MetricSummary, statistic: str) -> str:
    """A row's name: `Mean KLD`, `Same top-1`, `Mean TV, upper bound`, `Entropy, candidate`."""
    name = METRICS.get(metric.metric, metric.metric)
    if list(metric.statistics) in (["mean"], ["candidate"]):
        return _capital(name)
    if (metric.metric, statistic) in SPECIAL:
        return SPECIAL[metric.metric, statistic]
    plain = _unbounded(statistic)
    row = f"{STATISTICS[plain]} {name}" if plain in STATISTICS else f"{_capital(name)}, {plain}"
    return row if plain == statistic else f"{row}, {BOUNDS[statistic[len(plain) :]]}"


def is_noise(metric: MetricSummary, statistic: str, floor: float | None) -> bool:
    """Whether a divergence is at or below the noise floor (nats); a lower bound never shows that."""
    if floor is None or statistic.endswith("_low") or metric.metric not in _DIVERGENCES:
        return False
    return abs(metric.statistics[statistic].value) <= floor


def _unbounded(statistic: str) -> str:
    for suffix in BOUNDS:
        statistic = statistic.removesuffix(suffix)
    return statistic


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]
