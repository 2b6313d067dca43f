"""A stored run, read back: whole, with a table that is possible and the summary of that table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from evalgate.errors import InputError, ScoreError, UsageError
from evalgate.metrics import check_table
from evalgate.stats.summarize import values
from evalgate.stats.supported import check_supported
from evalgate.store import runs

if TYPE_CHECKING:
    from evalgate.store.remote import Place
    from evalgate.store.runs import Run


def read_run(folder: Place) -> Run:
    """The run at a place. Digests show that a folder is as somebody wrote it; this also checks what was written.

    Raises:
        InputError: names the file that is missing, cut, altered or of another version; the column and row of the table
            that holds what it cannot; or the figure of the summary that the table does not give.
    """
    found = runs.read_run(folder)
    where = found.folder
    assert where is not None  # it was read from there
    summary, table = found.summary, where / runs.TOKENS
    try:
        check_table(found.table)
    except ScoreError as error:
        raise runs.FORMAT.broken(table, error.message) from None
    floor = summary.reference.noise_floor if summary.reference else None
    try:
        made = values(found.table, kind=summary.kind, noise_floor=floor)
    except (ScoreError, UsageError) as error:
        raise InputError(f"{table}: {error.message}", file=str(table)) from None
    try:
        check_supported(summary, made)
    except ScoreError as error:
        raise runs.FORMAT.broken(where / runs.SUMMARY, error.message) from None
    return found
