from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from evalgate.errors import ScoreError, UsageError
from evalgate.metrics import split_candidates
from evalgate.stats.clustered import clustered_mean
from evalgate.stats.slices import ENTROPY_EDGES, slice_metric
from evalgate.stats.tokenclass import CLASSES, token_class
from tests.evalgate.score_tables import columns, make_case, replaced, table

CASE = make_case(5, windows_per_document=(2, 1, 3, 2, 1, 1))
DATA = columns(CASE)
TABLE = table(DATA)
(SCORES,) = split_candidates(TABLE, noise_floor=0.0)
KL = np.array(DATA["kl"])
TEXTS = dict(enumerate([" the", "12", "foo_bar", ",", "\n", " мир", "don't", "{", "3.5", "camelCase", "é"]))


def expected(by: str) -> list[str]:
    if by == "domain":
        return CASE.domain
    if by == "document":
        return CASE.document
    if by == "position":
        bins = {"1": [1], "2-3": [2, 3], "4-7": range(4, 8), "8-15": range(8, 16)}
        return [next(name for name, inside in bins.items() if p in inside) for p in CASE.position]
    if by == "entropy":
        names = ["0-0.1", "0.1-0.5", "0.5-1", "1-2", "2-4"]
        return [
            next(f"{n} nats" for n, a, b in zip(names, ENTROPY_EDGES, ENTROPY_EDGES[1:], strict=False) if a <= h < b)
            for h in DATA["ref_entropy"]
        ]
    return [token_class(TEXTS[t]) for t in CASE.token]


@pytest.mark.parametrize("by", ["domain", "document", "position", "entropy", "token"])
def test_slices_are_the_positions_they_name(by):
    found = slice_metric(SCORES, "kl", by=by, token_texts=TEXTS)
    labels = np.array(expected(by))
    assert {s.name for s in found.slices} == set(labels)
    assert sum(s.figure.n for s in found.slices) == len(labels)
    assert sum(s.share for s in found.slices) == pytest.approx(1.0)
    for part in found.slices:
        rows = labels == part.name
        assert part.figure.value == pytest.approx(KL[rows].mean(), rel=1e-6)
        assert part.documents == len(set(np.array(CASE.document)[rows]))
        assert (part.figure.low is None) == (part.documents < 2)
        if by == "document":
            assert part.figure.low is None


def test_intervals_share_the_error_rate():
    found = slice_metric(SCORES, "kl", by="domain", confidence=0.9)
    assert [s.figure.interval.confidence for s in found.slices] == pytest.approx([0.95, 0.95])
    rows = np.array(CASE.domain) == "prose"
    alone = clustered_mean(SCORES.floats("kl")[rows], SCORES.document[rows], confidence=0.95)
    part = next(s for s in found.slices if s.name == "prose")
    assert part.figure.high == pytest.approx(alone.high)
    assert part.figure.low == pytest.approx(max(alone.low, 0.0))


def test_simultaneous_intervals_hold_together():
    rng = np.random.default_rng(8)
    together = apart = 0
    runs = 250
    for _ in range(runs):
        n = np.clip(np.exp(rng.normal(2.5, 0.5, 300)), 4, 60).astype(int)
        documents = np.repeat(np.arange(300), n)
        domain = documents % 5
        values = 1 + rng.normal(0, 0.5, 300)[documents] + rng.normal(0, 0.5, len(documents))
        scores = replace(
            SCORES,
            table=pa.table({"kl": pa.array(values, pa.float32())}),
            document=documents,
            documents=tuple(str(i) for i in range(300)),
            domain=domain,
            domains=tuple("abcde"),
            window=documents,
            position=np.ones(len(documents), dtype=np.int64),
        )
        for level, is_joint in ((0.95, True), (0.75, False)):
            # 0.75 over five parts is 0.95 for each alone.
            parts = slice_metric(scores, "kl", by="domain", confidence=level).slices
            held = all(p.figure.low <= 1 <= p.figure.high for p in parts)
            together, apart = together + (held and is_joint), apart + (held and not is_joint)
    assert 0.93 <= together / runs <= 0.99
    assert apart / runs < 0.87


