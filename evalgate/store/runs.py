"""Run folders: a measurement on disk, written whole or not at all, and read back only if it is intact.

A folder holds `tokens.parquet` (the token-score table), `summary.json` and `manifest.json`. The manifest
names every input that changes a number and lists each file's bytes, rows and SHA-256; its own SHA-256
covers everything else in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evalgate.core import KEY_COLUMNS
from evalgate.errors import InputError, UsageError
from evalgate.store.documents import dump

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from evalgate.summary import Summary

FORMAT = "evalgate-run"
RUN_SCHEMA_VERSION = 1
MANIFEST, TOKENS, SUMMARY = "manifest.json", "tokens.parquet", "summary.json"
TEXTS = "token_texts.parquet"  # optional: the decoded text of every token id in the table
RESERVED = ("format", "schema_version", "files", "sha256")  # manifest keys that write_run sets


@dataclass(frozen=True)
class Run:
    """One measurement: its summary, its token-score table (core.table_schema), and its manifest.

    folder is None for a run that was never written. token_texts: decoded text by token id, None where it is not known.
    """

    summary: Summary
    table: pa.Table
    manifest: dict[str, Any]
    folder: Path | None = None
    token_texts: Mapping[int, str] | None = None

    @property
    def tokens(self) -> pd.DataFrame:
        """The token-score table as a data frame, one row per candidate and position."""
        frame: pd.DataFrame = self.table.to_pandas()
        return frame


def check_target(folder: Path, *, overwrite: bool = False) -> None:
    """Refuse a folder that `write_run` would refuse: call it before measuring.

    A missing or empty folder is free, where its parent can be written; a run folder of ours only with `overwrite`.
    Raises UsageError otherwise.
    """
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
    folder: Path,
    *,
    manifest: Mapping[str, Any],
    table: pa.Table,
    summary: Summary,
    token_texts: Mapping[int, str] | None = None,
    overwrite: bool = False,
) -> Run:
    """Write a run folder atomically: a temporary sibling is filled, synced to disk, then renamed.

    manifest: what the pipeline knows, without the RESERVED keys, which are set here.
    Raises UsageError where the folder may not be (re)placed, a key is reserved or the table has no key
    columns; InputError where the disk refuses; ScoreError for a non-finite figure.
    """
    folder = Path(folder)
    check_target(folder, overwrite=overwrite)
    _check_contents(manifest, table)
    texts = {SUMMARY: dump(summary.model_dump(mode="python"), name="summary")}
    try:
        place = folder.resolve()  # a link to a folder stays a link
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{place.name}.", suffix=".tmp", dir=place.parent) as scratch:
            filled = Path(scratch) / place.name
            filled.mkdir()
            _write_table(filled / TOKENS, table)
            if token_texts is not None:
                _write_texts(filled / TEXTS, token_texts)
            for name, text in texts.items():
                (filled / name).write_text(text, encoding="utf-8")
            complete = _sealed(manifest, filled, rows={TOKENS: table.num_rows})
            (filled / MANIFEST).write_text(dump(complete, name="manifest"), encoding="utf-8")
            _sync(filled)
            _move_into_place(filled, place, Path(scratch) / "replaced")
            _sync_folder(place.parent)
    except OSError as error:
        raise InputError(
            f"cannot write the run folder {folder}: {error.strerror or error}", folder=str(folder)
        ) from error
    return Run(summary=summary, table=table, manifest=complete, folder=folder, token_texts=token_texts)


def read_run(folder: Path) -> Run:
    """Read a run folder back, after checking every file against the manifest.

    Raises InputError naming the file that is missing, cut, altered or from an unknown schema version.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    for name, entry in manifest["files"].items():
        _check_file(folder / name, entry)
    return Run(
        summary=_read_summary(folder / SUMMARY),
        table=_read_table(folder / TOKENS, rows=manifest["files"][TOKENS]["rows"]),
        manifest=manifest,
        folder=folder,
        token_texts=_read_texts(folder / TEXTS) if TEXTS in manifest["files"] else None,
    )


def _exists(folder: Path) -> bool:
    try:
        return folder.is_symlink() or folder.exists()
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be a folder ({error.strerror or error}): choose another --out", folder=str(folder)
        ) from error


