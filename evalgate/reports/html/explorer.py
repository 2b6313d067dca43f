"""The worst positions of a run, each in its text: what the explorer of the page reads, as one JSON value.

Positions are chosen for each candidate: those with the highest KL, those where the actual token's log-probability
differs most, and the worst few of each domain and class of token, so that no filter comes out empty. What surrounds
them is kept once for each stretch of a window, however many of them it holds. Texts, names and classes are stored once,
and rows refer to them by index, so that a report stays small whatever the run's size.

A window is shown as far as it was scored: the table does not hold other tokens (the first of a window, other roles of a
chat). Where one is left out between two that are shown, the stretch says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalgate.metrics import Scores
from evalgate.reports.html.subjects import Subject
from evalgate.stats.tokenclass import token_class

if TYPE_CHECKING:
    import pyarrow as pa

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MOST = 3000  # positions of all candidates together
LARGEST, FEWEST = 1200, 120  # positions of one candidate
OF_EACH = 8  # the worst of each domain and class
BEFORE, AFTER = 48, 16  # tokens around a position
DEEPEST = 1e-6  # what tints tell apart: smaller values look like none
_LONGEST_TEXT = 200  # characters of one token's text
_LONGEST_NAME = 200  # characters of a document's or domain's name


@dataclass(frozen=True)
class Badness:
    """How bad positions are. column: of the table, or "step" for the size of the change of the log-probability."""

    key: str
    label: str
    unit: str
    column: str
    bound: bool = False


_WAYS = (
    Badness("kl", "KL", "nats", "kl"),
    Badness("kl", "KL, at least", "nats", "kl_low", bound=True),
    Badness("regret", "regret", "nats", "regret"),
    Badness("regret", "regret, at least", "nats", "regret_low", bound=True),
    Badness("step", "change of log-probability", "nats", "step"),
    Badness("nll", "NLL", "nats", "cand_nll"),
)
_NUMBERS = ("ref_nll", "cand_nll", "ref_entropy", "cand_entropy", "regret", "tv")
_RANKS = ("ref_rank", "cand_rank", "ref_rank_of_cand_top1", "cand_rank_of_ref_top1")


def explorer(
    subjects: Sequence[Subject],
    token_texts: Mapping[int, str] | None,
    alternatives: pa.Table | None = None,
    *,
    most: int = MOST,
) -> dict[str, Any] | None:
    """What the page's script reads; None where no candidate has a column that says how bad a position is.

    alternatives: both sides' likeliest ids at the worst positions (columns candidate, window, position, and lists
    ref_top_ids, ref_top_logprobs, cand_top_ids, cand_top_logprobs).
    """
    way = next((w for w in _WAYS if subjects and all(_has(s.scores, w) for s in subjects)), None)
    if way is None:
        return None
    texts = token_texts or {}
    made = _Maker(way, texts)
    share = max(FEWEST, min(LARGEST, most // len(subjects)))
    for subject in subjects:
        made.add(subject, _worst(subject.scores, way, texts, share), _listed(alternatives, subject.scores.candidate))
    return made.document()


class _Maker:
    """Collects candidates' rows, with what they refer to."""

    def __init__(self, way: Badness, texts: Mapping[int, str]) -> None:
        self._way, self._texts = way, texts
        self._tokens = _Index()
        self._names = _Index()
        self._classes = _Index()
        self._candidates: list[dict[str, Any]] = []

    def add(self, subject: Subject, rows: Integers, lists: Mapping[tuple[int, int], tuple[Any, ...]]) -> None:
        """One candidate's rows [m] of its scores."""
        scores, way = subject.scores, self._way
        tokens = scores.integers("token")
        spans, place = _spans(scores, rows)
        bad = _values(scores, way)
        numbers = {name: _rounded(scores.floats(name)[rows]) for name in _NUMBERS if scores.complete(name)}
        ranks = {name: scores.integers(name)[rows].tolist() for name in _RANKS if scores.complete(name)}
        tops = {
            side: [self._token(t) for t in scores.integers(f"{side}_top1")[rows].tolist()]
            for side in ("ref", "cand")
            if scores.complete(f"{side}_top1")
        }
        self._candidates.append(
            {
                "name": subject.name,
                "spans": [self._span(scores, tokens, bad, first, last) for first, last in spans],
                "rows": [[int(s), int(at)] for s, at in place],
                "bad": _rounded(bad[rows]),
                "class": [self._classes.of(token_class(self._text(t))) if self._known(t) else -1 for t in tokens[rows]],
                "numbers": numbers,
                "ranks": ranks,
                "tops": tops,
                "lists": self._lists(scores, rows, lists),
                "positions": len(scores),
            }
        )

    def document(self) -> dict[str, Any]:
        """The whole."""
        texts = [self._texts.get(token) for token in self._tokens.keys]
        return {
            "bad": {"key": self._way.key, "label": self._way.label, "unit": self._way.unit, "bound": self._way.bound},
            "around": [BEFORE, AFTER],
            "tokens": [None if text is None else text[:_LONGEST_TEXT] for text in texts],
            "ids": self._tokens.keys,
            "names": [str(name)[:_LONGEST_NAME] for name in self._names.keys],
            "classes": self._classes.keys,
            "candidates": self._candidates,
        }

    def _span(self, scores: Scores, tokens: Integers, bad: Floats, first: int, last: int) -> dict[str, Any]:
        """Rows first to last (excluded) of one window."""
        positions = scores.position[first:last]
        found = {
            "w": int(scores.window[first]),
            "d": self._names.of(scores.documents[scores.document[first]]),
            "m": self._names.of(scores.domains[scores.domain[first]]),
            "p": int(positions[0]),
            "t": [self._token(t) for t in tokens[first:last].tolist()],
            # How bad each is, as 20 log10: two digits of it.
            "h": _heat(bad[first:last]).tolist(),
        }
        gaps = np.flatnonzero(np.diff(positions) != 1)
        if len(gaps):
            found["g"] = [[int(at) + 1, int(positions[at + 1] - positions[at] - 1)] for at in gaps]
        if scores.complete("bytes"):
            control = np.flatnonzero(scores.integers("bytes")[first:last] == 0)
            if len(control):
                found["c"] = control.tolist()
        return found

    def _lists(
        self, scores: Scores, rows: Integers, lists: Mapping[tuple[int, int], tuple[Any, ...]]
    ) -> list[list[Any] | None]:
        found: list[list[Any] | None] = []
        for row in rows.tolist():
            sides = lists.get((int(scores.window[row]), int(scores.position[row])))
            if sides is None:
                found.append(None)
                continue
            ref_ids, ref_logprobs, cand_ids, cand_logprobs = sides
            found.append(
                [
                    [self._token(t) for t in ref_ids],
                    [round(float(v), 4) for v in ref_logprobs],
                    [self._token(t) for t in cand_ids],
                    [round(float(v), 4) for v in cand_logprobs],
                ]
            )
        return found

    def _token(self, token: int) -> int:
        return self._tokens.of(int(token))

    def _known(self, token: int) -> bool:
        return int(token) in self._texts

    def _text(self, token: int) -> str:
        return self._texts[int(token)]


