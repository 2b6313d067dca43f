"""How often the gate is wrong, and how often it decides, on documents whose truth is known; see docs/statistics.md.

Usage: python -m benchmarks.gate [--runs 1000] [--only TABLE] [--figure NAME]

Every verdict is the gate's own (`evalgate.gate`). Limits are set against the truth: a pass of a figure at its limit or
beyond is wrong, and so is a fail of one at its limit or within. Confidence 95 %, so that at most 2.5 % of passes and
2.5 % of fails may be wrong: of each rule, or with Holm's correction of the whole family.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import ndtri

from evalgate.core import Limits
from evalgate.gate.family import decide
from evalgate.gate.figures import RuleFigure
from evalgate.gate.following import followed
from evalgate.gate.guarded import Guarded
from evalgate.gate.measures import BesidePercentile, Excess, Measure
from evalgate.gate.policy import Rule
from evalgate.gate.track import Track
from evalgate.metrics import Series, Statistic, get
from evalgate.stats.intervals import Sample
from evalgate.stats.paired_percentile import PairedPercentile
from evalgate.stats.samplesize import documents_needed
from tests.evalgate.stats.populations import Corpus, corpus

INF = float("inf")
SD = 1.5
MEAN, P99, P999 = (
    Statistic("mean"),
    Statistic("p99", "percentile", level=99),
    Statistic("p99.9", "percentile", level=99.9),
)
Held = tuple[Measure, float]  # a measure, and the truth of its figure


def true_percentile(level: float) -> float:
    """Of the KL of `Corpus.kl`."""
    return float(np.exp(SD * ndtri(level / 100) - SD * SD / 2))


def measure(values: np.ndarray, documents: np.ndarray, statistic: Statistic = MEAN, *, top: float = INF) -> Guarded:
    """A statistic of values from 0 to `top`; 1 is the ideal where that is finite."""
    sample = Sample(Series(values), documents, support=(0.0, top))
    return Guarded(sample, statistic, ideal=1.0 if top == 1 else 0.0)


def kl(drawn: Corpus) -> Held:
    """Mean KL."""
    return measure(drawn.kl(SD), drawn.documents), 1.0


def pareto(drawn: Corpus) -> Held:
    """A mean whose variance is infinite."""
    return measure(drawn.pareto(2.0), drawn.documents), 1.0


def p99(drawn: Corpus) -> Held:
    """99th percentile of KL."""
    return measure(drawn.kl(SD), drawn.documents, P99), true_percentile(99)


def p999(drawn: Corpus) -> Held:
    """99.9th percentile of KL."""
    return measure(drawn.kl(SD), drawn.documents, P999), true_percentile(99.9)


def agreement(drawn: Corpus) -> Held:
    """Top-1 agreement of 97 %."""
    return measure(drawn.agreement(0.97), drawn.documents, top=1.0), 0.97


def part(drawn: Corpus) -> Held:
    """Mean KL of a slice: every fourth position."""
    keep = np.arange(len(drawn.documents)) % 4 == 0
    return measure(drawn.kl(SD)[keep], drawn.documents[keep]), 1.0


def baseline(drawn: Corpus) -> Held:
    """Mean KL minus that of a baseline half as far off, at the same positions."""
    own = drawn.kl(SD)
    base = own * 0.5 * np.exp(0.3 * drawn.noise - 0.045)
    sample = Sample(Series(own - base), drawn.documents)
    return Guarded(sample, MEAN, ideal=-float(base.mean())), 0.5


def baseline_p99(drawn: Corpus) -> Held:
    """99th percentile of KL minus the baseline's, which is 0.7 of it but for noise."""
    own = drawn.kl(SD)
    base = 0.7 * np.exp(SD * (np.sqrt(0.95) * drawn.latent + np.sqrt(0.05) * drawn.noise) - SD * SD / 2)
    pair = PairedPercentile(own, base, drawn.documents, 99.0)
    return BesidePercentile(pair, None), 0.3 * true_percentile(99)


