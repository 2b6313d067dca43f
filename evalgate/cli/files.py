"""Text files that a command leaves: there whole or not at all, also where the disk is full."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from evalgate.errors import InputError, UsageError

STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


def write_whole(path: Path, text: str) -> None:
    """Write UTF-8 beside the file, then put it in the file's place; a pipe or device is written to as it is.

    Raises InputError where it cannot be written; what was there before is then as it was.
    """
    try:
        if _in_place(path):
            _write(path, text)
            return
        place = Path(os.path.realpath(path))  # a link stays a link
        with tempfile.TemporaryDirectory(prefix=".evalgate.", dir=place.parent) as scratch:
            filled = Path(scratch) / "file"
            _write(filled, text)
            if place.exists():
                shutil.copymode(place, filled)
            _put(filled, place, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}", file=str(path)) from error


def check_writable(path: Path) -> None:
    """Refuse a file that `write_whole` could not write, before anything is measured. Raises UsageError."""
    parent = Path(os.path.realpath(path)).parent
    if not _in_place(path) and not parent.is_dir():
        raise UsageError(f"there is no folder for {path}: make it first", file=str(path))
    try:
        if not _in_place(path):
            tempfile.TemporaryDirectory(prefix=".evalgate.", dir=parent).cleanup()
        elif not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror or error}): name another file", file=str(path)
        ) from error


def _in_place(path: Path) -> bool:
    """Whether a path is a pipe, a device or an open stream, or a file in a folder that takes no other."""
    names = [os.path.abspath(path), *([os.readlink(path)] if path.is_symlink() else [])]  # noqa: PTH100, PTH115
    if any(name.startswith(STREAMS) for name in names):
        return True
    if not path.exists():
        return False
    return not path.is_file() or not os.access(Path(os.path.realpath(path)).parent, os.W_OK)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        if path.is_file():
            os.fsync(file.fileno())


def _put(filled: Path, place: Path, text: str) -> None:
    try:
        filled.replace(place)
    except OSError as error:
        if error.errno != errno.EBUSY:  # a file that is a mount of its own cannot be replaced
            raise
        _write(place, text)
