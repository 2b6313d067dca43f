"""Runs, traces and texts on object stores and other machines, through fsspec: `s3://`, `gs://`, `hf://`, `memory://`.

Nothing is read or written in place. What is read is copied into the cache folder first, checked against its manifest
as it arrives, and read from there: the copy of a run or trace is named by its manifest, so an unchanged one is copied
once. What is written is whole on this machine before its first byte leaves it, and its manifest goes last: object
stores rename nothing, but a folder without a manifest is not a run, and a file that differs from it is refused. So a
place on an object store holds the old run, the new one, or none, and never a mixture that passes for either.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from evalgate.errors import InputError, UsageError
from evalgate.paths import cache_path
from evalgate.store.files import SCRATCH, replacing, replacing_folder
from evalgate.store.manifest import FileEntry, Format, digest, file_digest

MANIFEST = "manifest.json"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")  # two letters or more: C:// is a disk
_HERE = ("file", "local")
_WHOLE = "whole"  # in the folder of a copied text: all of it is there
_BLOCK = 16 << 20  # bytes


class Url(str):
    """A place that fsspec reaches, as the user wrote it, without a final slash."""

    __slots__ = ()

    def __truediv__(self, name: str) -> Url:
        return Url(f"{self}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.rsplit("/", 1)[-1]

    @property
    def suffix(self) -> str:
        """The last part's suffix, with its dot."""
        return Path(self.name).suffix

    @property
    def protocol(self) -> str:
        """What stands before `://`, in lower case."""
        return self.partition("://")[0].lower()


Place = Path | Url


def is_url(text: object) -> bool:
    """Whether a text names a place that fsspec reaches."""
    return isinstance(text, str) and _URL.match(text) is not None


def place(text: str) -> Place:
    """The place that a text names: a URL of a file on this machine is its path. Raises UsageError for an empty URL."""
    if not is_url(text):
        return Path(text)
    protocol, _, rest = text.partition("://")
    if not rest.strip("/") or rest.rstrip("/").rsplit("/", 1)[-1] in (".", ".."):
        raise UsageError(f"'{text}' names no place: write {protocol}://BUCKET/NAME", url=text)
    return Path(rest) if protocol.lower() in _HERE else Url(text.rstrip("/"))


def here(text: str) -> Path:
    """The path that a text names. Raises UsageError for a URL of another machine."""
    found = place(text)
    if isinstance(found, Url):
        raise UsageError(
            f"'{text}' is a URL, and this is read and written on this machine alone: give a path", url=text
        )
    return found


def local_copy(source: Place | str, format: Format) -> Path:
    """The folder of a run or trace on this machine: itself, or a copy of a URL's, every file as its manifest says.

    Raises UsageError where the protocol's package is missing; InputError for what is not there, may not be read, is not
    a folder of this format, or was cut or altered.
    """
    found = place(source) if isinstance(source, str) and not isinstance(source, Url) else source
    if not isinstance(found, Url):
        return found
    files, root = _opened(found)
    with _named(found, "read"):
        try:
            content = files.cat_file(f"{root}/{MANIFEST}")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            some = _listed(files, root)
            fault = f"{found} has no {MANIFEST}" if some else f"there is no {format.noun} {found}"
            said = "it was never written whole, or is something else" if some else format.wanted
            raise InputError(f"{fault}: {said}", url=str(found)) from None
    manifest = format.parse(content, found / MANIFEST)
    entries = format.entries(manifest)
    target = cache_path() / "remote" / digest(content)[:32] / found.name
    if not _has(target, entries):
        with _cache(target), replacing_folder(target) as filled:
            for name, entry in entries.items():
                _copy_file(files, f"{root}/{name}", filled / name, found / name)
                _check(filled / name, entry, found / name, format)
            (filled / MANIFEST).write_bytes(content)
    return target


def publish(folder: Path, url: Url, format: Format, *, wrote: str) -> None:
    """Copy a whole folder to a URL, the manifest last; what a folder of this format left there is removed.

    wrote: what is told of the place on this machine where the copy fails. Raises InputError, UsageError.
    """
    files, root = _opened(url)
    entries = format.entries(format.read(folder / MANIFEST))
    with _named(url, "write", wrote):
        with suppress(Exception):  # a store of objects has no folders, and some refuse to make one
            files.makedirs(root, exist_ok=True)
        before = _listed(files, root)
        if MANIFEST in before:  # from here on the place holds no run, until all of the new one is there
            files.rm_file(f"{root}/{MANIFEST}")
        for name, entry in entries.items():
            files.put_file(str(folder / name), f"{root}/{name}")
            files.invalidate_cache()
            size = files.size(f"{root}/{name}")
            if size != entry.size:
                raise OSError(f"{name} has {size} bytes there and {entry.size} here")
        for name in before - set(entries) - {MANIFEST}:
            files.rm_file(f"{root}/{name}")
        files.put_file(str(folder / MANIFEST), f"{root}/{MANIFEST}")
        files.invalidate_cache()