def floor(drawn: Corpus) -> Held:
    """Mean KL over a floor of 0.2, itself measured on an eighth of as many documents."""
    rng = np.random.default_rng(int(abs(drawn.noise[0]) * 1e9))
    again = corpus(rng, 8, "equal")
    found = Sample(Series(0.2 * again.kl(0.5)), again.documents, support=(0.0, INF)).figure(MEAN)
    return Excess(measure(drawn.kl(SD), drawn.documents), found, "lower", (0.0, INF)), 0.8


KINDS: dict[str, Callable[[Corpus], Held]] = {
    "mean KL": kl,
    "mean, Pareto 2": pareto,
    "p99 KL": p99,
    "p99.9 KL": p999,
    "same top-1": agreement,
    "mean KL of a slice": part,
    "mean KL - baseline": baseline,
    "p99 KL - baseline": baseline_p99,
    "mean KL over the floor": floor,
}


def limits_at(truth: float, times: float, *, top: float = INF) -> Limits:
    """A limit that the truth is `times` of; for a figure that should be 1, of its distance from there."""
    return Limits(1 - (1 - truth) / times, None) if top == 1 else Limits(None, truth / times)


def rule_figure(held: Held, times: float) -> RuleFigure:
    """A rule whose figure is truly `times` its limit."""
    found, truth = held
    top = found.sample.support[1] if isinstance(found, Guarded) and found.statistic is MEAN else INF
    metric = get("kl")
    return RuleFigure(found, limits_at(truth, times, top=top), metric, metric.statistics[0], "exact", 10, 100)


def verdicts(figures: Sequence[RuleFigure], correction: str) -> list[str]:
    """The gate's."""
    return [d.verdict for d in decide(figures, confidence=0.95, correction=correction)]  # type: ignore[arg-type]


def percent(count: int, runs: int) -> str:
    """With one digit."""
    return f"{100 * count / runs:.1f}"


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print it as Markdown."""
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(str(cell) for cell in row)} |", flush=True)


def rules(runs: int, figure: str | None = None) -> None:
    """One rule: wrong passes and fails at the limit, 10 % beyond it, and what is decided far from it."""
    print("\nOne rule. figure/limit 1: both a pass and a fail are wrong; 1.1: a pass is.\n")
    print("| figure | documents | lengths | pass at 1 | fail at 1 | pass at 1.1 | pass at 0.5 | fail at 2 |")
    print("|---|---|---|---|---|---|---|---|")
    for name in [figure] if figure else KINDS:
        for groups, lengths in ((12, "equal"), (24, "equal"), (24, "lognormal"), (50, "equal"), (50, "lognormal")):
            rng = np.random.default_rng([groups, len(lengths)])
            count: Counter[tuple[str, float]] = Counter()
            size = max(runs // 4, 100) if "p99" in name else runs
            for _ in range(size):
                held = KINDS[name](corpus(rng, groups, lengths))
                for times in (1.0, 1.1, 0.5, 2.0):
                    (verdict,) = verdicts([rule_figure(held, times)], "none")
                    count[verdict, times] += 1
            wanted = (("pass", 1.0), ("fail", 1.0), ("pass", 1.1), ("pass", 0.5), ("fail", 2.0))
            cells = [percent(count[key], size) for key in wanted]
            print(f"| {name} | {groups} | {lengths} | {' | '.join(cells)} |", flush=True)


def families(runs: int) -> None:
    """Several rules and candidates, all truly at their limits: how often any verdict is wrong."""
    print("\nFamilies of rules that are all truly at their limit: any wrong pass / any wrong fail.\n")
    print("| rules x candidates | documents | lengths | no correction | holm |\n|---|---|---|---|---|")
    for count, candidates in ((1, 1), (4, 1), (10, 1), (4, 8)):
        for groups, lengths in ((12, "equal"), (24, "equal"), (24, "lognormal"), (50, "equal"), (50, "lognormal")):
            rng = np.random.default_rng([count, candidates, groups, len(lengths)])
            size = max(runs // candidates, 100)
            wrong: Counter[tuple[str, str]] = Counter()
            for _ in range(size):
                # Rules speak of domains of their own, candidates are independent: the worst case for a family.
                figures = [rule_figure(kl(corpus(rng, groups, lengths)), 1.0) for _ in range(count * candidates)]
                for correction in ("none", "holm"):
                    found = verdicts(figures, correction)
                    for verdict in ("pass", "fail"):
                        wrong[correction, verdict] += verdict in found
            cells = [" / ".join(percent(wrong[c, v], size) for v in ("pass", "fail")) for c in ("none", "holm")]
            print(f"| {count} x {candidates} | {groups} | {lengths} | {' | '.join(cells)} |", flush=True)


def mixed(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """60 short documents at 0.002 and 20 long ones at 0.02: position mean 0.0187 where long is 40 times as long."""
    sizes = np.concatenate([np.full(60, 10.0), np.full(20, 400.0)])
    means = np.concatenate([np.full(60, 0.002), np.full(20, 0.02)]) * rng.gamma(16, 1 / 16, 80)
    return means * sizes, sizes


def followed_to_the_end(totals: np.ndarray, sizes: np.ndarray, limit: float, *, whole: bool) -> tuple[str, int]:
    """The sequential gate's verdict and the documents that it took."""
    track = Track(followed(Rule(metric="kl", max=limit)), sizes, None, whole)
    for total, size in zip(totals, sizes, strict=True):
        track.take(float(total), float(size))
        for verdict, given in (("fail", track.fails), ("pass", track.passes)):
            if given(0.05):
                return verdict, len(track.seen)
    return "undecided", len(track.seen)


