"""How evalgate writes: beside the place, synced to disk, then renamed, so that a file or folder is whole or absent.

Everything that stays on disk is written here: runs, partial runs, traces, logits files, reports and policies. What a
killed process left beside a place is removed by a later write into the same folder.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from evalgate.errors import InputError, UsageError

SCRATCH = (".evalgate.", ".tmp")  # first and last part of the name of what is not whole yet
ABANDONED = 3600.0  # seconds: scratch that nothing has touched for so long belongs to a process that was killed
STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")
REPLACED = "replaced"  # in a scratch folder: the folder that is about to be replaced


def write_file(path: Path, content: bytes | str) -> None:
    """Write a whole file; text as UTF-8.

    Raises InputError where it cannot be written; what was there before is then as it was.
    """
    try:
        remove_abandoned(Path(os.path.realpath(path)).parent)
        with replacing(path) as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}", file=str(path)) from error


def link_file(source: Path, path: Path) -> None:
    """Give a file a second name, or copy it where the two are on different disks. Raises OSError.

    A copy is whole or absent, as everything that is written here.
    """
    try:
        os.link(source, path)
        return
    except FileExistsError:
        raise
    except OSError:
        pass  # another disk, or one without links
    with source.open("rb") as read, replacing(path) as file:
        shutil.copyfileobj(read, file, 16 << 20)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to fill, which takes the place of `path` when the block ends and is discarded when it raises.

    A link stays a link, an existing file keeps its mode, and a pipe, a device or an open stream is written to directly.
    Raises OSError.
    """
    if _written_directly(path):
        with path.open("wb") as file:
            yield file
        return
    place = Path(os.path.realpath(path))
    scratch = _scratch(place.parent)
    try:
        with scratch.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if place.exists():
            shutil.copymode(place, scratch)
        _rename(scratch, place)
        _sync_folder(place.parent)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill, which takes the place of `folder` when the block ends and is discarded when it raises.

    A folder that is replaced comes back where the rename fails. A link stays a link. Raises OSError.
    """
    place = folder.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(place.parent)
    scratch = _scratch(place.parent)
    filled = scratch / "filled"
    filled.mkdir(parents=True)
    try:
        yield filled
        for path in filled.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _sync_folder(filled)
        _move_into_place(filled, place, aside=scratch / REPLACED)
        _sync_folder(place.parent)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Remove scratch files and folders that a killed process left in the folder.

    A scratch folder that holds a replaced folder stays: it may be the only copy.
    """
    oldest = time.time() - ABANDONED
    for path in folder.glob(f"{SCRATCH[0]}*{SCRATCH[1]}"):
        try:
            if path.stat().st_mtime >= oldest or (path / REPLACED).exists():
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError:  # removed meanwhile, or not ours to remove
            continue


def check_writable(path: Path) -> None:
    """Refuse a file that `write_file` could not write, before anything is measured. Raises UsageError."""
    parent = Path(os.path.realpath(path)).parent
    directly = _written_directly(path)
    if not directly and not parent.is_dir():
        raise UsageError(f"there is no folder for {path}: make it first", file=str(path))
    try:
        if not directly:
            _try_in(parent)
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror or error}): name another file", file=str(path)
        ) from error


def check_place(out: Path, *, inside: bool = False) -> None:
    """Refuse a path that cannot be made, by making something in its nearest existing ancestor. Raises UsageError.

    inside: files are made in `out` itself where it exists, and not beside it.
    """
    place = out.resolve()
    nearest = next(folder for folder in (*([place] if inside else []), *place.parents) if folder.exists())
    try:
        _try_in(nearest)
    except OSError as error:
        raise UsageError(
            f"{out} cannot be made, for {nearest} is not a folder that can be written ({error.strerror or error}): "
            "choose another --out",
            folder=str(out),
        ) from error


def _try_in(folder: Path) -> None:
    tempfile.TemporaryDirectory(prefix=SCRATCH[0], suffix=SCRATCH[1], dir=folder).cleanup()


def _scratch(folder: Path) -> Path:
    return folder / f"{SCRATCH[0]}{secrets.token_hex(8)}{SCRATCH[1]}"


def _written_directly(path: Path) -> bool:
    """Whether a path is a pipe, a device or an open stream, or a file in a folder that takes no other file."""
    names = [os.path.abspath(path), *([os.readlink(path)] if path.is_symlink() else [])]  # noqa: PTH100, PTH115
    if any(name.startswith(STREAMS) for name in names):
        return True
    if not path.exists():
        return False
    return not path.is_file() or not os.access(Path(os.path.realpath(path)).parent, os.W_OK)


def _rename(scratch: Path, place: Path) -> None:
    try:
        scratch.replace(place)
    except OSError as error:
        if error.errno != errno.EBUSY:  # a file that is a mount of its own cannot be replaced
            raise
        shutil.copyfile(scratch, place)


def _move_into_place(filled: Path, place: Path, *, aside: Path) -> None:
    replaces = place.exists() and any(place.iterdir())
    if replaces:
        place.rename(aside)
    elif place.exists():
        place.rmdir()
    try:
        filled.rename(place)
    except BaseException:
        if replaces:
            shutil.move(aside, place)
        raise


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # other systems have no handle to a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
