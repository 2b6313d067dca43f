"""Windows scored in batches, a little ahead of the reader, and kept so that an interrupted measurement can resume."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from evalgate.core import SourceInfo, Window
from evalgate.errors import InputError, ScoreError
from evalgate.metrics import check_table
from evalgate.store.alternatives import LIST_COLUMNS, check_lists
from evalgate.store.partial import PartialRun
from evalgate.table import TEXT_COLUMNS, key_columns

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

BATCH_TOKENS = 4096  # tokens of one request
IN_FLIGHT = 2  # requests at once: one is computed while the next one waits


@dataclass(frozen=True)
class Batch:
    """An answered batch: its windows, its table, and by candidate the mean so far."""

    windows: Sequence[Window]
    table: pa.Table
    running: dict[str, float]
    stop: int  # windows done so far, with this batch


class Pool(Protocol):
    """Servers that score many batches at once (evalgate.server.cluster)."""

    def answers(self, batches: Mapping[int, Sequence[Window]]) -> Generator[tuple[int, pa.Table], None, None]:
        """Number and table of every batch, in the order in which they are done."""


def score_batches(
    windows: Sequence[Window],
    ask: Callable[[Sequence[Window]], pa.Table],
    *,
    names: Sequence[str],
    running: Callable[[pa.Table], NDArray[np.float64]],
    partial: PartialRun,
    abandon: Callable[[], None],
    together: int = BATCH_TOKENS,
    pool: Pool | None = None,
) -> Generator[Batch, None, None]:
    """The answers to all windows in order, each kept in `partial`; those already there are not asked for again.

    ask: the table of some windows, candidate (`names`) after candidate, called from other threads. running: what
    the mean is of, a value a row. abandon: ends the requests under way, on failure. together: tokens of
    one request, at least a batch (`request_tokens`). pool: asked in the place of `ask`. The caller may stop early by
    closing the generator.

    Batches are cut by the windows alone, and given in their order, so that neither a pool nor its size changes a bit.
    """
    slices = list(requests(windows, together))
    known = partial.shards()
    mean = _RunningMean(running)
    schema: pa.Schema | None = None

    def believed(part: slice) -> bool:
        # A kept shard counts only where it ends as this batch does: another version may have cut batches otherwise.
        there = known.get(part.start)
        return there is not None and there[0] == part.stop and _believed(there[1], names, windows[part], running)

    def checked(part: slice, table: pa.Table) -> Batch:
        nonlocal schema
        if schema is not None and not table.schema.equals(schema):
            raise InputError(
                f"the answers kept in {partial.folder} are not of this run: measure again with --no-resume",
                folder=str(partial.folder),
            )
        schema = table.schema
        return Batch(windows[part], table, mean.add(table, names), part.stop)

    if pool is not None:
        missing = {number: part for number, part in enumerate(slices) if not believed(part)}
        with closing(pool.answers({number: windows[part] for number, part in missing.items()})) as answers:
            early: dict[int, pa.Table] = {}  # answered before their turn
            for number, part in enumerate(slices):
                while number in missing and number not in early:
                    found, table = next(answers)
                    partial.keep(missing[found].start, missing[found].stop, table)
                    early[found] = table
                yield checked(part, early.pop(number) if number in missing else known[part.start][1])
        return
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        futures: dict[int, Future[pa.Table]] = {}

        def send(number: int) -> None:
            if number >= len(slices):
                return
            if not believed(slices[number]):
                futures[number] = threads.submit(ask, windows[slices[number]])

        try:
            for number in range(min(IN_FLIGHT, len(slices))):
                send(number)
            for number, batch in enumerate(slices):
                if number in futures:
                    table = futures.pop(number).result()
                    partial.keep(batch.start, batch.stop, table)
                else:
                    table = known[batch.start][1]
                answered = checked(batch, table)
                send(number + IN_FLIGHT)
                yield answered
        except GeneratorExit:  # the caller has enough; the server stays up, for it may still be asked (noise floor)
            for future in futures.values():
                future.cancel()
            raise
        except BaseException:
            for future in futures.values():
                future.cancel()
            abandon()
            raise


def _believed(
    table: pa.Table,
    names: Sequence[str],
    windows: Sequence[Window],
    running: Callable[[pa.Table], NDArray[np.float64]],
) -> bool:
    """Whether a kept table is one of these windows, and possible: others may write into the cache folder."""
    lists = [name for name in LIST_COLUMNS if name in table.column_names]
    try:
        check_table(table.drop_columns(lists))
        if lists:
            check_lists(table)
        running(table)
    except (ScoreError, KeyError):  # KeyError: the column that progress shows is missing
        return False
    keys = key_columns(names, windows)
    same = all(table.column(name).combine_chunks().equals(keys[name]) for name in keys if name not in TEXT_COLUMNS)
    return same and all(table.column(name).to_pylist() == keys[name].to_pylist() for name in TEXT_COLUMNS)


def batches(windows: Sequence[Window]) -> Iterator[slice]:
    """Windows [start, stop) that fill one request."""
    start, tokens = 0, 0
    for number, window in enumerate(windows):
        if number > start and tokens + len(window.ids) > BATCH_TOKENS:
            yield slice(start, number)
            start, tokens = number, 0
        tokens += len(window.ids)
    if start < len(windows):
        yield slice(start, len(windows))


def request_tokens(sources: Iterable[SourceInfo]) -> int:
    """Tokens of one request to these sources: a batch, or what one pass over streamed weights takes."""
    passes = [int(info.extra["pass_tokens"]) for info in sources if "pass_tokens" in info.extra]
    return min(passes, default=BATCH_TOKENS)


def requests(windows: Sequence[Window], tokens: int) -> Iterator[slice]:
    """Whole batches that one request holds: as many as `tokens` allow, at least one.

    A model whose weights are streamed reads them once for each request, so that a request holds many batches.
    """
    start, stop, taken = 0, 0, 0
    for batch in batches(windows):
        size = sum(len(window.ids) for window in windows[batch])
        if taken and taken + size > tokens:
            yield slice(start, stop)
            start, taken = stop, 0
        stop, taken = batch.stop, taken + size
    if start < stop:
        yield slice(start, stop)


class _RunningMean:
    """Mean so far, by candidate, of what `values` reads off a table."""

    def __init__(self, values: Callable[[pa.Table], NDArray[np.float64]]) -> None:
        self._values = values
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(self, table: pa.Table, names: Sequence[str]) -> dict[str, float]:
        values = self._values(table)
        each = len(values) // len(names)
        for number, name in enumerate(names):
            self._sums[name] = self._sums.get(name, 0.0) + float(values[number * each : (number + 1) * each].sum())
        self._count += each
        return {name: total / self._count for name, total in self._sums.items()}