def publish_file(content: bytes | Path, url: Url) -> None:
    """Write one object. Raises InputError, UsageError."""
    files, root = _opened(url)
    with _named(url, "write"):
        if isinstance(content, bytes):
            files.pipe_file(root, content)
        else:
            files.put_file(str(content), root)


def check_url(url: Url, format: Format, *, own: Callable[[str], bool], overwrite: bool | None) -> None:
    """Refuse a URL that `publish` may not, or could not, write to: call it before measuring. Raises UsageError.

    own: whether a folder of this format may hold a file of that name. A place that holds such files and no manifest
    was left by a copy that failed, and is replaced with `overwrite` as a whole run is. overwrite: None = it cannot be
    replaced.
    """
    files, root = _opened(url)
    try:
        with _named(url, "read"):
            if files.isfile(root):
                raise UsageError(f"{url} is a file: give --out the name of a folder", url=str(url))
            found = _listed(files, root)
            manifest = files.cat_file(f"{root}/{MANIFEST}") if MANIFEST in found else b""
        with _named(url, "write"):
            probe = f"{root}/{SCRATCH[0]}{digest(url.encode())[:16]}{SCRATCH[1]}"
            with suppress(Exception):
                files.makedirs(root, exist_ok=True)
            files.pipe_file(probe, b"evalgate looks whether it may write here")
            files.rm_file(probe)
    except InputError as error:
        raise UsageError(error.message, **error.context) from None
    if manifest:
        try:
            ours = bool(format.parse(manifest, url / MANIFEST))
        except InputError:
            ours = f'"format": "{format.name}"'.encode() in manifest
    else:
        ours = all(own(name) for name in found)
    if found and not ours:
        raise UsageError(
            f"{url} holds something that is not a {format.noun} and is left alone: choose another --out", url=str(url)
        )
    if found and not overwrite:
        what = f"already holds a {format.noun}" if manifest else f"holds a part of a {format.noun}, whose copy failed"
        other = "" if overwrite is None else ", or replace it with --overwrite"
        raise UsageError(f"{url} {what}: choose another --out{other}", url=str(url))


def is_there(source: Place) -> bool:
    """Whether there is anything at a place. Raises InputError where a URL does not tell."""
    if not isinstance(source, Url):
        return os.path.lexists(source)
    files, root = _opened(source)
    with _named(source, "read"):
        return bool(files.exists(root))


def copied_text(url: Url) -> Path:
    """A file or folder of text on this machine, copied once as long as it does not change. Raises InputError.

    A folder's hidden files are left out, as they are where a folder is read.
    """
    files, root = _opened(url)
    with _named(url, "read"):
        info = files.info(root)
        if info["type"] == "file":
            found = {"": info}
        else:
            below = files.find(root, detail=True)
            found = {str(name)[len(root) :].strip("/"): facts for name, facts in below.items()}
            found = {name: facts for name, facts in found.items() if not re.search(r"(^|/)\.", name)}
            if not found:
                raise InputError(f"{url} holds no file: give a file, or a folder that holds some", url=str(url))
        facts = sorted((name, str(_version(one))) for name, one in found.items())
        key = hashlib.sha256(repr((str(url), facts)).encode()).hexdigest()[:32]
        place = cache_path() / "remote" / key
        target = place / url.name
        if not (place / _WHOLE).is_file():
            with _cache(target):
                for name in found:
                    path = target / name if name else target
                    if not path.resolve().is_relative_to(place.resolve()):  # an object may be called ../x
                        raise InputError(
                            f"{url} holds a file called {name!r}, which is no place below it", url=str(url)
                        )
                    path.parent.mkdir(parents=True, exist_ok=True)
                    _copy_file(files, f"{root}/{name}" if name else root, path, url / name if name else url)
                (place / _WHOLE).touch()
    return target


def staging(url: Url) -> Path:
    """The folder on this machine where what goes to a URL is written first, the same for the same URL."""
    return cache_path() / "outgoing" / digest(url.encode())[:32] / url.name