def sequential(runs: int) -> None:
    """Fixed and sequential on the same documents, by how far the truth is from the limit."""
    print("\nMean KL, fixed and sequential on the same documents: passes / fails, and documents used.\n")
    print("| documents | figure/limit | fixed | sequential | used | sequential, corpus | used |")
    print("|---|---|---|---|---|---|---|")
    size = max(runs // 4, 50)
    for groups, lengths in ((24, "equal"), (50, "equal"), (50, "lognormal"), (200, "equal")):
        for times in (0.33, 0.5, 1.0, 1.1, 2.0):
            rng = np.random.default_rng([groups, len(lengths), int(100 * times)])
            found: Counter[tuple[str, str]] = Counter()
            used = {True: 0, False: 0}
            for _ in range(size):
                drawn = corpus(rng, groups, lengths)
                totals = np.bincount(drawn.documents, weights=drawn.kl(SD))
                sizes = np.bincount(drawn.documents).astype(float)
                sample = Sample(Series(totals, sizes=sizes), np.arange(groups), support=(0.0, INF))
                found["fixed", Guarded(sample, MEAN).verdict(Limits(None, 1 / times), confidence=0.95)] += 1
                for whole in (False, True):
                    limit = 1 / times
                    if whole:  # the truth is these documents' own mean
                        limit = float(totals.sum() / sizes.sum()) / times * (1 - 1e-9)
                    verdict, documents = followed_to_the_end(totals, sizes, limit, whole=whole)
                    found[f"sequential {whole}", verdict] += 1
                    used[whole] += documents
            cells = {
                kind: " / ".join(percent(found[kind, v], size) for v in ("pass", "fail"))
                for kind in ("fixed", "sequential False", "sequential True")
            }
            print(
                f"| {groups} {lengths} | {times} | {cells['fixed']} | {cells['sequential False']} "
                f"| {used[False] / size:.0f} | {cells['sequential True']} | {used[True] / size:.0f} |",
                flush=True,
            )
    rng = np.random.default_rng(5)
    fixed: Counter[str] = Counter()
    early: Counter[str] = Counter()
    for _ in range(size):
        totals, sizes = mixed(rng)
        order = rng.permutation(len(sizes))
        sample = Sample(Series(totals, sizes=sizes), np.arange(len(sizes)), support=(0.0, INF))
        fixed[Guarded(sample, MEAN).verdict(Limits(None, 0.01), confidence=0.95)] += 1
        early[followed_to_the_end(totals[order], sizes[order], 0.01, whole=False)[0]] += 1
    print("\n60 short documents at 0.002, 20 long ones at 0.02, limit 0.01:", dict(fixed), "one by one:", dict(early))


def populations() -> dict[
    str, tuple[Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]], float, float]
]:
    """Name -> documents' totals and sizes, the limit, the end of the range."""

    def of(
        kind: str, values: Callable[[Corpus], np.ndarray]
    ) -> Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]:
        def draw(rng: np.random.Generator, groups: int) -> tuple[np.ndarray, np.ndarray]:
            drawn = corpus(rng, groups, kind)
            return np.bincount(drawn.documents, weights=values(drawn)), np.bincount(drawn.documents).astype(float)

        return draw

    return {
        "KL, log s.d. 0.5, equal": (of("equal", lambda c: c.kl(0.5)), 1.25, INF),
        "KL, log s.d. 1.5, equal": (of("equal", lambda c: c.kl(1.5)), 1.6, INF),
        "KL, log s.d. 1.5, lognormal": (of("lognormal", lambda c: c.kl(1.5)), 2.0, INF),
        "KL, log s.d. 1.5, a fail": (of("equal", lambda c: c.kl(1.5)), 0.7, INF),
        "flips at 0.03, equal": (of("equal", lambda c: 1 - c.agreement(0.97)), 0.05, 1.0),
    }


