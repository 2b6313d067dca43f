"""Run folders: a measurement on disk, written whole or not at all, and read back only if it is intact.

A folder holds `tokens.parquet` (the token-score table), `summary.json` and `manifest.json`, which also names every
input that changes a number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalgate.core import counted
from evalgate.errors import InputError, ScoreError, UsageError
from evalgate.printable import printable
from evalgate.store import alternatives
from evalgate.store.documents import dump, parse
from evalgate.store.files import check_place, replacing_folder
from evalgate.store.manifest import RESERVED, FileEntry, Format
from evalgate.store.parquet import read_parquet
from evalgate.store.remote import Place, Url, check_url, local_copy, publish, staging, unstage
from evalgate.table import KEY_COLUMNS

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from evalgate.summary import Summary

FORMAT = Format(
    "evalgate-run", 1, noun="run folder", wanted="name a folder that an evalgate run wrote", anew="measure again"
)
MANIFEST, TOKENS, SUMMARY = "manifest.json", "tokens.parquet", "summary.json"
_LONGEST = 500  # characters of a run's repr
TEXTS = "token_texts.parquet"  # optional: the decoded text of every token id in the table and in the alternatives
PAGE = "report.html"  # not listed: it can be made again at any time
ALTERNATIVES = "alternatives.parquet"  # optional: both sides' likeliest ids at the worst positions


@dataclass(frozen=True, repr=False)
class Run:
    """One measurement: its summary, its token-score table (evalgate.table), and its manifest.

    folder is None for a run that was never written; of a run at a URL it is the copy on this machine, and url where it
    is. token_texts: decoded text by token id, None where it is not known.
    alternatives_table: the likeliest ids of both sides at the worst positions of each candidate
    (evalgate.store.alternatives), None where none are known.
    """

    summary: Summary
    table: pa.Table
    manifest: dict[str, Any]
    folder: Path | None = None
    token_texts: Mapping[int, str] | None = None
    alternatives_table: pa.Table | None = None
    url: Url | None = None

    def __repr__(self) -> str:
        """Who was compared, and on how much; figures are in `summary`."""
        summary = self.summary
        names = ", ".join(comparison.candidate.spec for comparison in summary.comparisons)
        against = f" against {summary.reference.spec}" if summary.reference else ""
        where = "not written" if self.place is None else str(self.place)
        said = printable(f"Run: {summary.kind} of {names}{against}, {counted(self.table.num_rows, 'row')}, {where}")
        return said if len(said) <= _LONGEST else f"{said[: _LONGEST - 3]}..."

    @property
    def place(self) -> Place | None:
        """Where the run is, as people name it: its URL, else its folder."""
        return self.url or self.folder

    @property
    def tokens(self) -> pd.DataFrame:
        """The token-score table as a data frame, one row per candidate and position."""
        frame: pd.DataFrame = self.table.to_pandas()
        return frame

    @property
    def alternatives(self) -> pd.DataFrame | None:
        """Both sides' likeliest ids at the worst positions as a data frame, an array a list; None where not known."""
        return None if self.alternatives_table is None else self.alternatives_table.to_pandas()


OWN = frozenset({TOKENS, SUMMARY, TEXTS, ALTERNATIVES, PAGE})


def check_target(folder: Place, *, overwrite: bool = False) -> None:
    """Refuse a folder that `write_run` would refuse: call it before measuring.

    A missing or empty folder is free, where its parent can be written; a run folder of ours only with `overwrite`.
    A URL is treated alike, and is written to. Raises UsageError otherwise.
    """
    if isinstance(folder, Url):
        check_url(folder, FORMAT, own=OWN.__contains__, overwrite=overwrite)
        return
    if not _exists(folder):
        check_place(folder)
        return
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder: give --out the name of a folder", folder=str(folder))
    if not any(folder.iterdir()):
        check_place(folder)
        return
    if not _is_ours(folder):
        raise UsageError(
            f"{folder} holds something that is not an evalgate run and is left alone: choose another --out",
            folder=str(folder),
        )
    if not overwrite:
        raise UsageError(
            f"{folder} already holds a run: choose another --out, or replace it with --overwrite", folder=str(folder)
        )
    check_place(folder)


def write_run(
    folder: Place,
    *,
    manifest: Mapping[str, Any],
    table: pa.Table,
    summary: Summary,
    token_texts: Mapping[int, str] | None = None,
    alternatives_table: pa.Table | None = None,
    overwrite: bool = False,
) -> Run:
    """Write a run folder, whole or not at all. What goes to a URL is written here first (evalgate.store.remote).

    manifest: what the run knows, without the keys that `Format.sealed` sets.
    Raises UsageError where the folder may not be (re)placed, a key is reserved or the table has no key
    columns; InputError where the disk refuses; ScoreError for a non-finite figure, and for alternatives that the table
    does not bear out.
    """
    check_target(folder, overwrite=overwrite)
    if isinstance(folder, Url):
        here = write_run(
            staging(folder),
            manifest=manifest,
            table=table,
            summary=summary,
            token_texts=token_texts,
            alternatives_table=alternatives_table,
            overwrite=True,
        )
        publish(staging(folder), folder, FORMAT, wrote=f"the run is whole in {here.folder}: copy it from there")
        copy = local_copy(folder, FORMAT)
        unstage(folder)
        return replace(here, folder=copy, url=folder)
    _check_contents(manifest, table)
    if alternatives_table is not None:
        _check_alternatives(alternatives_table, table)
    text = dump(summary.model_dump(mode="python"), name="summary")
    try:
        with replacing_folder(folder) as filled:
            _write_table(filled / TOKENS, table)
            if token_texts is not None:
                _write_texts(filled / TEXTS, token_texts)
            if alternatives_table is not None:
                alternatives.write(filled / ALTERNATIVES, alternatives_table)
            (filled / SUMMARY).write_text(text, encoding="utf-8")
            rows = {TOKENS: table.num_rows}
            if alternatives_table is not None:
                rows[ALTERNATIVES] = alternatives_table.num_rows
            files = {p.name: FileEntry.of_file(p, rows=rows.get(p.name)) for p in sorted(filled.iterdir())}
            sealed = FORMAT.sealed(manifest, files)
            (filled / MANIFEST).write_bytes(sealed)
    except OSError as error:
        raise InputError(
            f"cannot write the run folder {folder}: {error.strerror or error}", folder=str(folder)
        ) from error
    return Run(
        summary=summary,
        table=table,
        manifest=json.loads(sealed),
        folder=folder,
        token_texts=token_texts,
        alternatives_table=alternatives_table,
    )


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run's manifest, of any version, intact or not."""
    return _is_ours(folder)


