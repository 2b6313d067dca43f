"""Scoring window by window: each side's answers are stored as they arrive, and paired when a window has all of them."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from evalgate.core import Window, counted
from evalgate.dialects.base import PositionScore, WindowScores
from evalgate.endpoints.answers import Answers
from evalgate.endpoints.budget import Purse, Spending
from evalgate.endpoints.constancy import check_named
from evalgate.endpoints.pool import Answered, Wanted, Work
from evalgate.endpoints.source import EndpointSource
from evalgate.errors import EvalgateError, UsageError
from evalgate.measure.alternatives import Likeliest, Worst, joined, stacked, with_lists, without_lists
from evalgate.measure.bounds import Columns, known_ids, pair_columns, side_columns, tv_width, wide_table
from evalgate.measure.contract import TableScores
from evalgate.measure.cutting import in_budget_order
from evalgate.measure.recordings import shown_mean
from evalgate.measure.request import Observer, RunRequest
from evalgate.measure.sides import Sides

if TYPE_CHECKING:
    import pyarrow as pa

_POLL = 0.5  # seconds between two looks at whether the user wants to stop
Advance = Callable[[Window, dict[str, float]], None]


class RecordedSide(Protocol):
    """A recorded reference. It is not asked; it says what the candidates are asked for, and reads their answers."""

    def wanted(self, window: Window, source: EndpointSource) -> Wanted:
        """Position -> the ids that the source is asked for besides its likeliest."""

    def columns(self, window: Window, source: EndpointSource, scores: WindowScores) -> Columns:
        """Wide columns of one window (evalgate.measure.bounds), `kl_low` among them."""

    def likeliest(self, window: Window) -> Likeliest:
        """The likeliest ids that are recorded at each scored position of a window."""


@dataclass(frozen=True)
class Measured:
    """A wide token-score table (evalgate.measure.bounds) of the windows that were answered, in window order.

    complete: no window was left out for the budget. requests: sent to endpoints in this process, for windows.
    alternatives: see `TableScores`.
    """

    table: pa.Table
    alternatives: pa.Table | None
    windows: int
    complete: bool
    requests: int
    notes: tuple[str, ...]


def ask_sides(
    request: RunRequest,
    sides: Sides,
    reference: str | None,
    windows: Sequence[Window],
    folder: Path,
    watch: Observer,
    *,
    recorded: RecordedSide | None = None,
    candidates: Sequence[str] | None = None,
) -> Measured:
    """The wide table of every window that all sides answer within the budget. Answers in `folder` are reused.

    reference: spec of the side that is the reference, None where there is none. recorded: a recorded one in its place.
    candidates: specs, None = all of the request's.
    Raises the errors of the dialects and of the endpoints; what was answered stays in `folder`.
    """
    scoring = Scoring(
        sides.sources,
        reference,
        list(dict.fromkeys(request.candidate_specs if candidates is None else candidates)),
        folder,
        Spending(request.budget),
        lambda window, means: watch.advance(windows=1, positions=len(window.positions), running=means),
        sides.failure,
        shown_mean(request).column,
        recorded,
    )
    return scoring.run(in_budget_order(request, windows))


def sides_scores(
    request: RunRequest,
    windows: Sequence[Window],
    measured: Measured,
    table: pa.Table,
    notes: Sequence[str],
    *,
    loaded_here: pa.Table | None = None,
) -> TableScores:
    """The scores of a run from its finished table; to the notes it adds what was not measured.

    loaded_here: alternatives of the candidates in the table that were not asked through a dialect.
    """
    answered = set(table.column("window").to_pylist())
    more = []
    if not measured.complete:
        more.append(f"the budget ended after {measured.windows} of {counted(len(windows), 'window')}, drawn at random")
    if request.noise_floor:
        more.append("the noise floor was not measured: an endpoint cannot be restarted or rebatched from here")
    return TableScores(
        windows=tuple(window for window in windows if window.index in answered),
        complete=measured.complete,
        notes=(*notes, *more),
        table=table,
        alternatives=joined([measured.alternatives, loaded_here], table),
    )


class Scoring:
    """The bookkeeping of one measurement: which sides each open window still waits for.

    folder: where answers are kept. advance: called for each finished window. failure: (spec, error) -> the error to
    show. recorded: the reference where it is no source, None = there is none.
    """

    def __init__(
        self,
        sources: Mapping[str, EndpointSource],
        reference: str | None,
        candidates: Sequence[str],
        folder: Path,
        spending: Spending,
        advance: Advance,
        failure: Callable[[str, BaseException], BaseException],
        shown: str,
        recorded: RecordedSide | None = None,
    ) -> None:
        self._by_spec = dict(sources)
        self._failure = failure
        self._reference = reference
        self._recorded = recorded
        self._candidates = list(candidates)
        self._specs = list(dict.fromkeys([*([reference] if reference else []), *candidates]))
        self._sources = [sources[spec] for spec in self._specs]
        self._stores = [Answers(folder / f"answers-{n}") for n in range(len(self._specs))]
        self._spending = spending
        self._advance = advance
        self._done: queue.SimpleQueue[Answered] = queue.SimpleQueue()
        self._open: dict[int, dict[int, WindowScores | None]] = {}  # None = the budget ended before the answer
        self._tables: dict[int, pa.Table] = {}
        self._widths: dict[int, tuple[float, int]] = {}  # k -> sum and count of TV intervals' widths
        self._first: dict[int, WindowScores] = {}  # source -> its first answer in this process
        self._mean = _RunningMean(shown)
        self._worst = Worst()

    def run(self, windows: Sequence[Window]) -> Measured:
        """Ask, store and pair until all windows are answered or the budget ends. Raises the first error of a side."""
        import pyarrow as pa

        by_index = {window.index: window for window in windows}
        todo = deque(windows)
        self._check_kept(windows)
        works = [Work(n, source, self._done) for n, source in enumerate(self._sources)]
        # One window more than the widest side can ask about at once, so that no side waits while windows are paired;
        # not all windows, so that a budget that ends strands few of them.
        ahead = max(work.capacity for work in works) + 1
        try:
            while True:
                while todo and len(self._open) < ahead and self._release(todo[0], works):
                    window = todo.popleft()
                    self._close_if_complete(window)
                if not self._open:
                    break
                answered = self._next()
                if answered.error is not None:
                    raise self._failure(self._specs[answered.source], answered.error)
                if answered.scores is not None:
                    source = self._sources[answered.source]
                    self._stores[answered.source].keep(answered.scores, source.named)
                    self._first.setdefault(answered.source, answered.scores)
                self._open[answered.window][answered.source] = answered.scores
                if not self._sources[answered.source].follows:
                    self._follow(by_index[answered.window], works)
                self._close_if_complete(by_index[answered.window])
        finally:
            for work in works:
                work.stop()
        for n, scores in self._first.items():
            self._check_again(n, by_index[scores.window], scores)
        if not self._tables:
            raise UsageError("--budget is too small for a single window: raise it, or sample with --positions")
        tables = [self._tables[index] for index in sorted(self._tables)]
        table = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
        lost = tuple(f"{url} stopped answering; the other URLs took over its windows" for w in works for url in w.lost)
        notes = (*lost, *self._width_note())
        whole = len(tables) == len(windows)
        return Measured(table, self._worst.of(table), len(tables), whole, self._spending.requests, notes)

    def _check_kept(self, windows: Sequence[Window]) -> None:
        """Check that the model which answers now gave the kept answers: ask the last of them again."""
        for n, (source, store) in enumerate(zip(self._sources, self._stores, strict=True)):
            kept = [(w, scores) for w in windows if (scores := store.get(w)) is not None]
            if kept:
                for window, _ in kept:
                    check_named(source.info.spec, store.named(window), source.named)
                self._check_again(n, *kept[-1])

    def _check_again(self, number: int, window: Window, before: WindowScores) -> None:
        """Raises EndpointError where a source answers otherwise than it did before."""
        try:
            self._sources[number].check_unchanged(window, before)
        except EvalgateError as error:
            raise self._failure(self._specs[number], error) from None

    def _width_note(self) -> tuple[str, ...]:
        """How the TV interval narrows with k, so that the reader can choose a larger one."""
        if not self._widths:
            return ()
        widths = ", ".join(f"{total / count:.2%} at k = {k}" for k, (total, count) in sorted(self._widths.items()))
        return (f"the TV interval has an average width of {widths}: a larger --top-k narrows it",)

    def _next(self) -> Answered:
        while True:
            try:
                return self._done.get(timeout=_POLL)
            except queue.Empty:
                continue

    def _release(self, window: Window, works: Sequence[Work]) -> bool:
        """Hand a window to every side that has not answered it yet; False where the budget does not allow it."""
        # The most that the window can cost is set aside before its first request: a window that only one side could
        # afford would be paid for and then left out.
        known = {n: scores for n, store in enumerate(self._stores) if (scores := store.get(window)) is not None}
        missing = [n for n in range(len(works)) if n not in known]
        asked = [n for n in missing if self._recorded is not None or not self._sources[n].follows]
        wanted = {n: self._recorded.wanted(window, self._sources[n]) if self._recorded else {} for n in asked}
        most = {n: self._sources[n].most_requests(window, wanted[n]) for n in asked if not self._sources[n].follows}
        if missing and not self._spending.begin(sum(most.values())):
            return False
        self._open[window.index] = dict(known)
        for n in asked:
            works[n].put(window, wanted[n], Purse(self._spending, most[n]) if n in most else None)
        self._follow(window, works)
        return True

    def _follow(self, window: Window, works: Sequence[Work]) -> None:
        """Once all other sides have answered, ask those that follow, for the ids that the others named too.

        A model loaded here gives any id's log-probability for nothing, so more ids are known on both sides, and the
        bounds are tighter, where it is asked last. Against a recording all ids are known from the start.
        """
        if self._recorded is not None:
            return
        answers = self._open[window.index]
        leaders = [n for n, source in enumerate(self._sources) if not source.follows]
        if any(n not in answers for n in leaders):
            return
        followers = [n for n, source in enumerate(self._sources) if source.follows and n not in answers]
        found = [scores for n in leaders if (scores := answers[n]) is not None]
        if len(found) < len(leaders):  # the window is left out
            answers.update(dict.fromkeys(followers))
            return
        wanted: dict[int, set[int]] = {}
        for scores in found:
            for row in scores.rows:
                wanted.setdefault(row.position, set()).update(known_ids(row))
        ids = {position: tuple(sorted(known)) for position, known in wanted.items()}
        for n in followers:
            works[n].put(window, ids)

    def _close_if_complete(self, window: Window) -> None:
        answers = self._open[window.index]
        if len(answers) < len(self._specs):
            return
        del self._open[window.index]
        whole = {n: scores for n, scores in answers.items() if scores is not None}
        if len(whole) < len(answers):  # left out: the same request with a larger budget asks what is missing
            return
        part = self._paired(window, whole)
        self._worst.add(part)
        table = self._tables[window.index] = without_lists(part)
        self._advance(window, self._mean.add(table))

    def _paired(self, window: Window, answers: Mapping[int, WindowScores]) -> pa.Table:
        """The wide table of one window, with the likeliest ids of both sides at its worst positions."""
        at = {spec: n for n, spec in enumerate(self._specs)}
        columns, listed = {}, []
        for spec in self._candidates:
            source = self._by_spec[spec]
            if self._recorded is not None:
                found = self._recorded.columns(window, source, answers[at[spec]])
            elif self._reference is None:
                found = side_columns(answers[at[spec]], "cand", by_id=source.by_id, excess=source.excess)
            else:
                ref = self._by_spec[self._reference]
                by_id = (ref.by_id, source.by_id)
                pair = (answers[at[self._reference]], answers[at[spec]])
                found = pair_columns(window, *pair, by_id=by_id, quanta=(ref.quantum, source.quantum))
                for k in {max(1, source.k // 4), max(1, source.k // 2), source.k}:
                    widths = [tv_width(a, b, k) for a, b in zip(pair[0].rows, pair[1].rows, strict=True)]
                    total, count = self._widths.get(k, (0.0, 0))
                    self._widths[k] = (total + sum(widths), count + len(widths))
            columns[source.info.name] = found
            listed.append(likeliest(answers[at[spec]]))
        if self._recorded is not None:
            reference: Likeliest | None = self._recorded.likeliest(window)
        else:
            reference = None if self._reference is None else likeliest(answers[at[self._reference]])
        sides = {"cand": stacked(listed), "ref": None if reference is None else stacked([reference] * len(listed))}
        return with_lists(wide_table(window, columns), sides)


def likeliest(scores: WindowScores) -> Likeliest:
    """The likeliest ids that an answer lists at each position; where it lists none, those that it was asked for."""

    def known(row: PositionScore) -> Mapping[int, float]:
        if row.top_ids:
            return dict(zip(row.top_ids, row.top_logprobs, strict=True))
        return {score.token: score.low for score in row.wanted if score.known}

    return Likeliest.of([known(row) for row in scores.rows])


class _RunningMean:
    """Mean of one column so far, by candidate, over the positions where it is known."""

    def __init__(self, column: str) -> None:
        self._column = column
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, table: pa.Table) -> dict[str, float]:
        names, values = table.column("candidate").to_pylist(), table.column(self._column).to_pylist()
        for name, value in zip(names, values, strict=True):
            if value is not None:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)
        return {name: total / count for name, (total, count) in self._sums.items()}