def unstage(url: Url) -> None:
    """Remove what `staging` holds: it was published."""
    shutil.rmtree(staging(url).parent, ignore_errors=True)


def _opened(url: Url) -> tuple[Any, str]:
    """The file system of a URL and the path in it. Raises UsageError where its package is missing or unknown."""
    from fsspec.core import url_to_fs
    from fsspec.registry import known_implementations as known
    from fsspec.registry import registry

    try:
        files, path = url_to_fs(str(url))
    except ImportError:
        entry = known.get(url.protocol, {})
        package = str(entry.get("class", "")).partition(".")[0]
        if package in ("", "fsspec"):
            said = str(entry.get("err", "")) or "install the package that provides it"
            raise UsageError(f"{url.protocol}:// needs a package that is not installed: {said}", url=str(url)) from None
        raise UsageError(
            f"{url.protocol}:// needs the package {package}: pip install {package}", url=str(url), package=package
        ) from None
    except ValueError as error:
        if url.protocol in known or url.protocol in registry:
            raise UsageError(f"{url} cannot be read as a URL ({_line(error)}): correct it", url=str(url)) from None
        raise UsageError(
            f"there is no protocol {url.protocol}://: use s3://, gs://, hf://, https:// or another that fsspec knows",
            url=str(url),
        ) from None
    except Exception as error:  # a protocol's package raises what it likes
        raise InputError(
            f"cannot reach {url} ({_line(error)}): check its address and your access", url=str(url)
        ) from error
    files.invalidate_cache()
    return files, str(path).rstrip("/")


@contextmanager
def _named(url: Url, verb: str, wrote: str = "") -> Iterator[None]:
    """Errors of a file system as one of ours that names the URL; packages of protocols raise what they like."""
    more = f"; {wrote}" if wrote else ""
    try:
        yield
    except (InputError, UsageError):
        raise
    except FileNotFoundError:
        raise InputError(f"there is nothing at {url}: check the address{more}", url=str(url)) from None
    except PermissionError as error:
        raise InputError(
            f"may not {verb} {url} ({_line(error)}): check your access to it{more}", url=str(url)
        ) from error
    except Exception as error:
        raise InputError(
            f"cannot {verb} {url} ({type(error).__name__}: {_line(error)}): check the address, your access and the "
            f"network{more}",
            url=str(url),
        ) from error


@contextmanager
def _cache(target: Path) -> Iterator[None]:
    """The parent of a copy, made; what the disk refuses is an error that names the cache folder."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if not isinstance(error.filename, str) or str(cache_path()) not in error.filename:
            raise
        raise InputError(f"cannot write {target} ({error.strerror or error}): make room in the cache folder") from error


def _listed(files: Any, root: str) -> set[str]:
    """Names in a folder; none where there is no folder."""
    try:
        return {str(name).rstrip("/").rsplit("/", 1)[-1] for name in files.ls(root, detail=False)} - {""}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _copy_file(files: Any, path: str, target: Path, url: Url) -> None:
    """Copy one file, a block at a time, whole or not at all."""
    with _named(url, "read"), files.open(path, "rb") as source, replacing(target) as file:
        shutil.copyfileobj(source, file, _BLOCK)


def _check(path: Path, entry: FileEntry, url: Url, format: Format) -> None:
    """Raise InputError where a copied file is not the one that the manifest lists."""
    size = path.stat().st_size
    if size != entry.size:
        raise format.broken(url, f"has {size} bytes where the manifest says {entry.size}")
    found = file_digest(path)
    if found != entry.sha256:
        raise format.broken(
            url, f"was altered: its SHA-256 is {found[:16]}.. and the manifest says {entry.sha256[:16]}.."
        )


def _has(folder: Path, entries: Mapping[str, FileEntry]) -> bool:
    """Whether a copy is there; readers check its digests."""
    try:
        return (folder / MANIFEST).is_file() and all((folder / n).stat().st_size == e.size for n, e in entries.items())
    except OSError:
        return False


def _version(facts: Mapping[str, Any]) -> list[object]:
    """What changes when a file does: whatever of these its file system tells."""
    names = (
        "size",
        "ETag",
        "etag",
        "md5Hash",
        "mtime",
        "LastModified",
        "last_modified",
        "created",
        "sha256",
        "blob_id",
    )
    return [str(facts[name]) for name in names if facts.get(name) is not None]


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
