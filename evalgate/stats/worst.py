"""The worst tokens of a run by one metric, each with the text before it and what both sides would rather have said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import exp
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from evalgate.core import Exactness
from evalgate.errors import UsageError
from evalgate.metrics import Metric, Scores, registry
from evalgate.stats.series.known import known_series
from evalgate.stats.slices import part_rows
from evalgate.store.alternatives import SIDES, rows_of

if TYPE_CHECKING:
    import pyarrow as pa

    from evalgate.store.runs import Run

Integers = NDArray[np.int64]

USUAL = ("kl", "regret", "delta_logprob", "nll")  # the first that a candidate has is what worst means by default


@dataclass(frozen=True)
class Token:
    """A token id with its decoded text, None where the run does not know it."""

    id: int
    text: str | None


@dataclass(frozen=True)
class Choice:
    """A token that a side could have picked. probability: in [0, 1], None where it is not known."""

    token: Token
    probability: float | None


@dataclass(frozen=True)
class WorstToken:
    """One position.

    value: of the metric. kl: nats, None where it is not known; a lower bound where `kl_bounded`. before: the scored
    tokens before it in its window, the last one next to it; None stands for tokens that were not scored. probability:
    side -> that of the actual token, for sides that are known. choices: side -> its likeliest tokens, the likeliest
    first; only the first where the run keeps no more.
    """

    domain: str
    document: str
    window: int
    position: int
    token: Token
    value: float
    kl: float | None
    kl_bounded: bool
    before: tuple[Token | None, ...]
    probability: dict[str, float]
    choices: dict[str, tuple[Choice, ...]]


@dataclass(frozen=True)
class WorstTokens:
    """The worst positions of one candidate, the worst first. positions: how many they were chosen from.

    series: which of the metric's values: `value`, or `low` where only bounds are known. reference: its spec, None
    without one. domain: None = all.
    """

    candidate: str
    reference: str | None
    metric: str
    unit: str
    series: str
    exactness: Exactness
    positions: int
    domain: str | None
    texts_known: bool
    tokens: tuple[WorstToken, ...]

    def document(self) -> dict[str, Any]:
        """The same as `diff --json` prints it."""
        return asdict(self)


def worst_tokens(
    run: Run,
    scores: Scores,
    *,
    metric: str | None = None,
    domain: str | None = None,
    limit: int = 10,
    context: int = 24,
    choices: int = 5,
) -> WorstTokens:
    """The `limit` worst positions of a candidate of the run.

    metric: by which, None = the first of USUAL that there is. domain: only there. context: most tokens before each.
    choices: most of each side's likeliest tokens.

    Raises:
        UsageError: an unknown metric or domain, or a metric that has no value of its own at a position.
        ScoreError: a bad value in a column that is needed.
    """
    known = known_series(scores, metric or _usual(scores))
    if known.series.rows is not None or known.series.sizes is not None:
        raise UsageError(f"{known.metric.name} has no value at a single token: choose another metric, such as nll")
    inside = None if domain is None else part_rows(scores, by="domain", name=domain)
    rows = _worst(_badness(known.metric, known.series.values), inside, limit)
    look = _Looked(run, scores, context=context, choices=choices)
    return WorstTokens(
        candidate=scores.candidate,
        reference=run.summary.reference.spec if run.summary.reference else None,
        metric=known.metric.name,
        unit=known.metric.unit,
        series=known.name,
        exactness=known.exactness,
        positions=len(scores) if inside is None else int(inside.sum()),
        domain=domain,
        texts_known=run.token_texts is not None,
        tokens=tuple(look.at(row, float(known.series.values[row])) for row in rows.tolist()),
    )


def _usual(scores: Scores) -> str:
    return next(name for name in USUAL if name == USUAL[-1] or registry()[name].exactness(scores) is not None)


def _badness(metric: Metric, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Higher is worse."""
    return {"lower": values, "higher": -values, "zero": np.abs(values)}[metric.better]


def _worst(badness: NDArray[np.float64], inside: NDArray[np.bool_] | None, limit: int) -> Integers:
    """The rows of the worst, the worst first; of equally bad ones the first in the text."""
    rows = np.arange(len(badness)) if inside is None else np.flatnonzero(inside)
    return rows[np.argsort(-badness[rows], kind="stable")[:limit]]


class _Looked:
    """Reads what a run knows of single positions."""

    def __init__(self, run: Run, scores: Scores, *, context: int, choices: int) -> None:
        self._scores = scores
        self._texts = run.token_texts or {}
        self._context, self._choices = context, choices
        self._tokens = scores.integers("token")
        self._listed, self._row_of = _alternatives(run, scores)

    def at(self, row: int, value: float) -> WorstToken:
        """The position of that row of the scores."""
        scores = self._scores
        kl = self._value("kl", row)
        bound = None if kl is not None else self._value("kl_low", row)
        return WorstToken(
            domain=scores.domains[scores.domain[row]],
            document=scores.documents[scores.document[row]],
            window=int(scores.window[row]),
            position=int(scores.position[row]),
            token=self._token(int(self._tokens[row])),
            value=value,
            kl=bound if kl is None else kl,
            kl_bounded=kl is None and bound is not None,
            before=self._before(row),
            probability=self._probabilities(row),
            choices={side: found for side in SIDES if (found := self._chosen(side, row))},
        )

    def _token(self, id: int) -> Token:
        return Token(id, self._texts.get(id))

    def _value(self, name: str, row: int) -> float | None:
        """A column's value there; None where there is no such column or value."""
        table = self._scores.table
        found = table.column(name)[row].as_py() if name in table.column_names else None
        return None if found is None else float(found)

    def _before(self, row: int) -> tuple[Token | None, ...]:
        """The scored tokens before a row in its window, None for each gap."""
        window, position = self._scores.window, self._scores.position
        found: list[Token | None] = []
        at = row
        while at > 0 and window[at - 1] == window[row] and row - at < self._context:
            if position[at] - position[at - 1] > 1:
                found.append(None)
            at -= 1
            found.append(self._token(int(self._tokens[at])))
        return tuple(reversed(found))

    def _probabilities(self, row: int) -> dict[str, float]:
        found = {side: self._value(f"{side}_nll", row) for side in SIDES}
        return {side: min(exp(-nll), 1.0) for side, nll in found.items() if nll is not None}

    def _chosen(self, side: str, row: int) -> tuple[Choice, ...]:
        """A side's likeliest tokens; its first choice alone where the run lists no more, nothing where it has none."""
        at = self._row_of.get(row)
        if at is not None and self._listed is not None:
            ids, logprobs = (self._listed.column(f"{side}_{name}")[at].as_py() for name in ("top_ids", "top_logprobs"))
            pairs = list(zip(ids, logprobs, strict=True))[: self._choices]
            if pairs:
                return tuple(Choice(self._token(id), min(exp(logprob), 1.0)) for id, logprob in pairs)
        first = self._value(f"{side}_top1", row)
        return () if first is None else (Choice(self._token(int(first)), None),)


def _alternatives(run: Run, scores: Scores) -> tuple[pa.Table | None, Mapping[int, int]]:
    """The run's lists, and of each row of the scores that has some which of theirs it is."""
    listed = run.alternatives_table
    if listed is None:
        return None, {}
    own = listed.filter(np.asarray(listed.column("candidate")) == scores.candidate)
    rows = rows_of(own, scores.table)
    return own, {int(row): at for at, row in enumerate(rows.tolist()) if row >= 0}
