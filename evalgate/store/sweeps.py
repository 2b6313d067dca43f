"""Sweep folders: the runs of several candidates against one reference, and what was made of them.

A folder holds `progress.json` (what the runs share, and which are done), `runs/NAME` (one run folder a candidate), and,
once the sweep is finished, `sweep.json` with its reports. An interrupted sweep is resumed from it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evalgate.errors import InputError, UsageError
from evalgate.leaderboard import SCHEMA_VERSION, Leaderboard
from evalgate.store.documents import dump, parse
from evalgate.store.files import check_place, write_file

DOCUMENT, PROGRESS, RUNS = "sweep.json", "progress.json", "runs"
_FORMAT = "evalgate-sweep"
_PLAIN = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST = 60  # characters of a run folder's name


class _Stored(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Done(_Stored):
    """One candidate that was measured. run: its folder, relative to the sweep's. files: how its files looked then."""

    run: str
    files: list[list[Any]]
    speed: float | None = None


class Progress(_Stored):
    """What the runs of a sweep share (`inputs`), and which candidates are done, by spec.

    context: tokens of a full window, fixed by the first measurement. seconds: of all measurements so far.
    """

    format: str = _FORMAT
    inputs: dict[str, Any]
    context: int | None = None
    done: dict[str, Done] = Field(default_factory=dict)
    seconds: float = 0.0


def read_progress(folder: Path) -> Progress | None:
    """What a folder says of its sweep; None where it holds none that can be read."""
    try:
        return Progress.model_validate(parse((folder / PROGRESS).read_bytes()))
    except (OSError, ValueError, ValidationError):
        return None


def write_progress(folder: Path, progress: Progress) -> None:
    """Write it, whole or not at all. Raises InputError where the disk refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}", folder=str(folder)) from error
    write_file(folder / PROGRESS, dump(progress.model_dump(), name="progress"))


def is_sweep(folder: Path) -> bool:
    """Whether a folder holds a sweep, finished or not."""
    try:
        return (folder / DOCUMENT).is_file() or (folder / PROGRESS).is_file()
    except (OSError, ValueError):  # may not be searched, or no name of a folder at all
        return False


def check_sweep_target(folder: Path, inputs: Mapping[str, Any], *, overwrite: bool) -> None:
    """Refuse a folder that a sweep with these inputs may not go into: call it before measuring. Raises UsageError.

    A missing or empty folder is free, a sweep of the same inputs is resumed, any other is replaced with `overwrite`.
    """
    if not folder.is_dir():
        if folder.exists():
            raise UsageError(f"{folder} is not a folder: give --out the name of a folder", folder=str(folder))
        check_place(folder)
        return
    if any(folder.iterdir()):
        if not is_sweep(folder):
            raise UsageError(
                f"{folder} holds something that is not a sweep and is left alone: choose another --out",
                folder=str(folder),
            )
        progress = read_progress(folder)
        if not overwrite and (progress is None or progress.inputs != dict(inputs)):
            changed = _changed(progress, inputs)
            raise UsageError(
                f"{folder} holds a sweep of {changed}: choose another --out, or replace it with --overwrite",
                folder=str(folder),
            )
    check_place(folder, inside=True)


def _changed(progress: Progress | None, inputs: Mapping[str, Any]) -> str:
    """What another sweep was of, as a phrase."""
    if progress is None:
        return "another version"
    names = [name for name, value in inputs.items() if progress.inputs.get(name) != value]
    return f"another {' and '.join(names) or 'kind'}"


def clear(folder: Path) -> None:
    """Remove a sweep's folder, so that it begins anew. Raises InputError where the disk refuses."""
    if not is_sweep(folder):
        return
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise InputError(f"cannot replace {folder}: {error.strerror or error}", folder=str(folder)) from error


def unfinished(root: Path, inputs: Mapping[str, Any]) -> Path | None:
    """The latest sweep below `root` with these inputs that was not finished; None where there is none."""
    found = []
    for file in root.glob(f"*/{PROGRESS}"):
        progress = read_progress(file.parent)
        if progress is not None and progress.inputs == dict(inputs) and not (file.parent / DOCUMENT).exists():
            found.append(file)
    return max(found, key=lambda file: file.stat().st_mtime).parent if found else None


def folder_names(names: Iterable[str], taken: Iterable[str] = ()) -> list[str]:
    """A name of a run folder for each candidate's name: plain characters, none twice, whatever the names hold."""
    used, found = {name.lower() for name in taken}, []
    for name in names:
        plain = _PLAIN.sub("-", name).strip("-.")[:_LONGEST].rstrip("-.") or "candidate"
        number, unique = 1, plain
        while unique.lower() in used:  # some file systems do not tell cases apart
            number += 1
            unique = f"{plain}-{number}"
        used.add(unique.lower())
        found.append(unique)
    return found


def read_sweep(folder: Path) -> Leaderboard:
    """The document of a finished sweep. Raises InputError where there is none, or it cannot be read."""
    path = Path(folder) / DOCUMENT
    if not path.is_file():
        if (Path(folder) / PROGRESS).is_file():
            raise InputError(f"the sweep in {folder} was not finished: run the same command again", folder=str(folder))
        raise InputError(f"{folder} is not a sweep: name a folder that `evalgate sweep` wrote", folder=str(folder))
    try:
        document = parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not JSON ({error}): measure again", file=str(path)) from None
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{path} has schema version {version} and this evalgate reads {SCHEMA_VERSION}: measure again",
            file=str(path),
        )
    try:
        return Leaderboard.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path} is not a sweep ({where}: {first['msg']}): measure again", file=str(path)) from None
