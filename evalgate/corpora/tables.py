"""Readers of files with one document per row: JSON, JSON lines, CSV, TSV, Parquet, Arrow.

Rows are named FILE:N. N is the line number in JSON lines, and the record number (from 1, without the header)
elsewhere. What is lost of a CSV or TSV file is named with its lines.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from evalgate.core import Document, Skipped
from evalgate.corpora.containers import opened
from evalgate.corpora.rows import TEXT, needed_columns, row_document
from evalgate.errors import InputError

BOM = b"\xef\xbb\xbf"
BATCH_ROWS = 256
MAX_FIELD = min(sys.maxsize, 2**31 - 1)  # characters in a CSV field; the limit is a C long

Items = Iterator[Document | Skipped]


def read_json(path: Path, *, place: str, domain: str, text_column: str | None) -> Items:
    """The rows of a JSON array, a JSON object that is one row, or JSON lines under another name.

    Anything else in JSON is skipped and named: its syntax is never read as prose.
    """
    with opened(path) as file:
        raw = file.read().removeprefix(BOM)
    try:
        value = _parsed(raw)
    except _NotJson as problem:
        lines = raw.split(b"\n")
        first = next((line for line in lines if line.strip()), b"")
        if len(lines) > 1 and first.lstrip().startswith(b"{") and _is_json(first):
            yield from _json_lines(lines, place, domain, text_column)
        else:
            yield Skipped(place, str(problem) or "empty")
        return
    if isinstance(value, list):
        for number, row in enumerate(value, 1):
            yield _row(row, f"{place}:{number}", domain, text_column)
    elif isinstance(value, dict):
        made = _row(value, place, domain, text_column)
        if isinstance(made, Skipped):
            made = Skipped(place, f"a JSON object that is no row ({made.reason}): give an array of rows, or JSON lines")
        yield made
    else:
        yield Skipped(place, f"JSON that holds {type(value).__name__} and no rows")


def read_jsonl(path: Path, *, place: str, domain: str, text_column: str | None) -> Items:
    """One document per line; blank lines are ignored, malformed ones skipped and named."""
    with opened(path) as file:
        yield from _json_lines(file, place, domain, text_column)


def _json_lines(lines: Iterable[bytes], place: str, domain: str, text_column: str | None) -> Items:
    for number, line in enumerate(lines, 1):
        raw = (line.removeprefix(BOM) if number == 1 else line).strip()
        if not raw:
            continue
        spot = f"{place}:{number}"
        try:
            yield _row(_parsed(raw), spot, domain, text_column)
        except _NotJson as problem:
            yield Skipped(spot, str(problem))


def _row(row: object, spot: str, domain: str, text_column: str | None) -> Document | Skipped:
    if isinstance(row, dict):
        return row_document(row, place=spot, domain=domain, text_column=text_column)
    return Skipped(spot, f"{type(row).__name__}, not an object")


class _NotJson(Exception):
    """Why bytes are not JSON."""


def _parsed(raw: bytes) -> Any:
    """The JSON value. Python's NaN and Infinity are taken, for the fields that hold them need not be the text."""
    import orjson

    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise _NotJson("not UTF-8") from None
        if "NaN" not in text and "Infinity" not in text:
            raise _NotJson("not JSON") from error
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()  # orjson refuses lone surrogates, and so do we
    except (ValueError, RecursionError):
        raise _NotJson("not JSON") from None
    return value


def _is_json(raw: bytes) -> bool:
    try:
        _parsed(raw)
    except _NotJson:
        return False
    return True


class _Record(NamedTuple):
    """A record of a CSV or TSV file with its lines, from 1, the last one included; or what is wrong with it."""

    fields: list[str]
    problem: str
    first: int
    last: int

    @property
    def lines(self) -> str:
        if self.first == self.last:
            return f"line {self.first}"
        return f"lines {self.first} to {self.last}, {self.last - self.first + 1} in all"


def read_csv(path: Path, *, place: str, domain: str, text_column: str | None) -> Items:
    """One document per record, the header first; CRLF inside a quoted field is kept as it is.

    Raises InputError when the header lacks the text column or has it twice.
    """
    with opened(path) as file:
        yield from _separated(file, place, domain, text_column, delimiter=",", quoting=csv.QUOTE_MINIMAL)


