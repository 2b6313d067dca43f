"""Readers of files with one document per row: JSON lines, CSV, TSV, Parquet. Each streams its rows.

Rows are named FILE:N. N is the line number in JSON lines, and the record number (from 1, without the header)
elsewhere.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from evalgate.core import Document, Skipped
from evalgate.corpora.rows import TEXT, needed_columns, row_document
from evalgate.errors import InputError

BOM = b"\xef\xbb\xbf"
BATCH_ROWS = 256
MAX_FIELD = min(sys.maxsize, 2**31 - 1)  # characters in a CSV field; the limit is a C long


def read_jsonl(path: Path, *, place: str, domain: str, text_column: str | None) -> Iterator[Document | Skipped]:
    """One document per line; blank lines are ignored, malformed ones skipped and named."""
    import orjson

    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            raw = (line.removeprefix(BOM) if number == 1 else line).strip()
            if not raw:
                continue
            spot = f"{place}:{number}"
            try:
                row = orjson.loads(raw)
            except orjson.JSONDecodeError:
                yield Skipped(spot, "not JSON" if _is_utf8(raw) else "not UTF-8")
                continue
            if isinstance(row, dict):
                yield row_document(row, place=spot, domain=domain, text_column=text_column)
            else:
                yield Skipped(spot, f"{type(row).__name__}, not an object")


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_csv(
    path: Path, *, place: str, domain: str, text_column: str | None, delimiter: str
) -> Iterator[Document | Skipped]:
    """One document per record, the header first; CRLF inside a quoted field is kept as it is.

    Raises InputError when the header lacks the text column or has it twice.
    """
    column = text_column or TEXT
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        records = _records(csv.reader(file, delimiter=delimiter, strict=True))
        header = next(records, None)
        if header is None:
            yield Skipped(place, "empty")
            return
        if isinstance(header, str):
            yield Skipped(place, f"malformed header ({header})")
            return
        needed_columns(header, column, place)
        if header.count(column) > 1:
            raise InputError(f"{place} has the column {column!r} more than once; rename one of them.", file=place)
        for number, record in enumerate(records, 1):
            spot = f"{place}:{number}"
            if isinstance(record, str):
                yield Skipped(spot, f"malformed row ({record})")
            elif len(record) != len(header):
                yield Skipped(spot, f"malformed row ({len(record)} fields, the header has {len(header)})")
            else:
                row = dict(zip(header, record, strict=True))
                yield row_document(row, place=spot, domain=domain, text_column=column)


def _records(reader: Iterator[list[str]]) -> Iterator[list[str] | str]:
    """Records that are not blank lines; a string is the parser's complaint about a malformed one."""
    while True:
        try:
            with _long_fields():
                record = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield str(error)
            continue
        if record:
            yield record


@contextmanager
def _long_fields() -> Iterator[None]:
    """The csv module's process-wide limit on a field (131,072 characters), lifted for one record."""
    before = csv.field_size_limit(MAX_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def read_parquet(path: Path, *, place: str, domain: str, text_column: str | None) -> Iterator[Document | Skipped]:
    """One document per row, read by batches of BATCH_ROWS.

    Raises InputError when the text column is not there.
    """
    import pyarrow as pa
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = list(file.schema_arrow.names)
            columns = needed_columns(names, text_column, place)
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                for index in range(batch.num_rows):
                    number += 1
                    spot = f"{place}:{number}"
                    try:
                        row = {name: batch.column(name)[index].as_py() for name in columns}
                    except UnicodeDecodeError:
                        yield Skipped(spot, "not UTF-8")
                        continue
                    yield row_document(row, place=spot, domain=domain, text_column=text_column)
    except pa.ArrowException as error:
        yield Skipped(place, f"not a readable Parquet file ({str(error).splitlines()[0]})")
