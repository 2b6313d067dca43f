"""The noise floor from fabricated scorings: which conditions are tried, and what floor and excess they give."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from evalgate.core import Figure, Interval, Window
from evalgate.errors import ScoreError
from evalgate.measure import noise
from evalgate.stats.excess import excess
from evalgate.stats.summarize import summarize
from tests.evalgate.sample_run import token_table

WINDOWS = [
    Window(
        index=i,
        document=f"doc{i}",
        domain="prose",
        ids=tuple(range(31)),
        score_from=1,
        score_to=31,
        bytes_per_token=(4,) * 31,
    )
    for i in range(12)
]
TABLE = token_table(("a", "b"), documents=12)


def put(table, name, values):
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, pa.array(values).cast(field.type))


def column(table, name, candidate=None):
    if candidate is not None:
        table = table.filter(pa.compute.equal(table.column("candidate").cast("string"), candidate))
    return table.column(name).to_numpy().astype(np.float64)


class Asked:
    """Stands for the server: gives rows of TABLE, shifted, and keeps what it was asked."""

    def __init__(self, shift=0.0):
        self.calls = []
        self.shift = shift

    def __call__(self, reference, candidates, windows, apart):
        self.calls.append((reference, tuple(candidates), [w.index for w in windows], apart))
        table = token_table(tuple(candidates), documents=12, size=1e-5) if apart else TABLE
        table = table.filter(pa.compute.is_in(table.column("window"), pa.array([w.index for w in windows])))
        for side in ("ref_nll", "cand_nll"):
            table = put(table, side, table.column(side).to_numpy() + np.float32(self.shift))
        return table


def test_the_sample_is_an_eighth_spread_over_the_run():
    windows = WINDOWS * 20
    assert len(noise.sample(windows)) == 8
    assert [w.index for w in noise.sample(WINDOWS)] == [0, 6]
    assert noise.sample(WINDOWS[:1]) == WINDOWS[:1]
    assert len(noise.sample(WINDOWS * 4)) == 6


def test_the_sample_has_two_documents_of_every_domain_that_has_them():
    code = [replace(w, domain="code", index=12 + i, document=f"code{i // 2}") for i, w in enumerate(WINDOWS[:6])]
    one = [replace(WINDOWS[0], domain="chat", index=18, document="chat"), replace(WINDOWS[0], domain="chat", index=19)]
    found = noise.sample([*WINDOWS, *code, replace(one[0]), replace(one[1], document="chat")])
    documents = {domain: {w.document for w in found if w.domain == domain} for domain in ("prose", "code", "chat")}
    assert {domain: len(names) for domain, names in documents.items()} == {"prose": 2, "code": 2, "chat": 1}


def test_every_domain_has_its_own_floor():
    floors = noise.shapes(Asked(), ["a"], WINDOWS[:4])
    ours = TABLE.filter(pa.compute.equal(TABLE.column("candidate").cast("string"), "a"))
    ((_, overall, domains),) = summarize(ours, kind="kl", noise_floor=1e-6)
    found = noise.noise(
        floors, reference="ref", candidate="a", overall=overall, domains=domains, tie=1e-6, confidence=0.95
    )
    in_domain = np.array(floors[0].table.column("domain").cast("string").to_pylist())
    assert set(found.domains) == set(in_domain) == {"prose", "code"}
    for name, floor in found.domains.items():
        own = column(floors[0].table, "kl")[in_domain == name]
        assert floor["kl"]["mean"].value == pytest.approx(own.mean())
        assert floor["kl"]["mean"].value != found.figures["kl"]["mean"].value


def test_every_condition_is_tried_on_every_model():
    ask = Asked()
    part = noise.sample(WINDOWS)
    found = noise.shapes(ask, ["ref", "a", "ref"], part)
    assert ask.calls == [("ref", ("ref",), [6, 0], True), ("a", ("a",), [6, 0], True)]
    found += noise.again(noise.WARM, ask, "ref", ["a", "b"], part, TABLE)
    assert ask.calls[2] == ("ref", ("a", "b"), [6, 0], False)
    assert [(one.model, one.condition) for one in found[2:]] == [(m, noise.WARM) for m in ("ref", "a", "b")]


def made(shift, candidate="a"):
    ask, part = Asked(shift), noise.sample(WINDOWS)
    floors = noise.again(noise.RESTART, ask, "ref", ["a", "b"], part, TABLE)
    overall = next(o for name, o, _ in summarize(TABLE, kind="kl", noise_floor=1e-6) if name == candidate)
    found = noise.noise(
        floors, reference="ref", candidate=candidate, overall=overall, domains=[], tie=1e-6, confidence=0.95
    )
    return found, overall


def test_a_scoring_that_repeats_itself_has_a_floor_of_zero():
    found, overall = made(0.0)
    assert found.conditions == ["ref: after a restart", "a: after a restart"]
    assert (found.windows, found.positions) == (2, 60)
    assert found.figures["kl"]["mean"].value == 0
    assert found.figures["top1_agreement"]["mean"].value == 1
    assert found.figures["perplexity"]["ratio"].value == 1
    kl = overall.metrics["kl"].statistics["mean"]
    above = found.excess["kl"]["mean"]
    assert (above.value, above.high) == (kl.value, kl.high)
    floor = found.figures["kl"]["mean"]  # two documents that repeat to the bit do not say how far a third may be off
    assert (floor.low, floor.high, above.low) == (0.0, None, None)
    assert "mean" not in found.figures.get("nll", {})  # no difference between two models
    assert (
        found.excess["perplexity"].keys() == {"ratio", "log_ratio", "correlation"} & found.excess["perplexity"].keys()
    )


@pytest.mark.parametrize("shift", [0.01, -0.01])
def test_a_shifted_scoring_is_its_own_floor(shift):
    found, overall = made(shift)
    step = -shift
    assert found.figures["kl"]["mean"].value == pytest.approx(math.expm1(step) - step, rel=1e-3)
    assert found.figures["tv"]["mean"].value == pytest.approx(abs(math.expm1(step)) / 2, rel=1e-3)
    assert found.figures["nll"]["difference"].value == pytest.approx(0.01, rel=1e-3)
    assert found.figures["perplexity"]["ratio"].value == pytest.approx(math.exp(0.01), rel=1e-3)
    assert "regret" not in found.figures  # no distribution, no estimate
    assert all(found.figures[name].keys() == {"mean"} for name in ("kl", "reverse_kl", "js", "tv"))
    assert all(found.excess[name].keys() == {"mean"} for name in ("kl", "reverse_kl", "js", "tv"))
    kl = overall.metrics["kl"].statistics["mean"]
    floor = found.figures["kl"]["mean"]
    assert found.excess["kl"]["mean"].value == pytest.approx(kl.value - floor.value)
    assert found.excess["kl"]["mean"].high == pytest.approx(kl.high - floor.low)


def test_percentiles_come_from_whole_distributions():
    """Warm scores that are far off at every token move the mean's floor and leave the percentiles to the exact ones."""
    part = noise.sample(WINDOWS)
    floors = noise.shapes(Asked(), ["a"], part) + noise.again(noise.WARM, Asked(0.5), "ref", ["a"], part, TABLE)
    _, overall = made(0.0)
    found = noise.noise(floors, reference="ref", candidate="a", overall=overall, domains=[], tie=1e-6, confidence=0.95)
    exact = column(floors[0].table, "kl")
    assert found.figures["kl"]["p99"].value == pytest.approx(np.percentile(exact, 99))
    assert found.figures["kl"]["max"].value == pytest.approx(exact.max())
    assert found.figures["kl"]["mean"].value == pytest.approx(math.expm1(-0.5) + 0.5, rel=1e-3)