class _Index:
    """Numbers things by first appearance."""

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self._places: dict[Any, int] = {}

    def of(self, key: Any) -> int:
        place = self._places.setdefault(key, len(self.keys))
        if place == len(self.keys):
            self.keys.append(key)
        return place


def _has(scores: Scores, way: Badness) -> bool:
    names = ("ref_nll", "cand_nll") if way.column == "step" else (way.column,)
    return all(scores.complete(name) for name in names)


def _values(scores: Scores, way: Badness) -> Floats:
    """How bad each position is [n]; larger is worse."""
    if way.column == "step":
        return np.abs(scores.floats("cand_nll") - scores.floats("ref_nll"))
    return scores.floats(way.column)


def _worst(scores: Scores, way: Badness, texts: Mapping[int, str], most: int) -> Integers:
    """Rows [m] of the worst positions, worst first."""
    bad = _values(scores, way)
    extra = {"step"} if way.column != "step" and scores.complete("ref_nll") and scores.complete("cand_nll") else set()
    share = most // 6
    largest = (most - share) // (1 + len(extra))
    chosen = [_top(bad, largest)]
    if extra:
        chosen.append(_top(np.abs(scores.floats("cand_nll") - scores.floats("ref_nll")), largest))
    parts: list[Integers] = []
    codes: list[NDArray[np.int32] | Integers] = [scores.domain]
    if texts:
        codes.append(_classes(scores, texts))
    for one in codes:
        parts += [np.flatnonzero(one == code) for code in np.unique(one)]
    each = max(1, min(OF_EACH, share // max(len(parts), 1)))
    chosen += [rows[_top(bad[rows], each)] for rows in parts[:share]]
    rows = np.unique(np.concatenate(chosen))
    return np.asarray(rows[np.argsort(-bad[rows], kind="stable")], dtype=np.int64)


def _top(values: Floats, most: int) -> Integers:
    """Indices of the largest values, at most so many; of equal ones those that come first."""
    if len(values) > most:
        bound = np.partition(values, len(values) - most)[len(values) - most]
        above = np.flatnonzero(values > bound)
        level = np.flatnonzero(values == bound)[: most - len(above)]
        return np.concatenate([above, level]).astype(np.int64)
    return np.arange(len(values), dtype=np.int64)


def _classes(scores: Scores, texts: Mapping[int, str]) -> Integers:
    """A code of the class of each position's token [n]; -1 where its text is not known."""
    names = _Index()
    ids, inverse = np.unique(scores.integers("token"), return_inverse=True)
    codes = np.array([names.of(token_class(texts[i])) if i in texts else -1 for i in ids.tolist()], dtype=np.int64)
    return np.asarray(codes[inverse], dtype=np.int64)


def _spans(scores: Scores, rows: Integers) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Stretches of rows around the given ones, each within one window and none touching another; and of each given row
    its stretch and its place in it."""
    starts = scores.window_starts()
    window = np.searchsorted(starts, rows, side="right") - 1
    begins, ends = starts[window], np.append(starts[1:], len(scores))[window]
    spans: list[list[int]] = []
    owner: dict[int, int] = {}
    for at in np.argsort(rows).tolist():
        row = int(rows[at])
        first, last = max(row - BEFORE, int(begins[at])), min(row + AFTER + 1, int(ends[at]))
        if spans and first <= spans[-1][1] and spans[-1][2] == int(begins[at]):
            spans[-1][1] = max(spans[-1][1], last)
        else:
            spans.append([first, last, int(begins[at])])
        owner[row] = len(spans) - 1
    place = [(owner[row], row - spans[owner[row]][0]) for row in rows.tolist()]
    return [(first, last) for first, last, _ in spans], place


def _heat(bad: Floats) -> Integers:
    """20 log10 of how bad positions are, as whole numbers; -120 for DEEPEST and less."""
    return np.asarray(np.rint(20 * np.log10(np.maximum(bad, DEEPEST))), dtype=np.int64)


def _listed(alternatives: pa.Table | None, candidate: str) -> dict[tuple[int, int], tuple[Any, ...]]:
    """(window, position) -> the four lists of one candidate."""
    if alternatives is None:
        return {}
    names = ("window", "position", "ref_top_ids", "ref_top_logprobs", "cand_top_ids", "cand_top_logprobs")
    owners = alternatives.column("candidate").to_pylist()
    columns: Iterable[Sequence[Any]] = zip(*(alternatives.column(name).to_pylist() for name in names), strict=True)
    return {(row[0], row[1]): tuple(row[2:]) for owner, row in zip(owners, columns, strict=True) if owner == candidate}


def _rounded(values: Floats) -> list[float]:
    """Four significant digits."""
    return [float(f"{v:.4g}") for v in values.tolist()]