def read_tsv(path: Path, *, place: str, domain: str, text_column: str | None) -> Items:
    """One document per line, the header first. Quotes are characters: a field cannot hold a tab or a line end.

    Raises as `read_csv`.
    """
    with opened(path) as file:
        yield from _separated(file, place, domain, text_column, delimiter="\t", quoting=csv.QUOTE_NONE)


def _separated(
    file: BinaryIO, place: str, domain: str, text_column: str | None, *, delimiter: str, quoting: Any
) -> Items:
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        records = _records(csv.reader(text, delimiter=delimiter, quoting=quoting, strict=True))
        yield from _table_rows(records, place, domain, text_column or TEXT)


def _table_rows(records: Iterator[_Record], place: str, domain: str, column: str) -> Items:
    header = next(records, None)
    if header is None:
        yield Skipped(place, "empty")
        return
    if header.problem:
        yield Skipped(place, f"malformed header ({header.problem})")
        return
    needed_columns(header.fields, column, place)
    if header.fields.count(column) > 1:
        raise InputError(f"{place} has the column {column!r} more than once; rename one of them.", file=place)
    for number, record in enumerate(records, 1):
        spot = f"{place}:{number}"
        if record.problem:
            yield Skipped(spot, f"malformed row ({record.problem}), {record.lines}")
        elif len(record.fields) != len(header.fields):
            counts = f"{len(record.fields)} fields, the header has {len(header.fields)}"
            yield Skipped(spot, f"malformed row ({counts}), {record.lines}")
        else:
            row = dict(zip(header.fields, record.fields, strict=True))
            yield row_document(row, place=spot, domain=domain, text_column=column)


def _records(reader: Any) -> Iterator[_Record]:
    """Every record that is not a blank line, malformed ones too."""
    while True:
        first, fields, problem = reader.line_num + 1, [], ""
        try:
            with _long_fields():
                fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            problem = str(error)
        if fields or problem:
            yield _Record(fields, problem, first, max(first, reader.line_num))


@contextmanager
def _long_fields() -> Iterator[None]:
    """The csv module's process-wide limit on a field (131,072 characters), lifted for one record."""
    before = csv.field_size_limit(MAX_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def read_parquet(path: Path, *, place: str, domain: str, text_column: str | None) -> Items:
    """One document per row, read by batches of BATCH_ROWS.

    Raises InputError when the text column is not there.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = needed_columns(list(file.schema_arrow.names), text_column, place)
            batches = file.iter_batches(batch_size=BATCH_ROWS, columns=columns)
            yield from _batches(batches, columns, place, domain, text_column)
    except pa.ArrowException as error:
        yield Skipped(place, f"not a readable Parquet file ({str(error).splitlines()[0]})")


def read_arrow(path: Path, *, place: str, domain: str, text_column: str | None) -> Items:
    """One document per row of an Arrow IPC stream or file.

    Raises InputError when the text column is not there.
    """
    import pyarrow as pa

    try:
        with opened(path) as raw:
            table = _arrow_table(pa.py_buffer(raw.read()))
        columns = needed_columns(table.column_names, text_column, place)
        batches = table.select(columns).to_batches(max_chunksize=BATCH_ROWS)
        yield from _batches(batches, columns, place, domain, text_column)
    except pa.ArrowException as error:
        yield Skipped(place, f"not a readable Arrow file ({str(error).splitlines()[0]})")


def _arrow_table(data: Any) -> Any:
    import pyarrow as pa

    try:
        return pa.ipc.open_file(data).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_stream(data).read_all()


def _batches(batches: Iterable[Any], columns: list[str], place: str, domain: str, text_column: str | None) -> Items:
    number = 0
    for batch in batches:
        for index in range(batch.num_rows):
            number += 1
            spot = f"{place}:{number}"
            try:
                row = {name: batch.column(name)[index].as_py() for name in columns}
            except UnicodeDecodeError:
                yield Skipped(spot, "not UTF-8")
                continue
            yield row_document(row, place=spot, domain=domain, text_column=text_column)