def read_summary(folder: Path) -> Summary:
    """The summary of a run folder alone, checked against the manifest; its table is not read.

    Raises InputError as `read_run`, for these two files.
    """
    entry = FORMAT.entries(_read_manifest(folder))[SUMMARY]
    FORMAT.check(folder / SUMMARY, entry)
    return _read_summary(folder / SUMMARY)


def read_run(place: Place) -> Run:
    """Read a run folder back, after checking every file against the manifest. That of a URL is copied here first.

    Raises InputError naming the file that is missing, cut, altered or from an unknown schema version.
    """
    folder = local_copy(place, FORMAT)
    manifest = _read_manifest(folder)
    entries = FORMAT.entries(manifest)
    for name, entry in entries.items():
        FORMAT.check(folder / name, entry)
    table = _read_table(folder / TOKENS, rows=entries[TOKENS].rows)
    listed = entries.get(ALTERNATIVES)
    return Run(
        summary=_read_summary(folder / SUMMARY),
        table=table,
        manifest=manifest,
        folder=folder,
        url=place if isinstance(place, Url) else None,
        token_texts=_read_texts(folder / TEXTS) if TEXTS in entries else None,
        alternatives_table=listed and _read_alternatives(folder / ALTERNATIVES, table, rows=listed.rows),
    )


def _exists(folder: Path) -> bool:
    try:
        return folder.is_symlink() or folder.exists()
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be a folder ({error.strerror or error}): choose another --out", folder=str(folder)
        ) from error


def _check_contents(manifest: Mapping[str, Any], table: pa.Table) -> None:
    reserved = sorted(set(RESERVED) & set(manifest))
    if reserved:
        raise UsageError(f"the manifest may not set {', '.join(reserved)}: write_run does")
    missing = [name for name in KEY_COLUMNS if name not in table.column_names]
    if missing:
        raise UsageError(f"the token-score table lacks {', '.join(missing)}: build it with evalgate.table.build")


def _check_alternatives(found: pa.Table, table: pa.Table) -> None:
    try:
        alternatives.check(found, table)
    except ScoreError as error:
        raise ScoreError(
            f"the table of alternatives {error.message}: measure again with --no-resume, and report it if it persists"
        ) from None


def _write_table(path: Path, table: pa.Table) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    strings = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
    pq.write_table(table, path, compression="zstd", use_dictionary=strings, use_byte_stream_split=floats)


def _write_texts(path: Path, texts: Mapping[int, str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids = sorted(texts)
    columns = {"token": pa.array(ids, pa.int32()), "text": pa.array([texts[i] for i in ids], pa.string())}
    pq.write_table(pa.table(columns), path, compression="zstd")


def _read_texts(path: Path) -> dict[int, str]:
    import pyarrow as pa

    table = _parquet(path)
    kinds = [(field.name, field.type) for field in table.schema]
    if kinds != [("token", pa.int32()), ("text", pa.string())] or any(column.null_count for column in table.columns):
        raise FORMAT.broken(path, "is not a table of token ids and their texts")
    return dict(zip(table.column("token").to_pylist(), table.column("text").to_pylist(), strict=True))


def _parquet(path: Path) -> pa.Table:
    try:
        return read_parquet(path)
    except ValueError as error:
        raise FORMAT.broken(path, str(error)) from error


def _is_ours(folder: Path) -> bool:
    """Whether the folder holds a run's manifest, of any version, intact or not."""
    try:
        manifest = parse((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT.name


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    manifest = FORMAT.read(path)
    absent = [name for name in (TOKENS, SUMMARY) if name not in manifest["files"]]
    if absent:
        raise FORMAT.broken(path, f"does not list {', '.join(absent)}")
    return manifest


def _read_table(path: Path, *, rows: int | None) -> pa.Table:
    table = _parquet(path)
    if table.num_rows != rows:
        raise FORMAT.broken(path, f"has {counted(table.num_rows, 'row')} where the manifest says {rows}")
    return table


def _read_alternatives(path: Path, table: pa.Table, *, rows: int | None) -> pa.Table:
    found = _read_table(path, rows=rows)
    try:
        alternatives.check(found, table)
    except ScoreError as error:
        raise FORMAT.broken(path, error.message) from None
    return found


def _read_summary(path: Path) -> Summary:
    from pydantic import ValidationError

    from evalgate.summary import SCHEMA_VERSION, Summary

    try:
        document = parse(path.read_bytes())
    except ValueError as error:
        raise FORMAT.broken(path, f"is not JSON ({error})") from None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise FORMAT.unknown_version(path, version, SCHEMA_VERSION)
    try:
        return Summary.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FORMAT.broken(path, f"is not a summary ({where}: {first['msg']})") from error