def check_place(out: Path, *, inside: bool = False) -> None:
    """Refuse a path that cannot be made: its nearest existing ancestor takes no new folder, which is tried.

    inside: files are made in `out` itself where it exists, and not beside it. Raises UsageError.
    """
    place = out.resolve()
    nearest = next(folder for folder in (*([place] if inside else []), *place.parents) if folder.exists())
    try:
        tempfile.TemporaryDirectory(prefix=".evalgate.", dir=nearest).cleanup()
    except OSError as error:
        raise UsageError(
            f"{out} cannot be made, for {nearest} is not a folder that can be written ({error.strerror or error}): "
            "choose another --out",
            folder=str(out),
        ) from error


def _check_contents(manifest: Mapping[str, Any], table: pa.Table) -> None:
    reserved = sorted(set(RESERVED) & set(manifest))
    if reserved:
        raise UsageError(f"the manifest may not set {', '.join(reserved)}: write_run does")
    missing = [name for name in KEY_COLUMNS if name not in table.column_names]
    if missing:
        raise UsageError(f"the token-score table lacks {', '.join(missing)}: build it by core.table_schema")


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
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=["token", "text"])
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, f"is not readable Parquet ({error})") from error
    return dict(zip(table.column("token").to_pylist(), table.column("text").to_pylist(), strict=True))


def _sealed(manifest: Mapping[str, Any], folder: Path, *, rows: Mapping[str, int]) -> dict[str, Any]:
    """The manifest with its file list and its own digest."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"bytes": path.stat().st_size, "sha256": _file_digest(path)}
        if path.name in rows:
            files[path.name]["rows"] = rows[path.name]
    complete = {"format": FORMAT, "schema_version": RUN_SCHEMA_VERSION, **manifest, "files": files}
    plain: dict[str, Any] = json.loads(dump(complete, name="manifest"))
    return {**plain, "sha256": _manifest_digest(plain)}


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # other systems have no handle to a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move_into_place(filled: Path, folder: Path, aside: Path) -> None:
    """Rename `filled` to `folder`; what was there is first moved aside, and comes back if the rename fails."""
    replaces = folder.exists() and any(folder.iterdir())
    if replaces:
        folder.rename(aside)
    elif folder.exists():
        folder.rmdir()
    try:
        filled.rename(folder)
    except BaseException:
        if replaces:
            shutil.move(aside, folder)
        raise


def _is_ours(folder: Path) -> bool:
    """Whether the folder holds a manifest of ours, of any version, intact or not beyond its first keys."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"{folder} is not a run folder, it has no {MANIFEST}: name a folder that an evalgate run wrote",
            file=str(path),
        ) from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", file=str(path)) from error
    except ValueError:
        raise _broken(path, "is not complete JSON") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise InputError(f"{path} is not the manifest of an evalgate run: name a run folder", file=str(path))
    version = manifest.get("schema_version")
    if version != RUN_SCHEMA_VERSION:
        raise _unknown_version(path, version, RUN_SCHEMA_VERSION)
    if manifest.get("sha256") != _manifest_digest(manifest):
        raise _broken(path, "was altered after the run")
    absent = [name for name in (TOKENS, SUMMARY) if name not in manifest["files"]]
    if absent:
        raise _broken(path, f"does not list {', '.join(absent)}")
    return manifest


def _check_file(path: Path, entry: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise _broken(path, "is missing")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise _broken(path, f"has {size} bytes where the manifest says {entry['bytes']}")
    if _file_digest(path) != entry["sha256"]:
        raise _broken(path, "was altered after the run")


def _read_table(path: Path, *, rows: int) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, f"is not readable Parquet ({error})") from error
    if table.num_rows != rows:
        raise _broken(path, f"has {table.num_rows} rows where the manifest says {rows}")
    return table


def _read_summary(path: Path) -> Summary:
    from pydantic import ValidationError

    from evalgate.summary import SCHEMA_VERSION, Summary

    document = json.loads(path.read_bytes())
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        raise _unknown_version(path, version, SCHEMA_VERSION)
    try:
        return Summary.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _broken(path, f"is not a summary ({where}: {first['msg']})") from error


def _unknown_version(path: Path, found: object, known: int) -> InputError:
    return InputError(
        f"{path} has schema version {found} and this evalgate reads version {known}: "
        "read it with the evalgate that wrote it, or measure again",
        file=str(path),
        schema_version=found,
    )


def _broken(path: Path, what: str) -> InputError:
    return InputError(f"{path} {what}: copy the run folder again, or measure again", file=str(path))