def test_the_worst_condition_counts():
    part = noise.sample(WINDOWS)
    floors = noise.shapes(Asked(), ["a"], part) + noise.again(noise.WARM, Asked(), "ref", ["a"], part, TABLE)
    _, overall = made(0.0)
    found = noise.noise(floors, reference="ref", candidate="a", overall=overall, domains=[], tie=1e-6, confidence=0.95)
    shapes = floors[0].table
    assert found.figures["kl"]["mean"].value == pytest.approx(column(shapes, "kl").mean())
    assert found.figures["top1_agreement"]["mean"].value == pytest.approx(
        (column(shapes, "ref_top1") == column(shapes, "cand_top1")).mean()
    )
    assert "regret" in found.figures


def test_other_positions_are_an_error():
    def ask(reference, candidates, windows, apart):
        return TABLE.slice(1)

    with pytest.raises(ScoreError, match="other positions"):
        noise.again(noise.WARM, ask, "ref", ["a"], WINDOWS[:2], TABLE)


def test_excess_subtracts_intervals_crosswise():
    def worse(figure, floor, better):
        one, two = (Figure(value, Interval(low, high)) for value, low, high in (figure, floor))
        found = excess(one, two, better)
        return found.value, found.low, found.high

    assert worse((5.0, 4.0, 6.0), (1.0, 0.5, 1.5), "lower") == (4.0, 2.5, 5.5)
    assert worse((0.9, 0.8, 0.95), (0.99, None, None), "higher") == pytest.approx((0.09, None, 0.2))
    assert worse((5.0, 4.0, 6.0), (1.0, None, None), "lower") == (4.0, None, 6.0)
    assert worse((-3.0, -4.0, -2.0), (-1.0, None, None), "zero") == (2.0, None, 4.0)
    assert worse((-3.0, -4.0, 1.0), (-1.0, -2.0, -0.5), "zero") == (2.0, -2.0, 3.5)
    assert worse((None, 1.0, None), (0.5, 0.25, 0.75), "lower") == (None, 0.25, None)


def test_the_block_shows_floor_and_excess():
    from evalgate.reports import terminal
    from tests.evalgate.sample_run import source, summary

    found, _ = made(0.01)
    document = summary(TABLE, reference=source("ref"))
    noted = [c.model_copy(update={"noise": found}) for c in document.comparisons]
    text = terminal.render(document.model_copy(update={"comparisons": noted}))
    part = text[text.index("Above the noise floor") :]
    line = next(line for line in part.splitlines() if line.startswith("Mean KLD"))
    assert "0.0000498" in line and line.endswith("]")
    assert "ref, a, each against itself (after a restart) on 2 windows, 60 positions" in " ".join(part.split())
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "Above the noise floor" not in terminal.render(document)
