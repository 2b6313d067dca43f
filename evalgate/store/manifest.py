"""The manifest of a folder: what it holds, with the size and SHA-256 of every file and of the manifest itself.

    {"format", "schema_version", (what the folder is), "files": {NAME: {"bytes", "sha256", "rows"}}, "sha256"}

Runs and traces share it. The manifest's own digest covers everything else in it, and a manifest that is spelled in any
other way than `Format.sealed` does is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evalgate.errors import InputError, closest
from evalgate.store.documents import dump, parse

_LONGEST_NAME = 256  # bytes: more than that no file is called
RESERVED = ("format", "schema_version", "files", "sha256")  # keys that `Format.sealed` sets


@dataclass(frozen=True)
class FileEntry:
    """What the manifest says of one file. size: bytes. rows: of a table, None of another file."""

    size: int
    sha256: str
    rows: int | None = None

    @classmethod
    def of(cls, content: bytes, *, rows: int | None = None) -> FileEntry:
        """The entry of a file with this content."""
        return cls(len(content), digest(content), rows)

    @classmethod
    def of_file(cls, path: Path, *, rows: int | None = None) -> FileEntry:
        """The entry of a file on disk."""
        return cls(path.stat().st_size, file_digest(path), rows)

    def body(self) -> dict[str, Any]:
        """The entry as JSON values."""
        return {"bytes": self.size, "sha256": self.sha256} | ({} if self.rows is None else {"rows": self.rows})


@dataclass(frozen=True)
class Format:
    """A kind of folder.

    name, version: `format` and `schema_version` of its manifest. noun: what messages call the folder. wanted: what to
    name instead of a folder of another kind. anew: how to make one again.
    """

    name: str
    version: int
    noun: str
    wanted: str
    anew: str

    def sealed(self, body: Mapping[str, Any], files: Mapping[str, FileEntry]) -> bytes:
        """The manifest file. Raises ScoreError where a value is NaN or infinite."""
        complete = self._complete(body, files)
        return dump({**complete, "sha256": _own_digest(complete)}, name="manifest").encode()

    def checksum(self, body: Mapping[str, Any], files: Mapping[str, FileEntry]) -> str:
        """The manifest's own SHA-256."""
        return _own_digest(self._complete(body, files))

    def read(self, path: Path) -> dict[str, Any]:
        """The manifest at `path`.

        Raises InputError where it is missing, not JSON, of another format or version, altered, or without a file list.
        """
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            folder = path.parent
            fault = (
                f"{folder} has no {path.name} and so is not a {self.noun}"
                if folder.is_dir()
                else f"{folder} is a file and not a {self.noun}"
                if folder.exists()
                else f"there is no {self.noun} {folder}"
            )
            alike = _alike(folder) if folder.name and not folder.exists() else None
            wanted = self.wanted if alike is None else f"did you mean {alike}?"
            raise InputError(f"{fault}: {wanted}", file=str(path)) from None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}", file=str(path)) from error
        return self.parse(content, path)

    def parse(self, content: bytes, path: Path | str) -> dict[str, Any]:
        """As `read`, of content that was read already; `path`, or a URL, is for messages."""
        try:
            manifest = parse(content)
        except ValueError:
            raise self.broken(path, "is not complete JSON") from None
        if not isinstance(manifest, dict) or manifest.get("format") != self.name:
            raise InputError(f"{path} is not the manifest of a {self.noun}: {self.wanted}", file=str(path))
        if manifest.get("schema_version") != self.version:
            raise self.unknown_version(path, manifest.get("schema_version"), self.version)
        own = _own_digest(manifest)
        if manifest.get("sha256") != own:
            raise self.broken(path, f"was altered: its SHA-256 is {own[:16]}.. and it says {_short(manifest)}")
        if dump(manifest, name="manifest").encode() != content:
            raise self.broken(path, "was altered: it is not spelled as evalgate writes it")
        files = manifest.get("files")
        if not isinstance(files, dict) or not all(_is_entry(name, entry) for name, entry in files.items()):
            raise self.broken(path, "has no list of files")
        return manifest

    def entries(self, manifest: Mapping[str, Any]) -> dict[str, FileEntry]:
        """The listed files by name, of a manifest that `read` or `parse` returned."""
        files = manifest["files"].items()
        return {name: FileEntry(entry["bytes"], entry["sha256"], entry.get("rows")) for name, entry in files}

    def check(self, path: Path, entry: FileEntry) -> None:
        """Raise InputError where a listed file is missing, cut or altered."""
        self.check_size(path, entry)
        self._compare(path, file_digest(path), entry)

    def check_size(self, path: Path, entry: FileEntry) -> None:
        """Raise InputError where a listed file is missing or cut."""
        if not path.is_file():
            raise self.broken(path, "is missing")
        if path.stat().st_size != entry.size:
            raise self.broken(path, f"has {path.stat().st_size} bytes where the manifest says {entry.size}")

    def checked(self, path: Path, entry: FileEntry) -> bytes:
        """The content of a listed file. Raises InputError as `check`."""
        self.check_size(path, entry)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}", file=str(path)) from error
        self._compare(path, digest(content), entry)
        return content

    def broken(self, path: Path | str, what: str) -> InputError:
        """The error for a damaged file."""
        return InputError(f"{path} {what}: copy the {self.noun} again, or {self.anew}", file=str(path))

    def unknown_version(self, path: Path | str, found: object, known: int) -> InputError:
        """The error for a document of another schema version."""
        return InputError(
            f"{path} has schema version {found} and this evalgate reads version {known}: "
            f"read it with the evalgate that wrote it, or {self.anew}",
            file=str(path),
            schema_version=found,
        )

    def _complete(self, body: Mapping[str, Any], files: Mapping[str, FileEntry]) -> dict[str, Any]:
        listed = {name: entry.body() for name, entry in files.items()}
        complete = {"format": self.name, "schema_version": self.version, **body, "files": listed}
        plain: dict[str, Any] = json.loads(dump(complete, name="manifest"))
        return plain

    def _compare(self, path: Path, found: str, entry: FileEntry) -> None:
        if found != entry.sha256:
            what = f"was altered: its SHA-256 is {found[:16]}.. and the manifest says {entry.sha256[:16]}.."
            raise self.broken(path, what)


def digest(content: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(content).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_entry(name: str, entry: object) -> bool:
    """Whether this is what `FileEntry.body` makes, of a file in the folder itself."""
    if not isinstance(entry, dict) or set(entry) | {"rows"} != {"bytes", "sha256", "rows"}:
        return False
    counts = (entry["bytes"], entry.get("rows", 0))
    plain = name not in ("", ".", "..") and not set(name) & set("/\\\0") and len(name.encode()) < _LONGEST_NAME
    return plain and isinstance(entry["sha256"], str) and all(type(n) is int and n >= 0 for n in counts)


def _own_digest(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "sha256"}
    return digest(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def _short(manifest: Mapping[str, Any]) -> str:
    return f"{str(manifest.get('sha256', 'nothing'))[:16]}.."


def _alike(missing: Path) -> Path | None:
    """The folder beside a missing one whose name is most like its name; None where none is."""
    try:
        beside = [path.name for path in missing.parent.iterdir() if path.is_dir()]
    except OSError:
        return None
    found = closest(missing.name, beside)
    return None if found is None else missing.parent / found