def planned(runs: int) -> None:
    """`plan` at a power of 0.9: the power that the gate then has, over pilots."""
    print("\n`plan` at power 0.9, the gate's power with as many fresh documents as it names.\n")
    print("| population | pilot | documents named (10 %, median, 90 %) | realised power | plans without an answer |")
    print("|---|---|---|---|---|")
    for name, (draw, limit, top) in populations().items():
        for pilot in (50, 200, 1000):
            rng = np.random.default_rng([pilot, len(name)])
            limits = Limits(None, limit)

            def decided(
                totals: np.ndarray, sizes: np.ndarray, wanted: str, limits: Limits = limits, top: float = top
            ) -> bool:
                sample = Sample(Series(totals, sizes=sizes), np.arange(len(sizes)), support=(0.0, top))
                return Guarded(sample, MEAN).verdict(limits, confidence=0.95) == wanted

            named, power, none = [], [], 0
            for turn in range(max(runs // 50, 8)):
                totals, sizes = draw(rng, pilot)
                wanted = "pass" if totals.sum() / sizes.sum() <= limit else "fail"
                count = documents_needed(
                    lambda drawn, t=totals, s=sizes, w=wanted: decided(t[drawn], s[drawn], w),
                    pilot=pilot,
                    power=0.9,
                    seed=turn,
                )
                if count is None or count > 20_000:
                    none += 1
                    continue
                named.append(count)
                truly = "fail" if limit < 1 and top == INF else "pass"
                power.append(np.mean([decided(*draw(rng, count), truly) for _ in range(40)]))
            low, middle, high = np.percentile(named, [10, 50, 90])
            cells = f"{low:.0f}, {middle:.0f}, {high:.0f} | {np.mean(power):.3f} | {none} of {len(named) + none}"
            print(f"| {name} | {pilot} | {cells} |", flush=True)


TABLES = {"rules": rules, "families": families, "sequential": sequential, "plan": planned}


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--only", choices=TABLES)
    parser.add_argument("--figure", choices=KINDS, help="one row of the first table alone, drawn anew")
    given = parser.parse_args()
    if given.figure:
        rules(given.runs, given.figure)
    for name, make in TABLES.items():
        if not given.figure and given.only in (None, name):
            make(given.runs)


if __name__ == "__main__":
    main()