@pytest.mark.parametrize("per_part", [5, 10])
def test_rare_flips_hold_together_in_small_parts(per_part):
    """Documents flip as a whole, one in fifty: most parts see none, and none of their intervals has no width."""
    rng = np.random.default_rng(per_part)
    documents = np.repeat(np.arange(5 * per_part), 10)
    runs, together = 150, 0
    for _ in range(runs):
        flips = np.repeat(rng.random(5 * per_part) < 0.02, 10)
        scores = replace(
            SCORES,
            table=pa.table(
                {
                    "ref_top1": pa.array(np.zeros(len(documents)), pa.int32()),
                    "cand_top1": pa.array(flips.astype(np.int32)),
                }
            ),
            document=documents,
            documents=tuple(str(i) for i in range(5 * per_part)),
            domain=documents % 5,
            domains=tuple("abcde"),
            window=documents,
            position=np.ones(len(documents), dtype=np.int64),
        )
        parts = slice_metric(scores, "top1_agreement", by="domain").slices
        assert all(p.figure.low < p.figure.high for p in parts)
        together += all(p.figure.low <= 0.98 <= p.figure.high for p in parts)
    assert together / runs >= 0.95


def test_a_part_of_one_long_document_has_an_interval_within_it():
    windows = np.repeat(np.arange(80), 5)
    scores = replace(
        SCORES,
        table=pa.table({"kl": pa.array(np.random.default_rng(0).lognormal(size=400), pa.float32())}),
        document=np.zeros(400, dtype=np.int64),
        documents=("book",),
        domain=np.zeros(400, dtype=np.int64),
        domains=("prose",),
        window=windows,
        position=np.tile(np.arange(1, 6), 80),
    )
    for by in ("domain", "document"):
        (part,) = slice_metric(scores, "kl", by=by).slices
        assert part.figure.interval.label == "within this text" and part.figure.interval.closed
        assert part.documents == 1


def test_window_metrics_and_bounded_metrics():
    found = slice_metric(SCORES, "greedy_match_length", by="domain")
    assert sum(s.figure.n for s in found.slices) == len(set(CASE.window))
    with pytest.raises(UsageError, match="one value per window"):
        slice_metric(SCORES, "greedy_match_length", by="token", token_texts=TEXTS)
    (bounded,) = split_candidates(replaced(TABLE, "kl", kl_low=DATA["kl"]))
    with pytest.raises(UsageError, match="use one of low"):
        slice_metric(bounded, "kl", by="domain")
    assert slice_metric(bounded, "kl", by="domain", series="low").slices[0].figure.value > 0


def test_bad_requests_are_refused():
    with pytest.raises(UsageError, match="token_texts"):
        slice_metric(SCORES, "kl", by="token")
    with pytest.raises(ScoreError, match="has no text"):
        slice_metric(SCORES, "kl", by="token", token_texts={0: "a"})
    with pytest.raises(UsageError, match="cannot cut by"):
        slice_metric(SCORES, "kl", by="colour")  # type: ignore[arg-type]
    (without,) = split_candidates(TABLE.drop_columns(["kl"]))
    with pytest.raises(UsageError, match="no scores for kl"):
        slice_metric(without, "kl", by="domain")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" the", "word"), ("don't", "word"), ("é", "word"), ("well-known", "word"), ("HTTP", "word"),
        ("12", "number"), (" 3.5", "number"), ("1,000", "number"), ("½", "number"),
        ("foo_bar", "code"), ("x1", "code"), ("getName", "code"), ("==", "code"), ("{", "code"), ("();", "code"),
        (",", "punctuation"), (" (", "punctuation"), ("...", "punctuation"), ("—", "punctuation"), ("€", "punctuation"),
        ("\n\n", "whitespace"), ("", "whitespace"), ("\u00a0", "whitespace"),
        ("мир", "other scripts"), ("日本", "other scripts"), ("\ufffd", "other scripts"),
    ],
)  # fmt: skip
def test_token_classes(text, kind):
    assert kind in CLASSES
    assert token_class(text) == kind
